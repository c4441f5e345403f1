"""The socket of a supervisor answers processes of its user, and none of them can block it, whatever they send."""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from clustertool.errors import ClustertoolError, NotFound, UsageError
from clustertool.model.paths import JobPaths
from clustertool.model.wire.frames import encode
from clustertool.node.jobs import supervisor_client
from clustertool.node.supervisor.control_socket import ControlSocket
from clustertool.node.system import processes
from tests.node import programs as p
from tests.node.harness import Bench, Job, alive, cpu, kill, until

OTHER_UID = 65534
STOP = {"type": "stop", "by": "a test", "code": 143, "grace": 1.0, "force": False}


def paths(job: Job, node: int = 0) -> JobPaths:
    return JobPaths(str(job.dir(node).parent), job.id)


def ask(job: Job, node: int = 0, **request: Any) -> dict[str, Any]:
    answer = supervisor_client.ask(paths(job, node), request, 10.0)  # type: ignore[arg-type]
    assert answer is not None, "the supervisor does not answer"
    return answer[0]


def connect(folder: Path) -> socket.socket:
    """By a path that has no limit."""
    sock = socket.socket(socket.AF_UNIX)
    fd = os.open(folder, os.O_PATH)
    try:
        sock.connect(f"/proc/self/fd/{fd}/control")
    finally:
        os.close(fd)
    return sock


# -- requests


def test_its_file_belongs_to_the_user_only_and_goes_with_the_job(bench: Bench) -> None:
    job = bench.run(None, p.PLAIN).ready()
    control = job.dir() / ".clustertool/control"
    mode = control.lstat().st_mode
    assert (stat.S_ISSOCK(mode), stat.S_IMODE(mode)) == (True, 0o600)
    before = control.lstat().st_mtime
    until(lambda: control.lstat().st_mtime > before, "the supervisor moves")
    assert job.nodes[0].ask("status", job=job.id)["heartbeat"] < 10
    job.stop()
    job.gone()
    assert not control.exists()


def test_status_follows_the_ranks(bench: Bench) -> None:
    program = "[ $RANK = 1 ] && exit 0; exec sleep 1000"
    job = bench.run(bench.nodes(2), program, per_node=2, policy={"max_restarts": 1})
    until(lambda: [rank["state"] for rank in ask(job, type="status")["ranks"]] == ["running", "done"])
    found = ask(job, type="status")
    assert {**found, "ranks": []} == {
        "type": "status",
        "job": job.id,
        "node": 0,
        "attempt": 0,
        "leads": True,
        "stopping": "",
        "outcome": None,
        "ranks": [],
    }
    assert found["ranks"][0] == {
        "role": "trainer",
        "rank": 0,
        "attempt": 0,
        "state": "running",
        "pid": job.rank().pid,
        "log": "log/workerlog.0",
    }
    assert (ask(job, 1, type="status")["leads"], ask(job, 1, type="status")["ranks"][0]["rank"]) == (False, 2)
    kill(job.rank(), signal.SIGSTOP)
    until(lambda: ask(job, type="status")["ranks"][0]["state"] == "frozen")
    kill(job.rank(3), signal.SIGKILL)
    until(lambda: [event for event in job.events(0, "started") if event["attempt"] == 1 and event["rank"] == 0])
    again = ask(job, type="status")
    assert (again["attempt"], again["ranks"][0]["attempt"]) == (1, 1)
    assert again["ranks"][0]["log"] == "log/attempt1/workerlog.0"
    job.stop(force=True)


def test_status_of_a_job_that_ends(bench: Bench) -> None:
    job = bench.run(None, p.IGNORES_TERM).ready()
    assert ask(job, **{**STOP, "grace": 60.0}) == {"type": "accepted"}
    assert job.until("stopping")[0]["why"] == "a test"
    found = ask(job, type="status")
    assert (found["stopping"], found["ranks"][0]["state"]) == ("stopping", "running")
    ask(job, **{**STOP, "force": True})
    assert job.ended()["code"] == 143


def test_another_program_becomes_the_rank(bench: Bench) -> None:
    """It gets what the rank itself has: the kernel's record of that is the proof."""
    program = ["sh", "-c", 'echo ready $RANK in "$(pwd)"; sleep 1000', "train.py"]
    job = bench.run(None, program, per_node=2, secrets={"TOKEN": "hush"}, env={"LR": "0.1"}).ready()
    found = ask(job, type="rank-environment", role="trainer", rank=1)
    pid = job.rank(1).pid
    theirs = processes.environment(pid)
    # The rank's first program is a shell: it has added nothing to the environment that the kernel keeps.
    assert {name.encode(): value.encode() for name, value in found["env"].items()} == {
        name: value for name, value in theirs.items() if name
    }
    assert (found["env"]["TOKEN"], found["env"]["LR"], found["env"]["RANK"]) == ("hush", "0.1", "1")
    assert Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")[:-1] == [one.encode() for one in found["argv"]]
    assert found["work_dir"] == os.readlink(f"/proc/{pid}/cwd")
    assert found["log"] == os.readlink(f"/proc/{pid}/fd/1")
    assert f"Umask:\t{found['umask']:04o}\n" in Path(f"/proc/{pid}/status").read_text()
    assert (found["role"], found["rank"], found["attempt"]) == ("trainer", 1, 0)
    assert (found["device_kind"], found["devices"], found["shards"]) == ("cpu", [], [])
    with open(found["log"], "ab") as log:
        code = "import os, sys; os.write(1, b'other %s in %s' % (os.environb[b'RANK'], os.getcwdb()))"
        argv = [sys.executable, "-c", code]
        subprocess.run(argv, env=found["env"], cwd=found["work_dir"], stdout=log, check=True)
    assert job.log(1).endswith(b"other 1 in " + str(job.dir()).encode())
    assert "hush" not in (job.dir() / ".clustertool/events.jsonl").read_text()
    job.stop()


def test_what_a_supervisor_does_not_have_is_named(bench: Bench) -> None:
    job = bench.run(None, p.PLAIN).ready()
    name = job.nodes[0].host.name
    with pytest.raises(NotFound, match=f"node {name} has no trainer 7"):
        ask(job, type="rank-environment", role="trainer", rank=7)
    with pytest.raises(NotFound, match=f"the supervisor on {name} has no bundle: its job was started by ssh"):
        ask(job, type="bundle")
    with pytest.raises(UsageError, match="does not know this request: 'halt' is no type"):
        ask(job, type="halt")
    with pytest.raises(UsageError, match="grace is 'soon', not a number"):
        ask(job, **{**STOP, "grace": "soon"})
    assert not job.events(0, "stopping")
    job.stop()


_WITH_BUNDLE = """
import json, os, sys
from clustertool.node.storage import files
from clustertool.node.supervisor.allocation import Origin
from clustertool.node.supervisor.supervisor import Supervisor
given = json.load(sys.stdin)
job = files.open_job_dir(given["job_dir"])
spec = {**json.loads(files.read(job, ".clustertool/spec.json")), **given["launch"]}
supervisor = Supervisor(spec, job, 0o022, Origin(b"x" * (5 << 20) + b"end"))
supervisor.prepare()
supervisor.run()
"""


def test_a_supervisor_in_the_foreground_serves_its_bundle(bench: Bench) -> None:
    job = bench.job(None, p.PLAIN).place()
    fields = job.start_requests[0].fields
    launch = {name: fields[name] for name in ("secrets", "certificate", "key")}
    given = json.dumps({"job_dir": str(job.dir()), "launch": launch})
    argv = [sys.executable, "-c", _WITH_BUNDLE]
    with subprocess.Popen(argv, stdin=subprocess.PIPE, text=True, env=dict(job.nodes[0].env)) as supervisor:
        assert supervisor.stdin is not None
        supervisor.stdin.write(given)
        supervisor.stdin.close()
        job.ready()
        answer = supervisor_client.ask(paths(job), {"type": "bundle"}, 10.0)
        assert answer is not None and answer[0] == {"type": "bundle"}
        assert answer[1] == b"x" * (5 << 20) + b"end"
        assert job.stop()["state"] == "clean"
        assert supervisor.wait(60) == 0


def test_a_job_with_a_long_path(bench: Bench, tmp_path: Path) -> None:
    root = tmp_path / ("a" * 100) / ("b" * 100)
    job = bench.run(bench.nodes(1, root=root), p.PLAIN).ready()
    assert len(str(job.dir() / ".clustertool/control")) > 200
    assert ask(job, type="status")["job"] == job.id
    assert job.stop()["state"] == "clean"
    assert not job.events(0, "supervisor-lost")


# -- hostile clients


def test_silent_and_wrong_clients_do_not_disturb_a_job(bench: Bench) -> None:
    """More of them than connections are kept. What they send never ends a job, and its stop is answered at once."""
    job = bench.run(None, p.SAYS_BYE).ready()
    ours = job.dir() / ".clustertool"
    wrong = [
        b"",
        encode(STOP)[:20],
        b"\xff" * 100,
        b"GET / HTTP/1.0\r\n\r\n",
        encode({**STOP, "by": ["x"]}),
        encode({"type": "stop"}),
        encode([STOP]),  # type: ignore[arg-type]
        encode(STOP, b"payload"),
        encode({**STOP, "by": "x" * 100_000}),
        b"\x00\x00\x00\x05\x00\x00\x00\x00[[[[[",
        b"\x00\x01\x00\x00\x00\x00\x00\x00" + b"[" * 65536,
    ]
    clients = [connect(ours) for _ in range(60)]
    begin = time.monotonic()
    assert ask(job, type="attached") == {"type": "accepted"}
    assert time.monotonic() - begin < 1.9, "silent clients are replaced before their time is over"
    for number in range(200):
        client = connect(ours)
        client.setblocking(False)
        with contextlib.suppress(OSError):
            client.sendall(wrong[number % len(wrong)])
        clients.append(client)
    begin = time.monotonic()
    assert ask(job, type="status")["ranks"][0]["state"] == "running"
    assert time.monotonic() - begin < 5, "those that have sent nothing are not waited for"
    assert not job.events(0, "stopping") and alive(job.process("supervisor"))
    assert job.stop(grace=60.0)["state"] == "clean"
    assert job.log().endswith(b"bye\n") and not job.events(0, "supervisor-lost")
    assert job.ended()["reason"] == "test"
    for client in clients:
        client.close()


@pytest.mark.parametrize("mute", [True, False], ids=["silent", "half a request"])
def test_a_flood_delays_a_request_by_less_than_a_stop_waits(bench: Bench, mute: bool) -> None:
    job = bench.run(None, p.SAYS_BYE).ready()
    ours, ended, count = job.dir() / ".clustertool", threading.Event(), [0]

    def flood() -> None:
        kept: list[socket.socket] = []
        while not ended.is_set():
            with contextlib.suppress(OSError):
                client = connect_now(ours)
                count[0] += 1
                if not mute:
                    client.send(encode(STOP)[:-1])
                kept.append(client)
            for client in kept[:-200]:
                client.close()
            del kept[:-200]
        for client in kept:
            client.close()

    thread = threading.Thread(target=flood)
    thread.start()
    try:
        until(lambda: count[0] > 500, "the flood runs")
        for _ in range(5):
            begin = time.monotonic()
            assert ask(job, type="status")["stopping"] == ""
            assert time.monotonic() - begin < 2.5
        assert not job.events(0, "stopping")
        assert job.stop(grace=60.0)["state"] == "clean"
    finally:
        ended.set()
        thread.join()
    assert job.log().endswith(b"bye\n") and not job.events(0, "supervisor-lost"), "the supervisor did it"


def connect_now(folder: Path) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    fd = os.open(folder, os.O_PATH)
    try:
        sock.connect(f"/proc/self/fd/{fd}/control")
    except OSError:
        sock.close()
        raise
    finally:
        os.close(fd)
    return sock


class Served:
    """A socket in the folder of a job, whose requests this process answers, in a thread as in a supervisor's loop."""

    def __init__(self, top: Path) -> None:
        self.paths = JobPaths(str(top), "J")
        os.makedirs(self.paths.ours, 0o700)
        self.control = ControlSocket(os.open(self.paths.dir, os.O_RDONLY))
        self.control.create({"job": "J", "root": str(top)})  # type: ignore[typeddict-item]
        self.asked: list[Mapping[str, Any]] = []
        self.payload = b""
        self.turns = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._loop)
        self._thread.start()

    def _loop(self) -> None:
        while not self._ended.is_set():
            poll = select.poll()
            for wire in self.control.wires():
                poll.register(wire, select.POLLIN | (select.POLLOUT if getattr(wire, "wants_write", False) else 0))
            poll.poll(50)
            self.control.turn(self._answer)  # type: ignore[arg-type]
            self.turns += 1

    def _answer(self, request: Mapping[str, Any]) -> tuple[dict[str, str], bytes]:
        self.asked.append(request)
        return {"type": "bundle"}, self.payload

    def end(self) -> None:
        self._ended.set()
        self._thread.join()
        self.control.remove()


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    made = Served(tmp_path)
    yield made
    made.end()


def test_a_client_that_reads_nothing_leaves_after_a_while(served: Served) -> None:
    served.payload = b"x" * (8 << 20)
    with connect(Path(served.paths.ours)) as slow:
        slow.sendall(encode({"type": "bundle"}))
        until(lambda: served.asked)
        quick = supervisor_client.ask(served.paths, {"type": "bundle"}, 10.0)
        assert quick is not None and quick[1] == served.payload
        until(lambda: len(served.control.wires()) == 1, "its connection is closed")
        slow.setblocking(True)
        received = 0
        while data := slow.recv(1 << 20):
            received += len(data)
        assert received < len(served.payload)


def test_a_client_that_sends_nothing_leaves_after_a_while(served: Served) -> None:
    with connect(Path(served.paths.ours)) as silent, connect(Path(served.paths.ours)) as half:
        half.sendall(b"\x00")
        until(lambda: len(served.control.wires()) == 3)
        assert silent.recv(1) == half.recv(1) == b""
        until(lambda: len(served.control.wires()) == 1)
    assert not served.asked


def test_a_request_in_pieces_is_answered(served: Served) -> None:
    with connect(Path(served.paths.ours)) as client:
        for byte in encode({"type": "bundle"}):
            client.sendall(bytes([byte]))
        assert client.recv(100).endswith(b'{"type":"bundle"}')
        assert client.recv(1) == b"", "one request is answered, and the connection is closed"


@pytest.fixture
def as_other_user(tmp_path: Path) -> Iterator[None]:
    if os.getuid():
        pytest.skip("needs root")
    opened = [folder for folder in (tmp_path, *tmp_path.parents) if folder.stat().st_mode & 0o001 == 0]
    modes = {folder: stat.S_IMODE(folder.stat().st_mode) for folder in opened}
    for folder in opened:
        folder.chmod(modes[folder] | 0o011)
    yield
    for folder, mode in modes.items():
        folder.chmod(mode)


def by_other_user(code: str, *args: str) -> subprocess.CompletedProcess[str]:
    argv = [sys.executable, "-c", f"import os, socket, sys\nos.setuid({OTHER_UID})\n{code}", *args]
    return subprocess.run(argv, capture_output=True, text=True, check=False, timeout=20)


def test_another_user_cannot_connect_and_would_not_be_answered(served: Served, as_other_user: None) -> None:
    code = f"""
os.chdir(sys.argv[1])
sock = socket.socket(socket.AF_UNIX)
sock.connect("control")
sock.sendall({encode({"type": "bundle"})!r})
print(sock.recv(100))
"""
    ours = Path(served.paths.ours)
    for folder in (ours, ours.parent):
        folder.chmod(0o755)
    assert "PermissionError" in by_other_user(code, str(ours)).stderr, "by the mode of the socket"
    (ours / "control").chmod(0o666)
    done = by_other_user(code, str(ours))
    assert done.stdout == "b''\n" or "ConnectionResetError" in done.stderr or "BrokenPipeError" in done.stderr
    assert not served.asked
    assert supervisor_client.ask(served.paths, {"type": "bundle"}, 10.0) is not None, "the user is answered"


def test_the_socket_of_another_user_is_not_trusted(tmp_path: Path, as_other_user: None) -> None:
    """What another user puts in the place of the socket gets no request."""
    where = JobPaths(str(tmp_path), "J")
    os.makedirs(where.ours)
    for folder in (Path(where.ours), Path(where.dir)):
        folder.chmod(0o777)
    code = """
os.chdir(sys.argv[1])
sock = socket.socket(socket.AF_UNIX)
sock.bind("control")
sock.listen()
print("listens", flush=True)
print(sock.accept()[0].recv(1000))
"""
    argv = [sys.executable, "-c", f"import os, socket, sys\nos.setuid({OTHER_UID})\n{code}", where.ours]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        assert other.stdout.readline() == "listens\n"
        assert supervisor_client.ask(where, {"type": "status"}, 5.0) is None
        assert other.stdout.readline() == "b''\n"


# -- supervisors that do not answer


def test_a_request_to_a_frozen_supervisor_ends_with_its_deadline(bench: Bench) -> None:
    job = bench.run(bench.nodes(1, LOSS_TIMEOUT=60), p.PLAIN).ready()
    kill(job.process("supervisor"), signal.SIGSTOP)
    begin = time.monotonic()
    assert supervisor_client.ask(paths(job), {"type": "status"}, 0.5) is None
    assert 0.5 <= time.monotonic() - begin < 5, "it never answers"
    waiting = [connect_now(job.dir() / ".clustertool") for _ in range(100)]
    with contextlib.suppress(BlockingIOError):
        while True:
            waiting.append(connect_now(job.dir() / ".clustertool"))
    begin = time.monotonic()
    assert not supervisor_client.order(paths(job), {"type": "attached"}, 0.5), "its queue is full"
    assert 0.5 <= time.monotonic() - begin < 5, "it never answers"
    assert job.stop(grace=0.2)["state"] == "clean", "a stop takes over at once"
    assert time.monotonic() - begin < 15
    for client in waiting:
        client.close()


def test_a_supervisor_that_dies_while_it_is_asked(bench: Bench) -> None:
    job = bench.run(bench.nodes(1, LOSS_TIMEOUT=60), p.PLAIN).ready()
    supervisor = job.process("supervisor")
    kill(supervisor, signal.SIGSTOP)
    timer = threading.Timer(0.3, kill, [supervisor])
    timer.start()
    begin = time.monotonic()
    assert supervisor_client.ask(paths(job), {"type": "status"}, 20.0) is None
    assert time.monotonic() - begin < 15
    timer.join()
    assert supervisor_client.ask(paths(job), {"type": "status"}, 20.0) is None, "the file is there, and refuses"
    job.until("clean")


def test_a_supervisor_uses_no_processor_for_a_socket_without_requests(bench: Bench) -> None:
    job = bench.run(None, p.PLAIN).ready()
    pid = job.process("supervisor").pid
    ask(job, type="status")
    before = cpu(pid)
    time.sleep(1.0)  # not a wait: the time that is measured
    assert cpu(pid) - before < 0.3
    job.stop()


# -- jobs of the previous version

_OLD_SUPERVISOR = """
import json, os, signal, sys, time
ours, pid = sys.argv[1], os.getpid()
start = int(open("/proc/self/stat").read().rpartition(")")[2].split()[19])
boot = open("/proc/sys/kernel/random/boot_id").read().strip()
events = open(ours + "/events.jsonl", "ab", 0)
def record(kind, **fields):
    events.write(json.dumps({"t": time.time(), "e": kind, **fields}).encode() + b"\\n")
os.mkfifo(ours + "/control", 0o600)
fd = os.open(ours + "/control", os.O_RDWR)
rank = os.fork()
if rank == 0:
    os.setsid()
    signal.pause()
record("supervisor", pid=pid, start=start, boot=boot, space=os.readlink("/proc/self/ns/pid"))
of_rank = int(open("/proc/%d/stat" % rank).read().rpartition(")")[2].split()[19])
record("started", role="trainer", rank=0, pid=rank, start=of_rank, attempt=0, log="log/workerlog.0")
print(rank, flush=True)
while True:
    for line in os.read(fd, 65536).splitlines():
        command = json.loads(line)
        print(command["m"], flush=True)
        if command["m"] == "stop":
            record("stopping", why=str(command["by"]))
            os.kill(rank, signal.SIGTERM)
            os.waitpid(rank, 0)
            record("clean", survivors=[])
            how = {"code": command["code"], "reason": command["by"]}
            record("ended", state="stopped", source="tool", culprits=[], victims=[], node=-1, **how)
            os.unlink(ours + "/control")
            sys.exit(0 if float(command["grace"]) == 7.0 and not command["force"] else 3)
"""


def test_a_running_job_of_the_previous_version_is_read_and_stopped(bench: Bench) -> None:
    """Its supervisor has a fifo, and the records of version 0.1.0: keys and all."""
    job = bench.job(None, p.PLAIN).place()
    ours = job.dir() / ".clustertool"
    header = {"t": time.time(), "e": "job", **json.loads((ours / "spec.json").read_text())["header"]}
    (ours / "events.jsonl").write_text(json.dumps(header) + "\n")
    argv = [sys.executable, "-c", _OLD_SUPERVISOR, str(ours)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as old:
        assert old.stdout is not None
        rank = int(old.stdout.readline())
        node = job.nodes[0]
        assert node.ask("jobs")["jobs"][0]["state"] == "running"
        found = node.ask("status", job=job.id)
        assert found["supervised"] and found["heartbeat"] < 60
        node.ask("attached", job=job.id, laptop="", notified="")
        assert old.stdout.readline() == "attached\n"
        assert job.stop(grace=7.0) == {"state": "clean", "survivors": []}
        assert old.stdout.readline() == "stop\n"
        assert old.wait(10) == 0
    assert not processes.identify(rank)
    assert node.ask("jobs")["jobs"][0]["state"] == "stopped"


NO_ANSWERS = [b"rubbish", b"\xff" * 8, encode({"type": "status"}), encode([1]), encode({"type": "error"}), b""]  # type: ignore[arg-type]


@pytest.mark.parametrize("sent", NO_ANSWERS, ids=range(len(NO_ANSWERS)))
def test_an_answer_that_is_no_message_is_no_answer(tmp_path: Path, sent: bytes) -> None:
    """A program of the job can replace the socket of its supervisor."""
    where = JobPaths(str(tmp_path), "J")
    os.makedirs(where.ours)
    ended = threading.Event()
    fd = os.open(where.ours, os.O_PATH)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(f"/proc/self/fd/{fd}/control")
        os.close(fd)
        sock.listen()
        sock.settimeout(0.02)
        thread = threading.Thread(target=reply_to_all, args=(sock, sent, ended))
        thread.start()
        begin = time.monotonic()
        assert not supervisor_client.order(where, {"type": "attached"}, 0.5)
        assert time.monotonic() - begin < 10
        ended.set()
        thread.join()


def reply_to_all(sock: socket.socket, data: bytes, ended: threading.Event) -> None:
    while not ended.is_set():
        with contextlib.suppress(OSError):
            client, _ = sock.accept()
            with client:
                client.recv(1000)
                client.sendall(data)


def test_an_error_of_a_supervisor_is_raised(served: Served) -> None:
    with pytest.raises(ClustertoolError):
        supervisor_client.ask(served.paths, {"type": "unknown"}, 5.0)  # type: ignore[arg-type,typeddict-item]
