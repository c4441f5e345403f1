"""A run request is what a caller wants to run, read and checked before any connection. With facts it becomes a plan.

A plan is made again with other ports or devices where another job took them between probe and claim.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from clustertool.engines import known_engines
from clustertool.engines.caller import Caller, pause
from clustertool.errors import ClustertoolError, DataError, UsageError, only
from clustertool.fleet.dispatch.workspace import Workspace
from clustertool.model.config import workspace_rights
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.elastic_keys import ElasticSettings
from clustertool.model.config.job import JobSpec, Options, gives_grace, read_job, resumes
from clustertool.model.config.job_tables import Toml
from clustertool.model.facts import ByNode, Identity
from clustertool.model.job.earlier_jobs import EarlierJob
from clustertool.model.masking import HIDDEN
from clustertool.model.planning.plan import Plan, plan
from clustertool.model.planning.shards import refuse_links

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

Advise = Callable[[Plan], str]  # returns a warning about a plan, "" for none; may raise UsageError
Shown = str | list[tuple[str, int]]  # logs to show: "all", all of a role ("trainer"), or processes by role and rank


# -- job.toml, which is in the workspace of this machine or on the nodes -----------------------------------------------


def job_toml(text: str) -> Toml:
    """Parse the text of a job.toml, and return {name: value} of its top level without the tables of engines.

    Raises DataError, with the line, if it is no TOML.
    """
    engines = known_engines.names()
    return {name: table for name, table in _parse_toml(text).items() if name not in engines}


def engine_table(text: str, cluster: Cluster) -> Toml:
    """Return the table of the cluster's engine in job.toml's text, {} if there is none.

    The tables of other engines have no effect. Raises DataError if the text is no TOML, the engine's entry no table, or a
    setting in it one that a workspace may not set.
    """
    entry = known_engines.entry_of(cluster.engine)
    table = _parse_toml(text).get(entry.name, {})
    if not isinstance(table, dict):
        what = f"job.toml: {entry.name} = {table!r} is no table"
        raise DataError(what, f"write [{entry.name}] and its keys below it")
    workspace_rights.check(entry.name, table, entry.of_workspace, cluster.workspace_may_set)
    return table


def settings_note(toml: Toml, table: Toml, cluster: Cluster) -> str:
    """Build a line about the container and the settings of the engine (`table`) that a job.toml sets; "" if it sets none."""
    name = known_engines.entry_of(cluster.engine).name
    found = workspace_rights.describe_tables({"container": toml.get("container", {}), name: table})
    return f"job.toml sets {found}" if found else ""


def _parse_toml(text: str) -> Toml:
    """Parse the text of a job.toml, with or without a byte order mark. Raises DataError if it is no TOML."""
    try:
        return dict(tomllib.loads(text.removeprefix("\ufeff")))  # an editor may put a mark in front
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"job.toml: {error}", "correct it; docs/reference.md has an example") from None


# -- the request -------------------------------------------------------------------------------------------------------


def no_advice(made: Plan) -> str:
    """Return "": no warning about any plan."""
    return ""


@dataclass(frozen=True)
class RunWish:
    """What a caller wants besides Options. folder: the workspace, which is sent to every node. name: of the job.

    resume: the job whose output the new one continues, or one of NEWEST and FRESH (model/job/job_names.py).
    keep: files and folders of its directory that are copied besides its output.
    shown: the logs that the caller shows; ranks in it that the job does not have are an error. settings: of the engine, by
    their names there; they have priority over those of job.toml and conf.py.
    """

    folder: str = ""
    job_id: str = ""
    name: str = ""
    resume: str = ""
    keep: tuple[str, ...] = ()
    dry: bool = False
    skip_bad: bool = False
    wait: bool = False
    shown: Shown = "all"
    settings: Mapping[str, object] = field(default_factory=dict, hash=False)


@dataclass
class RunRequest:
    """A request to run a job. job.toml and the nodes complete it: `spec` is None until job.toml is known.

    table: the settings of the engine in job.toml. origin: where the job's files come from. resumes: job.toml's `resume`.
    grace_given: whether the user has set the grace; else an engine may have another one. resumed: the earlier job whose output
    is copied. left: ended jobs of the same name or workspace that have left an output, where none is resumed. everywhere: the
    command to be typed on each node in place of this one; "": not known.
    """

    cluster: Cluster
    options: Options
    wish: RunWish
    spec: JobSpec | None
    workspace: Workspace | None
    job_id: str
    secrets: Mapping[str, str]
    passed: tuple[tuple[str, str], ...]
    table: Toml = field(default_factory=dict)
    origin: str = ""
    resumes: bool = False
    grace_given: bool = False
    resumed: EarlierJob | None = None
    left: tuple[EarlierJob, ...] = ()
    everywhere: str = ""
    advise: Advise = no_advice
    # Called when the plan is made, and when the job is over or left alone.
    planned: Callable[[Plan], None] = lambda made: None
    ended: Callable[[Plan], None] = lambda made: None

    @property
    def grace(self) -> float:
        """Seconds between TERM and KILL: of the job, or of the cluster while the spec is not known."""
        return self.spec.policy.grace if self.spec is not None else self.cluster.grace

    @property
    def elastic(self) -> ElasticSettings:
        """The elastic settings of the job; empty ones while its spec is not known."""
        return self.spec.elastic if self.spec is not None else ElasticSettings()

    def read_toml(self, caller: Caller, text: str, table: Toml) -> None:
        """Set spec, resumes, table and grace_given from a job.toml, and print what it sets of the container and the engine.

        text: of the job.toml. table: that of the engine. Raises the errors of read_job(): DataError for job.toml, UsageError
        for the command line, ConfigError for conf.py.
        """
        toml = job_toml(text)
        self.spec, self.resumes, self.table = read_job(self.cluster, toml, self.options), resumes(toml), table
        self.grace_given = self.grace_given or gives_grace(toml, self.options)
        if note := settings_note(toml, table, self.cluster):
            caller.remark(note)

    def set_grace(self, seconds: float) -> None:
        """Replace the grace (seconds) of the spec, which must be known."""
        assert self.spec is not None
        self.spec = replace(self.spec, policy=replace(self.spec.policy, grace=seconds))


# -- the plan ----------------------------------------------------------------------------------------------------------


def make_plan(request: RunRequest, facts: ByNode, identity: Identity | None = None) -> Plan:
    """Plan a request, whose spec is known, with the facts of the nodes; add the warning of request.advise.

    Without an identity, for --dry and checks, the job gets the request's id or "DRY". The files are those of the workspace,
    else all that any node has listed. Raises DataError for a shard that is a link, and the errors of plan().
    """
    assert request.spec is not None
    if request.workspace:
        refuse_links(request.workspace.links, request.spec.shards)
        listing = request.workspace.files
    else:  # what the nodes have between them
        listing = tuple(sorted({path for fact in facts.values() for path in fact.listing}))
    hidden = tuple((name, HIDDEN) for name in request.spec.elastic.server.of_ranks(request.cluster.secrets))
    mine = identity or Identity(request.job_id or "DRY")
    made = plan(request.cluster, request.spec, facts, mine, listing, request.passed + hidden)
    advice = request.advise(made)
    return replace(made, warnings=(*made.warnings, advice)) if advice else made


def check_ranks(request: RunRequest, made: Plan) -> None:
    """Raise UsageError if a rank in `wish.shown` (--rank) is not lower than the plan's number of trainers.

    "all" and the name of a role are not checked.
    """
    trainers = sum(process.role == "trainer" for process in made.processes)
    shown = request.wish.shown
    for _, rank in () if isinstance(shown, str) else shown:
        if rank >= trainers:
            raise UsageError(f"the job has no trainer {rank} (--rank)", f"it has trainers 0 to {trainers - 1}")


Kinds = tuple[type[ClustertoolError], ...]
_AGAIN = 5  # times that a plan is made again when a port was taken meanwhile
# Seconds between two of these plans, more each time and random: two jobs that collided would collide again.
_APART = 0.2


def start_with_retries(
    caller: Caller,
    made: Plan,
    start: Callable[[Plan], None],
    plan_again: Callable[[ClustertoolError], Plan],
    passing: Kinds,
) -> Plan:
    """Start a plan. After an error of the kinds `passing` (another job took a port), pause and plan again, up to 5 times.

    The pause is random, of up to 0, 0.2, ... 0.8 s. Returns the plan that was started. Raises any other error at once, that of
    the sixth start, and those of plan_again() and of the caller's check.
    """
    for tried in range(_AGAIN):
        try:
            start(made)
            return made
        except ClustertoolError as error:
            if not only(error, *passing):
                raise
            failure = error
        pause(caller, random.uniform(0.0, _APART * tried))
        made = plan_again(failure)
    start(made)
    return made
