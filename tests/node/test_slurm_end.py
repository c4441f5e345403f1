"""Signals to a job in an allocation of Slurm, whose scontrol is a program of these tests: which outcome all nodes record."""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from clustertool.model.job.outcome import Outcome
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import JobState
from clustertool.model.wire.record_lines import read_events
from clustertool.node.join.child_task import ChildTask
from clustertool.node.join.slurm_allocation import SlurmAllocation
from tests.folded import fold
from tests.node.harness import pids, read, sample, until
from tests.node.joining import JoinBench, Machine, codes, start, tasks

JOB = "41"
LINE = (
    f"JobId={JOB} JobName=x UserId=me(1000) GroupId=me(1000) MCS_label=N/A Priority=1 Nice=0 Account=(null) QOS=(null)"
    " JobState={state} Reason={reason} Dependency=(null) Requeue=1 Restarts=0 ExitCode=0:15"
    " EndTime=1795435742 WorkDir=/home/me Comment=clustertool X"
)
WAIT = "echo ready; exec sleep 600"


@pytest.fixture
def scontrol(tmp_path: Path) -> Path:
    """The folder of scontrol, for PATH. Its answer is that of a job that was cancelled."""
    folder = tmp_path / "bin"
    folder.mkdir()
    answers(folder, f"echo '{LINE.format(state='COMPLETING', reason='None')}'")
    return folder


def answers(folder: Path, script: str) -> None:
    program = folder / "scontrol"
    program.write_text(f'#!/bin/sh\necho "$* $SLURM_TIME_FORMAT" >> {folder}/asked\n{script}\n')
    program.chmod(0o755)


def allocation(bench: JoinBench, folder: Path, count: int, command: str = WAIT, **fields: Any) -> list[Machine]:
    """Machines as srun starts them."""
    machines = bench.job(count, command, indices=[None] * count, engine="slurm", **fields)
    step = {"SLURM_JOB_ID": JOB, "SLURM_STEP_ID": "0", "SLURM_STEP_NUM_NODES": str(count)}
    tasks(machines, **step, PATH=f"{folder}:{os.environ['PATH']}")
    return machines


def ready(machines: list[Machine]) -> list[Machine]:
    start(machines)
    for rank, machine in enumerate(machines):
        machine.says("ready", rank)
        until(partial(machine.events, "started"), "it is recorded")
    return machines


def ranks(machine: Machine) -> list[int]:
    return [event["pid"] for event in machine.events("started")]


def below(pid: int) -> list[int]:
    """Its descendants and it, as Slurm finds the processes of a task without cgroups."""
    parents = {child: found[2] for child in pids() if (found := sample(child))}
    found = [pid]
    for one in found:
        found += [child for child, parent in parents.items() if parent == one]
    return found[::-1]


def send(number: int, *machines: Machine) -> None:
    """A signal for all processes of these machines. One may end because another one has ended."""
    for pid in [pid for machine in machines for pid in below(machine.process.pid)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def outcomes(machines: list[Machine]) -> set[tuple[str, int, str]]:
    ends = [machine.events("ended")[-1] for machine in machines]
    return {(end["state"], end["code"], end["reason"]) for end in ends}


def exits(machines: list[Machine]) -> set[tuple[int, bool]]:
    return {(event["signal"], event["stopped"]) for machine in machines for event in machine.events("exited")}


def test_all_processes_get_sigterm(join_bench: JoinBench, scontrol: Path) -> None:
    """As scancel does. The guard ignores it, and scontrol is no process of the job."""
    machines = ready(allocation(join_bench, scontrol, 3))
    send(signal.SIGTERM, *machines)
    assert codes(machines) == [143, 143, 143]
    assert outcomes(machines) == {("stopped", 143, "Slurm's job 41 was cancelled (scancel)")}
    assert exits(machines) == {(signal.SIGTERM, True)}
    (end,) = [event["engine"] for event in machines[0].events("verdict")]
    assert end == {"engine": "slurm", "job": JOB, "state": "COMPLETING", "reason": "", "ended": 1795435742.0}
    assert read(str(scontrol / "asked")) == f"--oneliner show job {JOB} %s\n".encode()


def test_ranks_die_of_the_signal_before_a_supervisor_reads_its_own(join_bench: JoinBench, scontrol: Path) -> None:
    """On every node, and by an exit code as well, the coordinator last."""
    answers(scontrol, f"echo '{LINE.format(state='COMPLETING', reason='TimeLimit')}'")
    machines = allocation(join_bench, scontrol, 3, "trap 'exit 143' TERM; echo ready; while :; do sleep 0.05; done")
    for pid in [pid for machine in ready(machines) for pid in ranks(machine)]:
        os.kill(pid, signal.SIGTERM)
    time.sleep(0.5)
    assert not any(machine.events("exited") for machine in machines)
    for machine in reversed(machines):
        machine.signal(signal.SIGTERM)
        time.sleep(0.1)
    assert codes(machines) == [124, 124, 124]
    assert outcomes(machines) == {("timeout", 124, "Slurm's job 41 exceeded its time limit")}
    assert [event["stopped"] for machine in machines for event in machine.events("exited")] == [True] * 3
    assert machines[0].events("verdict")[0]["culprits"] == []


def test_a_rank_that_alone_is_killed_has_failed(join_bench: JoinBench, scontrol: Path) -> None:
    machines = ready(allocation(join_bench, scontrol, 2))
    began = time.monotonic()
    os.kill(*ranks(machines[1]), signal.SIGTERM)
    assert codes(machines) == [143, 143]
    assert 2.0 <= time.monotonic() - began < 20.0
    ((state, _, reason),) = outcomes(machines)
    assert state == "failed" and reason.endswith("ended with signal 15 (terminated)")
    assert not (scontrol / "asked").exists()


def test_a_rank_that_is_killed_by_sigkill_fails_at_once(join_bench: JoinBench, scontrol: Path) -> None:
    machines = ready(allocation(join_bench, scontrol, 2))
    began = time.time()
    os.kill(*ranks(machines[1]), signal.SIGKILL)
    assert codes(machines) == [137, 137]
    assert machines[1].events("exited")[0]["t"] - began < 2.0


@pytest.mark.parametrize(
    "script, wanted",
    [
        (f"echo '{LINE.format(state='RUNNING', reason='None')}'", "Slurm has not ended job 41: its state is RUNNING"),
        (
            "echo 'Unable to contact slurm controller' >&2; exit 1",
            "scontrol shows nothing about job 41: Unable to contact",
        ),
        ("exec sleep 600", "scontrol shows nothing about job 41: it did not answer within 5 s"),
        ("", "scontrol shows nothing about job 41: its answer is empty"),
        (None, "scontrol shows nothing about job 41: it cannot start: No such file or directory"),
    ],
    ids=["running", "no controller", "late", "empty", "none"],
)
def test_slurm_does_not_know_the_reason(join_bench: JoinBench, scontrol: Path, script: str | None, wanted: str) -> None:
    answers(scontrol, script or "")
    machines = allocation(join_bench, scontrol, 2)
    if script is None:
        (scontrol / "scontrol").unlink()
        (scontrol / "sleep").symlink_to(shutil.which("sleep") or "")
        (scontrol / "sh").symlink_to("/bin/sh")
        machines[0].env = {**machines[0].env, "PATH": str(scontrol)}
    ready(machines)
    began = time.monotonic()
    machines[1].signal(signal.SIGTERM)
    assert codes(machines) == [143, 143]
    assert time.monotonic() - began < 30.0
    ((state, code, reason),) = outcomes(machines)
    assert (state, code) == ("stopped", 143)
    assert "received SIGTERM from pid " in reason and wanted in reason


def test_slurm_is_not_asked_about_machines_that_a_user_started(join_bench: JoinBench, scontrol: Path) -> None:
    """A bundle of no engine, in a shell of an allocation."""
    machines = join_bench.job(2, WAIT)
    for machine in machines:
        machine.env = {**machine.env, "SLURM_JOB_ID": JOB, "PATH": f"{scontrol}:{os.environ['PATH']}"}
    ready(machines)[0].signal(signal.SIGTERM)
    assert codes(machines) == [143, 143]
    assert not (scontrol / "asked").exists()


def test_a_coordinator_without_an_allocation_waits_for_no_answer(join_bench: JoinBench, scontrol: Path) -> None:
    """A signal to a node that has one ends the job all the same."""
    machines = allocation(join_bench, scontrol, 2)
    machines[0].env = {name: value for name, value in machines[0].env.items() if name != "SLURM_JOB_ID"}
    ready(machines)[1].signal(signal.SIGTERM)
    assert codes(machines) == [143, 143]
    ((state, _, reason),) = outcomes(machines)
    assert state == "stopped" and "received SIGTERM from pid " in reason
    assert not (scontrol / "asked").exists()


# -- a node that does not answer ---------------------------------------------------------------------------------------

QUICK = {"loss_timeout": 2.0}


def running(folder: Path, machines: list[Machine], comment: str = "", requeue: int = 0) -> None:
    """The job runs, by scontrol. scancel records how it was called, and how many nodes have recorded their end by then."""
    own = machines[0].join.identity.job_id
    line = LINE.format(state="RUNNING", reason="None").replace("Requeue=1", f"Requeue={requeue}")
    answers(folder, f"echo '{line.replace('clustertool X', comment or f'clustertool {own}')}'")
    ends = " ".join(str(machine.job_dir / ".clustertool/events.jsonl") for machine in machines)
    program = folder / "scancel"
    program.write_text(f'#!/bin/sh\necho "scancel $*" $(cat {ends} | grep -c \'"ended"\') >> {folder}/asked\n')
    program.chmod(0o755)


def kill(machine: Machine) -> None:
    """The machine crashes: all of it at once, so no supervisor sees the end of a rank."""
    send(signal.SIGSTOP, machine)
    send(signal.SIGKILL, machine)


@pytest.mark.parametrize(
    ("comment", "requeue", "wanted"),
    [("", 0, "scancel --batch --signal=KILL 41 2"), ("", 1, f"requeue {JOB} "), ("mine", 0, "scancel 41.0 2")],
    ids=["ours", "requeue", "of a user"],
)
def test_the_nodes_go_back_once_the_end_is_recorded(
    join_bench: JoinBench, scontrol: Path, comment: str, requeue: int, wanted: str
) -> None:
    """Two of three nodes have recorded it. srun would wait for the third one."""
    machines = allocation(join_bench, scontrol, 3, cluster=QUICK)
    running(scontrol, machines, comment, requeue)
    kill(ready(machines)[1])
    assert codes(machines) == [75, -9, 75]
    asked = read(str(scontrol / "asked")).decode().splitlines()
    assert asked == [f"--oneliner show job {JOB} %s", wanted]
    assert {machine.events("ended")[0]["code"] for machine in machines[::2]} == {75}


def test_the_other_nodes_go_back_where_the_coordinator_is_lost(join_bench: JoinBench, scontrol: Path) -> None:
    machines = allocation(join_bench, scontrol, 2, cluster=QUICK)
    running(scontrol, machines)
    kill(ready(machines)[0])
    assert codes(machines) == [-9, 75]
    assert read(str(scontrol / "asked")).decode().splitlines()[-1] == f"scancel {JOB} 1"


def test_slurm_does_not_wait_for_a_supervisor_that_died(join_bench: JoinBench, scontrol: Path) -> None:
    """Its guard has reported it: the task has ended."""
    machines = allocation(join_bench, scontrol, 2)
    running(scontrol, machines)
    os.kill(ready(machines)[1].process.pid, signal.SIGKILL)
    assert codes(machines) == [75, -9]
    assert not (scontrol / "asked").exists()


# -- before the job has started ----------------------------------------------------------------------------------------


_OTHER_REASONS = [  # tests/unit/test_slurm_job_end.py has the outcome of each
    pytest.param(f"echo '{LINE.format(state='COMPLETING', reason=reason)}'", code, wanted, marks=pytest.mark.chaos)
    for reason, code, wanted in (
        ("NodeDown", 75, "a node of Slurm's job 41 failed"),
        ("None", 143, "Slurm's job 41 was cancelled (scancel)"),
        ("OutOfMemory", 137, "Slurm's job 41 was out of memory"),
    )
]


@pytest.mark.parametrize(
    "script, code, wanted",
    [
        (
            f"echo '{LINE.format(state='COMPLETING', reason='TimeLimit')}'",
            124,
            "Slurm's job 41 exceeded its time limit",
        ),
        *_OTHER_REASONS,
    ],
    ids=["time limit", "node", "scancel", "memory"],
)
def test_machines_that_wait_for_another_get_the_reason(
    join_bench: JoinBench, scontrol: Path, script: str, code: int, wanted: str
) -> None:
    """Slurm ends the job while a node is missing. A joiner leaves with the answer of the coordinator."""
    answers(scontrol, f"sleep 0.5; {script}")
    machines = start(allocation(join_bench, scontrol, 3)[:2])
    machines[1].until("joined")
    for machine in machines[::-1]:
        machine.signal(signal.SIGTERM)
    assert codes(machines) == [code, code], [machine.lines for machine in machines]
    assert [machine.error for machine in machines] == [f"the job did not start: {wanted}"] * 2
    assert read(str(scontrol / "asked")) == f"--oneliner show job {JOB} %s\n".encode()


def test_a_job_that_is_preempted_before_it_starts_is_requeued(join_bench: JoinBench, scontrol: Path) -> None:
    """One node has not answered the probe yet. Nothing is left where the job was not placed."""
    preempted(scontrol)
    machines = allocation(join_bench, scontrol, 3)
    start(machines[:2])
    machines[1].until("joined")
    machines[1].signal(signal.SIGSTOP)
    machines[2].start()
    machines[2].until("joined")
    for machine in (machines[1], machines[2], machines[0]):
        machine.signal(signal.SIGTERM)
    machines[1].signal(signal.SIGCONT)
    assert codes(machines) == [143, 143, 143], [machine.lines for machine in machines]
    assert {machine.error for machine in machines} == {"the job did not start: Slurm's job 41 was preempted"}
    assert read(str(scontrol / "asked")) == f"--oneliner show job {JOB} %s\nrequeue {JOB} \n".encode()
    assert [machine.left() for machine in machines] == [[], [], []]


def test_a_controller_that_does_not_answer_delays_the_end_of_joining_for_5_s(
    join_bench: JoinBench, scontrol: Path
) -> None:
    """The signal to one joiner ends the job: Slurm does not start its task again. Heartbeats keep the joiners connected."""
    answers(scontrol, "exec sleep 600")
    machines = start(allocation(join_bench, scontrol, 3)[:2])
    machines[1].until("joined")
    began = time.monotonic()
    machines[1].signal(signal.SIGTERM)
    assert codes(machines) == [143, 143]
    assert 5.0 <= time.monotonic() - began < 20.0
    for machine in machines:
        assert "the job did not start: the joining process on 127.0.0.22 received SIGTERM" in machine.error
        assert "scontrol shows nothing about job 41: it did not answer within 5 s" in machine.error


def test_a_task_that_ends_before_it_joins(join_bench: JoinBench, scontrol: Path) -> None:
    """No Python there, for example. Slurm's names of the nodes are in the error of all others. A task that hangs there does not
    keep the nodes."""
    machines = allocation(join_bench, scontrol, 3)
    running(scontrol, machines)
    for machine in machines:
        machine.join = replace(machine.join, join_timeout=6.0)
    assert codes(start(machines[::2])) == [75, 75]
    for machine in machines[::2]:
        assert "2 of 3 nodes have joined within 6 s; missing: 127.0.0.22" in machine.error
    assert read(str(scontrol / "asked")).decode().splitlines()[-1] == f"scancel --batch --signal=KILL {JOB} 0"


def test_a_child_task_leaves_the_end_to_its_parent() -> None:
    """An engine sends SIGTERM to it as well; then it still has to take back what it has placed."""

    def body(orders: int, answer: int) -> None:
        os.write(answer, b"{")
        done = os.read(orders, 1) == b"U"
        os.write(answer, b'"facts": "undone"}\n' if done else b"}\n")

    task = ChildTask(body, 5.0)
    assert select.select([task], [], [], 10.0)[0]
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(task.pid, number)
    answer = os.dup(task.fileno())
    task.undo()
    with open(answer, "rb") as file:
        assert file.read() == b'{"facts": "undone"}\n'


# -- a job that Slurm starts again ------------------------------------------------------------------------------------

LAST = 'echo ready; test "$CLUSTERTOOL_ATTEMPT" -gt 0 && cat $CLUSTERTOOL_OUTPUT/kept && exit; '
LAST += "echo kept > $CLUSTERTOOL_OUTPUT/kept; exec sleep 600"


def again(machines: list[Machine], restarts: int) -> list[Machine]:
    for machine in machines:
        machine.lines.clear()
        machine.env = {**machine.env, "SLURM_RESTART_COUNT": str(restarts)}
    return start(machines)


def folded(machines: list[Machine]) -> JobStatus:
    files = [read(str(machine.job_dir / ".clustertool/events.jsonl")).splitlines() for machine in machines]
    return fold((node, event) for node, lines in enumerate(files) for event in read_events(lines))


def preempted(folder: Path, requeue: int = 1, comment: str = "clustertool X") -> None:
    line = LINE.format(state="RUNNING", reason="None").replace("Requeue=1", f"Requeue={requeue}")
    line = line.replace("clustertool X", comment)
    answers(folder, f"echo '{line.replace(' EndTime=', ' PreemptTime=1795435740 EndTime=')}'")


def test_an_allocation_of_the_user_is_not_requeued(join_bench: JoinBench, scontrol: Path) -> None:
    """The job is a step of it: the allocation has no comment of ours."""
    preempted(scontrol, comment="mine")
    machines = ready(allocation(join_bench, scontrol, 2))
    for machine in machines:
        machine.signal(signal.SIGTERM)
    assert codes(machines) == [143, 143]
    assert outcomes(machines) == {("stopped", 143, "Slurm's job 41 was preempted")}
    assert read(str(scontrol / "asked")) == f"--oneliner show job {JOB} %s\n".encode()


def test_a_preempted_job_goes_on_in_its_directory(join_bench: JoinBench, scontrol: Path) -> None:
    """Slurm requeues it only because the coordinator asks for that: the job has ended before the grace of the partition."""
    preempted(scontrol)
    machines = ready(allocation(join_bench, scontrol, 2, LAST))
    for machine in machines:
        machine.signal(signal.SIGTERM)
    assert codes(machines) == [143, 143]
    assert outcomes(machines) == {("stopped", 143, "Slurm's job 41 was preempted")}
    assert read(str(scontrol / "asked")) == f"--oneliner show job {JOB} %s\nrequeue {JOB} \n".encode()
    assert codes(again(machines, 1)) == [0, 0], [machine.lines for machine in machines]
    for rank, machine in enumerate(machines):
        assert read(str(machine.job_dir / f"log/attempt1/workerlog.{rank}")) == b"ready\nkept\n"
        assert machine.log(rank) == "ready\n", "the log of the attempt before"
        assert len(machine.events("job")) == 2
    status = folded(machines)
    assert status.outcome is not None and status.outcome.state == "succeeded"
    assert status.attempt == 1 and {rank.attempt for rank in status.processes.values()} == {1}


RUNNING, COMPLETING = (LINE.format(state=state, reason="None") for state in ("RUNNING", "COMPLETING"))


@pytest.mark.parametrize(
    ("line", "state", "again"),
    [
        (f"{RUNNING} PreemptTime=1795435740", JobState.STOPPED, True),
        (COMPLETING.replace("Restarts=0", "Restarts=1"), JobState.STOPPED, True),
        (COMPLETING, JobState.STOPPED, False),
        (COMPLETING, JobState.LOST, True),
        ("", JobState.STOPPED, True),
    ],
    ids=["preempted", "requeued", "cancelled", "a node lost", "not known"],
)
def test_whether_slurm_may_start_a_job_again(scontrol: Path, line: str, state: JobState, again: bool) -> None:
    """Its bundle is kept for that."""
    answers(scontrol, f"echo '{line}'")
    allocation = SlurmAllocation("J-1", {"SLURM_JOB_ID": JOB, "PATH": f"{scontrol}:{os.environ['PATH']}"})
    outcome = Outcome(state, 0, "tool", "")
    assert allocation.comes_back(outcome) is (state is JobState.LOST), "it was not asked"
    allocation.ask("SIGTERM", 143)
    until(allocation.turn, "it answers")
    assert allocation.comes_back(outcome) is again


def test_a_killed_job_is_started_again(join_bench: JoinBench, scontrol: Path) -> None:
    """It could record nothing: its node has crashed, or Slurm has sent SIGKILL. While it runs again, it has no outcome."""
    machines = ready(allocation(join_bench, scontrol, 2, LAST.replace("&& exit", "&& sleep 600")))
    send(signal.SIGKILL, *machines)
    assert codes(machines) == [-9, -9]
    until(lambda: not join_bench.living(), "nothing lives")
    again(machines, 3)
    until(lambda: all(len(machine.events("started")) == 2 for machine in machines), "they run again")
    status = folded(machines)
    assert (status.state, status.attempt, status.outcome) == ("running", 3, None)
    machines[0].signal(signal.SIGTERM)
    assert codes(machines) == [143, 143]
    assert folded(machines).state == "stopped"


def test_own_restarts_count_as_well(join_bench: JoinBench, scontrol: Path) -> None:
    """Attempts 0 and 1 before the restart by Slurm, 2 and 3 after it: --max-restarts counts anew."""
    machines = allocation(join_bench, scontrol, 1, "echo ready; exit 7")
    job = replace(machines[0].join.job, policy=replace(machines[0].join.job.policy, max_restarts=1))
    machines[0].join = replace(machines[0].join, job=job)
    assert codes(start(machines)) == [7]
    assert codes(again(machines, 1)) == [7]
    assert [event["attempt"] for event in machines[0].events("started")] == [0, 1, 2, 3]


def test_damaged_records_of_the_earlier_start(join_bench: JoinBench, scontrol: Path) -> None:
    """A program of the job can write them."""
    machines = allocation(join_bench, scontrol, 1, "echo ready; exit 7")
    assert codes(start(machines)) == [7]
    with (machines[0].job_dir / ".clustertool/events.jsonl").open("a") as file:
        for attempt in ('"x"', "null", "[1]", "1e999", "-3", "true"):
            file.write(f'{{"t": 1.0, "type": "restart", "attempt": {attempt}, "pause": 0.0}}\n')
    assert codes(again(machines, 2)) == [7], machines[0].lines
    assert [event["attempt"] for event in machines[0].events("started")] == [0, 2]


def test_a_start_that_fails_leaves_the_directory_of_the_earlier_one(join_bench: JoinBench, scontrol: Path) -> None:
    machines = ready(allocation(join_bench, scontrol, 2, LAST))
    machines[0].signal(signal.SIGTERM)
    codes(machines)
    (machines[1].job_dir / ".clustertool/shards-trainer-1").unlink()
    (machines[1].job_dir / ".clustertool/shards-trainer-1").mkdir()
    assert codes(again(machines, 1)) == [69, 69]
    for machine in machines:
        assert "cannot be written: Is a directory" in machine.error
        assert read(str(machine.job_dir / "output/kept")) == b"kept\n"


def test_a_job_that_must_not_be_requeued(join_bench: JoinBench, scontrol: Path) -> None:
    preempted(scontrol, requeue=0)
    machines = ready(allocation(join_bench, scontrol, 1))
    machines[0].signal(signal.SIGTERM)
    assert codes(machines) == [143]
    assert b"requeue" not in read(str(scontrol / "asked"))
