"""A finding is the result of one check for one node. The worst findings of a column make its cell."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Dict, List, Mapping, Optional, Sequence, Tuple

# All checks, in the order in which they are shown; each can be named in CHECKS_OFF.
COLUMNS = """ping ssh queue clock python rsync root disk memory load host nic mtu ports limits shm tmp proxy
    devices driver health users jobs packages mpi container stacks workspace mesh framework""".split()
# What pip calls a module of another name. The `paddle` of PyPI is another project.
_PIP_NAMES = {"paddle": "paddlepaddle (with GPUs paddlepaddle-gpu)"}
_LEVELS = ("skip", "ok", "warn", "error")  # from best to worst


@dataclass(frozen=True)
class Finding:
    """One cell of the matrix, or a part of it. level: ok, warn, error, skip."""

    node: int
    column: str
    level: str
    text: str
    fix: str = ""


@dataclass(frozen=True)
class Seen:
    """What the laptop itself measured, by node.

    pings: whether the node answered, None if not measured, absent where none was sent. asked: the laptop's clock before the
    node's probe and after the answer. phases: seconds of connect, login and agent.
    """

    pings: Mapping[int, Optional[bool]] = field(default_factory=dict)
    asked: Mapping[int, Tuple[float, float]] = field(default_factory=dict)
    phases: Mapping[int, Mapping[str, float]] = field(default_factory=dict)


def pip_name(module: str) -> str:
    """Return what pip installs for a module, as a part of a sentence."""
    return _PIP_NAMES.get(module, module)


def cells(findings: Sequence[Finding], node: int) -> Dict[str, Finding]:
    """Map each column to its cell for a node, in the order of COLUMNS: texts and fixes of its worst findings."""
    by_column: Dict[str, List[Finding]] = {}
    for finding in findings:
        if finding.node == node:
            by_column.setdefault(finding.column, []).append(finding)
    found: Dict[str, Finding] = {}
    for column in sorted(by_column, key=COLUMNS.index):
        worst = max(by_column[column], key=lambda one: _LEVELS.index(one.level)).level
        alike = [one for one in by_column[column] if one.level == worst]
        texts, fixes = dict.fromkeys(one.text for one in alike), dict.fromkeys(one.fix for one in alike if one.fix)
        found[column] = Finding(node, column, worst, "; ".join(texts), "; ".join(fixes))
    return found
