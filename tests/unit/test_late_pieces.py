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
        pace.came(1, number)
    return pace


def test_late_is_what_was_overtaken() -> None:
    assert pace_with(*[SIZE] * 4).late(2.0) == {(0, 0)}


def test_time_alone_makes_nothing_late() -> None:
    """On a slow uplink all need it."""
    assert not pace_with(*[SIZE] * 3).late(3600.0)


def test_a_node_may_tell_of_it_a_little_later() -> None:
    assert not pace_with(*[SIZE] * 9).late(0.7)


def test_small_pieces_pass_a_large_one_in_numbers() -> None:
    assert not pace_with(*[30_000] * 100, size=4 * SIZE).late(10.0)


def test_what_was_begun_before_does_not_count() -> None:
    pace = LatePieces(0.25)
    for number in range(1, 9):
        pace.begun(1, number, SIZE, 0.0)
    pace.begun(0, 0, SIZE, 1.0)
    for number in range(1, 9):
        pace.came(1, number)
    assert not pace.late(10.0)


def test_what_has_come_is_not_late_and_not_owed() -> None:
    pace = pace_with(*[SIZE] * 4)
    assert pace.on_the_way(0) == {0} and not pace.on_the_way(1)
    pace.came(0, 0)
    assert not pace.late(10.0) and not pace.on_the_way(0)
