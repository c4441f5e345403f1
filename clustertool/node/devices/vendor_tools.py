"""This module reads devices of other vendors than NVIDIA from the output of the vendor's tool. Each parser is pure.

hy-smi (Hygon DCU), xpu_smi or xpu-smi (Kunlun XPU), npu-smi (Ascend NPU). A value that a tool does not print is None.
"""

from __future__ import annotations

import contextlib
import re
from typing import Any, Callable, Dict, List, Mapping, Match, Optional, Sequence, Tuple

from clustertool.node.system import programs

Card = Dict[str, Any]
Found = Dict[str, Any]
_MIB = 1 << 20
_PLACES = ("/usr/local/bin", "/usr/local/sbin", "/opt/hyhal/bin", "/opt/dtk/bin", "/usr/local/xpu/bin", "/opt/xre/bin")
PATIENCE = 10.0  # seconds for one tool: on a sick card they hang

# -- parsers ----------------------------------------------------------------------------------------------------------

_SMI_LINE = re.compile(r"\s*(\d+)\s+([\d.]+)C\s+([\d.]+)W\s+\S+\s+([\d.]+)W\s+\d+%\s+([\d.]+)%")
_VRAM = re.compile(r"[DHG][CP]U\[(\d+)\]\s*: *vram Total (Used )?Memory \((MiB|B)\): *(\d+)", re.I)
_SERIES = re.compile(r"[DHG][CP]U\[(\d+)\]\s*: *Card Series: *(.+)", re.I)
_HY_DRIVER = re.compile(r"Driver Version: *(\S+)", re.I)
_KFD = re.compile(r"PID: *(\d+)(.*?)(?=PID: *\d|\Z)", re.S)


def hy(text: str) -> Found:
    """Parse the output of hy-smi: see _result_of().

    Of `hy-smi`, `hy-smi --showproductname --showdriverversion --showmeminfo vram`, `hy-smi --showpids`, one after the other.
    """
    cards: Dict[int, Card] = {}
    for line in text.splitlines():
        match = _SMI_LINE.match(line)
        if match:
            cards[int(match[1])] = _new_card(int(match[1]), **_parse_load(match[2], match[3], match[4], match[5]))
    for number, used, unit, size in _VRAM.findall(text):
        if int(number) in cards:
            cards[int(number)]["memory_used" if used else "memory_total"] = int(size) * (_MIB if unit == "MiB" else 1)
    for number, model in _SERIES.findall(text):
        if int(number) in cards:
            cards[int(number)]["model"] = model.strip()
    for pid, rest in _KFD.findall(text):
        memory = re.search(r"VRAM USED\((MiB|B)\): *(\d+)", rest)
        size = int(memory[2]) * (_MIB if memory[1] == "MiB" else 1) if memory else None
        numbers = re.search(r"[DH]CU Index: *(.*)", rest)
        on = [int(number) for number in re.findall(r"\d+", numbers[1] if numbers else "")]
        for number in on:  # the tool reports one sum for a process on several cards
            if number in cards:
                cards[number]["processes"].append({"pid": int(pid), "memory": size if len(on) == 1 else None})
    return _result_of(cards, _HY_DRIVER.search(text))


_XPU_FIRST = re.compile(r"\|\s+(\d+)\s+(\S.*?)\s+(?:N/A|On|Off)\s*\|\s*[\dA-Fa-f:.]+\s+\S+\s*\|\s*(\S+)\s*\|")
_XPU_SECOND = re.compile(
    r"\|\s*\S+\s+(\d+)C\s+\S+\s+(\S+?)W? / (\S+?)W? *\|\s*(\d+)MiB / *(\d+)MiB\s*\|\s*(\S+?)%?\s+(\S.*?)\s*\|"
)
_XPU_PROCESS = re.compile(r"\|\s+(\d+)\s+\S+\s+\S+\s+(\d+)\s+\S+\s+\S.*?(?:(\d+)MiB)?\s*\|")
_XPU_DRIVER = re.compile(r"Driver Version: *(\S+)")


def xpu(text: str) -> Found:
    """Parse the output of `xpu_smi` without options: nvidia-smi's table, a third line a card for its L3 cache.

    See _result_of().
    """
    cards: Dict[int, Card] = {}
    at: Optional[Card] = None
    table, _, processes = text.partition("Processes:")
    for line in table.splitlines():
        first, second = _XPU_FIRST.match(line), _XPU_SECOND.match(line)
        if first:
            at = cards[int(first[1])] = _new_card(int(first[1]), model=first[2], ecc_uncorrected=_read_int(first[3]))
        elif second and at is not None:
            at.update(_parse_load(second[1], second[2], second[3], second[6]), compute_mode=second[7].lower())
            at.update(memory_used=int(second[4]) * _MIB, memory_total=int(second[5]) * _MIB)
            at = None
    for line in processes.splitlines():
        match = _XPU_PROCESS.match(line)
        if match and int(match[1]) in cards:
            memory = int(match[3]) * _MIB if match[3] else None
            cards[int(match[1])]["processes"].append({"pid": int(match[2]), "memory": memory})
    return _result_of(cards, _XPU_DRIVER.search(text))


_NPU_FIRST = re.compile(r"\|\s*(\d+)\s+(\S+)\s*\|\s*(\S+)\s*\|\s*(\S+)\s+(\S+)\s+\d+\s*/ *\d+\s*\|")
_NPU_SECOND = re.compile(
    r"\|\s*(\d+)(?:\s+(\d+))?\s*\|\s*[\dA-Fa-fxX:.]+\s*\|\s*(\S+)\s+(\d+) */ *(\d+)(?:\s+(\d+) */ *(\d+))?\s*\|"
)
_NPU_PROCESS = re.compile(r"\|\s*(\d+)\s+(\d+)\s*\|\s*(\d+)\s*\|[^|]*\|\s*(\d+)\s*\|")
_NPU_DRIVER = re.compile(r"Version: *(\S+)")


def npu(text: str) -> Found:
    """Parse the output of `npu-smi info`: two lines a chip. See _result_of().

    A chip's id is its Phy-ID; older tools print none, and then chips count up.
    """
    cards: List[Card] = []
    by_chip: Dict[Tuple[int, int], Card] = {}
    at: Optional[Card] = None
    board = 0
    table, _, processes = text.partition("Process id")
    for line in table.splitlines():
        second = _NPU_SECOND.match(line) if at is not None else None
        first = _NPU_FIRST.match(line) if second is None else None
        if first:
            board = int(first[1])
            at = _new_card(board, model=first[2], power=_read_float(first[4]), temperature=_read_int(first[5]))
            at["problem"] = "" if first[3] == "OK" else f"health: {first[3]}"
        elif second and at is not None:
            used, total = (second[6], second[7]) if second[7] and int(second[7]) else (second[4], second[5])
            at.update(utilisation=_read_int(second[3]), memory_used=int(used) * _MIB, memory_total=int(total) * _MIB)
            at["index"] = -1 if second[2] is None else int(second[2])
            by_chip[board, int(second[1])] = at
            cards.append(at)
            at = None
    boards = [number for number, _ in by_chip]
    for count, ((number, _), card) in enumerate(by_chip.items()):
        if card["index"] < 0:
            card["index"] = number if len(set(boards)) == len(boards) else count
    for line in processes.splitlines():
        match = _NPU_PROCESS.match(line)
        if match and (int(match[1]), int(match[2])) in by_chip:
            process = {"pid": int(match[3]), "memory": int(match[4]) * _MIB}
            by_chip[int(match[1]), int(match[2])]["processes"].append(process)
    return _result_of({card["index"]: card for card in cards}, _NPU_DRIVER.search(text))


def _result_of(cards: Dict[int, Card], driver: Optional[Match[str]]) -> Found:
    """Build {devices: the cards by index, with their processes and free memory, driver: its version or "", problem: ""}."""
    for card in cards.values():
        if card["memory_total"] is not None and card["memory_used"] is not None:
            card["memory_free"] = card["memory_total"] - card["memory_used"]
    devices = [cards[index] for index in sorted(cards)]
    return {"devices": devices, "driver": driver[1] if driver else "", "problem": ""}


# What a tool does not print: unknown values, and what has no unknown value.
_UNKNOWN = """memory_total memory_used memory_free utilisation temperature power power_limit
    ecc_corrected ecc_uncorrected repair slowdown persistence""".split()
_EMPTY = {"model": "", "uuid": "", "compute_mode": "", "problem": ""}


def _new_card(index: int, **values: Any) -> Card:
    """Create a card with these values; others are None, "" or []."""
    return {"index": index, **dict.fromkeys(_UNKNOWN), **_EMPTY, "throttle": [], "processes": [], **values}


def _parse_load(temperature: str, power: str, limit: str, utilisation: str) -> Card:
    """Convert texts to temperature, power, its limit, and utilisation; None for what is no number."""
    known = {"temperature": _read_int(temperature), "utilisation": _read_int(utilisation)}
    return {**known, "power": _read_float(power), "power_limit": _read_float(limit)}


def _read_float(text: str) -> Optional[float]:
    """Convert a text to a number; None if it is none."""
    with contextlib.suppress(ValueError):
        return float(text)
    return None


def _read_int(text: str) -> Optional[int]:
    """Convert a text to a rounded number; None if it is none."""
    number = _read_float(text)
    return None if number is None else round(number)


# -- running the tools ------------------------------------------------------------------------------------------------

Tool = Tuple[Sequence[str], Sequence[Sequence[str]], Callable[[str], Found]]
TOOLS: Mapping[str, Tool] = {
    "dcu": (("hy-smi",), ((), "--showproductname --showdriverversion --showmeminfo vram".split(), ("--showpids",)), hy),
    "xpu": (("xpu_smi", "xpu-smi"), ((),), xpu),
    "npu": (("npu-smi",), (("info",),), npu),
}


def read(kind: str) -> Found:
    """Run the vendor's tool for this kind, and return {devices, driver, problem: "" for none}.

    Problems: there is no tool, it takes more than 10 s, or reports no device.
    """
    names, calls, parse = TOOLS[kind]
    nothing: Found = {"devices": [], "driver": ""}
    found_at = program(kind)
    if not found_at:
        return {**nothing, "problem": f"there is no {names[0]}: only the ids of the devices are known"}
    texts = []
    for arguments in calls:
        code, out, err = programs.output([found_at, *arguments], PATIENCE)
        if code == -1:
            command = " ".join([names[0], *arguments])
            return {**nothing, "problem": f"{command} does not answer for {PATIENCE:g} s: a device hangs?"}
        texts.append(out + err)
    found = parse("\n".join(texts))
    if not found["devices"]:
        found["problem"] = f"{names[0]} reported no device: {' '.join(texts[0].split())[:200] or 'it printed nothing'}"
    return found


def program(kind: str) -> str:
    """Find the path of the vendor's tool for this kind, "" if there is none."""
    names = TOOLS[kind][0] if kind in TOOLS else ()
    return next((path for path in (programs.find(name, *_PLACES) for name in names) if path), "")
