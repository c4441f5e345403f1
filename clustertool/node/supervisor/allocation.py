"""The allocation of a job is what an engine has given to it on this node.

The engine may end the job by signals to all its processes, and knows why it does so.
"""

from __future__ import annotations

from typing import Callable, NamedTuple, Optional, Set

from clustertool.errors import NotFound
from clustertool.model.job.outcome import Outcome


class End(NamedTuple):
    """How a job has ended on this node.

    coordinates: it is the coordinator's. silent: nothing comes from another node any more, so the engine would wait for it.
    lost: the job has ended because of that.
    """

    coordinates: bool = True
    silent: bool = False
    lost: bool = False


class Allocation:
    """The allocation of a job that no engine has started: none. The engines have subclasses. present: whether there is one."""

    present = False
    restarts = 0  # how often the engine had started the job before

    def attach(self, spare: Set[int]) -> None:
        """Do nothing; a subclass keeps `spare`, the supervisor's set of pids of children that are no processes of the job."""

    def ask(self, by: str, code: int) -> None:
        """Do nothing; a subclass begins to ask the engine why it ends the job, without waiting.

        by, code: the signal as text, and its exit code.
        """

    def turn(self) -> Optional[Outcome]:
        """Return None; a subclass returns the outcome of the job, once, when the engine has answered or is late."""
        return None

    def comes_back(self, outcome: Outcome) -> bool:
        """Return False; a subclass checks whether the engine may start the job again after it has ended with `outcome`."""
        return False

    def leave(self, end: End) -> str:
        """Do nothing, and return ""; a subclass leaves the allocation after the end of the job, and returns what went wrong.

        It makes the engine start the job again where an orderly end would prevent that, and gives the nodes back where the
        engine would wait for a lost one.
        """
        return ""


class Origin(NamedTuple):
    """What started a supervisor.

    bundle: what another node needs to join the job, b"" where nodes cannot join. It stays in memory. store_end: in an elastic
    job with a store, the time until which this node may have ranks, in seconds of CLOCK_BOOTTIME: when the newest request was
    sent that has renewed its lease in the store, and the time of that lease. file: the file by which this machine has joined,
    which has the tool's code, b"" if none.
    """

    bundle: bytes = b""
    allocation: Allocation = Allocation()
    store_end: Optional[Callable[[], float]] = None
    file: bytes = b""

    def require_bundle(self, node: str) -> bytes:
        """Return the bundle. Raises NotFound, which names `node`, if there is none because the job was started by ssh."""
        if not self.bundle:
            what = f"the supervisor on {node} has no bundle: its job was started by ssh"
            raise NotFound(what, "only a job whose nodes join has one")
        return self.bundle


AGENT = Origin()
