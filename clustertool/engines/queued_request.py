"""Engines with a queue have this in common: refused options, typed settings, the command for lists of jobs, the plan of --dry.

That plan is made before the engine has chosen the nodes: it has what holds for any nodes, and placeholders.
"""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace

from clustertool.engines.job_request import RunRequest, make_plan
from clustertool.errors import UsageError
from clustertool.model.config.elastic_keys import is_range
from clustertool.model.config.hosts import Host
from clustertool.model.config.job import JobSpec
from clustertool.model.facts import Identity
from clustertool.model.job.job_names import FRESH
from clustertool.model.planning.plan import Plan, given_facts

USUAL = ("python3", "-u", "train.py")  # what trainers run where no command is given
_COMMAND = 200  # characters of a command that are shown


def refuse_options(request: RunRequest) -> None:
    """Raise UsageError for --resume (not --resume none), --wait or --skip-bad, which have no meaning for a queued job."""
    wish = request.wish
    options = (("--resume", wish.resume not in ("", FRESH)), ("--wait", wish.wait), ("--skip-bad", wish.skip_bad))
    for option, given in options:
        if given:
            raise UsageError(f"{option} is not possible with the engine {request.cluster.engine}", "leave it out")


def refuse_lease(spec: JobSpec, fix: str) -> None:
    """Raise UsageError if the spec has a lease (--lease). fix: the text that names another limit for the job."""
    if spec.policy.lease:
        raise UsageError("--lease needs a command that follows the job, and a queued job starts without one", fix)


def typed_settings(request: RunRequest) -> dict[str, object]:
    """Return {setting: value} of the engine's settings on the command line; one number in --nnodes is the setting `nodes`.

    A range MIN:MAX is no setting.
    """
    typed = dict(request.wish.settings)
    if request.options.nnodes and not is_range(request.options.nnodes):
        typed["nodes"] = request.options.nnodes
    return typed


def with_usual_command(spec: JobSpec) -> JobSpec:
    """Return the spec with the trainers' command USUAL, if it has none: where the files of the job are not known here."""
    return replace(spec, trainer=replace(spec.trainer, command=spec.trainer.command or USUAL))


def shown_command(spec: JobSpec) -> str:
    """Return the trainers' command as a shell line of at most 200 characters, for lists of jobs."""
    return shlex.join(spec.trainer.command or USUAL)[:_COMMAND]


@dataclass(frozen=True)
class ExpectedNodes:
    """Placeholders for the nodes of a job that an engine has not chosen yet. names: one of each node.

    root, home: ROOT_DIR and the home there. listing: of a workspace that is there already. cpus, gpus: numbers of each node.
    roles: of each node; () where each plays all. shared: whether they share ROOT_DIR.
    """

    names: tuple[str, ...]
    root: str
    home: str = ""
    listing: tuple[str, ...] = ()
    cpus: int = 1
    gpus: int = 0
    roles: tuple[str, ...] = ()
    shared: bool = True

    @property
    def hosts(self) -> tuple[Host, ...]:
        """The hosts with these names, numbered from 0 on, each with its role."""
        found = tuple(Host(number, name, address=name, name=name) for number, name in enumerate(self.names))
        return tuple(replace(host, roles=((role, None),)) for host, role in zip(found, self.roles)) or found


def expected_plan(request: RunRequest, nodes: ExpectedNodes, identity: Identity) -> Plan:
    """Plan a job, whose spec is known, for nodes that are not chosen yet, with placeholders for their facts.

    Raises the errors of make_plan(). Without known GPUs the number of ranks per node that follows from them (nproc_of) is left
    out.
    """
    assert request.spec is not None
    cluster = replace(request.cluster, hosts=nodes.hosts)
    gpus = tuple(range(nodes.gpus))
    facts = {
        node: replace(
            fact,
            boot_id=nodes.names[node],
            root=nodes.root,
            root_id=nodes.root if nodes.shared else nodes.names[node],
            home=nodes.home,
            listing=nodes.listing,
            cpus=nodes.cpus,
            devices=gpus,
            device_kind="gpu" if gpus else "cpu",
        )
        for node, fact in given_facts(cluster).items()
    }
    counted = request.spec.nproc_of == "gpu" and not gpus  # their number is that of the node
    spec = replace(request.spec, nproc_of="") if counted else request.spec
    return make_plan(replace(request, cluster=cluster, spec=spec), facts, identity)
