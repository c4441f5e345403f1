"""The states of a job's ranks, and its attempts: what state.py folds events into. Times are by the laptop's clock."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Dict, FrozenSet, List, Mapping, Optional, Tuple

from clustertool.model.job.outcome import Key
from clustertool.model.job.state_names import RankState


@dataclass
class Life:
    """What a rank did in one attempt. Times are by the laptop's clock."""

    start: int = 0  # the start time of its process, as the kernel counts it
    listening: bool = False  # at its endpoint
    listens: str = ""  # at another address, and where
    guarded: bool = False  # its supervisor was lost, and the guard ended it
    states: List[Tuple[float, RankState]] = field(default_factory=list)  # and since when
    cpu: float = 0.0  # seconds, at its end
    memory: float = 0.0  # bytes at most, at its end


@dataclass
class ProcessStatus:
    """A rank in the newest attempt that it has entered, or in the first one."""

    role: str
    rank: int
    node: int
    local_rank: int = 0
    endpoint: str = ""
    log: str = ""
    state: RankState = RankState.WAITING
    pid: int = 0
    since: float = 0.0
    code: Optional[int] = None
    signal: int = 0
    attempt: int = 0
    note: str = ""  # why it could not start, or ended
    error: int = 0  # of a failure: equal numbers for equal last lines of the log
    epoch: Optional[float] = None  # the last one that it printed, like step
    step: Optional[float] = None
    output: float = 0.0  # when it printed last, or was started if it printed nothing; 0 if that is not known
    life: Life = field(default_factory=Life)

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


@dataclass
class Attempt:
    """`places`: the node of each of its ranks, if that is known. `ranks`: those that were started in it.

    `began`, `ended`: the first start and the last end of a rank of it; 0.0 if there was none.
    """

    number: int
    places: Optional[Mapping[Key, int]] = None
    ranks: Dict[Key, ProcessStatus] = field(default_factory=dict)
    phase: str = ""
    began: float = 0.0
    ended: float = 0.0

    @property
    def nodes(self) -> FrozenSet[int]:
        """The nodes that take part, as far as they are known."""
        started = {process.node for process in self.ranks.values()}
        return frozenset(started if self.places is None else self.places.values())
