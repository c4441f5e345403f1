"""The coordinator of a Slurm job runs scontrol once when a signal ends the job: it knows the reason."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
from typing import Mapping, Optional, Sequence, Set

from clustertool.model.job.outcome import Outcome
from clustertool.model.job.state_names import JobState
from clustertool.model.quantities import whole
from clustertool.model.slurm.job_end import begins_again, end_of, give_back, outcome_without_answer, requeue
from clustertool.model.slurm.slurm_answers import SHOW_JOB, TIME_FORMAT, SlurmJob, read_jobs
from clustertool.node.supervisor.allocation import Allocation, End
from clustertool.node.system import programs

_PATIENCE = 5.0  # seconds; slurmctld may be away, and the end of the job waits for the answer
_LARGEST = 1 << 16
_SHOWN = 200


class SlurmAllocation(Allocation):
    """The allocation of Slurm in which the job runs: scontrol gives the reason for its end, and requeues it.

    `own`: our id of the job. `environ`: the variables that Slurm sets for each task. requeue_on: see SlurmSettings.
    """

    present = True

    def __init__(self, own: str, environ: Mapping[str, str], requeue_on: Sequence[str] = ()) -> None:
        self._own = own
        self._requeue_on = requeue_on
        self._environ = dict(environ)
        self._spare: Set[int] = set()
        self._job = environ.get("SLURM_JOB_ID", "")
        self.restarts = whole(environ.get("SLURM_RESTART_COUNT", "0"), 0, 99999) or 0
        self._child: Optional[subprocess.Popen[bytes]] = None
        self._answer = b""
        self._why = ""
        self._late_at = 0.0
        self._by, self._code = "", 0
        self._requeues = False
        self._comes_back = False

    def attach(self, spare: Set[int]) -> None:
        """Store the set to which the pid of scontrol is added while it runs: the supervisor spares these processes."""
        self._spare = spare

    def ask(self, by: str, code: int) -> None:
        """Start scontrol, whose answer gives the reason for the end of the job; the supervisor spares its process.

        by, code: of the signal that ends the job.
        """
        self._by, self._code, self._late_at = by, code, time.monotonic() + _PATIENCE
        try:
            self._child = subprocess.Popen(
                [*SHOW_JOB, self._job],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                env={**self._environ, **TIME_FORMAT},
                start_new_session=True,
            )
        except OSError as error:
            self._why = f"it cannot start: {error.strerror}"
            return
        self._spare.add(self._child.pid)
        assert self._child.stdout is not None
        os.set_blocking(self._child.stdout.fileno(), False)

    def turn(self) -> Optional[Outcome]:
        """Return the outcome once scontrol has answered, or is late; None before that, and without ask().

        Notes for leave() and comes_back() whether the job starts again.
        """
        if not self._by or not self._read_answer():
            return None
        by, self._by = self._by, ""
        text = self._answer.decode(errors="replace")
        job = self._find_job(text)
        if job is not None:
            own = bool(job.clustertool_job)  # else the allocation is the user's, and the job is a step in it
            restarts = self.restarts if own else job.restarts
            self._requeues = own and begins_again(job, restarts, self._requeue_on)
            self._comes_back = own and (self._requeues or job.preempted is not None or job.restarts > restarts)
            return end_of(job, restarts, by, self._code)
        self._comes_back = True  # that is not known
        why = self._why or " ".join(text.split())[:_SHOWN] or "its answer is empty"
        return outcome_without_answer(self._job, why, by, self._code)

    def comes_back(self, outcome: Outcome) -> bool:
        """Check whether Slurm may start the job again: it was preempted or requeued, lost a node, or no answer came."""
        return self._comes_back or outcome.state is JobState.LOST

    def leave(self, end: End) -> str:
        """Requeue the job if it is to start again, else end the wait for a silent node. Returns what went wrong, "" if nothing.

        Slurm requeues a preempted job only if it is still there after the GraceTime of its partition, and none at its time
        limit, unless it is asked for that while the job is COMPLETING. It waits for the task on a lost node until it has lost
        the node itself, after SlurmdTimeout: 300 s by default.
        """
        if self._requeues:
            wrong = self._run(*requeue(self._job))
            return wrong and f"the job does not go back to the queue: {wrong}"
        if not end.silent:
            return ""
        code, out, _ = programs.output([*SHOW_JOB, self._job], _PATIENCE, env={**self._environ, **TIME_FORMAT})
        job = self._find_job(out) if code == 0 else None
        if job is None:  # slurmctld does not answer here; another node may ask it
            return ""
        command = give_back(job, self._own, self._environ.get("SLURM_STEP_ID", ""), end.coordinates, end.lost)
        wrong = self._run(*command) if command else ""
        return wrong and f"the nodes stay allocated until Slurm has lost the silent one: {wrong}"

    def _find_job(self, text: str) -> Optional[SlurmJob]:
        """Return this allocation's job in the output of scontrol, None if it is not there."""
        return next((job for job in read_jobs(text) if str(job.id) == self._job), None)

    def _run(self, *argv: str) -> str:
        """Run a program of Slurm. Returns what went wrong, or ""."""
        code, out, err = programs.output(argv, _PATIENCE, env=self._environ)
        return "" if code == 0 else f"{' '.join(argv)}: {(err or out).strip() or f'exit code {code}'}"

    def _read_answer(self) -> bool:
        """Read scontrol's output; return True if it is complete, or scontrol is late. Then its processes are killed.

        A supervisor's loop reaps it.
        """
        child = self._child
        if child is None or child.stdout is None:
            return True
        with contextlib.suppress(BlockingIOError):
            while len(self._answer) < _LARGEST:
                data = os.read(child.stdout.fileno(), _LARGEST)
                self._answer += data
                if not data:
                    break
            return self._end_child(child)
        if time.monotonic() < self._late_at:
            return False
        self._why = f"it did not answer within {_PATIENCE:g} s"
        return self._end_child(child)

    def _end_child(self, child: subprocess.Popen[bytes]) -> bool:
        """Kill scontrol's process group and close its output. Returns True."""
        assert child.stdout is not None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        self._spare.discard(child.pid)
        child.stdout.close()
        self._child = None
        return True
