"""A process of mpirun becomes one rank: it gets the environment of `run`, by the launcher's variables and a hostfile.

mpirun -hostfile H -n 8 clusterrun --under mpi --hosts H train.py
"""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Dict, List, Mapping, NamedTuple, Sequence, Tuple

from clustertool.errors import UsageError
from clustertool.model.config.hostfile import hosts_of, read_hostfile, share_out
from clustertool.model.config.hosts import Host
from clustertool.model.config.job import JobSpec, RequestedPorts
from clustertool.model.config.job_tables import Role
from clustertool.model.launcher_variables import of_launcher, of_task
from clustertool.model.mpi.rank_variables import RankVariables, rank_variables
from clustertool.model.planning import launched_rank
from clustertool.model.planning.environment import Env, Table
from clustertool.model.planning.ranks import Seat
from clustertool.model.quantities import count

PSERVER_PORT = 7164  # the default of Paddle's own start scripts
_OF_MPI = ("OMPI_", "PMI")  # PMIX_, too
_ORDER = (
    "write the number of ranks behind each host, 'host slots=2' (for MPICH 'host:2'), and let mpirun fill the hosts in the "
    "order of the file: without --map-by, or with --map-by slot"
)


class _Layout(NamedTuple):
    """Where mpirun has put this rank. hosts: with the number of ranks that each of them has."""

    hosts: Tuple[Host, ...]
    node: int
    local_rank: int


def mpi_rank_environment(environ: Mapping[str, str], options: launched_rank.RankOptions) -> Dict[str, str]:
    """Build the environment of a rank: that of the process, and the variables that `run` sets.

    With --hosts those of a collective job, or with --server-num or --worker-num those of one with pservers. With --master those
    of torch. Raises UsageError for neither or both of --hosts and --master, for variables of the launcher without a rank or a
    size, and if they or the options do not fit the hosts; PreflightError for ports that do not exist.
    """
    if options.hosts is None and not options.master:
        fix = "--hosts FILE with the hostfile of mpirun, or --master HOST for torch: the host of rank 0"
        raise UsageError("--under mpi needs the addresses of the ranks", fix)
    if options.hosts is not None and options.master:
        raise UsageError("--hosts and --master both give the address of rank 0", "leave --master out")
    place = rank_variables(environ)
    if place.size is None:
        fix = "start it by mpirun of Open MPI or MPICH, or as a task of srun by --under slurm"
        raise UsageError(f"{place.launcher} states the rank, but not the number of ranks", fix)
    name = "-".join(["mpi", *filter(None, [environ.get("PMIX_NAMESPACE")])])
    by_torch = options.hosts is None
    computed = _for_torch(place, options, name) if by_torch else _by_hostfile(place, environ, options, name)
    ours = {name: value for name, value in computed.items() if not name.startswith(_OF_MPI)}
    return launched_rank.laid_over(environ, ours, options, _stays)


def _stays(name: str) -> bool:
    """Check whether a variable of this process stays: the launcher's own, and those that belong to no launcher or task.

    mpirun uses one task for all ranks of a node.
    """
    return name.startswith(_OF_MPI) or not (of_launcher(name) or of_task(name))


def _by_hostfile(
    place: RankVariables, environ: Mapping[str, str], options: launched_rank.RankOptions, name: str
) -> Env:
    """Compute a rank's variables by the hostfile: of a job with pservers if numbers are given, else of a collective one."""
    layout = _layout(place, options.hosts or "")
    if options.server_num or options.worker_num:
        return _with_pservers(layout, options, name)
    return launched_rank.collective_rank(layout.hosts, options, name, place.rank, layout.local_rank, environ)


def _layout(place: RankVariables, text: str) -> _Layout:
    """Find the place of this rank in the hostfile. Raises UsageError where the launcher's variables contradict it."""
    listed = hosts_of(read_hostfile(text, "--hosts"), "--hosts")
    named = [replace(host, name=host.address or host.host, host=host.address or host.host) for host in listed]
    hosts = _distribute_ranks(named, place.size or 0)
    starts = list(itertools.accumulate((host.nproc or 0 for host in hosts), initial=0))
    node = next(node for node, end in enumerate(starts[1:]) if place.rank < end)
    local_rank, size = place.rank - starts[node], hosts[node].nproc or 0
    if (place.local_rank, place.local_size) not in ((None, None), (local_rank, size)):
        what = f"mpirun has put rank {place.rank} in place {place.local_rank} of {place.local_size} on its node"
        raise UsageError(f"{what}; by --hosts it has place {local_rank} of {size} on {hosts[node].host}", _ORDER)
    return _Layout(hosts, node, local_rank)


def _distribute_ranks(hosts: Sequence[Host], size: int) -> Tuple[Host, ...]:
    """Distribute `size` ranks over the hosts in order, and return those that have ranks, with their numbers.

    Raises UsageError if the hosts have fewer slots.
    """
    try:
        return share_out(hosts, size)
    except UsageError:
        slots = sum(1 if host.nproc is None else host.nproc for host in hosts)
        what = f"mpirun has started {count(size, 'rank')}, and --hosts has {count(slots, 'slot')}"
        raise UsageError(what, _ORDER) from None


def _with_pservers(layout: _Layout, options: launched_rank.RankOptions, name: str) -> Env:
    """Compute the variables of a job with pservers: on each node, the first ranks are the pservers and the others the trainers.

    Where a node has as many ranks as trainers, all of them are trainers, and something else has started the pservers: the start
    script of mpirun. Ports are start_port + number on the node, pservers first. Raises UsageError unless all nodes have one of
    the two numbers of ranks.
    """
    servers, trainers = options.server_num or 1, options.worker_num or 1
    here = {host.nproc for host in layout.hosts}
    if here not in ({servers + trainers}, {trainers}):
        numbers = ", ".join(f"{host.nproc} on {host.host}" for host in layout.hosts[:3])
        asked = f"{count(servers, 'pserver')} and {count(trainers, 'trainer')}"
        fix = f"start {servers + trainers} ranks on each node, or {trainers} where the pservers are started by other means"
        raise UsageError(f"mpirun has started {numbers}: each node needs {asked}", fix)
    first = options.start_port or PSERVER_PORT
    job = JobSpec(
        mode="ps",
        pserver=Role(per_node=servers),
        trainer=Role(per_node=trainers),
        ports=RequestedPorts(master=first + servers + trainers, gloo=first + servers + trainers + 1),
    )

    def placed(seat: Seat) -> Seat:
        return replace(seat, port=first + seat.local_rank + (servers if seat.role == "trainer" else 0))

    table = launched_rank.job_on(layout.hosts, job, first, name, placed)
    return launched_rank.variables(table, _own_seat(table, layout, 0 if here == {trainers} else servers))


def _own_seat(table: Table, layout: _Layout, servers: int) -> Seat:
    """Find the seat of this rank. servers: how many ranks of each node are pservers."""
    role = "pserver" if layout.local_rank < servers else "trainer"
    local = layout.local_rank - (servers if role == "trainer" else 0)
    return next(one for one in table.roles[role] if (one.node, one.local_rank) == (layout.node, local))


def _for_torch(place: RankVariables, options: launched_rank.RankOptions, name: str) -> Env:
    """Compute torchrun's variables from those of the launcher, and --master.

    The number of the node is known only where all nodes have the same number of consecutive ranks. Raises UsageError with
    --server-num or --worker-num, and if the launcher states no local rank or local size.
    """
    if options.server_num or options.worker_num:
        raise UsageError("--server-num and --worker-num need the addresses of all nodes", "--hosts FILE, not --master")
    if place.local_rank is None or place.local_size is None:
        fix = "start it by mpirun of Open MPI or MPICH, or give --hosts FILE"
        raise UsageError(f"{place.launcher} states no rank on the node", fix)
    same: List[Tuple[str, int]] = [
        ("RANK ROLE_RANK CLUSTERTOOL_RANK", place.rank),
        ("WORLD_SIZE ROLE_WORLD_SIZE CLUSTERTOOL_WORLD_SIZE", place.size or 0),
        ("LOCAL_RANK CLUSTERTOOL_LOCAL_RANK", place.local_rank),
        ("LOCAL_WORLD_SIZE CLUSTERTOOL_LOCAL_WORLD_SIZE", place.local_size),
    ]
    nodes, rest = divmod(place.size or 0, place.local_size)
    if not rest and place.rank % place.local_size == place.local_rank:
        same.append(("NODE_RANK GROUP_RANK CLUSTERTOOL_NODE_RANK", place.rank // place.local_size))
        same.append(("GROUP_WORLD_SIZE CLUSTERTOOL_NNODES" + " NNODES" * (place.local_size == 1), nodes))
    return {
        **{name: str(value) for names, value in same for name in names.split()},
        **({"OMP_NUM_THREADS": "1"} if place.local_size > 1 else {}),
        "CLUSTERTOOL_ROLE": "trainer",
        "MASTER_ADDR": options.master,
        "MASTER_PORT": str(options.start_port or launched_rank.first_port(name)),
        "PYTHONUNBUFFERED": "1",
        "ROLE_NAME": "default",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_RUN_ID": name,
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
