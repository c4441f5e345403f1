"""The limits of time of a job: --timeout for all of it, and --lease for the time without a laptop."""

from __future__ import annotations

from typing import Callable, Iterator

from clustertool.model.job.state_names import JobState
from clustertool.node.supervisor.coordinator.lead_decisions import StopAsked


class JobLimits:
    """`timeout`, `lease`: seconds; 0: there is no limit. All times are of time.monotonic()."""

    def __init__(self, timeout: float, lease: float, now: float) -> None:
        self._timeout, self._lease = timeout, lease  # 0 also when it has passed
        self._began = self._attached_at = now

    def attached(self, now: float) -> None:
        """A laptop follows the job."""
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
