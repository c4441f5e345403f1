"""A job has limits of time: --timeout for all of it, --lease for the time without a laptop, and that of mpirun's end."""

from __future__ import annotations

from typing import Callable, Iterator, List, Sequence

from clustertool.model.job.state_names import JobState
from clustertool.model.roles import MPI_DAEMON
from clustertool.model.wire.coordinator_messages import RankExit
from clustertool.node.supervisor.coordinator.job_decisions import StopAsked

_LEAST = 5.0  # seconds for the ends of mpirun and of its ranks to become known


class LauncherWatch:
    """Watches how mpirun and its daemons end. limit: seconds that mpirun and its ranks may wait for the other's end."""

    def __init__(self, grace: float) -> None:
        self.limit = max(_LEAST, grace)
        self._waits = ""
        self._since = 0.0
        self._ended: List[RankExit] = []

    def note(self, exits: Sequence[RankExit]) -> None:
        self._ended += [exit for exit in exits if exit.role == MPI_DAEMON]

    def take_ended(self) -> List[RankExit]:
        """Return the daemons that have ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def passed(self, now: float, waits: str) -> bool:
        """Check whether the job has waited for more than the limit. waits: for what it waits now, "" for nothing."""
        if waits != self._waits:
            self._waits, self._since = waits, now
        return bool(waits) and now - self._since > self.limit


class JobLimits:
    """`timeout`, `lease`: seconds; 0: there is no limit. `grace`: see LauncherWatch. All times are of time.monotonic()."""

    def __init__(self, timeout: float, lease: float, now: float, grace: float = 0.0) -> None:
        self.launcher = LauncherWatch(grace)
        self._timeout, self._lease = timeout, lease  # 0 also when it has passed
        self._began = self._attached_at = now

    def began_before(self, age: float, unattended: float) -> None:
        """Earlier epochs count, too: the seconds since the first one began, and since a laptop was attached."""
        self._began -= age
        self._attached_at -= unattended

    def unattended(self, now: float) -> float:
        """Compute the seconds since a laptop was attached."""
        return now - self._attached_at

    def attached(self, now: float) -> None:
        """Record that a laptop follows the job."""
        self._attached_at = now

    def passed(self, now: float, missing: Callable[[], str]) -> Iterator[StopAsked]:
        """Yield a stop for each limit that has passed, once. `missing`: describes what the job waits for, or returns ""."""
        if self._timeout and now - self._began > self._timeout:
            brief = f"the job exceeded its time limit (--timeout {self._timeout:g} s)"
            self._timeout = 0.0
            what = missing()
            waited = f"; it waited for {what}" if what else ""
            yield StopAsked(f"{brief}{waited}", 124, JobState.TIMEOUT, brief)
        if self._lease and now - self._attached_at > self._lease:
            self._lease = 0.0
            yield StopAsked(f"no laptop was attached for {now - self._attached_at:.0f} s (--lease)", 143)
