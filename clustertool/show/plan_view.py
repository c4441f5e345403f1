"""This module prints a plan as tables, one per node. `--dry` prints what `run` executes, with the environment."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from clustertool.show.table import fold, table
from clustertool.show.terminal import Terminal

Shown = Mapping[str, Any]  # an object of a plan's --json

_COLUMNS = ("role", "rank", "local", "endpoint", "devices", "shards", "log", "command")


def plan_tables(plan: Shown, terminal: Terminal) -> None:
    """`plan` is the plan as plain values: job, mode, phases, nodes with their processes."""
    phases = " -> ".join(map(str, plan.get("phases", ())))
    terminal.line(f"job {plan['job']}, mode {plan['mode']}, phases: {phases}", "bold")
    rest = [f"lead {plan['lead']}"] if plan.get("lead") else []
    rest += [f"{name} {value}" for name, value in plan.get("policy", {}).items()]
    if rest:
        terminal.line(", ".join(rest))
    for node in plan["nodes"]:
        terminal.line()
        table(_title(node), _COLUMNS, [_row(process) for process in node["processes"]], terminal=terminal)
    processes = [process for node in plan["nodes"] for process in node["processes"]]
    if any(process.get("env") for process in processes):
        _environment(processes, terminal)
    for warning in plan.get("warnings", ()):
        terminal.warn(str(warning))


def _title(node: Shown) -> str:
    title = f"node {node['node']}: {node['name']} ({node['address']}), {node['dir']}"
    work_dir = node.get("work_dir") or node["dir"]
    return title if work_dir == node["dir"] else f"{title}, works in {work_dir}"


def _row(process: Shown) -> Sequence[object]:
    return (
        process["role"],
        process["rank"],
        process["local_rank"],
        process["endpoint"],
        ",".join(map(str, process.get("devices", ()))),
        fold(process.get("shards", ())),
        process["log"],
        shlex.join(process["command"]),
    )


def _environment(processes: Sequence[Shown], terminal: Terminal) -> None:
    """What all processes have in common once, then what is each one's own."""
    common = set(processes[0].get("env", {}).items()).intersection(*(p.get("env", {}).items() for p in processes[1:]))
    if common:
        table(f"environment of {_all(processes)}", ("name", "value"), sorted(common), terminal=_after_blank(terminal))
    own = [(f"{p['role']} {p['rank']}", sorted(set(p.get("env", {}).items()) - common)) for p in processes]
    rows = [(owner, name, value) for owner, pairs in own for name, value in pairs]
    if rows:
        table("environment of each", ("process", "name", "value"), rows, terminal=_after_blank(terminal))


def _all(processes: Sequence[Shown]) -> str:
    return f"all {len(processes)} processes" if len(processes) > 1 else "the process"


def _after_blank(terminal: Terminal) -> Terminal:
    terminal.line()
    return terminal
