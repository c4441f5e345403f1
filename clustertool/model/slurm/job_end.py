"""How a job ends that Slurm ends: the outcome, from what `scontrol show job` has when Slurm's SIGTERM arrives.

    what Slurm has                                     outcome, exit code
    PreemptTime, state PREEMPTED, or a new restart     stopped, that of the signal (143)
    state TIMEOUT or DEADLINE, or such a reason        timeout, 124
    state NODE_FAIL or BOOT_FAIL, or reason NodeDown   lost, 75
    state OUT_OF_MEMORY, or such a reason              stopped, 137
    another end, with or without a reason (scancel)    stopped, that of the signal
    a job that runs (scancel --signal, kill)           stopped, that of the signal

At the signal the state is COMPLETING, where Slurm does not show how the job ends, so the reason counts as well.
"""

from __future__ import annotations

from typing import Collection, Tuple

from clustertool.errors import NodeLost, TimedOut
from clustertool.model.job.outcome import EngineEnd, Outcome, exit_code
from clustertool.model.job.state_names import JobState
from clustertool.model.slurm.slurm_answers import COMPLETING, ENDED, RUNNING, SlurmJob
from clustertool.model.slurm.slurm_settings import TIME_LIMIT

_KILLED = exit_code(0, 9)
_OF_TIME_LIMIT = {"TIMEOUT", "TimeLimit"}


def end_of(job: SlurmJob, restarts: int, by: str, code: int) -> Outcome:
    """Build the outcome of a job that got a signal, by what Slurm has recorded about its end.

    by, code: the signal, its exit code. restarts: how often the job had been requeued when this run of it began.
    """
    state, code, brief = _state_of_end(job, restarts, code)
    reason = brief or f"{by}; Slurm has not ended job {job.id}: its state is {job.state}"
    return Outcome(state, code, "tool", reason, brief=brief, engine=engine_end(job))


def engine_end(job: SlurmJob) -> EngineEnd:
    """Build the record of what Slurm has about the end of a job: its number, state, reason and time."""
    return EngineEnd("slurm", str(job.id), job.state, job.reason, job.ended or 0.0)


def outcome_without_answer(number: str, why: str, by: str, code: int) -> Outcome:
    """Build the outcome STOPPED of a job that got a signal (by, code), if Slurm does not answer.

    why: the error of scontrol.
    """
    return Outcome(JobState.STOPPED, code, "tool", f"{by}; scontrol shows nothing about job {number}: {why}")


def begins_again(job: SlurmJob, restarts: int, requeue_on: Collection[str]) -> bool:
    """Return whether Slurm is to be asked to start again a job that it ends: Slurm itself has not requeued it.

    True for a job that may be requeued, and was preempted, or has reached its time limit if `requeue_on` has that. restarts:
    how often the job had been requeued when this run of it began.
    """
    if not (job.requeue and job.restarts == restarts):
        return False
    return job.preempted is not None or (TIME_LIMIT in requeue_on and bool(_OF_TIME_LIMIT & {job.state, job.reason}))


def requeue(number: str) -> Tuple[str, ...]:
    """Build the command that puts a job back into the queue."""
    return "scontrol", "requeue", number


def give_back(job: SlurmJob, own: str, step: str, coordinates: bool, lost: bool) -> Tuple[str, ...]:
    """Build the command for a job that has lost a node: end it, put it back into the queue, or end only our step.

    () if the job does not run any more. own: our id of the job. step: the number of our step. coordinates: this is the first
    node of the allocation, with the batch script, which has become srun. lost: the job has ended because of the lost node.

    An allocation that was not made for this job stays: only the step ends, KillWait (30 s) later. A job that Slurm may start
    again goes back to the queue. Otherwise the job ends with its script, and its state is FAILED, not CANCELLED: Slurm sends
    mails of failures (--mail-type=FAIL). Without its first node it can only be cancelled.
    """
    number = str(job.id)
    if job.state != RUNNING:
        return ()
    if job.clustertool_job != own:
        return "scancel", f"{number}.{step}"
    if lost and job.requeue:
        return requeue(number)
    return ("scancel", *(("--batch", "--signal=KILL") if coordinates else ()), number)


def _state_of_end(job: SlurmJob, restarts: int, code: int) -> Tuple[JobState, int, str]:
    """Return the state, the exit code and a short reason of a job's end; "" as the reason if Slurm has not ended the job."""
    name, known = f"Slurm's job {job.id}", {job.state, job.reason}
    if job.preempted is not None or "PREEMPTED" in known:
        return JobState.STOPPED, code, f"{name} was preempted"
    if job.restarts > restarts:
        return JobState.STOPPED, code, f"{name} was requeued"
    if known & _OF_TIME_LIMIT:
        return JobState.TIMEOUT, TimedOut.code, f"{name} exceeded its time limit"
    if known & {"DEADLINE", "DeadLine"}:
        return JobState.TIMEOUT, TimedOut.code, f"{name} reached its deadline"
    if known & {"NODE_FAIL", "BOOT_FAIL", "NodeDown"}:
        return JobState.LOST, NodeLost.code, f"a node of {name} failed"
    if known & {"OUT_OF_MEMORY", "OutOfMemory"}:
        return JobState.STOPPED, _KILLED, f"{name} was out of memory"
    if job.state not in ENDED and job.state != COMPLETING:
        return JobState.STOPPED, code, ""
    if job.reason:
        return JobState.STOPPED, code, f"{name} was ended: {job.reason}"
    if not job.clustertool_job:  # an allocation of the user; Slurm shows the same for both
        why = "its shell or script has ended, or scancel"
        return JobState.STOPPED, code, f"the allocation {job.id} of Slurm was ended: {why}"
    return JobState.STOPPED, code, f"{name} was cancelled (scancel)"
