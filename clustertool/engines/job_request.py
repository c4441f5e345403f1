"""A run request is what a caller wants to run, read and checked before any connection. With facts it becomes a plan."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from clustertool.errors import UsageError
from clustertool.fleet.dispatch.workspace import Workspace
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job import JobSpec, Options
from clustertool.model.config.job_tables import Toml
from clustertool.model.facts import ByNode, Identity
from clustertool.model.job.earlier_jobs import EarlierJob
from clustertool.model.masking import HIDDEN
from clustertool.model.planning.plan import Plan, plan
from clustertool.model.planning.shards import refuse_links

Advise = Callable[[Plan], str]  # returns a warning about a plan, "" for none; may raise UsageError
Shown = str | list[tuple[str, int]]  # logs to show: "all", all of a role ("trainer"), or processes by role and rank


def no_advice(made: Plan) -> str:
    """Give no warning about any plan."""
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
    """`spec` is None until job.toml is known.

    table: the settings of the engine in job.toml. origin: where the job's files come from. resumes: job.toml's `resume`.
    grace_given: whether the user has set the grace; else an engine may have another one.
    resumed: the earlier job whose output is copied. left: ended jobs of the same name or workspace that have left an output,
    where none is resumed. everywhere: the command to be typed on each node in place of this one; "": not known.
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
        """Seconds between TERM and KILL."""
        return self.spec.policy.grace if self.spec is not None else self.cluster.grace

    def set_grace(self, seconds: float) -> None:
        """Replace the grace of a job whose spec is known."""
        assert self.spec is not None
        self.spec = replace(self.spec, policy=replace(self.spec.policy, grace=seconds))


def make_plan(request: RunRequest, facts: ByNode, identity: Identity | None = None) -> Plan:
    """Make the plan of a request. Without an identity it is only shown or checked."""
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
    """Raise UsageError for a rank to show that the job does not have."""
    trainers = sum(process.role == "trainer" for process in made.processes)
    shown = request.wish.shown
    for _, rank in () if isinstance(shown, str) else shown:
        if rank >= trainers:
            raise UsageError(f"the job has no trainer {rank} (--rank)", f"it has trainers 0 to {trainers - 1}")
