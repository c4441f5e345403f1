"""The search for the coordinator connects to each address and port that may be its own, until JOIN_TIMEOUT."""

from __future__ import annotations

import ssl
import time
from typing import List, Optional

from clustertool.errors import AuthError, NodeLost
from clustertool.model.joining.join_errors import messages_of
from clustertool.model.joining.join_file import JoinFile
from clustertool.node.join import meeting
from clustertool.node.join.join_report import JoinReport
from clustertool.node.system.tls_link import TIMED_OUT, TlsLink, dial

_RETRY = 0.5  # seconds between two rounds of attempts
_CONNECT = 3.0  # seconds for TCP and TLS
_REFUSED = 5.0  # seconds of failing TLS at a port that was named, after which it is no coordinator of this job
_MAX_HEADER = 64 << 20  # a spec
_NO_ANSWER = "the port is open, but no coordinator answers there"


class CoordinatorSearch:
    """connect() begins an attempt; failed() ends it. `now`: of the caller's clock. Each new cause is reported once.

    fix: what a user does if the coordinator is not found.
    """

    def __init__(self, join: JoinFile, ctx: ssl.SSLContext, report: JoinReport, fix: str = "") -> None:
        self._fix = fix
        self._join, self._context, self._report = join, ctx, report
        self.where = meeting.where(join)
        self._to_try: List[meeting.Endpoint] = []
        self._tried_at = self._retry_at = 0.0
        self._cause = ""
        self._began = time.monotonic()
        self._tls_since: Optional[float] = None  # since when TLS fails at the port that was named

    def require_time(self, cause: str) -> None:
        """Raise NodeLost after JOIN_TIMEOUT. cause: why there is no coordinator."""
        limit = self._join.join_timeout
        if time.monotonic() - self._began > limit:
            what = f"no coordinator at {self.where} within {limit:g} s: {cause}"
            if self._join.names:
                raise NodeLost(
                    what,
                    f"{messages_of(self._join.engine)} has the messages of that node; a firewall may block its port",
                )
            raise NodeLost(
                what, self._fix or "start the job on the coordinator's machine too; a firewall may block its port"
            )

    def connect(self, now: float) -> Optional[TlsLink]:
        """Begin a new attempt, if it is time for one. Raises NodeLost after JOIN_TIMEOUT."""
        self.require_time(self._cause or "it did not answer")
        if now < self._retry_at:
            return None
        if not self._to_try:
            self._retry_at = now + _RETRY
            try:
                self._to_try = meeting.endpoints(self._join)
            except (OSError, UnicodeError) as error:
                self._note(f"{self._join.coordinator.host}: {error}")
                return None
        return self._open(*self._to_try.pop(0), now=now)

    def _open(self, address: str, port: int, now: float) -> Optional[TlsLink]:
        try:
            sock = dial(address, port)
        except OSError as error:
            self._note((error.strerror or "").lower())
            return None
        self._tried_at = now
        return TlsLink(sock, self._context, server=False, max_header=_MAX_HEADER)

    def check(self, wire: TlsLink, now: float) -> None:
        """Raise ConnectionError if an attempt takes too long."""
        if not wire.secure and now - self._tried_at > _CONNECT:
            raise ConnectionError(_NO_ANSWER if wire.connected else TIMED_OUT[1])

    def found(self) -> None:
        """Record that the coordinator has answered."""
        self._cause, self._tls_since, self._to_try = "", None, []
        if self._join.job.elastic.present:  # the time is that without a coordinator
            self._began = time.monotonic()

    def failed(self, now: float, why: str, tls: bool) -> None:
        """Record that an attempt has failed, or a connection has ended. tls: it failed in TLS.

        Raises AuthError if that does not change.
        """
        self._note(why)
        if not self._to_try:
            self._retry_at = now + _RETRY
        if not tls or not self._join.coordinator.port:
            return
        self._tls_since = now if self._tls_since is None else self._tls_since
        if now - self._tls_since > _REFUSED:
            what = f"{self.where} is no coordinator of this job: {why}"
            raise AuthError(what, "give all machines the same secret; see whether another program has this port")

    def _note(self, why: str) -> None:
        """Report why attempts fail. Of several ports the last one that failed counts."""
        if self._to_try:
            return
        if why != self._cause:
            self._report.retry(self.where, why)
        self._cause = why
