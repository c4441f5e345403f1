"""Notifications of jobs: what a real server and a real command get from the coordinator, and that no job notices it."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node import programs as p
from tests.node.harness import Bench, Job, kill, until
from tests.node.joining import JoinBench, codes, start
from tests.node.test_epochs import WAIT, elastic, end, running, says
from tests.node.test_secrets import command_lines_with, environments_with, files_with
from tests.notified import Receiver, command, written


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    server = Receiver()
    yield server
    server.end()


def failed(job: Job) -> list[str]:
    return [event["failed"] for event in job.events(0, "notification") if event["failed"]]


def delay(job: Job) -> float:
    """Seconds from the verdict to the end of the coordinator's node."""
    (verdict,) = job.events(0, "verdict")
    return float(job.ended()["t"] - verdict["t"])


def test_the_end_of_a_job(bench: Bench, receiver: Receiver) -> None:
    job = bench.run(bench.nodes(2, NOTIFY=receiver.address), "true")
    until(lambda: receiver.events == ["end"], "the message")
    text = f"job {job.id}: succeeded with exit code 0: all trainers are done"
    (message,) = receiver.messages
    assert message == {"id": message["id"], "event": "end", "job": job.id, "name": "", "text": text, "code": 0}
    assert [event["id"] for event in job.events(0, "notification")] == [message["id"]]
    assert job.ended(1) and job.events(1, "notification") == [], "only the coordinator sends"


def test_a_restart_and_a_failure(bench: Bench, receiver: Receiver) -> None:
    job = bench.run(bench.nodes(1, NOTIFY=receiver.address), "exit 9", policy={"max_restarts": 1})
    until(lambda: receiver.events == ["restart", "failure"], "both messages")
    restart, failure = receiver.messages
    reason = "trainer 0 on 127.0.0.11 ended with exit code 9"
    assert (restart["text"], restart["code"]) == (f"job {job.id}: attempt 1 begins: {reason}", None)
    assert (failure["text"], failure["code"]) == (f"job {job.id}: failed with exit code 9: {reason}", 9)


def test_a_lost_node_and_a_stop(bench: Bench, receiver: Receiver) -> None:
    nodes = bench.nodes(2, NOTIFY=receiver.address)
    job = bench.run(nodes, p.PLAIN).ready()
    kill(job.process("supervisor", 1))
    until(lambda: receiver.events == ["loss", "failure"], "both messages")
    loss, failure = receiver.messages
    assert loss["text"] == f"job {job.id}: node 127.0.0.12 is lost: the supervisor died"
    assert failure["code"] == 75 and "127.0.0.12" in failure["text"]
    receiver.messages.clear()
    bench.run(bench.nodes(1, NOTIFY=receiver.address), p.PLAIN).ready().stop(code=130)
    until(lambda: receiver.events == ["end"], "the message")
    assert receiver.messages[0]["code"] == 130


def test_a_command_is_no_process_of_the_job(bench: Bench, tmp_path: Path) -> None:
    """It starts before a stop of the job, with a child, and ends after it; neither is ended, or waited for."""
    slow = command(tmp_path, "import subprocess; subprocess.run(['sleep', '3'], check=True)")
    job = bench.run(bench.nodes(1, NOTIFY=slow), "sleep 0.3; exit 9", policy={"max_restarts": 1})
    assert (job.ended()["state"], job.ended()["code"]) == ("failed", 9)
    assert [event["survivors"] for event in job.events(0, "clean")] == [[], []]
    assert delay(job) < 2.0, "the end does not wait for the command"
    until(lambda: [one["event"] for one in written(tmp_path)] == ["restart", "failure"], "both were written")
    assert failed(job) == []


def test_a_server_that_does_not_answer_changes_nothing(bench: Bench, receiver: Receiver) -> None:
    receiver.slow, receiver.status = 4.0, 500
    job = bench.run(bench.nodes(2, NOTIFY=receiver.address), "true")
    assert (job.ended()["state"], job.ended()["code"]) == ("succeeded", 0)
    assert delay(job) < 2.0


def test_the_address_is_in_memory_only(bench: Bench, receiver: Receiver) -> None:
    receiver.status = 500
    nodes = bench.nodes(2, NOTIFY=receiver.address)
    job = bench.run(nodes, p.PLAIN).ready()
    value = receiver.address.encode()

    def nowhere() -> None:
        assert files_with(value, bench.tmp) == [] and files_with(value, bench.home) == []
        assert command_lines_with(value) == [] and environments_with(value) == set()

    nowhere()
    assert receiver.address not in str([node.ask(what, job=job.id) for node in nodes for what in ("status", "jobs")])
    job.stop()
    until(lambda: receiver.methods, "the first try")
    nowhere()
    until(lambda: failed(job), "the warning")
    assert failed(job) == ["the POST has failed (500); tried three times"]
    nowhere()


def test_an_attached_laptop_sends(bench: Bench, receiver: Receiver, tmp_path: Path) -> None:
    (node,) = bench.nodes(1, NOTIFY=receiver.address)
    job = bench.run([node], f"until [ -e {tmp_path}/go ]; do sleep 0.02; done")
    node.ask("attached", job=job.id, laptop="one", notified="")
    (tmp_path / "go").touch()
    (event,) = job.until("notification")
    assert (event["event"], event["laptop"], event["code"]) == ("end", "one", 0)
    time.sleep(0.5)
    assert job.events(0, "verdict") and not job.events(0, "ended"), "the coordinator waits for the confirmation"
    node.ask("attached", job=job.id, laptop="one", notified=event["id"])
    assert (job.ended()["state"], job.ended()["code"]) == ("succeeded", 0)
    time.sleep(0.3)
    assert receiver.methods == [], "no one has sent it: the laptop of this test only claims so"


@pytest.mark.chaos
def test_the_coordinator_sends_after_10_s_what_an_attached_laptop_does_not_confirm(
    bench: Bench, receiver: Receiver
) -> None:
    (node,) = bench.nodes(1, NOTIFY=receiver.address)
    job = bench.run([node], p.PLAIN).ready()
    node.ask("attached", job=job.id, laptop="one", notified="")
    job.stop()
    until(lambda: receiver.events == ["end"], "the message")
    assert 9.0 < delay(job) < 12.0


def test_machines_that_join(join_bench: JoinBench, receiver: Receiver) -> None:
    """It is in their join file. The process of the coordinator stays until the message is sent: an engine ends all then."""
    receiver.slow = 1.0
    machines = join_bench.job(2, "true", cluster={"notify": (receiver.address,)})
    assert codes(start(machines)) == [0, 0], [one.lines for one in machines]
    assert receiver.events == ["end"] and receiver.messages[0]["job"] == machines[0].join.identity.job_id
    (event,) = machines[0].events("notification")
    (ended,) = machines[0].events("ended")
    assert ended["t"] - event["t"] < 1.0, "the record of the end does not wait"
    assert files_with(receiver.address.encode(), join_bench.tmp) == []


def test_the_epochs_of_an_elastic_job(join_bench: JoinBench, receiver: Receiver, tmp_path: Path) -> None:
    """A command that runs while an epoch ends and the next one begins is not ended, and delays neither."""
    slow = tuple(command(tmp_path, "time.sleep(8)"))
    machines = running(elastic(join_bench.job(2, WAIT, cluster={"notify": slow}), 1, 2, timeout=4.0))
    machines[1].signal(signal.SIGKILL)
    says(machines[0], 1, 0, 1)
    (lost,) = machines[0].events("lost")
    began = machines[0].events("started")[-1]["t"]
    assert began - lost["t"] < 20.0
    until(lambda: [one["event"] for one in written(tmp_path)] == ["loss", "restart"], "both were written")
    end(machines[:1])
    assert [one["event"] for one in written(tmp_path)] == ["loss", "restart", "end"]
    assert [one["failed"] for one in machines[0].events("notification")] == [""] * 3


def test_an_elastic_job_that_ends_between_two_epochs(join_bench: JoinBench, receiver: Receiver) -> None:
    machines = running(elastic(join_bench.job(2, WAIT, cluster={"notify": (receiver.address,)}), 2, 2, timeout=3.0))
    machines[1].signal(signal.SIGKILL)
    assert machines[0].wait() == 75
    assert receiver.events == ["loss", "failure"]
    assert receiver.messages[1]["code"] == 75 and "1 of at least 2 nodes" in receiver.messages[1]["text"]
