"""plan() computes the plan of a job. It is pure: `--dry` prints this value, and `run` executes it.

A seat is a process that has its rank, node and devices, but no ports and no environment yet (model/planning/ranks.py).
"""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Dict, FrozenSet, Iterable, Iterator, List, Mapping, Optional, Sequence, Tuple

from clustertool.errors import DataError, raise_all
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.config.job import JobSpec
from clustertool.model.facts import ByNode, Facts, Identity, nodes_sharing_root
from clustertool.model.masking import HIDDEN
from clustertool.model.mpi import launch_command
from clustertool.model.paths import JobPaths, base
from clustertool.model.planning import devices, ports, ranks
from clustertool.model.planning.environment import Table, endpoint, environment, fill
from clustertool.model.planning.launcher_processes import Launcher, implementation_of, launchers
from clustertool.model.planning.node_container import containers
from clustertool.model.planning.ranks import Seat
from clustertool.model.planning.shards import assign_shards
from clustertool.model.roles import LAUNCHERS

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import ContainerSpec

Pairs = Tuple[Tuple[str, str], ...]


@dataclass(frozen=True)
class PlannedProcess(Seat):
    """One process to start. `shards` and `log` are relative to the working and the job's directory.

    `ready`: a pserver's ports; once one of them listens, it is no longer what trainers wait for. If it is empty, trainers do
    not wait for this pserver.
    """

    argv: Tuple[str, ...]
    env: Pairs
    endpoint: str
    ports: Tuple[int, ...]
    ready: Tuple[int, ...]
    shards: Tuple[str, ...]
    log: str

    @property
    def launches(self) -> bool:
        """Whether it is no rank, and starts ranks."""
        return self.role in LAUNCHERS


@dataclass(frozen=True)
class PlannedNode:
    """One node's part of the plan."""

    host: Host
    facts: Facts
    job_dir: str
    work_dir: str
    device_kind: str
    processes: Tuple[PlannedProcess, ...]
    container: Optional[ContainerSpec] = None


@dataclass(frozen=True)
class Plan:
    """The plan of a job: all processes of each node, and what they need. coordinator: its address and port."""

    identity: Identity
    cluster: Cluster
    job: JobSpec
    nodes: Tuple[PlannedNode, ...]
    coordinator: Tuple[str, int]
    extra_ports: Tuple[Tuple[int, int], ...]  # (node, port) of the master, the coordinator, NCCL and gloo
    warnings: Tuple[str, ...] = ()

    @property
    def job_id(self) -> str:
        return self.identity.job_id

    @property
    def processes(self) -> Tuple[PlannedProcess, ...]:
        return tuple(process for node in self.nodes for process in node.processes)

    @property
    def hostfile(self) -> str:
        """The text of the hostfile for mpirun, "" without mpirun."""
        if not self.job.by_mpirun:
            return ""
        trainers = sorted((process.rank, process.node) for process in self.processes if process.role == "trainer")
        first = self.nodes[0]
        return launch_command.hostfile(implementation_of(first.facts, first.host.name), [node for _, node in trainers])

    @property
    def ranks(self) -> Dict[Tuple[str, int], int]:
        """The node of each rank."""
        return {(process.role, process.rank): process.node for process in self.processes}


def plan(
    cluster: Cluster, job: JobSpec, facts: ByNode, identity: Identity, listing: Sequence[str], passed: Pairs = ()
) -> Plan:
    """Make the plan of a job: the processes of each node with command, environment, devices, ports and shards.

    facts: by node id. listing: the workspace's files. passed: the values of PASS_ENV and SECRETS. Raises, with the fix,
    UsageError for options that do not fit the hosts, DataError for a missing command or shards, PreflightError for what the
    nodes lack; nothing else.
    """
    kinds, seats = _seats(cluster, job, facts, identity.job_id)
    devices.require(cluster, job, facts, kinds)
    devices.require_once(cluster, facts, kinds, seats)
    devices.require_free(cluster, job, facts, kinds, seats, identity.job_id)
    watched = job.policy.hang_timeout and not job.has_pservers
    nccl = sorted({seat.node for seat in seats if kinds[seat.node] == "gpu" and seat.devices}) if watched else ()
    chosen = ports.choose(seats, cluster, job, facts, identity.job_id, nccl)
    table = Table(identity, cluster, job, facts, seats, chosen, kinds)
    first, servers = table.roles["trainer"][0].node, table.roles["pserver"]
    nodes = _nodes(table, listing, passed)
    if job.job_workspace:
        _require_shards(nodes, job.job_workspace)
    extra = [(first, chosen.master), (0, chosen.coordinator), *chosen.ras.items()]
    if servers:
        extra.append((servers[0].node, chosen.gloo))
    coordinator = (table.addresses[0], chosen.coordinator)
    return Plan(identity, cluster, job, nodes, coordinator, tuple(extra), _warnings(table))


def with_containers(made: Plan, facts: ByNode) -> Plan:
    """Return the plan with the containers that follow from later facts, after the image was brought to nodes."""
    found = containers(made.cluster, made.job.container, facts)
    return replace(made, nodes=tuple(replace(node, container=found.get(node.host.index)) for node in made.nodes))


def _seats(cluster: Cluster, job: JobSpec, facts: ByNode, job_id: str = "") -> Tuple[Tuple[str, ...], Tuple[Seat, ...]]:
    """Choose the kind of devices of each node, place each process on a node, and divide the nodes' devices among them.

    Returns the kinds by node id, and a Seat for each process: role, rank, node and devices. Raises UsageError.
    job_id: of the job itself, whose own locks do not make a device busy.
    """
    hosts = cluster.hosts
    kinds = tuple(devices.choose_device_kind(cluster, facts[host.index]) for host in hosts)
    cards = {host.index: devices.usable(host, job, facts[host.index], kinds[host.index], job_id) for host in hosts}
    return kinds, devices.assign_cards(ranks.assign(hosts, job, facts, cards), job, cards, kinds)


def readers(cluster: Cluster, job: JobSpec, facts: ByNode, listing: Sequence[str]) -> Dict[int, FrozenSet[str]]:
    """Map each node to the shards that its trainers read: all that a dispatch needs of a plan."""
    trainers = [seat for seat in _seats(cluster, job, facts)[1] if seat.role == "trainer"]
    lists = assign_shards(listing, job.shards, len(trainers))
    found: Dict[int, FrozenSet[str]] = {host.index: frozenset() for host in cluster.hosts}
    for seat in trainers:
        found[seat.node] |= frozenset(lists[seat.rank])
    return found


def _commands(job: JobSpec, listing: Sequence[str]) -> Dict[str, Tuple[str, ...]]:
    """Choose the command that each role runs: the given one, else train.py or pserver.py, else that of the trainers.

    Raises DataError for trainers without a command and a workspace without train.py.
    """

    def script(file: str) -> Tuple[str, ...]:
        return ("python3", "-u", file) if file in listing else ()

    trainer = job.trainer.command or script("train.py")
    if not trainer:
        fix = 'add train.py, job.toml with [trainer] command, or --script "prog"'
        raise DataError("the workspace has no train.py, and no command is given", fix)
    pserver = job.pserver.command or script("pserver.py") or trainer
    heter = job.heter[0].command if job.heter else None
    return {"trainer": trainer, "pserver": pserver, "heter": heter or trainer}


def _nodes(table: Table, listing: Sequence[str], passed: Pairs) -> Tuple[PlannedNode, ...]:
    """Plan each node: directories, processes, the launchers of mpirun, and the container."""
    job = table.job
    trainers = len(table.roles["trainer"])
    shards = assign_shards(listing, job.shards, trainers) if job.shards else ((),) * trainers
    commands = _commands(job, listing)
    shared = nodes_sharing_root(table.facts)
    launching = launchers(table)
    contained = containers(table.cluster, job.container, table.facts)
    nodes = []
    for host in table.cluster.hosts:
        facts = table.facts[host.index]
        parent = host.base or base(facts.root, host.node_id, host.index in shared)
        paths = JobPaths(parent, table.identity.job_id)
        users = {**dict(table.cluster.env), **dict(host.env), **dict(passed), **dict(job.env)}
        processes = tuple(
            PlannedProcess(
                **vars(seat),
                argv=fill(commands[seat.role], _placeholders(table, seat, paths, facts.nic)),
                env=tuple(sorted({**environment(table, seat, paths, facts.nic), **users}.items())),
                endpoint=table.listed([seat]),
                ports=table.ports.of[seat.role, seat.rank],
                ready=_ready(table, seat),
                shards=shards[seat.rank] if seat.role == "trainer" else (),
                log=paths.log(seat.role, seat.rank),
            )
            for seat in table.seats
            if seat.node == host.index
        )
        processes += tuple(_launcher(one, users, paths) for one in launching.get(host.index, ()))
        work_dir = below_home(job.job_workspace, facts.home) if job.job_workspace else paths.dir
        kind, container = table.kinds[host.index], contained.get(host.index)
        nodes.append(PlannedNode(host, facts, paths.dir, work_dir, kind, processes, container))
    return tuple(nodes)


def _launcher(one: Launcher, users: Mapping[str, str], paths: JobPaths) -> PlannedProcess:
    """Build the process of a launcher: without endpoint, ports and shards."""
    env = tuple(sorted({**one.env, **users}.items()))
    log = paths.log(one.seat.role, one.seat.rank)
    return PlannedProcess(**vars(one.seat), argv=one.argv, env=env, endpoint="", ports=(), ready=(), shards=(), log=log)


def _ready(table: Table, seat: Seat) -> Tuple[int, ...]:
    """List the ports of a pserver of which one must be open before trainers start; () if they do not wait for this process.

    A pserver listens on its own port. Paddle's first one opens gloo's before, and there waits for all trainers.
    """
    if seat.role != "pserver" or table.job.pserver.ready == "started":
        return ()
    first = table.first_port(seat)
    return (first, table.ports.gloo) if seat.rank == 0 else (first,)


def _require_shards(nodes: Sequence[PlannedNode], folder: str) -> None:
    """Check that each node has the shards of its own trainers, since with --job-workspace none are sent.

    folder: --job-workspace, for the errors. Raises the DataErrors of all nodes that lack some.
    """
    errors = []
    for node in nodes:
        there = set(node.facts.listing)
        missing = [(process.rank, path) for process in node.processes for path in process.shards if path not in there]
        if missing:
            rank, path = missing[0]
            more = f" (of {len(missing)} that are missing)" if len(missing) > 1 else ""
            what = f"{path!r}, which trainer {rank} reads, is not in {folder}{more}"
            fix = "copy each shard to the node whose trainer reads it: its number modulo the trainers"
            errors.append(DataError(what, fix, node.host.name))
    raise_all(errors)


def below_home(path: str, home: str) -> str:
    """Expand --job-workspace as this node means it: `~` is the home there, and so is where a relative path begins."""
    return posixpath.normpath(posixpath.join(home, path[2:] if path.startswith("~/") else "" if path == "~" else path))


def _placeholders(table: Table, seat: Seat, paths: JobPaths, nic: str) -> Dict[str, str]:
    """Compute the values of {port}, {rank} and other names in the command of a process. nic: the node's interface."""
    servers = table.roles["pserver"]
    return {
        "port": str(table.first_port(seat)),
        "ports_num": str(table.cluster.ports_num),
        "ports_num_for_sparse": str(table.cluster.ports_num_for_sparse),
        "num_trainers": str(len(table.roles["trainer"])),
        "pservers": table.servers,
        "pserver_port": str(table.first_port(servers[0])) if servers else "",
        "nic": nic,
        "rank": str(seat.rank),
        "log_dir": paths.of("log"),
    }


def _warnings(table: Table) -> Tuple[str, ...]:
    """List the warnings about addresses, ports and devices of the plan."""
    found: List[str] = []
    names = [host.name for host in table.cluster.hosts]
    if any(":" in address for address in table.addresses):
        found.append('a training address is IPv6; Paddle splits endpoints on ":" and cannot use it')
        mpi = implementation_of(table.facts[0], names[0]) if table.job.by_mpirun else None
        if mpi is not None and mpi.hydra:
            found.append(f"a training address is IPv6; {mpi.text} needs IPv4 between nodes: use Open MPI")
    for node, busy, port in table.ports.moved:
        user = table.facts[node].holder(busy)
        found.append(f"{names[node]}: port {busy} (PADDLE_PORT) is in use by {user}, pservers take {port}")
    for nic, nodes in _one_interface(table):
        shared = ", ".join(names[node] for node in nodes)
        found.append(
            f"{shared} are one machine: each pserver that gets --nics={nic} listens on the first address of {nic}"
        )
    found += devices.shared_warnings(table.cluster, table.facts, table.kinds, table.seats)
    found += devices.unequal_warnings(table.cluster, table.job, table.facts, table.kinds, table.seats)
    found += devices.unallocated_warnings(table.cluster, table.facts, table.kinds)
    for seat, kind in devices.missing_devices(table.seats, table.job, table.kinds):
        stage = f"stage {seat.stage} of heter trainers wants {kind} (--heter-devices)"
        found.append(f"{names[seat.node]}: {stage}, none is known there")
    if "health" not in table.cluster.checks_off:
        found += devices.fault_warnings(table.cluster, table.seats, table.facts, table.kinds)
    return tuple(found)


def _one_interface(table: Table) -> Iterator[Tuple[str, List[int]]]:
    """Yield interfaces that several pservers of one machine get by {nic}, with their nodes: Paddle v2 knows no addresses."""
    if not any("{nic}" in text for text in table.job.pserver.command or ()):
        return
    nodes: Dict[Tuple[str, str], List[int]] = {}
    for node in dict.fromkeys(seat.node for seat in table.roles["pserver"]):
        nodes.setdefault((table.facts[node].machine, table.facts[node].nic), []).append(node)
    yield from ((nic, several) for (_, nic), several in nodes.items() if nic and len(several) > 1)


def as_dict(plan: Plan) -> Dict[str, Any]:
    """Convert the plan for users and scripts: values of SECRETS are ***, keys and tokens are not in it."""
    return {
        "job": plan.job_id,
        "mode": plan.job.mode,
        "phases": list(plan.job.roles),
        "lead": endpoint(*plan.coordinator),
        "policy": dict(vars(plan.job.policy)),
        "warnings": list(plan.warnings),
        "nodes": [
            {
                "node": node.host.index,
                "name": node.host.name,
                "address": node.facts.address,
                "dir": node.job_dir,
                "work_dir": node.work_dir,
                **({"container": _container(node.container)} if node.container else {}),
                "processes": [_process(process, plan.cluster.secrets) for process in node.processes],
            }
            for node in plan.nodes
        ],
    }


def _container(made: ContainerSpec) -> Dict[str, object]:
    """Convert the description of a container for users: without uid and groups, the image by its name."""
    hidden = ("reference", "uid", "groups")
    return {**{name: value for name, value in made.items() if name not in hidden}, "image": made["reference"]}


def _process(process: PlannedProcess, secrets: Sequence[str]) -> Dict[str, object]:
    """Convert a process for users: without the marker, with masked SECRETS."""
    shown = ("role", "rank", "local_rank", "endpoint", "ports", "devices", "shards")
    return {
        **{name: getattr(process, name) for name in shown},
        "command": process.argv,
        "log": process.log,
        "env": masked((pair for pair in process.env if pair[0] != "CLUSTERTOOL_MARK"), secrets),
    }


def masked(variables: Iterable[Tuple[str, str]], secrets: Sequence[str]) -> Dict[str, str]:
    """Map variables to their values, with *** for those of SECRETS."""
    return {name: HIDDEN if name in secrets else value for name, value in variables}


def needs_probe(cluster: Cluster, job: JobSpec) -> bool:
    """Check whether the plan needs a probe. False when all that it would answer is given: `--dry` opens no connection then."""
    for host in cluster.hosts:
        kind = devices.choose_device_kind(cluster, Facts(host.index, device_kind="auto"))
        if job.auto_devices:
            return True
        known = kind == "cpu" or (kind != "auto" and (job.devices is not None or host.devices is not None))
        root = host.root_dir or cluster.root_dir
        ports_known = bool(cluster.start_port or job.has_pservers) and bool(cluster.lead_port)
        if not (host.address and known and root.startswith("/") and ports_known) or cluster.nic or host.interface:
            return True
    return bool(job.job_workspace or job.container) or job.nproc_of in ("cpu", "auto") or job.by_mpirun


def given_facts(cluster: Cluster) -> Dict[int, Facts]:
    """Build facts for a dry run without a probe. The address identifies the machine: same address, same set of ports."""
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
