"""Faults in random stories of jobs and in the fault matrix, and what remains to be asked after a fault."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from tests.cli import LabSite, Running, until
from tests.lab.lab import HOME


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


# -- the fault matrix: each fault in each phase of a job


PHASES = ("dispatch", "placing", "start", "running", "stop")
_FILES, _FILE, _BIG, _RATE = 400, 2048, 4 << 20, "40mbit"  # a workspace that takes a while to dispatch and to place


def fill_workspace(site: LabSite, folder: Path) -> None:
    """Make a workspace so large that phases before the start of ranks can be hit."""
    for number in range(_FILES):
        (folder / f"small{number}").write_bytes(os.urandom(_FILE))
    (folder / "big").write_bytes(os.urandom(_BIG))
    site.lab.shape("uplink", _RATE)


def reach(site: LabSite, running: Running, phase: str, node: int, name: str) -> None:
    """Wait until a job is in a phase on a node. name: of a process that must run there, where the phase has some."""
    seen = Path(f"/proc/{site.lab.boots[node].init}/root{HOME}/clustertool")  # with a disk of its own, too
    waits: dict[str, Callable[[], object]] = {
        "dispatch": lambda: list(seen.glob(".clustertool/pieces/*")),
        "placing": lambda: list(seen.glob("JOB*")),
        "start": lambda: name == "ct-agent" and site.jobs(node) or pids(site, node, name),
        "running": lambda: all(pids(site, one, "rank") for one in range(site.count)),
        "stop": lambda: any(
            b'"stopping"' in place.joinpath(_EVENTS).read_bytes()
            for one in range(site.count)
            for place in site.jobs(one)
        ),
    }
    if phase in ("running", "stop"):
        running.says("line 0$", 60)
        until(waits["running"])
    if phase == "stop":
        running.signal(signal.SIGINT)
    until(lambda: running.process.poll() is not None or waits[phase](), 60, lambda: f"{phase}: {running.err}")
    assert running.process.poll() is None, running.err


_EVENTS = ".clustertool/events.jsonl"
_FILLER = "~/clustertool/filler"


def pids(site: LabSite, node: int, name: str) -> list[int]:
    """A node's ranks, supervisor, guard or agent, as pids of this machine."""
    if name == "rank":
        return [p.pid for p in site.processes(node) if p.argv[-1:] == ("train.py",)]
    return [p.pid for p in site.processes(node) if p.name == name]


def kill_both(site: LabSite, node: int) -> None:
    """Supervisor and guard, so that neither sees the end of the other one."""
    found = pids(site, node, "ct-supervisor") + pids(site, node, "ct-guard")
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)


def fill_disk(site: LabSite, node: int) -> None:
    """To the last byte."""
    assert site.lab.exec(node, ["sh", "-c", f"cat /dev/zero > {_FILLER}"]).returncode != 0


def free_disk(site: LabSite, node: int) -> None:
    site.lab.exec(node, ["sh", "-c", f"rm {_FILLER}"])
