"""Nodes without ssh: the shipped archive runs as real processes on this machine, and the real client speaks to it over pipes.

Each `Node` has its own address on loopback and its own ROOT_DIR; a `Job` is planned by plan() and started by the engine's
requests, as `run` does it. What a test wants to know of processes and files it reads from /proc and the disk itself.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from clustertool.errors import ClustertoolError, PortInUse, Unreachable, raise_all
from clustertool.fleet import identity
from clustertool.fleet.agent_client import AgentClient
from clustertool.fleet.this_machine import ProgramLink
from clustertool.model.config.cluster import Cluster, read_cluster
from clustertool.model.config.job import Options, read_job
from clustertool.model.facts import Facts, Identity, read_facts
from clustertool.model.planning import requests
from clustertool.model.planning.plan import HIDDEN, Plan, plan
from clustertool.model.wire import record_lines
from clustertool.model.wire.messages import REQUESTS, Request
from clustertool.node.system import private_directory
from tests import forked, forked_agents, proc_files

PATIENCE = 30.0  # seconds for something to come true: others load this machine
SHORTEST, LONGEST = 0.01, 0.05  # seconds between two polls; what has taken long is polled less often
Event = dict[str, Any]
_SHELL: Sequence[str] = ("/bin/sh",)


def until(true: Callable[[], Any], what: str = "it came true", patience: float = PATIENCE) -> Any:
    """Poll until it is true and return what it was, or fail."""
    start = time.monotonic()
    end = start + patience
    while True:
        began = time.monotonic()
        found = true()
        if found:
            return found
        now = time.monotonic()
        assert now < end, f"{patience:g} s and not: {what}"
        pause = min(max(SHORTEST, (now - start) / 10), LONGEST)
        time.sleep(min(max(pause, 2 * (now - began)), 1.0))


# -- processes, as /proc tells them -----------------------------------------------------------------------------------


class Process(NamedTuple):
    pid: int
    start: int


def sample(pid: int) -> tuple[Process, str, int] | None:
    """(identity, state, parent) of a process."""
    fields = proc_files.stat(pid)
    return (Process(pid, int(fields[19])), fields[0], int(fields[1])) if fields else None


def alive(process: Process) -> bool:
    """Whether one of its threads runs. After a SIGKILL the main thread can be a zombie before the others have ended."""
    fields = proc_files.stat(process.pid)
    return bool(fields) and int(fields[19]) == process.start and (fields[0] not in "ZX" or fields[17] != "1")


def state(process: Process) -> str:
    found = sample(process.pid)
    return found[1] if found and found[0] == process else ""


def pids() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def descriptors(pid: int) -> list[str]:
    """What the descriptors of a process lead to. It may close some of them meanwhile."""
    found = []
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(FileNotFoundError):
            found.append(os.readlink(f"/proc/{pid}/fd/{name}"))
    return found


def marked(text: str) -> list[Process]:
    """Living processes with `text` anywhere in their environment."""
    found = [sample(pid) for pid in pids() if text.encode() in read(f"/proc/{pid}/environ")]
    return [one[0] for one in found if one and one[1] not in "ZX"]


def cpu(pid: int) -> float:
    """Seconds of CPU a process has used."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def kill(process: Process, number: int = signal.SIGKILL) -> None:
    """What cannot be caught has happened when this returns: on a busy machine a process stops only when its turn comes."""
    assert alive(process), f"{process} does not live"
    os.kill(process.pid, number)
    if number == signal.SIGKILL:
        until(lambda: not alive(process), f"{process} is dead")
    elif number == signal.SIGSTOP:
        until(lambda: state(process) in ("T", "t", ""), f"{process} stands still")


def claims_on_disk() -> dict[str, Any]:
    """The file of this user's claims of ports. Jobs of other tests write to it at any time."""
    with open(Path(private_directory.make("ports.json"), "ports.json"), "ab+") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        file.seek(0)
        return dict(json.loads(file.read() or b"{}"))


# -- the channel ------------------------------------------------------------------------------------------------------


class Channel:
    """A local process, a shell or an agent, behind what the client asks of a paramiko channel."""

    def __init__(self, argv: Sequence[str], env: Mapping[str, str], place: Path | None = None) -> None:
        """place: of the node's code; the process is a fork of one that has imported it (see tests/forked_agents.py)."""
        if place is None:
            self.popen: subprocess.Popen[bytes] | forked.Forked = _start(argv, env)
        else:
            self.popen = forked_agents.start(argv, env, place)
        self._timeout: float | None = None
        self.sent = 0
        self.eof_received, self.status_event = True, threading.Event()  # nothing to wait for at the end
        self.status_event.set()
        self._output = bytearray()
        self._listener = threading.Thread(target=self._listen, daemon=True)
        self._listener.start()

    def _listen(self) -> None:
        assert self.popen.stderr is not None
        while True:
            data = self.popen.stderr.read(4096)
            if not data:
                return
            self._output += data

    def settimeout(self, seconds: float | None) -> None:
        self._timeout = seconds

    def recv(self, size: int) -> bytes:
        assert self.popen.stdout is not None
        if not select.select([self.popen.stdout], [], [], self._timeout)[0]:
            raise TimeoutError
        return os.read(self.popen.stdout.fileno(), size)

    def sendall(self, data: bytes) -> None:
        assert self.popen.stdin is not None
        self.sent += len(data)
        view = memoryview(data)
        while view:
            view = view[os.write(self.popen.stdin.fileno(), view) :]

    @property
    def exit_status(self) -> int:
        return self.popen.wait(30)

    @property
    def closed(self) -> bool:
        assert self.popen.stdin is not None
        return self.popen.stdin.closed

    def recv_stderr_ready(self) -> bool:
        return bool(self._output)

    def recv_stderr(self, size: int) -> bytes:
        data = bytes(self._output[:size])
        del self._output[:size]
        return data

    def close(self) -> None:
        """As sshd does it: the agent reads the end of its stdin, and ends."""
        assert self.popen.stdin is not None
        self.popen.stdin.close()

    def kill(self) -> None:
        self.popen.kill()
        self.end()

    def end(self) -> None:
        self.close()
        self.popen.wait(PATIENCE)
        self._listener.join(PATIENCE)


def _start(argv: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes]:
    pipe = subprocess.PIPE
    streams: dict[str, Any] = {"stdin": pipe, "stdout": pipe, "stderr": pipe, "bufsize": 0}
    return subprocess.Popen(argv, env=dict(env), cwd="/", start_new_session=True, **streams)


class Link:
    """Where the client asks for its channel."""

    def __init__(self, env: Mapping[str, str], shell: Sequence[str] = _SHELL) -> None:
        self.env, self.shell = env, shell
        self.channels: list[Channel] = []

    def channel(self, *, window: int = 0, timeout: float = 10.0) -> Channel:
        self.channels.append(Channel(self.shell, self.env))
        return self.channels[-1]


class ForkingLink(Link):
    """A link that starts agents without a shell, as forks."""

    node, noise, no_shell, alive, waiting = "", b"", ("", ""), True, 0

    def __init__(self, env: Mapping[str, str], place: Path, root_group: str) -> None:
        super().__init__(env)
        self.place, self.root_group = place, root_group
        self.times: Mapping[str, float] = {}
        assert isinstance(self, ProgramLink)  # the client asks for no shell

    def program(self, argv: Sequence[str], *, window: int = 0, timeout: float = 10.0) -> Channel:
        self.channels.append(Channel(argv, self.env, self.place))
        return self.channels[-1]

    def lost(self, why: str) -> Unreachable:
        return Unreachable(why, "", "")

    def close(self) -> None:
        """Nothing: each client ends its channel."""


# -- nodes and jobs ---------------------------------------------------------------------------------------------------


@dataclass
class Stream:
    """The frames of one follow, as they come."""

    events: list[Event] = field(default_factory=list)
    logs: dict[str, bytearray] = field(default_factory=dict)
    events_at: int = 0
    beats: int = 0
    ended: Event | None = None
    closed: bool = False
    after_end: int = 0

    def take(self, header: Event, payload: bytes) -> None:
        kind = header["type"]
        self.after_end += self.ended is not None and kind in ("log", "events")
        if kind == "log":
            log = self.logs.setdefault(header["log"], bytearray())
            assert header["off"] == len(log), f"{header['log']}: offset {header['off']}, expected {len(log)}"
            log += payload
        elif kind == "events":
            self.events += header["events"]
            self.events_at = header["at"]
        elif kind == "beat":
            self.beats += 1
        elif kind == "end":
            self.ended = header
        elif kind == "closed":
            self.closed = True

    def resume(self) -> dict[str, Any]:
        """What a client sends that has lost its connection."""
        return {"offsets": {name: len(log) for name, log in self.logs.items()}, "events_at": self.events_at}


def request(name: str, **fields: Any) -> Request[Any]:
    """A request by its type, with the fields that a test needs."""
    plain = {"nic": "", "address": "", "explicit_address": "", "ports": []} if name.startswith("probe") else {"job": ""}
    return Request(REQUESTS[name], {**plain, **fields})


def is_json(line: bytes) -> bool:
    try:
        json.loads(line)
    except (ValueError, RecursionError):
        return False
    return True


class Client:
    """One open agent of a node."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.stream = Stream()
        self.link = node.link()
        self.agent = AgentClient.open(self.link, node.cluster.hosts[node.index], node.cluster, self._sink)  # type: ignore[arg-type]

    def _sink(self, _: int, header: Event, payload: bytes) -> None:
        self.stream.take(header, payload)

    def ask(self, name: str, timeout: float = PATIENCE, **fields: Any) -> Event:
        answer = dict(self.agent.ask(request(name, **fields), timeout))
        del answer["asked"]
        return answer

    @property
    def pid(self) -> int:
        """The agent: a fork, or a child of the shell that the login has started."""
        shell = self.link.channels[-1].popen.pid
        if isinstance(self.link, ForkingLink):
            return shell
        agents = (pid for pid in pids() if read(f"/proc/{pid}/comm") == b"ct-agent\n")
        return next(pid for pid in agents if (sample(pid) or (None, "", 0))[2] == shell)

    def kill(self) -> None:
        self.link.channels[-1].kill()

    def close(self) -> None:
        """As when a command ends: its connection goes, and the agent with it."""
        self.link.channels[-1].end()


class Node:
    """One node: an entry of HOSTS, its ROOT_DIR, and the agents that were started on it."""

    def __init__(self, cluster: Cluster, index: int, env: Mapping[str, str], place: Path | None = None) -> None:
        self.cluster, self.index, self.env = cluster, index, env
        self.place = place  # of the code in the home of all tests
        self.host = cluster.hosts[index]
        self.root = Path(self.host.root_dir)
        self.shell = _SHELL
        self.clients: list[Client] = []

    def link(self) -> Link:
        """A link to it. Agents are forks, unless the login, the home or the interpreter is one of the test."""
        own = self.shell != _SHELL or self.cluster.python_of(self.host) != sys.executable
        if own or self.place is None or not self.place.is_relative_to(self.env.get("HOME", "/nowhere")):
            return Link(self.env, self.shell)
        if not forked_agents.can_fork(self.env) or not forked.can_join():
            return Link(self.env, self.shell)
        return ForkingLink(self.env, self.place, self.cluster.root_dir_group)

    def open(self) -> Client:
        """A new agent, as a new command of a laptop starts it."""
        self.clients.append(Client(self))
        return self.clients[-1]

    @property
    def client(self) -> Client:
        return self.clients[-1] if self.clients else self.open()

    def ask(self, name: str, **fields: Any) -> Event:
        return self.client.ask(name, **fields)

    def probe(self, **fields: Any) -> Event:
        given = self.host.address if self.host.address != self.host.host else ""
        request = {
            "root_dir": str(self.root),
            "nic": self.cluster.nic,
            "address": self.host.address,
            "explicit_address": given,
            "ports": [],
        }
        kind = "probe-check" if "job" in fields else "probe-run" if "earlier" in fields else "probe"
        return self.ask(kind, **{**request, **fields})


class Job:
    """A planned job and what became of it on every node."""

    def __init__(
        self, nodes: Sequence[Node], made: Plan, secrets: Mapping[str, str], job_env: Mapping[str, str]
    ) -> None:
        self.nodes, self.plan, self.id, self.token = nodes, made, made.job_id, made.identity.token
        self.secrets, self.job_env = dict(secrets), dict(job_env)
        place, launch = requests.start(made, {}, secrets).phases
        self.place_requests: dict[int, dict[str, Any]] = {
            node: dict(request.fields) for node, request in place.requests.items()
        }
        self.start_requests = launch.requests
        self.known: set[Process] = set()
        self.torn = False  # a full disk may have torn lines, nothing else

    def dir(self, node: int = 0) -> Path:
        return Path(self.plan.nodes[node].job_dir)

    def place(self) -> Job:
        for node, fields in self.place_requests.items():
            self.nodes[node].client.agent.ask(request("place", **fields))
        return self

    def start(self) -> Job:
        """Place if that is still to do, and start on all nodes at once."""
        if not self.dir().exists():
            self.place()
        errors: list[ClustertoolError] = []

        def one(node: int) -> None:
            try:
                self.nodes[node].client.agent.ask(self.start_requests[node])
            except ClustertoolError as error:
                errors.append(error)

        threads = [threading.Thread(target=one, args=(node,)) for node in self.start_requests]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        raise_all(errors)
        return self

    # -- what the disk says --

    def events(self, node: int = 0, kind: str = "") -> list[Event]:
        """Whole lines of the events file, all or of one kind. Notes every process named there."""
        found: list[Event] = []
        for line in read(str(self.dir(node) / ".clustertool/events.jsonl")).split(b"\n")[:-1]:
            event = record_lines.read_event(line)
            if event is not None:
                found.append(dict(event))
            else:
                assert self.torn or not line or is_json(line), f"a torn line: {line!r}"
        for event in found:
            if event["type"] in ("supervisor", "guard", "gauge", "started"):
                self.known.add(Process(event["pid"], event["start"]))
        return [event for event in found if kind in ("", event["type"])]

    def until(self, kind: str, node: int = 0, count: int = 1) -> list[Event]:
        return list(
            until(
                lambda: (lambda found: found if len(found) >= count else None)(self.events(node, kind)),
                f"{count} {kind} on node {node}: {[e['type'] for e in self.events(node)]}",
            )
        )

    def ended(self, node: int = 0) -> Event:
        return self.until("ended", node)[0]

    def process(self, kind: str, node: int = 0) -> Process:
        """The newest supervisor or guard."""
        event = self.until(kind, node)[-1]
        return Process(event["pid"], event["start"])

    def rank(self, rank: int = 0, role: str = "trainer") -> Process:
        """A rank that has been started, on whatever node."""
        node = next(p.node for p in self.plan.processes if (p.role, p.rank) == (role, rank))
        named = {"role": role, "rank": rank}
        event = until(lambda: [e for e in self.events(node, "started") if named.items() <= e.items()], "it started")[-1]
        return Process(event["pid"], event["start"])

    def seen(self, node: int = 0) -> set[Process]:
        tokens = [line.split() for line in read(str(self.dir(node) / ".clustertool/seen")).splitlines()]
        return {
            Process(int(one[0]), int(one[1])) for one in tokens if one
        }  # a new supervisor begins with an empty line

    def log(self, rank: int = 0, role: str = "trainer", attempt: int = 0) -> bytes:
        process = next(p for p in self.plan.processes if (p.role, p.rank) == (role, rank))
        name = {"trainer": "workerlog", "pserver": "serverlog", "heter": "heterlog"}[role]
        place = self.dir(process.node) / ".clustertool/log" / (f"attempt{attempt}/" if attempt else "")
        return read(str(place / f"{name}.{rank}"))

    def says(self, text: bytes, rank: int = 0, role: str = "trainer") -> bytes:
        """Wait until a rank's log holds `text`."""
        until(lambda: text in self.log(rank, role), f"{role} {rank} says {text!r}")
        return self.log(rank, role)

    def ready(self) -> Job:
        """Every trainer has printed so, and its supervisor has written down that it started."""
        for process in self.plan.processes:
            if process.role == "trainer":
                self.says(b"ready", process.rank)
                self.reported(process.rank)
                self.rank(process.rank)
        return self

    def reported(self, rank: int = 0, role: str = "trainer", count: int = 0) -> list[Process]:
        """The processes that a rank has named in its log by `pid 123` lines, `count` at least."""
        until(lambda: self.log(rank, role).count(b"pid ") >= count, f"{count} pids")
        found = [int(line.split()[1]) for line in self.log(rank, role).splitlines() if line.startswith(b"pid ")]
        processes = [one[0] for one in map(sample, found) if one]
        self.known.update(processes)
        return processes

    # -- acting --

    def stop(self, node: int = 0, client: Client | None = None, **how: Any) -> Event:
        """One node's answer to a stop."""
        given = {"by": "test", "code": 143, "grace": 10.0, "force": False, **how}
        answer = (client or self.nodes[node].client).ask("stop", job=self.id, exact=True, timeout=60, **given)
        return dict(answer["jobs"].get(self.id, {}))

    def follow(self, node: int = 0, client: Client | None = None, **request: Any) -> Stream:
        client = client or self.nodes[node].open()
        client.ask("follow", job=self.id, **{"logs": "all", "tail": None, **request})
        return client.stream

    # -- the proof --

    def living(self) -> dict[Process, str]:
        """Everything of this job that lives: by marker, by record, by name in a log, supervisor and guard too."""
        found = dict.fromkeys(marked(self.token), "marked")
        for node in range(len(self.nodes)):
            self.events(node)
            self.known |= self.seen(node)
        found.update((process, "known") for process in self.known if alive(process))
        return {process: f"{why} {read(f'/proc/{process.pid}/cmdline')!r}" for process, why in found.items()}

    def gone(self) -> None:
        """Nothing of the job lives, at the latest after the moment that supervisor and guard take to leave."""
        until(lambda: not self.living(), f"nothing lives: {self.living()}", 45.0)


# -- the laboratory ---------------------------------------------------------------------------------------------------


class Bench:
    """Makes nodes and jobs; ends whatever a failed test has left."""

    def __init__(self, tmp: Path, home: Path, place: Path) -> None:
        self.tmp, self.home, self._place = tmp, home, place
        self.jobs: list[Job] = []
        self._nodes: list[Node] = []

    def nodes(
        self,
        count: int = 1,
        *,
        python: str = sys.executable,
        env: Mapping[str, str] | None = None,
        root: Path | None = None,
        **conf: Any,
    ) -> list[Node]:
        """`count` nodes on 127.0.0.<n>, each with a ROOT_DIR of its own unless one is given; `conf` are keys of conf.py."""
        first = len(self._nodes) + 11
        addresses = {
            f"127.0.0.{number}": str(root or self.tmp / f"root{number}") for number in range(first, first + count)
        }
        hosts = [{"host": address, "address": address, "root_dir": folder} for address, folder in addresses.items()]
        values = {"HOSTS": hosts, "PYTHON": python, "LOSS_TIMEOUT": 10, "GRACE": 5, "DEVICE_KIND": "cpu", **conf}
        cluster = read_cluster(values)
        environ = {
            "HOME": str(self.home),
            "PATH": os.environ["PATH"],
            "USER": "tester",
            "LANG": "C.UTF-8",
            **(env or {}),
        }
        made = [Node(cluster, index, environ, self._place) for index in range(count)]
        self._nodes += made
        return made

    def job(self, nodes: Sequence[Node] | None = None, trainer: Sequence[str] | str = "true", **given: Any) -> Job:
        """Plan a job: `trainer`, `pserver` and `heter` are commands (a text is a shell's); the rest is as in job.toml."""
        nodes = nodes or self.nodes()
        cluster = nodes[0].cluster
        toml: dict[str, Any] = {"trainer": {"command": _command(trainer), "per_node": given.pop("per_node", 1)}}
        if "pserver" in given:
            pserver = {"command": _command(given.pop("pserver")), "per_node": given.pop("servers", 1)}
            toml.update(mode="ps", pserver={**pserver, "ready": given.pop("pserver_ready", "listen")})
        if "heter" in given:
            toml.update(mode="ps-heter", heter_trainer={"command": _command(given.pop("heter"))})
        toml.update(policy=given.pop("policy", {}), env=given.pop("env", {}))
        secrets, number = given.pop("secrets", {}), given.pop("id", f"{self.tmp.name[:30]}-{len(self.jobs)}")
        cluster = replace(cluster, secrets=tuple(secrets))
        facts = given.pop("facts", None) or _facts(nodes)
        certificate, key = identity.certificate()
        owner = Identity(number, time.time(), "tester", identity.token(), certificate, key)
        spec = read_job(cluster, toml, Options(servers=tuple(given.pop("endpoints", ())), **given))
        made = plan(cluster, spec, facts, owner, (), tuple((name, HIDDEN) for name in secrets))
        self.jobs.append(Job(nodes, made, secrets, toml["env"]))
        return self.jobs[-1]

    def run(self, *args: Any, **given: Any) -> Job:
        """Plan, place and start a job. Plan again if a job of another test took its ports after the plan, as the tool does."""
        while True:
            job = self.job(*args, **given)
            try:
                return job.place().start()
            except PortInUse as error:
                if "in use by job" not in error.what or f"in use by job {self.tmp.name[:30]}" in error.what:
                    raise
                for node, request in job.place_requests.items():
                    job.nodes[node].client.ask("unplace", job_dir=request["spec"]["job_dir"], token=job.token)
                self.jobs.remove(job)

    def end(self) -> None:
        """The proof for every job of the test; what lives all the same is killed, and the test fails."""
        left: dict[Process, str] = {}
        for job in self.jobs:
            try:
                job.gone()
            except AssertionError:
                left.update(job.living())
        for process in left:
            if alive(process):
                os.kill(process.pid, signal.SIGKILL)
        for node in self._nodes:
            for client in node.clients:
                client.close()
        assert not left, f"still alive: {left}"


def _command(given: Sequence[str] | str) -> list[str]:
    return ["sh", "-c", given] if isinstance(given, str) else list(given)


def _facts(nodes: Sequence[Node]) -> dict[int, Facts]:
    return {node.index: read_facts(node.index, node.probe()) for node in nodes}


@functools.cache
def pythons() -> list[str]:
    """Every Python >= 3.8 that this machine has, one of each version.

    Their names have the versions: each worker calls this while it collects the tests, and to start them takes 0.3 s of CPU.
    """
    found = {sys.version_info[:2]: sys.executable}
    for path in _candidates():
        version = re.fullmatch(r"python(\d+)\.(\d+)", Path(path).name)
        if version and os.access(path, os.X_OK):
            found.setdefault((int(version[1]), int(version[2])), path)
    return [found[version] for version in sorted(found) if version >= (3, 8)]


def python_cases() -> list[Any]:
    """Parameters for each of them: the oldest and the newest; those between with `make test-chaos`."""
    found = pythons()
    outer = (found[0], found[-1])
    import pytest

    return [pytest.param(path, marks=[] if path in outer else [pytest.mark.chaos]) for path in found]


def old_pythons() -> list[str]:
    """Pythons that are too old, however old."""
    found = [str(path) for path in _installed() if path.name in ("python2.7", "python3.6", "python3.7")]
    return sorted({Path(path).name: path for path in found}.values())


def _candidates() -> Iterator[str]:
    for path in _installed():
        yield str(path)
    for minor in range(8, 20):
        path = shutil.which(f"python3.{minor}")
        if path and "shims" not in path:  # pyenv's shims exist for what is not active, too
            yield path


def _installed() -> list[Path]:
    """What pyenv and its likes keep next to the system's own."""
    folders = [Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions", Path("/opt/python")]
    found = [path for folder in folders for path in sorted(folder.glob("*/bin/python?.*"))]
    return [path for path in found if path.name.replace(".", "").isalnum()]  # python3.8, and not python3.8-config
