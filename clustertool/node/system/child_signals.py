"""The supervisor's signals: a child's end wakes its loop, and a request to end is read with the process that sent it.

Requests to end stay blocked, because only a blocked signal can be read with its sender. Ranks start with an empty mask.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
from typing import List

from clustertool.node.system import processes

END = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT)
_NAMES = {int(signal.SIGTERM): "SIGTERM", int(signal.SIGHUP): "SIGHUP", int(signal.SIGINT): "SIGINT"}
_SI_KERNEL = 0x80
_SET = 128  # bytes of the C library's sigset_t, or more
_NONBLOCK_CLOEXEC = os.O_NONBLOCK | os.O_CLOEXEC  # signalfd() takes the same values
_LINGER = "; systemd does so at logout if KillUserProcesses=yes: run `loginctl enable-linger` on the node"


class Signals:
    """`wake`: descriptors that become readable. turn() each loop: the requests to end that came."""

    def __init__(self) -> None:
        """Raises OSError if no descriptor is left."""
        self._unblocked: List[int] = []
        self._ours, self._theirs = socket.socketpair()
        for end in (self._ours, self._theirs):
            end.setblocking(False)
        for number in (signal.SIGCHLD, *END):
            signal.signal(number, self._on_signal)
        signal.set_wakeup_fd(self._theirs.fileno(), warn_on_full_buffer=False)
        signal.pthread_sigmask(signal.SIG_BLOCK, END)
        descriptor = _signalfd()
        self.wake: List[int] = [self._ours.fileno(), *([descriptor] if descriptor >= 0 else [])]

    def turn(self) -> List[str]:
        """One sentence for each request to end: "received SIGTERM from ..."."""
        with contextlib.suppress(BlockingIOError):
            while self._ours.recv(4096):
                pass
        found = [f"received {_NAMES.get(number, number)}" for number in self._unblocked]
        self._unblocked.clear()
        while True:
            info = signal.sigtimedwait(END, 0)
            if info is None:
                return found
            found.append(f"received {_NAMES[info.si_signo]} from {_sender(info.si_code, info.si_pid, info.si_uid)}")

    def _on_signal(self, number: int, frame: object) -> None:
        """SIGCHLD needs no more than its wakeup. The others come here only if a thread does not block them."""
        if number != signal.SIGCHLD:
            self._unblocked.append(number)


def unblock() -> None:
    """In a child process that must obey its parent's signals."""
    signal.pthread_sigmask(signal.SIG_SETMASK, [])


def _sender(code: int, pid: int, uid: int) -> str:
    """The sender of a signal, as the kernel reports it. A sender of another pid namespace has pid 0."""
    if code >= _SI_KERNEL:
        return "the kernel"
    if pid == 0:
        return f"a process outside of this container (uid {uid})"
    name, command = processes.named(pid)
    systemd = name == "systemd"
    shown = (name if pid == 1 else command) or "it has ended"
    return f"pid {pid} ({shown}), uid {uid}{_LINGER if systemd else ''}"


def _signalfd() -> int:
    """A descriptor that is readable while a request to end waits; -1 if there is none: the loop then finds it a tick later."""
    try:
        libc = ctypes.CDLL(None)
        mask = ctypes.create_string_buffer(_SET)
        libc.sigemptyset(mask)
        for number in END:
            libc.sigaddset(mask, int(number))
        return int(libc.signalfd(-1, mask, _NONBLOCK_CLOEXEC))
    except (OSError, AttributeError):
        return -1
