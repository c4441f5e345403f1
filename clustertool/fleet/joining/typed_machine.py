"""A command that is typed on every machine finds some things on its own machine: an address, its folder, and its lock.

The first machine has an address and a port where the others meet it.

Nothing of the folder, in which the job runs in place, is sent. The digest of the programs in it shows that two machines have
different ones. It does not cover data and results, which are large and may differ.

The lock exists as long as the command runs: a second start of the same command on this machine is an error. It is the name of
an abstract unix socket, which the kernel gives only once per network namespace and releases with the process. The kernel also
reports the process that has it (SO_PEERCRED), so nothing is left behind and no file can be wrong.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import ipaddress
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

from clustertool.errors import PreflightError, UsageError
from clustertool.model.hints import PROGRAM
from clustertool.model.paths import OURS
from clustertool.node.join import meeting
from clustertool.node.probe import network_addresses
from clustertool.node.system.users import Peer, peer

# Of networks for documentation (RFC 5737, RFC 3849): no packet is sent, the kernel only chooses the route.
_FAR = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
PROGRAM_FILES = (".py", ".toml", ".yaml", ".yml", ".sh", ".cfg", ".ini")  # docs/without-ssh.md names them
_LEFT_OUT = {".git", "__pycache__", "log", "output", "node_modules", OURS}
_MOST = 20_000  # files and folders that are visited
_LARGEST = 1 << 20  # bytes of a file that is read
_PATIENCE = 1.0  # seconds that a process may take between its bind and its listen
_SHOWN = 120  # characters of a command line


def default_address() -> str:
    """Find the address of this machine on its default route, else one that other machines may reach; IPv4 before IPv6.

    Raises PreflightError if all of its addresses are of the loopback or link-local.
    """
    for family, far in _FAR:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((far, 9))
            return str(sock.getsockname()[0])
    own = [(ipaddress.ip_address(text), text) for pairs in network_addresses.interfaces().values() for text, _ in pairs]
    others = [text for address, text in own if not (address.is_loopback or address.is_link_local)]
    if not others:
        what = "this machine has no address that another machine can reach"
        raise PreflightError(what, "name the one where the machines meet: --master HOST:PORT")
    return sorted(others, key=lambda text: ":" in text)[0]


def own_address(host: str) -> str:
    """Return the address of a name or address that is one of this machine, "" if it is of another one."""
    return meeting.own_address(host)


def free_port(host: str) -> int:
    """Return a port of this address that the system has chosen, and that no program uses now."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.bind((host, 0))
        return int(sock.getsockname()[1])


def folder_digest(top: Path) -> str:
    """Hash names and content of the program files below `top`; "" where it has more than 20,000 files of any kind.

    Of a file over 1 MiB only the size counts.
    """
    found = hashlib.sha256()
    for number, path in enumerate(folder_files(top)):
        if number >= _MOST:
            return ""
        if path.endswith(PROGRAM_FILES):
            found.update(f"{path}\0{_file_digest(top / path)}\n".encode("utf-8", "surrogateescape"))
    return found.hexdigest()


def folder_files(top: Path) -> Iterator[str]:
    """Yield files below `top`, relative to it, sorted within each folder, before those of the folders in it.

    Folders of results, logs and caches, hidden ones and virtual environments are left out.
    """
    for folder, folders, names in os.walk(top):
        kept = (name for name in folders if name not in _LEFT_OUT and not name.startswith("."))
        folders[:] = sorted(name for name in kept if not os.path.exists(os.path.join(folder, name, "pyvenv.cfg")))
        for name in sorted(names):
            yield os.path.relpath(os.path.join(folder, name), top)


def _file_digest(path: Path) -> str:
    """Hash a file's bytes; return its size in bytes where that is over 1 MiB, "" where it cannot be read."""
    try:
        if path.stat().st_size > _LARGEST:
            return str(path.stat().st_size)
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except OSError:
        return ""


def take_lock(what: str, *key: str) -> socket.socket | None:
    """Lock a command on this machine, until the returned socket is closed.

    key: what makes it the same command. what: names the command in the error. Raises UsageError, which names the process of
    this user that has the lock. Returns None where a process of another user has the name, or one that does not listen within
    1 s: any user can take any name, and this must not stop the job of another user.
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
    """Identify the process that listens at this name. None if there is none (yet)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.setblocking(False)
        try:
            sock.connect(name)
        except OSError:
            return None
        return peer(sock)


def _refusal(what: str, pid: int) -> UsageError:
    """Build the error that names the process which has the lock. what: what runs already. pid: 0 if it is not known."""
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
