"""The same job by ssh and by Slurm on the machines of one cluster, and how long its end takes."""

from __future__ import annotations

import json
import re
import time
from dataclasses import dataclass, field

from tests.cli import Done, Process, Running, until
from tests.slurm.slurm_site import SlurmSite

SSH, SLURM = "ssh", "slurm"
STARTS = 60.0  # seconds for a job to leave the queue and start, on a loaded machine
SLURMS_OWN = ("slurmstepd", "slurm_script", "srun")


@dataclass
class EngineRun:
    """A job that runs, and the command that follows it."""

    site: SlurmSite
    engine: str
    command: Running
    job: str
    number: str = ""  # in Slurm
    at: float = field(default_factory=time.monotonic)  # of the fault

    def supervisor(self, node: int) -> int:
        (pid,) = (process.pid for process in self.site.processes(node) if process.name == "ct-supervisor")
        return pid

    def rank(self, rank: int, node: int) -> int:
        """The process of a rank, as this machine sees it."""
        (pid,) = (p.pid for p in self.site.lab.processes(node) if p.environ.get("CLUSTERTOOL_RANK") == str(rank))
        return pid

    def ours(self) -> list[Process]:
        """What lives on nodes and is not Slurm's: supervisors, guards, ranks, and their children."""
        return [process for process in self.site.living() if process.name not in SLURMS_OWN]

    def fault(self) -> None:
        """The clock of `seconds` begins."""
        self.at = time.monotonic()

    def ends(self, timeout: float, lost: int = 0) -> Ending:
        """Wait for the command, for all processes, and for Slurm. lost: nodes that do not come back."""
        done = self.command.wait(timeout)
        ended = time.monotonic() - self.at
        until(lambda: not self.ours(), timeout, lambda: f"these to end: {self.ours()}")
        clean = max(ended, time.monotonic() - self.at)
        if not self.number:
            return Ending(done, ended, clean, "", clean)
        lab = self.site.lab
        until(lambda: len(lab.idle()) >= lab.nodes - lost, timeout, lambda: f"the nodes to be free: {lab.idle()}")
        free = time.monotonic() - self.at
        return Ending(done, ended, clean, lab.over(self.number, timeout), free)


@dataclass(frozen=True)
class Ending:
    """Seconds from the fault until the command has ended, until no process is left, and until Slurm can use the nodes again.

    state: the one that Slurm gives the job in the end.
    """

    done: Done
    ended: float
    clean: float
    state: str
    free: float

    @property
    def verdict(self) -> str:
        """The reason in the last line: after `exit CODE (SOURCE): `."""
        found = re.search(r"exit \d+ \([^)]*\): (.*)$", self.done.last)
        assert found, self.done.err
        return found[1]


def run(
    site: SlurmSite, engine: str, *options: object, ranks: int, settings: dict[str, object] | None = None
) -> EngineRun:
    """Write the conf.py of an engine, and start the workspace `job` of a site by it."""
    use(site, engine, **(settings or {}))
    return follow(site, engine, *options, ranks=ranks)


def follow(site: SlurmSite, engine: str, *options: object, ranks: int) -> EngineRun:
    """Start the workspace `job` of a site by the engine of its conf.py, and wait until its ranks have printed `ready RANK`."""
    command = site.start("run", "-w", "job", "--all-ranks", *options)
    for rank in range(ranks):
        command.says(rf"\bready {rank}$", STARTS)
    job = command.says(r"^job (\S+?):", 1)
    return EngineRun(site, engine, command, job, number_of(site, job) if engine == SLURM else "")


def use(site: SlurmSite, engine: str, prelude: str = "", **settings: object) -> None:
    """Write the conf.py of an engine. settings: of SLURM."""
    if engine == SSH:
        site.conf_of_ssh(PRELUDE=prelude)
    else:
        site.conf(SLURM={**site.settings, **settings}, PRELUDE=prelude)


def number_of(site: SlurmSite, job: str) -> str:
    """The number of a job in Slurm, by its folder in the queue."""
    about = json.loads((site.root(0) / f".clustertool/queue/{job}/submission.json").read_text())
    return str(about["slurm_id"])
