"""What is late is judged by how long other pieces took, and by their size."""

from __future__ import annotations

from clustertool.plan.manifest import PACK
from clustertool.reach.pace import Pace


def test_nothing_is_late_before_some_have_come() -> None:
    pace = Pace(0.25)
    pace.took(0.1, PACK)
    pace.took(0.1, PACK)
    assert not pace.late(3600.0, PACK)
    pace.took(0.1, PACK)
    assert pace.late(3600.0, PACK)


def test_late_is_twice_the_usual_and_a_little_more() -> None:
    pace = Pace(0.25)
    for seconds in (1.0, 1.0, 1.0, 9.0, 9.0):
        pace.took(seconds, PACK)
    assert not pace.late(2.7, PACK) and pace.late(2.8, PACK)
    assert not pace.late(8.7, 4 * PACK) and pace.late(8.8, 4 * PACK)
    assert not pace.late(2.7, 1000), "small pieces take as long"


def test_it_forgets() -> None:
    pace = Pace(0.25)
    for seconds in [*[0.1] * 20, *[5.0] * 20]:
        pace.took(seconds, PACK)
    assert not pace.late(9.0, PACK)
