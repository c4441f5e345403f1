"""Agents that start as forks of a process that has imported the node's code (see tests/forked.py).

A Python that starts and imports, and an agent whose handlers import, take four fifths of the CPU time of an agent. The fork
begins with the program that the interpreter is given: it reads the loader from stdin, finds and checks the code in its home,
and installs it where it must. What is imported already is used if that code has the same digest. /proc shows the environment
and the command line of the fork as for a new process.

`start` starts an agent without a shell. `interpreter` is for conf.py: a program that login shells start as a node's Python.
On a node of namespaces (tests/lab) the fork is a process of all of them, which the kernel ends with the first process of the
node. The parent of a fork is the server; there it shows as 0. Tests of the start itself start new processes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import importlib
import importlib.machinery
import os
import pkgutil
import select
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

REPO = Path(__file__).resolve().parents[1]
if __name__ == "__main__":  # the interpreter has the options of an agent's
    sys.path[0] = str(REPO)
from tests import forked, proc_files  # noqa: E402

STUB = REPO / "tests/data/agent_stub.c"
ENTERED = ("net", "uts", "ipc", "pid", "mnt")  # namespaces; a fork is in the server's other ones
SAME = [kind for kind in ("cgroup", "time", "user") if os.path.exists(f"/proc/self/ns/{kind}")]  # namespaces
OF_LIBC = 3 << 31  # signals 32 and 33, which glibc keeps to itself: what GNU make starts ignores the first one
SAME_FILES = ("cgroup", "limits", "oom_score_adj")
SAME_STATUS = ("Gid", "SigBlk", "CapInh", "CapPrm", "CapBnd", "CapAmb", "NoNewPrivs", "Seccomp", "Cpus_allowed_list")
CLONE_NEWPID = 0x20000000
PASSES = 3  # descriptors: the standard streams

_libc = ctypes.CDLL(None, use_errno=True)

_starters: dict[str, forked.Starter] = {}  # by the directory of the code


def can_fork(env: Mapping[str, str]) -> bool:
    """Return whether an agent with these variables is the same as a fork: Python starts by some of them."""
    own = any(name.startswith(("LC_", "LD_", "PYTHON")) for name in env)
    return not own and env.get("LANG", "C.UTF-8") == "C.UTF-8"


def start(argv: Sequence[str], env: Mapping[str, str], place: Path) -> forked.Forked:
    """Start an agent, whose standard streams are pipes without a buffer. place: the node's code."""
    if str(place) not in _starters:
        server = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8"}
        _starters[str(place)] = forked.Starter("-ESs", kind=str(place), program=__file__, env=server)
    return _starters[str(place)].start_with_pipes(argv, Path("/"), env, buffering=0)


@functools.cache
def interpreter(place: Path) -> str:
    """The path of a program that is a Python, and whose agents are forks of a server, which it starts. place: the node's code.

    It is this Python where there is no C compiler, or the kernel does not let a process change what /proc shows of it.
    """
    compiler = shutil.which("cc")
    if not compiler or not forked.can_join():
        return sys.executable
    folder = Path(tempfile.mkdtemp(prefix="ct-agents-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    path, program = folder / "socket", folder / "python3"
    values = {"SOCKET": path, "PYTHON": sys.executable, "NAME": proc_files.STUB}
    names = [f'-D{name}="{value}"' for name, value in values.items()]
    subprocess.run([compiler, "-O1", *names, "-o", str(program), str(STUB)], check=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(str(path))
        listener.listen(128)
        ours, theirs = os.pipe()  # the server ends with this process
        os.set_inheritable(ours, True)
        subprocess.Popen(
            [sys.executable, "-ESs", __file__, str(listener.fileno()), str(place), str(ours)],
            pass_fds=[listener.fileno(), ours],
            env={"PATH": os.environ["PATH"], "LANG": "C.UTF-8"},
            start_new_session=True,
        )
        os.close(ours)
        _ends.append(theirs)
    return str(program)


_ends: list[int] = []  # descriptors that this process closes by its end


# -- the servers


class Imported:
    """The modules of the node's code that the server has imported, for forks that find the code of the same name.

    It is asked for the package when a fork imports that: the loader has put the directory of the code on the path.
    """

    def __init__(self, place: str) -> None:
        self.place, self.name = place, os.path.basename(place)
        sys.path.insert(0, place)
        for module in pkgutil.walk_packages([f"{place}/clustertool"], "clustertool."):
            importlib.import_module(module.name)
        del sys.path[0]
        names = [name for name in sys.modules if name.partition(".")[0] == "clustertool"]
        self.modules = {name: sys.modules.pop(name) for name in names}
        self.spec = self.modules["clustertool"].__spec__

    def find_spec(self, name: str, path: object = None, target: object = None) -> importlib.machinery.ModuleSpec | None:
        if name != "clustertool":
            return None
        sys.meta_path.remove(self)  # type: ignore[arg-type]
        if os.path.basename(sys.path[-1]) != self.name:
            return None
        self._move(sys.path[-1])
        sys.modules.update({other: module for other, module in self.modules.items() if other != name})
        return importlib.machinery.ModuleSpec(name, self)  # type: ignore[arg-type]

    def _move(self, place: str) -> None:
        """Have the modules tell the paths of the code in the fork's home; a node need not have the server's."""
        for module in self.modules.values():
            module.__file__ = str(module.__file__).replace(self.place, place)
            if hasattr(module, "__path__"):
                module.__path__[:] = [path.replace(self.place, place) for path in module.__path__]

    def create_module(self, spec: object) -> types.ModuleType:
        return self.modules["clustertool"]

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self.spec


def _request(connection: socket.socket) -> dict[str, Any] | None:
    """Read from /proc what a fork in place of the process at the other end needs. None: it would not be the same.

    "entered" has descriptors of the namespaces that are not the server's, by kind.
    """
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    top, own = f"/proc/{pid}", "/proc/self"
    try:
        status = _status(top)
        same = _settings(top, status) == _settings(own, _status(own)) and not int(status["SigIgn"], 16) & ~OF_LIBC
        lines = [os.fsdecode(line).partition("=") for line in _read(f"{top}/environ").split(b"\0")[:-1]]
        argv = [os.fsdecode(argument) for argument in _read(f"{top}/cmdline").split(b"\0")[:-1]]
        cwd = os.readlink(f"{top}/cwd")
        if not same or uid != os.getuid() or len(lines) != len({name for name, _, _ in lines}):
            return None
        other = [kind for kind in ENTERED if os.readlink(f"{top}/ns/{kind}") != os.readlink(f"{own}/ns/{kind}")]
        env = {name: value for name, _, value in lines}
        if argv[1:3] != ["-ESs", "-c"] or not can_fork(env):
            return None
        entered = {kind: os.open(f"{top}/ns/{kind}", os.O_RDONLY) for kind in other}
    except OSError:  # it was killed
        return None
    groups = [int(group) for group in status["Groups"].split()]  # root sets them
    given = {"argv": argv, "env": env, "cwd": cwd, "umask": int(status["Umask"], 8), "groups": groups}
    return {**_NOTHING, **given, "entered": entered}


_NOTHING = {"terminal": False, "network": False, "init": "", "inside": 0}


def _settings(process: str, status: Mapping[str, str]) -> list[object]:
    """What a fork has of the server, and has to have of the stub. process: its directory in /proc."""
    files = [_read(f"{process}/{name}") for name in SAME_FILES]
    nice = os.getpriority(os.PRIO_PROCESS, int(status["Pid"]))
    return [*files, nice, *(os.readlink(f"{process}/ns/{kind}") for kind in SAME), *map(status.get, SAME_STATUS)]


def _status(process: str) -> dict[str, str]:
    lines = _read(f"{process}/status").decode(errors="replace").splitlines()
    return {name: value.strip() for name, _, value in (line.partition(":") for line in lines)}


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _enter(namespace: int, kind: int = 0) -> None:
    if _libc.setns(namespace, kind):
        raise OSError(ctypes.get_errno(), "setns")


class Stubs:
    """The server of stubs, which runs a fork for each one that connects.

    A stub gets the status of its fork. A fork is killed when its stub is. Nothing waits for a stub, which may be frozen.
    """

    def __init__(self, listener: socket.socket, end: int) -> None:
        self._listener, self._end = listener, end
        self._own = os.open("/proc/self/ns/pid", os.O_RDONLY)
        self._connected: dict[int, socket.socket] = {}  # by descriptor
        self._forks: dict[int, int] = {}  # descriptor by pid
        self._poll = select.poll()
        self._woken = forked.watch_children()
        for one in (self._woken, end, listener.fileno()):
            self._poll.register(one, select.POLLIN)

    def serve(self) -> tuple[dict[str, Any], list[int]]:
        """Returns in a fork only."""
        forked.freeze()
        while True:
            ready = [descriptor for descriptor, _ in self._poll.poll()]
            if self._end in ready:
                sys.exit(0)
            if self._woken in ready:
                os.read(self._woken, 1 << 16)
                self._report_ended()
            for descriptor in ready:
                if descriptor in self._forks.values():  # its stub was killed
                    self._poll.unregister(descriptor)
                    os.kill(next(pid for pid, its in self._forks.items() if its == descriptor), signal.SIGKILL)
                elif descriptor in self._connected and (found := self._answer(descriptor)):
                    return found
            if self._listener.fileno() in ready:  # last: it may get the number of one that is closed now
                stub, _ = self._listener.accept()
                self._connected[stub.fileno()] = stub
                self._poll.register(stub, select.POLLIN)

    def _answer(self, descriptor: int) -> tuple[dict[str, Any], list[int]] | None:
        """Read what a stub has sent. Returns something in a fork only."""
        stub = self._connected[descriptor]
        data, streams, _, _ = socket.recv_fds(stub, 1, PASSES)
        request = _request(stub) if data else None
        entered = request["entered"] if request else {}
        pid = self._fork(entered) if request else -1
        if request and pid == 0:
            forked.forget_children()
            for one in (self._listener, *self._connected.values()):
                one.detach()  # become() closes them
            return request, streams
        for one in (*streams, *entered.values()):
            os.close(one)
        with contextlib.suppress(OSError):  # it was killed
            stub.send(b"y" if pid > 0 else b"n")
        if pid > 0:
            self._forks[pid] = descriptor
        else:
            self._close(descriptor)
        return None

    def _fork(self, entered: Mapping[str, int]) -> int:
        """Fork in the process namespace of a stub. -1: it was killed, with all of that namespace."""
        try:
            if "pid" in entered:
                _enter(entered["pid"], CLONE_NEWPID)
            pid = os.fork()
        except OSError:
            pid = -1
        if pid and "pid" in entered:
            _enter(self._own, CLONE_NEWPID)
        return pid

    def _report_ended(self) -> None:
        while self._forks:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            descriptor = self._forks.pop(pid)
            with contextlib.suppress(OSError):  # it was killed
                self._connected[descriptor].send(struct.pack("i", status))
            self._close(descriptor)

    def _close(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._poll.unregister(descriptor)
        self._connected.pop(descriptor).close()


def main() -> NoReturn:
    """argv: the descriptor of the socket, the node's code, and, of a server of stubs, the descriptor that ends it."""
    connection, place = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    forked.restore_signals()
    del sys.path[0]
    sys.meta_path.insert(0, Imported(place))  # type: ignore[arg-type]
    if len(sys.argv) > 3:
        request, descriptors = Stubs(connection, int(sys.argv[3])).serve()
        if not os.getuid():
            os.setgroups(request["groups"])
        for kind in ENTERED:
            if kind in request["entered"] and kind != "pid":  # it is in that one from its start
                _enter(request["entered"][kind])
    else:
        request, descriptors = forked.serve(connection)
    forked.become(request, descriptors, forked.JOIN)
    if "umask" in request:
        os.umask(request["umask"])
    argv = request["argv"]
    sys.argv[:] = ["-c", *argv[4:]]
    exec(argv[3], {"__name__": "__main__"})
    sys.exit(0)


if __name__ == "__main__":
    main()
