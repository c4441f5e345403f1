"""A start lock exists as long as a typed command runs on this machine: a second start of the same command is an error.

It is the name of an abstract unix socket, which the kernel gives only once per network namespace and releases with the process.
The kernel also reports the process that has it (SO_PEERCRED), so nothing is left behind and no file can be wrong.
"""

from __future__ import annotations

import errno
import hashlib
import os
import socket
import time
from pathlib import Path

from clustertool.errors import UsageError
from clustertool.model.hints import PROGRAM
from clustertool.node.system.users import Peer, peer

_PATIENCE = 1.0  # seconds that a process may take between its bind and its listen
_SHOWN = 120  # characters of a command line


def take(what: str, *key: str) -> socket.socket | None:
    """Take the lock of a command, until the socket is closed. Raises UsageError that names the process that has it.

    key: what makes it the same command. what: it, for the error. None where a process of another user has the name, or one that
    never listens: any user can take any name, and this must not stop the job of another user.
    """
    text = "\0".join((str(os.getuid()), *key))
    name = f"\0clustertool/join/{hashlib.sha256(text.encode()).hexdigest()[:40]}".encode()
    end = time.monotonic() + _PATIENCE
    while True:
        lock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            lock.bind(name)
            lock.listen(128)
            return lock
        except OSError as error:
            lock.close()
            if error.errno != errno.EADDRINUSE:
                raise
        found = _holder(name)
        if found is not None and found.uid == os.getuid():
            raise _refusal(what, found.pid)
        if found is not None or time.monotonic() > end:
            return None
        time.sleep(0.02)


def _holder(name: bytes) -> Peer | None:
    """Identify the process that has a name. None if it does not listen (yet)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(name)
        except OSError:
            return None
        return peer(sock)


def _refusal(what: str, pid: int) -> UsageError:
    again = f"{what} runs on this machine already"
    if not pid:
        return UsageError(f"{again}: another process", "type it once on each machine")
    try:
        arguments = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").split()
    except OSError:  # the process that it has started has the lock, too
        ended = f"{again}: the command, process {pid}, has ended, and its job goes on"
        return UsageError(ended, f"{PROGRAM} stop in the folder of the job ends it")
    shown = " ".join(arguments)[:_SHOWN]
    return UsageError(f"{again}: process {pid} ({shown})", f"type it once on each machine; to end that one: kill {pid}")
