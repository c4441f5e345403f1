"""The uplink joins a supervisor to the lead: it connects, joins, beats, and connects again until the loss timeout."""

from __future__ import annotations

import socket
import time
from typing import Any, Dict, List, Optional

from clustertool.node.wire import Mailbox, Wire, context
from clustertool.plan.frames import Header

_RETRY = 0.05
_JOIN_PATIENCE = 30.0  # the lead may start later than we do
_MAX_HEADER = 4 << 20


class Uplink:
    """turn() each loop; post() what the lead must know; `silent` tells how long nothing was heard."""

    def __init__(self, spec: Dict[str, Any]) -> None:
        self._node = int(spec["node"])
        self._token = str(spec["token"])
        self._lead = (str(spec["lead"]["host"]), int(spec["lead"]["port"]))
        self._timeout = float(spec["policy"]["loss_timeout"])
        self._context = context(spec["certificate"], spec["key"], server=False)
        self._mail = Mailbox()
        self._wire: Optional[Wire] = None
        self._retry_at = 0.0
        self._beat_at = 0.0
        self._heard = time.monotonic()
        self._joined = False

    @property
    def wire(self) -> Optional[Wire]:
        return self._wire

    @property
    def lost(self) -> bool:
        """No word from the lead for the loss timeout; before the first word there is more patience."""
        patience = self._timeout if self._joined else max(self._timeout, _JOIN_PATIENCE)
        return time.monotonic() - self._heard > patience

    def post(self, message: Header) -> None:
        numbered = self._mail.post(message)
        if self._wire is not None and self._wire.secure:
            self._wire.send(numbered)

    def turn(self) -> List[Header]:
        """The lead's new messages."""
        now = time.monotonic()
        if self._wire is None:
            if now >= self._retry_at:
                self._connect(now)
            return []
        try:
            fresh = not self._wire.secure
            came = self._wire.turn()
            if fresh and self._wire.secure:
                self._join()
            if self._wire.secure and now >= self._beat_at:
                self._wire.send({"m": "beat", "a": self._mail.got})
                self._beat_at = now + min(1.0, self._timeout / 4)
        except ConnectionError:
            self._drop(now)
            return []
        if came:
            self._heard, self._joined = now, True
        return [message for message in came if self._mail.take(message)]

    def flush(self, seconds: float) -> None:
        """Let the last words out, for a moment at most."""
        end = time.monotonic() + seconds
        while self._wire is not None and self._wire.wants_write and time.monotonic() < end:
            self.turn()
            time.sleep(0.005)

    def _connect(self, now: float) -> None:
        self._retry_at = now + _RETRY
        family = socket.AF_INET6 if ":" in self._lead[0] else socket.AF_INET
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        error = sock.connect_ex(self._lead)
        if error not in (0, 115):  # EINPROGRESS
            sock.close()
            return
        self._wire = Wire(sock, self._context, server=False, max_header=_MAX_HEADER)

    def _join(self) -> None:
        assert self._wire is not None
        self._wire.send({"m": "join", "node": self._node, "token": self._token, "a": self._mail.got})
        for message in self._mail.kept():
            self._wire.send(message)

    def _drop(self, now: float) -> None:
        if self._wire is not None:
            self._wire.close()
        self._wire = None
        self._retry_at = now + _RETRY
