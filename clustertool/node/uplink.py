"""The uplink joins a supervisor to the lead: it connects, joins, beats, and connects again until the loss timeout."""

from __future__ import annotations

import errno
import socket
import time
from typing import Any, Dict, List, Optional

from clustertool.node.ownclock import OwnClock
from clustertool.node.wire import Mailbox, Wire, beat, context, join_patience
from clustertool.plan.frames import Header

_RETRY = 0.05
# Beats of silence after which the cable counts as broken: a new connection is through as soon as it is whole again, where
# the old one would wait for its next retransmission.
_SILENCE = 3
_MAX_HEADER = 4 << 20
_ORDERS = ("start", "stop", "finish")


class Uplink:
    """turn() each loop; post() what the lead must know; `lost` tells when there is nobody to tell.

    `gone`: why the supervisor, in whose place a guard joins, is no more.
    """

    def __init__(self, spec: Dict[str, Any], gone: str = "") -> None:
        self._gone = gone
        self._node = int(spec["node"])
        self._token = str(spec["token"])
        self._lead = (str(spec["lead"]["host"]), int(spec["lead"]["port"]))
        self._timeout = float(spec["policy"]["loss_timeout"])
        self._beat = beat(self._timeout)
        self._context = context(spec["certificate"], spec["key"], server=False)
        self._mail = Mailbox()
        self._wire: Optional[Wire] = None
        self._join_patience = join_patience(self._timeout, len(spec["header"]["nodes"]))
        self._clock = OwnClock()
        self._retry_at = 0.0
        self._beat_at = 0.0
        self._heard = 0.0
        self._give_up_at = 0.0
        self._joined = False
        self._ordered = False  # the lead has given an order: all nodes have joined, or the job ends

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

    def post(self, message: Header) -> None:
        numbered = self._mail.post(message)
        if self._wire is not None and self._wire.secure:
            self._wire.send(numbered)

    def turn(self) -> List[Header]:
        """The lead's new messages."""
        now = self._clock.turn()
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
        except ConnectionError:
            self._drop(now)
            return []
        if came:
            self._heard, self._joined = now, True
            self._give_up_at = now + self._beat * _SILENCE
        elif now > self._give_up_at:
            self._drop(now)
        new = [message for message in came if self._mail.take(message)]
        if any(message.get("m") in _ORDERS for message in new):
            self._ordered, self._beat_at = True, 0.0
            self._send_beat(now)  # the lead allows more time until it has this acknowledgement
        return new

    def _send_beat(self, now: float) -> None:
        if self._wire is not None and self._wire.secure and now >= self._beat_at:
            self._wire.send({"m": "beat", "a": self._mail.got})
            self._wire.flush()
            self._beat_at = now + self._beat

    def leave(self, seconds: float) -> None:
        """Say that we have the last word and go: the lead need not wait for us. `seconds` at most."""
        if self._wire is None or not self._wire.secure:
            return
        self._wire.send({"m": "beat", "a": self._mail.got, "bye": True})
        end = time.monotonic() + seconds
        while self._wire is not None and self._wire.backlog and time.monotonic() < end:
            self.turn()
            time.sleep(0.002)
        self._drop(self._clock.turn())

    def _connect(self, now: float) -> None:
        self._retry_at, self._give_up_at = now + _RETRY, now + max(1.0, self._timeout / 2)
        family = socket.AF_INET6 if ":" in self._lead[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            refused = sock.connect_ex(self._lead) not in (0, errno.EINPROGRESS)
        except OSError:  # a name that is not known
            refused = True
        if refused:
            sock.close()
            return
        self._wire = Wire(sock, self._context, server=False, max_header=_MAX_HEADER)

    def _join(self) -> None:
        assert self._wire is not None
        gone = {"gone": self._gone} if self._gone else {}
        self._wire.send({"m": "join", "node": self._node, "token": self._token, "a": self._mail.got, **gone})
        for message in self._mail.kept():
            self._wire.send(message)

    def _drop(self, now: float) -> None:
        if self._wire is not None:
            self._wire.close()
        self._wire = None
        self._retry_at = now + _RETRY


def say_gone(spec: Dict[str, Any], why: str, seconds: float) -> None:
    """The word of a guard: its supervisor is gone. Over when the lead has heard it, or after `seconds`."""
    link = Uplink(spec, gone=why)
    end = time.monotonic() + seconds
    while not link.joined and time.monotonic() < end:
        link.turn()
        time.sleep(0.005)
    link.leave(0.0)
