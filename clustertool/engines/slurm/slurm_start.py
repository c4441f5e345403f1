"""A job in Slurm's queue starts by a workspace on the shared file system, a bundle with the job, a script, and sbatch."""

from __future__ import annotations

import base64
import os
import posixpath
import re
import time
from dataclasses import replace
from pathlib import Path

from clustertool.engines import earlier_work, queued_request
from clustertool.engines.base import Document, Exported, ExportWish, Starter, Submission, Submitted
from clustertool.engines.caller import pause, report_nothing_left
from clustertool.engines.common_join_file import common_join_file
from clustertool.engines.elastic import elastic_plan
from clustertool.engines.job_request import engine_table
from clustertool.engines.queued_request import ExpectedNodes
from clustertool.engines.send_workspace import disk_needs, send_whole
from clustertool.engines.slurm.allocation_step import AllocationStep, allocation_here
from clustertool.engines.slurm.slurm_check import check_login_host
from clustertool.engines.slurm.slurm_engine import SlurmEngine
from clustertool.engines.slurm.slurm_host import SlurmHost, advice, message
from clustertool.errors import ClustertoolError, Interrupted, PreflightError, Terminated, UsageError
from clustertool.fleet import job_places
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.identity import identity, job_id
from clustertool.fleet.joining import join_bundle
from clustertool.model.config.job import JobSpec
from clustertool.model.facts import Facts, Identity
from clustertool.model.hints import PROGRAM
from clustertool.model.joining.engine_place import join_timeout_of
from clustertool.model.joining.join_file import EngineSettings, JoinFile, MeetingPoint, OwnSettings
from clustertool.model.paths import BUNDLE, STEP_OUTPUT, JobPaths
from clustertool.model.quantities import count, human_bytes
from clustertool.model.slurm import submit_script
from clustertool.model.slurm.shell_allocation import ignored_keys
from clustertool.model.slurm.slurm_answers import SlurmJob
from clustertool.model.slurm.slurm_settings import SlurmSettings, read_settings
from clustertool.model.slurm.slurm_times import grace_warning, kill_wait, longest_grace
from clustertool.model.slurm.submit_script import SCRIPT, SubmitOrder
from clustertool.model.wire.agent_answers import SubmittedJob
from clustertool.model.wire.agent_requests import ProbeWanted
from clustertool.ssh.parallel import each

_LATE = 10.0  # seconds in which Slurm may accept a job after sbatch was ended, because it gave no answer
_POLL = 1.0
_TAKING_BACK = 5.0  # seconds in which Slurm must answer where a submission is taken back
_ACCEPTING = 1.0  # seconds after the end of sbatch in which Slurm may accept its job
_TURN = 0.2
_STANDS = (
    "names, addresses and ports of nodes are known when Slurm has started the job; node0, node1, ... stand for them"
)
_EXPORTED = "it has the key of the job: copy it to a folder of yours alone, which all nodes share, and there:"


class SlurmStart(Starter):
    """The start of a job in Slurm. prepare() connects to the login host, also for --dry: ROOT_DIR is known there."""

    @property
    def _slurm_engine(self) -> SlurmEngine:
        assert isinstance(self._engine, SlurmEngine)
        return self._engine

    def prepare(self) -> Submission:
        """Check the options, the login host and the settings, complete the request, and build the script. Nothing is submitted.

        The job gets its id, the grace that KillWait allows, and the allocation of this shell, if the command is typed in one.
        With --dry the submission has a plan with placeholders for the nodes, else none. Raises UsageError for options that do
        not fit or a too small allocation, the errors of the settings and of the login host, PreflightError without an answer.
        """
        engine, request = self._slurm_engine, self._request
        queued_request.refuse_options(self._request)
        self._settings = self._read_settings()  # before a connection is opened
        facts = self._examine(engine.login)
        engine.slurm.output("sbatch", "--version")
        if request.spec is None:
            request.read_toml(engine.caller, facts.job_toml, engine_table(facts.job_toml, request.cluster))
            assert request.spec is not None
            self._settings = self._read_settings()
        queued_request.refuse_lease(request.spec, "give --timeout, or the key time of SLURM")
        if request.elastic.present:
            elastic_plan.refuse_fixed(request)
        if request.resumes:
            engine.caller.warn("job.toml: resume has no effect with this engine; the job starts anew")
        self._facts = facts
        self._allocation = allocation_here(engine.slurm, facts)
        of_cpus = self._use_allocation(_count_ranks(request.spec, self._settings))
        limit = kill_wait(engine.slurm.config())
        if limit is not None and not request.grace_given:
            request.set_grace(longest_grace(limit))
        for warning in filter(None, (of_cpus, grace_warning(request.grace, limit))):
            engine.caller.warn(warning)
        self._identity = self._identify()
        documents = (Document(SCRIPT, self._script()),)
        if not request.wish.dry:
            return Submission(self._identity.job_id, None, documents)
        shown = self._allocation.with_resources(self._settings) if self._allocation else self._settings
        plan = queued_request.expected_plan(request, nodes_of_slurm(shown, facts), self._identity)
        stands = f"{elastic_plan.describe_plan(plan, request.cluster)}; " if request.elastic.present else ""
        return Submission(self._identity.job_id, plan, documents, stands + _STANDS)

    def _use_allocation(self, ranks: int) -> str:
        """Reduce the settings to those of a step, if the shell has an allocation that is used; print whether it is used.

        Returns a warning if `ranks` on a node share processors, "" for none. Raises UsageError if the allocation is too small.
        """
        allocation, caller = self._allocation, self._slurm_engine.caller
        shell = os.environ.get("SLURM_JOB_ID")
        if allocation is None:
            if shell:
                what = f"the allocation of this shell (SLURM_JOB_ID={shell}) is not used"
                caller.remark(f"a new Slurm job is submitted; {what}")
            return submit_script.cpus_warning(self._settings, ranks)
        ignored = ", ".join(ignored_keys(self._settings))
        without = f"; these settings have no effect there: {ignored}" if ignored else ""
        caller.remark(f"the job runs in the allocation of this shell (SLURM_JOB_ID={shell}){without}")
        if self._request.elastic.present:
            most = max(self._request.elastic.minimum, min(self._request.elastic.maximum, allocation.nodes))
            self._settings = replace(self._settings, nodes=most)
        self._settings = allocation.step(self._settings)
        return allocation.cpus_warning(self._settings, ranks)

    def _script(self) -> str:
        """Build the text of the script: that of a step in the allocation, or that of sbatch."""
        order = self._submit_order(JobPaths(self._facts.root, self._identity.job_id).queue)
        if self._allocation:
            return submit_script.step_script(self._settings, order, self._allocation)
        return submit_script.script(self._settings, order)

    def _read_settings(self) -> SlurmSettings:
        """Read the settings from conf.py, job.toml and the command line, of which later ones have priority.

        Raises ConfigError for conf.py, DataError for job.toml, UsageError for the command line. The number of nodes of an
        elastic job is its maximum.
        """
        request = self._request
        typed = queued_request.typed_settings(request)
        found = read_settings(request.cluster.settings, request.table, typed, request.cluster.where)
        return replace(found, nodes=self._request.elastic.maximum) if self._request.elastic.present else found

    def _examine(self, fleet: Fleet) -> Facts:
        """Check the login host, print its warnings, and return its facts.

        Raises its errors, also for too little room on the disk.
        """
        options = self._request.options
        wanted: ProbeWanted = {"job_workspace": options.job_workspace}
        if options.job_workspace:
            wanted["listing"] = not (options.command or options.script) or bool(options.shards)
        examined = check_login_host(fleet, wanted)
        if self._request.workspace is not None:
            examined = examined.check_disk(disk_needs(self._request.workspace, fleet.cluster, examined.facts, None))
        examined.require()
        examined.warn(self._engine.caller)
        return examined.facts[0]

    def _identify(self) -> Identity:
        """Create the identity of the job: with --job-id that id, or the next free one after it, if an earlier job has it.

        Without --job-id the id is new. Raises UsageError if a job with that id has not ended.
        """
        request, wish = self._request, self._request.wish
        if wish.job_id:
            earlier_work.take_id_of_engine(request, self._engine.caller, *self._slurm_engine.earlier(wish.job_id))
        return identity(request.job_id or job_id(), wish.job_id, wish.name or wish.job_id, request.origin)

    def _submit_order(self, folder: str, root_dir: str = "") -> SubmitOrder:
        """Build what the script needs besides the settings. folder: of the submission. root_dir: of a job submitted by hand."""
        made, python, least = self._identity, self._request.cluster.python, self._request.elastic.minimum
        bundle = posixpath.normpath(posixpath.join(folder, BUNDLE))
        return SubmitOrder(made.job_id, folder, bundle, python, made.name, root_dir, least)

    def submit(self, submission: Submission) -> Submitted:
        """Send the workspace, make the folder of the submission, and start the step or run sbatch; return the job's id.

        Records Slurm's number in the folder, and the job on this machine. If the step or sbatch fails, the submission is taken
        back, and the error raised.
        """
        engine, request, job = self._slurm_engine, self._request, submission.job_id
        spec = request.spec
        assert spec is not None
        slurm, order = engine.slurm, self._submit_order(JobPaths(self._facts.root, job).queue)
        elastic = spec.elastic
        nodes = f"elastic, {elastic.text} nodes" if elastic.present else count(self._settings.node_count, "node")
        engine.caller.note(f"job {job}: {spec.mode}, {nodes} of Slurm, from {slurm.name}")
        release = self._dispatch()
        engine.caller.starting(job)
        about: SubmittedJob = {
            "job": job,
            "name": self._identity.name,
            "asked": self._identity.asked,
            "command": queued_request.shown_command(spec),
            "mode": spec.mode,
            "nodes": self._settings.node_count,
            "owner": self._identity.owner,
            "created": self._identity.created,
            "release": release,
            "slurm_id": f"{self._allocation.job}." if self._allocation else "",
        }
        contents = {BUNDLE: join_bundle.content(self._join_file(release))}
        contents.update((document.name, document.text.encode()) for document in submission.documents)
        if self._allocation:
            contents[STEP_OUTPUT] = b""  # closed to others, as that of a job of sbatch
        files = {name: base64.b64encode(data).decode() for name, data in contents.items()}
        slurm.create_folder(about, files)
        try:
            number = self._start_step(slurm, order) if self._allocation else self._sbatch(slurm, order)
            slurm.record_number(job, number)
        except BaseException as error:
            self._take_back(slurm.patient, job, error)
            raise
        engine.caller.note(f"job {job} is {'step' if self._allocation else 'Slurm job'} {number}")
        job_places.remember(self._identity, request.cluster, engine.caller.warn)
        return Submitted(job)

    def _take_back(self, slurm: SlurmHost, job: str, error: BaseException) -> None:
        """Remove a submission that has failed, and cancel the job that Slurm may have accepted all the same; wait 5 s at most.

        Reports to the caller that nothing is left. If Slurm does not answer, the error gets a text that the job may be queued,
        and the command that ends it.
        """
        caller = self._slurm_engine.caller
        if isinstance(error, (Interrupted, Terminated)):
            caller.note(f"{error.what}: cancelling job {job}")
        more = 0.0 if isinstance(error, PreflightError) else _ACCEPTING  # Slurm was asked after that error
        withdrawn = each([job], lambda one: self._withdraw(slurm, one, more), timeout=_TAKING_BACK)
        for number in withdrawn.ok.get(0, ()):
            caller.note(f"Slurm job {number} of job {job} was cancelled")
        if not isinstance(error, ClustertoolError):
            return
        report_nothing_left(caller, error)
        if withdrawn.failed:
            error.what += f"; Slurm has not answered whether it has job {job} in its queue"
            error.fix = "; ".join(filter(None, (error.fix, f"{PROGRAM} stop --job {job} cancels it")))
            error.brief = f"{error.what}: {PROGRAM} stop --job {job}"

    @staticmethod
    def _withdraw(slurm: SlurmHost, job: str, seconds: float) -> list[str]:
        """End sbatch, cancel the submission's job if that comes into the queue within these seconds, and remove the folder.

        Returns the numbers of the jobs that were cancelled. Raises PreflightError, Unreachable: then the folder stays without
        its bundle, so that its job cannot join.
        """
        slurm.end_programs()
        slurm.withdraw(job, only_bundle=True)
        end = time.monotonic() + seconds
        while True:
            late = time.monotonic() >= end
            found = [one.number for one in slurm.queue() if one.clustertool_job == job]
            for number in found:
                slurm.output("scancel", number)
            if found or late:
                slurm.withdraw(job)
                return found
            time.sleep(_TURN)

    def _start_step(self, slurm: SlurmHost, order: SubmitOrder) -> str:
        """Start srun for a step in the allocation of this shell, and return the step's number, JOB.STEP, when it has started.

        Ends srun after an error, and raises it: PreflightError with srun's messages.
        """
        assert self._allocation is not None
        step = AllocationStep(self._allocation, order.job_id, order.folder)
        try:
            return step.wait_for_number(slurm, self._slurm_engine.caller)
        except BaseException:
            step.end(slurm.patient)
            raise

    def _sbatch(self, slurm: SlurmHost, order: SubmitOrder) -> str:
        """Run sbatch, and return the number of the Slurm job. Raises PreflightError with the reason of a refusal.

        If sbatch gives no number, the job may have been accepted all the same: if it is in the queue, or comes there within 10
        s after a sbatch without an answer, prints a warning and returns its number.
        """
        answer = slurm.run(
            *submit_script.submit_command(self._settings, order, posixpath.join(order.folder, SCRIPT)),
            env={},
            login=True,
        )
        number = submit_script.submitted_number(answer["stdout"])
        if number and not answer["code"]:
            return number
        what = f"sbatch: {message(answer) if answer['code'] else 'its answer has no job id'}"
        found = self._find_accepted(slurm, order.job_id, _LATE if answer["code"] == -1 else 0.0)
        if found is not None:
            self._slurm_engine.caller.warn(f"{what}; Slurm has accepted the job all the same")
            return found.number
        fix = advice(answer, "correct SLURM in conf.py, [slurm] in job.toml, or the options")
        raise PreflightError(what, fix, slurm.name)

    def _find_accepted(self, slurm: SlurmHost, job: str, seconds: float) -> SlurmJob | None:
        """Poll the queue, with ended jobs, for these seconds, until it has a Slurm job with our job id in its comment.

        Polls every second, and at least once. Returns None if it has none then. Raises PreflightError if Slurm does not answer,
        and what the caller's check raises.
        """
        end = time.monotonic() + seconds
        while True:
            queue = slurm.queue("--states=all")
            found = next((one for one in queue if one.clustertool_job == job), None)
            if found is not None or time.monotonic() >= end:
                return found
            pause(self._slurm_engine.caller, _POLL)

    def _dispatch(self) -> str:
        """Send the workspace to the store in ROOT_DIR, and return the name of its release; "" without a workspace.

        Raises its errors.
        """
        engine, workspace = self._slurm_engine, self._request.workspace
        if workspace is None:
            return ""
        send_whole(engine.caller, engine.login, workspace, {0: self._facts})
        return workspace.release

    def _join_file(self, release: str) -> JoinFile:
        """Build the join file of a submitted job, with ROOT_DIR and the folder of the job as the login host has them."""
        request, facts = self._request, self._facts
        folder = request.options.job_workspace
        if folder.startswith("~/"):
            folder = posixpath.join(facts.home, folder[2:])
        listing = request.workspace.files if request.workspace is not None else facts.listing
        return self._build_join_file(OwnSettings(root_dir=facts.root, folder=folder), listing, release)

    def _build_join_file(self, own: OwnSettings, listing: tuple[str, ...], release: str) -> JoinFile:
        """Build the join file that all nodes of the job get. own: ROOT_DIR and folder, empty where the nodes find them."""
        cluster = self._request.cluster
        coordinator = MeetingPoint("", cluster.lead_port)
        return replace(
            common_join_file(self._request, self._identity, self._settings.node_count, coordinator),
            join_timeout=join_timeout_of(cluster.join_timeout, "slurm"),
            listing=listing,
            release=release,
            own=own,
            engine="slurm",
            of_engine=EngineSettings(keep_bundle=self._settings.goes_back, requeue_on=self._settings.requeue_on),
        )

    def export(self, place: Path | None, wish: ExportWish) -> Exported:
        """Write the script, and the bundle with the workspace, into the new folder `place` (0700), without a connection.

        Returns the command that submits them, with a note about the key. The nodes find ROOT_DIR themselves. Raises UsageError
        for options that do not fit, without a folder or workspace, and for too large a workspace.
        """
        options = (("--native", wish.native), ("--with-secrets", wish.secrets), ("--secrets-to", wish.secrets_place))
        for option in (name for name, given in options if given):
            raise UsageError(f"{option} is an option of manifests of Kubernetes", "leave it out")
        if place is None:
            raise UsageError("export needs a folder", "give --to DIR, which does not exist")
        queued_request.refuse_options(self._request)
        workspace = self._request.workspace
        if workspace is None:
            raise UsageError("export needs the files of the job", "give --workspace DIR")
        self._settings = self._read_settings()
        if self._request.elastic.present:
            elastic_plan.refuse_fixed(self._request)
        if workspace.size > join_bundle.LARGEST_WORKSPACE:
            most = human_bytes(join_bundle.LARGEST_WORKSPACE)
            what = f"the workspace has {human_bytes(workspace.size)}, and a bundle at most {most}"
            raise UsageError(what, f"{PROGRAM} run sends it")
        typed = self._request.wish
        name = typed.name or typed.job_id
        self._identity = identity(typed.job_id or job_id(), typed.job_id, name, self._request.origin)
        order = self._submit_order(".", self._request.cluster.root_dir)
        place.mkdir(mode=0o700)
        file = self._build_join_file(OwnSettings(), workspace.files, workspace.release)
        join_bundle.write(place / BUNDLE, file, workspace)
        (place / SCRIPT).write_text(submit_script.script(self._settings, order), "utf-8")
        return Exported((f"sbatch {SCRIPT}",), note=_EXPORTED)


def _count_ranks(spec: JobSpec, settings: SlurmSettings) -> int:
    """Count the ranks on each node, trainers and pservers; 0 if their number depends on the devices there."""
    trainers = spec.nproc or spec.trainer.per_node
    if not trainers and (spec.nproc_of or (settings.gpus_per_node and not spec.has_pservers)):
        return 0
    return (trainers or 1) + (spec.pserver.per_node or 1 if spec.has_pservers else 0)


def nodes_of_slurm(settings: SlurmSettings, login: Facts) -> ExpectedNodes:
    """Build placeholders for the nodes of a job: node0, node1, ..., with the processors and GPUs that the settings ask for.

    login: facts of the login host, whose ROOT_DIR the nodes share.
    """
    return ExpectedNodes(
        names=tuple(f"node{number}" for number in range(settings.node_count)),
        root=login.root,
        home=login.home,
        listing=login.listing,
        cpus=settings.cpus_per_node or 1,
        gpus=_count_gpus(settings.gpus_per_node),
    )


def _count_gpus(text: str) -> int:
    """Return the sum of the GPUs of a node in a setting: "4", "a100:4", "a100:2,v100:1" (3); 0 for ""."""
    return sum(map(int, re.findall(r"(?:^|[:,])([0-9]+)(?=,|$)", text)))
