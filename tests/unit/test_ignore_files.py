"""Lines of .clusterignore and, by IGNORE_FROM, of .gitignore keep out of a dispatch what git would ignore."""

from __future__ import annotations

import random
import subprocess
from collections.abc import Mapping
from pathlib import Path

import pytest

from clustertool.fleet.dispatch.ignore_lines import IgnoreLines
from clustertool.fleet.dispatch.workspace import IGNORE_FILE, read_workspace

GIT = ".gitignore"


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", "/dev/null")
    (tmp_path / "job").mkdir()
    return tmp_path / "job"


def write(top: Path, files: Mapping[str, str]) -> None:
    for name, text in files.items():
        (top / name).parent.mkdir(parents=True, exist_ok=True)
        (top / name).write_text(text)


def git(folder: Path, *tokens: str) -> set[str]:
    done = subprocess.run(["git", *tokens], cwd=folder, check=True, capture_output=True, text=True)
    return set(done.stdout.split("\0"))


def sent(folder: Path, *names: str) -> set[str]:
    return set(read_workspace(folder, names).files)


def not_ignored(folder: Path) -> set[str]:
    return git(folder, "ls-files", "-oz", "--exclude-standard") - {""}


LINES = r"""*|!*/|!*.py|*.log|a/|/a|a|!a/|!a|b/*|!b/a|/*|!/b/|a/*.py|**/c|!**/c/|b/**|!b/**/x.py|c/|*.py|!c/x.py|a/b/|!a/b/|/a/*
# x||!x.log|x.*|*.p?|[ab]|[^ab]|x.[lp]*|**|a/**/b|**/b/c|\*.py|!\x.py|\!x|\#y|a/**/|x.py  |b/?|\ y|!"""


def test_random_lines_have_the_result_of_git(job: Path) -> None:
    """On each line of LINES, and in several folders."""
    folders = ["", *(f"{one}/" for one in "abc"), *(f"{one}/{two}/" for one in "abc" for two in "abc")]
    write(job, {f"{folder}{name}": "" for folder in folders for name in ("x.py", "x.log", "#y", "!x", " y")})
    git(job, "init", "-q")
    lines, chance = LINES.replace("\n", "|").split("|"), random.Random(7)
    for _ in range(60):
        for path in list(job.rglob(GIT)):
            path.unlink()
        chosen = {
            folder + GIT: "\n".join(chance.sample(lines, chance.randint(1, 4)))
            for folder in chance.sample(folders, chance.choice((1, 1, 2, 3)))
        }
        write(job, chosen)
        assert sent(job, GIT) == not_ignored(job), chosen


def test_the_common_list_of_what_is_wanted() -> None:
    lines = IgnoreLines(["*", "!*/", "!*.py", "!/data/**"])
    taken = {"a/": False, "a/b/": False, "a/x.py": False, "a/x.txt": True, "data/x": False, "x": True}
    assert {path: lines.ignored(path) for path in taken} == taken
    assert IgnoreLines(["!.ssh/"]).ignored(".ssh/id_rsa") is None and IgnoreLines(["!.ssh/"]).taken(".ssh/id_rsa")


def test_files_above_a_workspace_in_a_repository_count(job: Path) -> None:
    top = job / "sub/job"
    write(job, {GIT: "*.ckpt\n/sub/job/raw\nx\n", f"sub/{GIT}": "!best.ckpt\njob/\n", f"sub/job/{GIT}": "!x\n"})
    write(top, dict.fromkeys(("a.ckpt", "best.ckpt", "raw/1", "x", "train.py"), ""))
    assert sent(top, GIT) == {"a.ckpt", "best.ckpt", "raw/1", "x", "train.py", GIT}, "in no repository"
    git(job, "init", "-q")
    assert sent(top, GIT) == {"best.ckpt", "x", "train.py", GIT}
    assert sent(top) == {"a.ckpt", "best.ckpt", "raw/1", "x", "train.py", GIT}


def test_another_repository_and_a_link(job: Path) -> None:
    write(
        job, {GIT: "x\n", "x": "", "module/x": "", "module/y": "", f"module/{GIT}": "y\n", "far/lines": "z\n", "z": ""}
    )
    git(job / "module", "init", "-q")
    (job / "far" / GIT).symlink_to("lines")
    write(job, {"far/z": ""})
    assert sent(job, GIT) == {"module/x", "far/lines", "far/z", "z", GIT, f"module/{GIT}"}


def test_lines_of_clusterignore_have_priority(job: Path) -> None:
    """A file of IGNORE_FROM takes no credentials, and no results of jobs."""
    write(job, {GIT: "data/\n*.tmp\n!.netrc\n!output/\n", IGNORE_FILE: "!/data/\nlarge\n", ".other": "!a.tmp\n"})
    write(job, dict.fromkeys(("data/1", "data/a.tmp", "b.tmp", "large", ".netrc", "output/model"), ""))
    found = read_workspace(job, [GIT])
    assert set(found.files) == {"data/1", GIT, IGNORE_FILE, ".other"}
    why = {left.path: left.why for left in found.left_out}
    assert why == {
        "data/a.tmp": GIT,
        "b.tmp": GIT,
        "large": IGNORE_FILE,
        ".netrc": "credentials",
        "output/": "results of jobs",
    }
    assert "data/a.tmp" in sent(job, GIT, ".other") and "b.tmp" not in sent(job, GIT, ".other")
