"""No history of faults makes two epochs of an elastic job have living ranks, and none uses a number twice."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator

import pytest

from clustertool.model.elastic.lease import Lease
from clustertool.node.supervisor.coordinator import lead_decisions as l
from tests.unit.elastic_model import COORDINATOR, CRASHED, Fault, Node, Turn, World, first_world, kinds, problem

FAULTS = 2
History = tuple[World, int]  # and the faults that may still begin


def running(count: int, turn: type[Turn] = Turn) -> World:
    """A world in which all nodes have had ranks for some ticks."""
    world = first_world(count)
    while any(node.ranks < 0 for node in world.nodes):
        world = turn(world, ()).run()
    for _ in range(3):
        world = turn(world, ()).run()
    return world


def changes(world: World, left: int) -> Iterator[tuple[frozenset[Fault], int]]:
    """What faults may be there in the next tick: some end, and one begins. A machine that is lost does not come back here."""
    lasting = frozenset(fault for fault in world.faults if fault[0] == CRASHED)
    others = sorted(world.faults - lasting)
    every = [(kind, node) for node in range(len(world.nodes)) for kind in kinds(node)]
    for count in range(len(others) + 1):
        for some in itertools.combinations(others, count):
            faults = lasting | frozenset(some)
            yield faults, left
            if left:
                yield from ((faults | {fault}, left - 1) for fault in every if fault not in world.faults)


def explored(first: World, ticks: int, turn: type[Turn] = Turn, at_once: bool = False) -> tuple[str, int]:
    """The first problem of any history, or "", and how many worlds there are. at_once: the first fault is in the first tick."""
    layer: set[History] = {(first, FAULTS)}
    count = 0
    for tick in range(ticks):
        following: set[History] = set()
        for world, left in layer:
            for faults, rest in changes(world, left):
                if at_once and not tick and rest == FAULTS:
                    continue
                result = turn(world, faults).run()
                wrong = problem(result)
                if wrong:
                    return f"{wrong} after {result.now - first.now} ticks", count
                following.add((result, rest))
        layer, count = following, count + len(following)
    return "", count


def test_all_histories_of_three_running_nodes_with_two_faults() -> None:
    """The first one begins at once: all times of a job that runs are alike."""
    wrong, count = explored(running(3), 14, at_once=True)
    assert not wrong and count > 20_000, (wrong, count)


def test_all_histories_of_the_first_epoch_with_two_faults() -> None:
    wrong, count = explored(first_world(3), 9)
    assert not wrong and count > 20_000, (wrong, count)


# -- wrong rules are found --


class NoWait(Turn):
    """The next epoch begins although the leases of lost nodes last."""

    def earliest(self, lost: dict[int, float]) -> float:
        return 0.0


class LateLease(Turn):
    """A lease begins when the acknowledgement comes, and not when the beat was sent."""

    def acknowledged(self, of: Lease, number: int) -> Lease:
        return of.acknowledge(number)._replace(since=self.now)


class NoGuard(Turn):
    """Nothing kills the ranks of a supervisor that is frozen."""

    def guard(self, number: int) -> None:
        if (CRASHED, number) in self.faults:
            super().guard(number)


class NoLoss(Turn):
    """A node counts as ended when it is given up."""

    def lost(self, state: l.State) -> frozenset[int]:
        return frozenset()


@pytest.mark.parametrize("turn", [NoWait, LateLease, NoGuard, NoLoss])
def test_a_wrong_rule_is_found(turn: type[Turn]) -> None:
    assert explored(running(3, turn), 14, turn, at_once=True)[0].startswith("ranks of several epochs live")


# -- walks of more nodes and faults --


def walk(seed: int, nodes: int = 5, ticks: int = 40, quiet: int = 30) -> World:
    """Random faults, some at the same time, and then none. Machines come back, also those that were lost."""
    chance = random.Random(seed)
    world, rate = first_world(nodes), chance.choice((0.05, 0.15, 0.4))
    for tick in range(ticks + quiet):
        faults = {fault for fault in world.faults if tick < ticks and chance.random() > 0.2}
        if tick < ticks and chance.random() < rate:
            node = chance.randrange(nodes)
            faults.add((chance.choice(kinds(node)), node))
        world = Turn(world, faults).run()
        wrong = problem(world)
        assert not wrong, f"seed {seed}, tick {tick}: {wrong}"
    return world


def check(seeds: Iterable[int]) -> int:
    """Return how many epochs there were."""
    epochs = 0
    for seed in seeds:
        world = walk(seed)
        assert world.lead.state is not None and world.lead.state.phase == "trainer", f"seed {seed}: the job hangs"
        members = world.lead.state.shape.nodes
        assert all(world.nodes[node].ranks == world.lead.epoch for node in members), f"seed {seed}: ranks are missing"
        epochs += len(world.used)
    return epochs


def test_walks_of_five_nodes() -> None:
    assert check(range(1000)) > 3000


@pytest.mark.chaos
def test_many_walks_of_five_nodes() -> None:
    check(range(1000, 101_000))


def test_a_machine_that_was_lost_comes_back_as_another_process() -> None:
    world = Turn(running(3), {(CRASHED, 1)}).run()
    assert not world.nodes[1].alive and world.nodes[1].ranks < 0
    world = Turn(world, ()).run()
    assert world.nodes[1] == Node() and COORDINATOR not in world.lead.given_up
