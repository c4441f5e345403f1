"""This module computes the command line of mpirun, its hostfile, and the variables of its daemons.

Ranks are started by daemons, one on each node with trainers, and each daemon by the supervisor of its node. So mpirun must
not start a rank or a daemon by itself, on its own node neither: all hosts have names that are no addresses of any machine.
Decision 53 has the measurements.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, List, Optional, Sequence, Tuple

from clustertool.model.mpirun.daemon_launch import AGENT, HOSTFILE, RANK_VARIABLE, host_name
from clustertool.model.mpirun.mpi_options import gives

if TYPE_CHECKING:
    from clustertool.model.mpirun.implementation import Implementation

Env = Dict[str, str]
# One text for all nodes, whose paths may differ.
_RANK = ("/bin/sh", "-c", f'exec /bin/sh "${RANK_VARIABLE}"')


def by_slots(nodes: Sequence[int]) -> bool:
    """Check whether mpirun puts the ranks in their order if it fills one node after the other. nodes: of the ranks, by rank."""
    return len(set(nodes)) == 1 + sum(before != node for before, node in zip(nodes, nodes[1:]))


def hostfile(implementation: Optional[Implementation], nodes: Sequence[int]) -> str:
    """Write mpirun's hostfile. nodes: of the ranks, by rank."""
    if not by_slots(nodes):
        return "".join(f"{host_name(node)}\n" for node in nodes)
    form = "{}:{}\n" if implementation is not None and implementation.hydra else "{} slots={}\n"
    return "".join(form.format(host_name(node), nodes.count(node)) for node in dict.fromkeys(nodes))


def mpirun(
    implementation: Optional[Implementation], nodes: Sequence[int], address: str, options: Sequence[str], root: bool
) -> Tuple[str, ...]:
    """Build the arguments of mpirun.

    implementation: None: which one the nodes have is not known, as for --dry without a connection. nodes: of the ranks, by
    rank. address: of node 0, for the daemons of all nodes. options: the user's. root: the job's user is root.
    """
    own: List[str] = []
    if implementation is not None:
        own = _hydra(address) if implementation.hydra else _open_mpi(implementation, nodes, options, root)
    return ("mpirun", *own, "-n", str(len(nodes)), *options, *_RANK)


def _hydra(address: str) -> List[str]:
    """Build the options of Hydra.

    With the launcher ssh it would call /bin/sh -x. `-genvnone`: variables of node 0 are not for ranks of other nodes.
    """
    argv = ["-launcher", "rsh", "-launcher-exec", "/bin/sh", "-localhost", address]
    return [*argv, "-genvnone", "-wdir", "/", "-f", HOSTFILE]


def _open_mpi(implementation: Implementation, nodes: Sequence[int], options: Sequence[str], root: bool) -> List[str]:
    argv = ["--allow-run-as-root"] if root else []
    argv += ["--hostfile", HOSTFILE]
    if not gives(options, "map-by"):
        argv += ["--map-by", "slot" if by_slots(nodes) else "seq"]
    if not gives(options, "bind-to"):
        argv += ["--bind-to", "none"]
    option, launcher = ("--mca", "rsh") if implementation.major < 5 else ("--prtemca", "ssh")
    settings = {"": launcher, f"_{launcher}_agent": f"/bin/sh {AGENT}", f"_{launcher}_no_tree_spawn": "1"}
    for name, value in settings.items():
        argv += [option, f"plm{name}", value]
    return [*argv, "--leave-session-attached", "--wdir", "/"]


def own_environment(implementation: Optional[Implementation]) -> Env:
    """Build the variables of mpirun alone. Open MPI would pass variables of its own to all daemons."""
    hydra = implementation is not None and implementation.hydra
    return {"HYDRA_LAUNCHER_EXTRA_ARGS": AGENT} if hydra else {}


def daemon_environment(implementation: Optional[Implementation], address: str, shared: bool, crowded: bool) -> Env:
    """Build the variables of a node's daemon, and by it of its ranks.

    They must not be in the environment of mpirun, which would give those of its own node to all daemons.

    address: of the node. shared: other nodes of the job are on the same machine. crowded: the machine has fewer processors than
    ranks.
    """
    if implementation is None or implementation.hydra:
        return {}
    old = implementation.major < 5
    # Ranks get signals from their supervisor or from a scheduler: mpirun would send them once more.
    env = {f"{'OMPI' if old else 'PRTE'}_MCA_ess_base_forward_signals": "none"}
    if ":" not in address:
        loopback = address.startswith("127.")  # the interface lo has one address, and answers for all
        network = "127.0.0.0/8" if loopback else f"{address}/31"  # /32 is every interface: it shifts by 32 bits
        env["OMPI_MCA_btl_tcp_if_include"] = network
        if old:
            env["OMPI_MCA_oob_tcp_if_include"] = network
        elif not loopback:  # PRRTE never uses the loopback interface
            env["PRTE_MCA_prte_if_include"] = network
    if shared:
        env["OMPI_MCA_btl"] = "^vader" if old else "^sm"  # ranks of two nodes would take each other's shared memory
    if crowded:
        env["OMPI_MCA_mpi_yield_when_idle"] = "1"
    return env
