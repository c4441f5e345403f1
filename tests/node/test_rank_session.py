"""A program of `exec --in-job` inside a real container of podman or docker: the rank's own user, folder and variables."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

from clustertool.node.agent import rank_session
from tests.cli import REPO
from tests.node.harness import Job, until
from tests.node.test_container_ranks import contained, pytest_generate_tests, store

__all__ = ["contained", "pytest_generate_tests", "store"]  # the fixtures, and what gives them their runtimes
RANK = "id >id; pwd >where; env >env; umask >umask; echo ready; while [ ! -e end ]; do sleep 0.2; done"


def start(job: Job, store: Any, *command: str, **streams: Any) -> subprocess.Popen[str]:
    argv = [sys.executable, "-ESs", "-c", rank_session._CODE, str(REPO), str(job.dir()), "trainer", "0", *command]
    return subprocess.Popen(argv, env={**os.environ, **store.env}, text=True, **streams)


def run(job: Job, store: Any, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end. Its stdin stays open: at the end of stdin the session is over, and the program is ended."""
    stdin, open_end = os.pipe()
    try:
        with start(job, store, *command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=stdin) as child:
            out, err = child.communicate(timeout=60)
    finally:
        os.close(stdin)
        os.close(open_end)
    return subprocess.CompletedProcess([], child.returncode, out, err)


def test_a_command_inside(contained: Any, store: Any) -> None:
    job = contained(RANK, prelude=["LATE=prelude", "export LATE"], node_env={"FROM_NODE": "node"})
    job.ready()

    def inside(*command: str) -> str:
        done = run(job, store, *command)
        assert (done.returncode, done.stderr) == (0, "")
        return done.stdout

    folder = job.dir()
    for name, command in (("id", "id"), ("where", "pwd"), ("umask", "umask")):
        assert inside("sh", "-c", command) == (folder / name).read_text(), name

    def variables(text: str) -> dict[str, str]:
        pairs = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
        return {name: value for name, value in pairs.items() if name not in ("_", "OLDPWD", "SHLVL")}

    ours, ranks = variables(inside("env")), variables((folder / "env").read_text())
    assert ours.pop("_CLUSTERTOOL_SESSION")
    for own in ("TERM", "HOSTNAME"):  # of podman, which does not set them again
        ours.pop(own, None)
        ranks.pop(own, None)
    assert ours == ranks
    assert (ours["LATE"], ours["FROM_IMAGE"], ours["HOME"]) == ("prelude", "image", "/opt/image/home")
    assert run(job, store, "sh", "-c", "exit 7").returncode == 7
    failed = run(job, store, "no-such-program")
    assert failed.returncode == 127 and "no-such-program does not exist in the image" in failed.stderr
    (folder / "end").touch()
    job.ended()


def test_a_shell_inside_ends_with_its_terminal(contained: Any, store: Any) -> None:
    job = contained(RANK)
    job.ready()
    ours, theirs = pty.openpty()
    child = start(job, store, stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True)
    os.close(theirs)
    os.write(ours, b"echo $((40 + 2)) >sum; sleep 1234\n")
    until(lambda: (job.dir() / "sum").exists(), "the shell to run a command")
    assert (job.dir() / "sum").read_text() == "42\n"
    until(lambda: sleeping(), "sleep")
    child.terminate()
    child.wait(30)
    until(lambda: not sleeping(), "its end, in the container too")
    os.close(ours)
    (job.dir() / "end").touch()
    job.ended()


def sleeping() -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            found += [str(path)] if path.read_bytes() == b"sleep\x001234\0" else []
        except OSError:
            continue
    return found
