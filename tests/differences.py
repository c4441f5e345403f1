"""The tables of docs/frameworks.md that list how the environment of a process differs from that of another launcher."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fnmatch import fnmatchcase

from tests.cli import REPO

TORCHRUN = "The environment of torchrun"
PADDLE = "The environment of Paddle's launcher"


def listed(heading: str, mode: str = "") -> set[str]:
    """The variables that the table below this heading lists, with a mode those of the rows of this mode."""
    _, _, section = (REPO / "docs/frameworks.md").read_text().partition(f"\n### {heading}\n")
    rows = [row.split(" | ") for row in re.findall(r"^\| (`.*)$", section.partition("\n#")[0], re.M)]
    mine = [row for row in rows if not mode or mode in row[1].split(", ")]
    assert mine, (heading, mode)
    return {name for row in mine for name in re.findall(r"`(\w+\*?)`", row[0])}


def grouped(names: Iterable[str], patterns: Iterable[str]) -> set[str]:
    """Each name, or the pattern of the table (`PADDLE_INIT_*`) that it matches."""
    wide = [pattern for pattern in patterns if pattern.endswith("*")]
    return {next((pattern for pattern in wide if fnmatchcase(name, pattern)), name) for name in names}
