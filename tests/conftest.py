"""What all tests share, whatever started them."""

from __future__ import annotations

import signal
from typing import Any

import pytest

# A shell starts what it runs in the background deaf to SIGINT, and all its children are: no test's Ctrl+C would be heard.
signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A libnvidia-ml.so.1 of the tests' own, compiled once. Skips without a C compiler."""
    from tests.nvml import make

    return make(tmp_path_factory.mktemp("nvml"))
