"""This module reads a node's cards and their load: by NVML for NVIDIA, by the vendor's tool for others.

Owners of processes come from /proc, owners of locks from the locks. Nothing here may block the agent: a driver that does not
answer is reported as a problem, once for all requests.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any, Dict, List, Tuple, cast

from clustertool.model.cards import computing_processes, describe, first_error
from clustertool.node.devices import detect, locks, nvml, vendor_tools
from clustertool.node.system import processes, users
from clustertool.node.system.node_context import NodeContext

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Card, DevicesAnswer
    from clustertool.model.wire.agent_requests import DevicesRequest

_PATIENCE = 15.0  # seconds for NVML: without persistence mode a card wakes up first
_SHARE = 0.01  # of a core, for repeated sampling
_PARENTS = 20
_MARKS = {b"CLUSTERTOOL_JOB": "job", b"CLUSTERTOOL_ROLE": "role", b"CLUSTERTOOL_RANK": "rank"}
_hung: List[str] = []


def answer(node: NodeContext, request: DevicesRequest) -> DevicesAnswer:
    """Read the node's devices, for a request, with the NVML module that it names."""
    return cast("DevicesAnswer", read_devices(request["nvml"]))


def read_devices(module: str, full: bool = True) -> Dict[str, Any]:
    """Read the cards with locks, users and jobs, or return {"need": module} if this NVML module must be sent first.

    Returns {kind, ids, devices, driver, cuda, problem, used}; without cards no `used`. module: the digest of the laptop's NVML
    module; full: also what does not change from one second to the next.
    """
    kind, ids = detect.detect_cards()
    found: Dict[str, Any] = {"kind": kind, "ids": ids, "devices": [], "driver": "", "cuda": "", "problem": ""}
    if kind == "cpu":
        return found
    if kind == "gpu" and not nvml.has(module):
        return {"need": module}
    found.update(_read_unless_hung(kind, module, full))
    known = {device["index"] for device in found["devices"]}
    found["devices"] += [{"index": index} for index in ids if index not in known]
    _add_owners(found["devices"], kind)
    found["used"] = _used_by(found["devices"])
    return found


def _read_unless_hung(kind: str, module: str, full: bool) -> Dict[str, Any]:
    """Read the cards by NVML, or the tool of another vendor: {devices, problem, ...}.

    kind: of the cards. module, full: see read_devices(). Once NVML has not answered in 15 s, returns only a problem.
    """
    if kind != "gpu":
        return vendor_tools.read(kind)
    late = {"problem": f"NVML does not answer for {_PATIENCE:g} s: a card hangs; check dmesg for Xid"}
    if _hung:
        return late
    found: Dict[str, Any] = detect.within(_PATIENCE, lambda: nvml.read(module, full), late)
    if found is late:
        _hung.append(kind)
    return found


class PacedReader:
    """A repeated reader of the devices that takes at most one percent of a core: expensive samples are less frequent."""

    def __init__(self, module: str) -> None:
        self._module = module
        self._found: Dict[str, Any] = {}
        self._next = 0.0

    def now(self) -> Dict[str, Any]:
        """Return all that is known of the devices, read anew if it is time: the first time wholly, later what changes.

        Returns {"need": module} as read_devices(). The next time is after 100 times the CPU time of the reading, half a second
        at least.
        """
        if time.monotonic() >= self._next:
            before = processes.used_cpu_seconds()
            fresh = read_devices(self._module, full=not self._found)
            if "need" in fresh:
                return fresh
            old = {device["index"]: device for device in self._found.get("devices", ())}
            fresh["devices"] = [{**old.get(device["index"], {}), **device} for device in fresh["devices"]]
            self._found.update((key, value) for key, value in fresh.items() if value != "" or key == "problem")
            self._next = time.monotonic() + max(0.5, (processes.used_cpu_seconds() - before) / _SHARE)
        return self._found


def _add_owners(devices: List[Dict[str, Any]], kind: str) -> None:
    """Add user, name and job to each process of the devices, and to each device its lock as `held`."""
    locked = locks.locked()
    keys = detect.keys(kind, [device["index"] for device in devices])
    seen: Dict[int, Dict[str, Any]] = {}
    for device in devices:
        device["held"] = locked.get(keys[device["index"]])
        for process in device.setdefault("processes", []):
            pid = process["pid"]
            if pid not in seen:
                known = processes.stat(pid)
                seen[pid] = {"user": user(pid), "name": known.name if known else "", **job_of_process(pid)}
            process.update(seen[pid])


def user(pid: int) -> str:
    """Name the user of a process; "" where this node's /proc does not show it (another container's)."""
    try:
        return users.name_of(os.stat(f"/proc/{pid}").st_uid)
    except OSError:
        return ""


def job_of_process(pid: int) -> Dict[str, str]:
    """Return job, role and rank of a process of this user's jobs, as far as its environment has them; else {}.

    If that names no job, the nearest of up to 19 ancestors counts that does.
    """
    for _ in range(_PARENTS):
        variables = processes.environment(pid)
        if b"CLUSTERTOOL_JOB" in variables:
            return {key: variables[name].decode(errors="replace") for name, key in _MARKS.items() if name in variables}
        known = processes.stat(pid)
        if known is None or known.parent <= 1:
            return {}
        pid = known.parent
    return {}


def _used_by(devices: List[Card]) -> List[Tuple[int, str]]:
    """List (device, why) of faulty devices, and of devices without a lock on which a process computes."""
    used = []
    for device in devices:
        why, there = first_error(device), computing_processes(device)
        if why:
            used.append((int(device["index"]), f"a fault: {why}"))
        elif there and not device.get("held"):
            used.append((int(device["index"]), describe(there[0])))
    return used
