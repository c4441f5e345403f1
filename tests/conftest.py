"""What may run side by side: labs share nothing, so each module of them is a group; what lives on loopback takes turns."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def nvml(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A libnvidia-ml.so.1 of the tests' own, compiled once. Skips without a C compiler."""
    from tests.nvml import make

    return make(tmp_path_factory.mktemp("nvml"))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for `--dist loadgroup`; pure tests have none and fill the gaps."""
    for item in items:
        folder, *_ = item.path.relative_to(HERE).parts
        if folder == "lab":
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        elif folder != "unit":
            item.add_marker(pytest.mark.xdist_group("loopback"))
