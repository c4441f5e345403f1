"""Whatever dies, the job goes on correctly or ends everywhere, quickly, and says so; no byte of a log is lost.

Each seed is one story: a job of 4 nodes x 2 ranks, one fault at a random moment, and what must be true afterwards. They
run with `make test-chaos`; test_jobs_faults.py and test_jobs_interrupt.py have single faults. A failing seed is repeated with
`pytest tests/lab/test_chaos.py -m "chaos or not chaos" -k "story[17]"`.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli import LabSite, Running, until
from tests.lab.chaos_faults import Fault, freeze_laptop, interrupt, kill_laptop, pids, status

LOSS, GRACE, LENGTH = 3.0, 1.0, 6.0
# Numbered lines, half of a second line without its end, and a child that would outlive its parent.
JOB = f"""
    import os, subprocess, sys, time
    rank = os.environ["RANK"]
    if rank in "37":
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
    end, i = time.monotonic() + {LENGTH}, 0
    while time.monotonic() < end:
        os.write(1, b"rank %s line %d\\n" % (rank.encode(), i))
        i += 1
        time.sleep(0.01)
    os.write(1, b"rank %s has " % rank.encode())
    os.write(1, b"finished\\n")
"""


def hit(site: LabSite, running: Running, dice: random.Random) -> Fault:
    """Do one random harm."""
    node = dice.randrange(4)
    faults: dict[str, Callable[[], Fault]] = {
        "kill rank": lambda: strike(site, node, "rank", signal.SIGKILL, Fault("kill rank", (137,))),
        "kill supervisor": lambda: strike(site, node, "ct-supervisor", signal.SIGKILL, Fault("kill supervisor", (75,))),
        "stop supervisor": lambda: strike(site, node, "ct-supervisor", signal.SIGSTOP, Fault("stop supervisor", (75,))),
        "kill guard": lambda: strike(site, node, "ct-guard", signal.SIGKILL, Fault("kill guard", (0,))),
        "stop guard": lambda: strike(site, node, "ct-guard", signal.SIGSTOP, Fault("stop guard", (0,))),
        "kill coordinator": lambda: strike(site, 0, "ct-supervisor", signal.SIGKILL, Fault("kill coordinator", (75,))),
        "crash": lambda: crash(site, node),
        "cut": lambda: cut(site, node),
        "cut and heal": lambda: cut_and_heal(site, node, dice.uniform(0.2, LOSS * 0.5)),
        "stop rank, then Ctrl+C": lambda: stop_rank(site, running, node),
        "kill laptop": lambda: kill_laptop(running),
        "freeze laptop": lambda: freeze_laptop(running, dice.uniform(0.5, 3.0)),
        "Ctrl+C": lambda: interrupt(running, dice.randint(1, 5), dice),
    }
    return faults[dice.choice(sorted(faults))]()


def strike(site: LabSite, node: int, what: str, number: signal.Signals, fault: Fault) -> Fault:
    found = pids(site, node, what)
    assert found, f"no {what} on node {node}"
    os.kill(found[0], number)
    return fault


def crash(site: LabSite, node: int) -> Fault:
    site.lab.crash(node)
    return Fault(f"crash {node}", (75,), lost=(node,))


def cut(site: LabSite, node: int) -> Fault:
    site.lab.cut(node)
    return Fault(f"cut {node}", (75,), lost=(node,))


def cut_and_heal(site: LabSite, node: int, seconds: float) -> Fault:
    site.lab.cut(node)
    time.sleep(seconds)
    site.lab.heal(node)
    return Fault(f"cut {node} for {seconds:.1f} s", (0,))


def stop_rank(site: LabSite, running: Running, node: int) -> Fault:
    strike(site, node, "rank", signal.SIGSTOP, Fault("", ()))
    running.says("was stopped by a signal")
    running.signal(signal.SIGINT)
    return Fault("stop rank, then Ctrl+C", (130,))


@pytest.mark.chaos
@pytest.mark.parametrize("seed", range(100))
def test_story(site: Callable[..., LabSite], seed: int) -> None:
    dice = random.Random(seed)
    four = site(4)
    four.conf(LOSS_TIMEOUT=LOSS, GRACE=GRACE, CONNECT_TIMEOUT=5)
    workspace = four.workspace(train_py=JOB)
    running = four.start("run", "-w", workspace, "--nproc-per-node", 2)
    job = running.says(r"^job (\S+):")
    running.says("line 0$")
    time.sleep(dice.uniform(0.0, 3.0))
    fault = hit(four, running, dice)
    done = running.wait(60)
    assert done.code in fault.codes, f"seed {seed}, {fault}: {done}"
    reachable = [node for node in range(4) if node not in fault.lost]
    patience = LENGTH + LOSS + GRACE + 12
    until(lambda: not left(four, reachable), patience, lambda: f"seed {seed}, {fault}: {left(four, reachable)}")
    if fault.name.startswith("cut") and fault.lost:
        # The cut node ends its own ranks too, and tells the truth once it can be asked again.
        until(
            lambda: not left(four, fault.lost),
            patience,
            lambda: f"seed {seed}: the cut node keeps {left(four, fault.lost)}",
        )
        four.lab.heal(fault.lost[0])
        reachable = [0, 1, 2, 3]
    if fault.left:
        until(lambda: status(four, job)["state"] not in ("running", "starting"), patience)
    state = status(four, job)["state"]
    expected = {0: "succeeded", 75: "lost", 130: "stopped", 137: "failed", -9: "succeeded"}[done.code]
    assert state == expected, f"seed {seed}, {fault}: {state}"
    for node in reachable:
        for rank in (2 * node, 2 * node + 1):
            check_log(four, job, node, rank)


def left(site: LabSite, nodes: object) -> list[object]:
    return [process for process in site.living() if process.node in nodes]  # type: ignore[operator]


def check_log(site: LabSite, job: str, node: int, rank: int) -> None:
    """What `logs --raw` gives is the file, and the file is an unbroken count."""
    (path,) = [place / f"log/workerlog.{rank}" for place in site.jobs(node) if place.name == f"JOB{job}"]
    written = Path(path).read_bytes()
    raw = site.root(0).parent / f"raw{rank}"
    done = site.start("logs", "--job", job, "--rank", rank, "--raw", out=raw).wait()
    assert done.code in (0, 69), done
    assert raw.read_bytes() == written
    lines = [line for line in written.decode().split("\n") if " line " in line]
    assert lines == [f"rank {rank} line {i}" for i in range(len(lines))]
