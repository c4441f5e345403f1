"""This module knows the devices of a node, one card at a time: which variables select them, their faults, and what uses them.

Variables of each kind of devices decide which devices a process sees. A fault is found in the values that a card reports; one
that it does not report is no fault. Devices in use have the same text in a plan and on a node at the start.
"""

# Without `annotations` from __future__: with it, typing would compile each type of a NamedTuple (decision 26).

import itertools
from typing import TYPE_CHECKING, Dict, List, Mapping, NamedTuple, Sequence

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Card, CardProcess


# kind -> (the kind's own variable for physical ids, Paddle's flag for ids relative to the visible ones)
VARIABLES = {
    "gpu": ("CUDA_VISIBLE_DEVICES", "FLAGS_selected_gpus"),
    "dcu": ("HIP_VISIBLE_DEVICES", "FLAGS_selected_gpus"),
    "xpu": ("XPU_VISIBLE_DEVICES", "FLAGS_selected_xpus"),
    "npu": ("ASCEND_RT_VISIBLE_DEVICES", "FLAGS_selected_npus"),
}
_BELOW_HIP = "ROCR_VISIBLE_DEVICES"  # HIP numbers the devices that this one shows
_NO_DEVICES = ("NoDevFiles",)  # what Slurm sets for a task without devices
_MIG = "MIG-"


def device_names(text: str) -> List[str]:
    """Split the value of a variable into names of devices: numbers, UUIDs, MIG instances.

    The list ends before the first negative number, or Slurm's name for no devices.
    """
    items = [item.strip() for item in text.split(",") if item.strip()]
    return list(itertools.takewhile(lambda item: not item.startswith("-") and item not in _NO_DEVICES, items))


def allocated_names(kind: str, environ: Mapping[str, str]) -> List[str]:
    """List the names in the variable of a kind, which are the devices that an engine has allocated.

    [] without the variable, and for a kind without one. Of dcu, without its variable: the positions of the devices in
    ROCR_VISIBLE_DEVICES.
    """
    if kind not in VARIABLES:
        return []
    names = device_names(environ.get(VARIABLES[kind][0], ""))
    if kind == "dcu" and not names:
        return list(map(str, range(len(device_names(environ.get(_BELOW_HIP, ""))))))
    return names


def positions_of_numbers(names: Sequence[str]) -> Dict[int, int]:
    """Map the names that are numbers to their positions in `names`; UUIDs and MIG instances are left out."""
    return {int(name): at for at, name in enumerate(names) if name.isdecimal()}


def has_mig_instance(names: Sequence[str]) -> bool:
    """Check whether a name is that of a MIG instance. A process can then use only the first device that it sees."""
    return any(name.startswith(_MIG) for name in names)


HOT = 90  # degrees, for a card that does not report its slowdown temperature
_SLOWING = ("hardware slowdown", "hardware thermal", "software thermal", "power brake")  # a power cap is a card at work
_AWAY = "reset the device or reboot the node, dmesg there shows the reason; until then leave it out: devices in HOSTS"
_MEMORY = (
    "reset the device or reboot the node, which takes bad memory out of use; have it replaced if errors come again"
)
_FAILED = "have the card replaced; until then leave it out: devices in HOSTS"
_MODE = "as root there: nvidia-smi -c DEFAULT"
_SLOW = "check its cooling and its power supply: one slow card slows all"


class Fault(NamedTuple):
    """A fault of a card, and its fix. level: warn, or error for what breaks a job."""

    level: str
    text: str
    fix: str


def find_faults(card: "Card", shared: bool = False) -> List[Fault]:
    """List the faults of a card; if its driver reports a problem, only this one.

    They are about its compute mode, its memory and its heat. card: as node/devices/read.py reports it. shared: several ranks of
    the job would have it, a fault in an exclusive mode.
    """
    problem = str(card.get("problem") or "")
    if problem:
        return [Fault("warn" if problem == "health: Warning" else "error", problem, _AWAY)]
    found = []
    if card.get("compute_mode") == "prohibited":
        found.append(Fault("error", "compute mode prohibited: no process can compute on it", _MODE))
    elif shared and exclusive(card):
        found.append(Fault("warn", f"{card['compute_mode']}, and several ranks would share it", _MODE))
    if card.get("repair") == "failed":
        found.append(Fault("error", "bad memory that it can't replace any more", _FAILED))
    number = card.get("ecc_uncorrected") or 0
    if number:
        found.append(Fault("warn", f"{number} uncorrected ECC error{'s' * (number != 1)}", _MEMORY))
    if card.get("repair") == "pending":
        found.append(Fault("warn", "bad memory in use until it is reset", _MEMORY))
    return found + _heat(card)


def _heat(card: "Card") -> List[Fault]:
    """List the faults of a card that is too hot, or is slowed down now, except by its power cap.

    Too hot: at its slowdown temperature, or at HOT if it reports none.
    """
    found = []
    degrees, limit = card.get("temperature"), card.get("slowdown") or HOT
    if degrees is not None and degrees >= limit:
        known = f", it slows down at {limit} C" if card.get("slowdown") else ""
        found.append(Fault("warn", f"{degrees} C{known}", _SLOW))
    slowing = [reason for reason in card.get("throttle") or () if reason in _SLOWING]
    if slowing:
        found.append(Fault("warn", f"slowed down now: {', '.join(slowing)}", _SLOW))
    return found


def exclusive(card: "Card") -> bool:
    """Check whether only one process at a time may compute on a card."""
    return str(card.get("compute_mode") or "").startswith("e")


def first_error(card: "Card") -> str:
    """Return the text of a card's first fault of level error, for which no job should get it; "" if it has none."""
    return next((fault.text for fault in find_faults(card) if fault.level == "error"), "")


IN_USE_FIX = "wait for it with --wait, or take others with --devices (auto: those that are free)"


def in_use(kind: str, holders: Mapping[int, str]) -> str:
    """Describe devices in use: `gpu 0,1 is in use by job X of user anna; gpu 5 by ...`. holders: what uses each device."""
    by_holder: Dict[str, List[int]] = {}
    for device, holder in sorted(holders.items()):
        by_holder.setdefault(holder, []).append(device)
    return "; ".join(f"{kind} {','.join(map(str, ids))} is in use by {holder}" for holder, ids in by_holder.items())


def holder(job: str, user: str) -> str:
    """Describe a job that uses devices, for in_use()."""
    return f"job {job} of user {user}"


def computing_processes(card: "Card") -> "List[CardProcess]":
    """Select processes that compute on a card, without those that only draw, from the answer of node/devices/read.py."""
    return [process for process in card.get("processes") or () if not process.get("graphics")]


def describe(process: "CardProcess") -> str:
    """Describe a process: `python3 (pid 12, user anna)`, or `python3 of job X (...)`."""
    owner = f"pid {process['pid']}" + (f", user {process['user']}" if process.get("user") else "")
    return f"{process.get('name') or 'a process'}{' of job ' + process['job'] if process.get('job') else ''} ({owner})"
