"""This module reads the numbers that a program prints about its progress: PROFILES has the programs whose lines it knows.

Pure. A group of a pattern has the name of a field of Metrics, or of a part from which _read_line() computes one. All patterns
are searched in a line; of several values of one number the last one counts. `plain` has what any program may print: `step=12`,
`global step 12`, `Iter: [12/100]`, `epoch=3`, `loss: 0.5`, `lr=1e-4`, `1200 tokens/s`. The others have what is different there.

The text of a program is not trusted: each repetition in a pattern has a limit, and so has each number.
"""

from __future__ import annotations

import re
from functools import partial
from itertools import chain
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Tuple

from clustertool.model import field_types as fields
from clustertool.model.shape import Annotated, number

_IS = r"""['"]?\s{0,20}[=:#]?\s{0,20}['"\[(]{0,2}\s{0,20}"""  # between a name and its value
_FLOAT = r"[-+]?(?:\d{1,15}(?:\.\d{0,20})?(?:e[-+]?\d{1,3})?|nan|inf(?:inity)?)(?!\.?\w)"
_SCALES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9}
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_KINDS = {"tok": "tokens_per_second", "tps": "tokens_per_second"}
_KINDS.update(dict.fromkeys(("sam", "exa", "ima", "img"), "samples_per_second"))
_LARGEST = 1e18
_CODES = re.compile(r"\x1b\[[\d;]{0,20}[A-Za-z]|\x08")  # colours, and the backspaces of bars
_EVALUATION = re.compile(r"^\s{0,9}(?:sanity|valid|eval|test|predict)[^|]{0,100}\d%\|", re.I)  # its bar
_HINT = re.compile(
    r"step|epoch|iter|batch|loss|lr|rate|/s|per_s|tps|\d/\d", re.I
)  # one of these is in a line with a number
_MORE, _STEPS = 20, 3  # lines above that of the last step, and those with a step that are no bars, which are searched
_POSTED = {"learning_rate": "lr", "current_step": "step", "current_epoch": "epoch"}
_MOST = 100  # numbers of one report
_WINDOW = 30.0  # seconds in which the speed of a program is measured
_PATIENCE = 3.0  # of its own gaps between two steps


class Metrics(NamedTuple):
    """The newest numbers that a program has printed; None for one that it does not print. A loss may be NaN or infinite.

    total_steps: of the job, or of an epoch where `step` counts in one. total_epochs and percent: of the whole job. eta: seconds
    to its end. to_plain() converts it to JSON, as a list with the values of to_plain([*numbers]), and read() back.
    """

    epoch: Optional[float] = None
    step: Optional[float] = None
    total_steps: Optional[float] = None
    total_epochs: Optional[float] = None
    percent: Optional[Annotated[float, number(0.0, 100.0)]] = None
    eta: Optional[float] = None
    loss: Optional[fields.PrintedNumber] = None
    lr: Optional[float] = None
    steps_per_second: Optional[float] = None
    tokens_per_second: Optional[float] = None
    samples_per_second: Optional[float] = None

    def or_before(self, before: Metrics) -> Metrics:
        """Return these numbers, with those of `before` for the ones that are None."""
        return Metrics(*(old if new is None else new for new, old in zip(self, before)))

    def after(self, before: Metrics) -> Metrics:
        """Return these numbers with those that were known before, and the percentage by the epoch that is known then."""
        known = self.or_before(before)
        percent = _percent(known, in_epoch=True) if self.percent is None else None
        return known if percent is None else known._replace(percent=percent)


NOTHING = Metrics()

_KIND = "(?P<kind>steps?|it|iters?|iterations?|batch(?:es)?|tok(?:en)?s?|samples?|examples?|images?|imgs?)"
_PER = r"(?:_per_sec(?:ond)?|/s(?:ec(?:ond)?)?)(?![a-z/])"
_RATE = rf"(?P<rate>\d{{1,3}}(?:,\d{{3}}){{1,5}}(?![\w.,])|{_FLOAT})"  # it may have separators of thousands
_RATE_FIRST = (
    r"(?<![\w.,+-])(?P<rate>\d{1,3}(?:,\d{3}){1,5}|\d{1,15}(?:\.\d{0,20})?(?:e[-+]?\d{1,3})?) ?(?P<scale>[kMG]?)"
)
_OF = r"(?:\s{0,20}/\s{0,20}(?P<total_steps>\d{1,15}))?"
_NO_LOSS = "".join(f"(?<!{name} )" for name in ("validation", "val", "eval", "test"))

# The patterns are compiled when they are first used: an agent that reads no log need not wait for it (10 ms).
PROFILES: Mapping[str, Tuple[str, ...]] = {
    "plain": (
        rf"(?:\b|_)(?:step|iteration|iter|batch){_IS}(?P<step>\d{{1,15}})(?![\w.]){_OF}",
        rf"\bepoch{_IS}(?P<epoch>\d{{1,9}}(?:\.\d{{1,20}})?)(?:\s{{0,3}}/\s{{0,3}}(?P<total_epochs>\d{{1,9}}))?",
        rf"{_NO_LOSS}(?<!\w)(?:(?<!')train[_/ ])?loss(?:_step)?{_IS}(?P<loss>{_FLOAT})",
        rf"(?<!\w)(?<!decoupled )(?:lr|learning[_ ]rate){_IS}(?P<lr>{_FLOAT})",
        rf"(?<!\w)(?:train_|interval_|avg_)?{_KIND}{_PER}{_IS}{_RATE}",
        rf"(?<!\w)(?P<kind>tps){_IS}{_RATE}",
        rf"{_RATE_FIRST}{_KIND}{_PER}(?!{_IS}[-+]?\d)",
    ),
    "Hugging Face Trainer": (),  # its dicts are plain but for 'train_loss', the mean of a training that has ended
    "tqdm and Lightning": (
        r"\|\s{0,9}(?P<step>\d{1,15})/(?P<total_steps>\d{1,15}) (?P<bar>\[)",
        rf"\[[^]<]{{1,40}}<[^,\]]{{1,40}},\s{{0,9}}{_RATE_FIRST}(?P<kind>[a-z]{{0,20}})/s(?![a-z])",
        r"\[[^]<]{1,40}<[^,\]]{1,40},\s{0,9}(?P<duration>\d{1,15}(?:\.\d{1,9})?)(?P<unit>s)/[a-z]",
    ),
    "Megatron": (
        rf"elapsed time per iteration \((?P<unit>ms)\): (?P<duration>{_FLOAT})",
        r"global batch size:\s{1,20}(?P<batch>\d{1,15})",
    ),
    "DeepSpeed": (rf"\bCurr(?P<kind>Samples)PerSec={_RATE}",),
    "PaddleNLP": (rf"\bprogress_or_epoch: (?P<epoch>{_FLOAT})",),
    "Paddle and Keras": (
        r"^\s{0,15}(?P<step>\d{1,15})/(?P<total_steps>\d{1,15}) (?=.{0,200}\d[mu]?s/step)",
        r"(?<![\w.])(?P<duration>\d{1,9})(?P<unit>us|ms|s)/(?P<in_epoch>step)",
    ),
}


def find_metrics(text: str) -> Metrics:
    """Find the newest value of each number in the whole lines of a text, at most 20 lines above that of the last step.

    The epoch is in the line of the last step or above it; if no line has a step, in the last line with an epoch. A line ends
    with a newline or, for bars, a carriage return.
    """
    whole = _CODES.sub("", text[: max(text.rfind("\n"), text.rfind("\r")) + 1])
    found, later, in_epoch, left = NOTHING, NOTHING, False, 1.0
    for line in filter(partial(re.search, _HINT), reversed(whole.replace("\r", "\n").split("\n"))):
        if left <= 0:
            break
        values, parts = _read_line(line)
        if found.step is not None:
            left -= 1 / _MORE if values.step is None or "bar" in parts else 1 / _STEPS
            values = values._replace(total_steps=None)  # of an earlier step
        elif values.step is not None:
            in_epoch = values.epoch is not None or "in_epoch" in parts
        else:  # an epoch may be a later one than that of the step
            later, values = later.or_before(values), values._replace(epoch=None, total_epochs=None)
        found = found.or_before(values)
    return later if found.step is None else found._replace(percent=_percent(found, in_epoch))


def _read_line(line: str) -> Tuple[Metrics, Mapping[str, Optional[str]]]:
    """Read the numbers of a line: of several values of one number the last, and of the step the one that is the finest.

    Returns them, and the parts of the line that have a name. The bar of an evaluation has no numbers of the job.
    """
    parts: Dict[str, Optional[str]] = {}
    values: Dict[str, float] = {}
    for pattern in () if _EVALUATION.search(line) else chain.from_iterable(PROFILES.values()):
        for match in re.finditer(pattern, line, re.I):
            parts.update(match.groupdict())
            if "rate" in match.groupdict():
                kind = _KINDS.get(match["kind"][:3].lower(), "steps_per_second")
                scale = _SCALES[(match.groupdict().get("scale") or "").lower()]
                values[kind] = float(match["rate"].replace(",", "")) * scale
    seconds = float(parts["duration"] or 0.0) * _UNITS[str(parts["unit"]).lower()] if "duration" in parts else 0.0
    if seconds > 0:
        values["steps_per_second"] = 1 / seconds
        values.update({"samples_per_second": float(parts["batch"] or 0.0) / seconds} if "batch" in parts else {})
    values.update((name, float(text)) for name, text in parts.items() if text and name in Metrics._fields)
    return checked(values), parts


def checked(values: Mapping[str, float]) -> Metrics:
    """Build a Metrics without the values that are no possible ones: only a loss may be negative, NaN or infinite."""
    most = {name: 100.0 if name == "percent" else _LARGEST for name in values}
    return Metrics(**{name: one for name, one in values.items() if name == "loss" or 0 <= one <= most[name]})


def posted_metrics(status: Any) -> Metrics:
    """Read the numbers that Hugging Face's Trainer sends, the JSON of its KubeflowCallback (transformers 5.24).

    Raises ValueError, KeyError, TypeError, AttributeError or OverflowError for another value.
    """
    about = status["trainerStatus"]
    values = {"percent": about.get("progressPercentage"), "eta": about.get("estimatedRemainingSeconds")}
    values.update((_POSTED.get(one["name"], one["name"]), one["value"]) for one in about.get("metrics", ())[:_MOST])
    return checked({name: float(values[name]) for name in Metrics._fields if values.get(name) is not None})


def _percent(found: Metrics, in_epoch: bool) -> Optional[float]:
    """Compute the part of the job that is done, by step and total_steps, or in an epoch also by the number of epochs.

    The first epoch is 1. None if it is not known.
    """
    if found.step is None or not found.total_steps:
        return None
    part = found.step / found.total_steps
    if in_epoch:
        if found.epoch is None or not found.total_epochs:
            return None
        part = (max(found.epoch - 1, 0) + min(part, 1.0)) / found.total_epochs
    return round(min(100 * part, 100.0), 2)


def prometheus_text(job: str, numbers: Mapping[Tuple[str, int], Metrics]) -> str:
    """Format the numbers of ranks, by role and rank, in the text format of Prometheus."""
    lines: List[str] = []
    for at, name in enumerate(Metrics._fields):
        rows = [(key, one[at]) for key, one in sorted(numbers.items()) if one[at] is not None]
        lines += [f"# TYPE clustertool_{name} gauge"] if rows else []
        lines += [
            f'clustertool_{name}{{job="{job}",role="{role}",rank="{rank}"}} {value}' for (role, rank), value in rows
        ]
    return "".join(f"{line}\n" for line in lines)


class StepRate:
    """The steps a second of a program, over the last half minute."""

    def __init__(self) -> None:
        self._seen: List[Tuple[float, float]] = []

    def feed(self, step: float, now: float) -> None:
        """Record a step that was known at the time `now`. After a smaller step than before, begin anew."""
        if self._seen and step < self._seen[-1][1]:  # another epoch, another attempt
            self._seen.clear()
        if not self._seen or step > self._seen[-1][1]:
            self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[1][0] > _WINDOW:
            del self._seen[0]

    @property
    def has_steps(self) -> bool:
        """Whether a step is known."""
        return bool(self._seen)

    def compute(self, now: float) -> Optional[float]:
        """Compute the steps a second at the time `now`; None while fewer than two steps are known.

        It falls when no step has come for longer than the known ones took, and is 0.0 after 30 s or three usual gaps between
        steps, whichever is longer.
        """
        if len(self._seen) < 2:
            return None
        (first, low), (last, high) = self._seen[0], self._seen[-1]
        still, gap = now - last, (last - first) / (len(self._seen) - 1)
        if still > max(_WINDOW, _PATIENCE * gap):
            return 0.0
        return (high - low) / (max(last - first, 1e-3) + (still if still > (last - first) else 0.0))
