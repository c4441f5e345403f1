"""`run train.py --lr 0.1`: the command of such a line, its workspace, and what is refused before any connection."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from clustertool.cli import parser
from clustertool.cli.verb_table import COMMON, HELP, VERBS
from clustertool.errors import ClustertoolError, DataError, UsageError
from clustertool.model.config.job import Options
from clustertool.verbs.run import read_options, with_program
from clustertool.verbs.verb import Call


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with two scripts."""
    (tmp_path / "home").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    (tmp_path / "job").mkdir()
    for name in ("train.py", "job/other.py", "home/train.py"):
        (tmp_path / name).touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def typed(*argv: str) -> tuple[Options, str]:
    """(options, workspace) of `clustertool run ARGV`."""
    call = Call(SimpleNamespace(**parser.read(["run", *argv], VERBS, COMMON, HELP).given))
    options = with_program(call, read_options(call))
    return options, call.given.workspace


@pytest.mark.usefixtures("folder")
def test_the_rest_of_the_line_is_the_program_and_the_current_folder_its_workspace() -> None:
    options, workspace = typed("--timeout", "60", "train.py", "--lr", "0.1", "--timeout", "2", '{"a": 1}', "two words")
    assert options.command == ("python3", "-u", "train.py", "--lr", "0.1", "--timeout", "2", '{{"a": 1}', "two words")
    assert (options.timeout, workspace) == ("60", ".")
    assert typed("bash", "-c", "x")[0].command == ("bash", "-c", "x")
    assert typed("-w", "job", "other.py") == (Options(command=("python3", "-u", "other.py")), "job")
    assert typed("./job/other.py")[0].command[2:] == ("./job/other.py",)
    assert typed("--job-workspace", "/srv/job", "there.py")[0].command[2:] == ("there.py",)
    assert typed("--script", "train.py", "-w", "job")[0].command == ()


def test_a_path_in_the_workspace_is_shortened(folder: Path) -> None:
    assert typed(str(folder / "job" / "other.py"))[0].command == ("python3", "-u", "job/other.py")


@pytest.mark.parametrize(
    ("argv", "kind", "what"),
    [
        (["nope.py"], DataError, "there is no nope.py in "),
        (["-w", "job", "train.py"], DataError, "there is no train.py in "),
        (["-w", "job", "../train.py"], DataError, "lies outside of the workspace"),
        (["--script", "x", "train.py"], UsageError, "run has two programs"),
    ],
)
@pytest.mark.usefixtures("folder")
def test_what_cannot_run_is_refused(argv: list[str], kind: type[ClustertoolError], what: str) -> None:
    with pytest.raises(kind, match=what):
        typed(*argv)


def test_the_home_folder_is_not_sent_by_mistake(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder / "home")
    with pytest.raises(DataError, match="the workspace would be"):
        typed("train.py")
    assert typed("-w", ".", "train.py")[1] == "."
