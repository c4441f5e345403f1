"""A run request is what the user asked `run` for, read and checked before any connection. With facts it becomes a plan."""

from __future__ import annotations

import getpass
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from clustertool.errors import UsageError
from clustertool.fleet.dispatch.workspace import Workspace
from clustertool.fleet.identity import certificate, job_id, token
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job import JobSpec, Options, read_job, valid_job_id
from clustertool.model.facts import Facts, Identity
from clustertool.model.planning.plan import HIDDEN, Plan, given_facts, plan
from clustertool.model.planning.shards import refuse_links
from clustertool.verbs import load_config
from clustertool.verbs.verb import Call


def _quiet(made: Plan) -> None:
    """No further message is printed."""


@dataclass
class RunRequest:
    """`spec` is None until job.toml is known."""

    cluster: Cluster
    options: Options
    spec: JobSpec | None
    workspace: Workspace | None
    job_id: str
    secrets: Mapping[str, str]
    passed: tuple[tuple[str, str], ...]
    dry: bool
    certificate: Future[tuple[str, str]] | None = None  # it is made while nodes are probed
    planned: Callable[[Plan], None] = _quiet  # called when the plan is made, and when the job is over or left alone
    ended: Callable[[Plan], None] = _quiet


def read_order(call: Call, options: Options, find: Callable[[], Cluster]) -> RunRequest:
    """What call.given asks for, on the cluster that `find` finds. Raises UsageError, DataError, ConfigError; no connection
    is open yet."""
    given = call.given
    folder = load_config.one_of(call, "workspace", "job-dispatch-package")
    if bool(folder) == bool(given.job_workspace):
        fix = "inv run --workspace ./job (sent to every node), or --job-workspace DIR (there already)"
        raise UsageError("give one of --workspace and --job-workspace", fix)
    if given.job_workspace and not given.job_workspace.startswith(("/", "~/")):
        fix = "give its path on the nodes: /srv/job or ~/job"
        raise UsageError(f"--job-workspace {given.job_workspace!r} is relative", fix)
    wanted(call)
    if given.job_id:
        valid_job_id(given.job_id)
    toml = load_config.workspace_toml(Path(folder)) if folder else {}
    found, workspace, spec = find(), None, None
    cluster = limited(found, options)
    if folder:
        spec = read_job(cluster, toml, options)
        workspace = load_config.workspace(call, Path(folder))
    else:
        read_job(cluster, {}, options)  # job.toml is on the nodes: only the options, for now
    secrets = {} if given.dry else load_config.secrets(cluster)
    order = RunRequest(cluster, options, spec, workspace, given.job_id, secrets, load_config.passed(cluster), given.dry)
    if spec is not None:
        check_alone(order)
    if given.skip_bad:
        order.cluster = found  # of which the first N that are fit are taken
    return order


def read_options(call: Call) -> Options:
    given = call.given
    if given.workers and given.trainers and given.workers != given.trainers:
        raise UsageError("--workers and --trainers have different values", "they are two names of one option: give one")
    return Options(
        mode=given.mode,
        script=given.script,
        nproc_per_node=given.nproc_per_node,
        devices=load_config.one_of(call, "devices", "gpus", "xpus", "npus"),
        servers=given.servers or (),
        workers=given.workers or given.trainers or (),
        heter_workers=given.heter_workers or (),
        heter_devices=given.heter_devices,
        server_num=given.server_num,
        worker_num=load_config.one_of(call, "worker-num", "trainer-num"),
        heter_worker_num=given.heter_worker_num,
        http_port=given.http_port,
        nnodes=given.nnodes,
        env=given.env or (),
        force_env=given.force_env,
        shards=given.shards or (),
        only_where_read=given.only_where_read,
        lease=given.lease,
        timeout=given.timeout,
        grace=given.grace,
        on_failure=given.on_failure,
        max_restarts=given.max_restarts,
        job_workspace=given.job_workspace,
    )


def limited(cluster: Cluster, options: Options) -> Cluster:
    """--nnodes N: the first N hosts."""
    if not options.nnodes:
        return cluster
    if not options.nnodes.isdecimal() or not 0 < int(options.nnodes) <= len(cluster.hosts):
        fix = f"a number from 1 to {len(cluster.hosts)}, the hosts of {cluster.where}"
        raise UsageError(f"--nnodes {options.nnodes!r}", fix)
    return replace(cluster, hosts=cluster.hosts[: int(options.nnodes)])


def check_alone(order: RunRequest) -> None:
    """Plan with conf.py alone: bad options and bad data are reported before any connection."""
    facts = given_facts(order.cluster)
    facts = {
        node: replace(fact, address=fact.address or f"node{node}", boot_id=f"node{node}")
        for node, fact in facts.items()
    }
    assert order.spec is not None
    counted = replace(order.spec, nproc_of="")  # --nproc-per-node gpu: the devices are not known yet
    make_plan(replace(order, spec=counted), facts, dry_identity(order))


def make_plan(order: RunRequest, facts: Mapping[int, Facts], identity: Identity) -> Plan:
    assert order.spec is not None
    if order.workspace:
        refuse_links(order.workspace.links, order.spec.shards)
        listing = order.workspace.files
    else:  # what the nodes have between them
        listing = tuple(sorted({path for fact in facts.values() for path in fact.listing}))
    hidden = tuple((name, HIDDEN) for name in order.cluster.secrets)
    return plan(order.cluster, order.spec, facts, identity, listing, order.passed + hidden)


def dry_identity(order: RunRequest) -> Identity:
    return Identity(order.job_id or "DRY")


def new_identity(order: RunRequest) -> Identity:
    """The job's id, its token and its throw-away certificate."""
    cert, key = order.certificate.result() if order.certificate else certificate()
    return Identity(order.job_id or job_id(), time.time(), getpass.getuser(), token(), cert, key)


def wanted(call: Call) -> Literal["all"] | list[tuple[str, int]]:
    """Logs to show: all, or trainers by rank."""
    if call.given.all_ranks:
        return "all"
    text = call.given.rank or "0"
    ranks = [item for item in text.split(",") if item]
    if not ranks or not all(item.isdecimal() for item in ranks):
        raise UsageError(f"--rank {text!r}", "a rank, or several: --rank 3,4")
    return [("trainer", int(item)) for item in ranks]


def check_ranks(call: Call, made: Plan) -> None:
    """Raises UsageError for a --rank that the job does not have."""
    trainers = sum(process.role == "trainer" for process in made.processes)
    ranks = wanted(call)
    for _, rank in () if ranks == "all" else ranks:
        if rank >= trainers:
            raise UsageError(f"--rank {rank}", f"the job has trainers 0 to {trainers - 1}")
