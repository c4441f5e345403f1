"""Epochs and leases with real supervisors: who may have ranks, until when, and what the next epoch has to wait for."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from clustertool.model.paths import JobPaths
from clustertool.node.jobs import supervisor_client
from clustertool.node.system.process_clock import boottime
from clustertool.node.system.tls_link import TlsLink, context, dial
from tests.node import programs as p
from tests.node.cable import CableOf
from tests.node.harness import Bench, Job, Process, alive, kill, state, until
from tests.node.members import Members

LEASE = 4.0
SLACK = 1.0  # seconds that a loaded machine needs for what takes 0.1 s
# Each rank of an epoch waits for a file of this epoch, and ends well then.
WAITS = "echo pid $$; echo ready $CLUSTERTOOL_ATTEMPT; until [ -e go$CLUSTERTOOL_ATTEMPT ]; do sleep 0.2; done"
Start = Callable[..., Members]


@pytest.fixture
def members(bench: Bench) -> Iterator[Start]:
    """Start the processes of a job of so many nodes. job: one that is placed already."""
    made: list[Members] = []

    def start(job: Job) -> Members:
        made.append(Members(job.place(), LEASE))
        return made[-1]

    yield start
    for one in made:
        one.end()


def planned(bench: Bench, nodes: int, program: Any = WAITS) -> Job:
    return bench.job(bench.nodes(nodes, LOSS_TIMEOUT=LEASE), program)


def ready(job: Job, epoch: int, *nodes: int) -> list[Process]:
    """The ranks of an epoch on these nodes. Rank and node have the same number here."""

    def started(node: int) -> list[Process]:
        found = [event for event in job.events(node, "started") if event["attempt"] == epoch]
        return [Process(event["pid"], event["start"]) for event in found]

    return [until(lambda one=node: started(one), f"rank {node} of epoch {epoch} runs")[0] for node in nodes]  # type: ignore[misc]


def let_go(job: Job, epoch: int, *nodes: int) -> None:
    for node in nodes:
        (job.dir(node) / f"go{epoch}").touch()


def leave(job: Job, node: int) -> None:
    paths = JobPaths.at(str(job.dir(node)))
    answer = supervisor_client.ask(paths, {"type": "leave", "by": "the test"}, 10.0)
    assert answer is not None and answer[0] == {"type": "accepted"}


def when_dead(process: Process) -> float:
    until(lambda: not alive(process), f"{process} is dead")
    return boottime()


def test_three_epochs_in_one_process(bench: Bench, members: Start) -> None:
    """One node is lost, and another one is released. The others go on with new supervisors in the same processes."""
    job = planned(bench, 4)
    group = members(job)
    group.begin(0)
    ranks = ready(job, 0, 0, 1, 2, 3)
    group.kill(3)
    died = boottime()
    results = group.results(0, [0, 1, 2])
    assert [(one["state"], one["code"]) for one in results] == [("next epoch", 75)] * 3
    assert not any(map(alive, ranks))
    end = results[0]["end"]
    assert (end["attempt"], end["left"], end["restarts_used"], end["silent"]) == (0, [], 0, False)
    assert list(end["lost"]) == ["3"] and died - LEASE < end["lost"]["3"] < boottime()
    assert "is lost: the supervisor died" in end["why"]
    assert all(one["end"]["lost"] == {} for one in results[1:])

    group.begin(1, [0, 1, 2])
    ranks = ready(job, 1, 0, 1, 2)
    leave(job, 1)
    results = group.results(1, [0, 1, 2])
    assert [one["end"]["left"] for one in results] == [[1], [1], []], "the coordinator and the node itself know it"
    assert results[0]["end"]["lost"] == {} and not any(map(alive, ranks))

    group.begin(2, [0, 2])
    ready(job, 2, 0, 2)
    let_go(job, 2, 0, 2)
    results += group.results(2, [0, 2])
    assert [(one["state"], one["code"]) for one in results[3:]] == [("succeeded", 0)] * 2

    files = group.all[0].results
    assert len(files[1]["files"]) == len(files[2]["files"]), [one["files"] for one in files]
    kinds = [event["type"] for event in job.events(0) if event["type"] in ("job", "epoch-ended", "verdict", "ended")]
    assert kinds == ["job", "epoch-ended", "job", "epoch-ended", "job", "verdict", "ended"]
    assert [event["type"] for event in job.events(1)][-2:] == ["epoch-ended", "left"]
    assert job.events(1, "left")[0]["why"] == "the test"
    assert not job.events(1, "ended") and [event["attempt"] for event in job.events(0, "epoch-ended")] == [0, 1]
    phases = [event.get("end") for event in job.events(0, "phase") if event["name"] == "ending"]
    assert phases == [None, None, "succeeded"], "an epoch has no outcome of the job"


def test_a_node_without_a_connection_ends_its_ranks_before_it_is_given_up(
    bench: Bench, members: Start, cable_of: CableOf
) -> None:
    job = planned(bench, 3, p.IGNORES_TERM)
    cable = cable_of(job)
    job.place_requests[2]["spec"]["lead"] = job.place_requests[0]["spec"]["lead"]
    group = members(job)
    group.begin(0)
    rank = ready(job, 0, 0, 1, 2)[1]
    cut = boottime()
    cable.pull()
    dead = when_dead(rank)
    lost = job.until("lost", 0)[0]
    assert LEASE - 1.5 < dead - cut < LEASE + SLACK, "its lease began with a beat that was acknowledged"
    results = group.results(0, [0, 1, 2])
    received = results[0]["end"]["lost"]["1"]
    assert dead <= received + LEASE + 0.5, "the next epoch waits until one second after the lease"
    assert lost["ends_by"] == pytest.approx(time.time() - boottime() + received + LEASE, abs=0.5)
    assert [one["end"]["silent"] for one in results] == [False, True, False]
    assert [(one["state"], one["end"]["attempt"]) for one in results] == [("next epoch", 0)] * 3
    (event,) = job.events(1, "lease-lost")
    assert (event["attempt"], event["seconds"]) == (0, LEASE)
    (exit,) = job.events(1, "exited")
    assert (exit["signal"], exit["stopped"]) == (signal.SIGKILL, True)


def test_a_short_cut_has_no_effect(bench: Bench, members: Start, cable_of: CableOf) -> None:
    job = planned(bench, 2)
    cable = cable_of(job)
    group = members(job)
    group.begin(0)
    ready(job, 0, 0, 1)
    for _ in range(3):
        cable.pull()
        time.sleep(LEASE / 2)  # not a wait: how long the cable is out
        cable.plug()
        time.sleep(LEASE / 4)
    let_go(job, 0, 0, 1)
    assert [one["state"] for one in group.results(0, [0, 1])] == ["succeeded"] * 2
    assert not job.events(0, "lost") and not job.events(1, "lease-lost")


@pytest.mark.parametrize("node", [pytest.param(1, marks=pytest.mark.chaos), 0], ids=["a node", "the coordinator"])
def test_the_guard_ends_the_ranks_of_a_frozen_supervisor(bench: Bench, members: Start, node: int) -> None:
    """At the end of the lease, and nothing else: the supervisor goes on later, with the next epoch."""
    job = planned(bench, 2, p.IGNORES_TERM)
    group = members(job)
    group.begin(0)
    ranks = ready(job, 0, 0, 1)
    guard = job.process("guard", node)
    frozen = boottime()
    kill(group.all[node].process, signal.SIGSTOP)
    dead = when_dead(ranks[node])
    assert LEASE - 1.5 < dead - frozen < LEASE + SLACK
    if node == 0:  # its lease was renewed by nothing, too
        assert when_dead(ranks[1]) - frozen < LEASE + SLACK
    until(lambda: boottime() > frozen + LEASE + 3, "the guard could have given the supervisor up")
    assert state(group.all[node].process) == "T" and alive(guard) and not job.events(node, "supervisor-lost")
    kill(group.all[node].process, signal.SIGCONT)
    results = group.results(0, [0, 1])
    assert [one["state"] for one in results] == ["next epoch"] * 2
    assert [event["attempt"] for event in job.events(node, "lease-lost")] == [0]
    (exit,) = job.events(node, "exited")
    assert (exit["signal"], exit["stopped"]) == (signal.SIGKILL, True), "it did not fail"
    group.begin(1)
    ready(job, 1, 0, 1)
    group.kill(1)
    assert group.results(1, [0])[0]["end"]["attempt"] == 1


def test_a_supervisor_that_is_frozen_for_less_keeps_its_ranks(bench: Bench, members: Start) -> None:
    job = planned(bench, 2)
    group = members(job)
    group.begin(0)
    ready(job, 0, 0, 1)
    for node in (1, 0):
        kill(group.all[node].process, signal.SIGSTOP)
        time.sleep(LEASE / 2)  # not a wait: how long it is frozen
        kill(group.all[node].process, signal.SIGCONT)
        time.sleep(LEASE / 4)
    let_go(job, 0, 0, 1)
    assert [one["state"] for one in group.results(0, [0, 1])] == ["succeeded"] * 2


def test_a_program_that_asks_to_be_started_again(bench: Bench, members: Start) -> None:
    """As often as it wants: that is no failure."""
    job = planned(bench, 2, "echo ready; [ $CLUSTERTOOL_ATTEMPT != 2 ] && exit 101; exit 0")
    group = members(job)
    for epoch in range(3):
        group.begin(epoch)
        results = group.results(epoch, [0, 1])
        if epoch < 2:
            assert [one["state"] for one in results] == ["next epoch"] * 2
            assert results[0]["end"]["restarts_used"] == 0 and "asks to be started again" in results[0]["end"]["why"]
    assert [one["state"] for one in results] == ["succeeded"] * 2


def test_restarts_of_ranks_count_in_all_epochs(bench: Bench, members: Start) -> None:
    job = bench.job(bench.nodes(2, LOSS_TIMEOUT=LEASE), f"{WAITS}; exit 3", policy={"max_restarts": 2})
    group = members(job)
    group.begin(0)
    ready(job, 0, 0, 1)
    let_go(job, 0, 1)
    ready(job, 1, 0, 1)
    leave(job, 1)
    end = group.results(0, [0, 1])[0]["end"]
    assert (end["attempt"], end["restarts_used"]) == (1, 1)
    group.begin(2, restarts=1)
    ready(job, 2, 0, 1)
    let_go(job, 2, 1)
    ready(job, 3, 0, 1)
    let_go(job, 3, 1)
    assert [(one["state"], one["code"]) for one in group.results(1, [0, 1])] == [("failed", 3)] * 2
    assert [event["pause"] for event in job.events(0, "restart")] == [1.0, 1.0]


def test_a_stop_that_the_coordinator_does_not_receive_ends_the_job_here(
    bench: Bench, members: Start, cable_of: CableOf
) -> None:
    """A node that goes on to the next epoch would start ranks again that the user has ended."""
    job = planned(bench, 2)
    cable = cable_of(job)
    group = members(job)
    group.begin(0)
    ready(job, 0, 0, 1)
    cable.pull()
    kill(group.all[1].process, signal.SIGTERM)
    assert (group.results(0, [1])[0]["state"], group.results(0, [1])[0]["code"]) == ("stopped", 143)
    assert job.events(1, "ended") and not job.events(1, "epoch-ended")
    assert group.results(0, [0])[0]["state"] == "next epoch"


def test_a_stop_reaches_all(bench: Bench, members: Start) -> None:
    job = planned(bench, 2)
    group = members(job)
    group.begin(0)
    ready(job, 0, 0, 1)
    how = {"type": "stop", "by": "the test", "code": 0, "grace": 3.0, "force": False}
    assert supervisor_client.order(JobPaths.at(str(job.dir(1))), how, 5.0)
    assert [(one["state"], one["code"]) for one in group.results(0, [0, 1])] == [("stopped", 0)] * 2


# -- machines that offer themselves --


class Offer:
    """A machine that waits for the next epoch. messages: of the coordinator; closed: it has ended the connection."""

    def __init__(self, job: Job, sender: list[object], epoch: int = -1) -> None:
        fields = job.start_requests[0].fields
        ctx = context(str(fields["certificate"]), str(fields["key"]), server=False)
        self._wire = TlsLink(dial(*job.plan.coordinator), ctx, server=False, max_header=1 << 16)
        self.messages: list[dict[str, Any]] = []
        self.closed = self._sent = False
        self._hello = {"type": "offer", "sender": sender, "hostname": "n9", "address": "127.0.0.99"}
        self._hello["epoch"] = epoch

    def turn(self) -> "Offer":
        try:
            self.messages += self._wire.turn()
            if self._wire.secure and not self._sent:
                self._sent = True
                self._wire.send(self._hello)
                self._wire.flush()
        except ConnectionError:
            self.closed = True
        return self

    def until(self, kind: str) -> dict[str, Any]:
        found: dict[str, Any] = until(
            lambda: next((one for one in self.turn().messages if one["type"] == kind), None), f"{kind}: {self.messages}"
        )
        return found

    def until_closed(self) -> None:
        until(lambda: self.turn().closed, "the coordinator ends the connection")
        self._wire.close()


def test_an_offer_waits_until_the_epoch_ends(bench: Bench, members: Start) -> None:
    job = planned(bench, 3)
    group = members(job)
    group.begin(0, [0, 1])
    ready(job, 0, 0, 1)
    offer = Offer(job, ["boot", 9, 9])
    assert offer.until("wait") == {"type": "wait", "present": 2, "nnodes": 3, "missing": []}
    offer.until("beat")
    (event,) = job.until("standby", 0)
    assert (event["name"], event["address"]) == ("n9", "127.0.0.99")
    group.kill(1)
    offer.until_closed()
    assert not [one for one in offer.messages if one["type"] == "over"]
    assert group.results(0, [0])[0]["state"] == "next epoch"


def test_an_offer_gets_the_outcome_of_the_job(bench: Bench, members: Start) -> None:
    job = planned(bench, 2, WAITS + "; exit 7")
    group = members(job)
    group.begin(0)
    ready(job, 0, 0, 1)
    offer = Offer(job, ["boot", 9, 9])
    offer.until("wait")
    let_go(job, 0, 0, 1)
    over = offer.until("over")
    assert (over["outcome"]["state"], over["outcome"]["code"]) == ("failed", 7)
    offer.until_closed()
    assert [one["code"] for one in group.results(0, [0, 1])] == [7, 7]


def test_an_offer_begins_an_epoch_if_the_user_wants_that(bench: Bench, members: Start) -> None:
    job = planned(bench, 3)
    group = members(job)
    group.begin(0, [0, 1], grow="restart")
    ready(job, 0, 0, 1)
    offer = Offer(job, ["boot", 9, 9])
    offer.until_closed()
    results = group.results(0, [0, 1])
    assert [one["end"]["why"] for one in results] == ["n9 joins"] * 2 and results[0]["end"]["lost"] == {}


def test_a_member_that_offers_itself_again_is_not_waited_for(bench: Bench, members: Start, cable_of: CableOf) -> None:
    """Its lease has ended without a connection, and the coordinator has given it up."""
    slow = "trap 'sleep 4; exit' TERM; echo pid $$; echo ready; while :; do sleep 0.2; done"
    job = planned(bench, 2, p.one_each(slow, p.PLAIN))
    cable = cable_of(job)
    group = members(job)
    group.begin(0)
    ready(job, 0, 0, 1)
    cable.pull()
    assert group.results(0, [1])[0]["end"]["silent"]
    job.until("lost", 0)
    boot = job.events(1, "supervisor")[0]["boot"]
    offer = Offer(job, [boot, *group.all[1].process], epoch=0)
    offer.until_closed()
    assert group.results(0, [0])[0]["end"]["lost"] == {}


def test_an_offer_that_a_member_sent_before_the_epoch_proves_nothing(bench: Bench, members: Start) -> None:
    """A connection that broke may bring it late."""
    job = planned(bench, 2)
    group = members(job)
    group.begin(3)
    ready(job, 3, 0, 1)
    boot = job.events(1, "supervisor")[0]["boot"]
    Offer(job, [boot, *group.all[1].process], epoch=2).until("wait")
    let_go(job, 3, 0, 1)
    assert [one["state"] for one in group.results(0, [0, 1])] == ["succeeded"] * 2
