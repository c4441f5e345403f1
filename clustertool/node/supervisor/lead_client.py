"""The uplink joins a supervisor to the lead: it connects, joins, beats, and connects again until the loss timeout."""

from __future__ import annotations

import errno
import os
import socket
import time
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Sequence, Tuple

from clustertool.model.wire.frames import Header
from clustertool.model.wire.lead_messages import Incarnation, read_incarnation
from clustertool.node.system.process_clock import OwnClock
from clustertool.node.system.tls_link import TIMED_OUT, Mailbox, Wire, beat, cause, context, join_patience

if TYPE_CHECKING:
    from clustertool.model.wire.lead_messages import MemberMessage
    from clustertool.model.wire.spec_types import Spec

_RETRY = 0.05
# Beats of silence after which the cable counts as broken: a new connection is through as soon as it is whole again, where
# the old one would wait for its next retransmission.
_SILENCE = 3
_MAX_HEADER = 4 << 20
_REPORT_AFTER = 3.0  # seconds without a connection
_NO_ANSWER = ("", "the port is open, but the coordinator does not answer")
_SILENT = ("", "no message from it any more")  # on a connection that was established
_ORDERS = ("start", "stop", "finish")
_MOST_RANKS = 256  # whose progress is reported: more do not fit a message


class Uplink:
    """turn() each loop; post() what the lead must know; `lost` tells when there is nobody to tell.

    `me`: this process. `gone`: the supervisor in whose place a guard joins, and why it is no more. `record` writes an event.
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
        self._gone = gone
        self._record = record
        self._node = int(spec["node"])
        self._token = str(spec["token"])
        self._lead = (str(spec["lead"]["host"]), int(spec["lead"]["port"]))
        self.endpoint = str(spec["lead"]["endpoint"])
        self._timeout = float(spec["policy"]["loss_timeout"])
        self._beat = beat(self._timeout)
        self._context = context(spec["certificate"], spec["key"], server=False)
        self._mail = Mailbox()
        self._wire: Optional[Wire] = None
        self._join_patience = join_patience(self._timeout, len(spec["header"]["nodes"]))
        if spec["policy"]["timeout"]:  # the lead waits no longer
            self._join_patience = min(self._join_patience, float(spec["policy"]["timeout"]) + self._timeout)
        self._clock = OwnClock()
        self._retry_at = 0.0
        self._beat_at = 0.0
        self._heard = 0.0
        self._give_up_at = self._handshake_until = 0.0
        self._joined = False
        self._up = False  # the lead answers on this connection
        self._down = (0.0, time.time())  # since when it does not, by our clock and by that of the machine
        self._cause: Optional[Tuple[str, str]] = None  # why the last connection failed
        self._recorded: Optional[Tuple[str, str]] = None
        self._ordered = False  # the lead has given an order: all nodes have joined, or the job ends
        self.progress: Sequence[Tuple[Any, ...]] = ()  # see Recorder
        self._reported: Sequence[Tuple[Any, ...]] = self.progress

    @property
    def wire(self) -> Optional[Wire]:
        return self._wire

    @property
    def joined(self) -> bool:
        return self._joined

    @property
    def lost(self) -> bool:
        """No message from the lead for the loss timeout, or, before its first order, for the time to join.

        Only seconds in which this process ran are counted, and turn() reads first what has arrived.
        """
        return self._clock.now - self._heard > (self._timeout if self._ordered else self._join_patience)

    def post(self, message: MemberMessage) -> None:
        numbered = self._mail.post({**message, "sender": self._me})
        if self._wire is not None and self._wire.secure:
            self._wire.send(numbered)

    @property
    def cause(self) -> str:
        """Why there is no connection, in words."""
        errno_name, words = self._why()
        return f"{words} ({errno_name})" if errno_name else words

    def turn(self) -> List[Header]:
        """The lead's new messages."""
        new = self._turn(self._clock.turn())
        self._report()
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
            self._heard, self._joined, self._up = now, True, True
            self._give_up_at = now + self._beat * _SILENCE
        elif now > self._give_up():
            self._drop(now, _SILENT if self._up else _NO_ANSWER if self._wire.connected else TIMED_OUT)
        try:
            self._require_coordinator(came)
            new = [message for message in came if self._mail.take(message)]
        except ValueError as error:
            self._drop(now, ("", str(error)))
            return []
        if any(message.get("type") in _ORDERS for message in new):
            self._ordered, self._beat_at = True, 0.0
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
            self._wire.send(self._stamped({"type": "beat", **self._news()}))
            self._wire.flush()
            self._beat_at = now + self._beat

    def _news(self) -> Header:
        """How far the ranks are, if that has changed. Ages, since the lead has another clock."""
        if self.progress is self._reported:
            return {}
        self._reported, now = self.progress, time.time()
        return {
            "ranks": [[*reached[:4], round(max(0.0, now - reached[4]), 1)] for reached in self.progress[:_MOST_RANKS]]
        }

    def leave(self, seconds: float) -> None:
        """Say that we have the last word and go: the lead need not wait for us. `seconds` at most."""
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
        waiting = self._wire is not None and self._wire.connected and not (self._up or self._ordered)
        return self._handshake_until if waiting else self._give_up_at

    def _connect(self, now: float) -> None:
        self._retry_at, self._give_up_at = now + _RETRY, now + max(1.0, self._timeout / 2)
        self._handshake_until = now + self._join_patience / 2
        family = socket.AF_INET6 if ":" in self._lead[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            failed = sock.connect_ex(self._lead)
            if failed not in (0, errno.EINPROGRESS):
                raise OSError(failed, os.strerror(failed))
        except OSError as error:  # also for a name that is not known
            sock.close()
            self._cause = cause(error)
            return
        self._wire = Wire(sock, self._context, server=False, max_header=_MAX_HEADER)

    def _join(self) -> None:
        assert self._wire is not None
        self._reported = ()
        gone = {"of": self._gone[0], "gone": self._gone[1]} if self._gone else {}
        self._wire.send(self._stamped({"type": "join", "node": self._node, "token": self._token, **gone}))
        for message in self._mail.kept():
            self._wire.send(message)

    def _drop(self, now: float, why: Tuple[str, str]) -> None:
        if self._wire is not None:
            self._wire.close()
        if self._up:
            self._down = (now, time.time())
        self._wire, self._up, self._cause = None, False, why
        self._retry_at = now + _RETRY

    def _why(self) -> Tuple[str, str]:
        """Why there is no connection, also before the first attempt has failed."""
        pending = self._wire is None or not self._wire.connected
        return self._cause or (TIMED_OUT if pending else _NO_ANSWER)

    def _report(self) -> None:
        """Record that there has been no connection for a while, each new cause, and that there is one again."""
        if self._record is None:
            return
        if self._up:
            if self._recorded:
                self._record("connected")
            self._recorded = None
        elif self._clock.now - self._down[0] >= _REPORT_AFTER and self._why() != self._recorded:
            name, words = self._recorded = self._why()
            since = round(self._down[1], 3)
            self._record("unconnected", endpoint=self.endpoint, errno=name, why=words, since=since, again=self._joined)


def say_gone(spec: Spec, me: Incarnation, supervisor: Incarnation, why: str, seconds: float) -> None:
    """A guard reports that its supervisor is gone. Over when the coordinator has it, or after `seconds`."""
    link = Uplink(spec, me, gone=(supervisor, why))
    end = time.monotonic() + seconds
    while not link.joined and time.monotonic() < end:
        link.turn()
        time.sleep(0.005)
    link.leave(0.0)
