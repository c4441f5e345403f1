"""A joiner searches the coordinator, connects to it, obeys its orders, and becomes its node's supervisor.

Before the job is placed here, a lost coordinator may come back until JOIN_TIMEOUT. After that the joiner undoes what it has
done, and ends.
"""

from __future__ import annotations

import os
import socket
import ssl
import time
from dataclasses import replace
from typing import TYPE_CHECKING, List, Optional, Set, cast

from clustertool.errors import AuthError, ClustertoolError, NodeLost, Terminated
from clustertool.model.elastic.epochs import may_enter
from clustertool.model.job.outcome import Outcome
from clustertool.model.job.state_names import JobState
from clustertool.model.joining.engine_place import messages_of
from clustertool.model.joining.join_errors import error_rows, read_errors, state_of
from clustertool.model.joining.join_file import JoinFile, MeetingPoint
from clustertool.model.shape import read, to_plain
from clustertool.model.wire.frames import Header
from clustertool.node.join import meeting
from clustertool.node.join.epoch_store import StoreMeeting
from clustertool.node.join.join_coordinator import TICK, interrupted
from clustertool.node.join.join_report import JoinReport
from clustertool.node.join.joining_node import JoiningNode, OrderResult
from clustertool.node.join.meeting import Doubt, DoubtTimer
from clustertool.node.join.member_record import MemberRecord
from clustertool.node.system import tls_link
from clustertool.node.system.child_signals import EndRequest, Signals
from clustertool.node.system.process_clock import ProcessClock

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from clustertool.model.wire.join_messages import FetchOrder, PlaceOrder, RelayOrder
    from clustertool.model.wire.spec_types import Spec

_LAST_MESSAGE = 1.0  # seconds
_RETRY = 0.5  # seconds between two rounds of attempts
_CONNECT = 3.0  # seconds for TCP and TLS
_REFUSED = 5.0  # seconds of failing TLS at a port that was named, after which it is no coordinator of this job
_MAX_HEADER = 64 << 20  # a spec
_NO_ANSWER = "the port is open, but no coordinator answers there"
_MALFORMED = (KeyError, TypeError, ValueError)
_CLOSED = "the coordinator closed the connection"
_ENDED = "the job has ended, as its store has it"


class Joiner:
    """The loop of a machine that joins: it searches the coordinator, obeys its orders, and becomes the node's supervisor.

    doubt: about the place where the coordinator is searched.
    """

    def __init__(self, node: JoiningNode, signals: Signals, doubt: Optional[Doubt]) -> None:
        self._node, self._report, self._signals = node, node.report, signals
        self._join = node.join
        self._context = tls_link.context(self._join.identity.certificate, self._join.identity.key, server=False)
        self._search = _Search(self._join, self._context, node.report, node.fix)
        self._doubt = DoubtTimer(doubt, node.report, self._join)
        self._timeout = self._join.cluster.loss_timeout
        self._clock = ProcessClock()
        self._wire: Optional[tls_link.TlsLink] = None
        self._received_at = self._beat_at = 0.0
        self._accepted = False  # the coordinator has accepted the offer on this connection
        self._bound = False  # the job is placed here, or is being placed
        self._signal: Optional[EndRequest] = None  # that ends this process, and the job
        self._round = 0
        self._address = ""  # of this machine, on the way to the coordinator
        self._result: Optional[int] = None

    def run(self) -> int:
        """Join, run the supervisor when the job starts, and return the exit code of this node.

        An error ends the joining: what was done here is undone, and the error is reported, recorded, and its code returned.
        """
        while self._result is None:
            wires: List[FileDescriptorLike] = [self._wire] if self._wire is not None else []
            ready = tls_link.wait_for([self._signals.wake, *self._node.wires(), *wires], TICK)
            try:
                self._turn(ready)
            except ClustertoolError as error:
                self._close()
                self._node.undo()
                self._report.failed(error)
                self._node.record_error(error, coordinates=False)
                self._result = error.code
        return self._result

    def _turn(self, ready: Set[int]) -> None:
        """Handle signals, the result of an order, a stop or release, the store, and the coordinator's messages, once.

        A lost connection is followed by a new attempt. Raises the error that ends the joining.
        """
        now = self._clock.turn()
        for request in self._signals.turn():
            self._handle_signal(request)
        result = self._node.turn(ready)
        if result is not None:
            self._answer(result)
        if self._node.stopped is not None:
            self._send_leaving(self._node.stopped, "stop")
            raise self._node.stopped
        record = self._node.record
        if record is not None and record.released:
            self._release(record)
            return
        if self._node.store is not None and not self._accepted and self._search_in_store(self._node.store, now):
            return
        self._doubt.turn()
        if self._wire is None:
            self._wire, self._accepted = self._search.connect(now), False
            return
        try:
            for message in self._read_messages(self._wire, now):
                if self._result is None:
                    self._obey(message)
        except ConnectionError as error:
            _, text = tls_link.describe_failure(error)
            self._connection_failed(now, text or _CLOSED, tls_link.tls_failed(error))
        except _MALFORMED as error:
            self._connection_failed(now, f"the coordinator sent a message that cannot be read ({error!r:.100})")

    def _search_in_store(self, store: StoreMeeting, now: float) -> bool:
        """Search the coordinator in the store, or campaign there; return True if no connection is to be opened now.

        Then this member has won the epoch, which ends run(), or the job has ended, or the store is not reached. Raises NodeLost
        if that lasts for JOIN_TIMEOUT.
        """
        code, found = store.exit_code, store.coordinator
        if code is not None:
            self._end_with_outcome(Outcome(state_of(code), code, "job", _ENDED))
            return True
        if found is not None and found != self._join.coordinator:
            self._close()
            self._join = replace(self._join, coordinator=found)
            self._search = _Search(self._join, self._context, self._report, self._node.fix)
        member = -1 if self._join.index is None else self._join.index
        self._node.won = store.turn(member, self._node.known, self._own_meeting_point, now)
        if self._node.won is not None:
            self._close()
            self._signals.close()
            self._result = 0
            return True
        if store.view.problem and self._wire is None:
            self._search.require_time(f"the store of the job is not reached: {store.view.problem}")
            return True
        return False

    def _own_meeting_point(self) -> MeetingPoint:
        """Return the address and the free port where this machine would listen as the coordinator.

        Raises PreflightError if no port is free.
        """
        address = self._address or meeting.address_to(self._join.job.elastic.server.urls)
        port = meeting.free_port(self._join, address)
        return MeetingPoint(address, port, self._join.index or 0)

    # -- the connection --

    def _read_messages(self, wire: tls_link.TlsLink, now: float) -> List[Header]:
        """Return the coordinator's messages; send the offer once TLS is set up, and heartbeats.

        Raises ConnectionError, also for an attempt that takes too long, and after LOSS_TIMEOUT without a message.
        """
        fresh = not wire.secure
        messages = wire.turn()
        if fresh and wire.secure:
            self._received_at = now
            self._offer(wire)
        self._search.require_tls(wire, now)
        if messages:
            self._received_at = now
        elif wire.secure and now - self._received_at > self._timeout:
            raise ConnectionError(f"no message from the coordinator for {self._timeout:g} s")
        if wire.secure and now >= self._beat_at:
            self._beat_at = now + tls_link.heartbeat_interval(self._timeout)
            wire.send({"type": "beat"})
            wire.flush()
        return messages

    def _offer(self, wire: tls_link.TlsLink) -> None:
        """Send the offer and settings of this machine, and store its address: the set one, else the connection's."""
        with socket.socket(fileno=os.dup(wire.fileno())) as sock:
            local, coordinator = str(sock.getsockname()[0]), str(sock.getpeername()[0])
        self._address = self._join.own.address or local
        offer = self._node.offer(self._address, self._join.index)._replace(coordinator=coordinator)._asdict()
        wire.send({"type": "offer", "index": offer.pop("node"), **offer, "own": to_plain(self._join.offered)})
        wire.flush()

    def _connection_failed(self, now: float, why: str, tls: bool = False) -> None:
        """Close the connection that has failed, undo what was done here, and report the cause `why`. tls: it failed in TLS.

        Raises the error of a signal that waits for the coordinator's decision; NodeLost if the job, not elastic, is placed
        here; and AuthError of _Search.failed().
        """
        self._close()
        if self._signal is not None:
            raise interrupted(self._signal, self._node.name)
        if self._bound and not self._join.job.elastic.present:
            what = f"the coordinator {self._search.where} was lost before the job started: {why}"
            raise NodeLost(what, "see what ended it there, and start the job again")
        self._node.undo()  # a probe, whose result is not wanted any more; in an elastic job, all that was done for the epoch
        self._bound = False
        self._search.failed(now, why, tls)

    def _close(self) -> None:
        """Close the connection to the coordinator, if there is one."""
        if self._wire is not None:
            self._wire.close()
            self._wire = None

    def _handle_signal(self, request: EndRequest) -> None:
        """Report a signal that ends this process to the coordinator, and raise its error, or leave the coordinator to decide.

        The coordinator decides where the job is placed here: it ends the job, or the job has just begun, and is stopped then.
        One that an engine has started always decides: it asks the engine for the reason.
        """
        error = interrupted(request, self._node.name)
        self._send_leaving(error)
        if self._wire is None or not (self._bound or (self._wire.secure and self._join.names)):
            raise error
        self._signal = self._signal or request

    def _send_leaving(self, error: ClustertoolError, kind: str = "leaving") -> None:
        """Send the coordinator the error with which this machine leaves, within a second; do nothing without a connection.

        The coordinator ends the job if it has its plan. kind: of the message.
        """
        if self._wire is not None and self._wire.secure:
            self._wire.send({"type": kind, "errors": error_rows(error)})
            until = time.monotonic() + _LAST_MESSAGE
            while self._wire.backlog and time.monotonic() < until:
                self._wire.flush()
                time.sleep(0.002)

    # -- orders --

    def _obey(self, message: Header) -> None:
        """Execute the order in a message of the coordinator; ignore other types.

        Raises one of _MALFORMED, and the error with which the coordinator ends the joining.
        """
        kind = message["type"]
        if kind in ("probe", "relay", "fetch", "place", "launch", "undo"):
            self._round = int(message["round"])
        if kind == "wait":
            self._report_waiting(message)
        elif kind == "probe":
            self._node.probe(self._address)
        elif kind == "relay":
            if not self._node.relay.begin(cast("RelayOrder", message)):
                self._answer(OrderResult())
        elif kind == "fetch":
            if not self._node.relay.fetch(cast("FetchOrder", message)):
                self._answer(OrderResult())
        elif kind == "place":
            order = cast("PlaceOrder", message)
            self._require_later(order["spec"])
            self._bound = True
            self._node.place(order)
        elif kind == "launch":
            self._launch(float(message["now"]))
        elif kind == "undo":
            self._bound = False
            self._node.undo()
            self._answer(OrderResult())
        elif kind == "go":
            self._close()
            self._signals.close()
            self._result = self._node.run(self._signal)
        elif kind == "over":
            self._end_with_outcome(read(Outcome, message["outcome"]))
        elif kind in ("abort", "refused"):
            raise read_errors(message["errors"])

    def _require_later(self, spec: Spec) -> None:
        """Raise NodeLost if the spec is of an epoch that is not later than the last one in which this machine took part."""
        elastic, known = spec.get("elastic"), self._node.known
        if elastic is not None and not may_enter(elastic["epoch"], known):
            begins = f"the coordinator {self._search.where} begins epoch {elastic['epoch']}"
            what = f"{begins}, and epoch {known} has begun here before"
            raise NodeLost(what, "start the job again")

    def _release(self, record: MemberRecord) -> None:
        """Leave the job, since its user has released this machine between two epochs: undo, record `left`, and end run()."""
        self._send_leaving(Terminated(f"{self._node.name} leaves: {record.released}"))
        self._node.undo()
        record.record("left", why=record.released)
        self._end_with_outcome(Outcome(JobState.STOPPED, record.code, "tool", record.released))

    def _end_with_outcome(self, outcome: Outcome) -> None:
        """Report and record the outcome, and end run() with its code: the job has ended, or goes on without this machine."""
        self._close()
        self._report.ended(outcome)
        self._node.record_outcome(outcome)
        self._result = outcome.code

    def _report_waiting(self, message: Header) -> None:
        """Report how many machines have joined, and at the first such message that the coordinator has accepted this one.

        Then the doubt about the place, and earlier failures, are dropped.
        """
        present, nnodes = int(message["present"]), int(message["nnodes"])
        missing = [int(index) for index in message["missing"]]
        if not self._accepted:
            self._accepted = True
            self._search.found()
            self._doubt.found()
            self._report.joined(self._search.where)
        self._report.waiting(present, nnodes, missing, self._search.where, self._join.names)

    def _launch(self, now: float) -> None:
        """Prepare the supervisor, and send the coordinator the result or the error. now: the coordinator's time."""
        try:
            self._node.launch(now)
        except ClustertoolError as error:
            if self._node.stopped is None:  # else this machine leaves in its next turn
                self._answer(OrderResult(error))
        else:
            self._answer(OrderResult())

    def _answer(self, result: OrderResult) -> None:
        """Send the coordinator the result of the present order, or its error; do nothing without a connection."""
        if self._wire is None:
            return
        if result.error is not None:
            self._wire.send({"type": "failed", "round": self._round, "errors": error_rows(result.error)})
        else:
            self._wire.send({"type": "done", "round": self._round, "facts": result.facts, "port": result.port})
        self._wire.flush()


class _Search:
    """The search of the coordinator: connect() begins an attempt, failed() ends it. Each new cause is reported once.

    `now`: of the caller's clock. fix: what a user does if the coordinator is not found.
    """

    def __init__(self, join: JoinFile, ctx: ssl.SSLContext, report: JoinReport, fix: str) -> None:
        self._fix = fix
        self._join, self._context, self._report = join, ctx, report
        self.where = meeting.describe_place(join)
        self._to_try: List[meeting.Endpoint] = []
        self._tried_at = self._retry_at = 0.0
        self._cause = ""
        self._began = time.monotonic()
        self._tls_since: Optional[float] = None  # since when TLS fails at the port that was named

    def require_time(self, cause: str) -> None:
        """Raise NodeLost if no coordinator was found within JOIN_TIMEOUT. cause: why not, for the message."""
        limit = self._join.join_timeout
        if time.monotonic() - self._began > limit:
            what = f"no coordinator at {self.where} within {limit:g} s: {cause}"
            fix = self._fix or "start the job on the coordinator's machine too; a firewall may block its port"
            if self._join.names:
                fix = f"{messages_of(self._join.engine)} has the messages of that node; a firewall may block its port"
            raise NodeLost(what, fix)

    def connect(self, now: float) -> Optional[tls_link.TlsLink]:
        """Begin to connect to the next endpoint, if it is time for that, and return the connection.

        None if it is not, the host is not known, or the attempt fails at once. Raises NodeLost after JOIN_TIMEOUT.
        """
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
        try:
            sock = tls_link.dial(*self._to_try.pop(0))
        except OSError as error:
            self._note((error.strerror or "").lower())
            return None
        self._tried_at = now
        return tls_link.TlsLink(sock, self._context, server=False, max_header=_MAX_HEADER)

    def require_tls(self, wire: tls_link.TlsLink, now: float) -> None:
        """Raise ConnectionError if TLS is not set up within 3 seconds of the attempt's begin."""
        if not wire.secure and now - self._tried_at > _CONNECT:
            raise ConnectionError(_NO_ANSWER if wire.connected else tls_link.TIMED_OUT[1])

    def found(self) -> None:
        """Forget the failures, since the coordinator has answered. In an elastic job JOIN_TIMEOUT begins again."""
        self._cause, self._tls_since, self._to_try = "", None, []
        if self._join.job.elastic.present:  # the time is that without a coordinator
            self._began = time.monotonic()

    def failed(self, now: float, why: str, tls: bool) -> None:
        """Report why an attempt or a connection has failed, and delay the next round of attempts. tls: it failed in TLS.

        Raises AuthError if TLS fails for more than 5 seconds at a port that was named.
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
        """Report the cause of a failed attempt, if it is a new one; do nothing while other endpoints are to be tried."""
        if self._to_try:
            return
        if why != self._cause:
            self._report.retry(self.where, why)
        self._cause = why
