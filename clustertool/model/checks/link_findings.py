"""This module selects the pairs and ports of a link check, and interprets the answers. A broken pair is reported once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Callable, Collection, Dict, FrozenSet, List, Mapping, NamedTuple, Sequence, Tuple

from clustertool.model.config.cluster import Cluster
from clustertool.model.config.folded_names import grouped
from clustertool.model.facts import ByNode
from clustertool.model.finding import Finding
from clustertool.model.link_answer import LinkAnswer
from clustertool.model.planning.plan import Plan
from clustertool.model.planning.ports import LOWEST_PORT, sample

MOST = 64  # nodes that all try each other
FEW = 8  # nodes that try all ports of each other; among more of them each pair tries one, and each port has many that try it
PORTS = 4  # of one node
SLOW = 0.5  # of the median bandwidth: a link below it is reported
_PORTS = f"TCP {LOWEST_PORT}-32767 (jobs take their ports there) and those that conf.py names, between the nodes"
_FIXES = {  # the first one of the answers of both directions
    LinkAnswer.NO_AGENT: "the node is overloaded, or something between them swallows data: try again",
    LinkAnswer.REFUSED: f"a firewall rejects ports between the nodes: open {_PORTS}",
    LinkAnswer.NO_ROUTE: "check the routes of the node (ip route) and PADDLE_NIC",
    LinkAnswer.OTHER_NODE: "two nodes have this address, or a router redirects it: give each an address of its own",
    LinkAnswer.NO_ANSWER: f"in firewalls and security groups open {_PORTS}; check routes and PADDLE_NIC",
}
_NO_FIX = "check the network between these nodes"
Pair = Tuple[int, int]
Names = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Pattern:
    """The pairs of nodes to try, each in both directions. `coverage`: a description of the pairs if they are not all."""

    pairs: Tuple[Pair, ...]
    coverage: str = ""


@dataclass(frozen=True)
class Try:
    """One node's attempt to reach another one's port. `result`: see LinkAnswer; seconds of the round trip."""

    source: int
    target: int
    port: int
    result: str
    seconds: float = 0.0

    @property
    def answer(self) -> LinkAnswer:
        return LinkAnswer.of(self.result)


class Direction(NamedTuple):
    """What came of all attempts from one node to another: as text, and which answers were not OK."""

    text: str
    bad: FrozenSet[LinkAnswer] = frozenset()


_NOT_TRIED = Direction("not tried")


def choose_pairs(nodes: Sequence[int], most: int = MOST) -> Pattern:
    """Choose the pairs to try: all of up to `most` nodes; among more each node meets those 1, 2, 4, 8, ... places further.

    The nodes form a ring. So every node is reached from every other one in few steps, and has about 2 log2(n) others.
    """
    ring = sorted(nodes)
    count = len(ring)
    if count <= most:
        return Pattern(tuple((a, b) for place, a in enumerate(ring) for b in ring[place + 1 :]))
    steps = [1 << power for power in range(count.bit_length()) if 1 << power <= count // 2]
    pairs = {tuple(sorted((ring[place], ring[(place + step) % count]))) for place in range(count) for step in steps}
    places = ", ".join(map(str, steps))
    coverage = f"each of {count} nodes with those {places} places before and after it, not every pair"
    return Pattern(tuple(sorted((a, b) for a, b in pairs)), coverage)


def rounds(pairs: Sequence[Pair]) -> Tuple[Tuple[Pair, ...], ...]:
    """Divide pairs into rounds in which no node is in two pairs: each round takes the first pairs left that fit.

    All pairs of n nodes are divided so that they take n - 1 (n is even) or n rounds.
    """
    nodes = sorted({node for pair in pairs for node in pair})
    if len(pairs) == len(nodes) * (len(nodes) - 1) // 2:
        return _tournament(nodes)
    left, found = list(pairs), []
    while left:
        busy: set[int] = set()
        now = []
        for pair in left:
            if not busy & set(pair):
                now.append(pair)
                busy.update(pair)
        left = [pair for pair in left if pair not in now]
        found.append(tuple(now))
    return tuple(found)


def _tournament(nodes: Sequence[int]) -> Tuple[Tuple[Pair, ...], ...]:
    """Divide all pairs into rounds by the circle method: one node stays, the others turn."""
    seats: List[int] = [*nodes, -1] if len(nodes) % 2 else list(nodes)
    half, found = len(seats) // 2, []
    for _ in range(len(seats) - 1):
        pairs = zip(seats[:half], reversed(seats[half:]))
        found.append(tuple((min(pair), max(pair)) for pair in pairs if -1 not in pair))
        seats = [seats[0], seats[-1], *seats[1:-1]]
    return tuple(found)


def ports_to_try(cluster: Cluster, facts: ByNode, made: "Plan | None", seed: str) -> Dict[int, Tuple[int, ...]]:
    """Choose up to PORTS ports of every node: those of a plan, else ports such as a plan would choose.

    Ports in use are not tested.
    """
    if made is None:
        return {node: found[:PORTS] for node, found in sample(cluster, facts, seed).items()}
    chosen: Dict[int, Dict[int, None]] = {node: {} for node in facts}
    for node, port in made.extra_ports:  # the master's first, which all ranks meet at
        chosen[node][port] = None
    for process in made.processes:
        for port in process.ports:
            chosen[process.node][port] = None
    free = {node: [port for port in ports if port not in facts[node].busy] for node, ports in chosen.items()}
    return {node: tuple(ports[:PORTS]) for node, ports in free.items()}


def targets(found: Pattern, ports: Mapping[int, Sequence[int]]) -> Dict[int, List[Pair]]:
    """Map each node to the (node, port) pairs that it tries.

    They are all ports of its peers, or one of each peer where there are more than FEW nodes.
    """
    few = len(ports) <= FEW
    asked: Dict[int, List[Pair]] = {node: [] for node in ports}
    for a, b in found.pairs:
        for source, target in ((a, b), (b, a)):
            there = ports.get(target, ())
            if source in asked and there:
                asked[source] += [(target, port) for port in (there if few else (there[source % len(there)],))]
    return asked


# -- what the answers mean


def judge(tries: Sequence[Try], nodes: Sequence[int], names: Names) -> List[Finding]:
    """Return the findings of the column mesh: an error for broken pairs, a warning for nodes that were not tried, else ok.

    names: folds names.

    The node with most broken pairs is reported with all of them, then the next one of the rest, so that without the nodes that
    have an error all others reach each other.
    """
    directions = _directions(tries)
    broken = {pair for pair, direction in directions.items() if direction.bad}
    left = {(min(pair), max(pair)) for pair in broken}
    found: List[Finding] = []
    while left:
        worst = _most(left)
        peers = sorted(a + b - worst for a, b in left if worst in (a, b))
        found += _broken(worst, peers, directions, names)
        left = {pair for pair in left if worst not in pair}
    for node in sorted(set(nodes) - {finding.node for finding in found}):
        if any(one.source == node for one in tries) and any(one.target == node for one in tries):
            found.append(Finding(node, "mesh", "ok", "ok"))
        else:
            fix = "see its other findings, and try again: it opened no port for the others, or did not answer"
            found.append(Finding(node, "mesh", "warn", "not tried", fix))
    return found


def _most(pairs: Collection[Pair]) -> int:
    """Return the node that is in most pairs, of equal ones the first."""
    return max(sorted({node for pair in pairs for node in pair}), key=lambda node: sum(node in pair for pair in pairs))


def _directions(tries: Sequence[Try]) -> Dict[Pair, Direction]:
    """Map (source, target) to the summary of the attempts from one node to the other."""
    by_pair = grouped(((one.source, one.target), one) for one in tries)
    return {pair: _summarize(found) for pair, found in by_pair.items()}


def _summarize(tries: Sequence[Try]) -> Direction:
    """Summarize the attempts from one node to another: "ok", or what was wrong, with the ports if some attempts were ok."""
    bad = [one for one in tries if one.answer is not LinkAnswer.OK]
    if not bad:
        return Direction(LinkAnswer.OK.value)
    text = ", ".join(dict.fromkeys(_guess(one) for one in bad))
    if len(bad) < len(tries):
        text = f"{text} at port {', '.join(str(one.port) for one in bad)}"
    return Direction(text, frozenset(one.answer for one in bad))


def _guess(one: Try) -> str:
    """Describe the result of an attempt; no answer may be due to a firewall."""
    return f"{one.result} (firewall?)" if one.answer is LinkAnswer.NO_ANSWER else one.result


def _broken(node: int, peers: Sequence[int], directions: Mapping[Pair, Direction], names: Names) -> List[Finding]:
    """Report both directions of a node's broken pairs, equal ones together."""
    both = [(directions.get((node, peer), _NOT_TRIED), directions.get((peer, node), _NOT_TRIED)) for peer in peers]
    found = []
    for (out, back), group in grouped(zip(both, peers)).items():
        here, there = names([node]), names(group)
        text = f"{here} -> {there}: {out.text}, {there} -> {here}: {back.text}"
        fix = next((fix for answer, fix in _FIXES.items() if answer in out.bad | back.bad), _NO_FIX)
        found.append(Finding(node, "mesh", "error", text, fix))
    return found


def slow_links(speeds: Mapping[Pair, float], names: Names) -> List[Finding]:
    """Warn of links with less than half of the median bandwidth.

    The node with most slow links is reported with all of them, then the next one of the rest. speeds: bytes per second of each
    pair; fewer than three are not judged.
    """
    if len(speeds) < 3:
        return []
    usual = sorted(speeds.values())[len(speeds) // 2]
    slow = {pair: speed for pair, speed in speeds.items() if speed < SLOW * usual}
    found = []
    while slow:
        node = _most(slow)
        mine = {pair: speed for pair, speed in slow.items() if node in pair}
        peers = sorted({a + b - node for a, b in mine})
        least = min(mine.values())
        text = f"{names([node])} and {names(peers)}: down to {rate(least)}, usual {rate(usual)}"
        found.append(Finding(node, "mesh", "warn", text, "check its cable, port, duplex and MTU, and other traffic"))
        slow = {pair: speed for pair, speed in slow.items() if node not in pair}
    return found


def rate(bytes_per_second: float) -> str:
    """Format bytes per second as bits, as networks count: 9.4 Gbit/s, 940 Mbit/s."""
    bits = 8 * bytes_per_second
    return f"{bits / 1e9:.1f} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.0f} Mbit/s"
