"""This module computes the command line of mpirun, its hostfile, and the variables of its daemons.

The implementation of MPI decides their form: it is read from what `mpirun --version` prints.
Ranks are started by daemons, one on each node with trainers, and each daemon by the supervisor of its node. So mpirun must
not start a rank or a daemon by itself, on its own node neither: all hosts have names that are no addresses of any machine.
Decision 53 has the measurements.
"""

from __future__ import annotations

import re
from typing import Dict, List, NamedTuple, Optional, Sequence, Tuple

from clustertool.model.mpi.daemon_launch import AGENT, HOSTFILE, RANK_VARIABLE, host_name

Env = Dict[str, str]


OPEN_MPI, MPICH = "Open MPI", "MPICH"
_OLDEST = 4  # version of Open MPI, and of MPICH, with which the options were tried
_OPEN_MPI = re.compile(r"\((?:Open MPI|OpenRTE)\)\s+v?(\d+(?:\.\w+)*)")
_HYDRA = re.compile(r"HYDRA build details:\s+Version:\s+v?(\d+(?:\.\w+)*)", re.IGNORECASE)
_OTHERS = {"Intel(R) MPI": "Intel MPI", "MVAPICH": "MVAPICH", "Platform MPI": "Platform MPI", "PRRTE": "PRRTE"}


class Implementation(NamedTuple):
    """An implementation of MPI: its name, and its version as it is printed, "4.1.4"."""

    name: str
    version: str

    @property
    def major(self) -> int:
        """The first number of the version."""
        return int(self.version.partition(".")[0])

    @property
    def supported(self) -> bool:
        """Whether the tool knows its options."""
        return self.name in (OPEN_MPI, MPICH) and self.major >= _OLDEST

    @property
    def hydra(self) -> bool:
        """Whether Hydra starts its ranks: it is MPICH."""
        return self.name == MPICH

    @property
    def daemon(self) -> str:
        """The program that starts the ranks of a node."""
        return "hydra_pmi_proxy" if self.hydra else "orted" if self.major < 5 else "prted"

    @property
    def text(self) -> str:
        """Its name and version: "Open MPI 4.1.4"."""
        return f"{self.name} {self.version}"


SUPPORTED = f"Open MPI {_OLDEST} and 5, MPICH {_OLDEST} and 5"
NO_MPI_FIX = "install Open MPI or MPICH on every node, or activate it by PRELUDE (module load openmpi) or PATH in ENV"
DAEMONS = ("orted", "prted", "hydra_pmi_proxy")


def read_implementation(text: str) -> Optional[Implementation]:
    """Parse the output of `mpirun --version` to the implementation, also one that is not supported; None for an unknown one.

    The version of one that is not supported is "0" if none is printed.
    """
    for sign, name in _OTHERS.items():
        if sign in text:
            version = re.search(r"\d+(?:\.\w+)*", text[text.index(sign) + len(sign) :])
            return Implementation(name, version.group() if version else "0")
    for name, pattern in ((OPEN_MPI, _OPEN_MPI), (MPICH, _HYDRA)):
        found = pattern.search(text)
        if found:
            return Implementation(name, found.group(1))
    return None


# Options that would contradict the plan: how many ranks, on which hosts, how daemons start, in which folder.
_NUMBER = "the plan has the number of ranks: --nproc-per-node, or per_node"
_HOSTS = "HOSTS in conf.py names the hosts"
_DAEMONS = "the tool starts the daemons of mpirun itself"
_REFUSED: Dict[str, str] = {
    **dict.fromkeys(("n", "np", "c", "npernode", "N", "ppn", "perhost", "npersocket"), _NUMBER),
    **dict.fromkeys(
        ("hostfile", "machinefile", "default-hostfile", "host", "hosts", "H", "f", "rf", "rankfile"), _HOSTS
    ),
    **dict.fromkeys(("launcher", "launcher-exec", "bootstrap", "bootstrap-exec", "rmk", "localhost", "plm"), _DAEMONS),
    **dict.fromkeys(("wdir", "wd", "dir"), "the working directory of ranks is that of the job"),
    **dict.fromkeys(("configfile", "app"), "the tool states the program"),
    **dict.fromkeys(("x", "env", "genv", "genvlist", "genvall", "envlist", "envall"), "write variables into [env]"),
    "daemonize": _DAEMONS,
    "version": "it starts no job",
    "help": "it starts no job",
}


def refused_option(options: Sequence[str]) -> str:
    """Return the first of a user's options of mpirun that contradicts the plan, and why; "" if there is none."""
    for number, option in enumerate(options):
        name = option.lstrip("-").partition("=")[0] if option.startswith("-") else ""
        if name in ("mca", "prtemca", "gmca") and options[number + 1 : number + 2]:
            name = options[number + 1] if options[number + 1].startswith("plm") else name
            name = "plm" if name.startswith("plm") else name
        if name in _REFUSED:
            return f"{option}: {_REFUSED[name]}"
        if option in (":", "--"):
            return f"{option!r}: the tool states the program"
    return ""


def gives(options: Sequence[str], name: str) -> bool:
    """Return whether one of the options is -name or --name, also with =value."""
    return any(option.startswith("-") and option.lstrip("-").partition("=")[0] == name for option in options)


# One text for all nodes, whose paths may differ.
_RANK = ("/bin/sh", "-c", f'exec /bin/sh "${RANK_VARIABLE}"')


def by_slots(nodes: Sequence[int]) -> bool:
    """Return whether the ranks of each node follow one another, so that mpirun can fill node by node. nodes: by rank."""
    return len(set(nodes)) == 1 + sum(before != node for before, node in zip(nodes, nodes[1:]))


def hostfile(implementation: Optional[Implementation], nodes: Sequence[int]) -> str:
    """Write mpirun's hostfile, with numbers of slots if by_slots(), else a line for each rank. nodes: by rank."""
    if not by_slots(nodes):
        return "".join(f"{host_name(node)}\n" for node in nodes)
    form = "{}:{}\n" if implementation is not None and implementation.hydra else "{} slots={}\n"
    return "".join(form.format(host_name(node), nodes.count(node)) for node in dict.fromkeys(nodes))


def mpirun(
    implementation: Optional[Implementation], nodes: Sequence[int], address: str, options: Sequence[str], root: bool
) -> Tuple[str, ...]:
    """Build the command line of mpirun: its options by the implementation, the number of ranks, and the script of a rank.

    implementation: None: not known, as for --dry without a connection; only the user's options are set then. nodes: by rank.
    address: of node 0, for the daemons. options: the user's. root: the job's user is root.
    """
    own: List[str] = []
    if implementation is not None:
        own = (
            _hydra_options(address) if implementation.hydra else _open_mpi_options(implementation, nodes, options, root)
        )
    return ("mpirun", *own, "-n", str(len(nodes)), *options, *_RANK)


def _hydra_options(address: str) -> List[str]:
    """Build the options of Hydra that place ranks and start daemons. With the launcher ssh it would call /bin/sh -x.

    `-genvnone`: variables of node 0 are not for ranks of other nodes.
    """
    argv = ["-launcher", "rsh", "-launcher-exec", "/bin/sh", "-localhost", address]
    return [*argv, "-genvnone", "-wdir", "/", "-f", HOSTFILE]


def _open_mpi_options(
    implementation: Implementation, nodes: Sequence[int], options: Sequence[str], root: bool
) -> List[str]:
    """Build the options of Open MPI that place ranks and start daemons; --map-by and --bind-to only if the user gives none.

    nodes, options, root: see mpirun().
    """
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
    """Build the variables that only mpirun gets: one for Hydra, else {}. Open MPI would pass its variables to all daemons."""
    hydra = implementation is not None and implementation.hydra
    return {"HYDRA_LAUNCHER_EXTRA_ARGS": AGENT} if hydra else {}


def daemon_environment(implementation: Optional[Implementation], address: str, shared: bool, crowded: bool) -> Env:
    """Build the variables of a node's daemon, which its ranks get, too; {} for Hydra or no MPI.

    They must not be in the environment of mpirun, which would give those of its own node to all daemons. address: of the node.
    shared: other nodes of the job are on the same machine. crowded: the machine has fewer processors than ranks.
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
