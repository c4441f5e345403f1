"""The documents agree with the tree: decisions have unique numbers, and links and paths lead to files."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DECISIONS = sorted((ROOT / "docs/decisions").glob("[0-9]*.md"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
PACKAGE = ("errors.py", "model/", "node/", "ssh/", "fleet/", "watch/", "show/", "actions/", "api/", "verbs/")


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


def test_the_architecture_describes_each_folder_of_the_package() -> None:
    text, package = (ROOT / "docs/architecture.md").read_text(), ROOT / "clustertool"
    folders = {path.parent.relative_to(package).as_posix() for path in package.rglob("*.py")} - {"."}
    assert [folder for folder in sorted(folders) if f"`{folder}/`" not in text] == []


def test_each_path_of_the_architecture_has_at_most_ten_steps_with_file_names() -> None:
    text = (ROOT / "docs/architecture.md").read_text()
    section = text.partition("## Four paths\n")[2].partition("\n## ")[0]
    paths = re.findall(r"\*\*(A[^*]+)\*\*, from [^\n]*:\n\n((?:[ 0-9][^\n]*\n?)+)", section)
    assert [name for name, _ in paths] == ["A rank", "A log byte", "A piece of a workspace", "A stop"]
    for name, steps in paths:
        assert len(re.findall(r"^\d+\. ", steps, re.M)) <= 10, name
        assert len(re.findall(r"`[\w./]+\.py`", steps)) >= 5, name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_page_names_an_address_of_the_project(document: Path) -> None:
    """The project has no server of its own: a reader has these files already."""
    assert re.findall(r"(?:https?://|git@)\S*clustertool\S*", document.read_text()) == []


def test_the_readme_installs_into_an_environment_of_its_own() -> None:
    """Debian and Ubuntu refuse `pip install` outside of one."""
    text = (ROOT / "README.md").read_text()
    assert text.index("python3 -m venv") < text.index("pip install .") and "pipx install ." in text


@pytest.mark.parametrize("name", ["digits-torch", "digits-paddle"])
def test_the_checkpoint_code_of_the_page_is_that_of_the_example(name: str) -> None:
    """The imports, and all from the first assignment on."""
    code, page = (ROOT / f"workspaces/{name}/checkpoint.py").read_text(), (ROOT / "docs/elastic.md").read_text()
    imports = re.findall(r"^(?:import|from (?!__future__)).*$", code, re.MULTILINE)
    assert "\n".join([*imports, "", code[code.index("FOLDER =") :].rstrip()]) in page
