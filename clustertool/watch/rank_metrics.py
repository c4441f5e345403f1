"""This module compares the numbers that the ranks of a job print: how far the job is, and whose loss is wrong.

Pure. Only the newest attempt of a rank counts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from statistics import median

from clustertool.model.config.folded_names import grouped
from clustertool.model.job.attempts import ProcessStatus
from clustertool.model.job.outcome import Key
from clustertool.model.job.progress import Metrics
from clustertool.model.job.state import JobStatus
from clustertool.model.shape import read, to_plain
from clustertool.model.wire.agent_answers import StatusAnswer

_FEW, _NEWEST = 3, 3
_NEAR, _HALF, _SPREAD = 0.1, 0.5, 5.0


@dataclass(frozen=True)
class MetricsRow:
    """What a rank had printed by a time of the laptop's clock, in one of its attempts."""

    role: str
    rank: int
    attempt: int
    t: float
    numbers: Metrics

    @property
    def key(self) -> Key:
        return self.role, self.rank

    def as_dict(self) -> dict[str, object]:
        """Build a row of `metrics --json`."""
        about = {"time": round(self.t, 2), "role": self.role, "rank": self.rank, "attempt": self.attempt}
        return {**about, **self.numbers._asdict(), "loss": to_plain(self.numbers.loss)}


@dataclass(frozen=True)
class LossWarning:
    """Ranks with a wrong loss, and the newest one of the first of them. median: of all ranks, if it is apart from theirs."""

    ranks: Sequence[Key]
    loss: float
    median: float | None = None


def read_rows(status: JobStatus, answers: Mapping[int, StatusAnswer]) -> list[MetricsRow]:
    """Read the numbers of ranks in the nodes' answers, without those of ranks that do not run on the node that sent them."""
    found = []
    for index, answer in sorted(answers.items()):
        skew = status.nodes[index].skew if index in status.nodes else 0.0
        for role, rank, attempt, t, row in answer["metrics"]:
            if status.has_rank(index, (role, rank), attempt):
                found.append(MetricsRow(role, rank, attempt, t - skew, read(Metrics, row)))
    return found


def newest_rows(status: JobStatus, rows: Iterable[MetricsRow]) -> dict[Key, list[MetricsRow]]:
    """Group the rows of each rank in its newest attempt, in order of time."""
    newest = {key: process.attempt for key, process in status.processes.items()}
    return grouped((row.key, row) for row in sorted(rows, key=lambda row: row.t) if newest.get(row.key) == row.attempt)


def job_progress(processes: Iterable[ProcessStatus], rows: Mapping[Key, Sequence[MetricsRow]]) -> dict[str, object]:
    """Build `progress` of `status --json`: how far the trainers are; None for what is not known.

    percent: of the slowest. eta: seconds until the last of those that run ends. loss: of the first rank that prints one.
    """
    ranks = sorted((one for one in processes if one.role == "trainer" and one.key in rows), key=lambda one: one.rank)
    numbers = [(one.state.alive, rows[one.key][-1].numbers) for one in ranks]
    return {
        "percent": min((one.percent for _, one in numbers if one.percent is not None), default=None),
        "eta": max((one.eta for alive, one in numbers if alive and one.eta is not None), default=None),
        "loss": next((to_plain(one.loss) for _, one in numbers if one.loss is not None), None),
    }


def find_wrong_losses(rows: Mapping[Key, Sequence[MetricsRow]]) -> list[LossWarning]:
    """Find the trainers with a wrong loss: first those whose newest one is NaN or infinite, then each that is apart.

    Apart: three or more trainers print a loss and are at about the same step (90 % to 110 % of their median); each of the three
    newest different losses of one is further from the median of their newest losses than half of this median, and than five
    times the median of all such distances.
    """
    trainers = {key: [row.numbers for row in its if row.numbers.loss is not None] for key, its in rows.items()}
    known = {key: its for key, its in sorted(trainers.items()) if its and key[0] == "trainer"}
    losses = {
        key: [loss for loss, _ in groupby(one.loss or 0.0 for one in its)][-_NEWEST:] for key, its in known.items()
    }
    wrong = [key for key, its in losses.items() if not math.isfinite(its[-1])]
    found = [LossWarning(tuple(wrong), losses[wrong[0]][-1])] if wrong else []
    steps = [its[-1].step for its in known.values() if its[-1].step is not None]
    middle = median(steps) if steps else 0.0
    near = [key for key, its in known.items() if abs((its[-1].step or middle) - middle) <= _NEAR * middle]
    newest = {key: losses[key] for key in near if all(map(math.isfinite, losses[key]))}
    if len(newest) < _FEW:
        return found
    center = median(its[-1] for its in newest.values())
    spread = median(abs(its[-1] - center) for its in newest.values())
    for key, its in newest.items():
        least = min(abs(loss - center) for loss in its)
        if len(its) == _NEWEST and least > max(_HALF * abs(center), _SPREAD * spread):
            found.append(LossWarning((key,), its[-1], center))
    return found
