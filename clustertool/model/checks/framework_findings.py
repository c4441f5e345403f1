"""This module derives from the last step of each rank of a trial what failed, where, and the fix (`check --framework`)."""

from __future__ import annotations

import itertools
import json
import zlib
from dataclasses import dataclass, replace
from typing import Any, Callable, Dict, List, Optional, Sequence, Set, Tuple

from clustertool.model.config.folded_names import grouped
from clustertool.model.facts import ByNode, Facts
from clustertool.model.finding import Finding, pip_name
from clustertool.model.hints import PROGRAM

FRAMEWORKS = ("torch", "paddle")
STEPS = ("start", "import", "device", "meet", "reduce", "done")  # what a rank is at; from `meet` on it needs the others
LAST_LINE_WAIT = 0.5  # seconds for the last line of a log, which may come after its process's end
SOON = 3.0  # seconds for the messages of the others after one has failed while all wait for each other
_PORTS = 2
_MEET = STEPS.index("meet")
_COLUMN = "framework"
_REPORTED = ("version", "what", "backend", "nic", "failed", "missing")
_CALLS = {
    "torch": {"meet": "init_process_group", "reduce": "all_reduce"},
    "paddle": {"meet": "init_parallel_env", "reduce": "all_reduce"},
}
_FIXES = {
    "missing": "install {package} there, or let PRELUDE in conf.py activate the environment that has it",
    "missing here": "install {package} for the Python of clustertool, in {python}: the embedded cluster uses it",
    "start": "try the lines of PRELUDE there by hand",
    "import": 'try it there by hand, after the lines of PRELUDE: python3 -c "import {name}"',
    "slow": "a slow file system, or a machine without a core to spare: --timeout S waits longer",
    "device": "{program} gpus shows the devices and what is wrong with them; driver and {name} must fit each other",
    "nic": "{name} is {nic} there, and the training address {address} is on {right}: take it out of ENV and PRELUDE",
    "net": (
        "{backend} takes ports of its own choice{nic}: let the nodes reach each other at all ports from {low} to {high} "
        "(firewall), and see that ENV names no other interface{more}"
    ),
}
_NCCL = "; NCCL_DEBUG=INFO in ENV prints more, NCCL_IB_DISABLE=1 tries it without InfiniBand, NCCL_P2P_DISABLE=1 by host memory"
Names = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class TrialRank:
    """How far one rank came. `failed`: what the framework raised; `ended`: how its process did."""

    rank: int
    node: int
    at: str = "start"
    version: str = ""
    what: str = ""  # the device that it tries
    backend: str = ""
    nic: str = ""
    failed: str = ""
    missing: str = ""  # the module whose absence was the failure
    ended: str = ""
    last_line: str = ""  # its last line that is not for us

    @property
    def step(self) -> int:
        """The position of `at` in STEPS."""
        return STEPS.index(self.at)

    @property
    def failure(self) -> str:
        """What the framework raised, else how its process ended before it was done, with its last line; "" for neither."""
        if self.failed or not self.ended or self.at == "done":
            return self.failed
        return f"{self.ended}: {self.last_line}" if self.last_line else self.ended

    @property
    def waits(self) -> bool:
        """Whether it has neither ended its trial nor failed."""
        return self.at != "done" and not self.failure


def advance(rank: TrialRank, line: str, mark: str) -> TrialRank:
    """Return the rank after one line of its log: a report changes its step, any other line is its last one.

    An empty line, and a damaged report, change nothing. mark: begins reports.
    """
    report = _parse_report(line, mark)
    if report is None:
        return replace(rank, last_line=line.strip()) if line.strip() else rank
    known: Dict[str, Any] = {key: value for key, value in report.items() if key in _REPORTED}
    return replace(rank, **known, at=report["at"] if report.get("at") in STEPS else rank.at)


def _parse_report(line: str, mark: str) -> Optional[Dict[str, str]]:
    """Parse the report of a line, which begins with `mark`; None for another line, {} for a damaged one."""
    if not line.startswith(mark):
        return None
    try:
        return {str(key): str(value) for key, value in json.loads(line[len(mark) :]).items()}
    except (ValueError, AttributeError):  # cut by what else was printed
        return {}


def patience(ranks: Sequence[TrialRank], seconds: float) -> float:
    """Compute for how many seconds the trial waits for the next line of a rank before it ends: 0 when all are done.

    `seconds` (of --timeout) if no rank has failed, or one waits that does not need the others yet. Otherwise at most SOON if
    others wait and all that have failed needed them; else LAST_LINE_WAIT.
    """
    waiting, broken = [one for one in ranks if one.waits], [one for one in ranks if one.failure]
    if not broken:
        return seconds if waiting else 0.0
    if any(one.step < _MEET for one in waiting):
        return seconds
    return min(SOON, seconds) if waiting and all(one.step >= _MEET for one in broken) else LAST_LINE_WAIT


def describe_waiting(name: str, ranks: Sequence[TrialRank], names: Names) -> str:
    """Describe the step that the ranks furthest behind are at, and their nodes; "" if no rank waits."""
    late = [one for one in ranks if one.waits]
    if not late:
        return ""
    step = min(one.step for one in late)
    where = names(sorted({one.node for one in late if one.step == step}))
    what = {"start": "python3", "import": f"import {name}", "device": "devices", **_CALLS[name]}[STEPS[step]]
    return f"{what} on {where}"


def own_ports(facts: ByNode, seed: str) -> Dict[int, Tuple[int, ...]]:
    """Choose two free ports of each node in the range from which the kernel, and so gloo and NCCL, take theirs.

    The search begins at a port made of `seed`; nodes of one machine get different ports.
    """
    given: Dict[str, Set[int]] = {}
    found: Dict[int, Tuple[int, ...]] = {}
    for node, fact in facts.items():
        low, high = fact.ephemeral
        taken = given.setdefault(fact.machine, set(fact.busy))
        start = zlib.crc32(seed.encode())
        every = (low + (start + step) % (high - low + 1) for step in range(high - low + 1))
        found[node] = tuple(itertools.islice((port for port in every if port not in taken), _PORTS))
        taken.update(found[node])
    return found


# -- what it means


def judge(
    name: str, ranks: Sequence[TrialRank], facts: ByNode, seconds: float, names: Names, python: str = ""
) -> List[Finding]:
    """Return the findings of a trial: an error for ranks that failed or hang, with the reason; ok for ranks that are done.

    Ranks that wait for others, and nodes without a rank, are "skip". names: folds names. seconds: of --timeout. python:
    the folder of the Python that the embedded cluster gives to jobs, "" for other clusters.
    """
    guilty = _select_culprits(ranks)
    nodes = names(sorted({one.node for one in guilty}))
    found = [
        Finding(one.node, _COLUMN, "error", *_describe_trouble(name, one, facts, seconds, python))
        for one in _merge_equal(guilty)
    ]
    blamed = {one.rank for one in guilty}
    for one in ranks:
        if one.rank not in blamed:
            level, text = ("skip", f"waited for {nodes}") if one.waits else ("ok", f"on {one.backend}")
            found.append(Finding(one.node, _COLUMN, level, f"{name} {one.version} {text}"))
    idle = sorted(set(facts) - {one.node for one in ranks})
    return found + [Finding(node, _COLUMN, "skip", "no trainer there") for node in idle]


def _select_culprits(ranks: Sequence[TrialRank]) -> List[TrialRank]:
    """Select ranks that failed or hang, without those that wait for ranks that have failed or are behind them."""
    broken = min((one.step for one in ranks if one.failure), default=len(STEPS))
    behind = min((one.step for one in ranks if one.waits), default=len(STEPS))
    last = max(_MEET - 1, min(behind, broken - 1))
    return [one for one in ranks if one.failure or (one.waits and one.step <= last)]


def _merge_equal(ranks: Sequence[TrialRank]) -> List[TrialRank]:
    """Merge ranks of a node with equal troubles to one, with the names of all their devices."""
    alike = grouped(((one.node, one.at, one.failure), one) for one in ranks)
    return [replace(some[0], what=", ".join(dict.fromkeys(one.what for one in some))) for some in alike.values()]


def meeting_broke(ranks: Sequence[TrialRank]) -> bool:
    """Check whether all ranks came to the step `meet`, which needs the others, and one has failed or hangs since."""
    return all(one.step >= _MEET for one in ranks) and any(one.failure or one.waits for one in ranks)


def _describe_trouble(name: str, one: TrialRank, facts: ByNode, seconds: float, python: str) -> Tuple[str, str]:
    """Return what is wrong with a rank, and the fix, by the step that it is at.

    A rank without a failure hangs: it was not done in `seconds`.
    """
    late = f"not done in {seconds:g} s"
    failure = one.failure or late
    if one.at in ("start", "import"):
        if one.at == "import" and one.missing == name:
            fix = _FIXES["missing here" if python else "missing"].format(package=pip_name(name), python=python)
            return f"no {name} for the job's python3", fix
        what = "python3" if one.at == "start" else f"import {name}"
        return f"{what}: {failure}", _FIXES[one.at if one.failure else "slow"].format(name=name)
    if one.at == "device":
        return f"{one.what}: {failure}", _FIXES["device"].format(program=PROGRAM, name=name)
    call = _CALLS[name][one.at]
    return f"{call}: {failure}" if one.failure else f"{call} hangs, {late}", _network_fix(one, facts[one.node])


def _other_interface(chosen: str, right: str) -> bool:
    """Check whether a rank is set to another interface than its address has. NCCL takes prefixes, and ^ excludes them."""
    names = chosen.lstrip("^=").split(",")
    found = any(right.startswith(name) for name in names)
    return bool(chosen and right) and found == chosen.startswith("^")


def _network_fix(one: TrialRank, fact: Facts) -> str:
    """Return the fix for a rank that failed or hangs at a step which needs the others.

    It is about the variable of the interface if that names another one than the address has, else about firewalls.
    """
    if _other_interface(one.nic, fact.nic):
        name = f"{'NCCL' if one.backend == 'nccl' else 'GLOO'}_SOCKET_IFNAME"
        return _FIXES["nic"].format(name=name, nic=one.nic, address=fact.address, right=fact.nic)
    low, high = fact.ephemeral
    nic, more = f" on {one.nic}" if one.nic else "", _NCCL if one.backend == "nccl" else ""
    return _FIXES["net"].format(backend=one.backend, nic=nic, low=low, high=high, more=more)
