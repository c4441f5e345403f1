"""Elastic jobs: nodes that come and go, epochs, and how such a job ends."""

from __future__ import annotations

import os
import signal
import time
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest

from clustertool.model.config.elastic_keys import ElasticSettings
from clustertool.model.job.state_names import StartReason, StopState
from clustertool.model.paths import JobPaths
from clustertool.node.jobs import stop_request, supervisor_client
from clustertool.node.jobs.records import Record
from clustertool.node.system.tls_link import heartbeat_interval
from tests.node.harness import Process, alive, read, until
from tests.node.joining import JoinBench, Machine, codes, start

if TYPE_CHECKING:
    from clustertool.model.wire.supervisor_messages import LeaveCommand, StopCommand

WAIT = "echo epoch $CLUSTERTOOL_ATTEMPT rank $RANK of $WORLD_SIZE; exec sleep 600"


def elastic(machines: list[Machine], least: int, most: int, **more: object) -> list[Machine]:
    settings = ElasticSettings(least, most, **{"timeout": 20.0, **more})  # type: ignore[arg-type]
    for machine in machines:
        machine.join = replace(machine.join, job=replace(machine.join.job, elastic=settings))
    return machines


def test_a_job_of_all_its_nodes(join_bench: JoinBench) -> None:
    """It is as any other job."""
    machines = elastic(join_bench.job(3, "echo rank $RANK of $WORLD_SIZE"), 2, 3)
    assert codes(start(machines)) == [0, 0, 0], [one.lines for one in machines]
    assert [one.log(node) for node, one in enumerate(machines)] == [f"rank {node} of 3\n" for node in range(3)]
    assert [one.events("ended")[0]["state"] for one in machines] == ["succeeded"] * 3


def test_the_start_waits_for_the_maximum_and_goes_on_with_the_minimum(join_bench: JoinBench) -> None:
    machines = elastic(join_bench.job(2, "echo rank $RANK of $WORLD_SIZE"), 2, 4, timeout=3.0)
    assert codes(start(machines)) == [0, 0], [one.lines for one in machines]
    assert machines[1].log(1) == "rank 1 of 2\n"


def test_a_job_below_its_minimum_ends(join_bench: JoinBench) -> None:
    machines = elastic(join_bench.job(1), 2, 4, timeout=2.0)
    assert codes(start(machines)) == [75]
    assert "1 of at least 2 nodes are there after 2 s" in machines[0].error


def stop(machine: Machine, code: int = 143) -> None:
    """A stop by the user, on this machine."""
    paths = JobPaths.at(str(machine.job_dir))
    how: StopCommand = {"type": "stop", "by": "the test", "code": code, "grace": 3.0, "force": False}
    until(lambda: supervisor_client.order(paths, how, 5.0), "the stop is accepted")


def recorded(machines: list[Machine]) -> None:
    """They make their records before the first plan, as a laptop that starts them wants it."""
    for machine in machines:
        machine.join = replace(machine.join, own=replace(machine.join.own, base=machine.join.own.root_dir))


def test_a_job_that_waits_for_nodes_is_known_and_can_be_stopped(join_bench: JoinBench) -> None:
    machines = elastic(join_bench.job(2), 3, 4, timeout=60.0)
    recorded(machines)
    start(machines)
    for number, machine in enumerate(machines):
        until(lambda one=machine: one.events("supervisor"), "it is recorded")  # type: ignore[misc]
        record = Record.read(str(machine.root), machine.join.identity.job_id)
        assert record.node == number and record.part().start is StartReason.JOINING
    machines[0].until("waiting", present=2)
    stop(machines[1])
    assert codes(machines) == [143, 143]
    for machine in machines:
        (end,) = machine.events("ended")
        assert (end["state"], end["code"], end["reason"]) == ("stopped", 143, "the test")
    assert [len(machine.events("verdict")) for machine in machines] == [1, 0]


def test_a_stop_at_any_moment_between_two_epochs_is_obeyed(join_bench: JoinBench) -> None:
    """The member has no socket for a moment when an epoch ends, and when the next one begins. Here epochs last 0.1 s."""
    for seconds in (0.0, 0.07, 0.14):
        (machine,) = elastic(join_bench.job(1, "exit 101"), 1, 1, backoff=(0.01, 0.01))
        recorded([machine])
        machine.start()
        until(lambda one=machine: len(one.events("epoch")) > 2, "some epochs have begun")  # type: ignore[misc]
        time.sleep(seconds)
        record = Record.read(str(machine.root), machine.join.identity.job_id)
        assert stop_request.stop(record, "the test", 143, 3.0, False)["state"] is StopState.CLEAN
        assert machine.wait() == 143 and not machine.events("supervisor-lost")
        assert [one["state"] for one in machine.events("ended")] == ["stopped"]


def test_a_recorded_job_gets_its_workspace_at_its_first_epoch(join_bench: JoinBench) -> None:
    machines = elastic(join_bench.job(2, "echo rank $RANK"), 2, 2)
    recorded(machines)
    assert codes(start(machines)) == [0, 0], [one.lines for one in machines]
    assert machines[1].log(1) == "rank 1\n" and [one["state"] for one in machines[0].events("ended")] == ["succeeded"]
    assert len(machines[0].events("job")) == 2  # the second one has the ranks


def test_a_machine_beyond_the_maximum_is_on_standby(join_bench: JoinBench) -> None:
    machines = elastic(join_bench.job(3, WAIT), 2, 2)
    start(machines[:2])
    machines[0].says("rank 0 of 2", 0)
    machines[2].start()
    until(lambda: machines[2].reports("joined"), "it waits")
    machines[0].signal(signal.SIGTERM)
    assert codes(machines) == [143, 143, 143]


def test_a_machine_that_comes_too_late_for_a_short_epoch_ends_with_the_job(join_bench: JoinBench) -> None:
    """It was started with the others, and has not offered itself when the job begins."""
    machines = elastic(join_bench.job(3, "true"), 1, 1)
    machines[0].start()
    until(lambda: machines[0].events("ended"), "the job ends")
    assert codes(start(machines[1:])) == [0, 0], [one.lines for one in machines]
    assert codes(machines[:1]) == [0]


def says(machine: Machine, attempt: int, rank: int, world: int, seconds: float = 40.0) -> None:
    """A rank of an epoch runs on a machine."""
    text = f"epoch {attempt} rank {rank} of {world}"
    log = machine.job_dir / "log" / (f"attempt{attempt}" if attempt else "") / f"workerlog.{rank}"
    until(lambda: text in read(str(log)).decode(), f"{log}: {text} {machine.lines}", seconds)


def running(machines: list[Machine]) -> list[Machine]:
    start(machines)
    for rank, machine in enumerate(machines):
        says(machine, 0, rank, len(machines))
    return machines


def end(machines: list[Machine]) -> None:
    """The user stops the job."""
    stop(machines[0])
    assert codes(machines) == [143] * len(machines)


def test_a_lost_node_starts_an_epoch(join_bench: JoinBench) -> None:
    """Ranks have no gaps, and start when the lost node can have none. It is started again, and joins the next epoch."""
    machines = running(elastic(join_bench.job(3, WAIT), 2, 3, grow="restart"))
    machines[1].signal(signal.SIGKILL)
    says(machines[0], 1, 0, 2)
    says(machines[2], 1, 1, 2)
    (epoch,) = (one for one in machines[0].events("epoch") if one["attempt"] == 1)
    assert (epoch["nodes"], epoch["left"], epoch["joined"]) == ([0, 2], [[1, "lost"]], [])
    assert 5.0 < epoch["seconds"] < 15.0, epoch  # LOSS_TIMEOUT + 1
    assert machines[1].wait() == -signal.SIGKILL
    machines[1].start()
    for rank, machine in enumerate(machines):
        says(machine, 2, rank, 3)
    (back,) = (one for one in machines[0].events("epoch") if one["attempt"] == 2)
    assert (back["left"], back["joined"]) == ([], [1]) and "joins" in back["cause"]
    end(machines)


def test_a_node_that_fails_while_an_epoch_is_prepared_is_left_out(join_bench: JoinBench) -> None:
    """The coordinator records why, and the job goes on without it."""
    machines = running(elastic(join_bench.job(3, WAIT), 2, 3, grow="restart"))
    machines[1].signal(signal.SIGKILL)
    says(machines[2], 1, 1, 2)
    machines[1].wait()
    old = machines[1].root.rename(machines[1].root.with_name("old"))
    machines[1].root.write_text("a file where a folder was")
    machines[1].start()
    assert machines[1].wait() == 69 and "is no directory" in machines[1].error, machines[1].lines
    says(machines[2], 2, 1, 2)
    (left,) = machines[0].events("left-out")
    assert left["name"] and left["why"] in machines[1].error
    machines[1].root.unlink()
    old.rename(machines[1].root)
    end([machines[0], machines[2]])


def test_a_new_node_joins_at_the_next_epoch(join_bench: JoinBench) -> None:
    machines = running(elastic(join_bench.job(2, WAIT), 2, 3, timeout=3.0))
    more = join_bench.another(machines[0], index=2)
    more.start()
    until(lambda: more.reports("joined"), "it waits")
    time.sleep(2 * heartbeat_interval(5.0))  # nothing is to happen
    assert not machines[0].events("epoch-ended")
    machines[1].signal(signal.SIGKILL)
    says(machines[0], 1, 0, 2)
    says(more, 1, 1, 2)
    end([machines[0], more])


def test_a_rank_asks_to_be_started_again(join_bench: JoinBench) -> None:
    """Exit code 101 starts an epoch, also without --max-restarts."""
    command = (
        "echo epoch $CLUSTERTOOL_ATTEMPT rank $RANK of $WORLD_SIZE; [ $CLUSTERTOOL_ATTEMPT$RANK = 01 ] && exit 101; "
    )
    machines = elastic(join_bench.job(2, command + "[ $CLUSTERTOOL_ATTEMPT = 0 ] && exec sleep 600; exit 0"), 2, 2)
    assert codes(start(machines)) == [0, 0], [one.lines for one in machines]
    says(machines[1], 1, 1, 2)
    (epoch,) = (one for one in machines[0].events("epoch") if one["attempt"] == 1)
    assert "asks to be started again (exit code 101)" in epoch["cause"]


def test_failures_of_ranks_count_and_changes_of_nodes_do_not(join_bench: JoinBench) -> None:
    """One restart is allowed. A node is lost before it and after it."""
    command = "echo epoch $CLUSTERTOOL_ATTEMPT rank $RANK of $WORLD_SIZE; [ $CLUSTERTOOL_ATTEMPT = 1 ] && exit 7; "
    command += "[ $CLUSTERTOOL_ATTEMPT = 3 ] && exit 7; exec sleep 600"
    machines = running(elastic(join_bench.job(4, command, options={"max_restarts": "1"}), 2, 4))
    machines[3].signal(signal.SIGKILL)
    says(machines[0], 1, 0, 3)  # it fails, and is started again
    says(machines[0], 2, 0, 3)
    machines[2].signal(signal.SIGKILL)
    says(machines[0], 3, 0, 2)  # it fails again: that is one failure too many
    assert codes(machines[:2]) == [7, 7]


def test_a_machine_on_standby_replaces_one_on_which_all_attempts_fail(join_bench: JoinBench) -> None:
    command = "case $PWD in */root1/*) exit 7;; esac; " + WAIT
    machines = elastic(join_bench.job(3, command, options={"max_restarts": "2"}), 2, 2)
    start(machines[:2])
    machines[0].says("rank 0 of 2", 0)
    machines[2].start()
    says(machines[0], 2, 0, 2)
    says(machines[2], 2, 1, 2)
    (epoch,) = (one for one in machines[0].events("epoch") if one["attempt"] == 2)
    assert (epoch["nodes"], epoch["joined"]) == ([0, 2], [2])
    end([machines[2], machines[0], machines[1]])  # which is on standby now


def test_restarts_without_a_later_step_are_counted_over_epochs(join_bench: JoinBench) -> None:
    """From the second failure on the same node on, each restart is an epoch."""
    command = "echo step=$RANK; [ $RANK = 0 ] && exec sleep 600; sleep 0.2; exit 7"
    policy = {"max_restarts": 9, "max_restarts_without_progress": 2}
    machines = elastic(join_bench.job(2, command, toml={"policy": policy}), 2, 2)
    assert codes(start(machines)) == [7, 7], [one.lines for one in machines]
    (ended,) = machines[0].events("ended")
    assert "2 restarts in a row without a later step than step 1 " in ended["reason"]
    assert [one["attempt"] for one in machines[0].events("epoch")] == [0, 2]


def test_a_node_below_the_minimum_ends_the_job(join_bench: JoinBench) -> None:
    machines = running(elastic(join_bench.job(2, WAIT), 2, 2, timeout=4.0))
    machines[1].signal(signal.SIGKILL)
    assert machines[0].wait() == 75
    assert "1 of at least 2 nodes are there" in machines[0].error
    (ended,) = machines[0].events("ended")
    assert (ended["state"], ended["code"]) == ("lost", 75)


def test_the_loss_of_the_coordinator_ends_the_job(join_bench: JoinBench) -> None:
    """Without a store. The others wait for it, and name the command that starts the job again."""
    machines = running(elastic(join_bench.job(3, WAIT), 2, 3, timeout=4.0))
    machines[0].signal(signal.SIGKILL)
    assert codes(machines[1:]) == [75, 75]
    for machine in machines[1:]:
        (ended,) = machine.events("ended")
        assert (ended["state"], ended["code"]) == ("lost", 75)
        assert "run --resume" in machine.reports("error")[0]["fix"], machine.lines


@pytest.mark.chaos
def test_a_supervisor_that_is_frozen_has_no_ranks_when_the_next_epoch_begins(join_bench: JoinBench) -> None:
    """Its guard ends them at the end of the lease. When it runs again, it joins again."""
    machines = running(elastic(join_bench.job(3, WAIT), 2, 3, grow="restart"))
    (rank,) = machines[1].events("started")
    machines[1].signal(signal.SIGSTOP)
    says(machines[0], 1, 0, 2)
    assert not alive(Process(rank["pid"], rank["start"]))
    machines[1].signal(signal.SIGCONT)
    for number, machine in enumerate(machines):
        says(machine, 2, number, 3)
    assert machines[1].events("lease-lost")
    end(machines)


def test_a_node_is_released(join_bench: JoinBench) -> None:
    machines = running(elastic(join_bench.job(3, WAIT), 2, 3))
    command: LeaveCommand = {"type": "leave", "by": "the test"}
    assert supervisor_client.ask(JobPaths.at(str(machines[1].job_dir)), command, 5.0) is not None
    says(machines[0], 1, 0, 2)
    says(machines[2], 1, 1, 2)
    assert machines[1].wait() == 0
    (ended,) = machines[1].events("ended")
    assert (ended["state"], ended["code"]) == ("stopped", 0)
    end([machines[0], machines[2]])


LAST_LINES = """
    trap 'sleep 1; echo saved; exit 0' TERM
    echo epoch $CLUSTERTOOL_ATTEMPT rank $RANK of $WORLD_SIZE
    while :; do sleep 0.2; done
"""


@pytest.mark.parametrize(
    ("number", "code"), [(signal.SIGTERM, 143), pytest.param(signal.SIGINT, 130, marks=pytest.mark.chaos)]
)
def test_a_node_that_is_shut_down_leaves_and_the_others_go_on(join_bench: JoinBench, number: int, code: int) -> None:
    """Its ranks have the grace of the job, and no restart is used. It is not lost: nothing waits for its lease."""
    machines = elastic(join_bench.job(3, LAST_LINES), 2, 3)
    start(machines)
    machines[2].says("epoch 0 rank 2 of 3", 2)
    machines[2].signal(number)
    assert machines[2].wait() == code
    assert "saved" in machines[2].log(2)
    (end,) = machines[2].events("ended")
    assert (end["state"], end["code"], end["reason"].split(" received ")[1][:3]) == ("stopped", code, "SIG")
    assert machines[2].events("left")
    for machine in machines[:2]:
        until(lambda one=machine: len(one.events("started")) == 2, "its ranks start again")  # type: ignore[misc]
    change = machines[0].events("epoch")[1]
    assert (change["left"], change["nodes"]) == ([[2, "released"]], [0, 1])
    assert not machines[0].events("lost")
    stop(machines[0])
    assert codes(machines[:2]) == [143, 143]


def test_a_machine_that_ends_all_its_processes_at_once_has_no_failed_rank(join_bench: JoinBench) -> None:
    """As a shutdown does: the rank gets the signal before its supervisor, and no restart is allowed."""
    machines = running(elastic(join_bench.job(3, WAIT), 2, 3))
    (rank,) = until(lambda: machines[2].events("started"), "its rank has started")
    os.kill(rank["pid"], signal.SIGTERM)
    machines[2].signal(signal.SIGTERM)
    assert machines[2].wait() == 143
    says(machines[0], 1, 0, 2)
    says(machines[1], 1, 1, 2)
    end(machines[:2])


@pytest.mark.parametrize("those", [(1, 2), (0,), (0, 1, 2)], ids=["too many", "the coordinator", "all"])
def test_a_job_of_which_too_little_is_left_ends(join_bench: JoinBench, those: tuple[int, ...]) -> None:
    machines = elastic(join_bench.job(3, LAST_LINES), 2, 3)
    start(machines)
    for rank, machine in enumerate(machines):
        machine.says(f"epoch 0 rank {rank} of 3", rank)
    for node in those:
        machines[node].signal(signal.SIGTERM)
    assert codes(machines) == [143, 143, 143]
    (verdict,) = machines[0].events("verdict")
    assert verdict["state"] == "stopped" and "received SIGTERM" in verdict["reason"]
    assert [len(machine.events("started")) for machine in machines] == [1, 1, 1]


def test_a_stop_between_two_epochs(join_bench: JoinBench) -> None:
    machines = running(elastic(join_bench.job(2, WAIT), 2, 2, timeout=60.0))
    machines[1].signal(signal.SIGKILL)
    until(lambda: machines[0].events("epoch-ended"), "it waits for nodes")
    stop(machines[0])
    assert machines[0].wait() == 143
    (ended,) = machines[0].events("ended")
    assert (ended["state"], ended["reason"]) == ("stopped", "the test")


@pytest.mark.chaos
def test_a_coordinator_without_a_store_does_not_come_back(join_bench: JoinBench) -> None:
    """Its new process would use the numbers of epochs again, and not know which nodes may have ranks."""
    machines = elastic(join_bench.job(2, WAIT), 1, 2, timeout=8.0)
    recorded(machines)
    running(machines)
    machines[0].signal(signal.SIGKILL)
    assert machines[0].wait() == -signal.SIGKILL
    machines[0].start()
    assert codes(machines) == [75, 75]
    assert "has coordinated the job, and its process has died" in machines[0].error
    assert [one["attempt"] for one in machines[0].events("epoch")] == [0]


@pytest.mark.chaos
def test_the_time_limit_of_the_job_counts_between_two_epochs(join_bench: JoinBench) -> None:
    machines = running(elastic(join_bench.job(2, WAIT, options={"timeout": "9s"}), 2, 2, timeout=60.0, grow="restart"))
    machines[1].signal(signal.SIGKILL)
    machines[1].wait()
    began = time.monotonic()
    assert machines[0].wait() == 124 and time.monotonic() - began < 15
    (end,) = machines[0].events("ended")
    assert (end["state"], end["code"]) == ("timeout", 124) and "--timeout 9 s" in end["reason"]


@pytest.mark.chaos
def test_a_time_without_a_laptop_counts_between_two_epochs(join_bench: JoinBench) -> None:
    machines = running(elastic(join_bench.job(2, WAIT, options={"lease": "9s"}), 2, 2, timeout=60.0, grow="restart"))
    machines[1].signal(signal.SIGKILL)
    machines[1].wait()
    assert machines[0].wait() == 143
    (end,) = machines[0].events("ended")
    assert end["state"] == "stopped" and "no laptop was attached" in end["reason"]


def test_a_machine_on_standby_is_released(join_bench: JoinBench) -> None:
    machines = elastic(join_bench.job(3, WAIT), 2, 2)
    recorded(machines)
    start(machines[:2])
    says(machines[0], 0, 0, 2)
    machines[2].start()
    until(lambda: machines[0].events("standby"), "it is on standby")
    how: LeaveCommand = {"type": "leave", "by": "the test"}
    assert supervisor_client.ask(JobPaths.at(str(machines[2].job_dir)), how, 5.0) is not None
    assert machines[2].wait() == 0
    assert [one["why"] for one in machines[2].events("left")] == ["the test"]
    assert [(one["state"], one["code"]) for one in machines[2].events("ended")] == [("stopped", 0)]
    until(lambda: machines[0].events("standby-left"), "the coordinator knows it")
    assert not machines[0].events("epoch-ended")
    end(machines[:2])


def test_a_member_does_not_join_another_job_at_the_coordinators_place(join_bench: JoinBench) -> None:
    """The command was typed again on the machine of the coordinator, while the other one waited for it."""
    machines = running(elastic(join_bench.job(2, WAIT), 1, 2, timeout=30.0))
    machines[0].signal(signal.SIGKILL)
    machines[0].wait()
    owner = replace(machines[0].join.identity, job_id="another-job")
    machines[0].join = replace(machines[0].join, identity=owner)
    machines[0].start()
    assert machines[1].wait() == 75
    assert "is a member of job" in machines[1].error and "another one, another-job" in machines[1].error
    (ended,) = machines[1].events("ended")
    assert (ended["state"], ended["code"]) == ("lost", 75)
    machines[0].signal(signal.SIGTERM)
    assert machines[0].wait() == 143
