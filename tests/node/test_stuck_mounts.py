"""A file system that does not answer is named, and so is one that is mounted noexec."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli import REPO
from tests.node.test_stuck_place import STUCK

PRIVATE = ["unshare", "--mount", "--propagation", "private"]
pytestmark = pytest.mark.skipif(os.getuid() != 0 or not os.access("/dev/fuse", os.W_OK), reason="needs root and FUSE")

UNANSWERED = """
import os, sys
from clustertool.node.system import mounts
mounts._PATIENCE = 1.0
for path in sys.argv[1:]:
    print(mounts.unanswered(path) or "answers", flush=True)
os._exit(0)  # the thread that waits does not end
"""
NOEXEC = """
import subprocess, sys
from clustertool.node.probe.probe import _check_root
from clustertool.node.system.programs import not_started
subprocess.run(["mount", "-t", "tmpfs", "-o", "noexec", "none", sys.argv[1]], check=True)
problems = []
_check_root(sys.argv[1] + "/new", sys.argv[1], problems)
print(problems)
with open(sys.argv[1] + "/x.sh", "w") as file:
    file.write("#!/bin/sh\\n")
__import__("os").chmod(sys.argv[1] + "/x.sh", 0o755)
try:
    subprocess.run(["./x.sh"], cwd=sys.argv[1])
except OSError as error:
    print(not_started(error, "./x.sh", sys.argv[1]))
"""


def printed(argv: list[str]) -> list[str]:
    done = subprocess.run(
        [*PRIVATE, sys.executable, "-c", *argv],
        env={**os.environ, "PYTHONPATH": str(REPO)},
        timeout=60,
        check=True,
        capture_output=True,
    )
    return done.stdout.decode().splitlines()


def test_the_mount_that_does_not_answer_is_named_also_behind_a_link(tmp_path: Path) -> None:
    stuck, link = tmp_path / "a mount", tmp_path / "link"
    stuck.mkdir()
    link.symlink_to("a mount")
    paths = [str(link / "below/root"), str(tmp_path / "nothing/there"), str(tmp_path / "loop/x")]
    (tmp_path / "loop").symlink_to("loop")
    found = printed([STUCK, str(stuck), sys.executable, "-c", UNANSWERED, *paths])
    assert found[0] == f"{stuck} (fuse stuck) does not answer, and {paths[0]} is on it"
    assert "umount -l" in found[1] and found[2:] == ["answers", "answers"]


def test_a_file_system_without_execution_is_named(tmp_path: Path) -> None:
    """By the probe of ROOT_DIR, and in the reason of a rank that could not start."""
    problem, reason = printed([NOEXEC, str(tmp_path)])
    assert "('root', 'warn', 'ROOT_DIR " in problem and "mounted noexec" in problem
    assert reason == "(126, \"cannot start './x.sh': Permission denied; its file system is mounted noexec\")"
