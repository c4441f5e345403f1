"""Each fault in each phase of a job: afterwards nothing of the job is left, or an answer names what may be left.

One row is a fault on one of four nodes, one column a phase. A case is repeated with
`pytest tests/lab/test_fault_matrix.py -m "chaos or not chaos" -k "both-running-1"`.
"""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Callable, Iterator
from typing import NamedTuple

import pytest

from tests.cli import Done, LabSite, Running, until
from tests.lab.chaos_faults import PHASES, fill_disk, fill_workspace, free_disk, kill_both, pids, reach
from tests.lab.lab import Node

LOSS, GRACE, LENGTH, COUNT = 3.0, 2.0, 6.0, 4
ALWAYS = ("both", "running", 1)
# A child that would outlive its parent, and ranks that take the grace to end.
JOB = f"""
    import signal, subprocess, time
    for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    subprocess.Popen(["sleep", "1000"], start_new_session=True)
    print("line 0", flush=True)
    time.sleep({LENGTH})
"""
PATIENCE = 30.0 + LENGTH + LOSS + GRACE  # a node that cannot connect tries for 30 s


class Row(NamedTuple):
    """A fault. phases: in which there is something to harm. codes: what `run` may end with, by phase. name: of the process."""

    do: Callable[[LabSite, Running, int], object]
    codes: dict[str, tuple[int, ...]]
    name: str = "ct-supervisor"
    nodes: tuple[int, ...] = tuple(range(COUNT))


def kill(name: str, number: signal.Signals = signal.SIGKILL) -> Callable[[LabSite, Running, int], object]:
    return lambda site, running, node: [os.kill(pid, number) for pid in pids(site, node, name)]


def codes(start: tuple[int, ...], running: tuple[int, ...], stop: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {"start": start, "running": running, "stop": stop}


BROKEN = {"dispatch": (69, 74), "placing": (69, 74)}
LOST = codes((69, 75), (75,), (75, 130))
ROWS = {
    "supervisor": Row(kill("ct-supervisor"), LOST, nodes=(1, 2, 3)),
    "coordinator": Row(kill("ct-supervisor"), LOST, nodes=(0,)),
    "guard": Row(kill("ct-guard"), codes((0,), (0,), (130,)), name="ct-guard"),
    "both": Row(lambda site, _, node: kill_both(site, node), LOST, name="ct-guard"),
    "agent": Row(kill("ct-agent"), {**BROKEN, **codes((0, 69, 75), (0,), (130,))}, name="ct-agent"),
    "laptop": Row(lambda _, running, __: running.signal(signal.SIGKILL), dict.fromkeys(PHASES, (-9,)), nodes=(0,)),
    "cut": Row(lambda site, _, node: site.lab.cut(node), {**BROKEN, **LOST}, nodes=(0, 1)),
    "root": Row(
        lambda site, _, node: remove_root(site, node),
        {"dispatch": (69, 74), "placing": (69, 74), **codes((69, 75), (75,), (75, 130))},
        nodes=(0, 1),
    ),
    "disk": Row(
        lambda site, _, node: fill_disk(site, node), {**BROKEN, **codes((0, 1, 69, 75), (0,), (130,))}, nodes=(0, 1)
    ),
    "shutdown": Row(kill("ct-supervisor", signal.SIGTERM), codes((69, 143), (143,), (130, 143)), nodes=(0, 1)),
    "hang-up": Row(kill("ct-supervisor", signal.SIGHUP), codes((69, 143), (143,), (130, 143)), nodes=(1,)),
    "interrupt": Row(kill("ct-supervisor", signal.SIGINT), codes((69, 130), (130,), (130,)), nodes=(1,)),
    "notice": Row(kill("ct-supervisor", signal.SIGUSR1), {"running": (0,), "stop": (130,)}, nodes=(0, 1)),
    "notice to a guard": Row(kill("ct-guard", signal.SIGUSR2), {"running": (0,), "stop": (130,)}, nodes=(1,)),
    "continue": Row(kill("ct-supervisor", signal.SIGCONT), codes((0,), (0,), (130,)), nodes=(1,)),
}


def remove_root(site: LabSite, node: int) -> None:
    """As `rm -rf` does, while the tool writes there."""
    until(lambda: shutil.rmtree(site.root(node), ignore_errors=True) or not site.root(node).exists())


def cases() -> list[object]:
    return list(_cases())


def _cases() -> Iterator[object]:
    for name, row in ROWS.items():
        for phase in row.codes:
            for node in row.nodes:
                marks = () if (name, phase, node) == ALWAYS else pytest.mark.chaos
                yield pytest.param(name, phase, node, id=f"{name}-{phase}-{node}", marks=marks)


@pytest.mark.parametrize(("fault", "phase", "node"), cases())
def test_fault(site: Callable[..., LabSite], fault: str, phase: str, node: int) -> None:
    row = ROWS[fault]
    four = site(COUNT, nodes={node: Node(disk="24m")} if fault == "disk" else {})
    four.conf(LOSS_TIMEOUT=LOSS, GRACE=GRACE, CONNECT_TIMEOUT=5)
    folder = four.workspace(train_py=JOB)
    if phase in ("dispatch", "placing"):
        fill_workspace(four, folder)
    running = four.start("run", "-w", "job")
    reach(four, running, phase, node, row.name)
    row.do(four, running, node)
    done = running.wait(90)
    assert done.code in row.codes[phase], done
    if (fault, phase) == ("both", "running"):
        assert f"{four.name(node)}, which was lost: clean" in done.err and not four.living(), done
        assert "may still run" not in done.last, done
    if fault == "cut":
        until(lambda: not [one for one in four.living() if one.node == node], PATIENCE, lambda: str(four.living()))
        four.lab.heal(node)
    if fault == "disk":
        free_disk(four, node)
    nothing_left_unnamed(four, done)


def nothing_left_unnamed(site: LabSite, done: Done) -> None:
    """Nothing lives, or an answer names it and `stop` ends it. No job is thought to run."""
    named = "may still run" in done.last or "unknown" in done.err
    if done.code == -9 or not named:  # without a laptop the job goes on to its end
        site.gone(PATIENCE)
    stop = site.inv("stop", "--all").ends(0)
    assert not site.living(), (done, stop)
    jobs = site.inv("jobs", "--json").ends(0).json["jobs"]
    assert not [job for job in jobs if job["state"] in ("running", "unknown", "queued")], jobs
    assert "may still run" not in site.inv("jobs").ends(0).err
