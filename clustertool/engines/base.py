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
    """The state of a job as its engine knows it.

    QUEUED: no process of the job has started. RUNNING: processes may run. ENDED: it is proved that none is left. UNKNOWN: the
    engine cannot tell.
    """

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
        """The reason of the job's end for a message, with a default text."""
        return self.reason or "its engine gives no reason"

    def gone(self, over: bool) -> bool:
        """Return whether a node that has recorded no end has no process of the job left.

        This is so if the state is ENDED, or if the engine ends the job (`ending`) and another node has recorded its end
        (`over`).
        """
        return self.state is EngineState.ENDED or (self.ending and over)


UNRECORDED = {  # the state of a job of which no node has a record
    EngineState.QUEUED: JobState.QUEUED,
    EngineState.RUNNING: JobState.STARTING,
    EngineState.ENDED: JobState.LOST,
    EngineState.UNKNOWN: JobState.UNKNOWN,
}


def by_records(known: Mapping[int, JobsAnswer]) -> dict[str, NodePart]:
    """Choose for each job in the answers the part of the node that decides its state (decide), and map the job's id to it."""
    parts: dict[str, list[JobSummary]] = {}
    for answer in known.values():
        for summary in answer["jobs"]:
            parts.setdefault(summary["id"], []).append(summary)
    return {job: decide(map(read_part, of_job)) for job, of_job in parts.items()}


def correct_state(recorded: JobState, known: Description | None, over: bool = False) -> JobState:
    """Return the recorded state of a job, or of its part on one node, corrected by what the engine knows.

    A recorded outcome stands, and any state if `known` is None. LOST: the engine has no process of it left (Description.gone),
    or has queued the job while the recorded state is UNKNOWN or `over` is true. UNKNOWN becomes RUNNING if the job runs in the
    engine. over: a node has recorded the end of the job.
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
    """What submit() will do, which --dry shows. plan: None if the nodes make it. documents: for the owner of the nodes.

    stands: a sentence for --dry, where the nodes make the plan: which values of `plan` are placeholders.
    """

    job_id: str
    plan: Plan | None = None
    documents: tuple[Document, ...] = ()
    stands: str = ""


@dataclass(frozen=True)
class ExportWish:
    """What a user wants of an export.

    secrets: with those of the job. secrets_place: the file that has them alone. native: without the node side of clustertool.
    """

    secrets: bool = False
    secrets_place: Path | None = None
    native: bool = False


@dataclass(frozen=True)
class Exported:
    """What an export has made.

    commands: submit it. text: what the caller writes, "" if the folder has it. note: what to do before the commands. secrets:
    what the caller writes to ExportWish.secrets_place.
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
        """Prepare the fleet of the cluster, without a connection.

        sink: gets the frames of agents. Raises ConfigError for an engine that is not known; an engine, also for its settings.
        """
        self.caller = caller
        self.capabilities = known_engines.capabilities(cluster.engine)
        self.fleet = Fleet(cluster, caller.check, sink, caller.person(), self.reach)
        self._job_fleet: Fleet | None = None  # of fleet_of_job(), where that makes another one
        if not self.capabilities.live_channels:
            self.fleet.engine_end = self._why_ended

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        """Close the connections, also those of fleet_of_job()."""
        if self._job_fleet is not None:
            self._job_fleet.close()
        self.fleet.close()

    def _why_ended(self, job: str) -> str | None:
        """Return why a job has ended, for a user; None if it has not ended or is not known, or if the engine cannot be asked.

        Asks all agents for the job before, and describe() with their answers. Called in a thread of its own.
        """
        wanted = LIST_JOBS({"job": job, "exact": True})
        with contextlib.suppress(ClustertoolError):
            found = self.describe(self.fleet.ask(dict.fromkeys(self.fleet.agents, wanted), patient=True).ok).get(job)
            if found is not None and found.state is EngineState.ENDED:
                return found.why
        return None

    def reach(self, host: Host) -> Link | None:
        """Return None: the fleet connects to the host by ssh, or starts a child if the host is this machine.

        An engine with its own channels returns a Link, or a HereLink with a program that opens a shell on the host. Called in a
        thread of the fleet. An engine may raise the error that the host then has, such as Unreachable.
        """
        return None

    @abstractmethod
    def open(self, lag: float | None = None, job: str = "", newest: bool = False) -> Fleet:
        """Connect to agents that can read the records of jobs, and return the fleet. Errors of nodes are in Fleet.failed.

        lag: see Fleet.open. job: what a user calls the wanted jobs, "" for all; an engine may leave out the nodes of other
        jobs. newest: of all jobs only the newest one is wanted, and those that run.

        An engine with a queue is called again after a job has left the queue, and connects to nodes that did not run before.
        """

    def fleet_of_job(self, job: str) -> Fleet:
        """Return `fleet`, which must have an agent on each node of the running job, numbered as the job numbers them.

        An engine whose agents only read records makes another fleet, which is not open yet, and is closed with the engine
        (`_job_fleet`). It raises NotFound if the job does not run, PreflightError if it cannot be asked.
        """
        return self.fleet

    @abstractmethod
    def describe(self, known: Mapping[int, JobsAnswer]) -> dict[str, Description]:
        """Describe the user's jobs that are queued or run, and all jobs of `known`, by their ids.

        known: what agents have answered about jobs. Raises ClustertoolError if the engine cannot be asked.
        """

    @abstractmethod
    def cancel(self, job: str, how: StopHow) -> Answers:
        """End a job, or take a queued one out of the queue.

        Returns the answers of agents, {} if none was asked. Raises ClustertoolError if the engine refuses.
        """

    def cancel_all(self, jobs: Collection[str], how: StopHow) -> dict[str, Answers | ClustertoolError]:
        """Cancel several jobs, one after the other, and map each to what cancel() has returned or raised."""
        found: dict[str, Answers | ClustertoolError] = {}
        for job in jobs:
            try:
                found[job] = self.cancel(job, how)
            except ClustertoolError as error:
                found[job] = error
        return found

    def cause(self, job: str) -> tuple[str, int] | None:
        """Return None. A queue returns (why it has ended nodes of a job, the exit code for that); None if it has ended none.

        It raises ClustertoolError if it cannot be asked.
        """
        return None

    def starts_again(self, job: str, attempt: int) -> bool:
        """Return False. A queue returns whether it starts the job again after this attempt.

        Called when the attempt was stopped, had no time left, or has lost a node. A queue raises ClustertoolError if it cannot
        be asked.
        """
        return False

    def pods(self, job: str) -> Sequence[JobPod]:
        """Return (). Kubernetes lists the pods of a job, in the order of its nodes, or raises ClustertoolError."""
        return ()

    def join_log(self, job: str) -> tuple[str, Sequence[str]]:
        """Return ("", ()). A queue returns the name of the log of the processes that join a job, and its last lines.

        Called for a job that has ended before a node had a record of it. A queue raises ClustertoolError if it cannot be asked.
        """
        return "", ()

    def holds_output(self, job: str) -> bool:
        """Return False. Kubernetes returns whether nodes of an ended job wait until release(), for a fetch.

        It raises ClustertoolError if it cannot be asked.
        """
        return False

    def without_files(self, job: str, error: NotFound) -> NotFound:
        """Return `error`, that of a fetch which has found no files. Kubernetes returns another one if no pod of the job runs.

        It raises ClustertoolError if it cannot be asked.
        """
        return error

    def release(self, job: str) -> None:  # noqa: B027 - most engines hold nothing
        """Do nothing. Kubernetes ends the wait of a job's nodes for the fetch of its output (holds_output).

        It raises the error of a node that does not answer.
        """

    def check(self, settings: Mapping[str, object], deep: bool) -> Examined:
        """Raise NotImplementedError: an engine with HOSTS has another check.

        Other engines check that they can run jobs with these settings of the command line, and return the findings. deep: they
        also check what their nodes see. They raise ClustertoolError if they cannot be asked.
        """
        raise NotImplementedError

    def nodes(self) -> Sequence[EngineNode]:
        """Raise NotImplementedError: an engine that has agents on its nodes lists none.

        Other engines list the nodes of the cluster, or raise ClustertoolError if they cannot be asked.
        """
        raise NotImplementedError

    def forget(self, jobs: Collection[str]) -> None:  # noqa: B027 - most engines keep nothing
        """Do nothing. A queue removes what it keeps of these jobs, whose records were removed.

        It raises ClustertoolError if that fails.
        """


class Starter(ABC):
    """The start of one job: prepare(), then submit()."""

    def __init__(self, engine: Engine, request: RunRequest) -> None:
        self._engine, self._request = engine, request

    @abstractmethod
    def prepare(self) -> Submission:
        """Check the request, complete it (spec, job id), and return what submit() will do. Starts no process of the job.

        With wish.dry nothing is changed anywhere. Raises the errors of all nodes together.
        """

    def export(self, place: Path | None, wish: ExportWish) -> Exported:
        """Raise UsageError: an engine without a queue has nothing to export.

        Others return the files that submit() would submit. place: a new folder, into which an engine with several files writes
        them; None: the caller writes the text. Raises UsageError also where a wish does not fit the engine.
        """
        what = f"the engine {self._request.cluster.engine or 'ssh'} starts jobs itself: there is nothing to export"
        raise UsageError(what, "name an engine with a queue: --engine NAME")

    @abstractmethod
    def submit(self, submission: Submission) -> Submitted:
        """Start the job, or submit it to the queue. After an error, undo what was begun, then raise the error.

        Calls caller.starting() before any process of the job may run.
        """


# -- the classes of an engine, which are imported when a job needs them -------------------------------------------------


def engine_of(cluster: Cluster) -> type[Engine]:
    """Return the engine class of a cluster. Raises ConfigError for an engine that this version does not have."""
    found: type[Engine] = _import_name(known_engines.entry_of(cluster.engine).engine)
    return found


def starter_of(engine: Engine, request: RunRequest) -> Starter:
    """Create the starter for a request, of the engine of its cluster. Raises ConfigError for an engine that is not known."""
    starter: Starter = _import_name(known_engines.entry_of(request.cluster.engine).starter)(engine, request)
    return starter


def grow(engine: Engine, job: str, hosts: Sequence[Host]) -> Mapping[str, str]:
    """Add these hosts as nodes to a running elastic job; a host that is a node of it, but does not take part, is started again.

    engine: its fleet is open. Returns {name of the host: a text about what it does now}. Raises UsageError if the engine
    chooses the nodes itself, and the errors of hosts that cannot join.
    """
    entry = known_engines.entry_of(engine.fleet.cluster.engine)
    if not entry.growth:
        what = f"the engine {entry.name} chooses the nodes itself"
        raise UsageError(what, "ask it for more nodes, which join the job by themselves")
    found: Mapping[str, str] = _import_name(entry.growth)(engine.caller, engine.fleet, job).run(hosts)
    return found


def revive(engine: Engine, job: str, node: int) -> bool:
    """Start a node of an elastic job again that does not take part in the job, and whose agent is open. Called in a thread.

    Returns whether the node was started: False also if the engine chooses the nodes itself. Raises ClustertoolError.
    """
    growth = known_engines.entry_of(engine.fleet.cluster.engine).growth
    return bool(growth) and bool(_import_name(growth)(engine.caller, engine.fleet, job).start_again(node))


def _import_name(place: str) -> Any:
    """Import the module of `place`, "module:name", and return its attribute of this name."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(module), name)
