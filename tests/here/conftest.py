"""A folder of a user with nothing but Python around it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli import HereSite
from tests.node_code import NodeCode


@pytest.fixture
def here(tmp_path: Path, node_code: NodeCode) -> Iterator[HereSite]:
    home = tmp_path / "home"
    home.mkdir()
    node_code.put_into(home)
    site = HereSite(tmp_path / "folder", home)
    yield site
    site.close()


@pytest.fixture
def folders(tmp_path: Path, node_code: NodeCode) -> Iterator[list[HereSite]]:
    """Two folders of one user."""
    home = tmp_path / "home"
    home.mkdir()
    node_code.put_into(home)
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    sites = [HereSite(tmp_path / name / "folder", home) for name in ("a", "b")]
    yield sites
    for site in sites:
        site.close()
