"""These checks find differences between nodes that should be equal. They report the deviating nodes and the common value."""

from __future__ import annotations

from collections import Counter
from typing import Dict, Hashable, Iterable, List, Mapping, Sequence, Tuple, TypeVar

from clustertool.model.facts import ByNode, Facts
from clustertool.model.finding import Finding, pip_name

SKEW = 5.0  # seconds between two clocks; logs are merged by time
_LOOPBACK = ("127.", "::1")
_CLOCK_FIX = "run a time service (chrony) there: logs are merged by time"
T = TypeVar("T", bound=Hashable)


def drift(facts: ByNode, asked: Mapping[int, Tuple[float, float]]) -> List[Finding]:
    """Collect the findings that compare nodes: clocks, names, MTUs, interpreters, packages."""
    return [*_clocks(facts, asked), *_check_names(facts), *_mtus(facts), *_interpreters(facts), *_packages(facts)]


# -- clocks


def _clocks(facts: ByNode, asked: Mapping[int, Tuple[float, float]]) -> List[Finding]:
    """Compare the clock of each node in `asked` with the median of theirs and the laptop's; a single one with the laptop's.

    A difference of more than SKEW and the error of its estimate is a warning. If the median itself is so far from the laptop's
    clock, the nodes that agree with it get a warning about the laptop's; otherwise they are ok.
    """
    skews = {node: skew(fact, *asked[node]) for node, fact in facts.items() if node in asked}
    right = _middle([0.0, *(off for off, _ in skews.values())]) if len(skews) > 1 else 0.0
    laptop = abs(right) > SKEW + max((doubt for _, doubt in skews.values()), default=0.0)
    found = []
    for node, (off, doubt) in skews.items():
        if abs(off - right) > SKEW + doubt:
            found.append(Finding(node, "clock", "warn", f"{off - right:+.0f} s", _CLOCK_FIX))
        elif laptop:
            text = f"{right:+.0f} s from this machine's"
            fix = "set the clock of the machine you type on: the nodes agree"
            found.append(Finding(node, "clock", "warn", text, fix))
        else:
            found.append(Finding(node, "clock", "ok", "right"))
    return found


def _middle(values: Sequence[float]) -> float:
    """Compute the median; of two in the middle the one nearer to the laptop's clock."""
    ordered = sorted(values)
    return min(ordered[(len(ordered) - 1) // 2], ordered[len(ordered) // 2], key=abs)


def skew(fact: Facts, before: float, after: float) -> Tuple[float, float]:
    """Estimate the seconds by which a node's clock is ahead of the laptop's, and the error of the estimate.

    The error is half of the time on the network.

    before, after: the laptop's clock at request and answer.
    """
    way = max(0.0, after - before - fact.took)
    return ((fact.time - fact.took - before) + (fact.time - after)) / 2, way / 2


# -- names and interfaces


def _check_names(facts: ByNode) -> List[Finding]:
    """Return one finding about the host name and the training address of each node, by _check_name().

    A machine that resolves its own name to 127.0.1.1 announces this address. This does not matter if there is one machine only.
    """
    several = len({fact.machine for fact in facts.values()}) > 1
    return [_check_name(fact, several) for fact in facts.values()]


def _check_name(fact: Facts, several: bool) -> Finding:
    """Judge a node's training address and host name: one finding of the column host.

    A loopback address for training is an error. A name that resolves to a loopback address, or on an examined node to none, is
    a warning. several: the nodes are several machines; else all is ok.
    """
    name, own = fact.hostname, fact.own
    if several and fact.address.startswith(_LOOPBACK):
        fix = "name it in HOSTS by an address that the others can reach, or set its address there"
        fix += "; where the command is typed on each machine: --host ADDRESS"
        text = f"{fact.address} is its training address: itself, for every node"
        return Finding(fact.node, "host", "error", text, fix)
    if several and own and own.startswith(_LOOPBACK):
        fix = f"in its /etc/hosts, write {fact.address} {name} instead: programs that resolve their own name announce {own}"
        return Finding(fact.node, "host", "warn", f"{name} is {own}", fix)
    if several and fact.examined and not own:
        what = f"{name} is not known there" if own == "" else "its name server does not answer"
        return Finding(fact.node, "host", "warn", what, f"add {fact.address} {name} to its /etc/hosts")
    return Finding(fact.node, "host", "ok", "ok")


def _mtus(facts: ByNode) -> List[Finding]:
    """Report the MTU of each node's interface: a warning where most have another one, else ok.

    An unknown MTU, and that of loopback, are not compared.
    """
    known = {node: fact.mtu for node, fact in facts.items() if fact.mtu and fact.nic != "lo"}
    usual = most_common(known.values())
    found = []
    for node, fact in facts.items():
        if known.get(node, usual) == usual:
            found.append(Finding(node, "mtu", "ok", str(fact.mtu or "")))
        else:
            fix = f"ip link set {fact.nic} mtu {usual}, and the switch the same: large packets are lost, small ones arrive"
            found.append(Finding(node, "mtu", "warn", f"{fact.mtu}, others {usual}", fix))
    return found


# -- interpreters and packages


def _interpreters(facts: ByNode) -> List[Finding]:
    """Warn of nodes whose jobs have another python3 than most: at another path, or of another minor version.

    Nodes where it is not known are left out.
    """
    known = {node: fact.job_python for node, fact in facts.items() if fact.job_python[0]}
    usual = most_common((path, _minor(version)) for path, version in known.values())
    found = []
    for node, (path, version) in known.items():
        if (path, _minor(version)) != usual:
            others = next(f"{path} {version}" for path, version in known.values() if (path, _minor(version)) == usual)
            fix = "install the same one there, or have PRELUDE activate the same environment on all nodes"
            found.append(Finding(node, "python", "warn", f"python3 of jobs is {path} {version}, others {others}", fix))
    return found


def _minor(version: str) -> str:
    """Shorten a version to its first two numbers."""
    return ".".join(version.split(".")[:2])


def _packages(facts: ByNode) -> List[Finding]:
    """Report nodes without a package that others have (error), and nodes with another version than most (warning).

    Nodes that report no packages are left out.
    """
    known: Dict[int, Dict[str, str]] = {node: dict(fact.packages) for node, fact in facts.items() if fact.packages}
    found: List[Finding] = []
    for name in dict.fromkeys(name for versions in known.values() for name in versions):
        usual = most_common(versions[name] for versions in known.values() if versions.get(name))
        if usual is None:
            continue  # no node has it
        for node, versions in known.items():
            version = versions.get(name, "")
            if version == usual:
                continue
            if not version:
                fix = f"install {pip_name(name)} {usual} there, or have PRELUDE activate the environment that has it"
                found.append(Finding(node, "packages", "error", f"no {name}, others have {usual}", fix))
            else:
                fix = f"install {pip_name(name)} {usual} there: different versions may hang, or train differently"
                found.append(Finding(node, "packages", "warn", f"{name} {version}, others {usual}", fix))
    return found


def most_common(values: Iterable[T]) -> "T | None":
    """Return the most frequent value, None if there is none; of equally frequent ones the first."""
    counted = Counter(values).most_common(1)
    return counted[0][0] if counted else None
