"""The coordinator watches for a job without progress: it has all nodes sample their ranks, and judges what they answer.

A node reports with each heartbeat for how long its trainers have made no progress. Once the shortest of these times reaches the
hang timeout, all nodes sample. The next samples come after the same time again, or, after a hang was found, when there was
progress in between. The rule itself is model/job/hang.judge().
"""

from __future__ import annotations

from typing import AbstractSet, Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from clustertool.model.job.hang import Hang, RankTrace, judge

_PATIENCE = 15.0  # seconds for the answers of all nodes


class Findings(NamedTuple):
    """A hang, and for each node for how many seconds its ranks had made no progress."""

    hang: Hang
    quiet: Dict[int, float]


class HangWatch:
    """The times without progress, the samples that are under way, and the verdict.

    timeout: seconds. nodes: all of the job. trainers: those with trainers. All times are the caller's clock. Call note_quiet()
    for each heartbeat, note_traces() for each answer, and turn() each loop while the trainers run.
    """

    def __init__(self, timeout: float, nodes: AbstractSet[int], trainers: AbstractSet[int]) -> None:
        self.number = 0  # of the newest samples
        self._timeout = timeout
        self._nodes, self._trainers = nodes, trainers
        self.begin()

    def begin(self) -> None:
        """Forget what was noted: an attempt begins."""
        self._since: Dict[int, float] = {}  # of each node: when its trainers made progress last
        self._next = self._timeout  # seconds without progress after which the next samples are taken
        self._sampled_at: Optional[float] = None  # while answers are missing
        self._found = False  # a hang, and no progress since then
        self._missing: Set[int] = set()
        self._traces: List[RankTrace] = []

    def note_quiet(self, node: int, seconds: float, now: float) -> None:
        """Record for how many seconds the trainers of a node have made no progress."""
        before, at = self._since.get(node), now - seconds
        if before is None or at > before + 1.0:  # the delay of a heartbeat is no progress
            self._since[node] = at
            self._next, self._found = self._timeout, False

    def note_traces(self, node: int, number: int, traces: Sequence[RankTrace]) -> None:
        """Record what the ranks of a node did in the samples with this number; ignore earlier ones, and second answers."""
        if number == self.number and node in self._missing:
            self._missing.discard(node)
            self._traces += traces

    def turn(self, now: float, gone: AbstractSet[int]) -> Tuple[bool, Optional[Findings]]:
        """Return whether all nodes are to sample now, and what the last samples have shown if that is a hang.

        gone: nodes that are lost or have left; their answers are not waited for.
        """
        nodes = self._trainers - gone
        if self._sampled_at is not None:
            if self._missing - gone and now < self._sampled_at + _PATIENCE:
                return False, None
            self._sampled_at = None
            quiet = {node: now - self._since[node] for node in nodes if node in self._since}
            if self._missing:  # the verdict could name the wrong rank
                return False, None
            hang = judge(self._traces, min(quiet.values(), default=0.0) >= 2 * self._timeout)
            self._found = hang is not None
            return False, Findings(hang, quiet) if hang else None
        if self._found or not nodes or not nodes <= self._since.keys():
            return False, None
        quiet_for = now - max(self._since[node] for node in nodes)
        if quiet_for < self._next:
            return False, None
        self._next = quiet_for + self._timeout
        self._sampled_at, self._missing, self._traces = now, set(self._nodes - gone), []
        self.number += 1
        return True, None
