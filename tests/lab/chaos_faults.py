"""Faults of the laptop in random stories of jobs, and what remains to be asked after a fault."""

from __future__ import annotations

import json
import random
import signal
import time
from dataclasses import dataclass

from tests.cli import LabSite, Running


@dataclass(frozen=True)
class Fault:
    """`codes`: what `run` may exit with; `lost`: nodes that cannot be asked afterwards; `left`: the job goes on without us."""

    name: str
    codes: tuple[int, ...]
    lost: tuple[int, ...] = ()
    left: bool = False


def kill_laptop(running: Running) -> Fault:
    running.signal(signal.SIGKILL)
    return Fault("kill laptop", (-9,), left=True)


def freeze_laptop(running: Running, seconds: float) -> Fault:
    running.signal(signal.SIGSTOP)
    time.sleep(seconds)
    running.signal(signal.SIGCONT)
    return Fault("freeze laptop", (0,))


def interrupt(running: Running, times: int, dice: random.Random) -> Fault:
    for _ in range(times):
        if running.process.poll() is None:
            running.signal(signal.SIGINT)
        time.sleep(dice.uniform(0.0, 0.3))
    return Fault(f"Ctrl+C x {times}", (130,))


def status(site: LabSite, job: str) -> dict[str, str]:
    """As any other laptop sees it; nodes that are gone make it 69 and take nothing from the answer."""
    done = site.inv("status", "--job", job, "--json")
    assert done.code in (0, 69), done
    found: dict[str, str] = json.loads(done.out)
    assert "state" in found, done
    return found
