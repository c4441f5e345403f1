"""The uplink connects a supervisor to the lead, sends heartbeats, and connects again until the loss timeout."""

from __future__ import annotations

import errno
import os
import socket
import time
from typing import TYPE_CHECKING, Callable, List, Optional, Sequence, Tuple

from clustertool.model.wire.frames import Header
from clustertool.model.wire.lead_messages import Incarnation, read_incarnation
from clustertool.node.supervisor.coordinator.connection_report import Cause, ConnectionReport
from clustertool.node.supervisor.usage_recorder import Reached
from clustertool.node.system.process_clock import ProcessClock
from clustertool.node.system.tls_link import TIMED_OUT, Mailbox, TlsLink, beat, cause, context, join_patience

if TYPE_CHECKING:
    from clustertool.model.wire.lead_messages import MemberMessage
    from clustertool.model.wire.spec_types import Spec

_RETRY = 0.05
# Beats of silence after which the cable counts as broken: a new connection is through as soon as it is whole again, where
# the old one would wait for its next retransmission.
_SILENCE = 3
_MAX_HEADER = 4 << 20
_NO_ANSWER = ("", "the port is open, but the coordinator does not answer")
_SILENT = ("", "no message from it any more")  # on a connection that was established
_ORDERS = ("start", "stop", "finish")
_MOST_RANKS = 256  # ranks with reported progress: more do not fit into a message


class ProgressReport:
    """The progress of this node's ranks, for heartbeats. It is sent if it has changed, and on each new connection."""

    def __init__(self) -> None:
        self.newest: Sequence[Reached] = ()
        self._sent: Sequence[Reached] = self.newest

    def reconnected(self) -> None:
        self._sent = ()

    def fields(self) -> Header:
        """The fields of the next heartbeat. Ages, since the lead has another clock."""
        if self.newest is self._sent:
            return {}
        self._sent, now = self.newest, time.time()
        return {
            "ranks": [[*reached[:4], round(max(0.0, now - reached[4]), 1)] for reached in self.newest[:_MOST_RANKS]]
        }


class LeadTimeouts:
    """How long the lead may be silent: for the loss timeout, or until its first order for the time that all nodes need to join.

    Only seconds in which this process ran are counted.
    """

    def __init__(self, spec: Spec) -> None:
        self.loss = float(spec["policy"]["loss_timeout"])
        self.join = join_patience(self.loss, len(spec["header"]["nodes"]))
        if spec["policy"]["timeout"]:  # the lead waits no longer
            self.join = min(self.join, float(spec["policy"]["timeout"]) + self.loss)
        self.ordered = False  # the lead has given an order: all nodes have joined, or the job ends
        self.received_at = 0.0

    def expired(self, now: float) -> bool:
        return now - self.received_at > (self.loss if self.ordered else self.join)


class LeadClient:
    """Call turn() each loop and post() for each message; `lost` is true if the lead is silent for too long.

    `me`: this process. `gone`: the supervisor in whose place a guard joins, and why it has died. `record` writes an event.
    """

    def __init__(
        self,
        spec: Spec,
        me: Incarnation,
        gone: Optional[Tuple[Incarnation, str]] = None,
        record: Optional[Callable[..., None]] = None,
    ) -> None:
        self._me = me
        self._coordinator: Optional[Incarnation] = None  # the one that this process obeys
        self.attempt = 0  # of the job, as this node knows it
        self._hello: Header = {"type": "join", "node": int(spec["node"]), "token": str(spec["token"])}
        if gone:
            self._hello.update(of=gone[0], gone=gone[1])
        self._lead = (str(spec["lead"]["host"]), int(spec["lead"]["port"]))
        self._timeouts = LeadTimeouts(spec)
        self._context = context(spec["certificate"], spec["key"], server=False)
        self._mail = Mailbox()
        self._wire: Optional[TlsLink] = None
        self._report = ConnectionReport(str(spec["lead"]["endpoint"]), record)
        self._clock = ProcessClock()
        self._retry_at = 0.0
        self._beat_at = 0.0
        self._give_up_at = self._handshake_until = 0.0
        self.progress = ProgressReport()

    @property
    def wire(self) -> Optional[TlsLink]:
        return self._wire

    @property
    def joined(self) -> bool:
        return self._report.joined

    @property
    def endpoint(self) -> str:
        return self._report.endpoint

    @property
    def lost(self) -> bool:
        """Whether the lead was silent for too long. turn() reads first what has arrived."""
        return self._timeouts.expired(self._clock.now)

    def post(self, message: MemberMessage) -> None:
        numbered = self._mail.post({**message, "sender": self._me})
        if self._wire is not None and self._wire.secure:
            self._wire.send(numbered)

    @property
    def cause(self) -> str:
        """Why there is no connection, as text."""
        errno_name, text = self._why()
        return f"{text} ({errno_name})" if errno_name else text

    def turn(self) -> List[Header]:
        """The lead's new messages."""
        new = self._turn(self._clock.turn())
        self._report.turn(self._clock.now, self._why())
        return new

    def _turn(self, now: float) -> List[Header]:
        if self._wire is None:
            if now >= self._retry_at:
                self._connect(now)
            return []
        try:
            fresh = not self._wire.secure
            came = self._wire.turn()
            if fresh and self._wire.secure:
                self._join()
            self._send_beat(now)
        except ConnectionError as error:
            self._drop(now, cause(error))
            return []
        if came:
            self._report.established()
            self._timeouts.received_at = now
            self._give_up_at = now + beat(self._timeouts.loss) * _SILENCE
        elif now > self._give_up():
            self._drop(now, _SILENT if self._report.up else _NO_ANSWER if self._wire.connected else TIMED_OUT)
        try:
            self._require_coordinator(came)
            new = [message for message in came if self._mail.take(message)]
        except ValueError as error:
            self._drop(now, ("", str(error)))
            return []
        if any(message.get("type") in _ORDERS for message in new):
            self._timeouts.ordered, self._beat_at = True, 0.0
            self._send_beat(now)  # the lead allows more time until it has this acknowledgement
        return new

    def _require_coordinator(self, messages: Sequence[Header]) -> None:
        """Raise ValueError for messages of another process than the first that answered as the coordinator."""
        for message in messages:
            sender = read_incarnation(message.get("sender"))
            self._coordinator = self._coordinator or sender
            if sender != self._coordinator:
                raise ValueError("another process answers as the coordinator")

    def _stamped(self, message: Header) -> Header:
        return {**message, "ack": self._mail.got, "attempt": self.attempt, "sender": self._me}

    def _send_beat(self, now: float) -> None:
        if self._wire is not None and self._wire.secure and now >= self._beat_at:
            self._wire.send(self._stamped({"type": "beat", **self.progress.fields()}))
            self._wire.flush()
            self._beat_at = now + beat(self._timeouts.loss)

    def leave(self, seconds: float) -> None:
        """Report that all messages have arrived here, so that the lead does not wait for this node. `seconds` at most."""
        if self._wire is None or not self._wire.secure:
            return
        self._wire.send(self._stamped({"type": "beat", "bye": True}))
        end = time.monotonic() + seconds
        while self._wire is not None and self._wire.backlog and time.monotonic() < end:
            self.turn()
            time.sleep(0.002)
        self._drop(self._clock.turn(), _NO_ANSWER)

    def _give_up(self) -> float:
        """When this connection counts as broken. A lead to which many connect at once answers late: a new try is no help."""
        waiting = self._wire is not None and self._wire.connected and not (self._report.up or self._timeouts.ordered)
        return self._handshake_until if waiting else self._give_up_at

    def _connect(self, now: float) -> None:
        self._retry_at, self._give_up_at = now + _RETRY, now + max(1.0, self._timeouts.loss / 2)
        self._handshake_until = now + self._timeouts.join / 2
        family = socket.AF_INET6 if ":" in self._lead[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            failed = sock.connect_ex(self._lead)
            if failed not in (0, errno.EINPROGRESS):
                raise OSError(failed, os.strerror(failed))
        except OSError as error:  # also for a name that is not known
            sock.close()
            self._report.failed(cause(error))
            return
        self._wire = TlsLink(sock, self._context, server=False, max_header=_MAX_HEADER)

    def _join(self) -> None:
        assert self._wire is not None
        self.progress.reconnected()
        self._wire.send(self._stamped(self._hello))
        for message in self._mail.kept():
            self._wire.send(message)

    def _drop(self, now: float, why: Cause) -> None:
        if self._wire is not None:
            self._wire.close()
        self._wire = None
        self._report.broken(now, why)
        self._retry_at = now + _RETRY

    def _why(self) -> Cause:
        """Why there is no connection, also before the first attempt has failed."""
        pending = self._wire is None or not self._wire.connected
        return self._report.cause or (TIMED_OUT if pending else _NO_ANSWER)


def say_gone(spec: Spec, me: Incarnation, supervisor: Incarnation, why: str, seconds: float) -> None:
    """Report for a guard that its supervisor has died. Return when the lead has answered, or after `seconds`."""
    link = LeadClient(spec, me, gone=(supervisor, why))
    end = time.monotonic() + seconds
    while not link.joined and time.monotonic() < end:
        link.turn()
        time.sleep(0.005)
    link.leave(0.0)
