"""The ssh servers of tests/ssh, and a browser where there is one."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.browser.chromium import PROGRAM, Chromium
from tests.ssh.conftest import laptop, site, ssh_keys, start

__all__ = ["laptop", "site", "ssh_keys", "start"]


@pytest.fixture(scope="session")
def chromium(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Chromium]:
    if not PROGRAM:
        pytest.skip("needs a browser (package chromium)")
    one = Chromium(tmp_path_factory.mktemp("browser") / "profile")
    yield one
    one.close()


@pytest.fixture
def browser(chromium: Chromium) -> Chromium:
    """A new page of the browser."""
    chromium.turn()
    return chromium
