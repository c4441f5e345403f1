"""Commands of the tool that start as forks of one process that has imported the package already.

Python's start and the imports take 0.2 to 0.3 s of CPU for each command, and the tests start thousands. The `Starter` runs
this file once as a program, the server. It imports the package, and forks for each request: the child gets the
descriptors, environment, folder and namespaces of the request, and runs the command as `__main__`. From there on it is the
command: its pid, exit code and terminal are those that a new process would have. Tests of the start itself (imports, memory,
Ctrl+C while Python starts) start new processes.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import termios
import threading
from collections.abc import Mapping, Sequence
from fcntl import ioctl
from pathlib import Path
from typing import Any, NoReturn

REPO = Path(__file__).resolve().parents[1]
LARGEST = 1 << 18  # bytes of a request: its environment is the largest part
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
PR_SET_PDEATHSIG = 1
WAIT = 30.0  # seconds for the server's answer


class Forked:
    """A command that the server has forked, with the attributes of subprocess.Popen that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"the command with pid {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            if self.returncode is None:
                os.kill(self.pid, signal.SIGKILL)

    def ends(self, status: int) -> None:
        """Record the status that waitpid gave."""
        self.returncode = os.waitstatus_to_exitcode(status)
        self._ended.set()


class Starter:
    """The server of this process, and the commands that it has forked."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, __file__, str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                env={**os.environ, "PYTHONPATH": str(REPO)},
                start_new_session=True,
            )
        self._socket = ours
        self._lock = threading.Lock()
        self._started = threading.Condition()
        self._new: list[Forked] = []
        self._living: dict[int, Forked] = {}
        threading.Thread(target=self._read, daemon=True).start()

    def start(
        self,
        argv: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        streams: Sequence[int],
        *,
        terminal: bool = False,
        network: int | None = None,
        init: Path | None = None,
    ) -> Forked:
        """Start a command. streams: its stdin, stdout and stderr. terminal: stdin becomes its controlling terminal.

        network: a descriptor of the network namespace that it enters. init: a script of sh that arranges the mounts of its
        own mount namespace before.
        """
        request = {
            "argv": list(argv),
            "cwd": str(cwd),
            "env": dict(env),
            "terminal": terminal,
            "network": network is not None,
            "init": str(init or ""),
        }
        descriptors = [*streams, *([] if network is None else [network])]
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            with self._started:
                assert self._started.wait_for(lambda: self._new, WAIT), "the server of commands does not answer"
                return self._new.pop()

    def _read(self) -> None:
        """Receive the answers of the server: the pid of each new command, and the status of each that has ended."""
        while data := self._socket.recv(LARGEST):
            pid, status = json.loads(data)
            if status is not None:
                self._living.pop(pid).ends(status)
                continue
            self._living[pid] = Forked(pid)
            with self._started:
                self._new.append(self._living[pid])
                self._started.notify_all()


_starter: list[Starter] = []


def start(argv: Sequence[str], cwd: Path, env: Mapping[str, str], streams: Sequence[int], **options: Any) -> Forked:
    """Start a command by the server of this process, which the first call starts (see Starter.start)."""
    if not _starter:
        _starter.append(Starter())
    return _starter[0].start(argv, cwd, env, streams, **options)


# -- the server


def serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a child for each request. Returns in a child only: its request and its descriptors."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    while True:
        ready, _, _ = select.select([connection, woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 1 << 16)
            _report_ended(connection)
        if connection not in ready:
            continue
        data, descriptors, _, _ = socket.recv_fds(connection, LARGEST, 8)
        if not data:
            sys.exit(0)  # the tests have ended; PDEATHSIG ends the commands
        pid = os.fork()
        if pid == 0:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            return json.loads(data), descriptors
        connection.send(json.dumps([pid, None]).encode())
        for descriptor in descriptors:
            os.close(descriptor)


def _report_ended(connection: socket.socket) -> None:
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                return
            connection.send(json.dumps([pid, status]).encode())


def become(request: Mapping[str, Any], descriptors: Sequence[int]) -> None:
    """Make this process the one that a new start with the request's settings would have made."""
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    if request["terminal"]:
        ioctl(0, termios.TIOCSCTTY, 0)
    if request["network"] and libc.setns(descriptors[3], CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    os.closerange(3, os.sysconf("SC_OPEN_MAX") if os.sysconf("SC_OPEN_MAX") < 1 << 16 else 1 << 16)
    if request["init"]:
        if libc.unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["sh", request["init"], "true"], check=True)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    _open_streams()


def _open_streams() -> None:
    """Open stdin, stdout and stderr as Python does when it starts."""
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    for name, number, error in (("stdin", 0, errors), ("stdout", 1, errors), ("stderr", 2, "backslashreplace")):
        raw = io.FileIO(number, "w" if number else "r", closefd=False)
        buffer = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
        lines = number == 2 or os.isatty(number)
        stream = io.TextIOWrapper(buffer, encoding, error, line_buffering=lines)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run(argv: Sequence[str]) -> None:
    """Run a command line: `PYTHON -m MODULE ...` of this Python, or the path of a script and its arguments."""
    if argv[0] == sys.executable:
        sys.argv[:] = ["-m", *argv[3:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = list(argv)
        sys.path.insert(0, os.path.dirname(argv[0]))
        runpy.run_path(argv[0], run_name="__main__")


def _end(code: int) -> NoReturn:
    """End this process as Python does, but without taking all modules apart: this takes longer than most commands."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for the threads, as the interpreter does first
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None and not stream.closed:
            try:
                stream.flush()
            except OSError:
                sys.exit(code)  # Python says what it could not write, and has an exit code for it
    os._exit(code & 0xFF)


def _import_all() -> None:
    """Import all that a command may need; a module whose extra is not installed is left out."""
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    import clustertool.verbs  # installs the handlers of signals before all slow imports

    for module in pkgutil.walk_packages(clustertool.__path__, "clustertool."):
        if not module.name.startswith("clustertool.node") and not module.name.endswith("join_process"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    importlib.import_module("invoke.main")


def main() -> NoReturn:
    connection = socket.socket(fileno=int(sys.argv[1]))
    for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
        signal.signal(
            number, handler
        )  # they may be ignored here (nohup, a shell's background), and the tool goes on with that
    _import_all()
    gc.collect()
    gc.freeze()  # what is imported is no garbage of a command, which would visit, and thereby copy, all of it
    assert threading.active_count() == 1, threading.enumerate()
    request, descriptors = serve(connection)
    connection.detach()
    become(request, descriptors)
    try:
        run(request["argv"])
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        code = end.code or 0
    else:
        code = 0
    _end(code)


if __name__ == "__main__":
    main()
