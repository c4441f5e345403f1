"""Agents that start as forks of a process that has imported the node's code (see tests/forked.py).

A Python that starts and imports, and an agent whose handlers import, take four fifths of the CPU time of an agent. The fork
begins with the program that the interpreter is given: it reads the loader from stdin, finds and checks the code in its home,
and installs it where it must. What is imported already is used if that code has the same digest. /proc shows the environment
and the command line of the fork as for a new process.

`start` starts an agent without a shell. `interpreter` is for conf.py: a program that login shells start as a node's Python.
Tests of the start itself start new processes.
"""

from __future__ import annotations

import atexit
import functools
import gc
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
from tests import forked  # noqa: E402

STUB = REPO / "tests/data/agent_stub.c"
NAMESPACES = ("mnt", "net", "pid", "user")
PASSES = 3  # descriptors: the standard streams

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
    stdin, stdout, stderr = os.pipe(), os.pipe(), os.pipe()
    theirs = (stdin[0], stdout[1], stderr[1])
    try:
        process = _starters[str(place)].start(argv, Path("/"), env, theirs)
    finally:
        for descriptor in theirs:
            os.close(descriptor)
    process.stdin = os.fdopen(stdin[1], "wb", 0)
    process.stdout, process.stderr = os.fdopen(stdout[0], "rb", 0), os.fdopen(stderr[0], "rb", 0)
    return process


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
    names = [f'-D{name}="{value}"' for name, value in (("SOCKET", path), ("PYTHON", sys.executable))]
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
        self.name = os.path.basename(place)
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
        sys.modules.update(self.modules)
        return importlib.machinery.ModuleSpec(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: object) -> types.ModuleType:
        return self.modules["clustertool"]

    def exec_module(self, module: types.ModuleType) -> None:
        module.__spec__ = self.spec


def _request(connection: socket.socket) -> dict[str, Any] | None:
    """Read from /proc what a fork in place of the process at the other end needs. None: it would not be the same."""
    pid, uid, _ = struct.unpack("3i", connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
    top = f"/proc/{pid}"
    try:
        same = all(os.readlink(f"{top}/ns/{kind}") == os.readlink(f"/proc/self/ns/{kind}") for kind in NAMESPACES)
        same = same and _read(f"{top}/cgroup") == _read("/proc/self/cgroup")
        lines = [os.fsdecode(line).partition("=") for line in _read(f"{top}/environ").split(b"\0")[:-1]]
        argv = [os.fsdecode(argument) for argument in _read(f"{top}/cmdline").split(b"\0")[:-1]]
        cwd, mask = os.readlink(f"{top}/cwd"), _read(f"{top}/status").split(b"Umask:")[1].split()[0]
    except OSError:
        return None
    env = {name: value for name, _, value in lines}
    if not same or uid != os.getuid() or len(env) != len(lines) or argv[1:3] != ["-ESs", "-c"] or not can_fork(env):
        return None
    return {**_NOTHING, "argv": argv, "env": env, "cwd": cwd, "umask": int(mask, 8)}


_NOTHING = {"terminal": False, "network": False, "init": "", "inside": 0}


def _read(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read()


def _listen(listener: socket.socket, end: int) -> tuple[dict[str, Any], list[int]]:
    """Fork a child for each stub that connects, and send the stub its status. Returns in a child only."""
    woken, wake = os.pipe()
    for one in (woken, wake):
        os.set_blocking(one, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    waiting: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([listener, woken, end], [], [])
        if end in ready:
            sys.exit(0)
        if woken in ready:
            os.read(woken, 1 << 16)
            _report_ended(waiting)
        if listener not in ready:
            continue
        stub, _ = listener.accept()
        data, descriptors, _, _ = socket.recv_fds(stub, 1, PASSES)
        request = _request(stub) if data else None
        pid = os.fork() if request else 0
        if request and pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            for one in (listener, stub, *waiting.values()):
                one.detach()  # become() closes them
            return request, descriptors
        for descriptor in descriptors:
            os.close(descriptor)
        try:
            stub.send(b"y" if request else b"n")
        except OSError:  # it was killed
            pass
        if request:
            waiting[pid] = stub
        else:
            stub.close()


def _report_ended(waiting: dict[int, socket.socket]) -> None:
    while waiting:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if not pid:
            return
        with waiting.pop(pid) as stub:
            try:
                stub.send(struct.pack("i", status))
            except OSError:  # it was killed
                pass


def main() -> NoReturn:
    """argv: the descriptor of the socket, the node's code, and, of a server of stubs, the descriptor that ends it."""
    connection, place = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        signal.signal(number, handler)
    del sys.path[0]
    sys.meta_path.insert(0, Imported(place))  # type: ignore[arg-type]
    gc.collect()
    gc.freeze()  # what is imported is no garbage of an agent, which would visit, and thereby copy, all of it
    if len(sys.argv) > 3:
        request, descriptors = _listen(connection, int(sys.argv[3]))
    else:
        request, descriptors = forked.serve(connection)
        connection.detach()
    forked.become(request, descriptors, forked.JOIN)
    if "umask" in request:
        os.umask(request["umask"])
    argv = request["argv"]
    sys.argv[:] = ["-c", *argv[4:]]
    exec(argv[3], {"__name__": "__main__"})
    sys.exit(0)


if __name__ == "__main__":
    main()
