"""An agent on the login host runs the programs of Slurm, and keeps the folders of submitted jobs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping

from clustertool.errors import PreflightError
from clustertool.fleet.fleet import Fleet
from clustertool.model.engine_views import EngineNode
from clustertool.model.slurm import slurm_answers
from clustertool.model.slurm.partitions import SHOW_PARTITIONS, SlurmPartition, read_partitions
from clustertool.model.slurm.slurm_answers import TIME_FORMAT, SlurmJob, StepOutput
from clustertool.model.slurm.slurm_times import CONFIG
from clustertool.model.wire import messages
from clustertool.model.wire.agent_answers import ProgramAnswer, SubmittedJob
from clustertool.model.wire.messages import Answered, Request
from clustertool.ssh.parallel import each

_SECONDS = 60.0  # that a program of Slurm may take: a busy slurmctld answers late
_MORE = 15.0  # seconds for the way to the host, and for a login shell there
_SLOW = 3.0  # seconds without an answer after which the user gets to know what is waited for
_GONE = "Invalid job id"  # in the message about a job that Slurm does not have any more
_SILENT = "Unable to contact slurm controller"  # in the message of each program while slurmctld does not run
_START = "is slurmctld running? scontrol ping on that host shows it"


class SlurmHost:
    """The programs of Slurm on the login host, and the folders of submitted jobs there. fleet: of this host alone, open.

    note: gets a message about a program that answers late. check: is called while a program runs, and raises what ends the
    wait; None: no interrupt ends it.
    """

    def __init__(
        self, fleet: Fleet, note: Callable[[str], None] = lambda text: None, check: Callable[[], None] | None = None
    ) -> None:
        self._fleet = fleet
        self._note = note
        self._check = check
        self._paths: dict[str, str] = {}

    @property
    def name(self) -> str:
        return self._fleet.name(0)

    @property
    def patient(self) -> SlurmHost:
        """A SlurmHost whose wait for a program no interrupt ends: for the end of a job."""
        return SlurmHost(self._fleet, self._note)

    def run(self, *argv: str, env: Mapping[str, str] = TIME_FORMAT, login: bool = False) -> ProgramAnswer:
        """Run a program of Slurm on the login host, and return its answer, also if it fails, or does not end in 60 s (code -1).

        env: variables that are set for it. login: in the environment of a login shell, which sbatch passes on to the job; on
        the user's own machine in that of the shell. Raises PreflightError if there is no such program, Unreachable, and what
        check() raises.
        """
        answer = self._run_program(*argv, env=env, login=login)
        if not answer["path"]:
            fix = 'SLURM["login"] must be a host with the commands of Slurm; a profile that adds them to PATH is read'
            raise PreflightError(f"there is no {argv[0]}", fix, self.name)
        return answer

    def _run_program(self, *argv: str, env: Mapping[str, str] = TIME_FORMAT, login: bool = False) -> ProgramAnswer:
        """Run a program on the login host for at most 60 s, and print a message after 3 s.

        The path in the answer is "" if there is none. Raises Unreachable, and what check() raises.
        """
        here = self._fleet.cluster.hosts[0].here
        request = messages.PROGRAM({"argv": argv, "env": env, "seconds": _SECONDS, "login": login and not here})
        noted = time.monotonic() + _SLOW

        def wait() -> None:
            nonlocal noted
            if self._check:
                self._check()
            if time.monotonic() > noted:
                noted = math.inf
                more = "" if argv[0] == "srun" else f"; {_START}"  # srun waits for nodes
                self._note(f"waiting for {argv[0]} on {self.name}{more}")

        return self._ask(request, wait, _SECONDS + _MORE)

    def _ask(self, request: Request[Answered], check: Callable[[], None] | None, seconds: float = _SECONDS) -> Answered:
        """Send a request to the agent on the login host, call `check` while it takes, and return the answer.

        Raises Unreachable.
        """
        return each([request], lambda one: self._fleet.ask_one(0, one, seconds), check=check).all()[0]

    def end_programs(self) -> None:
        """End the programs that this command has started on the login host. Raises Unreachable."""
        self._fleet.ask_one(0, messages.END_PROGRAMS({}))

    def path(self, name: str) -> str:
        """Find the path of a program of Slurm on the login host, by running it with --version at the first call.

        Raises PreflightError if there is none.
        """
        if name not in self._paths:
            self._paths[name] = self.run(name, "--version")["path"]
        return self._paths[name]

    def output(self, *argv: str) -> str:
        """Run a program of Slurm, and return its stdout. Raises PreflightError with its message if it fails."""
        answer = self.run(*argv)
        if answer["code"]:
            raise PreflightError(f"{argv[0]}: {message(answer)}", _START, self.name)
        return answer["stdout"]

    def queue(self, *options: str) -> list[SlurmJob]:
        """List the user's jobs that are pending or run. Raises PreflightError if squeue fails.

        options: more of squeue, such as --states=all: also jobs that have ended in the last minutes.
        """
        return slurm_answers.read_queue(self.output(*slurm_answers.QUEUE, *options))

    def steps(self) -> list[SlurmJob]:
        """List the steps of the user's jobs that run. Raises PreflightError if squeue fails."""
        steps = self.output(*slurm_answers.STEPS)  # first: the job of each step that it shows is in the queue then
        return slurm_answers.read_steps(self.output(*slurm_answers.QUEUE), steps)

    def config(self) -> str:
        """Return the text of `scontrol show config`, "" if that fails. Raises PreflightError if there is no scontrol."""
        answer = self.run(*CONFIG)
        return answer["stdout"] if answer["code"] == 0 else ""

    def nodes(self) -> list[EngineNode]:
        """List the nodes of all partitions. Raises PreflightError if sinfo fails."""
        return slurm_answers.read_nodes(self.output(*slurm_answers.NODES))

    def partitions(self) -> list[SlurmPartition]:
        """List the partitions with their limits. Raises PreflightError if scontrol fails."""
        return read_partitions(self.output(*SHOW_PARTITIONS))

    def job(self, number: int) -> SlurmJob | None:
        """Read a job by `scontrol show job`, which has it for some minutes after its end; None if it does not.

        Raises PreflightError if scontrol fails for another reason.
        """
        answer = self.run(*slurm_answers.SHOW_JOB, str(number))
        if answer["code"] and _GONE not in answer["stderr"] + answer["stdout"]:
            raise PreflightError(f"scontrol: {message(answer)}", _START, self.name)
        return next((job for job in slurm_answers.read_jobs(answer["stdout"]) if job.id == number), None)

    def ended_state(self, number: int) -> str:
        """Return the state of a job that has ended, as sacct prints it ("CANCELLED by 1000"); "" without accounting or record.

        The end is not checked: a job that runs has "RUNNING" or the like. Raises Unreachable, and what check() raises.
        """
        options = ("--allocations", "--noheader", "--parsable2", "--format=State", f"--jobs={number}")
        answer = self._run_program("sacct", *options)  # not every cluster has it
        return answer["stdout"].strip().partition("\n")[0] if not answer["code"] else ""

    def create_folder(self, about: SubmittedJob, files: dict[str, str]) -> None:
        """Create the folder of a submission on the login host. files: {name: base64}.

        Raises UsageError if it exists, PreflightError if it cannot be written.
        """
        self._ask(messages.SUBMIT({"about": about, "files": files}), self._check)

    def record_number(self, job: str, number: str) -> None:
        """Record the number that Slurm has given to a submitted job in its folder.

        Raises NotFound if there is no such submission, PreflightError if it cannot be written.
        """
        self._ask(messages.SUBMITTED({"job": job, "slurm_id": number}), self._check)

    def submissions(self) -> dict[str, SubmittedJob]:
        """Read all submissions on the login host, by the ids of the jobs."""
        found = self._fleet.ask_one(0, messages.SUBMISSIONS({}))["submissions"]
        return {about["job"]: about for about in found}

    def step_output(self, job: str, path: str = "") -> tuple[str, StepOutput]:
        """Read the output of a submitted job's start; return the path of the file, and its last lines with the exit code.

        The exit code is the highest of a task, 0 without one. path: of the output of a job that was submitted by hand.
        """
        found = self._fleet.ask_one(0, messages.SUBMISSION_OUTPUT({"job": job, "path": path}))
        return found["path"], slurm_answers.read_output(found["text"])

    def withdraw(self, job: str, only_bundle: bool = False) -> None:
        """Remove the folder of a submission.

        only_bundle: remove nothing but the bundle in it, which has the job's key.
        """
        self._fleet.ask_one(0, messages.WITHDRAW({"job": job, "only_bundle": only_bundle}))


def message(answer: ProgramAnswer) -> str:
    """Return that a program of Slurm gave no answer for 60 s (code -1), else the messages in its stderr, else its exit code."""
    if answer["code"] == -1:
        return f"no answer for {_SECONDS:g} s"
    lines = (line.strip() for line in answer["stderr"].splitlines())
    errors = [line.partition(": error: ")[2] or line for line in lines if line]
    return "; ".join(dict.fromkeys(errors)) or f"exit code {answer['code']}"


def advice(answer: ProgramAnswer, correct: str) -> str:
    """Return the fix for a failed program of Slurm: `correct` (the settings), or to start slurmctld if it is silent."""
    return _START if is_silent(answer) else correct


def is_silent(answer: ProgramAnswer) -> bool:
    """Return whether a program has failed because slurmctld does not answer."""
    return answer["code"] == -1 or _SILENT in answer["stderr"]
