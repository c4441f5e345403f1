"""Gathering for an epoch: when it begins, and with which nodes; histories of the coordinator of an elastic job."""

from __future__ import annotations

import pytest

from clustertool.errors import ClustertoolError, NodeLost, PortInUse, PreflightError, UsageError
from clustertool.model.elastic.epochs import EpochBefore, Gathering, Readiness, pause
from clustertool.model.joining import join_decisions as decisions
from clustertool.model.joining.join_offers import Offer
from clustertool.model.wire.coordinator_messages import Incarnation

WAIT, START, FAIL = Readiness.WAIT, Readiness.START, Readiness.FAIL
FIRST = Gathering(0, 2, 4, 300.0, 100.0)
THREE = FIRST._replace(maximum=3)
LATER = Gathering(
    3,
    2,
    4,
    300.0,
    100.0,
    first=False,
    leases=((9, 111.0),),
    expected=frozenset({0, 1, 2}),
    patience=10.0,
)


@pytest.mark.parametrize(
    ("present", "now", "expected"),
    [
        ((0,), 100.0, WAIT),
        ((0, 1), 399.0, WAIT),
        ((0, 1, 2, 3), 100.0, START),
        ((0, 1, 2, 3, 4), 100.0, START),
        ((0, 1), 400.0, START),
        ((0,), 400.0, FAIL),
    ],
)
def test_the_first_epoch(present: tuple[int, ...], now: float, expected: Readiness) -> None:
    assert FIRST.readiness(present, now) is expected


@pytest.mark.parametrize(
    ("present", "now", "expected"),
    [
        ((0, 1, 2), 110.9, WAIT),  # a lost node may still have ranks
        ((0, 1, 2), 111.0, START),
        ((0, 1, 2, 7), 111.0, START),
        ((0, 1), 120.9, WAIT),  # one that is expected
        ((0, 1), 121.0, START),
        ((0, 7), 121.0, START),
        ((0,), 121.0, WAIT),
        ((0,), 399.0, WAIT),
        ((0,), 400.0, FAIL),
        ((0, 5), 400.0, START),
    ],
)
def test_a_later_epoch(present: tuple[int, ...], now: float, expected: Readiness) -> None:
    assert LATER.readiness(present, now) is expected


def test_ranks_of_a_lost_node_may_live_after_the_timeout() -> None:
    late = LATER._replace(leases=((9, 500.0),))
    assert late.readiness((0, 1, 2), 450.0) is WAIT and late.readiness((0, 1, 2), 500.0) is START


def test_a_lost_node_that_joins_again_has_no_ranks() -> None:
    assert LATER.readiness((0, 1, 2), 105.0) is WAIT and LATER.readiness((0, 1, 2, 9), 105.0) is START
    assert LATER._replace(earliest=106.0).readiness((0, 1, 2, 9), 105.0) is WAIT  # the pause


@pytest.mark.parametrize(
    ("present", "coordinator", "expected"),
    [
        ((2, 1, 0), 0, (0, 1, 2)),
        ((0, 1, 2, 3, 4, 5), 0, (0, 1, 2, 3)),
        ((9, 8, 0, 1, 2), 0, (0, 1, 2, 8)),  # those of the last epoch stay
        ((9, 8, 3, 4, 5), 9, (9, 3, 4, 5)),  # the coordinator is the first node
    ],
)
def test_which_nodes_take_part(present: tuple[int, ...], coordinator: int, expected: tuple[int, ...]) -> None:
    assert LATER.taking_part(present, coordinator) == expected


def test_a_node_on_which_two_attempts_have_failed_is_the_last_one() -> None:
    """If there are others. The coordinator always takes part."""
    after = LATER._replace(blamed=(5, 1, 1))
    assert after.taking_part((9, 0, 1, 2, 8), 0) == (0, 2, 8, 9)
    assert after.taking_part((0, 1, 2), 0) == (0, 1, 2)
    assert after.taking_part((9, 0, 1, 2, 8), 1) == (1, 0, 2, 8)
    assert LATER._replace(blamed=(1, 5, 1)).taking_part((9, 0, 1, 2, 8), 0) == (0, 1, 2, 8)


def test_the_pause_grows() -> None:
    assert [pause(short, 1.0, 30.0) for short in range(7)] == [1, 2, 4, 8, 16, 30, 30]


# -- the coordinator --------------------------------------------------------------------------------------------------


class History:
    """A coordinator of an elastic job of 2 to 3 nodes."""

    def __init__(self, gathering: Gathering = THREE) -> None:
        own = Offer(0, 3, "1.0", "c0de", Incarnation("boot0", 100, 1), "10.0.0.0", "node0")
        self.state = decisions.JoinState(own, 300.0, elastic=gathering)
        self.ordered: tuple[int, ...] = ()  # connections that get orders
        self.after(decisions.Offered(0, own, 100.0))

    def after(self, event: decisions.Event) -> tuple[decisions.Action, ...]:
        self.state, actions = decisions.decide(self.state, event)
        for action in actions:
            if isinstance(action, decisions.Number):
                self.ordered = action.order
        return actions

    def offers(self, connection: int, number: int | None = -1) -> tuple[decisions.Action, ...]:
        sender = Incarnation(f"boot{connection}", 100 + connection, 1)
        node = connection if number == -1 else number
        offer = Offer(node, 3, "1.0", "c0de", sender, f"10.0.0.{connection}", f"node{connection}")
        return self.after(decisions.Offered(connection, offer, 100.0))

    def tick(self, now: float) -> tuple[decisions.Action, ...]:
        return self.after(decisions.Tick(now))

    def done(self, *connections: int) -> tuple[decisions.Action, ...]:
        actions: tuple[decisions.Action, ...] = ()
        for connection in connections:
            assert connection in self.ordered, f"{connection} has got no order"
            actions = self.after(decisions.Done(connection, self.state.round))
        return actions

    def placing(self) -> History:
        self.offers(1)
        self.offers(2)
        assert self.tick(100.0) == (decisions.Wait(3, ()), decisions.Number((0, 1, 2)), decisions.Order("probe", 1))
        self.done(0, 1, 2)
        self.after(decisions.Planned())
        assert self.state.phase == "placing"
        return self


def undone(actions: tuple[decisions.Action, ...]) -> list[str]:
    return [action.kind for action in actions if isinstance(action, decisions.Order)]


def test_the_order_of_nodes_is_that_of_their_numbers() -> None:
    history = History()
    history.offers(5, 7)
    history.offers(6, 2)
    assert history.tick(100.0)[1] == decisions.Number((0, 6, 5))


def test_machines_without_a_number_get_the_free_ones() -> None:
    history = History()
    history.offers(5, None)
    history.offers(6, 1)
    history.tick(100.0)
    assert [one.offer.node for one in history.state.members] == [0, 1, 2]
    assert [one.connection for one in history.state.members] == [0, 6, 5]


def test_those_beyond_the_maximum_wait() -> None:
    history = History()
    for connection in (1, 2, 3):
        history.offers(connection)
    assert history.tick(100.0)[1] == decisions.Number((0, 1, 2))
    assert [one.connection for one in history.state.standby] == [3]
    assert history.offers(4) == (decisions.Drop(4),)  # it comes again when the epoch has begun


def test_a_machine_that_is_lost_while_the_job_is_placed() -> None:
    """The others undo what they have done, and the epoch begins without it."""
    history = History().placing()
    actions = history.after(decisions.Gone(1, "closed"))
    assert undone(actions) == ["undo"] and decisions.OutOfEpoch("node1", "closed") in actions
    assert history.done(0, 2) == () and history.state.phase == "gathering"
    assert history.tick(101.0) == ()  # the maximum is not there
    assert history.tick(400.0)[1] == decisions.Number((0, 2))


def test_a_machine_on_standby_takes_the_place_of_a_lost_one() -> None:
    history = History(THREE._replace(maximum=2))
    history.offers(1)
    history.offers(2)
    history.tick(100.0)
    history.after(decisions.Gone(1, "closed"))
    history.done(0)  # the one on standby has got no order
    assert history.tick(101.0)[1] == decisions.Number((0, 2))


def test_a_machine_on_standby_that_is_gone_does_not_take_part() -> None:
    history = History(THREE._replace(maximum=2))
    history.offers(1)
    history.offers(2)
    history.tick(100.0)
    history.after(decisions.Gone(2, "closed"))
    history.after(decisions.Gone(1, "closed"))
    history.done(0)
    assert history.tick(101.0) == () and [one.connection for one in history.state.members] == [0]


def test_a_machine_that_has_rebooted_offers_again_until_its_old_connection_is_gone() -> None:
    history = History(later()._replace(expected=frozenset({1})))
    history.offers(1)
    sender = Incarnation("another boot", 7, 1)
    offer = Offer(1, 3, "1.0", "c0de", sender, "10.0.0.1", "node1")
    assert history.after(decisions.Offered(9, offer, 100.0)) == (decisions.Drop(9),)
    other = offer._replace(hostname="node8")
    (refuse,) = history.after(decisions.Offered(10, other, 100.0))
    assert isinstance(refuse, decisions.Refuse) and "index 1 is in use" in refuse.error.what
    history.after(decisions.Gone(1, "silent"))
    assert history.after(decisions.Offered(9, offer, 100.0)) == (decisions.Wait(2, ()),)


def test_a_new_machine_does_not_get_the_number_of_a_lost_one() -> None:
    """Its lease would not be waited for, and it would be refused when it comes back."""
    lost = later()._replace(leases=((1, 112.0),), numbers=3, before=EpochBefore(frozenset({0, 1, 2})))
    history = History(lost)
    history.offers(2)
    history.offers(7, None)
    assert history.tick(111.0) == ()
    assert history.tick(112.5)[1] == decisions.Number((0, 2, 7))
    assert [one.offer.node for one in history.state.members] == [0, 2, 3]


def test_a_machine_that_cannot_place_the_job_leaves() -> None:
    history = History().placing()
    history.done(0, 1)
    error = PreflightError("the disk is full", "make room")
    refuse, order, left = history.after(decisions.Failed(2, history.state.round, error))
    assert isinstance(refuse, decisions.Refuse) and refuse.connection == 2 and refuse.error.node == "node2"
    assert isinstance(order, decisions.Order) and order.kind == "undo"
    assert left == decisions.OutOfEpoch("node2", "the disk is full")
    assert [one.connection for one in history.state.members] == [0, 1]


def test_a_port_that_was_taken_meanwhile_keeps_the_machine() -> None:
    history = History().placing()
    history.done(0, 1)
    (undo,) = history.after(decisions.Failed(2, history.state.round, PortInUse("port 1", "x")))  # no node is left out
    assert undone((undo,)) == ["undo"]
    assert len(history.state.members) == 3


def test_too_few_machines_can_place_the_job() -> None:
    """The first epoch ends with their errors."""
    history = History().placing()
    history.done(0)
    history.after(decisions.Failed(1, history.state.round, PreflightError("disk one", "x")))
    (abort,) = history.after(decisions.Failed(2, history.state.round, PreflightError("disk two", "x")))
    assert isinstance(abort, decisions.Abort) and "disk one" in str(abort.error) and "disk two" in str(abort.error)


def test_the_coordinator_cannot_place_the_job() -> None:
    history = History().placing()
    history.done(1, 2)
    (abort,) = history.after(decisions.Failed(0, history.state.round, PreflightError("full", "x")))
    assert isinstance(abort, decisions.Abort)


def test_a_machine_that_does_not_answer_is_dropped() -> None:
    history = History()
    history.offers(1)
    history.offers(2)
    history.tick(100.0)
    history.tick(101.0)
    history.done(0, 1)
    drop, order, left = history.tick(282.0)
    assert drop == decisions.Drop(2) and isinstance(order, decisions.Order) and order.kind == "undo"
    assert left == decisions.OutOfEpoch("node2", "no answer to `probe` for 180 s")


def test_too_few_for_too_long() -> None:
    history = History()
    (abort,) = history.tick(400.0)
    assert isinstance(abort, decisions.Abort) and isinstance(abort.error, NodeLost)
    error: ClustertoolError = abort.error
    assert "1 of at least 2 nodes are there after 300 s" in error.what


def later() -> Gathering:
    """The second epoch, at 100 s."""
    return THREE._replace(number=1, first=False, minimum=1, timeout=20.0)


def test_machines_for_which_there_is_no_plan_wait_for_others() -> None:
    """The only node with a pserver is lost: the same machines are not planned again."""
    history = History(later())
    history.offers(1)
    assert history.tick(100.0)[1] == decisions.Number((0, 1))
    history.done(0, 1)
    wrong = UsageError("no host is left to run a pserver", "give some host the role pserver")
    assert undone(history.after(decisions.Planned(wrong))) == ["undo"]
    assert history.done(0, 1) == () and history.state.phase == "gathering"
    assert history.tick(101.0) == () and history.tick(119.0) == ()
    history.offers(2)
    assert history.tick(119.0)[1] == decisions.Number((0, 1, 2))


def test_machines_without_a_plan_end_after_the_timeout() -> None:
    history = History(later())
    history.tick(100.0)
    history.done(0)
    history.after(decisions.Planned(UsageError("no host is left to run a pserver", "give some host the role")))
    history.done(0)
    (abort,) = history.tick(121.0)
    assert isinstance(abort, decisions.Abort) and (abort.error.code, abort.error.fix) == (75, "give some host the role")
    assert "no host is left to run a pserver; no other node has joined within 20 s" in abort.error.what


def test_a_first_epoch_without_a_plan_ends_the_job() -> None:
    history = History(THREE._replace(minimum=1, maximum=1))
    history.tick(100.0)
    history.done(0)
    (abort,) = history.after(decisions.Planned(UsageError("no host is left to run a pserver", "")))
    assert isinstance(abort, decisions.Abort) and abort.error.code == 64
