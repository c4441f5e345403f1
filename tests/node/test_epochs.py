"""Elastic jobs: nodes that come and go, epochs, and how such a job ends."""

from __future__ import annotations

import signal
from dataclasses import replace
from typing import TYPE_CHECKING

from clustertool.model.config.elastic_settings import ElasticSettings
from clustertool.model.job.state_names import StartReason
from clustertool.model.paths import JobPaths
from clustertool.node.jobs import supervisor_client
from clustertool.node.jobs.records import Record
from tests.node.harness import until
from tests.node.joining import JoinBench, Machine, codes, start

if TYPE_CHECKING:
    from clustertool.model.wire.supervisor_messages import StopCommand

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


def test_a_lost_node_starts_an_epoch(join_bench: JoinBench) -> None:
    machines = elastic(join_bench.job(3, WAIT), 2, 3)
    start(machines)
    for rank, machine in enumerate(machines):
        machine.says(f"epoch 0 rank {rank} of 3", rank)
    machines[1].signal(signal.SIGKILL)
    machines[0].says("epoch 1 rank 0 of 2", 0)
    machines[2].says("epoch 1 rank 1 of 2", 1)
    machines[0].signal(signal.SIGTERM)
    assert codes([machines[0], machines[2]]) == [143, 143]
