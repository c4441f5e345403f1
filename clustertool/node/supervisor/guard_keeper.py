"""The keeper sends heartbeats to the guard, and replaces a guard that dies, is stopped or sends nothing."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
from typing import TYPE_CHECKING, Callable, Optional, Tuple

from clustertool.node.jobs.descendants import Descendants
from clustertool.node.supervisor import guard
from clustertool.node.system import processes
from clustertool.node.system.process_clock import ProcessClock

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec

_PAUSE = 0.2  # between two guards: one that dies at once must not make us spin
_FAREWELL = 2.0


class GuardKeeper:
    """`pid` is the present guard's, 0 while there is none. start() once, turn() each loop, changed() on its SIGCHLD."""

    def __init__(self, family: Descendants, spec: Spec, job: int, record: Callable[..., None]) -> None:
        self.pid = 0
        self.sock: Optional[socket.socket] = None
        self._family, self._spec, self._job, self._record = family, spec, job, record
        self._patience = guard.patience(spec)
        self.inherited: Tuple[int, ...] = ()  # descriptors that the guard keeps open too
        self._clock = ProcessClock()
        self._beat_at = self._received = self._start_at = 0.0

    def start(self) -> None:
        """Raises OSError where the machine has no process to spare."""
        ours, theirs = socket.socketpair()
        with theirs:
            ours.setblocking(False)
            try:
                self.pid = os.fork()
            except OSError:
                ours.close()
                raise
            if self.pid == 0:
                self._become_guard(theirs)
        self.sock = ours
        self._family.spare.add(self.pid)
        self._received = self._clock.turn()
        process = processes.identify(self.pid)
        self._record("guard", pid=self.pid, start=process.start if process else 0)

    def turn(self) -> None:
        now = self._clock.turn()
        if self.sock is None:
            if now >= self._start_at:
                self._start_at = now + _PAUSE
                with contextlib.suppress(OSError):
                    self.start()
            return
        with contextlib.suppress(BlockingIOError, ConnectionError):
            if self.sock.recv(4096):
                self._received = now
        if now - self._received > self._patience:
            os.kill(self.pid, signal.SIGKILL)
            self._received = now
        if now >= self._beat_at:
            self._beat_at = now + guard.BEAT
            with contextlib.suppress(BlockingIOError, ConnectionError):
                self.sock.send(b"s")

    def changed(self, status: int) -> None:
        """A stopped guard guards nothing: end it; a dead one is replaced at the next turn."""
        if os.WIFSTOPPED(status):
            os.kill(self.pid, signal.SIGKILL)
        elif not os.WIFCONTINUED(status):
            self._family.spare.discard(self.pid)
            self.pid = 0
            if self.sock is not None:
                self.sock.close()
                self.sock = None

    def end(self) -> None:
        """All is done here: end the guard."""
        if self.sock is None:
            return
        with contextlib.suppress(BlockingIOError, ConnectionError):
            self.sock.send(guard.QUIT)
        processes.reap(self.pid, _FAREWELL)

    def _become_guard(self, theirs: socket.socket) -> None:
        """In the child: never returns."""
        try:
            processes.detach(theirs.fileno(), self._job, *self.inherited)
            guard.run(theirs, self._family.head, self._spec, self._job)
        finally:
            processes.leave(0)
