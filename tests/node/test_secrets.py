"""What is secret is in memory and in the ranks' environment, and nowhere else: no file, no command line."""

from __future__ import annotations

import os
import socket
from pathlib import Path

from tests.node import programs as p
from tests.node.harness import Bench, Job, descriptors, pids, read

VALUE = "correct-horse-battery-staple"
SHOW = 'echo "$TOKEN" | tr a-z n-za-m; echo ready; exec sleep 1000'  # encoded so that the log does not hold it


def files_with(text: bytes, top: Path) -> list[str]:
    found = []
    for folder, _, names in os.walk(top):
        for name in names:
            path = os.path.join(folder, name)
            if not os.path.islink(path) and os.path.isfile(path) and text in read(path):
                found.append(os.path.relpath(path, top))
    return found


def command_lines_with(text: bytes) -> list[int]:
    return [pid for pid in pids() if pid != os.getpid() and text in read(f"/proc/{pid}/cmdline")]


def environments_with(text: bytes) -> set[int]:
    return {pid for pid in pids() if pid != os.getpid() and text in read(f"/proc/{pid}/environ")}


def key_line(job: Job) -> bytes:
    """One line of the private key's PEM."""
    return job.plan.identity.key.splitlines()[1].encode()


def test_values(bench: Bench) -> None:
    nodes = bench.nodes(2, SECRETS=["TOKEN"])
    job = bench.run(nodes, SHOW, pserver=p.PSERVER, secrets={"TOKEN": VALUE}).ready()
    for rank in range(2):
        assert job.log(rank) == b"pbeerpg-ubefr-onggrel-fgncyr\nready\n"
    value = VALUE.encode()
    assert files_with(value, bench.tmp) == [] and files_with(value, bench.home) == []
    assert command_lines_with(value) == []
    assert environments_with(value) == {job.rank(i, role).pid for i in range(2) for role in ("trainer", "pserver")}
    for node in range(2):
        answers = [nodes[node].ask("status", job=job.id), nodes[node].ask("jobs")]
        assert VALUE not in str(answers)
        assert '"TOKEN": "***"' in (job.dir(node) / ".clustertool/spec.json").read_text()
    job.stop()
    assert files_with(value, bench.tmp) == []


def test_certificate(bench: Bench) -> None:
    """Nor are the job's certificate and key anywhere, nor the pipes through which ssl reads them."""
    job = bench.run(bench.nodes(2), p.PLAIN).ready()
    for text in (key_line(job), job.plan.identity.certificate.splitlines()[1].encode()):
        assert files_with(text, bench.tmp) == [] and files_with(text, bench.home) == []
        assert command_lines_with(text) == []
        assert environments_with(text) == set()
    job.stop()


def test_ranks_inherit_nothing(bench: Bench) -> None:
    """No descriptor of ours but stdin, stdout, stderr; no blocked or ignored signal; a session of its own."""
    program = p.python("""
import os, signal
print(sorted(os.readlink(f"/proc/self/fd/{fd}") for fd in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{fd}")))
status = dict(line.split(":", 1) for line in open("/proc/self/status"))
print(status["SigBlk"].strip(), os.getsid(0) == os.getpid())
for number in (signal.SIGHUP, signal.SIGTERM, signal.SIGCHLD, signal.SIGINT):
    print(signal.getsignal(number) in (signal.SIG_DFL, signal.default_int_handler))
""")
    job = bench.run(None, program)
    job.ended()
    reported = job.log().decode().splitlines()
    log = str(job.dir() / ".clustertool/log/workerlog.0")
    assert eval(reported[0]) == ["/dev/null", log, log]
    assert reported[1:] == ["0000000000000000 True", *["True"] * 4]


def test_limit_of_open_files(bench: Bench) -> None:
    """The coordinator of many nodes needs more descriptors than a user has by default; its ranks have the hard limit."""
    nodes = bench.nodes(2)
    for node in nodes:
        node.shell = ["/bin/sh", "-c", "ulimit -Sn 64; ulimit -Hn 777; exec /bin/sh"]
    job = bench.run(nodes, "ulimit -Sn; echo ready; exec sleep 1000").ready()
    assert [job.log(rank) for rank in range(2)] == [b"777\nready\n"] * 2
    limits = [Path(f"/proc/{job.process('supervisor', node).pid}/limits").read_text() for node in range(2)]
    soft = [int(line.split()[3]) for text in limits for line in text.splitlines() if line.startswith("Max open files")]
    assert soft == [204, 64]
    strangers = [socket.create_connection(job.plan.coordinator) for _ in range(150)]
    assert job.stop(1)["state"] == "clean"
    assert job.ended()["state"] == "stopped"
    for one in strangers:
        one.close()


def test_ranks_die_of_a_broken_pipe(bench: Bench) -> None:
    """Python ignores SIGPIPE for itself; a rank has it as every program expects it."""
    job = bench.run(None, "yes | head -n 1; echo ${PIPESTATUS:-done}")
    assert job.ended()["state"] == "succeeded"
    assert job.log() == b"y\ndone\n"


def test_supervisor_keeps_nothing_open(bench: Bench) -> None:
    """Of the channel, of the agent: ssh would wait for whoever holds them."""
    job = bench.run(bench.nodes(2), p.PLAIN).ready()
    for node in range(2):
        agent = job.nodes[node].client.pid
        theirs = {name for name in descriptors(agent) if name != "/dev/null" and not name.startswith("/proc")}
        for kind in ("supervisor", "guard"):
            pid = job.process(kind, node).pid
            inherited = theirs.intersection(descriptors(pid))
            assert not inherited, (kind, inherited)
            assert os.readlink(f"/proc/{pid}/fd/2") == str(job.dir(node) / ".clustertool/supervisor.err")
    job.stop()
