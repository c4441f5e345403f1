"""The documents agree with the tree: decisions have unique numbers, and links and paths lead to files."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DECISIONS = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PACKAGE = ("errors.py", "model/", "node/", "ssh/", "fleet/", "watch/", "show/", "verbs/")


def test_each_decision_has_a_number_of_its_own_and_says_it() -> None:
    numbers = Counter(path.name[:4] for path in DECISIONS)
    assert [number for number, count in numbers.items() if count > 1] == []
    titles = {path.name: path.read_text().split(". ")[0] for path in DECISIONS}
    assert titles == {path.name: f"# {int(path.name[:4])}" for path in DECISIONS}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_to_files(document: Path) -> None:
    links = re.findall(r"\]\(([^)#]+)[^)]*\)", document.read_text())
    missing = [link for link in links if "://" not in link and not (document.parent / link).exists()]
    assert missing == []


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md", "docs/security.md", "docs/gotchas.md"])
def test_paths_in_backticks_are_files_of_the_tree(name: str) -> None:
    paths = re.findall(r"`((?:[\w.]+/)+[\w.-]*|[\w-]+\.(?:py|toml|cfg|example))`", (ROOT / name).read_text())
    known = [path for path in paths if path.startswith((*PACKAGE, "clustertool/", "docs/", "tests/", "scripts/"))]
    assert known
    missing = [p for p in known if not (ROOT / p).exists() and not (ROOT / "clustertool" / p).exists()]
    assert missing == []
