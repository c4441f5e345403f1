"""Commands of the tool, and joining processes, that start as forks of a process that has imported the package already.

Python's start and the imports take 0.2 to 0.3 s of CPU for each of them, and the tests start thousands. A `Starter` runs
this file once as a program, the server. It imports the package, and forks for each request: the child gets the
descriptors, environment, folder and namespaces of the request, and runs the command as `__main__`. From there on it is the
command: its pid, exit code and terminal are those that a new process would have. Tests of the start itself (imports, memory,
Ctrl+C while Python starts) start new processes.

There are two servers: one for commands, and one for joining processes, whose interpreter has their options. /proc shows the
environment and the command line of a joining process as it does for a new one. A command that starts a joining process
(fleet/joining/join_process.py) forks it: its child has the command's modules, but the signals, descriptors, folder and
environment of a new process. The bundle of a job that it submits to Slurm has compiled modules, too.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import functools
import gc
import importlib
import io
import json
import mmap
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
import time
import types
from collections.abc import Callable, Mapping, Sequence
from fcntl import F_DUPFD, fcntl, ioctl
from pathlib import Path
from typing import IO, Any, NoReturn

REPO = Path(__file__).resolve().parents[1]
LARGEST = 1 << 18  # bytes of a request: its environment is the largest part
CLONE_NEWNET, CLONE_NEWNS = 0x40000000, 0x00020000
PR_SET_PDEATHSIG = 1
PR_SET_MM = 35
PR_SET_MM_MAP = 14
JOIN = "join"  # the argument of the server of joining processes
WAIT = 30.0  # seconds for the server's answer


class Forked:
    """A process that a server has forked, with the attributes of subprocess.Popen that tests use."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self.stderr: IO[bytes] | None = None
        self.returncode: int | None = None
        self._ended = threading.Event()

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"the process {self.pid}", timeout or 0.0)
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
    """A server of this process, and the processes that it has forked.

    options: of its interpreter. kind: JOIN, or "" for commands. program: the file that serves; env: of its process.
    """

    def __init__(
        self,
        *options: str,
        kind: str = "",
        program: str = __file__,
        python: str = sys.executable,
        env: Mapping[str, str] = os.environ,
    ) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [python, *options, program, str(theirs.fileno()), kind],
                pass_fds=[theirs.fileno()],
                env={**env, "PYTHONPATH": str(REPO)},
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
        inside: int = 0,
    ) -> Forked:
        """Start a command. streams: its stdin, stdout and stderr. terminal: stdin becomes its controlling terminal.

        network: a descriptor of the network namespace that it enters. init: a script of sh that arranges the mounts of its
        own mount namespace before. inside: a process whose namespaces it enters, all of them, as with nsenter: the Forked
        is its parent, which ends as it ends, and takes it along when killed.
        """
        request = {
            "argv": list(argv),
            "cwd": str(cwd),
            "env": dict(env),
            "terminal": terminal,
            "network": network is not None,
            "init": str(init or ""),
            "inside": inside,
        }
        return self.send(request, [*streams, *([] if network is None else [network])])

    def start_with_pipes(
        self, argv: Sequence[str], cwd: Path, env: Mapping[str, str], buffering: int = -1, inside: int = 0
    ) -> Forked:
        """Start a command whose standard streams are pipes. buffering: of our ends, as of open(). inside: see start()."""
        stdin, stdout, stderr = os.pipe(), os.pipe(), os.pipe()
        theirs = (stdin[0], stdout[1], stderr[1])
        try:
            process = self.start(argv, cwd, env, theirs, inside=inside)
        finally:
            for descriptor in theirs:
                os.close(descriptor)
        process.stdin = os.fdopen(stdin[1], "wb", buffering)
        process.stdout, process.stderr = os.fdopen(stdout[0], "rb", buffering), os.fdopen(stderr[0], "rb", buffering)
        return process

    def send(self, request: Mapping[str, Any], descriptors: Sequence[int]) -> Forked:
        """Send a request with these descriptors, and return the process that the server has forked for it."""
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
_starter_of_joining: list[Starter] = []


@functools.cache
def can_join() -> bool:
    """Find out whether this kernel lets a process change what /proc shows of it, as a forked joining process has to."""
    pid = os.fork()
    if pid == 0:
        code = 1
        with contextlib.suppress(BaseException):
            show(ctypes.CDLL(None, use_errno=True), ["python"], {"LANG": "C"})
            code = Path("/proc/self/environ").read_bytes() != b"LANG=C\0"
        os._exit(int(code))
    return not os.waitpid(pid, 0)[1]


def start_joining(argv: Sequence[str], env: Mapping[str, str], cwd: Path | None = None, inside: int = 0) -> Forked:
    """Start a joining process, whose standard streams are pipes. inside: see Starter.start."""
    if not _starter_of_joining:
        _starter_of_joining.append(Starter("-ESs", kind=JOIN))
    return _starter_of_joining[0].start_with_pipes(argv, cwd or Path.cwd(), env, inside=inside)


def start(argv: Sequence[str], cwd: Path, env: Mapping[str, str], streams: Sequence[int], **options: Any) -> Forked:
    """Start a command by the server of this process, which the first call starts (see Starter.start)."""
    if not _starter:
        _starter.append(Starter())
    return _starter[0].start(argv, cwd, env, streams, **options)


def complete(
    argv: Sequence[str], *, cwd: Path | None = None, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end, with an empty stdin. Without cwd and env it has the folder and the environment of the tests."""
    with open(os.devnull) as nothing, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        streams = [stream.fileno() for stream in (nothing, out, err)]
        code = start(argv, cwd or Path.cwd(), os.environ if env is None else env, streams).wait(4 * WAIT)
        texts = [os.pread(stream.fileno(), 1 << 24, 0).decode() for stream in (out, err)]
    return subprocess.CompletedProcess(list(argv), code, *texts)


# -- the server


def restore_signals() -> None:
    """Give SIGINT and SIGHUP what a new Python gives them; they may be ignored here (nohup, a shell's background)."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def freeze() -> None:
    """Exempt what is imported from the collections of garbage of forks, which would visit, and thereby copy, all of it."""
    gc.collect()
    gc.freeze()


def watch_children() -> int:
    """Return a descriptor that can be read when a child has ended."""
    woken, wake = os.pipe()
    for end in (woken, wake):
        os.set_blocking(end, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    return woken


def forget_children() -> None:
    """Undo watch_children() in a fork."""
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def serve(connection: socket.socket) -> tuple[dict[str, Any], list[int]]:
    """Fork a child for each request. Returns in a child only: its request and its descriptors."""
    freeze()
    woken = watch_children()
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
            forget_children()
            connection.detach()  # the fork closes all descriptors but its own
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


def become(request: Mapping[str, Any], descriptors: Sequence[int], kind: str) -> None:
    """Make this process the one that a new start with the request's settings would have made."""
    libc = ctypes.CDLL(None, use_errno=True)
    if kind != JOIN or request["inside"]:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    for number, descriptor in enumerate(descriptors[:3]):
        os.dup2(descriptor, number)
    if request["terminal"]:
        ioctl(0, termios.TIOCSCTTY, 0)
    if request["network"] and libc.setns(descriptors[3], CLONE_NEWNET):
        raise OSError(ctypes.get_errno(), "setns")
    _close_from(3)
    if request["init"]:
        if libc.unshare(CLONE_NEWNS):
            raise OSError(ctypes.get_errno(), "unshare")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        subprocess.run(["sh", request["init"], "true"], check=True)
    if request["inside"]:
        _enter(libc, request["inside"])
    if kind == JOIN:
        show(libc, request["argv"], request["env"])
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    open_streams()


def _enter(libc: ctypes.CDLL, process: int) -> None:
    """Enter the namespaces of a process. Returns in a child only, which is in its process namespace, too."""
    descriptors = [os.open(f"/proc/{process}/ns/{kind}", os.O_RDONLY) for kind in ("net", "uts", "ipc", "pid", "mnt")]
    for descriptor in descriptors:
        if libc.setns(descriptor, 0):
            raise OSError(ctypes.get_errno(), "setns")
        os.close(descriptor)
    pid = os.fork()
    if pid == 0:
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    end_as(pid)


def end_as(pid: int) -> NoReturn:
    """Wait for a child, and end as it has ended."""
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    if code < 0:
        with contextlib.suppress(OSError):  # SIGKILL's is fixed
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code & 0xFF)


class JoinFork:
    """A joining process that a command forks, with what JoinChild uses of subprocess.Popen.

    Where the command has threads, or /proc would not show the child as a new process, the child starts Python.
    """

    def __init__(
        self, argv: Sequence[str], *, cwd: Path, env: Mapping[str, str], pass_fds: Sequence[int], **_: object
    ) -> None:
        stdin, stdout, stderr = os.pipe(), os.pipe(), os.pipe()
        theirs = (stdin[0], stdout[1], stderr[1])
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        self._code: int | None = None
        alone = threading.active_count() == 1
        self.pid = os.fork()
        if self.pid == 0:
            try:
                self._run(argv, cwd, env, theirs, pass_fds, alone)
            except SystemExit as end:
                leave(end.code if isinstance(end.code, int) else int(end.code is not None))
            finally:
                sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
                os._exit(1)
        for descriptor in theirs:
            os.close(descriptor)
        self.stdin = os.fdopen(stdin[1], "wb")
        self.stdout, self.stderr = os.fdopen(stdout[0], "rb"), os.fdopen(stderr[0], "rb")

    @staticmethod
    def _run(
        argv: Sequence[str],
        cwd: Path,
        env: Mapping[str, str],
        streams: Sequence[int],
        kept: Sequence[int],
        alone: bool,
    ) -> None:
        """Become a joining process, and run it. Raises SystemExit. alone: the command had no other thread."""
        atexit._clear()
        signal.set_wakeup_fd(-1)
        for number in signal.valid_signals():
            if callable(signal.getsignal(number)):
                signal.signal(number, signal.SIG_DFL)
        os.setsid()
        os.chdir(cwd)
        copies = [fcntl(descriptor, F_DUPFD, 3) for descriptor in streams]  # a pipe may have one of the numbers 0 to 2
        for number, descriptor in enumerate(copies):
            os.dup2(descriptor, number)
        _close_from(3, kept)
        for descriptor in kept:
            os.set_inheritable(descriptor, True)
        try:
            assert alone
            show(ctypes.CDLL(None, use_errno=True), argv, env)
        except (AssertionError, OSError):
            os.execve(argv[0], argv, env)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        os.environ.clear()
        os.environ.update(env)
        open_streams()
        run(argv, JOIN)

    def poll(self) -> int | None:
        if self._code is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            self._code = os.waitstatus_to_exitcode(status) if pid else None
        return self._code

    def wait(self, timeout: float | None = None) -> int:
        end = time.monotonic() + timeout if timeout is not None else float("inf")
        while (code := self.poll()) is None:
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired("the joining process", timeout or 0.0)
            time.sleep(0.005)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)


def _close_from(first: int, kept: Sequence[int] = ()) -> None:
    """Close all descriptors from a number on, but those that are kept."""
    for name in os.listdir("/proc/self/fd"):
        if int(name) >= first and int(name) not in kept:
            with contextlib.suppress(OSError):  # that of the list itself
                os.close(int(name))


class MemoryMap(ctypes.Structure):
    """struct prctl_mm_map of linux/prctl.h. The names of the numbers before `brk` and after are those of proc_pid_stat(5)."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("startcode", "endcode", "start_data", "end_data", "start_brk", "brk")),
        *((name, ctypes.c_uint64) for name in ("startstack", "arg_start", "arg_end", "env_start", "env_end")),
        ("auxv", ctypes.c_uint64),
        ("auxv_size", ctypes.c_uint32),
        ("exe_fd", ctypes.c_uint32),
    ]


_shown: list[mmap.mmap] = []  # the memory that /proc shows


def show(libc: ctypes.CDLL, argv: Sequence[str], env: Mapping[str, str]) -> None:
    """Have /proc show this command line and environment as those of this process. Raises OSError."""
    arguments = b"".join(os.fsencode(argument) + b"\0" for argument in argv)
    variables = b"".join(os.fsencode(f"{name}={value}") + b"\0" for name, value in env.items())
    memory = mmap.mmap(-1, len(arguments) + len(variables), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory[:] = arguments + variables
    _shown.append(memory)
    start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    numbers = {"startcode": 23, "endcode": 24, "startstack": 25, "start_data": 42, "end_data": 43, "start_brk": 44}
    libc.sbrk.restype = ctypes.c_void_p
    shown = MemoryMap(
        **{name: int(fields[number]) for name, number in numbers.items()},
        brk=libc.sbrk(0),
        arg_start=start,
        arg_end=start + len(arguments),
        env_start=start + len(arguments),
        env_end=start + len(arguments) + len(variables),
        exe_fd=0xFFFFFFFF,
    )
    if libc.prctl(PR_SET_MM, PR_SET_MM_MAP, ctypes.byref(shown), ctypes.c_ulong(ctypes.sizeof(shown)), 0):
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_MM_MAP)")


def open_streams() -> None:
    """Open stdin, stdout and stderr as Python does when it starts."""
    encoding, errors = sys.stdout.encoding, sys.stdout.errors
    for name, number, error in (("stdin", 0, errors), ("stdout", 1, errors), ("stderr", 2, "backslashreplace")):
        raw = io.FileIO(number, "w" if number else "r", closefd=False)
        buffer = io.BufferedWriter(raw) if number else io.BufferedReader(raw)
        lines = number == 2 or os.isatty(number)
        stream = io.TextIOWrapper(buffer, encoding, error, line_buffering=lines)
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def run(argv: Sequence[str], kind: str) -> None:
    """Run a command line: `PYTHON -m MODULE ...` of this Python, or the path of a script and its arguments.

    That of a joining process is `PYTHON -ESs -c CODE FOLDER ...`.
    """
    if kind == JOIN:
        sys.argv[:] = ["-c", *argv[5:]]
        sys.exit(sys.modules["clustertool.node.join.main"].main(argv[5:]))
    if argv[0] == sys.executable:
        sys.argv[:] = ["-m", *argv[3:]]
        sys.path.insert(0, os.getcwd())
        runpy.run_module(argv[2], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = list(argv)
        sys.path.insert(0, os.path.dirname(argv[0]))
        runpy.run_path(argv[0], run_name="__main__")


def run_to_end(program: Callable[[], object]) -> NoReturn:
    """Run a program, and end this process with its exit code. Raises SystemExit for an end with a text, which Python prints."""
    try:
        program()
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            raise
        leave(end.code or 0)
    leave(0)


def leave(code: int) -> NoReturn:
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


def _import_all(kind: str) -> None:
    """Import all that a command may need; a module whose extra is not installed is left out."""
    sys.path[:] = [path for path in sys.path if path != str(Path(__file__).parent)]
    if kind == JOIN:
        sys.path.append(str(REPO))
        importlib.import_module("clustertool.node.join.main")
        return
    import clustertool.verbs  # installs the handlers of signals before all slow imports

    for module in pkgutil.walk_packages(clustertool.__path__, "clustertool."):
        if not module.name.startswith("clustertool.node") and not module.name.endswith("join_process"):
            with contextlib.suppress(ImportError):
                importlib.import_module(module.name)
    importlib.import_module("clustertool.node.join.main")
    importlib.import_module("invoke.main")
    _fill_caches()
    parts = {"Popen": JoinFork, "PIPE": subprocess.PIPE, "TimeoutExpired": subprocess.TimeoutExpired}
    sys.modules["clustertool.fleet.joining.join_process"].subprocess = types.SimpleNamespace(**parts)  # type: ignore[attr-defined]
    bundles = sys.modules["clustertool.fleet.joining.join_bundle"]
    with_compiled = types.SimpleNamespace(**{**vars(bundles), "content": _write_compiled_bundle})
    sys.modules["clustertool.engines.slurm.slurm_start"].join_bundle = with_compiled  # type: ignore[attr-defined]


def _fill_caches() -> None:
    """Compute what each command would compute anew, and what depends on the package alone."""
    from clustertool.fleet import node_bundle
    from clustertool.fleet.joining import join_process
    from clustertool.model.shape import check_of
    from clustertool.model.wire import answers

    node_bundle.packed("need bz2")
    join_process.digest()
    for kind in answers._answer_types().values():
        check_of(kind)
    answers._frames()


def _write_compiled_bundle(join: Any) -> bytes:
    """Write the bundle of a job of Slurm, with what its nodes would compile, each of them anew."""
    from clustertool.fleet.joining import join_bundle
    from tests.node_code import add_compiled

    return add_compiled(join_bundle.content(join))


def main() -> NoReturn:
    connection, kind = socket.socket(fileno=int(sys.argv[1])), sys.argv[2]
    restore_signals()  # before the imports: the tool goes on with what it finds
    _import_all(kind)
    assert threading.active_count() == 1, threading.enumerate()
    request, descriptors = serve(connection)
    become(request, descriptors, kind)
    run_to_end(lambda: run(request["argv"], kind))


if __name__ == "__main__":
    main()
