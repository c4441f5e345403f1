"""The engine slurm: records of jobs are on the file system that the nodes share, and Slurm knows what is queued and what runs.

One agent on the login host answers for all nodes (Fleet.open_shared). It reads records and cannot stop anything. A stop goes
through agents on the nodes, each in a step of the job (SrunLink), or through scancel.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from queue import SimpleQueue

from clustertool.engines.base import Answers, Description, Engine, EngineState, by_records
from clustertool.engines.caller import Caller
from clustertool.engines.preflight import Examined
from clustertool.engines.slurm.allocation_step import allocation_here
from clustertool.engines.slurm.slurm_check import (
    check_allocation,
    check_compute_nodes,
    check_grace,
    check_login_host,
    check_queue,
)
from clustertool.engines.slurm.slurm_host import SlurmHost, message
from clustertool.engines.slurm.srun_link import LoginLinks, SrunLink
from clustertool.errors import ClustertoolError, NotFound, PreflightError, Survivors, Unreachable, raise_all
from clustertool.fleet import this_machine
from clustertool.fleet.agent_client import AgentClient, Sink
from clustertool.fleet.fleet import STOPPING, Fleet
from clustertool.fleet.this_machine import Link
from clustertool.model.checks.each_node import errors
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.engine_views import EngineNode
from clustertool.model.hints import PROGRAM
from clustertool.model.job.job_names import can_mean
from clustertool.model.job.node_status import NodePart, read_part
from clustertool.model.job.state_names import OUTCOMES, JobState, StopState
from clustertool.model.paths import STEP_OUTPUT
from clustertool.model.slurm.slurm_answers import COMPLETING, ENDED, PENDING, RUNNING, SlurmJob
from clustertool.model.slurm.slurm_settings import SlurmSettings, read_settings
from clustertool.model.wire.agent_answers import JobsAnswer, JobStop, JobSummary, StopAnswer, SubmittedJob
from clustertool.model.wire.agent_requests import StopHow
from clustertool.model.wire.messages import LIST_JOBS, stop_request
from clustertool.ssh.parallel import each

_QUEUED = (PENDING, "CONFIGURING", "REQUEUED", "REQUEUE_HOLD", "REQUEUE_FED", "SPECIAL_EXIT", "RESV_DEL_HOLD")
_SUBMITTING = 120.0  # seconds after which a submission without a number has failed
_NO_INFORMATION = "Slurm has no information about it any more"
_CHANNELS = 8  # at a time: sshd admits 10 sessions on a connection, and the agent has one
_AT_ONCE = 4  # jobs that are cancelled at a time: each asks squeue several times a second
_LEAVING = 20.0  # seconds between the proof of the nodes and the end of the job in Slurm
_REASONS = 8  # ended jobs without a record of which Slurm is asked for the reason
_RECORDS = 5.0  # seconds after which a shared file system shows what another machine has written
_POLL = 0.3
_CLEAN: JobStop = {"state": StopState.CLEAN, "survivors": []}
_ENDED_ALREADY: JobStop = {"state": StopState.ENDED_ALREADY, "survivors": []}
_NO_END: JobStop = {
    "state": StopState.UNKNOWN,
    "survivors": [],
    "why": "Slurm has ended it, and its records have no end",
}


class SlurmEngine(Engine):
    """The engine of jobs in the queue of Slurm. `settings`: those of conf.py; `host`: the login host."""

    def __init__(self, cluster: Cluster, caller: Caller, sink: Sink | None = None) -> None:
        self.settings: SlurmSettings = read_settings(cluster.settings, where=cluster.where)
        self.host = self.settings.login_host or this_machine.host()
        super().__init__(cluster, caller, sink)
        self._opening = threading.Lock()  # several jobs may be cancelled at a time
        self._thread, self._noted = threading.get_ident(), False
        self._over: dict[str, Description] = {}  # jobs that have ended: nothing changes any more
        self._outputs: dict[str, str] = {}  # the paths of what jobs have printed that were submitted by hand

    def open(self, lag: float | None = None, job: str = "", newest: bool = False) -> Fleet:
        """Connect to the login host, whose agent reads the records of all jobs, and return the fleet.

        The arguments have no effect.
        """
        with self._opening:
            return self.fleet.open_shared(self.host)

    @property
    def slurm(self) -> SlurmHost:
        """The programs of Slurm on the login host, which is connected if it is not yet. Raises the error if that fails."""
        return SlurmHost(self.login, self._note_once, self._check_in_own_thread)

    def _check_in_own_thread(self) -> None:
        """Call the caller's check, but only in the thread that has made the engine. Raises what it raises."""
        if threading.get_ident() == self._thread:
            self.caller.check()

    def _note_once(self, text: str) -> None:
        """Print a message, but only the first one, and only in the thread that has made the engine."""
        if threading.get_ident() == self._thread and not self._noted:
            self._noted = True
            self.caller.note(text)

    @property
    def login(self) -> Fleet:
        """The fleet of the login host alone, which is connected if it is not yet. Raises the error if that fails."""
        if self.fleet.shared is None:
            self.open()
        shared = self.fleet.shared
        assert shared is not None
        for error in shared.failed.values():
            raise error
        return shared

    def fleet_of_job(self, job: str) -> Fleet:
        """Return a fleet of a running job's nodes, not yet open, whose connections are steps of srun; __exit__() closes it.

        Raises NotFound if the job does not run, PreflightError if Slurm does not answer. A node whose records could not be
        read, or that is not in the allocation, fails when the fleet is opened.
        """
        slurm, login = self.slurm, self.login
        cluster, absent = self.fleet.cluster, dict(self.fleet.failed)  # of the job; _summaries() opens the fleet of all
        running = self._find_in_queue(slurm, job)
        if running is None or running.state != RUNNING:
            state = f": Slurm has it as {running.state}" if running else ""
            raise NotFound(f"job {job} does not run{state}", f"{PROGRAM} status --job {job}")
        number, names, srun = running.id, _nodes_of(running, self._summaries(job)), slurm.path("srun")
        ways = LoginLinks(login.agents[0].link, lambda: login.connect(self.host))

        def reach(host: Host) -> Link:
            if host.index in absent:
                raise absent[host.index]
            if host.index not in names:
                raise Unreachable("is no node of its allocation", "inspect the records of the job", host.name)
            return SrunLink(ways.for_node(host.index), srun, number, names[host.index])

        self._job_fleet = Fleet(cluster, self.caller.check, None, None, reach, self.fleet.prompter)
        return self._job_fleet

    def check(self, settings: Mapping[str, object], deep: bool) -> Examined:
        """Check the login host, and whether Slurm would take a job with these settings, or this shell's allocation suffices.

        deep: if there is no error, also run a probe on nodes (check_compute_nodes). Raises UsageError for wrong settings, the
        errors of the login host, NotFound if the allocation does not run, PreflightError if Slurm does not answer.
        """
        from_all = read_settings(self.fleet.cluster.settings, None, settings, self.fleet.cluster.where)
        login, slurm = self.login, self.slurm
        examined = check_login_host(login, {})
        examined.require()
        facts = examined.facts[0]
        allocation = allocation_here(slurm, facts)
        found = check_allocation(allocation, from_all) if allocation else check_queue(slurm, from_all, facts.root)
        examined = examined.add_findings([*found, *check_grace(slurm, self.fleet.cluster)])
        if deep and not errors(examined.findings):
            seen = check_compute_nodes(login, slurm, from_all, facts, allocation)
            examined = replace(seen, findings=(*examined.findings, *seen.findings))
        return examined

    # -- what Slurm knows

    def nodes(self) -> Sequence[EngineNode]:
        """List the nodes of all partitions of Slurm."""
        return self.slurm.nodes()

    def describe(self, known: Mapping[int, JobsAnswer]) -> dict[str, Description]:
        """Describe the jobs that were submitted, and all jobs of `known`, by squeue, scontrol, the submissions and the records.

        A job is found by its number in Slurm, or that of its step, and one that was submitted by hand while Slurm has it. Of a
        job without a submission, of another engine or with a removed one, the records decide. The reason of an end is asked of
        Slurm for 8 ended jobs without a record at most, the newest first.
        """
        slurm = self.slurm
        return self._describe(slurm, slurm.submissions(), known)

    def earlier(self, asked: str) -> tuple[dict[int, JobsAnswer], dict[str, Description]]:
        """Return {node: answer} of the agents about jobs that the id `asked` can mean, and {job: description} of these jobs.

        Raises errors that keep the records of a node from being read, PreflightError if Slurm does not answer.
        """
        fleet, slurm = self.open(), self.slurm
        gathered = fleet.ask(dict.fromkeys(fleet.agents, LIST_JOBS({"job": asked})))
        raise_all([error for error in gathered.failed.values() if not isinstance(error, NotFound)])
        submissions = slurm.submissions().items()
        fitting = {job: about for job, about in submissions if can_mean(asked, job, about["asked"], "")}
        found, recorded = self._describe(slurm, fitting, gathered.ok), by_records(gathered.ok)
        meant = {job for job, one in found.items() if job in recorded or can_mean(asked, job, one.asked, "")}
        return gathered.ok, {job: found[job] for job in meant}

    def _describe(
        self, slurm: SlurmHost, submissions: Mapping[str, SubmittedJob], known: Mapping[int, JobsAnswer]
    ) -> dict[str, Description]:
        """Return {job: description} of these submissions, of the jobs in `known`, and of those that were submitted by hand.

        Of a submission count, in this order: its job in the queue, an outcome of its records but LOST, an end in `_over`, and
        what Slurm answers about it (_describe_gone), which is kept in `_over` if it is an end. Of another job: the queue, its
        records, and its end in Slurm. Without records, Slurm is asked for the reason of 8 ends at most.
        """
        jobs = _list_queue(slurm, submissions, "--states=all")
        queue = {job.number: job for job in jobs if job.state not in ENDED}
        commented = {job.clustertool_job: job for job in queue.values()}
        by_user = [job for job in jobs if job.is_by_hand(self.fleet.cluster.root_dir)]
        over = {job.clustertool_job: job for job in sorted(by_user, key=lambda job: job.id) if job.state in ENDED}
        records = by_records(known)
        found: dict[str, Description] = {}
        asked = 0
        newest_first = sorted(submissions.items(), key=lambda one: one[1]["created"], reverse=True)
        for job, about in newest_first:
            queued = commented.get(job) or queue.get(about["slurm_id"])
            if queued is not None:
                found[job] = _describe_slurm_job(queued, about)
            elif job in records and records[job].state in OUTCOMES - {JobState.LOST}:
                found[job] = _add_submission(about, Description(EngineState.ENDED))
            elif job in self._over:
                found[job] = self._over[job]
            elif job not in records and asked >= _REASONS:
                found[job] = _add_submission(about, Description(EngineState.ENDED, "", about["created"]))
            else:
                asked += 1
                ended = self._describe_gone(slurm, about)
                if ended.state is EngineState.ENDED and job not in records:
                    ended = self._with_cause(slurm, job, ended)
                found[job] = _add_submission(about, ended)
                if found[job].state is EngineState.ENDED:
                    self._over[job] = found[job]
        for job, one in commented.items():
            if job not in found and (job in records or one in by_user):
                found[job] = _describe_slurm_job(one)
        for job, part in records.items():
            if job not in found:
                proved = _describe_records(part)
                lost = proved.state is EngineState.UNKNOWN and job in over
                found[job] = _describe_slurm_job(over[job]) if lost else proved
        for job, one in over.items():
            if job not in found and asked < _REASONS:
                asked += 1
                shown = slurm.job(one.id)
                self._outputs[job] = shown.output if shown is not None else ""
                found[job] = self._with_cause(slurm, job, _describe_slurm_job(one))
        return found

    def _with_cause(self, slurm: SlurmHost, job: str, ended: Description) -> Description:
        """Return the description with `cause`: message and highest exit code in the output of the job's start.

        None if the output has no exit code other than 0.
        """
        _, output = slurm.step_output(job, self._outputs.get(job, ""))
        return replace(ended, cause=(output.reason, output.code) if output.code else None)

    def _describe_gone(self, slurm: SlurmHost, about: SubmittedJob) -> Description:
        """Describe a submitted job that squeue does not have, by scontrol or the accounting: ENDED with the reason.

        QUEUED while it may still be submitted, within 120 s; as scontrol has it if it has come back to the queue meanwhile.
        """
        number, dot, step = about["slurm_id"].partition(".")
        if not number.isdecimal() or (dot and not step):
            if time.time() - about["created"] < _SUBMITTING:
                return Description(EngineState.QUEUED, "it is being submitted", about["created"])
            return Description(EngineState.ENDED, "it was not submitted", about["created"])
        job = slurm.job(int(number))
        if job is not None and step and job.state not in (*ENDED, COMPLETING):  # its allocation is still there
            reason = f"Slurm: its step {about['slurm_id']} has ended; {STEP_OUTPUT} has its messages"
            return Description(EngineState.ENDED, reason, about["created"])
        if job is not None and job.state not in ENDED:  # it came back to the queue a moment ago
            return _describe_slurm_job(job, about)
        if job is not None:
            return Description(EngineState.ENDED, _end_text(job), job.ended or about["created"])
        state = slurm.ended_state(int(number))
        return Description(EngineState.ENDED, f"Slurm: {state}" if state else _NO_INFORMATION, about["created"])

    # -- the end of a job

    def cancel(self, job: str, how: StopHow) -> Answers:
        """Take a job out of the queue, or stop it on its nodes; wait until Slurm has it no more, and remove its submission.

        Of a job with records only the bundle of the submission is removed. Returns {name of a node: its answer, else what its
        records prove}. Raises Survivors if the job is still in the queue at the end of the wait, PreflightError if Slurm
        refuses the end or does not answer. No interrupt ends it.
        """
        return self._cancel(job, how, self.caller.note, _CHANNELS)

    def cancel_all(self, jobs: Collection[str], how: StopHow) -> dict[str, Answers | ClustertoolError]:
        """Cancel several jobs, four at a time, and map each to what cancel() returns, or to its error."""
        names, notes = list(jobs), SimpleQueue[str]()

        def show_notes() -> None:
            while not notes.empty():
                self.caller.note(notes.get())

        channels = _CHANNELS // max(1, min(_AT_ONCE, len(names)))
        gathered = each(
            names, lambda job: self._cancel(job, how, notes.put, channels), width=_AT_ONCE, check=show_notes
        )
        show_notes()
        found: dict[int, Answers | ClustertoolError] = {**gathered.ok, **gathered.failed}
        return {names[number]: one for number, one in sorted(found.items())}

    def _cancel(self, job: str, how: StopHow, note: Callable[[str], None], channels: int) -> Answers:
        """Cancel a job, as cancel() does: by scancel while it is queued, by _stop() if it runs; then wait for Slurm.

        The wait is 20 s if a node has answered, else the grace and 30 s. A job that is not in the queue has ended already.
        note: shows a message. channels: how many of its nodes are asked at a time.
        """
        slurm = self.slurm.patient
        queued = self._find_in_queue(slurm, job)
        if queued is not None and queued.state in _QUEUED:
            self._scancel(slurm, queued, "--state=PENDING")
            queued = self._poll_queue(slurm, queued, lambda one: one.state not in _QUEUED, _LEAVING)
        answers: dict[str, StopAnswer] = {}
        if queued is not None:
            answers = self._stop(slurm, queued, job, how, note, channels)
            patience = _LEAVING if answers else how["grace"] + STOPPING
            left = self._poll_queue(slurm, queued, lambda one: False, patience)
            if left is not None:
                what = f"job {job}: {_title(left)} is {left.state} on {left.nodelist}"
                show = f"scontrol show {'step' if left.step else 'job'} {left.number}"
                raise Survivors(what, f"{PROGRAM} stop --job {job} --force tries again; {show}")
        recorded = self._read_ends(job, _ENDED_ALREADY if queued is None else _CLEAN)
        slurm.withdraw(job, only_bundle=bool(recorded))
        return {**recorded, **answers}

    def join_log(self, job: str) -> tuple[str, Sequence[str]]:
        """Return the path of the output of the job's start with the host, "PATH on HOST", and its last 10 different lines."""
        path, output = self.slurm.step_output(job, self._outputs.get(job, ""))
        return f"{path} on {self.slurm.name}", output.lines

    def starts_again(self, job: str, attempt: int) -> bool:
        """Return whether Slurm starts the job again after this attempt; poll Slurm up to 20 s until that is decided.

        False for a step, a job that Slurm may not requeue, one that has ended, and if it is not decided by then.
        """
        slurm, end = self.slurm.patient, time.monotonic() + _LEAVING
        about = slurm.submissions().get(job)
        number = about["slurm_id"] if about else ""
        while number.isdecimal():  # a step does not start again
            found = slurm.job(int(number))
            if found is None or found.state in ENDED or not found.requeue:
                return False
            if found.state in _QUEUED or (found.state == COMPLETING and found.restarts > attempt):
                return True
            if time.monotonic() > end:
                return False
            time.sleep(_POLL)
        return False

    def forget(self, jobs: Collection[str]) -> None:
        """Remove the folders of these jobs' submissions."""
        slurm = self.slurm
        for job in jobs:
            slurm.withdraw(job)

    def _find_in_queue(self, slurm: SlurmHost, job: str) -> SlurmJob | None:
        """Find a job in the queue, the first with its id in the comment or with the number of its submission; None without one.

        For a submission that is a step, the steps are searched, too.
        """
        about = {name: found for name, found in slurm.submissions().items() if name == job}
        numbers = {found["slurm_id"] for found in about.values()}
        queue = _list_queue(slurm, about)
        return next((one for one in queue if one.clustertool_job == job or one.number in numbers), None)

    def _scancel(self, slurm: SlurmHost, job: SlurmJob, *options: str) -> None:
        """Run scancel for a job or a step. Raises PreflightError if Slurm refuses it for a job that is still in the queue.

        A refusal for a step is ignored: of a step with a part of the nodes scancel fails after it has sent the signal (Slurm
        22.05). The stop has to be proved anyway.
        """
        answer = slurm.run("scancel", *options, job.number)
        if answer["code"] and not job.step and self._in_queue(slurm, job) is not None:
            fix = f"try on {slurm.name}: scancel {job.number}"
            raise PreflightError(f"scancel: {message(answer)}", fix, slurm.name)

    @staticmethod
    def _in_queue(slurm: SlurmHost, job: SlurmJob) -> SlurmJob | None:
        """Ask Slurm for the state of a job or step; None if it is not in the queue."""
        queue = slurm.steps() if job.step else slurm.queue()
        return next((one for one in queue if one.number == job.number), None)

    def _poll_queue(
        self, slurm: SlurmHost, job: SlurmJob, true: Callable[[SlurmJob], bool], seconds: float
    ) -> SlurmJob | None:
        """Poll the queue every 0.3 s until `true` holds for the job, or these seconds are over; return the job as it is then.

        Returns None as soon as it is not in the queue.
        """
        end = time.monotonic() + seconds
        while True:
            found = self._in_queue(slurm, job)
            if found is None or true(found) or time.monotonic() > end:
                return found
            time.sleep(_POLL)

    def _stop(
        self, slurm: SlurmHost, queued: SlurmJob, job: str, how: StopHow, note: Callable[[str], None], channels: int
    ) -> dict[str, StopAnswer]:
        """Stop a job by agents on its nodes, and return {name of a node: its answer}, without nodes that gave no answer.

        If no node can be reached, `note` shows why, and scancel sends TERM, or with `force` cancels the job. The same without a
        message if the job is COMPLETING, or no node has a record. channels: how many nodes are asked at a time.
        """
        places = self._hosts_of_job(queued, job) if queued.state != COMPLETING else {}
        gathered = each(
            places,
            lambda host: self._stop_on(host, slurm, queued.id, job, how),
            width=channels,
            timeout=how["grace"] + STOPPING,
        )
        if not gathered.ok and self._in_queue(slurm, queued) is not None:
            for error in list(gathered.failed.values())[:1]:
                note(f"no channel to the nodes of job {job} ({error.what}): scancel ends it")
            self._scancel(slurm, queued, *([] if how["force"] else ["--signal=TERM"]))
        return {places[node].name: answer for node, answer in gathered.ok.items() if answer is not None}

    def _hosts_of_job(self, queued: SlurmJob, job: str) -> dict[int, Host]:
        """Map the nodes of a running job that have a record to hosts, each with the folder of its jobs.

        host: the node's name in Slurm. name: its name in the job.
        """
        found = {}
        summaries = self._summaries(job)
        for node, host in _nodes_of(queued, summaries).items():
            part = summaries.get(node)
            folder = part.get("dir", "").rpartition("/")[0] if part else ""
            if part and folder:
                found[node] = Host(node, host, root_dir=folder, name=_name_in_job(part))
        return found

    def _stop_on(self, host: Host, slurm: SlurmHost, number: int, job: str, how: StopHow) -> StopAnswer | None:
        """Open an agent on a node by a step of srun, stop the job there, and return the answer.

        Raises the error of the channel if the agent cannot be opened. Returns None if the channel is lost after the request:
        Slurm ends all steps of a job when the job's own one has ended.
        """
        with contextlib.closing(SrunLink(self.login.agents[0].link, slurm.path("srun"), number, host.host)) as link:
            agent = AgentClient.open(link, host, self.fleet.cluster)
            with contextlib.suppress(Unreachable):
                return agent.ask(stop_request(job, how), how["grace"] + STOPPING)
        return None

    # -- records

    def _summaries(self, job: str) -> dict[int, JobSummary]:
        """Read the records of a job, by the number of the node in the job. No interrupt ends this: it is a part of a stop."""
        fleet, request = self.open(), LIST_JOBS({"job": job, "exact": True})
        answers = fleet.ask(dict.fromkeys(fleet.agents, request), patient=True).ok
        parts = (part for answer in answers.values() for part in answer["jobs"] if part["id"] == job)
        return {int(part["node"] or 0): part for part in parts}

    def _read_ends(self, job: str, ended: JobStop) -> dict[str, StopAnswer | ClustertoolError]:
        """Read what the records of an ended job prove, as the answer to a stop of each node, by the names of the nodes.

        ended: the answer of a node whose record has its end. Waits up to 5 s for the ends; without one the answer is UNKNOWN.
        """
        end = time.monotonic() + _RECORDS
        while True:
            parts = self._summaries(job).values()
            over = {_name_in_job(part): read_part(part).state in OUTCOMES for part in parts}
            if all(over.values()) or time.monotonic() > end:
                return {name: {"jobs": {job: ended if is_over else _NO_END}} for name, is_over in over.items()}
            time.sleep(_POLL)


def _name_in_job(part: JobSummary) -> str:
    """Return the name of the record's node in the job; "node N" if the record has none."""
    node, names = int(part["node"] or 0), part["nodes"] or []
    return names[node] if node < len(names) else f"node {node}"


def _nodes_of(queued: SlurmJob, summaries: Mapping[int, JobSummary]) -> dict[int, str]:
    """Map the numbers of a job's nodes to their names in Slurm, by the records if these name all nodes of the allocation.

    Otherwise the nodes of the allocation are numbered in its order. Nodes that are not in it any more are left out: failed ones
    of an elastic job.
    """
    names = queued.node_names
    known = {node: _name_in_job(part) for node, part in summaries.items()}
    if set(names) <= set(known.values()):
        return {node: name for node, name in known.items() if name in names}
    return dict(enumerate(names))


def _list_queue(slurm: SlurmHost, submissions: Mapping[str, SubmittedJob], *options: str) -> list[SlurmJob]:
    """List the user's jobs; with their steps, if a submission is a step of one of these. options: of SlurmHost.queue()."""
    queue = slurm.queue(*options)
    allocations = {about["slurm_id"].partition(".")[0] for about in submissions.values() if "." in about["slurm_id"]}
    return [*queue, *slurm.steps()] if allocations & {job.number for job in queue} else queue


def _title(job: SlurmJob) -> str:
    """Return "Slurm job N", or "step N.M of Slurm"."""
    return f"step {job.number} of Slurm" if job.step else f"Slurm job {job.number}"


def _describe_slurm_job(job: SlurmJob, about: SubmittedJob | None = None) -> Description:
    """Describe a job that Slurm has by its state there: ENDED, QUEUED, or else RUNNING, with `ending` if it is COMPLETING.

    about: its submission, from which name and number of nodes are then; without one they are Slurm's.
    """
    if job.state in ENDED:
        found = Description(EngineState.ENDED, _end_text(job), job.ended or 0.0, created=job.submitted or 0.0)
    elif job.state in _QUEUED:
        reason = f"{job.explained_reason} (Slurm job {job.id})" if job.reason else f"Slurm job {job.id}"
        found = Description(EngineState.QUEUED, reason, job.submitted or 0.0, job.expected or 0.0)
    else:
        reason = "" if job.state == RUNNING else f"Slurm: {job.state}"
        found = Description(EngineState.RUNNING, reason, job.started or 0.0, ending=job.state == COMPLETING)
    if about is not None:
        return _add_submission(about, found)
    return replace(found, job_name="" if job.name == job.clustertool_job else job.name, nodes=job.nodes)


def _add_submission(about: SubmittedJob, found: Description) -> Description:
    """Return the description with what the submission has: name, asked id, command, number of nodes."""
    return replace(found, job_name=about["name"], asked=about["asked"], command=about["command"], nodes=about["nodes"])


def _end_text(job: SlurmJob) -> str:
    """Return the state in which Slurm has ended a job, and the reason, as a text."""
    more = f", {job.reason}" if job.reason else ""
    return f"Slurm: {job.state}{more}"


def _describe_records(part: NodePart) -> Description:
    """Describe a job that Slurm does not have by its records: ENDED if they have an outcome other than LOST, else UNKNOWN."""
    if part.state in OUTCOMES and part.state is not JobState.LOST:
        return Description(EngineState.ENDED, part.reason, part.ended)
    return Description(EngineState.UNKNOWN, part.reason or "Slurm does not have it")
