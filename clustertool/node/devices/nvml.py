"""This module reads NVIDIA cards through NVML. The laptop sends the module `pynvml`, which loads the node's own library.

A value that a card or a driver does not have is None and never an error. A card that does not answer has a `problem`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from typing import Any, Callable, Dict, List, Optional, Sequence, Tuple

from clustertool.node.devices import detect, sent_files

Library = Any  # the module pynvml, which has no types
Handle = Any  # a pointer of the library
Card = Dict[str, Any]
_THROTTLES = {
    0x04: "power cap",
    0x08: "hardware slowdown",
    0x20: "software thermal",
    0x40: "hardware thermal",
    0x80: "power brake",
    0x200: "board limit",
    0x400: "reliability",
}
_HARMLESS = ("NOT_SUPPORTED", "FUNCTION_NOT_FOUND", "NO_PERMISSION", "NOT_FOUND")  # errors: a card does not have that
_COMPUTE = {0: "default", 1: "exclusive thread", 2: "prohibited", 3: "exclusive process"}
_END = 2.0  # seconds for NVML to end
_modules: Dict[str, Any] = {}  # digest -> the loaded module, NVML begun


def has(digest: str) -> bool:
    """Check whether the module is loaded, or stored here."""
    return digest in _modules or digest in sent_files.in_memory or bool(sent_files.find("nvml", digest))


def newest() -> str:
    """Return the digest of the module that was stored last, "" where none is. One in memory counts as the oldest."""
    found = [(0.0, digest) for digest in sent_files.in_memory]
    for digest in detect.sent("nvml"):
        with contextlib.suppress(OSError):
            found.append((os.stat(sent_files.path_of("nvml", digest)).st_mtime, digest))
    return next((digest for _, digest in sorted(found, reverse=True) if has(digest)), "")


def end() -> None:
    """End NVML, before a fork: what has begun here would not work in the child. After 2 s it is left as it is."""
    while _modules:
        _, module = _modules.popitem()

        def shut(module: Library = module) -> None:
            with contextlib.suppress(module.NVMLError):
                module.nvmlShutdown()

        detect.within(_END, shut, None)


def _load(digest: str) -> Library:
    """Import the module pynvml: from memory if it is kept there, else from its file, so that Python keeps it compiled."""
    if digest in sent_files.in_memory:
        module = type(sys)("pynvml")
        sys.modules["pynvml"] = module  # it imports itself by this name
        exec(compile(sent_files.in_memory[digest], "pynvml.py", "exec"), module.__dict__)
        return module
    spec = importlib.util.spec_from_file_location("pynvml", sent_files.path_of("nvml", digest))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["pynvml"] = module
    spec.loader.exec_module(module)
    return module


def _start_nvml(digest: str) -> Library:
    """Return the module; at the first call, import it and begin NVML, which takes up to seconds. Raises its NVMLError."""
    if digest not in _modules:
        module = _load(digest)
        module.nvmlInit()
        _modules[digest] = module
    return _modules[digest]


def read(digest: str, full: bool) -> Dict[str, Any]:
    """Read all cards: {"devices", "problem"}, with `full` also what does not change from one second to the next.

    full adds the versions "driver" and "cuda", and more fields of each card. Without NVML there are no devices, and a problem.
    """
    try:
        nvml = _start_nvml(digest)
        count = nvml.nvmlDeviceGetCount()
    except sys.modules["pynvml"].NVMLError as error:  # not bound before _load has put it there
        return {"devices": [], "problem": f"NVML: {error}"}
    found: Dict[str, Any] = {"devices": [_read_card(nvml, index, full) for index in range(count)], "problem": ""}
    if full:
        ask = _Asker(nvml)
        cuda = ask(nvml.nvmlSystemGetCudaDriverVersion_v2)
        found["driver"] = ask.text(nvml.nvmlSystemGetDriverVersion)
        found["cuda"] = f"{cuda // 1000}.{cuda % 1000 // 10}" if cuda else ""
    return found


def load(digest: str, ids: Sequence[int]) -> List[Tuple[int, float, int, int]]:
    """Return (id, percent of use, bytes used, bytes of memory) of those of these cards that answer; [] without NVML."""
    try:
        nvml = _start_nvml(digest)
    except sys.modules["pynvml"].NVMLError:
        return []
    found = []
    for index in ids:
        ask = _Asker(nvml)
        handle = ask(nvml.nvmlDeviceGetHandleByIndex, index)
        memory = _memory(nvml, ask, handle) if handle is not None else None
        if memory:
            rates = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
            found.append((index, float(rates.gpu) if rates else 0.0, int(memory.used), int(memory.total)))
    return found


class _Asker:
    """The calls of NVML about one card: what is not there is None. error: the text of the first real error, or ""."""

    def __init__(self, nvml: Library) -> None:
        self._nvml = nvml
        self.error = ""

    def __call__(self, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of NVML, and return its value, None for an error; store the text of the first one that is a fault."""
        try:
            return function(*arguments)
        except self._nvml.NVMLError as error:
            if error.value not in [getattr(self._nvml, f"NVML_ERROR_{name}") for name in _HARMLESS]:
                self.error = self.error or str(error)
        except self._nvml.NVMLLibraryMismatchError:
            pass
        return None

    def text(self, function: Callable[..., Any], *arguments: Any) -> str:
        """Call a function of NVML, and return its text, "" for an error."""
        value = self(function, *arguments)
        return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")


def _read_card(nvml: Library, index: int, full: bool) -> Card:
    """Read a card by its index, with `full` also its state; only index and problem if it does not answer.

    problem: the first error, without those of the state.
    """
    ask = _Asker(nvml)
    handle = ask(nvml.nvmlDeviceGetHandleByIndex, index)
    card: Card = {"index": index}
    if handle is not None:
        card.update(_read_load(nvml, ask, handle))
        if full:
            card.update(_read_state(nvml, _Asker(nvml), handle))  # a card that answers the above works
    card["problem"] = ask.error
    return card


def _read_load(nvml: Library, ask: _Asker, handle: Handle) -> Card:
    """Read what changes from second to second; None for what is not known.

    That is memory, utilisation, temperature, power in W and processes.
    """
    memory = _memory(nvml, ask, handle)
    rates = ask(nvml.nvmlDeviceGetUtilizationRates, handle)
    power = ask(nvml.nvmlDeviceGetPowerUsage, handle)
    return {
        "memory_total": int(memory.total) if memory else None,
        "memory_used": int(memory.used) if memory else None,
        "memory_free": int(memory.free) if memory else None,
        "utilisation": int(rates.gpu) if rates else None,
        "temperature": ask(nvml.nvmlDeviceGetTemperature, handle, nvml.NVML_TEMPERATURE_GPU),
        "power": _watts(power),
        "processes": _processes(nvml, ask, handle),
    }


def _memory(nvml: Library, ask: _Asker, handle: Handle) -> Any:
    """Read the memory of a card as nvidia-smi counts it: what the driver keeps for itself is not "used"."""
    return ask(nvml.nvmlDeviceGetMemoryInfo, handle, nvml.nvmlMemory_v2) or ask(nvml.nvmlDeviceGetMemoryInfo, handle)


def _watts(milliwatts: Optional[int]) -> Optional[float]:
    """Convert milliwatts to watts; None if they are not known."""
    return None if milliwatts is None else round(milliwatts / 1000, 1)


def _processes(nvml: Library, ask: _Asker, handle: Handle) -> List[Dict[str, Any]]:
    """List the processes on a card: {pid, memory: bytes, graphics: whether it only draws, and does not compute}."""
    found: Dict[int, Dict[str, Any]] = {}
    for kind in ("Compute", "Graphics"):
        listed = ask(getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_v3"), handle)
        if listed is None:
            listed = ask(getattr(nvml, f"nvmlDeviceGet{kind}RunningProcesses_v2"), handle)
        for process in listed or ():
            described = {"pid": int(process.pid), "memory": process.usedGpuMemory, "graphics": kind == "Graphics"}
            found.setdefault(int(process.pid), described)
    return list(found.values())


def _read_state(nvml: Library, ask: _Asker, handle: Handle) -> Card:
    """Read the model, the UUID, limits, throttling, ECC errors and modes of a card; None, "" or [] for what is not known."""
    reasons = ask(nvml.nvmlDeviceGetCurrentClocksEventReasons, handle)
    if reasons is None:  # drivers before 535
        reasons = ask(nvml.nvmlDeviceGetCurrentClocksThrottleReasons, handle)
    kinds = (nvml.NVML_MEMORY_ERROR_TYPE_CORRECTED, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED)
    volatile = nvml.NVML_VOLATILE_ECC
    corrected, uncorrected = (ask(nvml.nvmlDeviceGetTotalEccErrors, handle, kind, volatile) for kind in kinds)
    persistence = ask(nvml.nvmlDeviceGetPersistenceMode, handle)
    return {
        "model": ask.text(nvml.nvmlDeviceGetName, handle),
        "uuid": ask.text(nvml.nvmlDeviceGetUUID, handle),
        "power_limit": _watts(ask(nvml.nvmlDeviceGetEnforcedPowerLimit, handle)),
        "throttle": [reason for bit, reason in _THROTTLES.items() if (reasons or 0) & bit],
        "ecc_corrected": corrected,
        "ecc_uncorrected": uncorrected,
        "repair": _read_repair(nvml, ask, handle),
        "slowdown": ask(nvml.nvmlDeviceGetTemperatureThreshold, handle, nvml.NVML_TEMPERATURE_THRESHOLD_SLOWDOWN),
        "compute_mode": _COMPUTE.get(ask(nvml.nvmlDeviceGetComputeMode, handle), ""),
        "persistence": None if persistence is None else bool(persistence),
    }


def _read_repair(nvml: Library, ask: _Asker, handle: Handle) -> Optional[str]:
    """Return what became of bad memory: "failed", "pending" until the card is reset, "" if there is none, None if not known.

    From Ampere on NVIDIA repairs rows of memory, before that pages.
    """
    rows = ask(nvml.nvmlDeviceGetRemappedRows, handle)
    pages = None if rows else ask(nvml.nvmlDeviceGetRetiredPagesPendingStatus, handle)
    if rows is None and pages is None:
        return None
    return "failed" if rows and rows[3] else "pending" if pages or (rows and rows[2]) else ""
