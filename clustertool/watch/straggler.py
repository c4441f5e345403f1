"""A straggler is a trainer that is behind the median of its role. RULES are the complete definition; the report prints them.

Pure. Only processes of one role and of their last attempt are compared, and only if there are at least two. The relevant
moment is the end of the first of them, or now while all run: later work of the others is not counted.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

from clustertool.model.config.folded_names import grouped
from clustertool.model.job.outcome import Key
from clustertool.model.roles import LAUNCHERS

RULES = (
    "Behind: at the end of the first trainer to end (now, while all run), it is below 90 % of the trainers' median step, and "
    "that is more than 5 s of the median's pace. The steps that are shown are the last ones that were printed by then. To "
    "decide, a trainer is taken to go on between two lines that it prints.",
    "Quiet: where fewer than two print steps, its log is less than half as long as the median's (2 kB or more).",
    "Idle: over its life it used less than half of the median's CPU (0.05 cores or more).",
    "Busy: at the same step as the others, it used half as much CPU again as the median, and 0.2 cores more: "
    "they may wait for it.",
)
_BEHIND, _LATE = 0.9, 5.0
_HALF, _LOG = 0.5, 2000
_CPU, _BUSY, _MORE = 0.05, 1.5, 0.2
_SHORT = 5.0  # seconds of life below which CPU times mean nothing
_PATIENCE = 1.5  # of its own gaps between lines a program may go on unheard

Curve = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class RankPace:
    """The pace of one process in its last attempt: `progress` is (time, step), `unit` its unit, `cores` the mean CPU used."""

    role: str
    rank: int
    start: float
    end: float
    progress: Curve = ()
    unit: str = ""
    cores: float | None = None
    log_size: int = 0

    @property
    def key(self) -> Key:
        return self.role, self.rank


def find_stragglers(paces: Sequence[RankPace]) -> dict[Key, str]:
    """Compare the ranks of each role of which two have run, and map (role, rank) of each straggler to its reasons, as one text.

    pservers only serve, and launchers only start ranks: they are left out.
    """
    found: dict[Key, str] = {}
    for role in dict.fromkeys(pace.role for pace in paces if pace.role not in ("pserver", *LAUNCHERS)):
        peers = [pace for pace in paces if pace.role == role and pace.end > pace.start]
        if len(peers) > 1:
            found.update(_compare_ranks(peers))
    return found


def _compare_ranks(peers: Sequence[RankPace]) -> dict[Key, str]:
    """Compare the ranks of one role, and map each straggler to its reasons."""
    steps = _estimate_steps(peers)
    each = (_find_behind(peers, steps), _find_quiet(peers) if len(steps) < 2 else {}, _find_cpu(peers, steps))
    found = grouped(pair for reasons in each for pair in reasons.items())
    return {key: "; ".join(why) for key, why in found.items()}


def _estimate_steps(peers: Sequence[RankPace]) -> dict[Key, float]:
    """Estimate the step of each rank at the end of the first one to end.

    Ranks without progress, or with another unit than most, are left out.
    """
    units = [pace.unit for pace in peers if pace.progress]
    unit = max(units, key=units.count) if units else ""
    moment = min(pace.end for pace in peers)
    return {pace.key: estimate_step(pace.progress, moment) for pace in peers if pace.progress and pace.unit == unit}


def estimate_step(progress: Curve, moment: float) -> float:
    """Estimate the step at a moment: between two printed steps by their times, after the last one at the mean pace.

    Before the first one it is 0.0. After the last one, it grows for at most one and a half of the median time between two
    steps. It only decides which ranks are behind, and is never shown.
    """
    before = [point for point in progress if point[0] <= moment]
    after = [point for point in progress if point[0] > moment]
    if not before:
        return 0.0
    (t, step) = before[-1]
    if after:
        (later, more) = after[0]
        return step + (more - step) * (moment - t) / (later - t)
    return step + pace_of(before) * min(moment - t, _PATIENCE * _median_gap(before))


def printed_step(progress: Curve, moment: float) -> float:
    """Return the last step that was printed by a moment, 0.0 before the first."""
    return next((step for t, step in reversed(progress) if t <= moment), 0.0)


def pace_of(progress: Curve) -> float:
    """Compute the steps a second between the first and the last printed step, 0.0 if there is only one."""
    (start, first), (end, last) = progress[0], progress[-1]
    return (last - first) / (end - start) if end > start else 0.0


def _median_gap(progress: Curve) -> float:
    """Compute the median of the seconds from each printed step to the next one, 0.0 for fewer than two steps."""
    return median(b[0] - a[0] for a, b in zip(progress, progress[1:])) if len(progress) > 1 else 0.0


def _find_behind(peers: Sequence[RankPace], steps: Mapping[Key, float]) -> dict[Key, str]:
    """Map each rank whose step is behind the median to the reason: see RULES."""
    if len(steps) < 2:
        return {}
    middle, found = median(steps.values()), {}
    counted = [pace for pace in peers if pace.key in steps]
    speed = median(pace_of(pace.progress) for pace in counted)
    moment = min(pace.end for pace in peers)
    shown = median(printed_step(pace.progress, moment) for pace in counted)
    for pace in counted:
        step, last = steps[pace.key], printed_step(pace.progress, moment)
        if step < _BEHIND * middle and middle - step > _LATE * speed and last < shown:
            digits = 0 if shown >= 10 else 2
            found[pace.key] = f"at {pace.unit} {last:,.{digits}f} where the median is {shown:,.{digits}f}"
    return found


def _find_quiet(peers: Sequence[RankPace]) -> dict[Key, str]:
    """Map each rank whose log is much shorter than the median to the reason: see RULES."""
    middle = median(pace.log_size for pace in peers)
    if middle < _LOG:
        return {}
    quiet = [pace for pace in peers if pace.log_size < _HALF * middle]
    return {pace.key: f"wrote {pace.log_size} bytes where the median is {middle:.0f}" for pace in quiet}


def _find_cpu(peers: Sequence[RankPace], steps: Mapping[Key, float]) -> dict[Key, str]:
    """Map each rank that used much less or much more CPU than the median to the reason: see RULES.

    Only ranks count, also for the median, that ran for 5 s or more and whose CPU use is known; {} if there are fewer than two.
    steps: by _estimate_steps(); more CPU counts only where the ranks in it are at about the same step.
    """
    known = {pace.key: pace.cores for pace in peers if pace.cores is not None and pace.end - pace.start >= _SHORT}
    if len(known) < 2:
        return {}
    middle, found = median(known.values()), {}
    level = len(steps) > 1 and min(steps.values()) >= _BEHIND * median(steps.values())
    for key, cores in known.items():
        if middle >= _CPU and cores < _HALF * middle:
            found[key] = f"used {cores:.2f} cores where the median is {middle:.2f}"
        elif level and key in steps and cores > max(_BUSY * middle, middle + _MORE):
            found[key] = f"used {cores:.2f} cores where the median is {middle:.2f}: the others may wait for it"
    return found
