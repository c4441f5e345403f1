"""Machines that join a job without a laptop: what starts, what is refused, and how each case ends."""

from __future__ import annotations

import json
import os
import random
import signal
import socket
import socketserver
import ssl
import subprocess
import sys
import threading
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from clustertool.fleet import identity
from clustertool.fleet.joining import join_process
from clustertool.model.joining.join_file import MeetingPoint, OwnSettings, to_json
from clustertool.model.joining.join_offers import read_offer, read_settings
from clustertool.model.shape import to_plain
from clustertool.node.join.join_report import JoinReport
from clustertool.node.system.tls_link import TlsLink, context
from tests.free_ports import free_port
from tests.lab.lab import REPO, compiler
from tests.node.harness import kill, pythons, read, until
from tests.node.joining import JoinBench, Machine, codes, start

ENVIRONMENT = "env | sort > $CLUSTERTOOL_OUTPUT/env; echo rank $RANK"
WAIT = "echo ready; exec sleep 600"


def environment(machine: Machine) -> dict[str, str]:
    lines = read(str(machine.job_dir / "output/env")).decode().splitlines()
    return dict(line.split("=", 1) for line in lines if "=" in line)


def running(machines: list[Machine]) -> None:
    """All ranks have started, and their supervisors have recorded that."""
    for rank, machine in enumerate(machines):
        machine.says("ready", rank)
        until(partial(machine.events, "started"), "it is recorded")


# -- a job ------------------------------------------------------------------------------------------------------------


def test_a_job_runs(join_bench: JoinBench) -> None:
    """Ranks, environment, logs, records, exit codes and report of three machines, two of them with the oldest Python."""
    machines = join_bench.job(3, ENVIRONMENT, python=pythons()[0])
    machines[2].python = sys.executable
    assert codes(start(machines)) == [0, 0, 0], [one.lines for one in machines]
    for node, machine in enumerate(machines):
        env = environment(machine)
        assert (env["RANK"], env["WORLD_SIZE"], env["NODE_RANK"], env["PADDLE_NNODES"]) == (
            str(node),
            "3",
            str(node),
            "3",
        )
        assert env["MASTER_ADDR"] == "127.0.0.21" and env["PADDLE_TRAINER_ENDPOINTS"].count(",") == 2
        assert env["USER"] == "tester"
        assert machine.log(node) == f"rank {node}\n"
        assert (machine.job_dir / "nodefile").read_text() == f"{node}\n"
        assert [event["state"] for event in machine.events("ended")] == ["succeeded"]
        (header,) = machine.events("job")
        assert (header["node"], header["skew"], header["owner"]) == (node, 0, "tester")
        planned = machine.until("planned")
        assert planned["job_dir"] == str(machine.job_dir) and planned["ranks"] == [["trainer", node]]
        assert planned["logs"] == [["trainer", node, f"log/workerlog.{node}"]] and len(planned["nodes"]) == 3
        assert [line["type"] for line in machine.lines[-2:]] == ["started", "ended"]
        assert machine.lines[-1]["code"] == 0 and machine.lines[-1]["outcome"]["state"] == "succeeded"
        assert machine.errors == b"" and machine.left() == [machine.job_dir.name]
    port = machines[0].join.coordinator.port
    assert machines[0].until("planned")["lead"] == f"127.0.0.21:{port}"
    assert [line["missing"] for line in machines[0].reports("waiting")][0] == [1, 2]


def test_a_job_of_one_machine(join_bench: JoinBench) -> None:
    (machine,) = start(join_bench.job(1, "echo $WORLD_SIZE; exit 3"))
    assert machine.wait() == 3 and machine.log(0) == "1\n"


def test_the_exit_code_is_that_of_the_job_on_all_machines(join_bench: JoinBench) -> None:
    machines = start(join_bench.job(3, "[ $RANK = 1 ] && exit 7; exec sleep 600"))
    assert codes(machines) == [7, 7, 7]
    assert all("exit code 7" in one.until("ended")["outcome"]["reason"] for one in machines)


def test_settings_of_a_machine_count_there(join_bench: JoinBench, tmp_path: Path) -> None:
    """Processes, environment, PATH and the working directory of each machine; the rest is the coordinator's."""
    machines = join_bench.job(2, ENVIRONMENT, folder=tmp_path / "work0")
    for number, machine in enumerate(machines):
        folder = tmp_path / f"work{number}"
        folder.mkdir()
        own = replace(machine.join.own, folder=str(folder), workspace_digest=str(number), first_path=f"/p{number}")
        own = replace(own, env=(("OWN", f"value{number}"),), nproc=number + 1)
        machine.join = replace(machine.join, own=own)
    assert codes(start(machines)) == [0, 0]
    for number, machine in enumerate(machines):
        env = environment(machine)
        assert env["OWN"] == f"value{number}" and env["PATH"].startswith(f"/p{number}:")
        assert env["PWD"] == str(tmp_path / f"work{number}") and env["WORLD_SIZE"] == "3"
        assert os.readlink(tmp_path / f"work{number}" / "log").endswith("/log")
    assert [one["ranks"] for one in machines[1].reports("planned")] == [[["trainer", 1], ["trainer", 2]]]
    warnings = [line["what"] for line in machines[0].reports("warning")]
    assert any("the files in the folder of" in text and "(127.0.0.1) differ" in text for text in warnings), warnings


def test_secrets_are_on_no_disk_and_in_no_command_line(join_bench: JoinBench, tmp_path: Path) -> None:
    machines = join_bench.job(2, WAIT, cluster={"secrets": ("TOKEN",)}, secrets=(("TOKEN", "very-hidden"),))
    running(start(machines))
    key = machines[0].join.identity.key.splitlines()[1]
    for machine in machines:
        assert b"very-hidden" not in read(f"/proc/{machine.process.pid}/environ")
        for text in (b"very-hidden", key.encode()):
            assert text not in read(f"/proc/{machine.process.pid}/cmdline")
        (rank,) = machine.events("started")
        environ = f"/proc/{rank['pid']}/environ"
        until(lambda path=environ: b"TOKEN=very-hidden" in read(path).split(b"\0"), "the rank is past its exec")
    for path in tmp_path.rglob("*"):
        if path.is_file():
            text = read(str(path))
            assert b"very-hidden" not in text and key.encode() not in text, path
    machines[1].signal(signal.SIGTERM)
    assert codes(machines) == [143, 143]


def test_a_machine_without_the_value_of_a_secret(join_bench: JoinBench) -> None:
    """Its ranks would get the mask of the plan in its place."""
    machines = join_bench.job(
        3, cluster={"secrets": ("TOKEN", "OTHER")}, secrets=(("TOKEN", "very-hidden"), ("OTHER", "x"))
    )
    machines[1].join = replace(machines[1].join, secrets=(("TOKEN", "very-hidden"),))
    machines[2].join = replace(machines[2].join, secrets=())
    assert codes(start(machines)) == [69, 69, 69]
    for machine in machines:
        assert "are not here: OTHER" in machine.error and "are not here: TOKEN, OTHER" in machine.error
    assert not any(machine.left() for machine in machines)


def test_ports_that_the_job_id_determines(join_bench: JoinBench) -> None:
    """Another program has the first one; machines try the same list until the job's certificate answers.

    The machine that owns the coordinator's address needs no index.
    """
    machines = join_bench.job(2, "true", port=0, indices=[None, 1])
    machines[0].start()
    port = int(machines[0].until("waiting")["coordinator"].rpartition(":")[2])
    machines[0].signal(signal.SIGTERM)
    assert machines[0].wait() == 143
    with socketserver.TCPServer(("127.0.0.21", port), socketserver.BaseRequestHandler) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        again = join_bench.another(machines[0])
        again.start()
        assert int(again.until("waiting")["coordinator"].rpartition(":")[2]) == port + 1
        machines[1].start()
        assert (again.wait(), machines[1].wait()) == (0, 0)
        other.shutdown()


def test_clocks_that_differ(join_bench: JoinBench, tmp_path: Path) -> None:
    """The coordinator warns; the first event of the node has the difference."""
    library = tmp_path / "clock.so"
    source = Path(__file__).parents[1] / "lab/clock.c"
    if not compiler():
        pytest.skip("needs a C compiler")
    subprocess.run([compiler(), "-shared", "-fPIC", "-o", str(library), str(source), "-ldl"], check=True)
    machines = join_bench.job(2)
    machines[1].env = {**machines[1].env, "LD_PRELOAD": str(library), "CLOCK_OFFSET": "100"}
    assert codes(start(machines)) == [0, 0]
    assert [one.events("job")[0]["skew"] for one in machines] == [0, pytest.approx(100, abs=2)]
    warnings = [line["what"] for line in machines[0].reports("warning")]
    assert any("clock: +100 s" in text and "127.0.0.1" in text for text in warnings), warnings


# -- refused ----------------------------------------------------------------------------------------------------------


def test_an_index_out_of_range(join_bench: JoinBench) -> None:
    (machine, _) = join_bench.job(2)
    assert machine.start("--index", "2").wait() == 64 and "index 2 is out of range" in machine.error


def test_an_index_twice(join_bench: JoinBench) -> None:
    """The second one is refused while the first is connected; when that has died, another one takes its place."""
    machines = join_bench.job(3, "echo rank $RANK")
    start(machines[:2])
    machines[1].until("joined")
    second = join_bench.another(machines[1]).start()
    assert (
        second.wait() == 64
        and "index 1 is in use" in second.error
        and f"process {machines[1].process.pid}" in second.error
    )
    kill(machines[1].process)
    machines[0].until("waiting", present=1, missing=[1, 2])
    newer = join_bench.another(machines[1]).start()
    machines[2].start()
    assert [machines[0].wait(), newer.wait(), machines[2].wait()] == [0, 0, 0]
    assert newer.log(1) == "rank 1\n" and machines[1].left() == []


def test_machines_of_another_job_version_or_secret(join_bench: JoinBench) -> None:
    """Each one gets its reason, and the job is not disturbed. A wrong secret makes another certificate."""
    machines = join_bench.job(2)
    machines[0].start()
    machines[0].until("waiting")
    certificate, key = identity.certificate()
    secret = replace(machines[1].join.identity, certificate=certificate, key=key)
    other = join_bench.another(machines[1], identity=secret).start()
    number = join_bench.another(machines[1], nnodes=3).start()
    code = join_bench.another(machines[1], code="f" * 32, version="9.9").start()
    assert number.wait() == 64 and "was started for 3 nodes" in number.error and "for 2" in number.error
    assert code.wait() == 69 and "clustertool 9.9 (code ffffffff)" in code.error
    assert other.wait() == 77 and "is no coordinator of this job: TLS failed" in other.error
    machines[1].start()
    assert codes(machines) == [0, 0]
    assert any("was started for 3 nodes" in line["what"] for line in machines[0].reports("warning"))


def test_a_version_whose_offer_has_other_settings(join_bench: JoinBench) -> None:
    machines = join_bench.job(2)
    machines[0].start()
    machines[0].until("waiting")
    owner = machines[0].join.identity
    sock = socket.create_connection(("127.0.0.21", machines[0].join.coordinator.port))
    wire = TlsLink(sock, context(owner.certificate, owner.key, server=False), server=False, max_header=1 << 16)
    common = {"type": "offer", "index": 1, "nnodes": 2, "address": "127.0.0.1", "coordinator": "", "hostname": "other"}
    wire.send({**common, "version": "9.9", "code": "f" * 32, "sender": ["boot", 1, 2], "own": {"unheard_of": 1}})
    answer = until(wire.turn, "an answer")[0]
    wire.close()
    assert answer["type"] == "refused" and "has clustertool 9.9 (code ffffffff)" in answer["errors"][0]["what"]
    machines[1].start()
    assert codes(machines) == [0, 0]


def test_one_machine_too_many(join_bench: JoinBench) -> None:
    """The coordinator answers it when the job runs."""
    machines = start(join_bench.job(2, WAIT))
    running(machines)
    late = join_bench.another(machines[1]).start()
    assert late.wait() == 64 and "the job has all its 2 nodes" in late.error
    machines[0].signal(signal.SIGINT)
    assert codes(machines) == [130, 130]


def test_a_port_that_is_in_use(join_bench: JoinBench) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.21", 0))
        sock.listen()
        (machine, _) = join_bench.job(2, port=sock.getsockname()[1])
        assert machine.start().wait() == 69
        assert f"(pid {os.getpid()}, user" in machine.error


def test_errors_of_all_machines_together(join_bench: JoinBench, tmp_path: Path) -> None:
    """Folders that others can write to are refused by each machine's own check. Nothing is left anywhere."""
    machines = join_bench.job(3)
    for machine in machines[1:]:
        machine.root.mkdir(parents=True)
        machine.root.chmod(0o777)
    start(machines)
    assert codes(machines) == [69, 69, 69]
    for machine in machines:
        assert machine.error.count("ROOT_DIR") == 2 and machine.left() == []


def test_a_job_directory_that_is_there(join_bench: JoinBench) -> None:
    """Placing fails on one machine: the others take theirs back."""
    machines = join_bench.job(3)
    machines[1].job_dir.mkdir(parents=True)
    start(machines)
    assert codes(machines) == [64, 64, 64]
    assert [machine.left() for machine in machines] == [[], [machines[1].job_dir.name], []]


def test_a_job_that_ran_already_keeps_its_directory(join_bench: JoinBench) -> None:
    """The same join file again: the second start is refused, and takes back nothing of the first one."""
    machines = join_bench.job(2, "echo result > output/result; echo rank $RANK", toml={"outputs": {"path": "output"}})
    assert codes(start(machines)) == [0, 0], [one.lines for one in machines]
    before = [sorted(str(path) for path in machine.job_dir.rglob("*")) for machine in machines]
    again = [Machine(machine.join, machine.env, machine.python, machine.folder) for machine in machines]
    assert codes(start(again)) == [64, 64]
    assert "is there already" in again[0].error
    assert [sorted(str(path) for path in machine.job_dir.rglob("*")) for machine in machines] == before


TAKEN = """
import os, sys
sys.path.append({top!r})
from clustertool.errors import PortInUse
from clustertool.node.agent import place
from clustertool.node.join.main import main
real = place.place
def first_fails(node, request):
    answer = real(node, request)
    if not os.path.exists({mark!r}):
        open({mark!r}, "w").close()
        place._remove(request["spec"]["job_dir"])
        raise PortInUse("port 1 is in use by job other")
    return answer
place.place = first_fails
sys.exit(main(["--file", {file!r}, "--report"]))
"""


def test_a_port_that_another_job_takes_meanwhile(join_bench: JoinBench, tmp_path: Path) -> None:
    """All machines take back what they have placed, and get another plan."""
    machines = join_bench.job(3, "echo rank $RANK")
    join, mark = tmp_path / "join.json", tmp_path / "mark"
    join.touch(0o600)
    join.write_text(to_json(machines[1].join))
    code = TAKEN.format(top=str(REPO), mark=str(mark), file=str(join))
    machines[1].argv = [machines[1].python, "-ESs", "-c", code]
    assert codes(start(machines)) == [0, 0, 0], [one.lines for one in machines]
    assert mark.exists() and [machine.log(rank) for rank, machine in enumerate(machines)] == [
        f"rank {rank}\n" for rank in range(3)
    ]


def test_a_join_file_that_others_can_read(join_bench: JoinBench, tmp_path: Path) -> None:
    (machine,) = join_bench.job(1)
    path = tmp_path / "join.json"
    path.write_text(to_json(machine.join))
    path.chmod(0o644)
    assert machine.start("--file", str(path)).wait() == 69 and "mode 0644" in machine.error
    path.chmod(0o600)
    again = join_bench.another(machine).start("--file", str(path))
    assert again.wait() == 0
    link = tmp_path / "link"
    link.symlink_to(path)
    assert join_bench.another(machine).start("--file", str(link)).wait() == 69


# -- machines that do not come, or go ---------------------------------------------------------------------------------


def test_a_missing_machine(join_bench: JoinBench) -> None:
    machines = start(join_bench.job(3, join_timeout=6.0)[:2])
    assert codes(machines) == [75, 75]
    assert all(
        "2 of 3 nodes have joined within 6 s" in one.error and "missing: index 2" in one.error for one in machines
    )
    assert [one.left() for one in machines] == [[], []]


def test_the_coordinator_is_late(join_bench: JoinBench) -> None:
    machines = join_bench.job(3, "echo rank $RANK")
    start(machines[1:])
    for machine in machines[1:]:
        assert machine.until("retry")["why"] == "connection refused"
    machines[0].start()
    assert codes(machines) == [0, 0, 0]
    assert len(machines[1].reports("retry")) == 1


def test_no_coordinator(join_bench: JoinBench) -> None:
    (_, machine) = join_bench.job(2, join_timeout=1.0)
    machine.join = replace(machine.join, coordinator=MeetingPoint("192.0.2.1", 9))  # of no network
    assert machine.start().wait() == 75
    assert "no coordinator at 192.0.2.1:9 within 1 s: " in machine.error


def test_no_coordinator_on_this_machine(join_bench: JoinBench) -> None:
    (_, machine) = join_bench.job(2, join_timeout=1.0)
    assert machine.start().wait() == 64
    assert machine.until("retry")["why"] == "connection refused"
    assert "127.0.0.21 is this machine, and --node-rank 1 is not the first one" in machine.error


def test_the_coordinator_dies_before_the_plan(join_bench: JoinBench) -> None:
    """The others wait for another one."""
    machines = join_bench.job(3, "echo rank $RANK")
    start(machines[:2])
    machines[1].until("joined")
    kill(machines[0].process)
    machines[1].until("retry")
    again = join_bench.another(machines[0]).start()
    machines[2].start()
    assert [again.wait(), machines[1].wait(), machines[2].wait()] == [0, 0, 0]
    assert len(machines[1].reports("joined")) == 2


def test_ctrl_c_for_the_coordinator_that_waits(join_bench: JoinBench) -> None:
    machines = join_bench.job(3)
    start(machines[:2])
    machines[1].until("joined")
    machines[0].signal(signal.SIGINT)
    assert codes(machines[:2]) == [130, 130]
    assert all("received SIGINT" in one.error for one in machines[:2])


def test_a_machine_that_leaves_before_the_plan(join_bench: JoinBench) -> None:
    """The others go on waiting for a machine with its index."""
    machines = join_bench.job(3)
    start(machines[:2])
    machines[1].until("joined")
    machines[1].signal(signal.SIGINT)
    assert machines[1].wait() == 130
    machines[0].until("waiting", present=1, missing=[1, 2])
    again = join_bench.another(machines[1]).start()
    machines[2].start()
    assert [machines[0].wait(), again.wait(), machines[2].wait()] == [0, 0, 0]


def test_ctrl_c_on_any_machine_ends_the_job_on_all(join_bench: JoinBench) -> None:
    machines = start(join_bench.job(3, WAIT))
    running(machines)
    machines[2].signal(signal.SIGINT)
    assert codes(machines) == [130, 130, 130]


def test_ctrl_c_between_the_last_barrier_and_the_start(join_bench: JoinBench) -> None:
    """It comes while the order to start is on its way: the supervisor begins, and ends the job on all machines at once."""
    machines = start(join_bench.job(2, WAIT))
    until(partial(machines[1].events, "guard"), "its supervisor is prepared")
    time.sleep(0.02)
    process = machines[1].process
    kill(process, signal.SIGSTOP)
    machines[1].signal(signal.SIGINT)
    time.sleep(0.3)
    kill(process, signal.SIGCONT)
    assert codes(machines) == [130, 130]


@pytest.mark.parametrize("victim", [0, 1])
def test_a_supervisor_that_is_killed(join_bench: JoinBench, victim: int) -> None:
    """The guard ends the ranks of that node; the others end as after the loss of any node."""
    machines = start(join_bench.job(3, WAIT))
    running(machines)
    kill(machines[victim].process)
    others = [machine for machine in machines if machine is not machines[victim]]
    assert codes(others) == [75, 75]
    until(lambda: not join_bench.living(), "nothing lives")


def test_a_machine_that_is_silent_while_it_is_asked(join_bench: JoinBench) -> None:
    """It is stopped before the last machine joins, so it never answers the probe."""
    machines = join_bench.job(3, cluster={"loss_timeout": 2.0})
    start(machines[:2])
    machines[1].until("joined")
    kill(machines[1].process, signal.SIGSTOP)
    machines[2].start()
    assert machines[0].wait() == 75 and machines[2].wait() == 75
    assert "was lost before the job started: no heartbeat for 2 s" in machines[0].error
    machines[1].signal(signal.SIGTERM)
    kill(machines[1].process, signal.SIGCONT)
    assert machines[1].wait() == 143


@pytest.mark.parametrize("seed", range(2))
def test_a_machine_that_dies_at_any_moment(join_bench: JoinBench, seed: int) -> None:
    """All ranks start or none, and nothing is left, not even a directory where the job did not start."""
    chance = random.Random(seed)
    machines = start(join_bench.job(3, WAIT, join_timeout=10.0, cluster={"loss_timeout": 2.0}))
    machines[0].until("waiting", present=3)
    time.sleep(chance.random() * 0.5)
    victim = chance.choice(machines)
    kill(victim.process)
    others = [machine for machine in machines if machine is not victim]
    # A coordinator that died before the others had a connection is expected for 30 s, as after a start by ssh.
    assert [machine.wait(60.0) for machine in others] == [75, 75], [one.lines for one in machines]
    until(lambda: not join_bench.living(), "nothing lives")
    if any(machine.events("started") for machine in machines):
        assert all(machine.events("supervisor") for machine in machines), "half of a job has started"
    elif not any(machine.reports("started") for machine in machines):
        until(lambda: not any(machine.left() for machine in machines), f"left: {[one.left() for one in machines]}")


# -- strangers --------------------------------------------------------------------------------------------------------


def test_strangers_do_not_disturb(join_bench: JoinBench) -> None:
    """Connections that say nothing, garbage, and TLS with another certificate, all the time while machines join."""
    machines = join_bench.job(3)
    machines[0].start()
    machines[0].until("waiting")
    address = ("127.0.0.21", machines[0].join.coordinator.port)
    end = threading.Event()
    certificate, key = identity.certificate()
    (join_bench.tmp / "pem").write_text(certificate + key)
    ctx = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    ctx.check_hostname, ctx.verify_mode = False, ssl.CERT_NONE
    ctx.load_cert_chain(str(join_bench.tmp / "pem"))

    def disturb(kind: int) -> None:
        kept = []
        while not end.is_set():
            try:
                sock = socket.create_connection(address, timeout=1)
                if kind == 1:
                    sock.sendall(os.urandom(4096))
                if kind == 2:
                    ctx.wrap_socket(sock, server_hostname="x").close()
                kept.append(sock)
            except OSError:
                pass
            end.wait(0.01)
        for sock in kept:
            sock.close()

    threads = [threading.Thread(target=disturb, args=(kind,)) for kind in range(3)]
    for thread in threads:
        thread.start()
    try:
        start(machines[1:])
        assert codes(machines) == [0, 0, 0], [one.lines for one in machines]
    finally:
        end.set()
        for thread in threads:
            thread.join()


def test_another_program_at_the_coordinators_port(join_bench: JoinBench) -> None:
    with socket.socket() as sock:
        sock.bind(("127.0.0.21", 0))
        sock.listen()
        (_, machine) = join_bench.job(2, port=sock.getsockname()[1])
        machine.start()
        assert "no coordinator answers there" in machine.until("retry")["why"]
        machine.signal(signal.SIGTERM)
        assert machine.wait() == 143


def test_a_host_that_is_not_known(join_bench: JoinBench) -> None:
    (_, machine) = join_bench.job(2, join_timeout=1.0)
    machine.join = replace(machine.join, coordinator=MeetingPoint("no-such-host.invalid", free_port()))
    assert machine.start().wait() == 75 and "no-such-host.invalid" in machine.error


def test_sentences_for_a_user(join_bench: JoinBench) -> None:
    """Without --report the same is on stderr, for people."""
    (machine,) = join_bench.job(1, "exit 2")
    argv = [machine.python, *join_process.command()[1:]]
    done = subprocess.run(argv, input=to_json(machine.join).encode(), capture_output=True, env=machine.env, check=False)
    assert done.returncode == 2 and done.stdout == b""
    assert b"1 of 1 nodes have joined" in done.stderr and b"failed: " in done.stderr
    assert not any(line.startswith(b"{") for line in done.stderr.splitlines())


def test_text_of_other_machines_is_harmless_in_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    JoinReport(lines=False).warning("a\x1b[2Jb\u202e\nclustertool join: all is well")
    assert capsys.readouterr().err == "clustertool join: warning: a\\x1b[2Jb\\u202e\n  clustertool join: all is well\n"


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("address", "10.0.0.1,10.0.0.2"),
        ("address", ""),
        ("hostname", "a\x1bb"),
        ("hostname", ""),
        ("hostname", "x" * 300),
    ],
)
def test_an_offer_with_a_wrong_text_is_refused(field: str, value: str) -> None:
    right = {
        "index": None,
        "nnodes": 2,
        "version": "1",
        "code": "c",
        "sender": ["boot", 1, 2],
        "address": "fe80::1%eth0",
        "hostname": "node",
    }
    assert read_offer(right).address == "fe80::1%eth0"
    with pytest.raises(ValueError):
        read_offer({**right, field: value})


def test_no_join_file(join_bench: JoinBench) -> None:
    (machine,) = join_bench.job(1)
    argv = [machine.python, *join_process.command("--report")[1:]]
    done = subprocess.run(argv, input=b"{", capture_output=True, env=machine.env, check=False)
    assert done.returncode == 65 and json.loads(done.stdout)["what"] == "the join file is no JSON"


@pytest.mark.parametrize("count", [0, -1, 10**9])
def test_an_offer_of_an_impossible_number_of_ranks_is_not_valid(count: int) -> None:
    assert read_settings({"own": {**to_plain(OwnSettings()), "nproc": 8}}).nproc == 8
    with pytest.raises(ValueError, match="number of processes"):
        read_settings({"own": {**to_plain(OwnSettings()), "nproc": count}})
