"""The states of a job's ranks, and its attempts: what state.py folds events into. Times are by the laptop's clock.

These are plain classes: the module dataclasses takes 5 ms of a node's CPU time, and each of its classes 0.5 ms.
"""

from __future__ import annotations

from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Tuple

from clustertool.model.job.outcome import Key
from clustertool.model.job.state_names import RankState


class Life:
    """What a rank did in one attempt. Times are by the laptop's clock."""

    def __init__(self) -> None:
        self.start = 0  # the start time of its process, as the kernel counts it
        self.listening = False  # at its endpoint
        self.listens = ""  # at another address, and where
        self.guarded = False  # its supervisor was lost, and the guard ended it
        self.states: List[Tuple[float, RankState]] = []  # and since when
        self.cpu = 0.0  # seconds, at its end
        self.memory = 0.0  # bytes at most, at its end


class ProcessStatus:
    """A rank in the newest attempt that it has entered, or in the first one."""

    def __init__(self, role: str, rank: int, node: int, attempt: int = 0) -> None:
        self.role, self.rank, self.node, self.attempt = role, rank, node, attempt
        self.local_rank = 0
        self.endpoint = self.log = ""
        self.state = RankState.WAITING
        self.pid = 0
        self.since = 0.0
        self.code: Optional[int] = None
        self.signal = 0
        self.note = ""  # why it could not start, or ended
        self.error = 0  # of a failure: equal numbers for equal last lines of the log
        self.epoch: Optional[float] = None  # the last one that it printed, like step
        self.step: Optional[float] = None
        self.output = 0.0  # when it printed last, or was started if it printed nothing; 0 if that is not known
        self.life = Life()

    @property
    def key(self) -> Key:
        return self.role, self.rank

    @property
    def stopped(self) -> bool:
        return self.state is RankState.STOPPED

    def as_dict(self) -> Dict[str, Any]:
        """An entry of "processes" of `inv status --json`, without its note."""
        names = (
            "role rank node local_rank endpoint log state pid since code signal stopped attempt error epoch step output"
        )
        return {name: getattr(self, name) for name in names.split()}


class Attempt:
    """`places`: the node of each of its ranks, if that is known. `ranks`: those that were started in it.

    `began`, `ended`: the first start and the last end of a rank of it; 0.0 if there was none.
    """

    def __init__(self, number: int, places: Optional[Mapping[Key, int]]) -> None:
        self.number, self.places = number, places
        self.ranks: Dict[Key, ProcessStatus] = {}
        self.phase = ""
        self.began = self.ended = 0.0

    @property
    def nodes(self) -> FrozenSet[int]:
        """The nodes that take part, as far as they are known."""
        started = {process.node for process in self.ranks.values()}
        return frozenset(started if self.places is None else self.places.values())
