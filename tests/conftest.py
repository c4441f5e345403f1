"""What all tests share, whatever started them."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.node_code import NodeCode

# pytest keeps the modules of the tests as it rewrites them, also where PYTHONDONTWRITEBYTECODE is set: to rewrite all takes
# 13 s of CPU in each worker. What tests start is not affected.
sys.dont_write_bytecode = False

# A shell starts what it runs in the background deaf to SIGINT, and all its children are: no test's Ctrl+C would arrive.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_configure() -> None:
    """OWN_LOOPBACK=1: 127.0.0.1 is another one for this process, so that it can run next to others."""
    if os.environ.get("OWN_LOOPBACK") and not ctypes.CDLL(None).unshare(0x40000000):  # CLONE_NEWNET
        subprocess.run(["ip", "link", "set", "lo", "up"], check=True)


@pytest.fixture(scope="session")
def node_code(tmp_path_factory: pytest.TempPathFactory) -> NodeCode:
    """The node's code, installed once."""
    return NodeCode(tmp_path_factory.mktemp("code"))


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
