"""The fetch scheduler, replayed: histories of events with their times, and what a node does at each."""

from __future__ import annotations

from typing import Any

import pytest

from clustertool.model.dispatch.fetch_scheduler import Address, Connect, Disconnect, FetchScheduler, RequestPiece

A, B, C, D = [(f"10.0.0.{number}", 1000) for number in range(4)]
NAMES = {A: "A", B: "B", C: "C", D: "D"}
History = list[tuple[Any, ...]]  # the time, the name of the event, its arguments
UNTIMED = ("connected", "store_failed")  # events that lead to nothing, whenever they happen


def replay(history: History, scheduler: FetchScheduler | None = None) -> list[str]:
    """What each event led to, of what it led to anything: `1: A? B?` (connect), `A!` (disconnect), `A>3` (request)."""
    scheduler = scheduler or FetchScheduler(b"salt", 0.0)
    made = []
    for now, event, *arguments in history:
        times = {} if event in UNTIMED else {"now": now}
        tokens = [in_short(action) for action in getattr(scheduler, event)(*arguments, **times) or ()]
        if tokens:
            made.append(f"{now:g}: {' '.join(sorted(tokens))}")
    return made


def in_short(action: Connect | Disconnect | RequestPiece) -> str:
    sign = {Connect: "?", Disconnect: "!"}.get(type(action), "")
    return f"{NAMES[action.address]}{sign or '>'}{action.piece if isinstance(action, RequestPiece) else ''}"


def listed(now: float, *addresses: Address, degree: int = 2) -> History:
    return [(now, "listed", addresses, degree)]


def connected(now: float, *addresses: Address) -> History:
    return [(now, "connected", address) for address in addresses]


def offered(now: float, address: Address, *pieces: int) -> History:
    return [(now, "offered", address, set(pieces))]


def came(now: float, piece: int, address: Address | None, good: bool | None = True) -> History:
    return [(now, "came", piece, address, good)]


def lacking(now: float, *pieces: int) -> History:
    return [(now, "manifest_read", pieces)]


TWO = [*listed(1, A, B, C), *connected(1, A, B)]
KNOWN = [*TWO, *came(1, 0, None)]

HISTORIES: list[tuple[str, History, list[str]]] = [
    ("as many sources as wanted", listed(1, A, B, C), ["1: A? B?"]),
    ("the manifest is the first that is requested", [*TWO, *offered(1.2, B, 0, 1, 2)], ["1: A? B?", "1.2: B>0"]),
    (
        "two pieces at a time",
        [*KNOWN, *lacking(1, 1, 2, 3), *offered(1, A, 3), *offered(2, A, 1), *came(3, 3, A)],
        ["1: A? B?", "1: A>3", "2: A>1"],
    ),
    (
        "and the next one when one has come",
        [*KNOWN, *lacking(1, 1, 2, 3), *offered(1, A, 1), *offered(1, A, 2), *offered(1, A, 3), *came(2, 1, A)],
        ["1: A? B?", "1: A>1", "1: A>2", "2: A>3"],
    ),
    (
        "what one is asked for is not asked of another one",
        [*KNOWN, *lacking(1, 1), *offered(1, A, 1), *offered(1.1, B, 1)],
        ["1: A? B?", "1: A>1"],
    ),
    (
        "until it is late, and there is nothing else to ask for",
        [
            *KNOWN,
            *lacking(1, 1),
            *offered(1, A, 1),
            *offered(1.1, B, 1),
            (2.9, "tick"),
            (3.1, "moved", A),
            (3.2, "tick"),
        ],
        ["1: A? B?", "1: A>1", "3.2: B>1 C?"],
    ),
    (
        "what is offered before the manifest is there",
        [*TWO, *offered(1, A, 1), *came(2, 0, B), *lacking(2, 1)],
        ["1: A? B?", "2: A>1"],
    ),
    (
        "one that does not answer is replaced, and what stalls",
        [*listed(1, A, B, C, D), *connected(1, B), *offered(1.5, B, 0), (6.6, "tick"), (7.1, "tick")],
        ["1: A? B?", "1.5: B>0", "6.6: B! C? D?", "7.1: A!"],
    ),
    (
        "what one was asked for that has gone is asked of another one",
        [*KNOWN, *lacking(1, 1), *offered(1, A, 1), *offered(1, B, 1), (2, "closed", A, "reset")],
        ["1: A? B?", "1: A>1", "2: B>1"],
    ),
    (
        "one that has gone is tried again after a pause, then a longer one",
        [
            *listed(1, A),
            (1, "closed", A, "refused"),
            (1.9, "tick"),
            (2.1, "tick"),
            (2.1, "closed", A, "refused"),
            (4, "tick"),
            (4.2, "tick"),
        ],
        ["1: A?", "2.1: A?", "4.2: A?"],
    ),
    (
        "one that lied is never tried again, and its piece is asked of another one",
        [
            *listed(1, A, B),
            *connected(1, A, B),
            *came(1, 0, None),
            *lacking(1, 1),
            *offered(1, A, 1),
            *offered(1, B, 1),
            *came(2, 1, A, good=False),
            (99, "tick"),
        ],
        ["1: A? B?", "1: A>1", "2: A! B>1", "99: B!"],
    ),
    (
        "one more when nothing comes, instead of one that has nothing",
        [*listed(1, A, B, C, D), *connected(1, A, B), (2.9, "tick"), (3.1, "tick")],
        ["1: A? B?", "3.1: A! C? D?"],
    ),
    (
        "what has nothing is kept where there is no other: it may get what all wait for",
        [*KNOWN, *lacking(1, 1), (3.1, "tick"), *connected(3.1, C), (9, "tick"), *offered(9, C, 1)],
        ["1: A? B?", "3.1: C?", "9: C>1"],
    ),
    (
        "older sources go when the new ones are there and what they were asked for has come",
        [
            *KNOWN,
            *lacking(1, 1),
            *offered(1, A, 1),
            *listed(2, C, D, A),
            *connected(2, C, D),
            (2.1, "tick"),
            *came(2.2, 1, A),
            (2.3, "tick"),
        ],
        ["1: A? B?", "1: A>1", "2: C? D?", "2.1: B!", "2.3: A!"],
    ),
    (
        "and are kept as long as those do not answer",
        [*KNOWN, *lacking(1, 1, 2), *offered(1, A, 1), *came(1, 1, A), *listed(2, C, D, A), *offered(2.1, A, 2)],
        ["1: A? B?", "1: A>1", "2: C? D?", "2.1: A>2"],
    ),
    (
        "nothing more when the disk is full",
        [*KNOWN, *lacking(1, 1, 2), (2, "store_failed"), *offered(2, A, 1)],
        ["1: A? B?"],
    ),
    (
        "a source that has gone is not listened to",
        [*TWO, (2, "closed", A, "x"), *offered(2, A, 0), *came(2, 0, A, good=False)],
        ["1: A? B?"],
    ),
]


@pytest.mark.parametrize(("history", "expected"), [each[1:] for each in HISTORIES], ids=[each[0] for each in HISTORIES])
def test_fetching(history: History, expected: list[str]) -> None:
    assert replay(history) == expected


def test_why_it_stands_still() -> None:
    scheduler = FetchScheduler(b"", 0.0)
    replay([*listed(1, A, B), (1, "closed", A, "refused"), *connected(1, B), *offered(2, B, 1)], scheduler)
    assert (scheduler.live, scheduler.failures, scheduler.lacking) == (1, {A: "10.0.0.0: refused"}, {0})
    assert scheduler.progress_at == 1
    replay([*came(3, 0, B), (4, "closed", B, "")], scheduler)
    assert (scheduler.live, scheduler.lacking, scheduler.progress_at) == (0, set(), 3)


def test_each_node_asks_in_another_order() -> None:
    orders = set()
    for salt in range(5):
        scheduler = FetchScheduler(b"%d" % salt, 0.0)
        history = [
            *listed(1, A, degree=1),
            *came(1, 0, None),
            *lacking(1, *range(1, 30)),
            *offered(2, A, *range(1, 30)),
        ]
        orders.add(replay(history, scheduler)[-1])
    assert len(orders) > 1
