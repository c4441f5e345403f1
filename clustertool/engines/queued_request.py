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
    """Raise UsageError for options that have no meaning for a job that waits in a queue."""
    wish = request.wish
    options = (("--resume", wish.resume not in ("", FRESH)), ("--wait", wish.wait), ("--skip-bad", wish.skip_bad))
    for option, given in options:
        if given:
            raise UsageError(f"{option} is not possible with the engine {request.cluster.engine}", "leave it out")


def refuse_lease(spec: JobSpec, fix: str) -> None:
    """Raise UsageError for --lease. fix: what limits a job in its place."""
    if spec.policy.lease:
        raise UsageError("--lease needs a command that follows the job, and a queued job starts without one", fix)


def typed_settings(request: RunRequest) -> dict[str, object]:
    """Read the settings of the command line, by their names in the settings."""
    typed = dict(request.wish.settings)
    if request.options.nnodes and not is_range(request.options.nnodes):
        typed["nodes"] = request.options.nnodes
    return typed


def with_usual_command(spec: JobSpec) -> JobSpec:
    """Give the trainers the usual command where the files of the job are not known here."""
    return replace(spec, trainer=replace(spec.trainer, command=spec.trainer.command or USUAL))


def shown_command(spec: JobSpec) -> str:
    """Format the trainers' command for lists of jobs, cut."""
    return shlex.join(spec.trainer.command or USUAL)[:_COMMAND]


@dataclass(frozen=True)
class ExpectedNodes:
    """names: one of each node.

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
        found = tuple(Host(number, name, address=name, name=name) for number, name in enumerate(self.names))
        return tuple(replace(host, roles=((role, None),)) for host, role in zip(found, self.roles)) or found


def expected_plan(request: RunRequest, nodes: ExpectedNodes, identity: Identity) -> Plan:
    """Plan a job for nodes that are expected. Raises UsageError, DataError."""
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
