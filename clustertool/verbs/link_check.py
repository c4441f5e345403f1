"""A link check lets every node connect to every other one, at ports such as a job's. The laptop only coordinates it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from clustertool.engines.preflight import folding, short
from clustertool.errors import ClustertoolError
from clustertool.fleet.fleet import Fleet
from clustertool.model.checks import link_findings as plan
from clustertool.model.config.cluster import Cluster
from clustertool.model.facts import ByNode
from clustertool.model.finding import Finding
from clustertool.model.link_answer import LinkAnswer
from clustertool.model.wire.messages import LINK_CLOSE, LINK_OPEN, LINK_SEND, LINK_TRY, Answered, Request

_TRY = 1.15  # seconds for one connection: a lost first packet is sent again after one
_SEND = 0.4  # seconds for which one link is filled
_ALL_SENDS = 30.0  # seconds for all rounds of it
_PATIENCE = 30.0


@dataclass(frozen=True)
class Meshed:
    """What came of it: findings, all tries, and bytes a second of each direction that was measured."""

    findings: tuple[Finding, ...]
    tries: tuple[plan.Try, ...]
    speeds: Mapping[plan.Pair, float]
    coverage: str  # a description of the pairs that were tested
    left: int  # pairs whose bandwidth was not measured for lack of time


def mesh(fleet: Fleet, facts: ByNode, ports: Mapping[int, Sequence[int]], bandwidth: bool = False) -> Meshed:
    """Try all links between the nodes that answered, at some ports of each. Raises nothing for a single node."""
    found = plan.pattern(sorted(facts))
    links = _Links(fleet, {node: fact.address for node, fact in facts.items()})
    try:
        tries = links.connect(plan.targets(found, links.open(ports)))
        good = {(one.source, one.target): one.port for one in tries if one.answer is LinkAnswer.OK}
        speeds, left = links.fill(found.pairs, good) if bandwidth else ({}, 0)
    finally:
        for agent in fleet.agents.values():
            agent.send(LINK_CLOSE({}))  # no caller waits for that
    folded = folding(fleet.cluster)
    findings = plan.judge(tries, sorted(facts), folded) + plan.slow_links(speeds, folded)
    for node, error in links.failed.items():
        findings.append(Finding(node, "mesh", "error", f"not tried: {short(error)}", error.fix))
    return Meshed(tuple(findings), tuple(tries), speeds, found.coverage, left)


class _Links:
    """The requests of one link check. `failed` has the nodes that did not answer one of them."""

    def __init__(self, fleet: Fleet, addresses: Mapping[int, str]) -> None:
        self.failed: dict[int, ClustertoolError] = {}
        self._fleet, self._addresses, self._token = fleet, addresses, secrets.token_hex(16)

    def _ask(self, asked: Mapping[int, Request[Answered]]) -> dict[int, Answered]:
        gathered = self._fleet.ask(asked, _PATIENCE)
        self.failed.update(gathered.failed)
        return gathered.ok

    def open(self, ports: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
        """Open ports on nodes and return those that listen now."""
        asked = {
            node: LINK_OPEN({"node": node, "address": self._addresses[node], "ports": list(some), "token": self._token})
            for node, some in ports.items()
        }
        return {node: tuple(answer["ports"]) for node, answer in self._ask(asked).items()}

    def connect(self, targets: Mapping[int, Sequence[plan.Pair]]) -> list[plan.Try]:
        asked = {}
        for node, some in targets.items():
            if some:
                wanted = [(peer, self._addresses[peer], port) for peer, port in some]
                asked[node] = LINK_TRY({"token": self._token, "seconds": _TRY, "targets": wanted})
        return [plan.Try(node, *row) for node, answer in self._ask(asked).items() for row in answer["tries"]]

    def fill(self, pairs: Sequence[plan.Pair], good: Mapping[plan.Pair, int]) -> tuple[dict[plan.Pair, float], int]:
        """Measure bandwidths in rounds in which every node is in one pair at most, one direction after the other.

        Returns the speeds of as many rounds as the time allows, and the number of pairs that were left out.
        """
        speeds: dict[plan.Pair, float] = {}
        rounds = plan.rounds(pairs)
        allowed = max(1, int(_ALL_SENDS / (2 * _SEND)))
        for now in rounds[:allowed]:
            for links in (dict(now), {b: a for a, b in now}):
                asked = {}
                for a, b in links.items():
                    if (a, b) in good:
                        target = (b, self._addresses[b], good[a, b])
                        asked[a] = LINK_SEND({"token": self._token, "seconds": _SEND, "target": target})
                for a, answer in self._ask(asked).items():
                    if "speed" in answer:
                        speeds[a, links[a]] = float(answer["speed"])
        return speeds, sum(len(now) for now in rounds[allowed:])


def as_json(meshed: Meshed, cluster: Cluster) -> dict[str, object]:
    return {
        "told": meshed.coverage,
        "links": [
            {
                "from": cluster.hosts[one.source].name,
                "to": cluster.hosts[one.target].name,
                "port": one.port,
                "answer": one.result,
                "seconds": round(one.seconds, 6) if one.answer is LinkAnswer.OK else None,
                "bytes_per_second": round(meshed.speeds.get((one.source, one.target), 0.0)) or None,
            }
            for one in sorted(meshed.tries, key=lambda one: (one.source, one.target, one.port))
        ],
    }


def describe(meshed: Meshed, cluster: Cluster) -> list[str]:
    """Describe the links that work: how many, the slowest, their bandwidth."""

    def arrow(source: int, target: int) -> str:
        return f"{cluster.hosts[source].name} -> {cluster.hosts[target].name}"

    good = [one for one in meshed.tries if one.answer is LinkAnswer.OK]
    lines = []
    if good:
        slow = max(good, key=lambda one: one.seconds)
        middle = sorted(one.seconds for one in good)[len(good) // 2]
        tried, answered = len({(o.source, o.target) for o in meshed.tries}), len({(o.source, o.target) for o in good})
        most = f"at most {_ms(slow.seconds)} ({arrow(slow.source, slow.target)})"
        lines.append(f"links: {answered} of {tried} answer, {_ms(middle)} there and back, {most}")
    if meshed.coverage:
        lines.append(f"links tried: {meshed.coverage}")
    if meshed.speeds:
        pair, least = min(meshed.speeds.items(), key=lambda item: item[1])
        usual = sorted(meshed.speeds.values())[len(meshed.speeds) // 2]
        lines.append(f"bandwidth: {plan.rate(usual)}, at least {plan.rate(least)} ({arrow(*pair)})")
    if meshed.left:
        lines.append(f"bandwidth: for {meshed.left} pairs there was no time")
    return lines


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"
