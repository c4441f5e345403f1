"""Hints name the program that was typed, and the printed commands work as they are printed."""

from __future__ import annotations

import shlex

import pytest

from tests.cli import CLUSTERTOOL, INV
from tests.ssh.test_cli_verbs import WAITS


@pytest.mark.parametrize("program", [pytest.param("clustertool", marks=pytest.mark.chaos), "inv"])
def test_printed_commands_work_as_printed(site, program):
    one = site(1)
    one.workspace(train_py=WAITS)
    call, argv = getattr(one, program), CLUSTERTOOL if program == "clustertool" else INV
    started = call("run", "-w", "job", "--detach", "--job-id", "same").ends(0)
    (line,) = started.lines("job same runs: ")
    attach, logs, stop = (shlex.split(command) for command in line.partition(" runs: ")[2].split(", "))
    assert [command[:2] for command in (attach, logs, stop)] == [[program, verb] for verb in ("attach", "logs", "stop")]
    following = one.start(*logs[1:], program=argv)
    following.says("ready 0")
    twice = call("run", "-w", "job", "--job-id", "same").ends(64)
    assert f"fix: {program} stop --job same ends it" in twice.err
    assert f"fix: {program} stop --job same first" in call("clean", "--job", "same").ends(64).err
    assert "same: 127.0.0.2: clean" in call(*stop[1:]).ends(0).out
    following.wait().ends(0)
    assert call("status", "--job", "same", "--json").json["outcome"]["reason"] == f"{program} stop"
    call(*attach[1:]).ends(143)
    call("clean", "--job", "same").ends(0)
    assert f"fix: {program} jobs lists the jobs" in call("status", "--job", "same").ends(66).err
