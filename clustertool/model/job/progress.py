"""This module reads the numbers that a program prints about its progress: PROFILES has the programs whose lines it knows.

Pure. A profile recognises a line by its mark and reads the numbers in it: a group of a pattern has the name of a field of
Metrics, or of a part from which _numbers() computes one. The first profile whose mark is in a line reads it; the last one,
`plain`, reads any line: `step=12`, `global step 12`, `Iter: [12/100]`, `epoch=3`, `loss: 0.5`, `lr=1e-4`, `1200 tokens/s`.

The text of a program is not trusted: each repetition in a pattern has a limit, and so has each number.
"""

from __future__ import annotations

import math
import re
from functools import partial
from typing import Any, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

_IS = r"""['"]?\s{0,20}[=:#]?\s{0,20}['"\[(]{0,2}\s{0,20}"""  # between a name and its value
_FLOAT = r"[-+]?(?:\d{1,15}(?:\.\d{0,20})?(?:e[-+]?\d{1,3})?|nan|inf(?:inity)?)(?!\.?\w)"
_GROUPED = r"\d{1,3}(?:,\d{3}){1,5}(?![\w.,])"  # a rate may have separators of thousands
_SCALES = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_UNITS = {"us": 1e-6, "ms": 1e-3, "s": 1.0}
_KINDS = {"tok": "tokens_per_second", "sam": "samples_per_second", "exa": "samples_per_second"}
_LARGEST = 1e18
_CODES = re.compile(r"\x1b\[[\d;]{0,20}[A-Za-z]|\x08")  # colours, and the backspaces of bars
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
    to its end.
    """

    epoch: Optional[float] = None
    step: Optional[float] = None
    total_steps: Optional[float] = None
    total_epochs: Optional[float] = None
    percent: Optional[float] = None
    eta: Optional[float] = None
    loss: Optional[float] = None
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

    @classmethod
    def of_row(cls, row: object) -> Metrics:
        """Build them from the result of as_row(); missing and impossible values are None.

        Raises ValueError, TypeError or OverflowError for another value.
        """
        if not isinstance(row, list):
            raise ValueError("no row of numbers")
        return checked({name: float(value) for name, value in zip(cls._fields, row) if value is not None})

    def as_row(self) -> List[object]:
        """Convert to a list for JSON, which has no NaN and no infinity: they are strings, as float() reads them."""
        return list(map(plain_number, self))

    def as_dict(self) -> Dict[str, object]:
        """Convert to an object for JSON, as as_row() does."""
        return dict(zip(self._fields, self.as_row()))


NOTHING = Metrics()


class Profile(NamedTuple):
    """The lines of a program. in_epoch: its steps count in an epoch, so a part of them is no part of the job."""

    name: str
    mark: str
    numbers: Sequence[str]
    in_epoch: bool = False


_PER_SECOND = ("steps_per_second", "tokens_per_second", "samples_per_second")
_COUNTED = (r"(?:steps?|it|iters?|iterations?|batch(?:es)?)", "tok(?:en)?s?", "(?:samples?|examples?|images?|imgs?)")


def _rates() -> Iterator[str]:
    """Yield the patterns of rates: the name before its value, and after it."""
    for field, names in zip(_PER_SECOND, _COUNTED):
        name = rf"{names}(?:_per_sec(?:ond)?|/s(?:ec(?:ond)?)?)(?![a-z/])"
        yield rf"(?<!\w)(?:train_|interval_|avg_)?{name}{_IS}(?P<{field}>{_GROUPED}|{_FLOAT})"
        yield rf"(?<![\w.,])(?P<{field}>{_GROUPED}|{_FLOAT}) ?{name}(?!{_IS}[-+]?\d)"
    yield rf"(?<!\w)tps{_IS}(?P<tokens_per_second>{_GROUPED}|{_FLOAT})"


_OF = r"(?:\s{0,20}/\s{0,20}(?P<total_steps>\d{1,15}))?"
_STEP = rf"(?:\b|_)(?:step|iteration|iter|batch){_IS}(?P<step>\d{{1,15}})(?![\w.]){_OF}"
_EPOCH = rf"\bepoch{_IS}(?P<epoch>\d{{1,9}}(?:\.\d{{1,20}})?)(?:\s{{0,3}}/\s{{0,3}}(?P<total_epochs>\d{{1,9}}))?"
_NO_LOSS = "".join(f"(?<!{name} )" for name in ("validation", "val", "eval", "test"))
_LOSS = rf"{_NO_LOSS}(?<!\w)(?:train[_/ ])?loss(?:_step)?{_IS}(?P<loss>{_FLOAT})"
_LR = rf"(?<!\w)(?:lr|learning[_ ]rate){_IS}(?P<lr>{_FLOAT})"
_RATES = tuple(_rates())
_BAR = r"\|\s{0,9}(?P<step>\d{1,15})/(?P<total_steps>\d{1,15}) \["
_BAR_RATE = r"(?P<rate>\d{1,15}(?:\.\d{1,9})?)(?P<scale>[kMG]?)(?P<kind>[a-z]{0,20})/s(?![a-z])"
_BAR_TIME = r"(?P<duration>\d{1,15}(?:\.\d{1,9})?)(?P<unit>s)/[a-z]"
_OF_BAR = (_BAR, _EPOCH, _LOSS, _LR, rf"\[[^]<]{{1,40}}<[^,\]]{{1,40}},\s{{0,9}}(?:{_BAR_RATE}|{_BAR_TIME})")
_STEP_TIME = r"(?<![\w.])(?P<duration>\d{1,9})(?P<unit>us|ms|s)/step"
_KEYS = {"(?:global_)?step": "step", "epoch": "epoch", "loss": "loss", "learning_rate": "lr"}
_KEYS.update((f"train_{field}", field) for field in _PER_SECOND)
_OF_DICT = tuple(rf"'{name}': '?(?P<{field}>{_FLOAT})" for name, field in _KEYS.items())  # a value may be a string
_OF_MEGATRON = (
    rf"elapsed time per iteration \((?P<unit>ms)\): (?P<duration>{_FLOAT})",
    r"global batch size:\s{1,20}(?P<batch>\d{1,15})",
    rf"\b(?:lm )?loss: (?P<loss>{_FLOAT})",
    rf"(?<!decoupled )learning rate: (?P<lr>{_FLOAT})",
)
_OF_DEEPSPEED = (rf"\bCurrSamplesPerSec=(?P<samples_per_second>{_FLOAT})", r"\bepoch=(?P<epoch>\d{1,9})/")
_KERAS = r"^\s{0,15}(?P<step>\d{1,15})/(?P<total_steps>\d{1,15}) "

# The patterns are compiled when they are first used: an agent that reads no log need not wait for it (10 ms).
PROFILES = (
    Profile("a bar of an evaluation", r"^\s{0,9}(?:sanity|valid|eval|test|predict)[^|]{0,100}\d%\|", ()),
    Profile("Lightning", r"^\s{0,9}Epoch \d{1,9}: .{0,200}\|", _OF_BAR, in_epoch=True),
    Profile("tqdm", _BAR, _OF_BAR),
    Profile("Hugging Face Trainer", r"\{'[^']{1,100}': .{1,4000}\}", _OF_DICT),
    Profile("Megatron", r"\biteration\s{1,20}\d{1,15}/\s{0,20}\d{1,15} \|", (_STEP, *_OF_MEGATRON)),
    Profile("DeepSpeed", r"\bglobal_step=\d{1,15}, Run|\bstep=\d{1,15}, skipped=", (_STEP, _LR, *_OF_DEEPSPEED)),
    Profile("PaddleNLP", r"\bglobal_step: \d{1,15}, ", (_STEP, rf"epoch: (?P<epoch>{_FLOAT})", _LOSS, _LR, *_RATES)),
    Profile("Paddle", r"^step\s{1,15}\d{1,15}/\d{1,15} (?:\[|- )", (_STEP, _LOSS, _LR, _STEP_TIME), in_epoch=True),
    Profile("Keras", rf"{_KERAS}.{{0,200}}\d[mu]?s/(?:step|epoch)", (_KERAS, _LOSS, _LR, _STEP_TIME), in_epoch=True),
    Profile("plain", "", (_STEP, _EPOCH, _LOSS, _LR, *_RATES)),
)


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
        profile = next(one for one in PROFILES if re.search(one.mark, line, re.I))
        values = _numbers(profile, line)
        if found.step is not None:
            left -= 1 / _MORE if values.step is None or profile.mark == _BAR else 1 / _STEPS
            values = values._replace(total_steps=None)  # of an earlier step
        elif values.step is not None:
            in_epoch = profile.in_epoch or values.epoch is not None
        else:  # an epoch may be a later one than that of the step
            later, values = later.or_before(values), values._replace(epoch=None, total_epochs=None)
        found = found.or_before(values)
    return later if found.step is None else found._replace(percent=_percent(found, in_epoch))


def _numbers(profile: Profile, line: str) -> Metrics:
    """Read the numbers of a line: of several values of one number the last, and of the step the one that is the finest."""
    groups: Dict[str, str] = {}
    for pattern in profile.numbers:
        for last in list(re.finditer(pattern, line, re.I))[-1:]:
            groups.update((name, value) for name, value in last.groupdict().items() if value is not None)
    values = {name: float(groups[name].replace(",", "")) for name in Metrics._fields if name in groups}
    if "rate" in groups:
        kind = _KINDS.get(groups["kind"][:3].lower(), "steps_per_second")
        values[kind] = float(groups["rate"]) * _SCALES.get(groups["scale"], 1.0)
    seconds = float(groups["duration"]) * _UNITS[groups["unit"].lower()] if "duration" in groups else 0.0
    if seconds > 0:
        values["steps_per_second"] = 1 / seconds
        values.update({"samples_per_second": float(groups["batch"]) / seconds} if "batch" in groups else {})
    return checked(values)


def checked(values: Dict[str, float]) -> Metrics:
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


def plain_number(value: Optional[float]) -> Union[float, str, None]:
    """Return a number as JSON can have it: "NaN", "Infinity" and "-Infinity" are strings, as protobuf writes them."""
    if value is None or math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"


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
