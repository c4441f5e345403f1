"""Labs for tests: every one a test makes is closed, and proven gone, when the test or the module ends."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import forked_agents
from tests.cli import LabSite
from tests.lab.lab import Lab, why_not
from tests.node_code import NodeCode


@contextlib.contextmanager
def _factory(base: Path, code: NodeCode) -> Iterator[Callable[..., Lab]]:
    if why_not():
        pytest.skip(why_not())
    with contextlib.ExitStack() as labs:
        numbers = iter(range(1000))

        def make(n: int = 3, installed: bool = True, **options: Any) -> Lab:
            own = not installed or any(node.users for node in options.get("nodes", {}).values())
            python = sys.executable if own else forked_agents.interpreter(code.place)
            made = labs.enter_context(Lab(n, base / f"lab{next(numbers)}", python=python, **options))
            for home in {made.home(i) for i in range(n)} if installed else ():
                code.put_into(home)
            return made

        yield make


@pytest.fixture
def lab(tmp_path: Path, node_code: NodeCode) -> Iterator[Callable[..., Lab]]:
    """`lab(4, shared_home=True) -> Lab`, as often as a test likes. installed=False: nodes have not been used before.

    The agents of nodes are forks, but for nodes that have not been used before, or have users of their own.
    """
    with _factory(tmp_path, node_code) as make:
        yield make


@pytest.fixture(scope="module")
def module_lab(tmp_path_factory: pytest.TempPathFactory, node_code: NodeCode) -> Iterator[Callable[..., Lab]]:
    """The same for labs that all tests of a module share."""
    with _factory(tmp_path_factory.mktemp("lab"), node_code) as make:
        yield make


@pytest.fixture
def site(lab: Callable[..., Lab], tmp_path: Path) -> Iterator[Callable[..., LabSite]]:
    """site(4, shared_home=True) -> a folder with conf.py and tasks.py on the laptop of a lab of 4 nodes."""
    sites: list[LabSite] = []

    def make(n: int = 3, **options: Any) -> LabSite:
        sites.append(LabSite(tmp_path / f"site{len(sites)}", lab(n, **options)))
        return sites[-1]

    yield make
    for one in sites:
        one.close()
