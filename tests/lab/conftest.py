"""Labs for tests: every one a test makes is closed, and proven gone, when the test or the module ends."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli import LabSite
from tests.lab.lab import Lab, why_not


@contextlib.contextmanager
def _factory(base: Path) -> Iterator[Callable[..., Lab]]:
    if why_not():
        pytest.skip(why_not())
    with contextlib.ExitStack() as labs:
        numbers = iter(range(1000))

        def make(n: int = 3, **options: Any) -> Lab:
            return labs.enter_context(Lab(n, base / f"lab{next(numbers)}", **options))

        yield make


@pytest.fixture
def lab(tmp_path: Path) -> Iterator[Callable[..., Lab]]:
    """`lab(4, shared_home=True) -> Lab`, as often as a test likes."""
    with _factory(tmp_path) as make:
        yield make


@pytest.fixture(scope="module")
def module_lab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., Lab]]:
    """The same for labs that all tests of a module share."""
    with _factory(tmp_path_factory.mktemp("lab")) as make:
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
