"""Whatever dies while machines join: the job runs on all of them or on none, each process ends, and nothing is left.

Each seed is one story: three machines join, and one of them is harmed at one of the steps. Two seeds run always, thirty with
`make test-chaos`. A failing seed is repeated with `pytest tests/lab/test_join_chaos.py -m "chaos or not chaos" -k "story[17]"`.
"""

from __future__ import annotations

import json
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import proc_files
from tests.lab.joiners import LabMachine, machines
from tests.lab.lab import Lab
from tests.node.harness import until

LOSS, GRACE, LENGTH, JOIN = 2.0, 1.0, 1.0, 8.0
# A coordinator that died early is expected for 30 s, as after a start by ssh.
BOUND = 30.0 + JOIN + LOSS + GRACE + LENGTH + 15
COMMAND = f"echo begin; sleep {LENGTH}; echo end"
CLAIMS = "ports.json"  # stays, without claims
LOCK = "clustertool-devices.lock"
KILLED = {-9, 137}
ALWAYS = (9, 13)  # quick ones: SIGINT at the start of a supervisor, and SIGSTOP and SIGCONT while the machine is probed
HARMS = [["kill"], ["TERM", "INT"], ["stop", "stop and continue"], ["cut"], ["cut and heal"]]


def offer(machine: LabMachine) -> bool:
    return bool(machine.find())


def probe(machine: LabMachine) -> bool:
    return any(proc_files.comm(pid) == "ct-join-task" for pid in machine.living())


def place(machine: LabMachine) -> bool:
    return machine.job_dir.exists()


def launch(machine: LabMachine) -> bool:
    return (machine.job_dir / ".clustertool/events.jsonl").exists()


def coordinate(machine: LabMachine) -> bool:
    return bool(machine.reports("planned"))


def go(machine: LabMachine) -> bool:
    return bool(machine.events("started"))


STEPS: list[Callable[[LabMachine], bool]] = [offer, probe, place, launch, coordinate, go]


def harm(kind: str, victim: LabMachine, lab: Lab, dice: random.Random) -> set[int]:
    """Do one harm. The codes with which the victim may end."""
    seconds = dice.uniform(0.2, LOSS * 0.6)
    if kind == "kill":
        victim.signal(signal.SIGKILL)
        return KILLED
    if kind in ("TERM", "INT"):
        victim.signal(signal.Signals[f"SIG{kind}"])
        return {143, -15, 0} if kind == "TERM" else {130, -2, 0}  # by the signal itself while Python starts
    if kind.startswith("stop"):
        victim.signal(signal.SIGSTOP)
        if kind == "stop":
            return {75, *KILLED}  # the guard ends a supervisor that is silent
        time.sleep(seconds)
        victim.signal(signal.SIGCONT)
    else:
        lab.cut(victim.node)
        if kind == "cut":
            return {75}
        time.sleep(seconds)
        lab.heal(victim.node)
    return {0, 75}


def seeds() -> list[object]:
    return [pytest.param(seed, marks=() if seed in ALWAYS else pytest.mark.chaos) for seed in range(30)]


@pytest.mark.parametrize("seed", seeds())
def test_story(lab: Callable[..., Lab], tmp_path: Path, seed: int) -> None:
    dice = random.Random(seed)
    three = lab(3)
    cluster = {"loss_timeout": LOSS, "grace": GRACE}
    all_three = machines(three, tmp_path, COMMAND, join_timeout=JOIN, cluster=cluster)
    step, victim = STEPS[seed % len(STEPS)], dice.choice(all_three)
    kind = dice.choice(HARMS[seed // len(STEPS)])
    before = {machine.node: sorted(machine.lab.tmp(machine.node).iterdir()) for machine in all_three}
    for machine in all_three:
        machine.start()
    until(lambda: step(victim) or victim.ended, f"seed {seed}: {step.__name__} on node {victim.node}")
    until(lambda: victim.find() or victim.ended, "its process")
    time.sleep(dice.uniform(0.0, 0.1))
    began = time.monotonic()
    codes = {0} if victim.ended else harm(kind, victim, three, dice)
    story = f"seed {seed}: {kind} of node {victim.node} at {step.__name__}"
    others = [machine for machine in all_three if machine is not victim]
    try:
        found = [machine.wait(BOUND) for machine in others]
        took = time.monotonic() - began
        if kind in ("stop", "cut"):
            if kind == "stop":
                victim.signal(signal.SIGCONT)
            own = victim.wait(BOUND)
            three.heal(victim.node)  # it gave up by itself
        else:
            own = victim.wait(BOUND)
        print(f"{story}: {found} {own} after {took:.1f} s")
        check(all_three, victim, before, found, own, codes)
    except AssertionError as error:
        lines = [(machine.node, machine.lines, machine.errors) for machine in all_three]
        raise AssertionError(f"{story}: {error}\n{lines}") from None


def check(
    all_three: list[LabMachine],
    victim: LabMachine,
    before: dict[int, list[Path]],
    found: list[int],
    own: int,
    codes: set[int],
) -> None:
    assert own in codes, f"the victim ended with {own}, not with one of {codes}"
    assert len(set(found)) == 1, f"the others ended with {found}"
    assert found[0] in {0, 75, 130, 143}
    until(lambda: not any(machine.living() for machine in all_three), f"nothing lives: {names(all_three)}")
    if found[0] == 0:
        assert all(machine.log(machine.node) == "begin\nend\n" for machine in all_three), "the job ran on all"
    elif any("begin" in machine.log(machine.node) for machine in all_three):
        assert all(machine.events("supervisor") for machine in all_three), "the job has started on a part"
    planned = any(machine.reports("planned") for machine in all_three)
    for machine in all_three:
        assert planned or not machine.left(), (
            f"node {machine.node} keeps {sorted(machine.root.rglob('*'))} of a job that never started"
        )
        new = set(machine.lab.tmp(machine.node).iterdir()) - set(before[machine.node])
        files = [path for top in new for path in [top, *top.rglob("*")] if not path.is_dir()]
        assert {path.name for path in files} <= {CLAIMS, LOCK}, f"node {machine.node} keeps {files} in /tmp"
        if machine is victim and own in KILLED:
            continue  # what the supervisor itself removes: its claims are void, its socket is that of a job that has ended
        claims = {name for path in files if path.name == CLAIMS for name in json.loads(path.read_text() or "{}")}
        assert claims <= {"format"}, f"node {machine.node} keeps claims of ports {claims}"
        sockets = [path for path in machine.root.rglob("*") if path.is_socket() or path.is_fifo()]
        assert not sockets, f"node {machine.node} keeps {sockets}"


def names(all_three: list[LabMachine]) -> list[tuple[int, str]]:
    return [(machine.node, proc_files.comm(pid)) for machine in all_three for pid in machine.living()]
