"""The command line as a person types it: `inv VERB` in a folder with a conf.py and a two-line tasks.py.

A `Site` is such a folder and the cluster that its conf.py names; `LoopSite` has private sshds on loopback, `LabSite` the
namespaces of a lab. Both tell what a test wants to know of the nodes without asking the tool: their processes and files.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import select
import signal
import socket
import struct
import subprocess
import sys
import termios
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from tests import forked, proc_files
from tests.lab.lab import Lab
from tests.ssh.sshd import USER, Keys, Sshd

REPO = Path(__file__).resolve().parents[1]
HELLO = REPO / "workspaces" / "hello"
INV = [sys.executable, "-m", "invoke"]
CLUSTERTOOL = [str(Path(sys.executable).parent / "clustertool")]
CLUSTERRUN = [str(Path(sys.executable).parent / "clusterrun")]
TIMEOUT = 120.0
PATIENCE = 30.0  # seconds for something to come true; far more than it needs, others load the machine
SOON = (
    20.0  # seconds for processes that were ended to be gone: a loaded machine needs some; what was not ended never goes
)


class Done(NamedTuple):
    """A command that has ended. `seconds` from its start to its end."""

    code: int
    out: str
    err: str
    seconds: float

    @property
    def json(self) -> Any:
        return json.loads(self.out)

    @property
    def last(self) -> str:
        """The last line on stderr, which says whose exit code it is."""
        return self.err.rstrip().rpartition("\n")[2]

    @property
    def job(self) -> str:
        """The id of the job that `run` started."""
        found = re.search(r"^job (\S+):", self.err, re.M)
        assert found, self.err
        return found.group(1)

    @property
    def interrupted_before_our_code(self) -> bool:
        """SIGINT ended it before our package was imported: in the shells, in Python's own start or in Invoke.

        Python's start then ends with code 1 and a traceback without a file of ours, Invoke with code 1 and no message.
        """
        starting = ("Traceback", "Fatal Python error: init_", "Could not import runpy module")
        python = self.err.startswith(starting) and self.err.rstrip().endswith("KeyboardInterrupt")
        silent_or_python = not self.err or (python and f"{REPO / 'clustertool'}/" not in self.err)
        return self.code in (1, -signal.SIGINT) and silent_or_python

    def ends(self, code: int) -> Done:
        assert self.code == code, f"exit code {self.code}, not {code}\n--- stdout\n{self.out}\n--- stderr\n{self.err}"
        return self

    def lines(self, start: str = "") -> list[str]:
        return [line for line in self.out.splitlines() if line.startswith(start)]


@dataclass(frozen=True)
class Process:
    """A process of a node, sshd's own left out."""

    node: int
    pid: int
    argv: tuple[str, ...]
    name: str


class Running:
    """A command that runs: what it has printed so far can be waited for, signals can be sent, keys can be typed."""

    def __init__(self, process: subprocess.Popen[bytes] | forked.Forked, streams: Mapping[str, int]) -> None:
        self.process = process
        self.start = time.monotonic()
        self._streams = dict(streams)
        self._output = {name: bytearray() for name in streams}
        self._end = 0.0
        self._threads = [threading.Thread(target=self._read, args=(name,), daemon=True) for name in streams]
        for thread in self._threads:
            thread.start()

    @property
    def out(self) -> str:
        return self.raw.decode(errors="replace")

    @property
    def raw(self) -> bytes:
        """stdout as bytes."""
        return bytes(self._output["out"])

    @property
    def err(self) -> str:
        return self._output["err"].decode(errors="replace") if "err" in self._output else self.out

    def says(self, text: str, seconds: float = PATIENCE) -> str:
        """Wait until `text` (a regular expression) is on stdout or stderr; the match."""

        def sample() -> re.Match[str] | None:
            return re.search(text, plain(self.out), re.M) or re.search(text, plain(self.err), re.M)

        until(
            lambda: sample() or self.process.poll() is not None, seconds, lambda: f"{text!r} in\n{self.out}\n{self.err}"
        )
        self._settle()
        found = sample()
        assert found, f"it ended with {self.process.returncode} before {text!r}\n{self.out}\n{self.err}"
        return found.group(found.lastindex or 0)

    def signal(self, number: signal.Signals = signal.SIGINT) -> float:
        """Send it; the moment it was sent."""
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.process.pid, number)
        return time.monotonic()

    def type(self, keys: str) -> float:
        os.write(self._streams["out"], keys.encode())
        return time.monotonic()

    def weighed(self, seconds: float = TIMEOUT) -> tuple[Done, int]:
        """Wait for its end; with the most memory that it had, in bytes."""
        peak, end = 0, time.monotonic() + seconds
        while self.process.poll() is None and time.monotonic() < end:
            with contextlib.suppress(OSError):
                found = re.search(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{self.process.pid}/status").read_text())
                peak = max(peak, int(found[1]) * 1024 if found else 0)
            time.sleep(0.02)
        return self.wait(PATIENCE), peak

    def wait(self, seconds: float = TIMEOUT) -> Done:
        try:
            self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"it does not end in {seconds} s\n{self.out}\n{self.err}") from None
        self._end = self._end or time.monotonic()
        self._settle(join=True)
        return Done(self.process.returncode, self.out, self.err, self._end - self.start)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(PATIENCE)
        for thread in self._threads:
            thread.join(PATIENCE)
        for fd in self._streams.values():
            with contextlib.suppress(OSError):
                os.close(fd)

    def _settle(self, join: bool = False) -> None:
        if self.process.poll() is not None:
            for thread in self._threads:
                thread.join(PATIENCE if join else 1.0)

    def _read(self, name: str) -> None:
        fd = self._streams[name]
        while True:
            ready, _, _ = select.select([fd], [], [], 0.2)
            if not ready:
                if self.process.poll() is not None and not select.select([fd], [], [], 0)[0]:
                    return  # somebody it started may still hold the other end
                continue
            try:
                data = os.read(fd, 1 << 16)
            except OSError:  # a terminal that no process has open any more
                return
            if not data:
                return
            self._output[name] += data


# What starts a command: (arguments, folder, further variables, its three streams, whether they are its terminal).
Launch = Callable[
    ["list[str]", Path, "dict[str, str]", "Sequence[int]", bool], "subprocess.Popen[bytes] | forked.Forked"
]


def _changes_the_start(variable: str) -> bool:
    """Whether Python reads this variable when it starts."""
    return variable.startswith(("PYTHON", "LC_", "LANG"))


class Site:
    """A folder of a user and what its conf.py names. Subclasses say how a command is started and what nodes hold.

    forks: a command of the tool may be a fork of a process that has imported the package (tests/forked.py).
    """

    count: int
    forks = True

    def __init__(self, folder: Path, count: int) -> None:
        self.folder = folder
        self.count = count
        self.running: list[Running] = []
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "tasks.py").write_text("from clustertool.verbs import ns\n\n__all__ = ['ns']\n")

    # -- set by subclasses

    def environ(self, env: Mapping[str, str]) -> dict[str, str]:
        """The environment of a command that gets the further variables `env`."""
        raise NotImplementedError

    def popen(self, argv: Sequence[str], env: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(argv, env=self.environ(env), **options)

    def fork(self, argv: Sequence[str], env: Mapping[str, str], **options: Any) -> forked.Forked:
        return forked.start(argv, env=self.environ(env), **options)

    def conf_text(self, **keys: object) -> str:
        raise NotImplementedError

    def home(self, node: int) -> Path:
        """A node's home as this machine sees it."""
        raise NotImplementedError

    def name(self, node: int) -> str:
        """How the tool calls a node."""
        raise NotImplementedError

    def processes(self, node: int) -> list[Process]:
        """What lives on a node, but for sshd."""
        raise NotImplementedError

    def all_processes(self) -> list[Process]:
        """The same of all nodes."""
        return [process for node in range(self.count) for process in self.processes(node)]

    # -- files

    def conf(self, **keys: object) -> Site:
        (self.folder / "conf.py").write_text(self.conf_text(**keys))
        return self

    def root(self, node: int) -> Path:
        return self.home(node) / "clustertool"

    def jobs(self, node: int) -> list[Path]:
        """The job directories of a node, by name."""
        return sorted(path for path in (*self.root(node).glob("JOB*"), *self.root(node).glob(f"node{node}/JOB*")))

    def job_dir(self, node: int, job: str) -> Path:
        """The directory of a job on a node. Ids of jobs that start in the same second are in any order."""
        return self.root(node) / f"JOB{job}"

    def workspace(self, name: str = "job", **files: str) -> Path:
        """A folder next to conf.py; `train_py="..."` is its train.py, dedented."""
        import textwrap

        folder = self.folder / name
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            stem, _, kind = file.rpartition("_")
            (folder / f"{stem}.{kind}").write_text(textwrap.dedent(text))
        return folder

    # -- commands

    def inv(self, *args: object, **options: Any) -> Done:
        """Run `inv ARGS` to its end."""
        return self.start(*args, **options).wait(options.get("timeout", TIMEOUT))

    def clustertool(self, *args: object, **options: Any) -> Done:
        return self.inv(*args, program=CLUSTERTOOL, **options)

    def clusterrun(self, *args: object, **options: Any) -> Done:
        return self.inv(*args, program=CLUSTERRUN, **options)

    def start(
        self,
        *args: object,
        program: Sequence[str] = INV,
        env: Mapping[str, str] | None = None,
        terminal: bool = False,
        cwd: Path | None = None,
        columns: int = 100,
        timeout: float = 0.0,
        out: Path | None = None,
        fresh: bool = False,
    ) -> Running:
        """Start it; terminal: with a pty of its own as its controlling terminal; out: a file for its stdout.

        fresh: in a new process of Python, as every command is whose start an option or a variable changes.
        """
        argv = [*program, *map(str, args)]
        where, environ = cwd or self.folder, dict(env or {})
        ours = program in (INV, CLUSTERTOOL, CLUSTERRUN) or program[0].endswith("/clusterrun")
        forkable = ours and not any(map(_changes_the_start, environ))
        launch = self._fork if forkable and self.forks and not fresh else self._new_process
        if terminal:
            running = self._on_terminal(launch, argv, where, environ, columns)
        else:
            running = self._on_pipes(launch, argv, where, environ, out)
        self.running.append(running)
        return running

    def _fork(
        self, argv: list[str], cwd: Path, env: dict[str, str], streams: Sequence[int], terminal: bool
    ) -> forked.Forked:
        return self.fork(argv, env, cwd=cwd, streams=streams, terminal=terminal)

    def _new_process(
        self, argv: list[str], cwd: Path, env: dict[str, str], streams: Sequence[int], terminal: bool
    ) -> subprocess.Popen[bytes]:
        def prepare() -> None:
            signal.signal(
                signal.SIGHUP, signal.SIG_DFL
            )  # under nohup it is ignored, and the tool would go on ignoring it
            if terminal:
                fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        stdin, stdout, stderr = streams
        return self.popen(
            argv, env, cwd=cwd, stdin=stdin, stdout=stdout, stderr=stderr, start_new_session=True, preexec_fn=prepare
        )

    def _on_pipes(self, launch: Launch, argv: list[str], cwd: Path, env: dict[str, str], file: Path | None) -> Running:
        err = os.pipe()
        out = (
            (os.open(os.devnull, os.O_RDONLY), os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC))
            if file
            else os.pipe()
        )
        nothing = os.open(os.devnull, os.O_RDONLY)
        try:
            process = launch(argv, cwd, env, (nothing, out[1], err[1]), False)
        finally:
            for fd in (nothing, out[1], err[1]):
                os.close(fd)
        return Running(process, {"out": out[0], "err": err[0]})

    def _on_terminal(self, launch: Launch, argv: list[str], cwd: Path, env: dict[str, str], columns: int) -> Running:
        ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
        try:
            process = launch(argv, cwd, {"TERM": "xterm-256color", **env}, (theirs, theirs, theirs), True)
        finally:
            os.close(theirs)
        return Running(process, {"out": ours})

    # -- what is left

    def living(self) -> list[Process]:
        """All processes on all nodes that belong to jobs: supervisors, guards, ranks, whatever they started."""
        return [process for process in self.all_processes() if not _agent(process)]

    def gone(self, seconds: float = PATIENCE) -> None:
        """Nothing of any job lives on any node, at the latest in `seconds`."""
        # each time all processes of the machine are read
        until(lambda: not self.living(), seconds, lambda: f"these to end: {self.living()}", pause=0.1)

    def close(self) -> None:
        """End the commands; what a test has left on nodes is ended and is its failure."""
        for running in self.running:
            running.close()
        try:
            self.gone(SOON)
            left = []
        except AssertionError:
            left = self.living()
        for process in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)
        assert not left, f"left on the nodes: {left}"


def _agent(process: Process) -> bool:
    """An agent, its shell and an rsync live as long as the laptop's connection; they are no part of a job.

    Podman without root keeps one process per user, whose namespaces all of its commands enter. Docker has its daemons.
    """
    if process.argv in (("catatonit", "-P"), ("/bin/sh",)) or process.name in ("podman pause", "dockerd", "containerd"):
        return True
    if process.name == "rsync" and "--server" in process.argv:
        return True
    starting = process.name not in ("ct-supervisor", "ct-guard", "ct-gauge") and "clustertool-agent" in process.argv
    return process.name == "ct-agent" or starting


class LoopSite(Site):
    """Nodes are private sshds on loopback; they share this machine's processes and network."""

    def __init__(
        self, folder: Path, servers: Sequence[Sshd], keys: Keys, laptop: Path, python: str = sys.executable
    ) -> None:
        super().__init__(folder, len(servers))
        self.servers = list(servers)
        self._keys, self._python = keys, python
        self.laptop = laptop
        self.conf()

    def environ(self, env: Mapping[str, str]) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "SSH_"))}
        return {**kept, "HOME": str(self.laptop), "PYTHONPATH": str(REPO), **env}

    def conf_text(self, **keys: object) -> str:
        hosts = [f"{USER}@{server.entry}" for server in self.servers]
        base = {"HOSTS": hosts, "IDENTITY_FILE": str(self._keys.user), "PYTHON": self._python, "CONNECT_TIMEOUT": 20}
        return "".join(f"{key} = {value!r}\n" for key, value in {**base, **keys}.items() if value is not None)

    def home(self, node: int) -> Path:
        return self.servers[node].home

    def name(self, node: int) -> str:
        return self.servers[node].address

    def processes(self, node: int) -> list[Process]:
        return _carrying({node: self._signs(node)})

    def all_processes(self) -> list[Process]:
        return _carrying({node: self._signs(node) for node in range(self.count)})

    def _signs(self, node: int) -> list[bytes]:
        server = self.servers[node]
        return [f"HOME={server.home}\0".encode(), server.mark.encode()]


class EmbeddedSite(Site):
    """No conf.py: the embedded local cluster, which the first command starts."""

    def __init__(self, folder: Path, state: Path, count: int = 3) -> None:
        super().__init__(folder, count)
        self.state = state

    def environ(self, env: Mapping[str, str]) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("XDG_", "SSH_"))}
        return {**kept, "XDG_STATE_HOME": str(self.state), "PYTHONPATH": str(REPO), **env}

    def home(self, node: int) -> Path:
        return self.state / "clustertool/local" / f"node{node}"

    def name(self, node: int) -> str:
        return f"127.0.0.{node + 1}"

    def processes(self, node: int) -> list[Process]:
        return _carrying({node: self._signs(node)})

    def all_processes(self) -> list[Process]:
        return _carrying({node: self._signs(node) for node in range(self.count)})

    def _signs(self, node: int) -> list[bytes]:
        return [f"HOME={self.home(node)}\0".encode()]

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.inv("cluster.down").ends(0)


class HereSite(Site):
    """No conf.py, no sshd, no ssh, no rsync: this machine alone, as clusterrun takes it. What it starts carries a mark."""

    def __init__(self, folder: Path, home: Path) -> None:
        super().__init__(folder, 1)
        self._home = home
        self._mark = f"TEST_SITE={uuid.uuid4().hex}"
        self._programs = folder.with_name("no-programs")
        self._programs.mkdir()

    def environ(self, env: Mapping[str, str]) -> dict[str, str]:
        name, _, value = self._mark.partition("=")
        given = {"HOME": str(self._home), "PATH": str(self._programs), "PYTHONPATH": str(REPO), "LANG": "C.UTF-8"}
        return {**given, name: value, **env}

    def home(self, node: int) -> Path:
        return self._home

    def root(self, node: int) -> Path:
        return self.folder / ".clustertool"

    def name(self, node: int) -> str:
        return socket.gethostname()

    def processes(self, node: int) -> list[Process]:
        ours = {running.process.pid for running in self.running}
        return [process for process in _carrying({node: [self._mark.encode() + b"\0"]}) if process.pid not in ours]


class LabSite(Site):
    """Nodes and laptop are namespaces of a lab."""

    def __init__(self, folder: Path, lab: Lab) -> None:
        super().__init__(folder, lab.n)
        self.lab = lab
        self.conf()

    def environ(self, env: Mapping[str, str]) -> dict[str, str]:
        return self.lab.laptop_environ({"PYTHONPATH": str(REPO), **env})

    def popen(self, argv: Sequence[str], env: Mapping[str, str], **options: Any) -> subprocess.Popen[bytes]:
        process: subprocess.Popen[bytes] = self.lab.laptop(argv, self.environ(env), **options)
        return process

    def fork(self, argv: Sequence[str], env: Mapping[str, str], **options: Any) -> forked.Forked:
        return super().fork(argv, env, network=self.lab.laptop_net, init=self.lab.laptop_init, **options)

    def conf_text(self, **keys: object) -> str:
        return self.lab.conf(**keys)

    def home(self, node: int) -> Path:
        return self.lab.home(node)

    def name(self, node: int) -> str:
        return self.lab.name(node)

    def processes(self, node: int) -> list[Process]:
        return [process for seen in self.lab.processes(node) for process in _probe(node, seen.pid)]


def _carrying(signs: Mapping[int, Sequence[bytes]]) -> list[Process]:
    """Processes of this machine with one of the `signs` of a node in their environment, by node."""
    found: list[Process] = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError):
                environ = Path(f"/proc/{name}/environ").read_bytes() + b"\0"
                for node in signs:
                    if any(sign in environ for sign in signs[node]):
                        found += _probe(node, int(name))
    return sorted(found, key=lambda process: process.node)


def _probe(node: int, pid: int) -> Iterator[Process]:
    """The process, if it lives, and is no stub and none of sshd's."""
    with contextlib.suppress(OSError):
        argv = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:-1]
        name = proc_files.comm(pid)
        if name in ("sshd", proc_files.STUB) or name.startswith("sshd-"):
            return
        if proc_files.living(pid):  # after its arguments were read, which one that ends does not have
            yield Process(node, pid, tuple(argv), name)


def until(
    true: Callable[[], Any], seconds: float = PATIENCE, what: Callable[[], str] = lambda: "it", pause: float = 0.02
) -> None:
    """Poll until it is true, with pauses twice as long as the last call took, as it may start a command, at least `pause`."""
    deadline = time.monotonic() + seconds
    while True:
        began = time.monotonic()
        if true():
            return
        now = time.monotonic()
        if now > deadline:
            raise AssertionError(f"waited {seconds} s for {what()}")
        time.sleep(min(max(pause, 2 * (now - began)), 1.0))


def plain(text: str) -> str:
    """What a terminal shows: without colours and cursor movements."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07", "", text).replace("\r\n", "\n")


def lines_before(shown: str) -> list[str]:
    """What was printed on a terminal before the first line of rank 0, less warnings.

    Less the note that another test has taken a port, too: all tests claim their ports in one /tmp."""
    left_out = "warning: ", "  fix: ", "a port was taken by another job a moment ago"
    before = shown.partition("[trainer 0 ")[0].replace("\r\n", "\n").split("\n")[:-1]
    return [line for line in map(plain, before) if line.strip() and not line.startswith(left_out)]
