"""Every order of events that small jobs can have, and seeded random ones of larger jobs, end in exactly one right verdict.

A model of the world around decide(): nodes that join, start, end and obey, and links that keep the order of one node's
words and nothing else. Faults come at any moment: failures, lost nodes (dead, or only slow), a stop, a supervisor that
gives its coordinator up. What must hold is asserted at each step of `World.receive`, and at every end in `check_end`.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

import pytest

from clustertool.model.job.outcome import Key, Outcome
from clustertool.model.job.state_names import JobState
from clustertool.node.supervisor.coordinator.job_decisions import (
    Action,
    Ask,
    Clean,
    Event,
    Exited,
    Explained,
    Finish,
    Joined,
    Listening,
    Lost,
    RankExit,
    Shape,
    Start,
    State,
    Stop,
    StopAsked,
    decide,
)


@dataclass(frozen=True)
class Node:
    """A supervisor as the coordinator can know it. `sent`: on its way to the coordinator, `reported`: on its way here."""

    index: int
    joined: bool = False
    dead: bool = False
    attempt: int = 0
    running: frozenset[Key] = frozenset()
    silent: frozenset[Key] = frozenset()  # running pservers that do not listen yet
    stopping: bool = False
    clean: bool = False
    sent: tuple[Event, ...] = ()
    reported: tuple[tuple[Action, int], ...] = ()  # with the attempt that the coordinator was in

    def says(self, event: Event) -> Node:
        return replace(self, sent=(*self.sent, event))

    def enters(self, attempt: int) -> Node:
        return self if attempt == self.attempt else replace(self, attempt=attempt, stopping=False, clean=False)


@dataclass(frozen=True)
class World:
    state: State
    nodes: tuple[Node, ...]
    faults: tuple[str, ...]  # what may still go wrong, each once
    started: frozenset[tuple[str, int]] = frozenset()
    stopped: int = -1  # the attempt that was reported to stop
    done: frozenset[tuple[Key, int]] = frozenset()  # trainers that ended well, by attempt
    finished: int = 0
    asked: bool = False  # the engine, which has not answered yet
    delayed: tuple[Action, ...] = ()  # the start of a new attempt, which waits for a pause

    # -- what may happen next --

    def steps(self) -> Iterator[World]:
        for node in self.nodes:
            if node.sent and not (node.dead and node.index in self.state.lost):
                yield self.but(replace(node, sent=node.sent[1:])).receive(node.sent[0])
            if not node.dead:
                yield from self.live(node)
            if "lost" in self.faults and not node.dead:
                yield self.without("lost").but(replace(node, dead=True))
            if node.index not in self.state.lost and (node.dead or "slow" in self.faults) and not self.finished:
                yield (self if node.dead else self.without("slow")).receive(Lost(node.index, "silent"))
        if self.delayed:
            yield replace(self, delayed=()).tell(self.delayed[0])
        if "stop" in self.faults:
            yield self.without("stop").receive(StopAsked("ann", 130))
        if "timeout" in self.faults:
            yield self.without("timeout").receive(StopAsked("timeout", 124, "timeout"))
        if "signal" in self.faults:
            yield self.without("signal").receive(StopAsked("SIGTERM", 143, outside=True))
        if self.asked:
            yield replace(self, asked=False).receive(
                Explained(Outcome(JobState.TIMEOUT, 124, "tool", "the time limit"))
            )

    def live(self, node: Node) -> Iterator[World]:
        if not node.joined:
            yield self.but(replace(node.says(Joined(node.index)), joined=True))
        elif node.reported:
            yield self.obey(replace(node, reported=node.reported[1:]), *node.reported[0])
        for key in sorted(node.silent):
            if not node.stopping:
                yield self.but(replace(node.says(Listening(key, node.attempt)), silent=node.silent - {key}))
        for batch in _batches(node.running):
            yield from self.exit(node, batch)
        if node.stopping and not node.running and not node.clean:
            yield self.but(replace(node.says(Clean(node.index, (), node.attempt)), clean=True))
        if "unasked" in self.faults and node.running and not node.stopping:
            yield self.without("unasked").but(replace(node, stopping=True))

    def exit(self, node: Node, batch: frozenset[Key]) -> Iterator[World]:
        """Processes of a node end together: when reported, or well (trainers), or badly."""
        left = replace(node, running=node.running - batch, silent=node.silent - batch)
        if node.stopping:
            yield self.but(left.says(_exited(node, batch, 143, stopped=True)))
            return
        if all(role == "trainer" for role, _ in batch):
            good = self.done | {(key, node.attempt) for key in batch}
            yield replace(self, done=good).but(left.says(_exited(node, batch, 0)))
        if "fail" in self.faults:
            yield self.without("fail").but(left.says(_exited(node, batch, 7)))

    def obey(self, node: Node, action: Action, attempt: int) -> World:
        if not isinstance(action, Finish):
            node = node.enters(attempt)
        if isinstance(action, Start):
            if not node.stopping:
                keys = frozenset(key for key in self.state.shape.on(node.index) if key[0] == action.role)
                node = replace(
                    node, running=node.running | keys, silent=keys if action.role == "pserver" else node.silent
                )
        elif not node.stopping:  # Stop, and Finish, which ends what is left
            node = replace(node, stopping=True)
        return self.but(node)

    # -- what the coordinator does about it, and what must hold --

    def receive(self, event: Event) -> World:
        before = self.state
        state, actions = decide(before, event)
        world = replace(self, state=state)
        if before.ending is not None and not isinstance(event, Explained):
            assert state.ending is not None
            assert _first(state.ending) == _first(before.ending), "the outcome changed"
        for action in actions:
            if isinstance(action, Start):
                world = world.check_start(action)
            elif isinstance(action, Stop):
                assert not world.finished
                world = replace(world, stopped=state.attempt, delayed=())
            elif isinstance(action, Ask):
                world = replace(world, asked=True)
                continue
            else:
                world = world.check_finish(action)
            again = isinstance(action, Start) and action.again
            world = replace(world, delayed=(action,)) if again else world.tell(action)
        return world

    def tell(self, action: Action) -> World:
        order = (action, self.state.attempt)
        return replace(self, nodes=tuple(replace(node, reported=(*node.reported, order)) for node in self.nodes))

    def check_start(self, start: Start) -> World:
        assert start.attempt == self.state.attempt <= self.state.shape.max_restarts
        assert (start.role, start.attempt) not in self.started
        assert self.stopped < start.attempt, "a start after the stop of the same attempt"
        assert not self.state.lost
        assert not self.finished
        assert all(node.joined for node in self.nodes)
        if start.role == "heter":
            assert ("trainer", start.attempt) in self.started
            assert not start.again
        elif start.role == "trainer" and self.state.shape.pservers:
            assert ("pserver", start.attempt) in self.started
            assert not any(node.silent for node in self.nodes)
            assert not start.again
        else:
            assert start.again == (start.attempt > 0)
            assert not start.attempt or all(node.clean and not node.running for node in self.nodes)
        return replace(self, started=self.started | {(start.role, start.attempt)})

    def check_finish(self, finish: Finish) -> World:
        outcome, state = finish.outcome, self.state
        assert not self.finished
        assert not self.asked
        for node in self.nodes:
            assert node.index in state.lost or (node.clean and not node.running and node.attempt == state.attempt)
        assert not set(outcome.culprits) & set(outcome.victims)
        assert outcome.victims == tuple(sorted(outcome.victims))
        ends = {exit.key: exit for exit in state.exits}
        assert all(ends[key].stopped for key in outcome.victims)
        trainers = [key for key, _ in state.shape.place if key[0] == "trainer"]
        if outcome.state == "succeeded":
            assert all((key, state.attempt) in self.done for key in trainers)
            assert (outcome.code, outcome.culprits, outcome.victims) == (0, (), ())
        elif outcome.state == "failed":
            first = ends[outcome.culprits[0]]
            assert outcome.code == (first.code or 1) == 7
            assert all(ends[key].code == 7 for key in outcome.culprits)
            assert set(outcome.culprits) >= {exit.key for exit in state.exits if exit.failed}, (
                "all that failed by themselves"
            )
        else:
            assert (outcome.state, outcome.code) in (("lost", 75), ("stopped", 130), ("timeout", 124))
        return replace(self, finished=self.finished + 1)

    def check_end(self) -> None:
        """Nothing can happen any more."""
        assert self.finished == 1
        assert self.state.phase == "over"
        assert not any(node.running for node in self.nodes if not node.dead)

    # -- making the next world --

    def but(self, node: Node) -> World:
        return replace(self, nodes=(*self.nodes[: node.index], node, *self.nodes[node.index + 1 :]))

    def without(self, fault: str) -> World:
        at = self.faults.index(fault)
        return replace(self, faults=(*self.faults[:at], *self.faults[at + 1 :]))


def _first(outcome: Outcome) -> tuple[object, ...]:
    """What never changes once it is decided; processes that fail later are added to the culprits."""
    return outcome.state, outcome.code, outcome.source, outcome.node, outcome.culprits[:1]


def _batches(keys: frozenset[Key]) -> Iterator[frozenset[Key]]:
    """One of them, or all of them: what one check of a supervisor may find."""
    for key in sorted(keys):
        yield frozenset({key})
    if len(keys) > 1:
        yield keys


def _exited(node: Node, batch: frozenset[Key], code: int, stopped: bool = False) -> Exited:
    exits = tuple(RankExit(*key, code, stopped=stopped) for key in sorted(batch, reverse=True))
    return Exited(exits, node.attempt)


def world(
    sizes: tuple[tuple[int, ...], ...], faults: tuple[str, ...], on_failure: str = "abort", max_restarts: int = 0
) -> World:
    """`sizes`: (pservers, trainers) or (pservers, trainers, heter trainers) of each node."""
    place: list[tuple[Key, int]] = []
    for at, role in enumerate(("pserver", "trainer", "heter")):
        nodes = [node for node, counts in enumerate(sizes) for _ in range((*counts, 0)[at])]
        place += [((role, rank), node) for rank, node in enumerate(nodes)]
    names = tuple(f"n{node}" for node in range(len(sizes)))
    shape = Shape(frozenset(range(len(sizes))), names, tuple(place), on_failure, max_restarts)
    return World(State(shape), tuple(Node(node) for node in range(len(sizes))), faults)


COLLECTIVE, PS, BOTH = ((0, 1), (0, 1)), ((1, 0), (0, 1)), ((1, 1), (0, 1))
ALL = [
    world(COLLECTIVE, ("fail", "stop", "lost")),
    world(COLLECTIVE, ("fail", "fail"), max_restarts=1),
    world(COLLECTIVE, ("fail", "timeout"), max_restarts=1),
    world(((0, 2), (0, 1)), ("fail", "fail"), "continue"),
    world(((0, 2),), ("fail", "fail", "stop", "unasked"), max_restarts=2),
    world(PS, ("fail", "fail"), max_restarts=1),
    world(PS, ("lost", "slow")),
    world(PS, ("unasked", "stop")),
    world(BOTH, ("fail",)),
    world(BOTH, ("unasked",)),
    world(COLLECTIVE, ("signal", "lost")),
    world(((0, 2),), ("signal", "fail", "stop"), max_restarts=1),
    world(((1, 1, 1),), ("fail", "stop"), max_restarts=1),
    world(((1, 0, 1), (0, 1, 0)), ("fail", "lost")),
    world(((1, 1, 0), (0, 0, 1)), ("fail", "slow"), "continue"),
]
# The worlds with the most orders, whose faults the others have in other pairs.
FURTHER = [
    world(COLLECTIVE, ("slow", "fail")),
    world(COLLECTIVE, ("fail", "lost"), max_restarts=1),
    world(((0, 1), (0, 1), (0, 1)), ("fail",)),
    world(((1, 1),), ("fail", "stop", "timeout", "lost"), max_restarts=1),
]


@pytest.mark.parametrize(
    "start",
    [*ALL, *(pytest.param(further, marks=pytest.mark.chaos) for further in FURTHER)],
    ids=lambda w: f"{len(w.nodes)}-{'-'.join(w.faults)}-{w.state.shape.max_restarts}",
)
def test_every_order_ends_in_one_right_verdict(start: World) -> None:
    seen, todo, ends = {start}, [start], 0  # a depth-first walk through all that can be
    while todo:
        now = todo.pop()
        following = list(now.steps())
        if not following:
            now.check_end()
            ends += 1
        for following_world in following:
            if following_world not in seen:
                seen.add(following_world)
                todo.append(following_world)
    assert ends > 1


LARGER = [
    (((0, 1), (0, 3), (0, 2)), "abort", 0),
    (((0, 2), (0, 2)), "continue", 1),
    (((1, 1), (1, 2), (0, 2)), "abort", 1),
    (((2, 0), (0, 2), (1, 2), (0, 1)), "continue", 0),
    (((1, 4),), "abort", 1),
    (((1, 1, 2), (0, 2, 1), (1, 0, 0)), "abort", 1),
    (((1, 2, 1), (0, 0, 2)), "continue", 0),
]
FAILURES = ("fail", "fail", "fail")
FAULTS = (*FAILURES, "lost", "slow", "stop", "timeout", "unasked", "signal")


@pytest.mark.parametrize("seeds", [range(70), pytest.param(range(70, 1000), marks=pytest.mark.chaos)], ids=str)
@pytest.mark.parametrize("sizes, on_failure, max_restarts", LARGER)
def test_random_orders_of_larger_jobs(
    sizes: tuple[tuple[int, ...], ...], on_failure: str, max_restarts: int, seeds: range
) -> None:
    states = set()
    for seed in seeds:
        chance = random.Random(seed)
        faults = FAILURES if seed % 4 == 0 else tuple(fault for fault in FAULTS if chance.random() < 0.4)
        now = world(sizes, faults, on_failure, max_restarts)
        while following := list(now.steps()):
            now = chance.choice(following)
        now.check_end()
        assert now.state.ending is not None
        states.add(now.state.ending.state)
    assert states == {"succeeded", "failed", "lost", "stopped", "timeout"}
