"""A link check lets every node connect to every other one, at ports such as a job's. The laptop only coordinates it."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from clustertool.errors import ClustertoolError
from clustertool.fleet.fleet import Fleet
from clustertool.model.checks import link_findings as plan
from clustertool.model.config.cluster import Cluster
from clustertool.model.facts import Facts
from clustertool.model.finding import Finding
from clustertool.model.wire.link_answer import LinkAnswer
from clustertool.model.wire.messages import LINK_CLOSE, LINK_OPEN, LINK_SEND, LINK_TRY
from clustertool.show.table import fold
from clustertool.verbs.preflight import short

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


def mesh(
    cluster: Cluster,
    fleet: Fleet,
    facts: Mapping[int, Facts],
    ports: Mapping[int, Sequence[int]],
    bandwidth: bool = False,
) -> Meshed:
    """Try all links between the nodes that answered, at some ports of each. Raises nothing for a single node."""
    names = {host.index: host.name for host in cluster.hosts}
    token = secrets.token_hex(16)

    def folded(nodes: Sequence[int]) -> str:
        return fold(names[node] for node in nodes)

    found = plan.pattern(sorted(facts))
    addresses = {node: fact.address for node, fact in facts.items()}
    failed: dict[int, ClustertoolError] = {}
    try:
        opened = _open(fleet, ports, addresses, token, failed)
        tries = _try(fleet, plan.targets(found, opened), addresses, token, failed)
        good = {(one.source, one.target): one.port for one in tries if one.answer is LinkAnswer.OK}
        speeds, left = _send(fleet, found.pairs, good, addresses, token, failed) if bandwidth else ({}, 0)
    finally:
        for agent in fleet.agents.values():
            agent.send(LINK_CLOSE({}))  # no caller waits for that
    findings = plan.judge(tries, sorted(facts), folded) + plan.slow_links(speeds, folded)
    findings += [
        Finding(node, "mesh", "error", f"not tried: {short(error)}", error.fix) for node, error in failed.items()
    ]
    return Meshed(tuple(findings), tuple(tries), speeds, found.coverage, left)


def _open(
    fleet: Fleet,
    ports: Mapping[int, Sequence[int]],
    addresses: Mapping[int, str],
    token: str,
    failed: dict[int, ClustertoolError],
) -> dict[int, tuple[int, ...]]:
    """The ports that listen now. `failed` gets the nodes that did not answer."""
    asked = {
        node: LINK_OPEN({"node": node, "address": addresses[node], "ports": list(some), "token": token})
        for node, some in ports.items()
    }
    gathered = fleet.ask(asked, _PATIENCE)
    failed.update(gathered.failed)
    return {node: tuple(answer["ports"]) for node, answer in gathered.ok.items()}


def _try(
    fleet: Fleet,
    targets: Mapping[int, Sequence[plan.Pair]],
    addresses: Mapping[int, str],
    token: str,
    failed: dict[int, ClustertoolError],
) -> list[plan.Try]:
    asked = {
        node: LINK_TRY(
            {"token": token, "seconds": _TRY, "targets": [(peer, addresses[peer], port) for peer, port in some]}
        )
        for node, some in targets.items()
        if some
    }
    gathered = fleet.ask(asked, _PATIENCE)
    failed.update(gathered.failed)
    return [plan.Try(node, *row) for node, answer in gathered.ok.items() for row in answer["tries"]]


def _send(
    fleet: Fleet,
    pairs: Sequence[plan.Pair],
    good: Mapping[plan.Pair, int],
    addresses: Mapping[int, str],
    token: str,
    failed: dict[int, ClustertoolError],
) -> tuple[dict[plan.Pair, float], int]:
    """Rounds in which every node is in one pair at most, one direction after the other; what the time allows."""
    speeds: dict[plan.Pair, float] = {}
    rounds = plan.rounds(pairs)
    allowed = max(1, int(_ALL_SENDS / (2 * _SEND)))
    for now in rounds[:allowed]:
        for links in (now, [(b, a) for a, b in now]):
            asked = {
                a: LINK_SEND({"token": token, "seconds": _SEND, "target": (b, addresses[b], good[a, b])})
                for a, b in links
                if (a, b) in good
            }
            target = dict(links)
            gathered = fleet.ask(asked, _PATIENCE)
            failed.update(gathered.failed)
            for a, answer in gathered.ok.items():
                if "speed" in answer:
                    speeds[a, target[a]] = float(answer["speed"])
    return speeds, sum(len(now) for now in rounds[allowed:])


def as_json(meshed: Meshed, cluster: Cluster) -> dict[str, Any]:
    names = {host.index: host.name for host in cluster.hosts}
    return {
        "told": meshed.coverage,
        "links": [
            {
                "from": names[one.source],
                "to": names[one.target],
                "port": one.port,
                "answer": one.result,
                "seconds": round(one.seconds, 6) if one.answer is LinkAnswer.OK else None,
                "bytes_per_second": round(meshed.speeds.get((one.source, one.target), 0.0)) or None,
            }
            for one in sorted(meshed.tries, key=lambda one: (one.source, one.target, one.port))
        ],
    }


def describe(meshed: Meshed, cluster: Cluster) -> list[str]:
    """What is worth telling of links that work: how many, the slowest."""
    names = {host.index: host.name for host in cluster.hosts}
    good = [one for one in meshed.tries if one.answer is LinkAnswer.OK]
    lines = []
    if good:
        slow = max(good, key=lambda one: one.seconds)
        middle = sorted(one.seconds for one in good)[len(good) // 2]
        tried, answered = len({(o.source, o.target) for o in meshed.tries}), len({(o.source, o.target) for o in good})
        lines.append(
            f"links: {answered} of {tried} answer, {_ms(middle)} there and back, "
            f"at most {_ms(slow.seconds)} ({names[slow.source]} -> {names[slow.target]})"
        )
    if meshed.coverage:
        lines.append(f"links tried: {meshed.coverage}")
    if meshed.speeds:
        pair, least = min(meshed.speeds.items(), key=lambda item: item[1])
        usual = sorted(meshed.speeds.values())[len(meshed.speeds) // 2]
        lines.append(
            f"bandwidth: {plan.rate(usual)}, at least {plan.rate(least)} ({names[pair[0]]} -> {names[pair[1]]})"
        )
    if meshed.left:
        lines.append(f"bandwidth: for {meshed.left} pairs there was no time")
    return lines


def _ms(seconds: float) -> str:
    return f"{1000 * seconds:.2f} ms"
