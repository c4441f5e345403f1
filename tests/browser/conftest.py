"""The ssh servers of tests/ssh, and a browser where there is one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.browser.chromium import PROGRAM, Chromium
from tests.ssh.conftest import laptop, site, ssh_keys, start

__all__ = ["laptop", "site", "ssh_keys", "start"]


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Chromium]:
    if not PROGRAM:
        pytest.skip("needs a browser (package chromium)")
    one = Chromium(tmp_path / "profile")
    yield one
    one.close()
