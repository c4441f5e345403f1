"""A stop proves itself on its node, however often and at whatever moment it is asked for."""

from __future__ import annotations

import signal
import threading
import time
from typing import Any

import pytest

from clustertool.errors import NotFound
from tests.node import programs as p
from tests.node.harness import Bench, Job, alive, kill

CLEAN = {"state": "clean", "survivors": []}
ALREADY = {"state": "ended already", "survivors": []}


def test_obedient(bench: Bench) -> None:
    """TERM is enough, and the grace is not waited for; one node's stop ends the job on all of them."""
    job = bench.run(bench.nodes(3), p.SAYS_BYE, per_node=2).ready()
    start = time.monotonic()
    assert job.stop(1, grace=60.0, by="Ctrl+C", code=130) == CLEAN
    assert time.monotonic() - start < 10
    for node in range(3):
        outcome = job.ended(node)
        assert (outcome["state"], outcome["code"], outcome["reason"]) == ("stopped", 130, "Ctrl+C")
    assert [job.log(rank) for rank in range(6)] == [b"ready\nbye\n"] * 6
    assert {event["code"] for node in range(3) for event in job.events(node, "exited")} == {0}


def test_nothing_lives_when_the_answer_comes(bench: Bench) -> None:
    job = bench.run(None, p.SETSID, per_node=3).ready()
    assert job.stop(grace=0.1) == CLEAN
    assert not job.living()


def test_second_stop_hurries(bench: Bench) -> None:
    """Ctrl+C twice: the first is still in its grace, the second kills now; both are answered."""
    job = bench.run(None, p.IGNORES_TERM).ready()
    answers: list[Any] = []
    first = threading.Thread(target=lambda: answers.append(job.stop(grace=60.0)))
    first.start()
    job.until("stopping")
    assert job.stop(client=job.nodes[0].open(), grace=60.0, force=True) == CLEAN
    first.join(60)
    assert answers == [CLEAN]


def test_the_grace_of_a_stop_counts_on_all_nodes(bench: Bench) -> None:
    """It reaches one node, and the coordinator passes it on: a longer one than that of the job, and then none at all."""
    job = bench.run(bench.nodes(3, GRACE=1), p.IGNORES_TERM).ready()
    first = threading.Thread(target=lambda: job.stop(1, client=job.nodes[1].open(), grace=60.0))
    first.start()
    for node in range(3):
        job.until("stopping", node)
    began = time.monotonic()
    while time.monotonic() - began < 2.0:  # twice the grace of the job
        assert not any(job.events(node, "clean") for node in range(3))
        time.sleep(0.1)
    job.stop(2, grace=60.0, force=True)
    first.join(60)
    for node in range(3):
        assert job.ended(node)["state"] == "stopped"
    assert time.monotonic() - began < 30


def test_two_at_once(bench: Bench) -> None:
    """Two laptops, one job: each gets a true answer, the job ends once."""
    job = bench.run(bench.nodes(2), p.IGNORES_TERM).ready()
    clients = [job.nodes[node].open() for node in (0, 0, 1, 1)]
    answers: list[Any] = [None] * 4

    def ask(number: int) -> None:
        answers[number] = job.stop(client=clients[number], grace=0.2)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(answer in (CLEAN, ALREADY) for answer in answers) and CLEAN in answers
    for node in range(2):
        assert [event["type"] for event in job.events(node)].count("ended") == 1
        assert not job.events(node, "supervisor-lost")


def test_after_the_end(bench: Bench) -> None:
    job = bench.run(None, "true")
    job.ended()
    job.gone()
    before = job.events()
    assert job.stop() == ALREADY
    assert job.events() == before
    assert job.nodes[0].ask("jobs")["jobs"][0]["state"] == "succeeded"


def test_while_it_ends_by_itself(bench: Bench) -> None:
    """A stop at any moment of the last moments is answered truly and writes nothing after the last word."""
    for delay in (0.0, 0.005, 0.01, 0.02, 0.04):
        job = bench.run(bench.nodes(1), "echo ready; sleep 0.05").ready()
        time.sleep(0.04 + delay)  # not a wait: the moments
        assert job.stop() in (CLEAN, ALREADY)
        job.gone()
        assert job.events()[-1]["type"] == "ended"
        assert not job.events(0, "supervisor-lost")


def test_placed_and_never_started(bench: Bench) -> None:
    job = bench.job(bench.nodes(2), "true").place()
    assert job.stop() == ALREADY
    listed = job.nodes[0].ask("jobs")["jobs"][0]
    assert (listed["state"], listed["start"]) == ("starting", "placed")
    assert [event["type"] for event in job.nodes[0].ask("status", job=job.id)["events"]] == ["job"]
    with pytest.raises(NotFound, match="never started"):
        job.follow()
    for node in range(2):
        job.nodes[node].ask("unplace", job_dir=str(job.dir(node)), token=job.token)
        assert not job.dir(node).exists()
    assert job.nodes[0].ask("jobs")["jobs"] == []
    job.nodes[0].ask("unplace", job_dir=str(job.dir()), token=job.token)  # once more is no error


def test_started_on_one_node_only(bench: Bench) -> None:
    """The start failed on node 1: node 0's supervisor, which coordinates, does not wait for it when it has to stop."""
    job = bench.job(bench.nodes(2, LOSS_TIMEOUT=60), p.PLAIN).place()
    job.nodes[0].client.agent.ask(job.start_requests[0])
    start = time.monotonic()
    assert job.stop(force=True) == CLEAN
    job.gone()
    assert time.monotonic() - start < 20
    assert job.ended()["state"] == "stopped"


def test_coordinator_is_gone(bench: Bench) -> None:
    """A stop of a node whose coordinator does not answer any more is done there and then."""
    job = bench.run(bench.nodes(2, LOSS_TIMEOUT=60), p.PLAIN).ready()
    for kind in ("supervisor", "guard"):
        kill(job.process(kind), signal.SIGSTOP)
    assert job.stop(1) == CLEAN
    job.until("ended", 1)
    assert job.ended(1)["state"] == "stopped"
    assert job.stop(0, grace=0.1) == CLEAN


def test_the_coordinator_learns_of_it_later(bench: Bench) -> None:
    """Node 1 was stopped and has gone while the coordinator was frozen: its last words were sent and count."""
    job = bench.run(bench.nodes(2, LOSS_TIMEOUT=60), p.PLAIN).ready()
    kill(job.process("supervisor"), signal.SIGSTOP)
    assert job.stop(1) == CLEAN
    job.until("ended", 1)
    kill(job.process("supervisor"), signal.SIGCONT)
    assert job.ended()["state"] == "stopped"
    job.gone()


def test_others_are_not_touched(bench: Bench) -> None:
    """The same id below another ROOT_DIR, and another job next to it."""
    nodes = bench.nodes(1)
    stopped = bench.run(nodes, p.PLAIN, id="same").ready()
    concurrent = bench.run(nodes, p.PLAIN, id="same-too").ready()
    other_place = bench.run(bench.nodes(1), p.PLAIN, id="same").ready()
    assert stopped.stop() == CLEAN
    for job in (concurrent, other_place):
        assert not job.events(0, "stopping")
        assert alive(job.rank()) and alive(job.process("supervisor")) and alive(job.process("guard"))
        assert job.stop() == CLEAN


@pytest.mark.chaos
def test_two_nodes_of_one_machine(bench: Bench) -> None:
    """A node ends its own processes and not those of its neighbour, which here is deaf to the coordinator's word for a while.

    The stop does not wait for that for ever, and leaves the coordinator in its place: it has still to tell the neighbour.
    """
    job = bench.run(bench.nodes(2, LOSS_TIMEOUT=30), p.PLAIN).ready()
    kill(job.process("supervisor", 1), signal.SIGSTOP)
    assert job.stop(0, grace=0.1) == {**CLEAN, "waits": True}
    assert alive(job.rank(1)) and not alive(job.rank(0))
    kill(job.process("supervisor", 1), signal.SIGCONT)
    assert job.ended(1)["state"] == "stopped"


def _clean(job: Job, **how: Any) -> dict[str, Any]:
    return job.nodes[0].ask("clean", **{"job": job.id, "exact": True, **how})


def test_clean(bench: Bench) -> None:
    """Running jobs stay; a dry run removes nothing; a directory goes with all that programs have made of it."""
    program = """
        mkdir -p a/b; echo x > a/b/c; chmod 0 a/b/c a/b; chmod 500 a; ln -s /etc link
        echo ready; until [ -e go ]; do sleep 0.2; done
    """
    job = bench.run(None, program).ready()
    assert _clean(job) == {"re": _clean(job)["re"] - 1, "removed": [], "running": [job.id], "freed": 0, "kept": {}}
    (job.dir() / "go").touch()
    job.ended()
    job.gone()
    assert _clean(job, older_than=3600)["removed"] == []
    assert _clean(job, dry=True)["removed"] == [job.id] and job.dir().exists()
    answer = _clean(job)
    assert answer["removed"] == [job.id] and answer["freed"] > 100
    assert not job.dir().exists()
