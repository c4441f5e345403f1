"""A folder of a user with nothing but Python around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli import HereSite


@pytest.fixture
def here(tmp_path: Path) -> Iterator[HereSite]:
    home = tmp_path / "home"
    home.mkdir()
    site = HereSite(tmp_path / "folder", home)
    yield site
    site.close()
