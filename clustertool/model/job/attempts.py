"""A rank in an attempt, and the attempts of a job: which ranks they have, where these are, and what became of them."""

from __future__ import annotations

from typing import Dict, FrozenSet, List, Mapping, Optional, Tuple

from clustertool.model.elastic.membership import EpochChange
from clustertool.model.job.outcome import Key, RankExit
from clustertool.model.job.state_names import RankState

_SHOWN = "role rank node local_rank endpoint log state pid since code signal stopped attempt error epoch step output"


class ProcessStatus:
    """A rank in the newest attempt that it has entered, or in the first one. Times are by the laptop's clock."""

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
        self.start = 0  # the start time of its process, as the kernel counts it
        self.listening = False  # at its endpoint
        self.listens = ""  # at another address, and where
        self.guarded = False  # its supervisor was lost, and the guard ended it
        self.states: List[Tuple[float, RankState]] = []  # and since when
        self.consequence = self.timed_out = False  # see RankExit
        self.cpu = 0.0  # seconds, at its end
        self.memory = 0.0  # bytes at most, at its end

    @property
    def key(self) -> Key:
        return self.role, self.rank

    def failure(self, node: str = "") -> RankExit:
        """Build the RankExit of a process that has failed. node: the name of its node."""
        exit = RankExit(self.role, self.rank, self.code or 0, self.signal, node=node, attempt=self.attempt)
        exit = exit._replace(note=self.note, error=self.error)
        return exit._replace(consequence=self.consequence, timed_out=self.timed_out)

    @property
    def stopped(self) -> bool:
        return self.state is RankState.STOPPED

    def as_dict(self) -> Dict[str, object]:
        """Build an entry of "processes" of `inv status --json`, without its note."""
        return {name: getattr(self, name) for name in _SHOWN.split()}


class Attempt:
    """An attempt of a job. `places`: the node of each of its ranks, if that is known. `ranks`: those that were started in it.

    `began`, `ended`: the first start and the last end of a rank of it; 0.0 if there was none. epoch: where it is the first one
    of an epoch. hang: when the coordinator found that no rank makes progress, and its verdict.
    """

    def __init__(self, number: int, places: Optional[Mapping[Key, int]]) -> None:
        self.number, self.places = number, places
        self.ranks: Dict[Key, ProcessStatus] = {}
        self.phase = ""
        self.epoch: Optional[EpochChange] = None
        self.began = self.ended = 0.0
        self.hang: Optional[Tuple[float, str]] = None

    @property
    def nodes(self) -> FrozenSet[int]:
        """The nodes in `places`; if these are not known, those on which a rank was started."""
        started = {process.node for process in self.ranks.values()}
        return frozenset(started if self.places is None else self.places.values())
