"""What may run side by side: labs share nothing, so each module of them is a group; what lives on loopback takes turns."""

from __future__ import annotations

from pathlib import Path

import pytest

HERE = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before xdist looks for the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for `--dist loadgroup`; pure tests have none and fill the gaps."""
    for item in items:
        folder, *_ = item.path.relative_to(HERE).parts
        if folder == "lab":
            item.add_marker(pytest.mark.xdist_group(item.path.stem))
        elif folder != "unit":
            item.add_marker(pytest.mark.xdist_group("loopback"))
