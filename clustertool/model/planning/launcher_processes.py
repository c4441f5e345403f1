"""A job in mode mpi has processes besides its ranks: one mpirun on node 0, and a daemon on each node with trainers."""

from __future__ import annotations

from collections import Counter
from typing import Dict, List, NamedTuple, Tuple

from clustertool.errors import PreflightError, UsageError
from clustertool.model.facts import Facts
from clustertool.model.mpi import launch_command
from clustertool.model.mpi.launch_command import NO_MPI_FIX, SUPPORTED, Implementation, read_implementation
from clustertool.model.planning.environment import Env, Table, process_variables
from clustertool.model.planning.ranks import Seat
from clustertool.model.roles import MPI_DAEMON, MPIRUN


class Launcher(NamedTuple):
    """One process: what it runs, and its environment without the user's variables."""

    seat: Seat
    argv: Tuple[str, ...]
    env: Env


def launchers(table: Table) -> Dict[int, List[Launcher]]:
    """Build mpirun's process for node 0 and a daemon for each node with trainers; {} in other modes than mpi.

    Raises PreflightError if there is no fitting mpirun, UsageError if it cannot place the ranks.
    """
    if not table.job.by_mpirun:
        return {}
    implementation = implementation_of(table.facts[0], table.cluster.hosts[0].name)
    nodes = [seat.node for seat in table.roles["trainer"]]
    if implementation is not None and implementation.hydra and not launch_command.by_slots(nodes):
        fix = "name the workers of each node next to each other, or leave --workers out"
        raise UsageError("MPICH cannot put ranks that do not follow each other on one node (--workers)", fix)
    root = table.facts[0].user == "root"
    argv = launch_command.mpirun(implementation, nodes, table.addresses[0], table.job.mpi.options, root)
    seat = Seat(MPIRUN, 0, 0, 0, 0, (), 0)
    variables = {**process_variables(table, seat), **launch_command.own_environment(implementation)}
    found = {0: [Launcher(seat, argv, variables)]}
    machines = Counter(table.facts[node].machine for node in dict.fromkeys(nodes))
    ranks = Counter(table.facts[node].machine for node in nodes)
    for node in sorted(set(nodes)):
        fact, seat = table.facts[node], Seat(MPI_DAEMON, node, 0, node, 0, (), 0)
        shared, crowded = machines[fact.machine] > 1, ranks[fact.machine] > fact.cpus
        env = launch_command.daemon_environment(implementation, fact.address, shared, crowded)
        name = implementation.daemon if implementation is not None else MPI_DAEMON
        found.setdefault(node, []).append(Launcher(seat, (name,), {**process_variables(table, seat), **env}))
    return found


def implementation_of(fact: Facts, name: str) -> "Implementation | None":
    """Read the implementation of a node's mpirun; None where the node was not asked.

    name: of the node. Raises PreflightError if the node has no mpirun, or one that is not supported.
    """
    if fact.mpirun is None:
        return None
    found = read_implementation(fact.mpirun)
    if found is None or not found.supported:
        what = f"mpirun is of {found.text}" if found else "there is no mpirun of Open MPI or MPICH"
        raise PreflightError(f"{what}; mode mpi needs {SUPPORTED}", NO_MPI_FIX, name)
    return found
