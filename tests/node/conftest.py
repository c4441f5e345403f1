"""`bench` makes nodes and jobs; at its end it asserts that no process of any job of the test lives."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.node.harness import Bench


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One home for all tests, so that the node's code is compiled once."""
    return tmp_path_factory.mktemp("home")


@pytest.fixture
def bench(tmp_path: Path, home: Path) -> Iterator[Bench]:
    made = Bench(tmp_path, home)
    yield made
    made.end()
