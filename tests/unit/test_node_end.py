"""How a supervisor ends on its node: what it records, and whether the node takes part in the next epoch."""

from __future__ import annotations

import math
from typing import Any

import pytest

from clustertool.errors import UsageError
from clustertool.model.elastic.epochs import EpochEnd
from clustertool.model.job.outcome import Outcome
from clustertool.model.job.state_names import JobState
from clustertool.node.supervisor.control_socket import UserRequests
from clustertool.node.supervisor.coordinator.coordinator_link import CoordinatorLink, require_may_leave
from clustertool.node.supervisor.guard import LeaseWatch
from clustertool.node.supervisor.supervisor import NodeEnd, node_end
from clustertool.node.system.process_clock import boottime

NEXT = Outcome(JobState.NEXT_EPOCH, 75, "tool", "node n2 is lost: it is off")
DONE = Outcome(JobState.SUCCEEDED, 0, "job", "all trainers are done")
STOP = UserRequests(by="the user", code=143)


class Coordinator(CoordinatorLink):
    def epoch_end(self, outcome: Outcome) -> EpochEnd:
        return EpochEnd(4, outcome.reason, {2: 100.0}, (3,), 1)


def spec(node: int = 0, **more: Any) -> Any:
    return {"node": node, "name": f"n{node}", "job": "J", "lead": {"node": 0}, **more}


def end(outcome: Outcome | None, requests: UserRequests | None = None, *survivors: str, node: int = 0) -> NodeEnd:
    return node_end(outcome, requests or UserRequests(), survivors, Coordinator(), spec(node))


def kinds(found: NodeEnd) -> list[str]:
    return [kind for kind, _ in found.events]


def test_an_epoch_that_ends_has_no_outcome_of_the_job() -> None:
    found = end(NEXT)
    assert found.outcome == NEXT and found.epoch == EpochEnd(4, NEXT.reason, {2: 100.0}, (3,), 1)
    assert found.events == (("epoch-ended", {"attempt": 4, "why": NEXT.reason}),)


def test_a_released_node_knows_it() -> None:
    found = end(NEXT, UserRequests(leave_by="inv shrink"), node=1)
    assert found.epoch is not None and found.epoch.left == (1, 3)
    assert found.events[1:] == (("left", {"why": "inv shrink"}),)


def test_the_end_of_the_job_is_stronger_than_a_release() -> None:
    found = end(DONE, UserRequests(leave_by="inv shrink"))
    assert (found.outcome, found.epoch, kinds(found)) == (DONE, None, ["ended"])


@pytest.mark.parametrize("node", [0, 1])
def test_a_stop_ends_the_job_here_also_where_the_coordinator_begins_an_epoch(node: int) -> None:
    found = end(NEXT, STOP, node=node)
    assert found.outcome is not None and found.epoch is None
    assert (found.outcome.state, found.outcome.code, found.outcome.reason) == (JobState.STOPPED, 143, "the user")
    assert kinds(found) == (["ended"] if node else ["verdict", "ended"])


def test_a_stop_does_not_replace_another_outcome() -> None:
    assert end(DONE, STOP).outcome == DONE


def test_a_node_with_processes_that_cannot_be_ended_takes_part_in_no_epoch() -> None:
    found = end(NEXT, None, "rank 1 (pid 77)", node=1)
    assert found.outcome is not None and found.epoch is None
    assert (found.outcome.state, found.outcome.code, found.outcome.node) == (JobState.LOST, 75, 1)
    assert found.outcome.reason == "processes on n1 cannot be ended: rank 1 (pid 77)"


def test_a_supervisor_that_was_only_prepared_records_no_end() -> None:
    assert end(None) == NodeEnd(None)


def test_which_nodes_may_leave() -> None:
    with pytest.raises(UsageError, match="job J is not elastic: n1 belongs to it until it ends"):
        require_may_leave(spec(1), coordinates=False)
    with pytest.raises(UsageError, match="n0 coordinates the job, which has no --elastic-server"):
        require_may_leave(spec(elastic={"store": False}), coordinates=True)
    require_may_leave(spec(elastic={"store": True}), coordinates=True)
    require_may_leave(spec(1, elastic={"store": False}), coordinates=False)


# -- what the guard reads of the lease


def test_the_guard_reads_the_newest_end_of_a_lease_in_any_pieces() -> None:
    data = b"ssL100.500\nsL101.000\nssL7"
    for cut in range(len(data)):
        watch = LeaseWatch(math.inf)
        watch.read(data[:cut])
        watch.read(data[cut:])
        assert watch.end == 101.0
        watch.read(b"02.250\nsss")
        assert watch.end == 702.25
        watch.read(b"L9\n")
        assert watch.end == 9.0


def test_a_lease_that_has_ended_is_reported_once_to_the_guard() -> None:
    now = boottime()
    watch = LeaseWatch(now - 0.01)
    assert watch.has_ended() and not watch.has_ended()
    watch.read(b"L%.3f\n" % (now + 100))
    assert not watch.has_ended()
    assert not LeaseWatch(math.inf).has_ended()
