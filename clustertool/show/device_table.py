"""This module prints devices: one line for equal nodes, one row for every device, with its faults in red.

Where an engine chooses the nodes of jobs, it prints what the engine knows of them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from clustertool.model.config.folded_names import fold, gather, grouped
from clustertool.model.quantities import count, human_bytes
from clustertool.show.table import Cell, table
from clustertool.show.terminal import Terminal

if TYPE_CHECKING:
    from clustertool.model.engine_views import EngineNode
    from clustertool.model.wire.agent_answers import Card, CardProcess, DevicesAnswer

_COLUMNS = ("node", "id", "device", "temp", "util", "power", "memory", "state", "processes")
_NODE_COLUMNS = ("node", "state", "partition", "CPUs in use", "memory", "GPUs in use", "note")
_HOT = 90  # degrees
_HARMLESS = ("power cap",)  # a card at work is limited by its power
_GIB = 1 << 30


def devices_tables(nodes: Mapping[str, DevicesAnswer], terminal: Terminal) -> None:
    """Print a summary of each kind of node, the devices as a table, then the nodes without devices; warn of problems.

    nodes: answers by name, each as node/devices/read.py makes it.
    """
    rows = [_device_row(name, answer["kind"], device) for name, answer in nodes.items() for device in answer["devices"]]
    for folded, line in gather({name: _summary_of_node(answer) for name, answer in nodes.items() if answer["devices"]}):
        terminal.line(f"{folded}: {line}")
    if rows:
        terminal.line()
        table("", _COLUMNS, rows, terminal=terminal)
    without = [name for name, answer in nodes.items() if not answer["devices"] and not answer["problem"]]
    if without:
        if rows:
            terminal.line()
        terminal.line(f"no devices: {gather(dict.fromkeys(without, ''))[0][0]}")
    problems = {name: str(answer["problem"]) for name, answer in nodes.items() if answer["problem"]}
    for folded, problem in gather(problems):
        terminal.warn(f"{folded}: {problem}")


def _summary_of_node(answer: DevicesAnswer) -> str:
    """Summarize the devices of a node: `8 x NVIDIA H100, driver 550.54, CUDA 12.4`."""
    models = [str(device.get("model") or answer["kind"]) for device in answer["devices"]]
    parts = [f"{models.count(model)} x {model}" for model in dict.fromkeys(models)]
    parts += [f"driver {answer['driver']}"] if answer["driver"] else []
    parts += [f"CUDA {answer['cuda']}"] if answer["cuda"] else []
    return ", ".join(parts)


def _device_row(name: str, kind: str, device: Card) -> Sequence[object]:
    """Format a device as a row of the table."""
    load, temperature = device.get("utilisation"), device.get("temperature")
    hot = temperature is not None and temperature >= _HOT
    return (
        name,
        device["index"],
        device.get("model") or kind,
        Cell("" if temperature is None else f"{temperature} C", "red" if hot else ""),
        "" if load is None else f"{load} %",
        _power(device),
        memory(device.get("memory_used"), device.get("memory_total")),
        _state_cell(device),
        "; ".join(map(process, device.get("processes", ()))),
    )


def memory(used: int | None, total: int | None) -> str:
    """Format used and total bytes: `3.1/80 GiB`, or `3.1 GiB` without a total; "" if neither is known.

    The memory of cards is sold in GiB.
    """
    if total is None:
        return "" if used is None else f"{used / _GIB:.1f} GiB"
    return f"{(used or 0) / _GIB:.1f}/{total / _GIB:.0f} GiB"


def _power(device: Card) -> str:
    """Format the power and its limit: `310/700 W`; "" if it is not known."""
    power, limit = device.get("power"), device.get("power_limit")
    if power is None:
        return ""
    return f"{power:.0f} W" if limit is None else f"{power:.0f}/{limit:.0f} W"


def faults_of_device(device: Card) -> list[str]:
    """List the faults of a device: its problem, ECC errors, memory repair, throttling, a special compute mode.

    Throttling by the power cap is no fault.
    """
    found = [str(device["problem"])] if device.get("problem") else []
    errors = device.get("ecc_uncorrected")
    if errors:
        found.append(count(errors, "ECC error"))
    if device.get("repair"):
        found.append(f"memory repair {device['repair']}")
    found += [str(reason) for reason in device.get("throttle", ()) if reason not in _HARMLESS]
    if device.get("compute_mode") not in (None, "", "default"):
        found.append(str(device["compute_mode"]))
    return found


def _state_cell(device: Card) -> Cell:
    """Format the faults of a device, in red, and what uses it: a job with its user, or `used` by other processes.

    `free` if nothing uses it and it has no fault.
    """
    sick, locked = faults_of_device(device), device.get("held")
    faults = list(sick)
    if locked:
        faults.append(f"job {locked['job']} ({locked['user']})")
    elif device.get("processes"):
        faults.append("used")
    elif not sick:
        faults.append("free")
    return Cell(", ".join(faults), "red" if sick else "" if locked or device.get("processes") else "green")


def process(one: CardProcess) -> str:
    """Format a process on a device: `anna python3 (pid 12) 3.1 GiB`, with job and rank if it belongs to a job of this tool."""
    rank = f"{one['role']} {one['rank']}" if one.get("rank") and one.get("role") else ""
    job = f"job {one['job']}" if one.get("job") else ""
    program = (one.get("user", ""), one.get("name", ""), f"(pid {one['pid']})")
    return " ".join(filter(None, (*program, job, rank, memory(one.get("memory"), None))))


def engine_nodes_table(nodes: Iterable[EngineNode], terminal: Terminal) -> None:
    """Print the nodes of an engine as a table, equal ones as one row with folded names."""
    alike = grouped((_engine_node_cells(node), node.name) for node in nodes)
    table("", _NODE_COLUMNS, [(fold(names), *cells) for cells, names in alike.items()], terminal=terminal)


def _engine_node_cells(node: EngineNode) -> tuple[str, ...]:
    """Format a node of an engine as the cells of a row behind its name."""
    gpus = ", ".join(f"{used} of {total} {kind}".rstrip() for kind, total, used in node.gpus)
    cpus, memory = f"{node.used_cpus} of {node.cpus}", human_bytes(node.memory << 20)
    return node.state, ",".join(node.partitions), cpus, memory, gpus or "none", node.reason
