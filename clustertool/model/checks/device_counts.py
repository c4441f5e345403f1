"""These checks compare the number, models, faults and users of all nodes' cards. Only cards that a job may get count."""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, FrozenSet, Iterable, List, Mapping, Optional, Sequence, Tuple

from clustertool.model.cards import (
    IN_USE_FIX,
    Fault,
    computing_processes,
    describe,
    exclusive,
    find_faults,
    holder,
    in_use,
)
from clustertool.model.checks.across_nodes import most_common
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.folded_names import grouped
from clustertool.model.config.hosts import Host
from clustertool.model.facts import ByNode
from clustertool.model.finding import Finding
from clustertool.model.planning.devices import TWICE_FIX, choose_device_kind, given_twice
from clustertool.model.planning.plan import Plan
from clustertool.model.quantities import human_bytes

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Card, CardProcess, DevicesAnswer

Reports = Mapping[int, "DevicesAnswer"]
CHECKS = ("devices", "driver", "health", "users")
_COUNT_FIX = "dmesg and the vendor's tool there show the reason; if it is intended, set devices in HOSTS"
_MODEL_FIX = "the slowest device sets the pace of all: leave the node out with --skip, or accept it"
_DRIVER_FIX = "install driver {} there: with different ones collectives may hang, or be slow"
_SILENT_FIX = "run the vendor's tool (nvidia-smi) on the node; reboot it after a driver update, or if the driver hangs"
_USER_FIX = "wait for its end, or end it if it is yours; --devices auto takes devices that are free"
_HIDDEN_FIX = "an invisible process in a container, or memory of a dead one: search there, or reset the device"


def nodes_to_ask(cluster: Cluster, facts: ByNode) -> List[int]:
    """Select the nodes with cards that a job may use; none if CHECKS_OFF has all of CHECKS."""
    if set(CHECKS) <= set(cluster.checks_off):
        return []
    with_some = [
        node for node, fact in sorted(facts.items()) if fact.devices and choose_device_kind(cluster, fact) != "cpu"
    ]
    return [node for node in with_some if cluster.hosts[node].devices != ()]


def shared_cards(made: Optional[Plan]) -> Dict[int, FrozenSet[int]]:
    """Map each node of a plan to those of its cards that more than one process gets; {} without a plan."""
    times: Dict[int, List[int]] = {}
    for process in made.processes if made else ():
        times.setdefault(process.node, []).extend(process.devices)
    return {node: frozenset(card for card in cards if cards.count(card) > 1) for node, cards in times.items()}


def inventory(
    cluster: Cluster, facts: ByNode, reports: Reports, twice: Mapping[int, FrozenSet[int]]
) -> Tuple[Finding, ...]:
    """Collect the findings about the cards of nodes that were asked, and about nodes that have none where others have some.

    Those of checks in CHECKS_OFF are left out. reports: answers by node. twice: cards that more than one rank gets, by node: a
    fault only in an exclusive compute mode.
    """
    hosts = {host.index: host for host in cluster.hosts}
    found = [*_counts(hosts, facts, reports), *_one_machine(cluster, facts)] if reports else []
    cards = {node: _usable_cards(hosts[node], report) for node, report in sorted(reports.items())}
    found += _compare_cards(cards, reports)
    for node, report in sorted(reports.items()):
        found += [*_health(node, report, cards[node], twice.get(node, frozenset())), *_users(node, report, cards[node])]
    return tuple(finding for finding in found if finding.column not in cluster.checks_off)


def _usable_cards(host: Host, report: DevicesAnswer) -> List[Card]:
    """Select the cards that HOSTS gives to jobs, by devices or slots; all if it has neither."""
    ids = host.devices if host.devices is not None else host.on_slots(tuple(report["ids"]))
    return [card for card in report["devices"] if card["index"] in ids]


# -- what they are


def _counts(hosts: Mapping[int, Host], facts: ByNode, reports: Reports) -> List[Finding]:
    """Warn of hosts with another number of devices than most that have some.

    Hosts may have any number if conf.py or a hostfile defines it, or if they train nothing.
    """
    numbers = {node: len(reports[node]["devices"]) if node in reports else 0 for node in sorted(facts)}
    free = {node: number for node, number in numbers.items() if _any_number(hosts[node])}
    usual = most_common(number for number in free.values() if number)
    return [
        Finding(node, "devices", "warn", f"{number or 'no'} devices, others {usual}", _COUNT_FIX)
        for node, number in free.items()
        if usual is not None and number != usual
    ]


def _one_machine(cluster: Cluster, facts: ByNode) -> List[Finding]:
    """Report nodes of one machine that would get the same devices: an error, or a warning where their names show the intent."""
    hosts = [host for host in cluster.hosts if host.index in facts and (host.plays("trainer") or host.plays("heter"))]
    kinds = {host.index: choose_device_kind(cluster, facts[host.index]) for host in hosts}
    given = {
        host.index: host.on_slots(facts[host.index].devices) if host.devices is None else host.devices
        for host in hosts
        if kinds[host.index] != "cpu"
    }
    return [
        Finding(one.node, "devices", "warn" if one.meant else "error", one.text(cluster, kinds[one.node]), TWICE_FIX)
        for one in given_twice(cluster, facts, given)
    ]


def _any_number(host: Host) -> bool:
    """Check whether a host trains with all devices that it has: HOSTS and hostfile name neither devices nor slots."""
    return host.devices is None and host.slots is None and (host.plays("trainer") or host.plays("heter"))


def _compare_cards(cards: Mapping[int, Sequence[Card]], reports: Reports) -> List[Finding]:
    """Warn of nodes with other models or drivers than most, and report models and drivers of all."""
    models = {}
    for node, own in cards.items():
        models[node] = ", ".join(dict.fromkeys(str(card["model"]) for card in own if card.get("model")))
    drivers = {node: _driver(report) for node, report in reports.items()}
    found = _warn_of_different("devices", models, _MODEL_FIX) + _warn_of_different("driver", drivers, _DRIVER_FIX)
    for node, own in cards.items():
        found.append(Finding(node, "devices", "ok", f"{len(own)} x {models[node] or reports[node]['kind']}"))
    return found + [Finding(node, "driver", "ok", driver) for node, driver in drivers.items() if driver]


def _driver(report: DevicesAnswer) -> str:
    """Format the driver: `550.54.15 (CUDA 12.4)`, with the newest CUDA that it supports; "" if it is not known."""
    cuda = f" (CUDA {report['cuda']})" if report.get("cuda") else ""
    return f"{report['driver']}{cuda}" if report.get("driver") else ""


def _warn_of_different(column: str, values: Mapping[int, str], fix: str) -> List[Finding]:
    """Warn of nodes with another value than most. A value that a node does not report is not compared."""
    known = {node: value for node, value in values.items() if value}
    usual = most_common(known[node] for node in sorted(known))
    odd = [(node, value) for node, value in sorted(known.items()) if value != usual]
    return [Finding(node, column, "warn", f"{value}, others {usual}", fix.format(usual)) for node, value in odd]


# -- how they are


def _health(node: int, report: DevicesAnswer, cards: Sequence[Card], twice: FrozenSet[int]) -> List[Finding]:
    """Report the faults of a node's cards, equal ones together; one finding of level ok if there are none.

    A problem with the query of the cards is an error for kind gpu, as without NVML there is no NCCL either, else a warning. A
    gpu without a report of its driver is an error. twice: cards that more than one rank gets.
    """
    kind = str(report["kind"])
    found = []
    if report.get("problem"):
        level = "error" if kind == "gpu" else "warn"
        found.append(Finding(node, "health", level, str(report["problem"]), _SILENT_FIX))
    ill: Dict[Tuple[str, str, str], List[int]] = {}
    unknown = [card["index"] for card in cards if "problem" not in card]
    if unknown and kind == "gpu" and not report.get("problem"):
        ill["error", "the driver does not know it", _COUNT_FIX] = unknown
    for card in cards:
        for key in _by_level(find_faults(card, card["index"] in twice)):
            ill.setdefault(key, []).append(card["index"])
    for (level, text, fix), ids in ill.items():
        found.append(Finding(node, "health", level, f"{_ids(kind, ids)}: {text}", fix))
    # Without persistence mode each start of a program costs seconds: no fault.
    wakes = any(card.get("persistence") is False for card in cards)
    return found or [Finding(node, "health", "ok", "persistence mode off" if wakes else "ok")]


def _by_level(found: Sequence[Fault]) -> List[Tuple[str, str, str]]:
    """Join the faults of a card by level: (level, all texts, all fixes)."""
    levels = []
    for level, alike in grouped((fault.level, fault) for fault in found).items():
        fixes = dict.fromkeys(fault.fix for fault in alike)
        levels.append((level, ", ".join(fault.text for fault in alike), "; ".join(fixes)))
    return levels


def _ids(kind: str, ids: Iterable[int]) -> str:
    """Format devices: `gpu 0,1`."""
    return f"{kind} {','.join(map(str, ids))}"


# -- the processes on them


def _users(node: int, report: DevicesAnswer, cards: Sequence[Card]) -> List[Finding]:
    """Report cards that jobs have locked, processes on cards, and memory in use without a process; else one finding "ok"."""
    kind = str(report["kind"])
    locks = {card["index"]: card.get("held") for card in cards}
    locked = {index: holder(lock["job"], lock["user"]) for index, lock in locks.items() if lock}
    found = [Finding(node, "users", "warn", in_use(kind, locked), IN_USE_FIX)] if locked else []
    found += _processes(node, kind, cards) + _hidden(node, kind, cards)
    return found or [Finding(node, "users", "ok", "none")]


def _processes(node: int, kind: str, cards: Sequence[Card]) -> List[Finding]:
    """Report each process that computes on these cards once, with all of them, as an error or a warning.

    A card is left out if the process belongs to the job that has locked it, see _of_holder(). It is an error if one of the
    cards is in exclusive mode, on which no second process can start.
    """
    seen = ((card, process) for card in cards for process in computing_processes(card))
    by_pid = grouped((process["pid"], (card, process)) for card, process in seen if not _of_holder(card, process))
    found = []
    for pairs in by_pid.values():
        memory = sum(process.get("memory") or 0 for _, process in pairs)
        alone = any(exclusive(card) for card, _ in pairs)
        text = f"{_ids(kind, [card['index'] for card, _ in pairs])}: {describe(pairs[0][1])}"
        text += f" {human_bytes(memory)}" * bool(memory) + ", and only one may compute there" * alone
        found.append(Finding(node, "users", "error" if alone else "warn", text, _USER_FIX))
    return found


def _of_holder(card: Card, process: CardProcess) -> bool:
    """Check whether a process has the user of its card's lock, and its job, if it shows one; False without a lock."""
    locked = card.get("held")
    if not locked:
        return False
    return (process.get("job") or locked["job"]) == locked["job"] and process.get("user") == locked["user"]


def _hidden(node: int, kind: str, cards: Sequence[Card]) -> List[Finding]:
    """Warn of cards with more than half of their memory in use, without a visible process or a lock."""
    found = []
    for card in cards:
        total, free = card.get("memory_total"), card.get("memory_free")
        if total and free is not None and free < total / 2 and not card.get("held") and not computing_processes(card):
            text = f"{_ids(kind, [card['index']])}: {human_bytes(free)} of {human_bytes(total)} free, without a visible process"
            found.append(Finding(node, "users", "warn", text, _HIDDEN_FIX))
    return found
