"""The scheduler of a dispatch, replayed: histories of events with their times, and what is sent at each."""

from __future__ import annotations

from typing import Any

import pytest

from clustertool.model.dispatch.scheduler import SETTLE, Action, GiveUp, Member, Scheduler, SendPiece, SendSources

SIZE = 1 << 20
History = list[tuple[Any, ...]]  # the time, the name of the event, its arguments (the node first)
NO_REPORTS = ("sent", "taken", "failed", "tick")


def scheduler_of(
    nodes: int, pieces: int = 4, helpers: tuple[int, ...] = (), relays: bool = True, has_pieces: bool = True
) -> Scheduler:
    members = [Member(node, f"10.0.0.{node}", node in helpers) for node in range(nodes)]
    return Scheduler(members, [SIZE] * pieces, 0.25, relays, 0.0, has_pieces)


def replay(scheduler: Scheduler, history: History) -> list[str]:
    """What each event led to, of what it led to anything: `1: node0<-2 node1<-sources`."""
    made = []
    for now, event, *arguments in history:
        if event in NO_REPORTS or scheduler.reported(arguments[0], now):
            actions = getattr(scheduler, event)(*arguments, now=now) or ()
            tokens = [token for action in actions if (token := in_short(action))]
        else:
            tokens = []
        if tokens:
            made.append(f"{now:g}: {' '.join(tokens)}")
    return made


def in_short(action: Action) -> str:
    if isinstance(action, SendPiece):
        return f"node{action.node}<-{action.piece}"
    if isinstance(action, SendSources):
        return f"node{action.node}<-sources"
    return f"{action.cause.value}: node{action.node}" if isinstance(action, GiveUp) else ""


def ready(now: float, *nodes: int, empty: bool = True) -> History:
    return [(now, "ready", node, 1000 + node, empty) for node in nodes]


def sent(now: float, *nodes: int) -> History:
    """What was on its way to these nodes is sent."""
    return [(now, "sent", node, True) for node in nodes]


def compared(now: float, node: int, lacks: set[int], has: set[int]) -> History:
    return [(now, "compared", node, lacks, has)]


def came(now: float, node: int, *pieces: int, live: int = 1) -> History:
    return [(now, "came", node, pieces, live)]


ALL = {1, 2, 3}
# Two nodes: the manifest goes to node 0, then both have their sources, and node 1 has the manifest from node 0.
MET = [*ready(1, 0, 1), *sent(2, 0), *sent(2.1, 0, 1)]
BOTH_KNOW = [*MET, *compared(2.5, 0, ALL, {0}), *compared(2.5, 1, ALL, {0})]
UNTIL_BOTH_KNOW = ["1: node0<-0", "1: node1<-sources", "2: node0<-sources"]

HISTORIES: list[tuple[str, Scheduler, History, list[str]]] = [
    ("the first that is ready is sent to while others start", scheduler_of(2), ready(1, 1), ["1: node1<-0"]),
    ("sources when all are ready, behind the piece that is on its way", scheduler_of(2), MET, UNTIL_BOTH_KNOW),
    (
        "sources after three seconds without those that are not ready, and again when these are",
        scheduler_of(3),
        [*ready(1, 0, 1), (3.1, "tick"), *sent(3.2, 0, 1), *sent(3.3, 0), *ready(9, 2)],
        [
            "1: node0<-0",
            "3.1: node1<-sources",
            "3.2: node0<-sources",
            "9: node0<-sources node1<-sources node2<-sources",
        ],
    ),
    (
        "a node that failed is not waited for",
        scheduler_of(3),
        [*ready(1, 0, 1), (2, "failed", 2)],
        ["1: node0<-0", "2: node1<-sources"],
    ),
    (
        "each piece goes to one node, to that first which was sent the fewest bytes",
        scheduler_of(2),
        [*BOTH_KNOW, *sent(3, 1), *sent(4, 0)],
        [*UNTIL_BOTH_KNOW, "2.5: node0<-1", "2.5: node1<-2", "3: node1<-3"],
    ),
    (
        "a node that has the release gives it to the others, and nothing is sent",
        scheduler_of(2, helpers=(1,)),
        [*MET[:2], *sent(2, 0), *compared(2.2, 1, set(), {0, *ALL}), (2.2, "done", 1), *compared(2.5, 0, ALL, {0})],
        ["1: node0<-0", "1: node1<-sources", "2: node0<-sources"],
    ),
    (
        "one that may have pieces is waited for, but for a moment",
        scheduler_of(2, helpers=(1,)),
        [*ready(1, 0), *sent(2, 0), *compared(2, 0, ALL, {0}), (2.9, "tick"), (2 + SETTLE, "tick")],
        ["1: node0<-0", "3: node0<-1"],
    ),
    (
        "and not at all if it has failed",
        scheduler_of(2, helpers=(1,)),
        [*ready(1, 0), *sent(2, 0), *compared(2, 0, ALL, {0}), (2.1, "failed", 1)],
        ["1: node0<-0", "2.1: node0<-sources"],
    ),
    (
        "without relays each node gets everything",
        scheduler_of(2, pieces=2, relays=False),
        [
            *ready(1, 0, 1),
            *compared(1.5, 0, {0, 1}, set()),
            *sent(2, 0, 1),
            *compared(3, 0, {1}, {0}),
            *compared(3, 1, {1}, {0}),
        ],
        ["1: node0<-0", "1: node1<-0", "2: node0<-1", "3: node1<-1"],
    ),
    (
        "one that reaches no other node gets everything from here, others do not wait for it",
        scheduler_of(3),
        [
            *ready(1, 0, 1, 2),
            *sent(2, 0, 1, 2),
            *sent(2.1, 0),
            (4.2, "idle", 1, {0}, 0, ("10.0.0.0: refused", "10.0.0.2: refused")),
            *sent(5, 1),
            *compared(5.5, 1, ALL, {0}),
            *compared(5.6, 0, ALL, {0}),
        ],
        [
            "1: node0<-0",
            "1: node1<-sources node2<-sources",
            "2: node0<-sources",
            "4.2: node1<-0",
            "5.5: node1<-1",
            "5.6: node0<-1",
        ],
    ),
    (
        "and is one of the others again once it reaches one",
        scheduler_of(2),
        [
            *MET,
            (4.2, "idle", 1, {0}, 0, ("10.0.0.0: no answer",)),
            *came(4.5, 1, live=1),
            *sent(5, 1),
            *compared(6, 1, ALL, {0}),
        ],
        [*UNTIL_BOTH_KNOW, "4.2: node1<-0", "6: node1<-1"],
    ),
    (
        "a piece that never came on is sent once more",
        scheduler_of(2, pieces=2),
        [
            *MET,
            *compared(2.5, 0, {1}, {0}),
            *sent(3, 0),
            *came(3.2, 0, 1),
            (4, "idle", 1, {1}, 1, ()),
            (6.5, "idle", 1, {1}, 1, ()),
        ],
        [*UNTIL_BOTH_KNOW, "2.5: node0<-1", "6.5: node1<-1"],
    ),
    (
        "a piece that came damaged is sent again, three times",
        scheduler_of(1, pieces=2, relays=False),
        [*ready(1, 0), *(each for now in range(2, 6) for each in [*sent(now, 0), (now + 0.5, "damaged", 0, 0)])],
        ["1: node0<-0", "2.5: node0<-0", "3.5: node0<-0", "4.5: node0<-0", "5.5: damaged: node0"],
    ),
    (
        "what a node that stalls keeps from moving goes to another one",
        scheduler_of(2, pieces=2),
        [*MET, *compared(2.5, 0, {1}, {0}), *compared(2.5, 1, {1}, {0}), (6.4, "tick"), (6.6, "tick")],
        [*UNTIL_BOTH_KNOW, "2.5: node0<-1", "6.6: node1<-1"],
    ),
    (
        "but not if it takes bytes, slowly",
        scheduler_of(2, pieces=2),
        [*MET, *compared(2.5, 0, {1}, {0}), *compared(2.5, 1, {1}, {0}), (5, "taken", 0), (6.6, "tick")],
        [*UNTIL_BOTH_KNOW, "2.5: node0<-1"],
    ),
    (
        "one that takes no byte is given up, and one that reports nothing",
        scheduler_of(2),
        [*MET, *compared(2.5, 0, ALL, {0}), *came(22, 1), (22.4, "tick"), (22.6, "tick"), (42.1, "tick")],
        [*UNTIL_BOTH_KNOW, "2.5: node0<-1", "22.6: stuck: node0", "42.1: silent: node1"],
    ),
]


@pytest.mark.parametrize(
    ("scheduler", "history", "expected"), [each[1:] for each in HISTORIES], ids=[h[0] for h in HISTORIES]
)
def test_histories(scheduler: Scheduler, history: History, expected: list[str]) -> None:
    assert replay(scheduler, history) == expected


def test_a_slow_node_gets_nothing_that_others_wait_for() -> None:
    """Node 0 keeps piece 1 while eight others, sent later, have come to node 1: it is late, and goes to node 1 as well."""
    lacks = set(range(1, 12))
    scheduler = scheduler_of(2, pieces=12)
    history = [*MET, *compared(2.5, 0, lacks, {0}), *compared(2.5, 1, lacks, {0})]
    for now in range(3, 11):
        history += [(now, "taken", 0), *sent(now, 1), *came(now, 1, now - 1)]
    assert replay(scheduler, history)[-1] == "10: node1<-10"
    assert replay(scheduler, [(11, "tick"), *sent(11, 1), *came(11, 1, 10)]) == ["11: node1<-11"]
    assert replay(scheduler, sent(12, 1)) == ["12: node1<-1"], "all others are sent: now what is late"
    assert replay(scheduler, [*sent(13, 0), (13, "tick")]) == []


def test_the_last_piece_goes_to_one_more_node_if_it_takes_longer_than_others_did() -> None:
    """The kernel has taken all of it, its node has not reported it, and nothing else is left that could overtake it."""
    scheduler = scheduler_of(3)
    know = [
        *ready(1, 0, 1, 2),
        *sent(2, 0, 1, 2),
        *sent(2.1, 0),
        *(c for n in range(3) for c in compared(2.5, n, ALL, {0})),
    ]
    assert replay(scheduler, know)[-3:] == ["2.5: node0<-1", "2.5: node1<-2", "2.5: node2<-3"]
    quick = [*sent(3, 1, 2), *came(3.2, 1, 2), *came(3.2, 2, 3)]
    assert replay(scheduler, [*quick, *sent(4, 0), (5, "tick"), (5.2, "idle", 1, {1}, 2, ())]) == []
    assert replay(scheduler, [(5.4, "tick")]) == ["5.4: node1<-1"], "2.9 s, four times what the others took: 0.7 s"
    assert replay(scheduler, [*sent(5.6, 1), (9, "tick")]) == [], "once"


def test_of_several_last_pieces_that_take_long_one_is_sent_again_at_a_time() -> None:
    """Where all nodes report late, not all of them are to be sent twice."""
    scheduler = scheduler_of(3, pieces=5)
    lacks = {1, 2, 3, 4}
    know = [
        *ready(1, 0, 1, 2),
        *sent(2, 0, 1, 2),
        *sent(2.1, 0),
        *(c for n in range(3) for c in compared(2.5, n, lacks, {0})),
    ]
    replay(scheduler, [*know, *sent(2.6, 0, 1, 2), *came(2.7, 1, 2)])
    late = ["6: node1<-1", "7: node1<-3"]
    assert replay(scheduler, [(6, "tick"), *sent(6.1, 0, 1, 2), (6.5, "tick"), *came(7, 1, 1), (7.1, "tick")]) == late


def test_the_last_piece_is_not_sent_twice_where_all_take_long() -> None:
    scheduler = scheduler_of(2, pieces=3)
    know = [*MET, *compared(2.5, 0, {1, 2}, {0}), *compared(2.5, 1, {1, 2}, {0})]
    slow_uplink = [(now, "taken", node) for now in (5, 8, 11) for node in (0, 1)]
    slow_uplink += [*sent(12, 0, 1), *came(12, 1, 2), (14, "idle", 1, {1}, 1, ()), (14.5, "tick")]
    assert replay(scheduler, [*know, *slow_uplink])[-1] == "2.5: node1<-2"


def test_over_when_all_have_everything_or_have_failed() -> None:
    scheduler = scheduler_of(3, pieces=2, helpers=(2,))
    replay(scheduler, [*ready(1, 0, 1), (2, "done", 0)])
    assert not scheduler.over
    replay(scheduler, [(3, "failed", 1)])
    assert scheduler.over


def test_nodes_that_the_laptop_served_and_why() -> None:
    scheduler = scheduler_of(2)
    replay(scheduler, [*MET, (4.2, "idle", 1, {0}, 0, ("10.0.0.0: refused",))])
    assert scheduler.served == {1: "10.0.0.0: refused"}
    replay(scheduler, came(5, 1, live=1))
    assert scheduler.served == {}


def test_what_is_still_to_be_sent() -> None:
    scheduler = scheduler_of(2)
    assert scheduler.unsent() == 4 * SIZE
    replay(scheduler, [*ready(1, 0, 1), *sent(2, 0)])
    assert scheduler.unsent() == 3 * SIZE


def test_gentle_until_all_have_their_sources() -> None:
    scheduler = scheduler_of(2)
    replay(scheduler, ready(1, 0))
    assert scheduler.gentle
    replay(scheduler, ready(1, 1))
    assert not scheduler.gentle


def test_without_the_pieces_the_laptop_sends_the_manifest_only() -> None:
    """Node 1 is the helper that has them. What never comes is not sent, and a node that is cut off is given up."""
    for end, expected in (
        ([(4.0, "idle", 0, ALL, 1, []), (20.0, "idle", 0, ALL, 1, []), (20.5, "tick")], []),
        ([(4.0, "idle", 0, ALL, 0, ["refused"]), (4.1, "tick")], ["4.1: alone: node0"]),
        ([(4.0, "failed", 1), (4.1, "tick")], ["4.1: sourceless: node0"]),
    ):
        scheduler = scheduler_of(2, helpers=(1,), has_pieces=False)
        start = [*ready(1, 0, 1), *compared(1.5, 1, set(), {0, *ALL}), *sent(2, 0), *sent(2.1, 0, 1)]
        made = replay(scheduler, [*start, *compared(2.5, 0, ALL, {0}), *end])
        assert not any(f"<-{piece}" in line for line in made for piece in ALL)
        assert [line for line in made if "sources" not in line and "<-0" not in line] == expected
