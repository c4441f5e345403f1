"""Late is what others have overtaken: pieces that were begun after it, four times its size."""

from __future__ import annotations

from clustertool.model.dispatch.late_pieces import LatePieces

SIZE = 1 << 20


def pace_with(*others: int, size: int = SIZE) -> LatePieces:
    """Node 0 has been sent piece 0; then others were sent pieces of these sizes, and tell that they have come."""
    pace = LatePieces(0.25)
    pace.begun(0, 0, size, 0.0)
    for number, other in enumerate(others, 1):
        pace.begun(1, number, other, number / 100)
    for number in range(1, len(others) + 1):
        pace.came(1, number, number / 100)
    return pace


def test_late_is_what_was_overtaken() -> None:
    assert pace_with(*[SIZE] * 4).find_late(2.0) == {(0, 0)}


def test_time_alone_makes_nothing_late() -> None:
    """On a slow uplink all need it."""
    assert not pace_with(*[SIZE] * 3).find_late(3600.0)


def test_a_node_may_tell_of_it_a_little_later() -> None:
    assert not pace_with(*[SIZE] * 9).find_late(0.7)


def test_small_pieces_pass_a_large_one_in_numbers() -> None:
    assert not pace_with(*[30_000] * 100, size=4 * SIZE).find_late(10.0)


def test_what_was_begun_before_does_not_count() -> None:
    pace = LatePieces(0.25)
    for number in range(1, 9):
        pace.begun(1, number, SIZE, 0.0)
    pace.begun(0, 0, SIZE, 1.0)
    for number in range(1, 9):
        pace.came(1, number, number / 100)
    assert not pace.find_late(10.0)


def test_what_has_come_is_not_late_and_not_owed() -> None:
    pace = pace_with(*[SIZE] * 4)
    assert pace.on_the_way(0) == {0} and not pace.on_the_way(1)
    pace.came(0, 0, 2.0)
    assert not pace.find_late(10.0) and not pace.on_the_way(0)


def pace_after(seconds: float, since: float) -> LatePieces:
    """A piece took so many seconds to node 1; node 0 has been sent one at `since`."""
    pace = LatePieces(0.25)
    pace.begun(1, 1, SIZE, since - seconds)
    pace.begun(0, 0, SIZE, since)
    pace.came(1, 1, since)
    return pace


def test_overdue_is_what_takes_four_times_as_long_as_others_took() -> None:
    assert not pace_after(0.8, since=10).find_slowest(13.1)
    assert pace_after(0.8, since=10).find_slowest(13.3) == {(0, 0)}


def test_where_all_need_long_nothing_is_overdue_soon() -> None:
    assert not pace_after(24, since=100).find_slowest(195)
    assert pace_after(24, since=100).find_slowest(197)


def test_nothing_is_overdue_before_a_piece_has_come() -> None:
    pace = LatePieces(0.25)
    pace.begun(0, 0, SIZE, 0.0)
    assert not pace.find_slowest(3600.0)


def test_where_all_are_quick_a_node_still_has_time_to_report() -> None:
    assert not pace_after(0.01, since=10).find_slowest(12.4)


def test_the_usual_time_follows_that_of_the_newest_pieces() -> None:
    """The uplink has become slower: what was usual once does not make the rest overdue."""
    pace = pace_after(0.5, since=10)
    for number in range(2, 12):
        pace.begun(1, number, SIZE, 10.0 * number)
        pace.came(1, number, 10.0 * number + 5)
    pace.begun(0, 1, SIZE, 200)
    assert (0, 1) not in pace.find_slowest(212)
