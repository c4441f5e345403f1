"""plan() computes the plan of a job. It is pure: `--dry` prints this value, and `run` executes it."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass
from typing import Any, Dict, FrozenSet, List, Mapping, Sequence, Tuple

from clustertool.errors import DataError, raise_all
from clustertool.model import paths as p
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.config.job import JobSpec, Policy, Role
from clustertool.model.facts import Facts, Identity, sharing
from clustertool.model.planning import devices, ports, ranks
from clustertool.model.planning.environment import Table, endpoint, environment, fill
from clustertool.model.planning.ranks import Seat
from clustertool.model.planning.shards import assign_shards
from clustertool.model.roles import MODES

Pairs = Tuple[Tuple[str, str], ...]
HIDDEN = "***"


@dataclass(frozen=True)
class PlannedProcess:
    """One process to start. `shards` and `log` are relative to the working and the job's directory.

    `ready`: a pserver's ports; once one of them listens, it is no longer what trainers wait for. If it is empty, trainers do
    not wait for this pserver.
    """

    role: str
    rank: int
    local_rank: int
    node: int
    argv: Tuple[str, ...]
    env: Pairs
    endpoint: str
    ports: Tuple[int, ...]
    ready: Tuple[int, ...]
    devices: Tuple[int, ...]
    shards: Tuple[str, ...]
    log: str


@dataclass(frozen=True)
class PlannedNode:
    """One node's part of the plan."""

    index: int
    name: str
    address: str
    root: str
    base: str
    job_dir: str
    work_dir: str
    entry: str
    hostname: str
    here: bool
    device_kind: str
    processes: Tuple[PlannedProcess, ...]


@dataclass(frozen=True)
class Plan:
    """`phases`: the roles in the order of their start. When every pserver listens, all trainers and heter trainers start."""

    job_id: str
    mode: str
    phases: Tuple[str, ...]
    nodes: Tuple[PlannedNode, ...]
    lead: Tuple[str, int]
    policy: Policy
    extra_ports: Tuple[Tuple[int, int], ...]  # (node, port) of the master, gloo and the lead
    prelude: str
    ld_library_path: str
    first_path: str
    secrets: Tuple[str, ...]
    output: str
    log_dir: str
    identity: Identity
    warnings: Tuple[str, ...] = ()

    @property
    def processes(self) -> Tuple[PlannedProcess, ...]:
        return tuple(process for node in self.nodes for process in node.processes)


def plan(
    cluster: Cluster,
    job: JobSpec,
    facts: Mapping[int, Facts],
    identity: Identity,
    listing: Sequence[str],
    passed: Pairs = (),
) -> Plan:
    """Cluster, job, facts per node id, identity, the workspace's files and the values of PASS_ENV and SECRETS -> Plan.

    Raises UsageError, DataError, PreflightError with the fix; never anything else.
    """
    hosts = cluster.hosts
    kinds, seats = _seats(cluster, job, facts, identity.job_id)
    devices.require(cluster, job, facts, kinds)
    devices.require_free(cluster, job, facts, kinds, seats, identity.job_id)
    table = Table(
        identity.job_id,
        identity.token,
        job,
        cluster,
        seats,
        ports.choose(seats, cluster, job, facts, identity.job_id),
        tuple(facts[host.index].address for host in hosts),
        kinds,
    )
    trainers = len(table.role("trainer"))
    shards = assign_shards(listing, job.shards, trainers) if job.shards else ((),) * trainers
    commands = _commands(job, listing)
    shared = sharing(facts)
    nodes = []
    for host in hosts:
        paths = p.JobPaths(p.base(facts[host.index].root, host.index, host.index in shared), identity.job_id)
        nodes.append(_node(table, job, host, facts[host.index], paths, commands, shards, passed))
    if job.job_workspace:
        _require_shards(nodes, facts, job.job_workspace)
    first = table.role("trainer")[0].node
    extra = [(first, table.ports.master), (0, table.ports.lead)]
    if table.role("pserver"):
        extra.append((table.role("pserver")[0].node, table.ports.gloo))
    return Plan(
        job_id=identity.job_id,
        mode=job.mode,
        phases=MODES[job.mode],
        nodes=tuple(nodes),
        lead=(table.addresses[0], table.ports.lead),
        policy=job.policy,
        extra_ports=tuple(extra),
        prelude=cluster.prelude,
        ld_library_path=cluster.ld_library_path,
        first_path=cluster.first_path,
        secrets=cluster.secrets,
        output=job.output,
        log_dir=job.log_dir,
        identity=identity,
        warnings=_warnings(cluster, table, facts),
    )


def _seats(
    cluster: Cluster, job: JobSpec, facts: Mapping[int, Facts], job_id: str = ""
) -> Tuple[Tuple[str, ...], Tuple[Seat, ...]]:
    """The devices' kind of each node, and all processes' seats."""
    hosts = cluster.hosts
    kinds = tuple(devices.kind_of(cluster, facts[host.index]) for host in hosts)
    cards = {host.index: devices.usable(host, job, facts[host.index], kinds[host.index], job_id) for host in hosts}
    return kinds, devices.deal(ranks.assign(hosts, job, facts, cards), job, cards, kinds)


def readers(
    cluster: Cluster, job: JobSpec, facts: Mapping[int, Facts], listing: Sequence[str]
) -> Dict[int, FrozenSet[str]]:
    """Node -> the shards that its trainers read. A dispatch needs no more of a plan than that."""
    trainers = [seat for seat in _seats(cluster, job, facts)[1] if seat.role == "trainer"]
    lists = assign_shards(listing, job.shards, len(trainers))
    found: Dict[int, FrozenSet[str]] = {host.index: frozenset() for host in cluster.hosts}
    for seat in trainers:
        found[seat.node] |= frozenset(lists[seat.rank])
    return found


def _commands(job: JobSpec, listing: Sequence[str]) -> Dict[str, Tuple[str, ...]]:
    """What each role runs; a workspace without a command and without train.py is a DataError."""

    def command(role: Role, name: str, file: str) -> Tuple[str, ...]:
        if role.command:
            return role.command
        if file in listing:
            return ("python3", "-u", file)
        if name == "pserver":
            return trainer
        fix = 'add train.py, job.toml with [trainer] command, or --script "prog"'
        raise DataError("the workspace has no train.py, and no command is given", fix)

    trainer: Tuple[str, ...] = ()
    trainer = command(job.trainer, "trainer", "train.py")
    heter = job.heter[0].command if job.heter else None
    return {"trainer": trainer, "pserver": command(job.pserver, "pserver", "pserver.py"), "heter": heter or trainer}


def _node(
    table: Table,
    job: JobSpec,
    host: Host,
    facts: Facts,
    paths: p.JobPaths,
    commands: Mapping[str, Tuple[str, ...]],
    shards: Sequence[Tuple[str, ...]],
    passed: Pairs,
) -> PlannedNode:
    """One node's processes. Eight inputs, each used once: they are what a node's part is made of."""
    processes = []
    users: Dict[str, str] = {**dict(table.cluster.env), **dict(host.env), **dict(passed), **dict(job.env)}
    for seat in table.seats:
        if seat.node != host.index:
            continue
        env = {**environment(table, seat, paths, facts.nic), **users}
        processes.append(
            PlannedProcess(
                role=seat.role,
                rank=seat.rank,
                local_rank=seat.local_rank,
                node=seat.node,
                argv=fill(commands[seat.role], _placeholders(table, seat, paths, facts.nic)),
                env=tuple(sorted(env.items())),
                endpoint=table.endpoint(seat),
                ports=table.ports.of[seat.role, seat.rank],
                ready=_ready(table, seat),
                devices=seat.devices,
                shards=shards[seat.rank] if seat.role == "trainer" else (),
                log=paths.log(seat.role, seat.rank),
            )
        )
    work_dir = _below_home(job.job_workspace, facts.home) if job.job_workspace else paths.dir
    return PlannedNode(
        host.index,
        host.name,
        facts.address,
        facts.root,
        paths.base,
        paths.dir,
        work_dir,
        host.entry,
        facts.hostname,
        host.here,
        table.kinds[host.index],
        tuple(processes),
    )


def _ready(table: Table, seat: Seat) -> Tuple[int, ...]:
    """A pserver listens on its own port. Paddle's first one opens gloo's before, and there waits for all trainers."""
    if seat.role != "pserver" or table.job.pserver.ready == "started":
        return ()
    first = table.ports.of[seat.role, seat.rank][:1]
    return (*first, table.ports.gloo) if seat.rank == 0 else first


def _require_shards(nodes: Sequence[PlannedNode], facts: Mapping[int, Facts], folder: str) -> None:
    """With --job-workspace no shards are sent: each node must have those of its own trainers; missing ones are reported."""
    errors = []
    for node in nodes:
        there = set(facts[node.index].listing)
        missing = [(process.rank, path) for process in node.processes for path in process.shards if path not in there]
        if missing:
            rank, path = missing[0]
            more = f" (of {len(missing)} that are missing)" if len(missing) > 1 else ""
            what = f"{path!r}, which trainer {rank} reads, is not in {folder}{more}"
            fix = "copy each shard to the node whose trainer reads it: its number modulo the trainers"
            errors.append(DataError(what, fix, node.name))
    raise_all(errors)


def _below_home(path: str, home: str) -> str:
    """--job-workspace as this node means it: `~` is the home there, and so is where a relative path begins."""
    return posixpath.normpath(posixpath.join(home, path[2:] if path.startswith("~/") else "" if path == "~" else path))


def _placeholders(table: Table, seat: Seat, paths: p.JobPaths, nic: str) -> Dict[str, str]:
    servers = table.role("pserver")
    addresses = dict.fromkeys(table.addresses[server.node] for server in servers)
    return {
        "port": str(table.ports.of[seat.role, seat.rank][0]),
        "ports_num": str(table.cluster.ports_num),
        "ports_num_for_sparse": str(table.cluster.ports_num_for_sparse),
        "num_trainers": str(len(table.role("trainer"))),
        "pservers": ",".join(addresses),
        "pserver_port": str(table.ports.of["pserver", servers[0].rank][0]) if servers else "",
        "nic": nic,
        "rank": str(seat.rank),
        "log_dir": paths.of("log"),
    }


def _warnings(cluster: Cluster, table: Table, facts: Mapping[int, Facts]) -> Tuple[str, ...]:
    found: List[str] = []
    if any(":" in address for address in table.addresses):
        found.append('a training address is IPv6; Paddle splits endpoints on ":" and cannot use it')
    for node, busy, port in table.ports.moved:
        user = facts[node].holder(busy)
        found.append(
            f"{cluster.hosts[node].name}: port {busy} (PADDLE_PORT) is in use by {user}, the pserver takes {port}"
        )
    for seat, kind in devices.missing(table.seats, table.job, table.kinds):
        stage = f"stage {seat.stage} of heter trainers wants {kind} (--heter-devices)"
        found.append(f"{cluster.hosts[seat.node].name}: {stage}, none is known there")
    if "health" not in cluster.checks_off:
        found += devices.sick(cluster, table.seats, facts, table.kinds)
    return tuple(found)


def as_dict(plan: Plan) -> Dict[str, Any]:
    """The plan for users and scripts: values of SECRETS are ***, keys and tokens are not in it."""
    return {
        "job": plan.job_id,
        "mode": plan.mode,
        "phases": list(plan.phases),
        "lead": endpoint(*plan.lead),
        "policy": dict(vars(plan.policy)),
        "warnings": list(plan.warnings),
        "nodes": [
            {
                "node": node.index,
                "name": node.name,
                "address": node.address,
                "dir": node.job_dir,
                "work_dir": node.work_dir,
                "processes": [_process(process, plan.secrets) for process in node.processes],
            }
            for node in plan.nodes
        ],
    }


def _process(process: PlannedProcess, secrets: Sequence[str]) -> Dict[str, Any]:
    return {
        "role": process.role,
        "rank": process.rank,
        "local_rank": process.local_rank,
        "endpoint": process.endpoint,
        "ports": list(process.ports),
        "devices": list(process.devices),
        "shards": list(process.shards),
        "command": list(process.argv),
        "log": process.log,
        "env": {
            name: HIDDEN if name in secrets else value for name, value in process.env if name != "CLUSTERTOOL_MARK"
        },
    }


def needs_probe(cluster: Cluster, job: JobSpec) -> bool:
    """False when everything that the probe would answer is given, so that `--dry` opens no connection."""
    for host in cluster.hosts:
        kind = devices.kind_of(cluster, Facts(host.index, device_kind="auto"))
        if job.auto_devices:
            return True
        known = kind == "cpu" or (kind != "auto" and (job.devices is not None or host.devices is not None))
        root = host.root_dir or cluster.root_dir
        ports_known = bool(cluster.start_port or job.mode != "collective") and bool(cluster.lead_port)
        if not (host.address and known and root.startswith("/") and ports_known) or cluster.nic:
            return True
    return bool(job.job_workspace) or job.nproc_of in ("cpu", "auto")


def given_facts(cluster: Cluster) -> Dict[int, Facts]:
    """Facts for a dry run without a probe. The address identifies the machine: same address, same set of ports."""
    return {
        host.index: Facts(
            node=host.index,
            address=host.address,
            root=host.root_dir or cluster.root_dir,
            boot_id=host.address,
            root_id=f"{host.address}:{host.root_dir or cluster.root_dir}",
            device_kind="gpu" if host.devices else "cpu",
        )
        for host in cluster.hosts
    }
