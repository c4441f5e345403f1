"""The interface of an engine. An engine provides the nodes of jobs, and starts the supervisors there.

An engine has two classes. Engine finds jobs and ends them. Starter submits one. known_engines.py names both: a command about
existing jobs does not import what only a start needs.

    with engine_of(cluster)(cluster, caller, inbox.put) as engine:
        starter = starter_of(engine, request)
        submission = starter.prepare()      # --dry shows it
        submitted = starter.submit(submission)
        fleet = engine.open()               # after the job has left the queue
"""

from __future__ import annotations

import contextlib
import importlib
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from clustertool.engines import known_engines
from clustertool.engines.caller import Caller
from clustertool.errors import ClustertoolError, NotFound, UsageError
from clustertool.fleet.agent_client import Sink
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.this_machine import Link
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.engine_views import EngineNode, JobPod
from clustertool.model.job.node_status import NodePart, read_part
from clustertool.model.job.state import decide
from clustertool.model.job.state_names import OUTCOMES, JobState
from clustertool.model.name_enum import Name
from clustertool.model.wire.agent_answers import JobsAnswer, JobSummary, StopAnswer
from clustertool.model.wire.agent_requests import StopHow
from clustertool.model.wire.messages import LIST_JOBS

if TYPE_CHECKING:  # a command about existing jobs needs nothing of a start
    from clustertool.engines.job_request import RunRequest
    from clustertool.engines.preflight import Examined
    from clustertool.model.planning.plan import Plan


class EngineState(Name):
    """QUEUED: no process of the job has started. ENDED: it is proved that none is left. UNKNOWN: neither is known."""

    QUEUED = "queued"
    RUNNING = "running"
    ENDED = "ended"
    UNKNOWN = "unknown"


@dataclass(frozen=True)
class Description:
    """What an engine knows of a job. Times are seconds since the epoch by the clock of this machine, 0.0 if not known.

    reason: why it is queued, or why its state is not known. since: when it came into this state. created: when it was
    submitted. expected: when a queued job may start.
    job_name, asked (the id of --job-id), command, nodes: what no node can answer while the job is queued.
    ending: of a job that runs: the engine has ended it, and waits for what is left on its nodes. cause: why it has ended nodes
    of the job, and the exit code of a job that ends because of that. stuck: why it does not start although it is no longer in a
    queue, such as an image that cannot be pulled; "" otherwise.
    """

    state: EngineState
    reason: str = ""
    since: float = 0.0
    expected: float = 0.0
    job_name: str = ""
    command: str = ""
    nodes: int = 0
    asked: str = ""
    ending: bool = False
    cause: tuple[str, int] | None = None
    stuck: str = ""
    created: float = 0.0

    @property
    def why(self) -> str:
        """The reason of an end, for people."""
        return self.reason or "its engine gives no reason"

    def gone(self, over: bool) -> bool:
        """Check that no process of the job is left on a node that has recorded no end. over: another node has recorded one."""
        return self.state is EngineState.ENDED or (self.ending and over)


UNRECORDED = {  # the state of a job of which no node has a record
    EngineState.QUEUED: JobState.QUEUED,
    EngineState.RUNNING: JobState.STARTING,
    EngineState.ENDED: JobState.LOST,
    EngineState.UNKNOWN: JobState.UNKNOWN,
}


def by_records(known: Mapping[int, JobsAnswer]) -> dict[str, NodePart]:
    """Fold the nodes' summaries of each job: a job runs if it runs on one node."""
    parts: dict[str, list[JobSummary]] = {}
    for answer in known.values():
        for summary in answer["jobs"]:
            parts.setdefault(summary["id"], []).append(summary)
    return {job: decide(map(read_part, of_job)) for job, of_job in parts.items()}


def correct_state(recorded: JobState, known: Description | None, over: bool = False) -> JobState:
    """Correct the recorded state of a job, or of its part on one node, by what the engine knows. A recorded end stands.

    over: a node has recorded the end of the job. Then a node that has not is lost, if the engine waits for it or has queued
    the job again.
    """
    if known is None or recorded in OUTCOMES:
        return recorded
    unknown = recorded is JobState.UNKNOWN
    queued = known.state is EngineState.QUEUED
    if known.gone(over) or (queued and (unknown or over)):
        return JobState.LOST
    return JobState.RUNNING if known.state is EngineState.RUNNING and unknown else recorded


@dataclass(frozen=True)
class Document:
    """A text that is submitted: a script or a manifest. It has no secret: these are in the bundle, and *** here."""

    name: str
    text: str


@dataclass(frozen=True)
class Submission:
    """What submit() does, and what --dry shows. plan: where this machine makes it. documents: for the owner of the nodes.

    stands: for --dry, where the nodes make the plan: which values of `plan` stand for those to come.
    """

    job_id: str
    plan: Plan | None = None
    documents: tuple[Document, ...] = ()
    stands: str = ""


@dataclass(frozen=True)
class ExportWish:
    """How an export is to be.

    secrets: with those of the job. secrets_place: the file that has them alone. native: without the node side of clustertool.
    """

    secrets: bool = False
    secrets_place: Path | None = None
    native: bool = False


@dataclass(frozen=True)
class Exported:
    """text: what the caller writes, "" if the folder has it.

    secrets: what it writes to ExportWish.secrets_place. note: what to do with it. commands: submit it then.
    """

    commands: tuple[str, ...] = ()
    text: str = ""
    note: str = ""
    secrets: str = ""


@dataclass(frozen=True)
class Submitted:
    """A job that was submitted. plan: the one that was started, if this machine has made it."""

    job_id: str
    plan: Plan | None = None


Answers = Mapping[str, StopAnswer | ClustertoolError]  # to a stop, by the names of the nodes


class Engine(ABC):
    """The jobs of a cluster, for one command. As a context manager it closes its connections at the end.

    fleet: the agents of open(), none before. capabilities: those of its entry in known_engines.py.
    """

    def __init__(self, cluster: Cluster, caller: Caller, sink: Sink | None = None) -> None:
        """Prepare an engine; no connection is open yet.

        sink: gets the frames of agents. Raises ConfigError for its settings.
        """
        self.caller = caller
        self.capabilities = known_engines.capabilities(cluster.engine)
        self.fleet = Fleet(cluster, caller.check, sink, caller.person(), self.reach)
        if not self.capabilities.live_channels:
            self.fleet.engine_end = self._end

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.fleet.close()

    def _end(self, job: str) -> str | None:
        """Ask why a job has ended; None if it has not, or if the engine cannot say. Called in a thread of its own."""
        wanted = LIST_JOBS({"job": job, "exact": True})
        with contextlib.suppress(ClustertoolError):
            found = self.describe(self.fleet.ask(dict.fromkeys(self.fleet.agents, wanted), patient=True).ok).get(job)
            if found is not None and found.state is EngineState.ENDED:
                return found.why
        return None

    def reach(self, host: Host) -> Link | None:
        """Return the channel to a node: a HereLink with a program that opens a shell there, or a Link of the engine.

        None for ssh, or for a child if the host is this machine. Called in a thread of the fleet. Raises Unreachable.
        """
        return None

    @abstractmethod
    def open(self, lag: float | None = None, job: str = "", newest: bool = False) -> Fleet:
        """Connect to agents that can read the records of jobs. What fails is in Fleet.failed.

        lag: see Fleet.open. job: what a user calls the jobs that are wanted, "" for all; an engine may leave out the nodes of
        others. newest: of all jobs only the newest is wanted, and those that run.

        An engine with a queue is called again after a job has left it, and connects to what was not there before.
        """

    def live(self, job: str) -> Fleet:
        """Return the nodes of a running job, as it numbers them, for what records do not have. `fleet` is that of the job.

        A fleet of its own, not open so far, where the agents of `fleet` only read records. The engine closes it. Raises
        NotFound where the job does not run, PreflightError.
        """
        return self.fleet

    @abstractmethod
    def describe(self, known: Mapping[int, JobsAnswer]) -> dict[str, Description]:
        """Describe the user's jobs that are queued or run, and all jobs of `known`, by their ids.

        known: what agents have answered about jobs. Raises ClustertoolError if the engine cannot be asked.
        """

    @abstractmethod
    def cancel(self, job: str, how: StopHow) -> Answers:
        """End a job, also one that is queued: it does not start any more.

        Returns what agents have answered, {} if none was asked. Raises ClustertoolError if the engine refuses.
        """

    def cancel_all(self, jobs: Collection[str], how: StopHow) -> dict[str, Answers | ClustertoolError]:
        """cancel() of several jobs: what it returns or raises, for each of them."""
        found: dict[str, Answers | ClustertoolError] = {}
        for job in jobs:
            try:
                found[job] = self.cancel(job, how)
            except ClustertoolError as error:
                found[job] = error
        return found

    def cause(self, job: str) -> tuple[str, int] | None:
        """Return why the engine has ended nodes of a job, and the exit code of that; None where it has not.

        Raises ClustertoolError.
        """
        return None

    def starts_again(self, job: str, attempt: int) -> bool:
        """Check whether a job that was stopped, had no time left, or has lost a node, in this attempt goes back to the queue.

        Called when that is known. Raises ClustertoolError.
        """
        return False

    def pods(self, job: str) -> Sequence[JobPod]:
        """List the pods of a job, in the order of its nodes; () where an engine has none. Raises ClustertoolError."""
        return ()

    def join_log(self, job: str) -> tuple[str, Sequence[str]]:
        """Read what the processes of a job have printed last that has ended before a node had a record of it.

        Return the name of that log, and its lines; "" and () where an engine keeps none. Raises ClustertoolError.
        """
        return "", ()

    def holds_output(self, job: str) -> bool:
        """Check whether nodes of a job that has ended wait until its output was fetched. Raises ClustertoolError."""
        return False

    def without_files(self, job: str, error: NotFound) -> NotFound:
        """Explain the error of a fetch that has found nothing. Raises ClustertoolError."""
        return error

    def release(self, job: str) -> None:  # noqa: B027 - most engines hold nothing
        """Release the nodes of a job whose output was fetched: they do not wait any more. Raises ClustertoolError."""

    def check(self, settings: Mapping[str, object], deep: bool) -> Examined:
        """Check what an engine without HOSTS needs for jobs. Raises ClustertoolError.

        settings: typed ones. deep: also what its nodes see.
        """
        raise NotImplementedError

    def nodes(self) -> Sequence[EngineNode]:
        """List the nodes of an engine that has no agents there. Raises ClustertoolError."""
        raise NotImplementedError

    def forget(self, jobs: Collection[str]) -> None:  # noqa: B027 - most engines keep nothing
        """Remove what the engine itself keeps of jobs whose records were removed. Raises ClustertoolError."""


class Starter(ABC):
    """The start of one job: prepare(), then submit()."""

    def __init__(self, engine: Engine, request: RunRequest) -> None:
        self._engine, self._request = engine, request

    @abstractmethod
    def prepare(self) -> Submission:
        """Check the request and compute what submit() does. Nothing is started, and with wish.dry nothing is changed.

        Completes the request (spec, job id). Raises the errors of all nodes together.
        """

    def export(self, place: Path | None, wish: ExportWish) -> Exported:
        """Make what submit() would give to the owner of the nodes. Nothing is submitted.

        place: a new folder, which an engine with several files writes; else the caller writes the text. Raises UsageError where
        nothing is given to one, or a wish does not fit.
        """
        what = f"the engine {self._request.cluster.engine or 'ssh'} starts jobs itself: there is nothing to export"
        raise UsageError(what, "name an engine with a queue: --engine NAME")

    @abstractmethod
    def submit(self, submission: Submission) -> Submitted:
        """Start the job, or give it to the queue. Raises after everything that was begun is undone.

        caller.starting() is called before anything may run.
        """


# -- the classes of an engine, which are imported when a job needs them -------------------------------------------------


def engine_of(cluster: Cluster) -> type[Engine]:
    """Return the engine class of a cluster. Raises ConfigError for an engine that this version does not have."""
    found: type[Engine] = _target(known_engines.entry_of(cluster.engine).engine)
    return found


def starter_of(engine: Engine, request: RunRequest) -> Starter:
    """Create the starter of a request. Raises ConfigError."""
    starter: Starter = _target(known_engines.entry_of(request.cluster.engine).starter)(engine, request)
    return starter


def grow(engine: Engine, job: str, hosts: Sequence[Host]) -> Mapping[str, str]:
    """Start further nodes of an elastic job that runs, or nodes of it again that do not take part. engine: its fleet is open.

    Returns {name: what becomes of it}. Raises UsageError where the engine chooses the nodes; ClustertoolError.
    """
    entry = known_engines.entry_of(engine.fleet.cluster.engine)
    if not entry.growth:
        what = f"the engine {entry.name} chooses the nodes itself"
        raise UsageError(what, "ask it for more nodes, which join the job by themselves")
    found: Mapping[str, str] = _target(entry.growth)(engine.caller, engine.fleet, job).run(hosts)
    return found


def revive(engine: Engine, job: str, node: int) -> bool:
    """Start a node of an elastic job again that does not take part in it, and whose agent is open. Called in a thread.

    Returns whether it was started: an engine that chooses the nodes does so itself. Raises ClustertoolError.
    """
    growth = known_engines.entry_of(engine.fleet.cluster.engine).growth
    return bool(growth) and bool(_target(growth)(engine.caller, engine.fleet, job).again(node))


def _target(place: str) -> Any:
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
