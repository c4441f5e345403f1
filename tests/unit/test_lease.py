"""Leases replayed: histories of beats, acknowledgements and pauses, and when the lease ends in each."""

from __future__ import annotations

from clustertool.model.elastic.epochs import (
    MARGIN,
    FormerCoordinator,
    former_leases,
    lost_leases,
    may_enter,
    next_number,
)
from clustertool.model.elastic.lease import Lease, ends_by, is_silent


def replayed(*history: tuple[str, float]) -> Lease:
    """A lease of 10 s that begins at 0, after this history. Numbers are times, and of `ack` the number of a beat."""
    lease = Lease(10.0, 0.0)
    for what, value in history:
        if what == "send":
            lease = lease.send(value)
        elif what == "ack":
            lease = lease.acknowledge(int(value))
        elif what == "check":
            lease = lease.check(value)
        else:
            lease = lease.renew(value)
    return lease


def test_a_lease_without_an_acknowledgement_ends_after_its_time() -> None:
    assert not replayed(("send", 1), ("check", 9.9)).ended
    assert replayed(("send", 1), ("check", 10.0)).ended


def test_a_lease_is_measured_from_when_the_acknowledged_beat_was_sent() -> None:
    lease = replayed(("send", 1), ("send", 2), ("send", 3), ("ack", 2))
    assert lease.end == 12
    assert lease.pending == ((3, 3),)
    assert not lease.check(11.9).ended and lease.check(12).ended


def test_acknowledgements_may_come_in_any_order_and_again() -> None:
    lease = replayed(("send", 1), ("send", 2), ("ack", 2), ("ack", 1), ("ack", 2), ("ack", 0))
    assert lease.end == 12 and not lease.pending


def test_a_number_that_was_never_sent_renews_nothing() -> None:
    assert replayed(("send", 5), ("ack", 7), ("ack", -1)).end == 10


def test_a_lease_that_has_ended_never_comes_back() -> None:
    lease = replayed(("send", 9), ("check", 10), ("ack", 1), ("check", 10.1))
    assert lease.ended and lease.end == 10
    assert replayed(("check", 10), ("renew", 11)).ended


def test_a_loop_that_was_stopped_for_longer_than_the_lease_has_lost_it() -> None:
    """The acknowledgements of all beats before the stop arrive in one go after it."""
    assert replayed(("send", 1), ("send", 2), ("ack", 1), ("ack", 2), ("check", 12.5)).ended


def test_a_loop_that_was_stopped_for_less_keeps_the_lease_by_an_acknowledgement_that_came_meanwhile() -> None:
    assert not replayed(("send", 1), ("ack", 1), ("send", 9), ("ack", 2), ("check", 15)).ended


def test_each_turn_of_the_coordinator_renews_its_own_lease() -> None:
    assert replayed(("renew", 9), ("renew", 18)).end == 28
    assert replayed(("renew", 9), ("renew", 19)).ended


def test_the_coordinator_gives_a_node_up_when_its_lease_has_ended() -> None:
    sent, received = 5.0, 5.2  # the delay of the network, if both clocks were the same
    lease = Lease(10.0, 0.0).send(sent).acknowledge(1)
    assert not is_silent(received, 15.2, 10.0) and is_silent(received, 15.3, 10.0)
    assert lease.end < ends_by(received, 10.0)
    assert lease.check(15.3).ended


def test_an_epoch_waits_for_the_last_lease_of_the_lost_nodes() -> None:
    assert lost_leases({}, 10.0) == ()
    assert lost_leases({3: 104.0, 1: 100.0}, 10.0) == ((1, 110 + MARGIN), (3, 114 + MARGIN))


NO_FORMER = FormerCoordinator(-1, 0.0)


def test_the_winner_of_an_epoch_waits_for_the_leases_of_all_nodes() -> None:
    assert former_leases(frozenset(), 50.0, 10.0, NO_FORMER) == ()
    assert former_leases({2, 0}, 50.0, 10.0, NO_FORMER) == ((0, 60 + MARGIN), (2, 60 + MARGIN))


def test_the_coordinator_before_has_no_ranks_soon_after_its_last_write() -> None:
    former = FormerCoordinator(0, 41.0)
    assert former_leases({0, 2}, 50.0, 10.0, former) == ((0, 51 + MARGIN), (2, 60 + MARGIN))
    assert former_leases({2}, 50.0, 10.0, former) == ((2, 60 + MARGIN),)
    late = FormerCoordinator(0, 55.0)
    assert former_leases({0}, 50.0, 10.0, late) == ((0, 60 + MARGIN),)


def test_numbers_of_epochs_rise() -> None:
    assert next_number([]) == 0
    assert next_number([0, 4, 2]) == 5
    assert may_enter(5, 4) and may_enter(0, -1)
    assert not may_enter(4, 4) and not may_enter(3, 4)
