"""Histories of machines that join: what the coordinator decides after each event."""

from __future__ import annotations

from dataclasses import dataclass, field

import pytest

from clustertool.errors import (
    ClustertoolError,
    DispatchError,
    Interrupted,
    NodeLost,
    PortInUse,
    PreflightError,
    Several,
    Terminated,
    UsageError,
)
from clustertool.model.joining import join_decisions as decisions
from clustertool.model.joining.join_offers import Offer
from clustertool.model.wire.coordinator_messages import Incarnation


def offer(number: int, index: int | None = -1, **fields: object) -> Offer:
    """The offer of machine `number`: 10.0.0.<number>, index `number` unless another one is given."""
    sender = Incarnation(f"boot{number}", 100 + number, 1)
    made = Offer(number if index == -1 else index, 3, "1.0", "c0de", sender, f"10.0.0.{number}", f"node{number}")
    return made._replace(**fields)  # type: ignore[arg-type]


@dataclass
class History:
    """A coordinator of a job of three nodes, and all that it has done."""

    state: decisions.JoinState = field(default_factory=lambda: decisions.JoinState(offer(0), 600.0))
    now: float = 0.0

    def __post_init__(self) -> None:
        self.after(decisions.Offered(0, self.state.own, self.now))

    def after(self, event: decisions.Event) -> tuple[decisions.Action, ...]:
        self.state, actions = decisions.decide(self.state, event)
        return actions

    def offers(self, connection: int, one: Offer | None = None) -> tuple[decisions.Action, ...]:
        return self.after(decisions.Offered(connection, one or offer(connection), self.now))

    def all_answer(self, *but: int) -> tuple[decisions.Action, ...]:
        """All answer the present round, in the order of their connections."""
        actions: tuple[decisions.Action, ...] = ()
        for member in sorted(self.state.members):
            if member.connection not in but:
                assert actions == (), "acts before all have answered"
                actions = self.after(decisions.Done(member.connection, self.state.round))
        return actions

    def gathered(self) -> History:
        self.offers(1)
        self.offers(2)
        return self

    def placing(self) -> History:
        self.gathered().all_answer()
        self.after(decisions.Planned())
        assert self.state.phase == "placing"
        return self


def refusal(actions: tuple[decisions.Action, ...]) -> ClustertoolError:
    (action,) = actions
    assert isinstance(action, decisions.Refuse)
    return action.error


def aborted(actions: tuple[decisions.Action, ...]) -> ClustertoolError:
    (action,) = actions
    assert isinstance(action, decisions.Abort)
    return action.error


def test_a_job_starts() -> None:
    history = History()
    assert history.offers(2) == (decisions.Wait(2, (1,)),)
    assert history.offers(1) == (decisions.Wait(3, ()), decisions.Number((0, 1, 2)), decisions.Order("probe", 1))
    assert history.all_answer() == (decisions.MakePlan(),)
    assert history.after(decisions.Planned()) == (decisions.Order("place", 2),)
    assert history.all_answer() == (decisions.Order("launch", 3),)
    assert history.all_answer(0) == (decisions.Coordinate(4),)
    assert history.after(decisions.Done(0, 4)) == (decisions.Go(),)
    assert history.state.ended


def test_a_job_of_one_node() -> None:
    alone = offer(0, nnodes=1)
    state, actions = decisions.decide(decisions.JoinState(alone, 600.0), decisions.Offered(0, alone, 0.0))
    assert actions == (decisions.Wait(1, ()), decisions.Number((0,)), decisions.Order("probe", 1))
    state, actions = decisions.decide(state, decisions.Done(0, 1))
    state, actions = decisions.decide(state, decisions.Planned())
    state, actions = decisions.decide(state, decisions.Done(0, 2))
    assert actions == (decisions.Coordinate(3),)


def test_addresses_number_the_machines_without_an_index() -> None:
    """The coordinator is the first, whatever its address; 10.0.0.9 is before 10.0.0.10, and IPv4 before IPv6."""
    history = History(decisions.JoinState(offer(77, 0, nnodes=5), 600.0))
    for connection, address in ((1, "fe80::2%eth0"), (2, "10.0.0.10"), (3, "10.0.0.9"), (4, "node.example")):
        actions = history.offers(connection, offer(connection, None, nnodes=5, address=address))
    assert actions[1] == decisions.Number((0, 3, 2, 1, 4))


def test_machines_of_one_address_are_numbered_by_their_processes() -> None:
    history = History()
    later, earlier = (offer(1, None, sender=Incarnation("b", pid, 1)) for pid in (20, 10))
    history.offers(1, later)
    assert history.offers(2, earlier)[1] == decisions.Number((0, 2, 1))


def test_an_index_is_kept_and_the_others_fill_the_gaps() -> None:
    history = History()
    history.offers(1, offer(1, None))
    assert history.offers(2, offer(2, 1))[1] == decisions.Number((0, 2, 1))


def test_missing_indices() -> None:
    history = History()
    assert decisions.missing(history.state) == (1, 2)
    history.offers(2)
    assert decisions.missing(history.state) == (1,)
    other = History()
    assert other.offers(1, offer(1, None)) == (decisions.Wait(2, ()),)


def test_join_timeout_names_the_missing() -> None:
    history = History()
    history.offers(2)
    assert history.after(decisions.Tick(599.9)) == ()
    error = aborted(history.after(decisions.Tick(600.0)))
    assert isinstance(error, NodeLost) and error.code == 75
    text = "2 of 3 nodes have joined within 600 s: node0 (10.0.0.0) and node2 (10.0.0.2); missing: index 1"
    assert error.what == text


def test_a_machine_of_an_engine_that_leaves_does_not_come_again() -> None:
    history = History(decisions.JoinState(offer(0), 600.0, ("a", "b", "c")))
    history.offers(1)
    ended = Terminated("received SIGTERM")
    assert aborted(history.after(decisions.Left(1, ended))) is ended


def test_join_timeout_names_the_nodes_of_an_engine() -> None:
    history = History(decisions.JoinState(offer(0), 120.0, ("gpu01", "gpu02", "gpu03"), "slurm"))
    history.offers(2)
    assert history.after(decisions.Tick(119.9)) == ()
    error = aborted(history.after(decisions.Tick(120.0)))
    assert (error.code, error.what) == (75, "2 of 3 nodes have joined within 120 s; missing: gpu02")
    assert "slurm.out" in error.fix and "JOIN_TIMEOUT" in error.fix


def test_join_timeout_without_indices() -> None:
    history = History()
    history.offers(1, offer(1, None))
    error = aborted(history.after(decisions.Tick(601.0)))
    assert error.what.endswith("node0 (10.0.0.0) and node1 (10.0.0.1)")


def test_the_time_counts_from_the_first_machine() -> None:
    history = History(now=1000.0)
    assert history.after(decisions.Tick(1599.0)) == ()
    assert aborted(history.after(decisions.Tick(1600.0))).code == 75


def test_no_join_timeout_after_all_have_joined() -> None:
    assert History().gathered().after(decisions.Tick(1e6)) == ()


def test_an_index_twice_is_refused_while_the_first_is_connected() -> None:
    history = History()
    history.offers(1)
    error = refusal(history.offers(5, offer(5, 1)))
    assert isinstance(error, UsageError) and error.code == 64
    what = "index 1 is in use: node1 (10.0.0.1), process 101, has joined as it and is connected"
    assert error.what == what
    assert "is the coordinator" in refusal(history.offers(6, offer(6, 0))).what


def test_a_newer_incarnation_replaces_one_that_is_gone() -> None:
    history = History()
    history.offers(1)
    assert history.after(decisions.Gone(1, "silent for 10 s")) == (decisions.Wait(1, (1, 2)),)
    assert history.offers(2, offer(1, sender=Incarnation("boot1", 999, 9))) == (decisions.Wait(2, (2,)),)


def test_the_same_process_may_connect_again() -> None:
    history = History()
    history.offers(1)
    assert history.offers(2, offer(1)) == (decisions.Drop(1), decisions.Wait(2, (2,)))
    assert history.after(decisions.Gone(1, "closed")) == ()


def test_containers_of_one_machine_may_have_the_same_pid_and_start() -> None:
    history = History()
    assert history.offers(1, offer(1)._replace(sender=history.state.own.sender)) == (decisions.Wait(2, (2,)),)
    history.offers(2, offer(2)._replace(sender=history.state.own.sender))
    assert history.state.phase == "probing" and [one.connection for one in history.state.members] == [0, 1, 2]


def test_machines_that_are_connected_and_never_answer() -> None:
    history = History().gathered()
    history.after(decisions.Done(0, 1))
    assert history.after(decisions.Tick(1000.0)) == ()
    history.after(decisions.Done(2, 1))
    assert history.after(decisions.Tick(1179.0)) == ()
    error = aborted(history.after(decisions.Tick(1180.0)))
    assert error.code == 75 and error.what == "no answer to `probe` for 180 s from node1 (10.0.0.1)"
    placing = History().placing()
    placing.after(decisions.Tick(0.0))
    assert placing.after(decisions.Tick(9999.0)) == (), "a large workspace takes long"


def test_a_second_offer_on_a_connection_counts_for_nothing() -> None:
    history = History()
    history.offers(1)
    assert history.offers(1) == () and history.offers(1, offer(2)) == ()
    assert decisions.missing(history.state) == (2,)


def test_after_the_plan_a_newcomer_is_one_too_many() -> None:
    history = History().gathered()
    error = refusal(history.offers(9, offer(9, None)))
    assert (
        error.code == 64 and error.what == "the job has all its 3 nodes (node0, node1 and node2); node9 is one too many"
    )
    assert refusal(history.offers(9, offer(1, sender=Incarnation("boot1", 999, 9)))).code == 64
    history.after(decisions.Signalled(Interrupted("Ctrl+C")))
    assert refusal(history.offers(9, offer(9))).code == 64


def test_another_number_of_nodes_is_refused() -> None:
    error = refusal(History().offers(1, offer(1, nnodes=4)))
    assert error.code == 64
    assert error.what == "node1 was started for 4 nodes, the coordinator node0 (10.0.0.0) for 3"


def test_another_code_is_refused() -> None:
    error = refusal(History().offers(1, offer(1, version="1.1", code="ffffffffff")))
    assert isinstance(error, PreflightError) and error.code == 69
    assert error.what == (
        "node1 has clustertool 1.1 (code ffffffff), the coordinator node0 (10.0.0.0) has clustertool 1.0 (code c0de)"
    )


def test_a_machine_may_leave_before_the_plan() -> None:
    history = History()
    history.offers(1)
    assert history.after(decisions.Left(1, Interrupted("Ctrl+C on node1"))) == (decisions.Wait(1, (1, 2)),)
    history.offers(1)
    assert history.state.phase == "gathering"


@pytest.mark.parametrize("phase", ["probing", "planning", "placing", "launching", "leading"])
def test_the_job_ends_with_each_machine_after_that(phase: str) -> None:
    def at() -> History:
        history = History().gathered()
        while history.state.phase != phase:
            if history.state.phase == "planning":
                history.after(decisions.Planned())
            else:
                history.all_answer(*([0] if history.state.phase == "launching" else []))
        return history

    lost = aborted(at().after(decisions.Gone(1, "closed by the other side")))
    assert lost.code == 75 and "node1 (10.0.0.1) was lost before the job started: closed" in lost.what
    interrupted = Interrupted("Ctrl+C on node1")
    assert aborted(at().after(decisions.Left(1, interrupted))) is interrupted
    mine = Interrupted("Ctrl+C")
    history = at()
    assert aborted(history.after(decisions.Signalled(mine))) is mine
    assert history.state.ended and history.after(decisions.Done(1, history.state.round)) == ()


def test_ctrl_c_at_the_coordinator_while_it_waits() -> None:
    assert aborted(History().after(decisions.Signalled(Interrupted("Ctrl+C")))).code == 130


def test_errors_of_all_machines_together() -> None:
    history = History().gathered()
    assert history.after(decisions.Failed(2, 1, PreflightError("no room"))) == ()
    assert history.after(decisions.Done(0, 1)) == ()
    error = aborted(history.after(decisions.Failed(1, 1, PreflightError("no nic", node="other"))))
    assert isinstance(error, Several) and error.code == 69
    assert [(one.node, one.what) for one in error.errors] == [("node2", "no room"), ("other", "no nic")]


def test_no_plan() -> None:
    history = History().gathered()
    history.all_answer()
    error = UsageError("no")
    assert aborted(history.after(decisions.Planned(error))) is error


def test_a_port_that_was_taken_is_planned_again() -> None:
    history = History().placing()
    history.after(decisions.Failed(1, 2, PortInUse("port 1 is in use")))
    assert history.after(decisions.Done(0, 2)) == ()
    assert history.after(decisions.Done(2, 2)) == (decisions.Order("undo", 3),)
    assert history.all_answer() == (decisions.Order("probe", 4),)
    assert history.all_answer() == (decisions.MakePlan(),)
    history.after(decisions.Planned())
    assert history.all_answer() == (decisions.Order("launch", 6),)


def test_not_again_for_ever() -> None:
    history = History().placing()
    for _ in range(4):
        for connection in range(3):
            history.after(decisions.Failed(connection, history.state.round, PortInUse("taken")))
        history.all_answer()
        history.all_answer()
        history.after(decisions.Planned())
    history.after(decisions.Done(0, history.state.round))
    history.after(decisions.Done(1, history.state.round))
    assert aborted(history.after(decisions.Failed(2, history.state.round, PortInUse("taken")))).code == 69


def test_not_again_for_other_errors() -> None:
    history = History().placing()
    history.after(decisions.Failed(0, 2, PortInUse("taken")))
    history.after(decisions.Failed(1, 2, PreflightError("full")))
    assert isinstance(aborted(history.after(decisions.Done(2, 2))), Several)


def test_the_coordinators_supervisor_fails() -> None:
    history = History().placing()
    history.all_answer()
    history.all_answer(0)
    assert history.state.phase == "leading"
    assert aborted(history.after(decisions.Failed(0, history.state.round, PreflightError("no port")))).node == "node0"


def test_answers_of_an_earlier_round_and_of_strangers_count_for_nothing() -> None:
    history = History().gathered()
    history.all_answer()
    history.after(decisions.Planned())
    assert (
        history.after(decisions.Done(1, 1)) == () and history.after(decisions.Failed(1, 1, PreflightError("old"))) == ()
    )
    assert history.after(decisions.Done(8, 2)) == () and history.after(decisions.Gone(8, "closed")) == ()
    assert history.after(decisions.Done(1, 2)) == () and history.after(decisions.Done(1, 2)) == ()
    assert history.state.answered == (1,)


def test_machines_without_the_workspace_fetch_it() -> None:
    history = History().gathered()
    history.all_answer()
    assert history.after(decisions.Planned(fetch=True)) == (decisions.Order("relay", 2),)
    assert history.all_answer() == (decisions.Order("fetch", 3),)
    assert history.all_answer() == (decisions.Order("place", 4),)


def test_a_workspace_that_does_not_arrive() -> None:
    history = History().gathered()
    history.all_answer()
    history.after(decisions.Planned(fetch=True))
    history.all_answer()
    history.after(decisions.Failed(1, 3, DispatchError("nothing has come")))
    history.after(decisions.Done(0, 3))
    assert aborted(history.after(decisions.Done(2, 3))).code == 74


def test_a_workspace_that_the_laptop_sends_later() -> None:
    """The plan is made; nothing more happens until node 0 has the workspace. A machine that is lost meanwhile ends the job."""
    history = History().gathered()
    history.all_answer()
    assert history.after(decisions.Planned(later=True)) == () and history.state.phase == "awaiting"
    assert history.after(decisions.Tick(10_000.0)) == (), "as long as it takes"
    lost = decisions.decide(history.state, decisions.Gone(1, "closed"))[1]
    assert isinstance(lost[0], decisions.Abort) and isinstance(lost[0].error, NodeLost)
    (order,) = history.after(decisions.Planned(fetch=True))
    assert isinstance(order, decisions.Order) and order.kind == "relay"
