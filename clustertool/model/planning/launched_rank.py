"""This module plans one rank that another launcher has started: the environment that `run` would give it.

Each process computes the whole job by itself, so all of them must come to the same ranks, hosts and ports.
"""

from __future__ import annotations

import re
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from clustertool.model.cards import VARIABLES, allocated_names, has_mig_instance
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.config.job import JobSpec
from clustertool.model.facts import Facts, Identity
from clustertool.model.launcher_variables import SHELL_DEFAULTS
from clustertool.model.paths import JobPaths
from clustertool.model.planning import ports, ranks
from clustertool.model.planning.environment import Env, Table, environment
from clustertool.model.planning.ranks import Seat

_BLOCKS, _BLOCK = 300, 64  # of ports; all are below the kernel's own range
# Of a job that the tool has started: its directory, its id, and what belongs to them. There is no such job here.
_OF_JOBS = """CLUSTERTOOL_JOB CLUSTERTOOL_MARK CLUSTERTOOL_OUTPUT CLUSTERTOOL_SHARDS PADDLE_GLOO_FS_PATH
    TORCHELASTIC_ERROR_FILE""".split()


class RankOptions(NamedTuple):
    """What the command line of a rank states.

    start_port: of the first rank on each node, 0: one that the launch determines. own_device: LOCAL_RANK is 0, for programs of
    which each task sees one device only. hosts: the text of a hostfile, None: not given. master: the host of rank 0, "": not
    given. server_num, worker_num: pservers and trainers per node, 0: not given. devices: the kind and the ids of this node's
    devices, from their files.
    """

    start_port: int = 0
    own_device: bool = False
    hosts: Optional[str] = None
    master: str = ""
    server_num: int = 0
    worker_num: int = 0
    devices: Tuple[str, Tuple[int, ...]] = ("cpu", ())


def first_port(launch: str) -> int:
    """Compute the port of the first rank on each node from the numbers in the name of the launch.

    So two launches on one node rarely have the same.
    """
    return ports.LOWEST_PORT + _BLOCK * (sum(map(int, re.findall("[0-9]+", launch))) % _BLOCKS)


def job_on(
    hosts: Sequence[Host], job: JobSpec, start_port: int, name: str, place: Callable[[Seat], Seat] = lambda seat: seat
) -> Table:
    """Assign the seats and ports of a job on these hosts, whose names are their addresses, without devices; return its table.

    place: gives seats the ports that they must have.
    """
    facts = {host.index: Facts(host.index, address=host.host, boot_id=host.host, root="/") for host in hosts}
    cluster = Cluster(tuple(hosts), device_kind="cpu", start_port=start_port)
    assigned = ranks.assign(hosts, job, facts, {host.index: () for host in hosts})
    seats = tuple(place(seat) for seat in assigned)
    chosen = ports.choose(seats, cluster, job, facts, name)
    return Table(Identity(name), cluster, job, facts, seats, chosen, ("cpu",) * len(hosts))


def variables(table: Table, seat: Seat) -> Env:
    """Compute the variables of `run` for this seat, without those that belong to the directory of a job."""
    computed = environment(table, seat, JobPaths("/", table.identity.job_id), "")
    return {name: value for name, value in computed.items() if name not in _OF_JOBS}


def with_device(computed: Env, environ: Mapping[str, str], local_rank: int, found: Tuple[str, Sequence[int]]) -> Env:
    """Add Paddle's flag for its device to the variables of a collective job's rank; return them unchanged without devices.

    The launcher's own variable for devices stays as it is; only of MIG instances a rank sees its own one, because CUDA shows a
    process the first. found: the kind and the ids of the node's devices, for a launcher that has no such variable.
    """
    flags = _flags(environ, local_rank, found)
    if not flags:
        return computed
    return {**{name: value for name, value in computed.items() if name != "PADDLE_DISTRI_BACKEND"}, **flags}


def collective_rank(
    hosts: Sequence[Host], options: RankOptions, name: str, rank: int, local_rank: int, environ: Mapping[str, str]
) -> Env:
    """Compute the variables of `run` for a rank of a collective job on these hosts. name: of the launch."""
    table = job_on(hosts, JobSpec(), options.start_port or first_port(name), name)
    return with_device(variables(table, table.seats[rank]), environ, local_rank, options.devices)


def _flags(environ: Mapping[str, str], local_rank: int, found: Tuple[str, Sequence[int]]) -> Env:
    """Return the variables that select a rank's device, by the launcher's variable, else by `found`; {} without devices."""
    for kind, (variable, selected) in VARIABLES.items():
        names = allocated_names(kind, environ)
        if has_mig_instance(names):
            return {variable: names[local_rank % len(names)], selected: "0"}
        if names:
            return {selected: str(local_rank % len(names))}
    kind, ids = found
    if ids and kind in VARIABLES and VARIABLES[kind][0] not in environ:
        return {VARIABLES[kind][1]: str(local_rank % len(ids))}
    return {}


def laid_over(
    environ: Mapping[str, str], computed: Env, options: RankOptions, kept: Callable[[str], bool]
) -> Dict[str, str]:
    """Build the environment of the rank's program: variables of this process that stay, and over them the computed ones.

    kept: whether a variable of this process stays. SHELL_DEFAULTS that this process has are not replaced. With own_device
    LOCAL_RANK is 0, in `computed` as well.
    """
    if options.own_device:
        computed["LOCAL_RANK"] = "0"
    stay = {name: value for name, value in environ.items() if kept(name)}
    return {**stay, **computed, **{name: environ[name] for name in SHELL_DEFAULTS if name in environ}}


def hosts_with_ranks(hosts: Sequence[str], counts: Sequence[int]) -> List[Host]:
    """Create a host for each name, with its number of ranks."""
    pairs = enumerate(zip(hosts, counts))
    return [Host(index=index, host=name, name=name, address=name, nproc=number) for index, (name, number) in pairs]
