"""A supervisor outlives the logout where logind ends processes: with stand-ins for loginctl and systemd-run, as there is no
systemd where the tests run."""

from __future__ import annotations

import os
import pwd
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertool.errors import PortInUse
from clustertool.node.ports import reservations
from tests.node import programs as p
from tests.node.harness import Bench, Job, Node, read, until

LOGINCTL = """#!/bin/sh
echo "$@" >> {calls}/loginctl
case "$*" in
  *show-session*) {manager} ;;
  *show-user*) {user} ;;
esac
"""
# What systemd-run --scope does to the program that it becomes, as far as the program can see.
SYSTEMD_RUN = """#!/bin/sh
echo "$1 $2" >> {calls}/systemd-run
{before}
shift 2
IN_SCOPE=1 INVOCATION_ID=1 exec "$@"
"""
KILLS, LINGERS = "echo KillUserProcesses=yes; echo KillExcludeUsers=nobody", "echo Linger=yes"
Made = Callable[..., Node]


@pytest.fixture
def node(bench: Bench, tmp_path: Path) -> Made:
    """node(manager=, user=, before=): shell lines that loginctl and systemd-run are made of."""
    folder = tmp_path / "bin"
    folder.mkdir()

    def make(manager: str = KILLS, user: str = LINGERS, before: str = "", session: bool = True) -> Node:
        for name, text in (("loginctl", LOGINCTL), ("systemd-run", SYSTEMD_RUN)):
            (folder / name).write_text(text.format(calls=tmp_path, manager=manager, user=user, before=before))
            (folder / name).chmod(0o755)
        env = {"PATH": f"{folder}:{os.environ['PATH']}", **({"XDG_SESSION_ID": "7"} if session else {})}
        return bench.nodes(1, env=env)[0]

    return make


def in_scope(job: Job) -> bool:
    return b"IN_SCOPE=1" in read(f"/proc/{job.process('supervisor').pid}/environ").split(b"\0")


def asked(tmp_path: Path, name: str) -> list[str]:
    return (tmp_path / name).read_text().splitlines() if (tmp_path / name).exists() else []


def warnings(node: Node) -> list[list[str]]:
    return [problem for problem in node.probe(job={})["problems"] if problem[0] == "limits"]


def test_with_linger_the_supervisor_is_in_a_scope(bench: Bench, node: Made, tmp_path: Path) -> None:
    made = node()
    assert warnings(made) == []
    names = "env | cut -d= -f1 | grep -v XDG_SESSION_ID | sort | tr '\\n' ' '"
    program = f"{names}; echo $WORD; ls /proc/self/fd | wc -l; {p.PLAIN}"
    job = bench.run([made], program, secrets={"WORD": "hidden"}).ready()
    assert in_scope(job)
    assert asked(tmp_path, "systemd-run") == ["--user --scope"]
    usual = bench.run(bench.nodes(1), program, secrets={"WORD": "hidden"}).ready()
    assert job.log().splitlines()[:2] == usual.log().splitlines()[:2], (
        "the ranks have the same environment and descriptors"
    )
    assert b"hidden" in job.log() and "hidden" not in read(str(job.dir() / ".clustertool/spec.json")).decode()
    for one in (job, usual):
        one.stop()
        assert one.ended()["state"] == "stopped"


@pytest.mark.parametrize(
    "manager, user, warned",
    [
        (KILLS, "echo Linger=no", True),
        (KILLS, "exit 1", True),  # no such user is known to logind, and /var/lib/systemd/linger has none
        ("echo KillUserProcesses=no", "echo Linger=no", False),
        ("echo KillUserProcesses=no", LINGERS, False),
        ("echo KillUserProcesses=yes; echo KillExcludeUsers=nobody {me}", "echo Linger=no", False),
        (
            "echo KillUserProcesses=yes; echo KillOnlyUsers=nobody; echo KillExcludeUsers=nobody",
            "echo Linger=no",
            False,
        ),
        ("echo KillUserProcesses=no; echo KillOnlyUsers={me}; echo KillExcludeUsers=nobody", "echo Linger=no", True),
        ("exit 1", LINGERS, False),  # System has not been booted with systemd
    ],
)
def test_in_all_other_cases_nothing_changes(
    bench: Bench, node: Made, tmp_path: Path, manager: str, user: str, warned: bool
) -> None:
    made = node(manager.format(me=pwd.getpwuid(os.getuid()).pw_name), user)
    problems = warnings(made)
    assert bool(problems) == warned
    if warned:
        assert problems[0][1] == "warn" and "KillUserProcesses=yes" in problems[0][2]
        assert "loginctl enable-linger" in problems[0][3]
    job = bench.run([made], p.PLAIN).ready()
    assert not in_scope(job) and asked(tmp_path, "systemd-run") == []
    job.stop()


def test_root_is_excluded_by_default(node: Made) -> None:
    if os.getuid():
        pytest.skip("needs root")
    assert warnings(node("echo KillUserProcesses=yes", "echo Linger=no")) == []


def test_outside_of_a_session_loginctl_is_not_asked(bench: Bench, node: Made, tmp_path: Path) -> None:
    made = node(session=False)
    assert warnings(made) == []
    job = bench.run([made], p.PLAIN).ready()
    job.stop()
    assert asked(tmp_path, "loginctl") == [] or "/session-" in Path("/proc/self/cgroup").read_text()


def test_a_loginctl_that_hangs_is_not_waited_for(node: Made) -> None:
    made = node("exec sleep 100")
    before = time.monotonic()
    assert warnings(made) == []
    assert time.monotonic() - before < 60


@pytest.mark.parametrize("before", ["echo Failed to connect to bus >&2; exit 1", "exec sleep 100"])
def test_a_scope_that_fails_is_done_without(bench: Bench, node: Made, before: str) -> None:
    job = bench.run([node(before=before)], p.PLAIN).ready()
    assert not in_scope(job)
    job.stop()
    assert job.ended()["state"] == "stopped"


def test_an_error_of_the_supervisor_in_a_scope_is_its_own(bench: Bench, node: Made, tmp_path: Path) -> None:
    import socket

    made = node()
    job = bench.job([made], p.PLAIN).place()
    port = job.plan.coordinator[1]
    with socket.create_server(("127.0.0.1", port)), pytest.raises(PortInUse, match=f"port {port} is in use by"):
        job.start()
    assert asked(tmp_path, "systemd-run") == ["--user --scope"]
    until(lambda: port not in reservations.reserved_ports(), "the supervisor has ended")
