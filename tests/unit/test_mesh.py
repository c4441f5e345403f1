"""The mesh: who tries whom is enough and not too much; what comes of it names each broken pair in both directions, once."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from cases import IDENTITY, cluster_of, facts_of, hosts, job_of

from clustertool.model.checks.link_findings import (
    FEW,
    MOST,
    PORTS,
    Try,
    choose_pairs,
    judge,
    ports_to_try,
    rate,
    rounds,
    slow_links,
    targets,
)
from clustertool.model.config.folded_names import fold
from clustertool.model.planning.plan import plan

SIZES = [2, 3, 4, 5, 16, 63, 64]
MANY = [65, 66, 100, 127, 128, 129, 400, 1000]


def names(nodes: Sequence[int]) -> str:
    return fold(f"node{node}" for node in nodes)


def reached(pairs: Sequence[tuple[int, int]], start: int, without: int = -1) -> set[int]:
    near: dict[int, set[int]] = {}
    for a, b in pairs:
        if without not in (a, b):
            near.setdefault(a, set()).add(b)
            near.setdefault(b, set()).add(a)
    found, todo = {start}, [start]
    while todo:
        new = near.get(todo.pop(), set()) - found
        found |= new
        todo += new
    return found


# -- who tries whom


@pytest.mark.parametrize("count", SIZES)
def test_few_nodes_all_try_each_other(count: int) -> None:
    nodes = [3 * node for node in range(count)]  # some did not answer
    assert set(choose_pairs(nodes).pairs) == set(itertools.combinations(nodes, 2))
    assert choose_pairs(nodes).coverage == ""


@pytest.mark.parametrize("count", MANY)
def test_many_nodes_try_a_sample_that_hangs_together(count: int) -> None:
    nodes = list(range(0, 2 * count, 2))
    found = choose_pairs(nodes)
    assert len(set(found.pairs)) == len(found.pairs)
    assert all(a < b and {a, b} <= set(nodes) for a, b in found.pairs)
    degrees = Counter(node for pair in found.pairs for node in pair)
    assert set(degrees) == set(nodes)
    assert len(set(degrees.values())) == 1  # no node is tested less than others
    assert 6 <= degrees[0] <= 2 * count.bit_length()
    for gone in (-1, nodes[0], nodes[count // 2]):  # whichever node is bad
        start = nodes[1]
        assert reached(found.pairs, start, gone) == set(nodes) - {gone}
    assert f"each of {count} nodes with those 1, 2, 4, 8" in found.coverage


@pytest.mark.parametrize("count", [*SIZES, *MANY[:-1], pytest.param(MANY[-1], marks=pytest.mark.chaos)])
def test_rounds_never_have_a_node_twice(count: int) -> None:
    pairs = choose_pairs(range(count)).pairs
    found = rounds(pairs)
    assert sorted(pair for one in found for pair in one) == sorted(pairs)
    assert all(len({node for pair in one for node in pair}) == 2 * len(one) for one in found)
    if count <= MOST:
        assert len(found) == count - 1 + count % 2


@pytest.mark.parametrize("count", [2, FEW, FEW + 1, 40])
def test_every_pair_is_tried_both_ways_and_every_port(count: int) -> None:
    ports = {node: (1000 + node, 2000 + node, 3000 + node) for node in range(count)}
    asked = targets(choose_pairs(range(count)), ports)
    tried = {(source, target) for source, some in asked.items() for target, _ in some}
    assert tried == set(itertools.permutations(range(count), 2))
    assert {(t, port) for some in asked.values() for t, port in some} == {(n, port) for n in ports for port in ports[n]}
    each = len(ports[0]) if count <= FEW else 1
    assert all(len(some) == each * (count - 1) for some in asked.values())


def test_a_node_without_a_port_tries_and_is_not_tried() -> None:
    assert targets(choose_pairs(range(3)), {0: (1,), 1: (), 2: (3,)}) == {0: [(2, 3)], 1: [(0, 1), (2, 3)], 2: [(0, 1)]}
    assert targets(choose_pairs(range(3)), {0: (1,), 2: (3,)}) == {0: [(2, 3)], 2: [(0, 1)]}


def test_ports_are_such_as_a_job_would_have() -> None:
    cluster = cluster_of(hosts(3), START_PORT=6170, PADDLE_PORT=7164, LEAD_PORT=6000)
    facts = facts_of(cluster)
    facts[2] = replace(facts[2], busy=frozenset([7164]))
    assert ports_to_try(cluster, facts, None, "x") == {
        0: (6000, 6170, 7164, 7165),
        1: (6170, 7164, 7165),
        2: (6170, 7165),
    }
    plain = cluster_of(hosts(3))
    free = ports_to_try(plain, facts_of(plain, machines=[0, 0, 1]), None, "x")
    assert all(len(some) == 1 and 10000 <= some[0] < 32768 for some in free.values())
    assert free[0] != free[1]  # one machine has one port space
    assert free != ports_to_try(plain, facts_of(plain), None, "y")


def test_ports_of_a_plan_are_its_own() -> None:
    cluster = cluster_of(hosts(2))
    facts = facts_of(cluster)
    made = plan(cluster, job_of(cluster, {"mode": "ps"}), facts, IDENTITY, ["train.py"])
    ports = ports_to_try(cluster, facts, made, "x")
    own = {node: {port for p in made.processes if p.node == node for port in p.ports} for node in facts}
    extra = {node: {port for where, port in made.extra_ports if where == node} for node in facts}
    assert all(set(ports[node]) <= own[node] | extra[node] and 0 < len(ports[node]) <= PORTS for node in facts)
    assert made.coordinator[1] in ports[0]
    busy = {node: replace(fact, busy=frozenset(ports[0])) for node, fact in facts.items()}
    assert not set(ports_to_try(cluster, busy, made, "x")[0]) & set(ports[0])


# -- what comes of it


def tried(count: int, results: dict[tuple[int, int], str], port: int = 1) -> list[Try]:
    return [Try(a, b, port, results.get((a, b), "ok"), 0.001) for a, b in itertools.permutations(range(count), 2)]


def reported(tries: Sequence[Try], count: int) -> dict[int, tuple[str, str]]:
    found = judge(tries, range(count), names)
    assert all(finding.fix for finding in found if finding.level != "ok")
    assert len({finding.node for finding in found}) == count
    return {finding.node: (finding.level, finding.text) for finding in found if finding.level != "ok"}


def test_where_all_answer_all_is_ok() -> None:
    assert reported(tried(5, {}), 5) == {}


def test_a_cut_pair_is_reported_once_and_in_both_directions() -> None:
    there = {(1, 3): "no answer"}
    assert reported(tried(4, there), 4) == {1: ("error", "node1 -> node3: no answer (firewall?), node3 -> node1: ok")}
    both = {(1, 3): "no route", (3, 1): "no answer"}
    assert reported(tried(4, both), 4) == {
        1: ("error", "node1 -> node3: no route, node3 -> node1: no answer (firewall?)")
    }


def test_a_node_that_none_reaches_is_reported_and_not_the_others() -> None:
    results = {(node, 2): "no answer" for node in range(6)}
    assert reported(tried(6, results), 6) == {
        2: ("error", "node2 -> node[0-1,3-5]: ok, node[0-1,3-5] -> node2: no answer (firewall?)")
    }


def test_without_the_reported_nodes_all_others_reach_each_other() -> None:
    for cuts in itertools.combinations(list(itertools.combinations(range(5), 2)), 3):
        tries = tried(5, dict.fromkeys(cuts, "refused"))
        bad = set(reported(tries, 5))
        assert all(set(cut) & bad for cut in cuts)
        assert len(bad) <= 3


def test_one_port_of_several_is_named() -> None:
    tries = [*tried(2, {}), *tried(2, {(0, 1): "refused"}, port=7164)]
    assert reported(tries, 2) == {0: ("error", "node0 -> node1: refused at port 7164, node1 -> node0: ok")}


def test_a_node_that_no_other_tried_is_not_called_good() -> None:
    tries = [one for one in tried(3, {}) if one.target != 1]
    assert reported(tries, 3) == {1: ("warn", "not tried")}


def test_slow_links() -> None:
    pairs = list(itertools.permutations(range(4), 2))
    even = dict.fromkeys(pairs, 1.25e9)
    assert slow_links(even, names) == []
    cable = {pair: 1.2e7 if 2 in pair else 1.25e9 for pair in pairs}
    (found,) = slow_links(cable, names)
    assert (found.node, found.level) == (2, "warn")
    assert found.text == "node2 and node[0-1,3]: down to 96 Mbit/s, usual 10.0 Gbit/s"
    assert slow_links({(0, 1): 1.0, (1, 0): 9e9}, names) == []  # too few to say what is usual


def test_rates_are_in_bits() -> None:
    assert [rate(1.25e9), rate(1.25e7)] == ["10.0 Gbit/s", "100 Mbit/s"]
