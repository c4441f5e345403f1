"""This module prints a plan as tables, one per node, and for users of fleetrun its configuration and environments.

`--dry` prints what `run` executes, with the environment.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from clustertool.model.config.folded_names import fold
from clustertool.model.planning.plan import Plan
from clustertool.model.roles import LAUNCHERS, role_name
from clustertool.show.table import table
from clustertool.show.terminal import Terminal

Shown = Mapping[str, Any]  # an object of a plan's --json

_COLUMNS = ("role", "rank", "local", "endpoint", "devices", "shards", "log", "command")
_RULE = "-----------  Configuration Arguments  -----------"
# The variables that place a process, in the order in which fleetrun has them.
_NAMES = """
    TRAINING_ROLE PADDLE_TRAINER_ID PADDLE_CURRENT_ENDPOINT PADDLE_TRAINERS_NUM PADDLE_TRAINER_ENDPOINTS
    PADDLE_PSERVERS_IP_PORT_LIST PADDLE_ALL_HETER_TRAINER_IP_PORT_LIST POD_IP PADDLE_PORT PADDLE_MASTER
    PADDLE_MASTER_ENDPOINT PADDLE_WORKER_ENDPOINT
    PADDLE_GLOO_HTTP_ENDPOINT PADDLE_DISTRI_BACKEND PADDLE_RANK_IN_NODE FLAGS_selected_gpus FLAGS_selected_xpus
    FLAGS_selected_npus CUDA_VISIBLE_DEVICES HIP_VISIBLE_DEVICES XPU_VISIBLE_DEVICES ASCEND_RT_VISIBLE_DEVICES
    RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT OMP_NUM_THREADS
""".split()
_ENDPOINTS = 3  # of a longer list the first ones and their number are enough: log/endpoints.log has all


def plan_tables(plan: Shown, terminal: Terminal) -> None:
    """Print a plan: job, policy, a table of processes for each node with its container, environments, and warnings.

    plan: as plain values, as `--dry --json` has it.
    """
    phases = " -> ".join(map(str, plan.get("phases", ())))
    terminal.line(f"job {plan['job']}, mode {plan['mode']}, phases: {phases}", "bold")
    rest = [f"lead {plan['lead']}"] if plan.get("lead") else []
    rest += [f"{name} {value}" for name, value in plan.get("policy", {}).items()]
    if rest:
        terminal.line(", ".join(rest))
    for node in plan["nodes"]:
        terminal.line()
        if node.get("container"):
            terminal.line(f"container of each process on {node['name']}: {_container_text(node['container'])}")
            if node["container"].get("command"):
                line = shlex.join(node["container"]["command"])
                terminal.line(f"the first one starts so, with the limits and devices of the node: {line}")
        table(_node_title(node), _COLUMNS, [_process_row(process) for process in node["processes"]], terminal=terminal)
    processes = [process for node in plan["nodes"] for process in node["processes"]]
    if any(process.get("env") for process in processes):
        _print_environment(processes, terminal)
    for warning in plan.get("warnings", ()):
        terminal.warn(str(warning))


def _node_title(node: Shown) -> str:
    """Format the title of a node's table: number, name, address, directories."""
    title = f"node {node['node']}: {node['name']} ({node['address']}), {node['dir']}"
    work_dir = node.get("work_dir") or node["dir"]
    return title if work_dir == node["dir"] else f"{title}, works in {work_dir}"


def _container_text(container: Shown) -> str:
    """Format the image, its digest and the runtime of a node's container."""
    digest = container["digest"] or "the image is pulled or sent first"
    runtime = f"{container['runtime']}{' (rootless)' if container['rootless'] else ''}"
    return f"{container['image']} ({digest}), {runtime} {container['program']}".rstrip()


def _process_row(process: Shown) -> Sequence[object]:
    """Format a process as a row of the table of its node."""
    place = [process[name] for name in ("role", "rank", "local_rank", "endpoint")]
    devices, shards = ",".join(map(str, process.get("devices", ()))), fold(process.get("shards", ()))
    return (*place, devices, shards, process["log"], shlex.join(process["command"]))


def _print_environment(processes: Sequence[Shown], terminal: Terminal) -> None:
    """Print the variables that all processes have in common once, then those of each process.

    Launchers have little in common with ranks, so their variables do not count for what is common.
    """
    ranks = [process for process in processes if process["role"] not in LAUNCHERS]
    common = set(ranks[0].get("env", {}).items()).intersection(*(p.get("env", {}).items() for p in ranks[1:]))
    if common:
        kind = "processes" if len(ranks) == len(processes) else "ranks"
        owners = f"all {len(ranks)} {kind}" if len(ranks) > 1 else "the process"
        terminal.line()
        table(f"environment of {owners}", ("name", "value"), sorted(common), terminal=terminal)
    own = [(f"{p['role']} {p['rank']}", sorted(set(p.get("env", {}).items()) - common)) for p in processes]
    rows = [(owner, name, value) for owner, pairs in own for name, value in pairs]
    if rows:
        terminal.line()
        table("environment of each", ("process", "name", "value"), rows, terminal=terminal)


def configuration(values: Mapping[str, str], terminal: Terminal) -> None:
    """Print `name: value` lines, sorted by name, between two rules, as fleetrun does at a start."""
    terminal.line(_RULE, "bold")
    for name in sorted(values):
        terminal.line(f"{name}: {values[name]}")
    terminal.line("-" * len(_RULE), "bold")


def environments(made: Plan, terminal: Terminal) -> None:
    """Print a table for the first process of each role with the variables that place it, as fleetrun does at a start."""
    for role in made.job.roles:
        mine = [process for process in made.processes if process.role == role]
        env = dict(min(mine, key=lambda process: process.rank).env)
        rows = [(name, _cut_list(env[name])) for name in _NAMES if name in env]
        title = f"{role_name(role)} 0 of {len(mine)}:"
        table(title, ("Distributed Envs", "Value"), rows, terminal=terminal)


def _cut_list(value: str) -> str:
    """Cut a list with commas after three items, with their number: `a,b,c,... (8 in all)`."""
    parts = value.split(",")
    return value if len(parts) <= _ENDPOINTS else f"{','.join(parts[:_ENDPOINTS])},... ({len(parts)} in all)"
