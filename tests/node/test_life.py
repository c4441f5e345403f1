"""How jobs run and end when nothing is done to them from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clustertool.errors import PreflightError
from clustertool.model.job.start_error import after_prelude
from clustertool.node.system import processes
from tests.node import programs as p
from tests.node.harness import Bench, Job, alive, cpu, read, until


def order(job: Job, *kinds: str) -> list[tuple[float, str, str, int]]:
    """(time, kind, role, rank) of all nodes' events of some kinds, by time."""
    events = [event for node in range(len(job.nodes)) for event in job.events(node)]
    return sorted((e["t"], e["type"], e.get("role", ""), e.get("rank", -1)) for e in events if e["type"] in kinds)


def test_success(bench: Bench) -> None:
    job = bench.run(bench.nodes(2), "echo hello $CLUSTERTOOL_RANK of $WORLD_SIZE", per_node=2)
    for node in range(2):
        outcome = job.ended(node)
        assert (outcome["state"], outcome["code"], outcome["culprits"], outcome["victims"]) == ("succeeded", 0, [], [])
    job.gone()
    assert [job.log(rank) for rank in range(4)] == [b"hello %d of 4\n" % rank for rank in range(4)]
    assert (job.dir(1) / "log/train.log").read_bytes() == b"hello 2 of 4\n"
    assert not (job.dir() / ".clustertool/control").exists()


@pytest.mark.parametrize("code", [1, 7, 126, 255])
def test_exit_code(bench: Bench, code: int) -> None:
    job = bench.run(None, f"exit {code}")
    outcome = job.ended()
    assert (outcome["state"], outcome["source"], outcome["code"]) == ("failed", "job", code)
    assert outcome["reason"] == f"trainer 0 on {job.nodes[0].host.name} ended with exit code {code}"


@pytest.mark.parametrize("number, argument", [(9, "killed"), (11, "segmentation fault"), (15, "terminated")])
def test_signal(bench: Bench, number: int, argument: str) -> None:
    job = bench.run(None, f"kill -{number} $$; sleep 1000")
    outcome = job.ended()
    assert outcome["code"] == 128 + number
    assert f"signal {number} ({argument})" in outcome["reason"]
    assert (job.events(0, "exited")[0]["signal"], job.events(0, "exited")[0]["stopped"]) == (number, False)


@pytest.mark.parametrize(
    "command, code, why",
    [
        (["no-such-program"], 127, "cannot start 'no-such-program': No such file or directory"),
        (["/etc/passwd"], 126, "cannot start '/etc/passwd': Permission denied"),
        pytest.param(["/etc"], 126, "cannot start '/etc': Permission denied", marks=pytest.mark.chaos),
    ],
)
def test_cannot_start(bench: Bench, command: list[str], code: int, why: str) -> None:
    """127 and 126 as a shell says it; the log and the verdict name the command."""
    job = bench.run(bench.nodes(2), command)
    assert [job.ended(node)["code"] for node in range(2)] == [code, code]
    assert why in job.ended()["reason"]
    assert why.encode() in job.log()


def test_first_failure_counts(bench: Bench) -> None:
    """Who dies of the loss is a victim, whatever its code."""
    program = """
        if [ $RANK = 1 ]; then exit 3; fi
        trap 'exit 99' TERM; while :; do sleep 0.2; done
    """
    job = bench.run(bench.nodes(2), program, per_node=2)
    outcome = job.ended(1)
    assert (outcome["code"], outcome["culprits"]) == (3, [["trainer", 1]])
    assert outcome["victims"] == [["trainer", 0], ["trainer", 2], ["trainer", 3]]


def test_ranks_that_fail_at_the_same_instant_are_all_culprits(bench: Bench, tmp_path: Path) -> None:
    """Eight ranks fail in the same moment. Those that the stop reached died of its signal; only these are called stopped."""
    program = f"echo ready; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done; echo SyntaxError; exit 5"
    job = bench.run(bench.nodes(2), program, per_node=4).ready()
    (tmp_path / "go").touch()
    outcome = job.ended()
    exits = {("trainer", event["rank"]): event for node in range(2) for event in job.events(node, "exited")}
    own = {key for key, event in exits.items() if event["code"] == 5}
    assert {(role, rank) for role, rank in outcome["culprits"]} == own
    assert {key for key, event in exits.items() if event["stopped"]} == set(exits) - own
    assert {(role, rank) for role, rank in outcome["victims"]} == set(exits) - own
    assert len({exits[key]["error"] for key in own}) == 1, "the same last line"
    name = job.nodes[outcome["node"]].host.name
    first = f"trainer {outcome['culprits'][0][1]} on {name}"
    many = f"{len(own)} trainers failed with the same error, first {first}: exit code 5"
    assert outcome["reason"] == (many if len(own) > 1 else f"{first} ended with exit code 5")


def test_the_same_error_on_all_nodes_is_one_verdict_without_victims(bench: Bench) -> None:
    """Each node has one rank. The first failure must not stop the others, which fail of the same error a moment later."""
    go = bench.tmp / "go"
    program = (
        f"echo ready; until [ -e {go} ]; do sleep 0.05; done; echo file $RANK, line 1; echo SyntaxError $RANK; exit 1"
    )
    job = bench.run(bench.nodes(4), program).ready()
    go.touch()
    outcome = job.ended()
    assert sorted(outcome["culprits"]) == [["trainer", rank] for rank in range(4)]
    assert outcome["victims"] == []
    assert outcome["reason"].startswith("4 trainers failed with the same error, first trainer ")
    ending = next(event for event in job.events(0, "phase") if event["name"] == "ending")
    assert (ending["culprits"], ending["why"]) == (outcome["culprits"], outcome["reason"]), "known before the stop"


def test_a_cause_that_is_known_after_its_consequence_is_reported_first(bench: Bench, tmp_path: Path) -> None:
    """Rank 1 ends because the connection to rank 0 is closed, and its end is known before that of rank 0."""
    cause = f"until [ -e {tmp_path}/closed ]; do sleep 0.05; done; sleep 0.1; echo ValueError; exit 5"
    consequence = f"echo ConnectionError: closed by peer; touch {tmp_path}/closed; exit 1"
    job = bench.run(bench.nodes(2), p.one_each(cause, consequence))
    outcome = job.ended()
    assert (outcome["code"], outcome["culprits"]) == (5, [["trainer", 0], ["trainer", 1]])


def test_a_stop_by_the_user_does_not_wait_for_further_failures(bench: Bench) -> None:
    def waited() -> float:
        job = bench.run(
            bench.nodes(2), p.one_each("echo ready; until [ -e go ]; do sleep 0.05; done; exit 5", p.PLAIN)
        ).ready()
        (job.dir(0) / "go").touch()
        job.until("exited")
        job.stop(code=130)
        failure, phase = job.events(0, "exited")[0], job.events(0, "phase")[-2:]
        assert [event["name"] for event in phase] == ["ending", "over"]
        assert job.ended()["code"] == 5
        return float(phase[0]["t"] - failure["t"])

    assert any(waited() < 0.45 for _ in range(3)), "on a busy machine the stop itself may come later"


def test_it_is_known_which_ranks_the_signal_ends_at_once(bench: Bench) -> None:
    """Such a rank has no exit code after a stop, unless it was ending by itself when the signal came."""
    program = """
        if [ $RANK = 0 ]; then echo ready; while :; do sleep 0.2; done; fi
        trap 'exit 3' TERM; echo ready; while :; do sleep 0.2; done
    """
    job = bench.run(bench.nodes(1), program, per_node=2).ready()
    pids = [job.rank(rank).pid for rank in range(2)]
    until(lambda: processes.dies_of(pids[0], signal.SIGTERM))  # a shell blocks signals while it starts a program
    assert not processes.dies_of(pids[1], signal.SIGTERM)
    assert not processes.dies_of(1 << 22, signal.SIGTERM)
    job.stop()
    found = {event["rank"]: (event["code"], event["signal"], event["stopped"]) for event in job.events(0, "exited")}
    assert found == {0: (0, 15, True), 1: (3, 0, True)}


ZOMBIE = """
import os, sys, time
from clustertool.node.storage import files
from clustertool.node.system import processes
from clustertool.node.jobs.termination import Shutdown
from clustertool.node.jobs.descendants import Descendants

files.make_root(sys.argv[1])
job = files.make_job_dir(sys.argv[1] + "/JOBx")
ended = os.posix_spawn("/bin/sh", ["sh", "-c", "exit 3"], {})
running = os.posix_spawn("/bin/sleep", ["sleep", "1000"], {})
while processes.stat(ended).state != "Z":
    time.sleep(0.01)
signalled = Shutdown(Descendants(job, processes.identify(os.getpid())), "no such mark", 10.0).signalled
print(running in signalled, ended in signalled)
"""


def test_a_rank_that_ended_before_the_signal_is_not_among_the_signalled(tmp_path: Path) -> None:
    """In a process of its own, since an ending signals all children."""
    done = subprocess.run([sys.executable, "-c", ZOMBIE, tmp_path / "root"], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["True", "False"], done.stderr


def test_output_is_complete_and_exact(bench: Bench) -> None:
    """Binary, both streams, without a newline at the end, from a child that outlives its parent by a moment."""
    program = p.python("""
import os, sys, time
os.write(1, bytes(range(256)) * 1000)
os.write(2, b"\\0\\xff error \\n")
if os.fork() == 0:
    time.sleep(0.2)
    os.write(1, b"late")
    os._exit(0)
os.write(1, b"no newline")
os.wait()
""")
    job = bench.run(None, program)
    assert job.ended()["state"] == "succeeded"
    assert job.log() == bytes(range(256)) * 1000 + b"\0\xff error \nno newline" + b"late"


def test_environment(bench: Bench) -> None:
    """What the plan says, over what the login has; nothing of the agent's own."""
    env = {
        "PADDLE_TRAINER_ID": "66",
        "TRAINING_ROLE": "X",
        "http_proxy": "http://x",
        "LD_LIBRARY_PATH": "/node",
        "FOO": "bar",
    }
    nodes = bench.nodes(1, env=env, LD_LIBRARY_PATH="/conf")
    job = bench.run(nodes, "env; pwd; umask; readlink /proc/self/fd/0", env={"MINE": "a b\nc", "CLUSTER": "é"})
    job.ended()
    lines = job.log().decode().splitlines()
    found = dict(line.split("=", 1) for line in lines if "=" in line)
    assert (found["PADDLE_TRAINER_ID"], found["LD_LIBRARY_PATH"], found["CLUSTER"]) == ("0", "/conf:/node", "é")
    assert found["TRAINING_ROLE"] == "TRAINER"
    assert (found["HOME"], found["PYTHONUNBUFFERED"]) == (str(bench.home), "1")
    assert found["CLUSTERTOOL_OUTPUT"] == str(job.dir() / "output")
    assert found["FOO"] == "bar" and not {"http_proxy", "LC_CTYPE"} & set(found)
    assert lines[-3:] == [str(job.dir()), f"{_umask():04o}", "/dev/null"]
    assert "MINE=a b\nc\n" in job.log().decode()


def _umask() -> int:
    mask = os.umask(0o022)
    os.umask(mask)
    return mask


def test_a_command_that_is_missing_behind_a_prelude_is_named(bench: Bench) -> None:
    job = bench.run(bench.nodes(1, PRELUDE=["true"]), ["/no/such/python", "x.py"])
    assert job.ended()["code"] == 127
    assert job.log() == b"the command /no/such/python does not exist here, or cannot be executed\n"


@pytest.mark.parametrize(
    "prelude, code, line",
    [
        (
            ["export A=1", "conda activate base"],
            127,
            ": conda activate base (fix: source PREFIX/etc/profile.d/conda.sh",
        ),
        (["module load cuda"], 127, ": module load cuda (fix: source the file that defines module"),
        (["source /nowhere/activate"], 1, ": source /nowhere/activate (fix: try the lines of PRELUDE by hand"),
        (["set -e", "false", "true"], 1, ": false (fix"),
        (["exit 0"], 0, " (fix"),
    ],
)
def test_a_prelude_that_fails_is_named(prelude: list[str], code: int, line: str) -> None:
    """With the command that failed, where the shell knows it; the program is never skipped with success."""
    found = []
    for shell in ("bash", "sh"):
        argv = [shell, "-c", after_prelude("missing"), "prelude", "echo", "the program"]
        env = {"PATH": "/usr/bin:/bin", "CLUSTERTOOL_PRELUDE": "\n".join(prelude)}
        found.append(subprocess.run(argv, env=env, capture_output=True, text=True, check=False))
        assert (found[-1].returncode, found[-1].stdout) == (126, "")
    assert (
        found[0].stderr.splitlines()[-1].startswith("clustertool: ")
        and f"with exit code {code}{line}" in found[0].stderr
    )
    assert "(fix: " in found[1].stderr and "exit code" in found[1].stderr


def test_the_output_of_a_prelude_that_fails_is_in_the_log(bench: Bench) -> None:
    job = bench.run(bench.nodes(1, PRELUDE=["echo before", "conda activate base"]), p.PLAIN)
    assert job.ended()["code"] == 126
    before, reason, ours = job.log().decode().splitlines()
    assert before == "before" and "conda: command not found" in reason
    assert ours.startswith("clustertool: PRELUDE failed with exit code 127: conda activate base (fix: source PREFIX")


def test_prelude(bench: Bench) -> None:
    """Shell lines before every process; what they say is in the log, and they are in no process's argv."""
    nodes = bench.nodes(1, PRELUDE=["export WHAT='it''s $HOME'", "echo prelude"])
    job = bench.run(nodes, ["sh", "-c", "echo $WHAT; echo ready; exec sleep 1000"]).ready()
    assert job.log() == b"prelude\nits $HOME\nready\n"
    assert b"export" not in read(f"/proc/{job.rank().pid}/cmdline")
    assert b"CLUSTERTOOL_PRELUDE" not in read(f"/proc/{job.rank().pid}/environ")
    job.stop()


# -- parameter servers ------------------------------------------------------------------------------------------------


def test_trainers_wait_for_listening_pservers(bench: Bench) -> None:
    """All pservers of all nodes listen before any trainer starts; when the trainers are done, the pservers are ended."""
    slow = p.python("import os, time\ntime.sleep(0.5 * int(os.environ['CLUSTERTOOL_RANK']))\n" + p.PSERVER[-1])
    job = bench.run(bench.nodes(2), "echo trainer", pserver=slow, servers=2, per_node=2)
    for node in range(2):
        assert (job.ended(node)["state"], job.ended(node)["code"], job.ended(node)["victims"]) == ("succeeded", 0, [])
    steps = [(kind, role) for _, kind, role, _ in order(job, "started", "listening")]
    assert steps == [("started", "pserver")] * 4 + [("listening", "pserver")] * 4 + [("started", "trainer")] * 4 or (
        steps.index(("started", "trainer")) == 8
    )
    exits = [event for node in range(2) for event in job.events(node, "exited") if event["role"] == "pserver"]
    assert [(event["signal"], event["stopped"]) for event in exits] == [(signal.SIGTERM, True)] * 4
    assert [name for _, _, name, _ in order(job, "exited")][:4] == ["trainer"] * 4


def test_pserver_that_never_listens(bench: Bench) -> None:
    """No trainer starts, the wait costs next to nothing, and a stop ends it."""
    job = bench.run(bench.nodes(2), "echo trainer", pserver=p.PLAIN)
    job.until("started", 1)
    supervisor = job.process("supervisor", 1)
    before, start = cpu(supervisor.pid), time.monotonic()
    until(lambda: time.monotonic() - start > 1.0)
    assert cpu(supervisor.pid) - before < 0.25
    assert not [e for node in range(2) for e in job.events(node, "started") if e["role"] == "trainer"]
    assert job.stop()["state"] == "clean"
    assert job.ended(1)["state"] == "stopped"


@pytest.mark.parametrize("code", [0, 5])
def test_pserver_that_ends_before_it_listens(bench: Bench, code: int) -> None:
    job = bench.run(
        bench.nodes(2), "echo trainer", pserver=f"[ $CLUSTERTOOL_RANK = 0 ] && exec sleep 1000; exit {code}"
    )
    assert [job.ended(node)["code"] for node in range(2)] == [code or 1] * 2
    assert job.ended()["culprits"] == [["pserver", 1]]
    job.gone()


def test_a_pserver_that_waits_for_trainers_at_gloos_port(bench: Bench) -> None:
    """Paddle's first pserver does: its own port opens when the trainers have come."""
    job = bench.run(bench.nodes(2), p.GLOO_TRAINER, pserver=p.GLOO_PSERVER)
    assert [job.ended(node)["state"] for node in range(2)] == ["succeeded"] * 2
    assert [job.log(rank) for rank in range(2)] == [b"met\n"] * 2


def test_trainers_and_heter_trainers_wait_for_each_other(bench: Bench) -> None:
    """Three stages, each listens and goes on when its neighbours do; when the trainers are done, all others are ended."""
    job = bench.run(bench.nodes(2), p.STAGE, pserver=p.PSERVER, heter=p.STAGE, heter_worker_num="2;1")
    for node in range(2):
        assert (job.ended(node)["state"], job.ended(node)["code"], job.ended(node)["victims"]) == ("succeeded", 0, [])
    assert [job.log(rank) for rank in range(2)] == [b"met\n"] * 2
    assert {len(job.log(rank, "heter")) for rank in range(6)} <= {0, 4}  # the last ones may be ended before they say so
    steps = [(kind, role) for _, kind, role, _ in order(job, "started", "listening")]
    assert ("listening", "pserver") not in steps[steps.index(("started", "trainer")) :]
    assert ("started", "heter") not in steps[: steps.index(("started", "trainer"))]
    exits = [event for node in range(2) for event in job.events(node, "exited") if event["role"] == "heter"]
    assert [event["stopped"] for event in exits] == [True] * 6
    assert [(job.dir(node) / "log/heter.log").read_bytes() for node in range(2)] == [
        job.log(rank, "heter") for rank in (0, 2)
    ]


def test_a_heter_trainer_that_fails_ends_the_job_under_continue_too(bench: Bench) -> None:
    fails = "[ $CLUSTERTOOL_RANK = 1 ] && exit 9; exec sleep 1000"
    job = bench.run(bench.nodes(2), p.PLAIN, pserver=p.PSERVER, heter=fails, policy={"on_failure": "continue"})
    for node in range(2):
        ended = job.ended(node)
        assert (ended["state"], ended["code"], ended["culprits"]) == ("failed", 9, [["heter", 1]])
    assert {tuple(key) for key in ended["victims"]} >= {("pserver", 0), ("trainer", 0), ("trainer", 1)}
    assert ended["reason"] == "heter trainer 1 on 127.0.0.12 ended with exit code 9"
    job.gone()


def test_port_lost_after_the_plan(bench: Bench) -> None:
    """Somebody else listens there by now: an error that names him, and nothing has started."""
    import socket

    job = bench.job(None, "echo trainer", pserver=p.PSERVER).place()
    port = next(process.ports[0] for process in job.plan.processes if process.role == "pserver")
    with socket.create_server(("127.0.0.1", port)):
        with pytest.raises(PreflightError, match=rf"port {port} is in use by .*\(pid {os.getpid()}, user"):
            job.start()
    assert not job.events(0, "started")
    job.gone()
    job.start()
    assert job.ended()["state"] == "succeeded"


def test_lead_port_lost(bench: Bench) -> None:
    import socket

    job = bench.job(bench.nodes(2), p.PLAIN).place()
    with socket.create_server((job.plan.coordinator[0], job.plan.coordinator[1])):
        with pytest.raises(PreflightError, match=f"port {job.plan.coordinator[1]} is in use by"):
            job.start()
    assert [job.stop(node)["state"] for node in range(2)] in (["ended already", "clean"], ["clean", "clean"])
    for node in range(2):
        job.nodes[node].ask("unplace", job_dir=str(job.dir(node)), token=job.token)
        assert not job.dir(node).exists()


def test_started_twice(bench: Bench) -> None:
    """The second start is refused, and harms the first in nothing."""
    job = bench.run(None, p.PLAIN).ready()
    with pytest.raises(PreflightError):
        job.start()
    assert alive(job.rank()) and alive(job.process("supervisor"))
    assert job.stop()["state"] == "clean"
    assert job.ended()["state"] == "stopped"


# -- costs ------------------------------------------------------------------------------------------------------------


def test_idle_costs_little(bench: Bench) -> None:
    """Two ranks with 300 threads each, and nothing happens. It is well below 1 % of a core; that nothing spins is all that
    a busy test machine can show."""
    job = bench.run(bench.nodes(1), p.MANY_THREADS, per_node=2).ready()
    watched = [job.process("supervisor").pid, job.process("guard").pid]
    before, start = [cpu(pid) for pid in watched], time.monotonic()
    until(lambda: time.monotonic() - start > 2.0)
    used = [now - then for now, then in zip(map(cpu, watched), before)]
    assert used[0] < 0.2 and used[1] < 0.1, f"{used} s of CPU in 2 s"
    job.stop(grace=0.1)
