"""A job in the allocation of the shell in which it is typed is a step, whose srun goes on when this command has ended."""

from __future__ import annotations

import contextlib
import os
import subprocess
from dataclasses import replace
from pathlib import Path

from clustertool.engines.caller import Caller, pause
from clustertool.engines.slurm.slurm_host import SlurmHost
from clustertool.errors import NotFound, PreflightError
from clustertool.fleet import this_machine
from clustertool.model.facts import Facts
from clustertool.model.paths import BUNDLE, STEP_OUTPUT
from clustertool.model.slurm.shell_allocation import ShellAllocation, for_srun, shell_allocation
from clustertool.model.slurm.slurm_answers import RUNNING, SlurmJob, read_output
from clustertool.model.slurm.submit_script import SCRIPT

_POLL = 0.2  # seconds between two questions to Slurm
_ENDING = 5.0  # seconds that srun may take to end after a signal
_SHOWN = 300  # characters of its messages
_UNKNOWN = "?"  # the number of a step that has ended before Slurm was asked for it


def allocation_here(slurm: SlurmHost, facts: Facts) -> ShellAllocation | None:
    """Return the allocation of the shell in which this command was typed, with the number of its nodes; None without one.

    Returns None also for a rank of a job of ours, and if the login host is another machine or has another user. facts: of the
    login host. Raises NotFound for an allocation that does not run, PreflightError if Slurm does not answer.
    """
    found = shell_allocation(os.environ)
    if found is None or facts.machine != this_machine.machine() or facts.user != this_machine.user():
        return None
    job = slurm.job(int(found.job))
    if job is None or job.state != RUNNING:
        state = f"is {job.state}" if job is not None else "is not known to Slurm any more"
        what = f"the allocation of this shell (SLURM_JOB_ID={found.job}) {state}"
        raise NotFound(what, "leave the shell, or unset SLURM_JOB_ID: a new job is submitted then")
    return replace(found, nodes=len(job.node_names))


class AllocationStep:
    """The step of a job in an allocation, which the constructor starts: srun in a session of its own.

    No signal of this terminal reaches it. folder: of the submission, with its script.
    """

    def __init__(self, allocation: ShellAllocation, job: str, folder: str) -> None:
        """Start srun by the script in `folder`."""
        self._allocation, self._job, self._folder = allocation, job, Path(folder)
        self._process = subprocess.Popen(
            ["/bin/sh", f"{folder}/{SCRIPT}"],
            cwd="/",
            stdin=subprocess.DEVNULL,
            env=for_srun(this_machine.shell_environment()),
            start_new_session=True,
        )

    def wait_for_number(self, slurm: SlurmHost, caller: Caller) -> str:
        """Poll Slurm every 0.2 s until the step has started, and return its number, JOB.STEP; JOB.? if it has already ended.

        Raises PreflightError if srun ends and no node has joined, and what caller.check() raises.
        """
        while True:
            over = self._process.poll() is not None
            for step in self._steps(slurm):
                if step.clustertool_job == self._job:
                    return step.number
            if over and (self._folder / BUNDLE).exists():  # the nodes have not joined
                raise self._refusal(slurm)
            if over:
                return f"{self._allocation.job}.{_UNKNOWN}"
            pause(caller, _POLL)

    def _refusal(self, slurm: SlurmHost) -> PreflightError:
        """Build the error for a srun that has ended before a node has joined, with its messages or its exit code.

        The messages have at most 300 characters. The fix names the jobs that run in the allocation, if there are any. The code
        is that of the task which srun names, as where Slurm has shown the step, else that of a PreflightError.
        """
        text = (self._folder / STEP_OUTPUT).read_text("utf-8", "replace")
        lines = [line.partition(": error: ")[2] or line for line in text.splitlines() if line.strip()]
        wrong = [line for line in lines if not line.startswith("srun: ")]  # else it is no error
        what = "; ".join(dict.fromkeys(wrong))[:_SHOWN] or f"exit code {self._process.returncode}"
        others = ", ".join(filter(None, (step.clustertool_job for step in self._steps(slurm))))
        fix = f"the allocation has these jobs: {others}; wait for their end, or stop one" if others else ""
        fix = fix or f"squeue --steps --jobs={self._allocation.job} shows what runs in the allocation"
        error = PreflightError(f"srun: {what}", fix, slurm.name)
        error.code = read_output(text).code or error.code
        return error

    def end(self, slurm: SlurmHost) -> None:
        """Send TERM to srun, and KILL if it has not ended 5 s later; then cancel the job's step, which goes on without srun.

        Raises ClustertoolError if Slurm does not answer.
        """
        for signal in (self._process.terminate, self._process.kill):
            signal()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(_ENDING)
                break
        for step in self._steps(slurm):
            if step.clustertool_job == self._job:
                slurm.run("scancel", step.number)

    def _steps(self, slurm: SlurmHost) -> list[SlurmJob]:
        """Ask Slurm for the steps that run in the allocation. Raises PreflightError if it does not answer."""
        return [step for step in slurm.steps() if str(step.id) == self._allocation.job]
