"""A script with Windows line ends is named wherever it is started: by a shell with a prelude, in a container, or directly."""

from __future__ import annotations

import inspect
import os
import shutil
import subprocess
from pathlib import Path

import pytest

from clustertool.model.job.start_error import NOT_FOUND, after_prelude
from clustertool.node.agent import rank_session
from clustertool.node.mpi import rank_wrapper
from clustertool.node.supervisor import rank_process
from clustertool.node.system import programs

REASON = r"its first line has a Windows line end, which is in the interpreter's name: remove it with sed -i 's/\r$//'"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "bad.sh").write_bytes(b"#!/bin/sh\r\necho no\r\n")
    (tmp_path / "good.sh").write_text("#!/bin/sh\necho $#\n")
    (tmp_path / "no line.sh").write_bytes(b"\x00" * 100)
    for path in tmp_path.iterdir():
        path.chmod(0o755)
    return tmp_path


@pytest.mark.parametrize("shell", [shell for shell in ("bash", "dash", "busybox", "sh") if shutil.which(shell)])
def test_the_shell_of_a_prelude_and_of_a_container_names_it(folder: Path, shell: str) -> None:
    def run(*argv: str) -> tuple[int, str, str]:
        start = [shell, *(["sh"] if shell == "busybox" else []), "-c", after_prelude("no $1"), "prelude"]
        env = {"CLUSTERTOOL_PRELUDE": ":", "PATH": os.defpath}
        done = subprocess.run([*start, *argv], cwd=folder, env=env, capture_output=True, text=True)
        return done.returncode, done.stdout, done.stderr

    assert run("./bad.sh") == (NOT_FOUND, "", f"clustertool: cannot start ./bad.sh: {REASON}\n")
    assert run("./good.sh", "a", "b") == (0, "2\n", "")
    assert run("echo", "x") == (0, "x\n", "")
    assert run("/bin/echo", "x") == (0, "x\n", "")


def test_a_direct_start_names_it(folder: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        subprocess.run(["./bad.sh"], cwd=folder)
    assert programs.not_started(caught.value, "./bad.sh", str(folder)) == (
        NOT_FOUND,
        f"cannot start './bad.sh': {REASON}",
    )
    nothing = FileNotFoundError(2, "No such file or directory", "./x.sh")
    assert programs.not_started(nothing, "./x.sh", str(folder))[1] == "cannot start './x.sh': No such file or directory"
    for module in (rank_process, rank_session, rank_wrapper):  # each program of ours that starts a rank's one
        assert "programs.not_started(" in inspect.getsource(module)
