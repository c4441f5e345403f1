"""The rules of the store of epochs: who may take an epoch, whatever the order of requests, and what a record may be."""

from __future__ import annotations

import json
import random
from typing import NamedTuple

import pytest

from clustertool.model.joining import store_rules as rules
from clustertool.model.joining.store_rules import Standing, StoreContent, StoreRecord
from clustertool.model.wire.coordinator_messages import Incarnation

ME, OTHER = Incarnation("boot", 1, 10), Incarnation("boot", 2, 20)
MINE = StoreRecord(4, 1, "10.0.0.1", 7000, ME, "job", 4, (0, 1))
BEFORE = StoreRecord(2, 0, "10.0.0.0", 7000, OTHER, "job", 3, (0, 1))


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (StoreContent(), Standing.CLAIM),
        (StoreContent(None, 0, OTHER, 3), Standing.WAIT),
        (StoreContent(BEFORE, 7), Standing.CLAIM),
        (StoreContent(BEFORE, 7, OTHER, 3), Standing.WAIT),
        (StoreContent(BEFORE, 7, ME, 3), Standing.CLAIM),
        (StoreContent(BEFORE._replace(attempt=4), 7), Standing.LOST),  # number 4 was used by a restart of ranks
        (StoreContent(MINE._replace(incarnation=OTHER), 7), Standing.LOST),
        (StoreContent(MINE._replace(incarnation=OTHER), 7, OTHER, 7), Standing.LOST),
        (StoreContent(MINE, 7, ME, 7), Standing.WON),
        (StoreContent(MINE, 7), Standing.WON),
        (StoreContent(BEFORE._replace(over=0), 7), Standing.OVER),
        (StoreContent(BEFORE._replace(over=1), 7, OTHER, 3), Standing.OVER),
        (StoreContent(BEFORE._replace(job="another", over=0), 7, OTHER, 3), Standing.CLAIM),
        (StoreContent(BEFORE._replace(job="another"), 7), Standing.CLAIM),
        (StoreContent(BEFORE._replace(job="another"), 7, OTHER, 3), Standing.FOREIGN),
    ],
)
def test_standing_of_a_candidate(content: StoreContent, expected: Standing) -> None:
    assert rules.standing(content, MINE) is expected


def test_an_epoch_is_confirmed_by_its_own_record_alone() -> None:
    """Also by one with more attempts, and by one that is over: the order to finish is on its way."""
    for record in (MINE, MINE._replace(attempt=9), MINE._replace(over=0)):
        assert rules.confirms(StoreContent(record, 1), "job", 4)
    for other in (None, MINE._replace(epoch=5), MINE._replace(epoch=3), MINE._replace(job="another")):
        assert not rules.confirms(StoreContent(other, 1), "job", 4)


def test_a_presence_is_put_back_only_where_no_one_else_is() -> None:
    assert rules.may_restore(StoreContent(MINE, 7), MINE)
    assert not rules.may_restore(StoreContent(MINE, 7, OTHER, 3), MINE)
    assert not rules.may_restore(StoreContent(MINE._replace(epoch=5), 7), MINE)


@pytest.mark.parametrize("timeout", [0.5, 1.0, 2.5, 10.0, 10.2, 30.0])
def test_the_lease_covers_an_outage_as_long_as_the_timeout(timeout: float) -> None:
    """The last confirmation is one beat old, and the request after the outage may need two more."""
    seconds = rules.ttl(timeout)
    assert type(seconds) is int and timeout + 3 * rules.beat(timeout) <= seconds < timeout + 4.1
    assert rules.beat(timeout) <= timeout / 4


def test_a_record_is_read_as_it_was_written() -> None:
    for record in (MINE, BEFORE._replace(over=75), MINE._replace(nodes=())):
        assert rules.read_record(rules.write_record(record)) == record
    assert rules.read_presence(rules.write_presence(ME)) == ME


def _with(name: str, value: object) -> bytes:
    return json.dumps({**json.loads(rules.write_record(MINE)), name: value}).encode()


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"\xff",
        b"7",
        b"[" * 100_000,
        b"{}",
        *(
            _with(name, bad)
            for name in ("epoch", "member", "attempt", "restarts")
            for bad in (-1, True, "1", None, 1 << 40)
        ),
        _with("port", 65536),
        _with("over", 256),
        _with("over", "0"),
        _with("address", "a\x1b[0m"),
        _with("address", "a" * 300),
        _with("job", 7),
        _with("incarnation", ["boot", 1]),
        _with("nodes", "01"),
        _with("nodes", [0, -1]),
        _with("nodes", [0] * 70_000),
    ],
)
def test_hostile_records_are_refused(value: bytes) -> None:
    with pytest.raises(ValueError):
        rules.read_record(value)


@pytest.mark.parametrize("value", [b"", b"{}", b"[" * 100_000, b'["a",1]'])
def test_hostile_presences_are_refused(value: bytes) -> None:
    with pytest.raises(ValueError):
        rules.read_presence(value)


class _Candidate(NamedTuple):
    """seen: its last read. sent: a request: the read whose revisions are its conditions, and its record. number: it wants."""

    seen: StoreContent | None = None
    sent: tuple[StoreContent, StoreRecord] | None = None
    number: int = 0
    wins: tuple[int, ...] = ()


class _World(NamedTuple):
    content: StoreContent
    revision: int
    candidates: tuple[_Candidate, ...]
    expirations: int


def _record(index: int, number: int) -> StoreRecord:
    return StoreRecord(number, index, "a", 1, Incarnation("b", index, 0), "job", number)


def _next(world: _World) -> list[_World]:
    """Each world after one step: a read, a claim, its arrival in the store, or the end of the present lease."""
    found = []

    def add(index: int, candidate: _Candidate, **changes: object) -> None:
        candidates = (*world.candidates[:index], candidate, *world.candidates[index + 1 :])
        found.append(world._replace(candidates=candidates, **changes))  # type: ignore[arg-type]

    if world.content.presence and world.expirations:
        content = world.content._replace(presence=None, since=0)
        found.append(world._replace(content=content, expirations=world.expirations - 1))
    for index, candidate in enumerate(world.candidates):
        mine = _record(index, candidate.number)
        standing = rules.standing(candidate.seen, mine) if candidate.seen else None
        if candidate.seen != world.content:
            add(index, candidate._replace(seen=world.content))
        if standing is Standing.WON and mine.epoch not in candidate.wins:
            add(index, candidate._replace(wins=(*candidate.wins, mine.epoch)))
        if standing is Standing.LOST and candidate.number < 2:
            add(index, candidate._replace(number=candidate.number + 1, seen=None))
        if candidate.seen and standing is Standing.CLAIM and candidate.sent is None:
            add(index, candidate._replace(sent=(candidate.seen, mine)))
        if candidate.sent is not None:
            done, (read, wanted) = candidate._replace(sent=None), candidate.sent
            same = (read.since, read.revision) == (world.content.since, world.content.revision)
            at = world.revision + 1
            content = StoreContent(wanted, at, wanted.incarnation, world.content.since or at) if same else world.content
            add(index, done, content=content, revision=at if same else world.revision)
    return found


def _require_one_coordinator(world: _World) -> int:
    """Returns how many epochs were won."""
    wins = [number for candidate in world.candidates for number in candidate.wins]
    assert len(wins) == len(set(wins)), world
    return len(wins)


def test_no_epoch_has_two_coordinators_whatever_the_order() -> None:
    """All orders of the requests of two candidates, with late requests and a lease that ends at any time."""
    first = _World(StoreContent(), 0, (_Candidate(),) * 2, 1)
    known, rest, most = {first}, [first], 0
    while rest:
        world = rest.pop()
        most = max(most, _require_one_coordinator(world))
        new = [one for one in _next(world) if one not in known]
        known.update(new)
        rest += new
        assert len(known) < 200_000
    assert most >= 2 and len(known) > 500, len(known)


def test_three_candidates_at_random() -> None:
    """Seeded walks of three candidates for three epochs, and two leases that end."""
    most = 0
    for seed in range(600):
        choice, world = random.Random(seed), _World(StoreContent(), 0, (_Candidate(),) * 3, 2)
        for _ in range(40):
            worlds = _next(world)
            if not worlds:
                break
            world = choice.choice(worlds)
            most = max(most, _require_one_coordinator(world))
    assert most == 3
