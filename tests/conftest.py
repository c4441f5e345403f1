"""What all tests share, whatever started them."""

from __future__ import annotations

import ctypes
import gc
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any, Dict, Generator, List, Tuple

import pytest

from tests.node_code import NodeCode

# pytest keeps the modules of the tests as it rewrites them, also where PYTHONDONTWRITEBYTECODE is set: to rewrite all takes
# 13 s of CPU in each worker. What tests start is not affected.
sys.dont_write_bytecode = False

# Where python3 is a script of a version manager, each start of it takes four times as long: programs of tests start its Python.
_PYTHON3 = shutil.which("python3")
if _PYTHON3 and Path(_PYTHON3).read_bytes()[:2] == b"#!":
    os.environ["PATH"] = f"{sys.base_prefix}/bin:{os.environ['PATH']}"

# Until all tests are collected: little of what this makes is garbage, and each pass visits all of it.
gc.disable()

# A shell starts what it runs in the background deaf to SIGINT, and all its children are: no test's Ctrl+C would arrive.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure() -> None:
    """OWN_LOOPBACK=1: 127.0.0.1 is another one for this process, so that it can run next to others."""
    if os.environ.get("OWN_LOOPBACK") and not ctypes.CDLL(None).unshare(0x40000000):  # CLONE_NEWNET
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


# Seconds of a test, on average, beside five others. Where a folder's tests share what takes long to start, one worker gets the
# folder.
_SECONDS = {"lab": 3.6, "ssh": 1.1, "node": 1.1, "security": 0.6, "kubernetes": 0.3, "unit": 0.03}
_TOGETHER = {"frameworks": 3.4, "slurm": 2.4, "here": 1.4, "browser": 1.1, "workspaces": 1.0}


def pytest_collection_finish() -> None:
    """Exempt what is there now from all later collections of garbage: they would visit the objects of 8,000 tests."""
    gc.freeze()
    gc.enable()


@pytest.hookimpl(hookwrapper=True)
def pytest_report_to_serializable() -> Generator[None, Any, None]:
    """Replace in the reports of workers what is not UTF-8, as a mark in the tool's errors is: it would end the run."""
    outcome = yield
    outcome.force_result(_encodable(outcome.get_result()))


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()
    if isinstance(value, dict):
        return {_encodable(key): _encodable(one) for key, one in value.items()}
    return type(value)(map(_encodable, value)) if type(value) in (list, tuple) else value


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: List[pytest.Item]) -> None:
    """Give all workers long tests first, equal shares of them, and then short ones: at the end these can be shared.

    xdist divides the list into one part for each worker, and later takes tests from the end of a part. Tests of the lab mostly
    wait, so half of the workers begin with them, and the others have them later.
    """
    workers = getattr(config, "workerinput", {}).get("workercount", 1)
    if workers == 1:
        return
    seconds = {**_SECONDS, **_TOGETHER}
    groups: Dict[Tuple[float, Path], List[pytest.Item]] = {}
    for item in items:
        folder = item.path.parent
        place = folder if folder.name in _TOGETHER else item.path
        groups.setdefault((seconds.get(folder.name, 1.0), place), []).append(item)
    parts: List[List[List[pytest.Item]]] = [[] for _ in range(workers)]
    loads = [0.0] * workers
    room = [(len(items) + number) // workers for number in range(workers)]  # the last ones are the larger
    for (each, _), group in sorted(groups.items(), key=lambda entry: (entry[0][0], len(entry[1])), reverse=True):
        rest = group
        while rest:
            part = min((number for number in range(workers) if room[number]), key=lambda number: loads[number])
            given, rest = rest[: room[part]], rest[room[part] :]
            parts[part].append(given)
            loads[part] += each * len(given)
            room[part] -= len(given)
    for number in range(1, workers, 2):
        long = [group for group in parts[number] if group[0].path.parent.name != "unit"]
        parts[number] = long[::-1] + parts[number][len(long) :]
    items[:] = [item for part in parts for group in part for item in group]


@pytest.fixture(scope="session")
def node_code(tmp_path_factory: pytest.TempPathFactory) -> NodeCode:
    """The node's code, installed once, by the first worker that needs it."""
    workers_own = tmp_path_factory.getbasetemp()
    folder = (workers_own.parent if "PYTEST_XDIST_WORKER" in os.environ else workers_own) / "code"
    folder.mkdir(mode=0o700, exist_ok=True)
    return NodeCode(folder)


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A libnvidia-ml.so.1 of the tests' own, compiled once. Skips without a C compiler."""
    from tests.nvml import make

    return make(tmp_path_factory.mktemp("nvml"))


@pytest.fixture(scope="session")
def container_image(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small image as `podman import` takes it. Skips without podman; with DEMAND_ENGINES=1 it fails."""
    from tests.containers import demand, make_image

    demand()
    return make_image(tmp_path_factory.mktemp("image"))
