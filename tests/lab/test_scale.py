"""Promises of time on many nodes. They hold on a quiet machine, so they are asserted only by `make test-chaos`."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.lab import joiners
from tests.node.harness import until

pytestmark = pytest.mark.chaos
NODES = int(os.environ.get("NODES", "400"))

FAIL = """
    import os, time
    while os.environ["RANK"] != "15" or not os.path.exists("/tmp/now"):
        time.sleep(0.01)
    print("exit at", time.time(), flush=True)
    raise SystemExit(7)
"""


def test_a_failure_on_16_nodes_is_at_the_prompt_in_2_seconds(site) -> None:
    many = site(16)
    running = many.start("run", "-w", many.workspace(train_py=FAIL), "--rank", 15)
    running.says("starting the trainers")
    time.sleep(1.0)
    (many.lab.tmp(15) / "now").touch()
    exited = float(running.says(r"exit at (\S+)"))
    running.wait().ends(7)
    assert time.time() - exited < 2.0


def test_64_nodes_of_obedient_ranks_stop_in_2_seconds(site) -> None:
    many = site(64)
    workspace = many.workspace(train_py="import time\nprint('here', flush=True)\ntime.sleep(1000)\n")
    running = many.start("run", "-w", workspace, timeout=120)
    running.says("here")
    time.sleep(2.0)
    asked = running.signal(signal.SIGINT)
    running.wait().ends(130)
    assert time.monotonic() - asked < 2.0
    many.gone(1.0)


def test_the_stop_of_128_nodes_takes_no_longer_than_three_commands_there(site) -> None:
    """While the job runs, and in alternation, since the machine may have other work.

    All nodes share its processors and its /proc, which each agent reads and `exec` does not: so a quarter more is allowed.
    """
    many = site(128, acquainted=True)
    many.conf(CONNECT_TIMEOUT=60, CHECKS_OFF=["mesh", "load"])
    workspace = many.workspace(train_py="import time\ntime.sleep(1000)\n")

    def command() -> float:
        return many.clustertool("exec", "--command", "true", timeout=120).ends(0).seconds

    command()
    ratios = []
    for _ in range(3):
        many.clustertool("run", "-w", workspace, "--detach", timeout=300).ends(0)
        three = sum(command() for _ in range(3))
        stopped = many.clustertool("stop", timeout=120).ends(0)
        assert "node[0-127]: clean\n" in stopped.out
        ratios.append(stopped.seconds / three)
        many.gone(30.0)
    assert min(ratios) < 1.25, ratios


def test_400_nodes_on_one_loaded_machine_lose_none(site) -> None:
    """All share two cores or so with programs that compute: everything is slow, and nothing is lost."""
    many = site(NODES, acquainted=True)
    many.conf(CONNECT_TIMEOUT=120, CHECKS_OFF=["mesh", "load"])
    workspace = many.workspace(train_py="import time\nprint('here', flush=True)\ntime.sleep(15)\n")
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        done = many.start("run", "-w", workspace, timeout=600).wait(600)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    done.ends(0)
    assert "lost" not in done.err
    many.gone(60.0)


def test_64_machines_join_and_each_gets_its_part(lab, tmp_path) -> None:
    """No bound for the time; the coordinator's CPU is that of its joining process from its start until the job starts."""
    many = joiners.machines(
        lab(int(os.environ.get("JN", "64")), acquainted=True),
        tmp_path,
        "echo rank $RANK of $WORLD_SIZE",
        join_timeout=300.0,
    )
    many[0].start().until("waiting")
    many[0].find()
    began, used = time.monotonic(), cpu(many[0].pid)
    for machine in many[1:]:
        machine.start()
    until(lambda: many[0].reports("waiting")[-1]["present"] == 64, "all have joined", 300)
    joined = time.monotonic() - began
    until(lambda: many[0].reports("started") or many[0].reports("error"), "the job starts", 120)
    used = cpu(many[0].pid) - used
    started = time.monotonic() - began
    assert [machine.wait(120) for machine in many] == [0] * 64, [machine.error for machine in many]
    for node, machine in enumerate(many):
        assert machine.log(node) == f"rank {node} of 64\n"
    print(
        f"joined after {joined:.1f} s, started after {started:.1f} s, {used / 64 * 1000:.1f} ms of CPU for each joiner"
    )
    assert used / 64 < 0.02, used


def cpu(pid: int) -> float:
    """Seconds that a process has used, without its children."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


SLEEPS = """
    import os, time
    longest, before, phase = {}, time.monotonic(), "start"
    print("ready", flush=True)
    while phase != "end":
        time.sleep(0.01)
        now = time.monotonic()
        phase = open("/tmp/phase").read() if os.path.exists("/tmp/phase") else "start"
        longest[phase] = max(longest.get(phase, 0.0), now - before - 0.01)
        before = now
    print(f"stood still for {1000 * longest['status']:.0f} and {1000 * longest['stacks']:.0f} ms", flush=True)
"""


def test_stacks_of_64_ranks_on_16_nodes_take_2_seconds_and_stop_none_for_100_ms(site) -> None:
    """Beyond what connections take and delay ranks, for which another command is the measure: all share two cores or so."""
    many = site(16, acquainted=True)
    many.conf(CHECKS_OFF=["mesh", "load"])
    running = many.start("run", "-w", many.workspace(train_py=SLEEPS), "--nproc-per-node=4", "--all-ranks")
    running.says(r"^\[trainer 63 .*ready")
    many.clustertool("stacks").ends(0)  # it sends py-spy
    found = {}
    for verb in ("status", "stacks"):
        set_phase(many, verb)
        found[verb] = [many.clustertool(verb, "--json").ends(0) for _ in range(3)]
    set_phase(many, "end")
    done = running.wait().ends(0)
    still = [(int(one), int(two)) for one, two in re.findall(r"stood still for (\d+) and (\d+) ms", done.out)]
    seconds = {verb: min(one.seconds for one in its) for verb, its in found.items()}
    longest = {verb: max(row[at] for row in still) for at, verb in enumerate(found)}
    print(f"seconds: {seconds}; ms: {longest}")
    for one in found["stacks"]:
        assert {rank for group in one.json["groups"] for rank in group["ranks"]} == {*range(64)}
    assert seconds["stacks"] - seconds["status"] < 2.0
    assert len(still) == 64 and longest["stacks"] - longest["status"] < 100


def set_phase(many, name: str) -> None:
    for node in range(16):
        (many.lab.tmp(node) / "new").write_text(name)
        (many.lab.tmp(node) / "new").rename(many.lab.tmp(node) / "phase")
