"""mpirun and the supervisors agree on what is here: names of nodes and files, and the command that starts a daemon."""

from __future__ import annotations

from clustertool.model.paths import OURS

HOSTFILE = f"{OURS}/mpi-hosts"  # in the job's directory, which is the working directory of mpirun
AGENT = f"{OURS}/mpi-agent"  # a shell script in the same place: mpirun calls it to start a daemon
# In the environment of a daemon: the path of the script that each rank begins with.
RANK_VARIABLE = "CLUSTERTOOL_MPI_RANK"
_FIRST = 240 << 24  # 240.0.0.0/4 is reserved: no name server is asked, and no machine has such an address


def host_name(node: int) -> str:
    """Return the name of a node in mpirun's hostfile: 240.0.0.1 for node 0."""
    number = _FIRST + node + 1
    return ".".join(str(number >> shift & 255) for shift in (24, 16, 8, 0))


def correct_daemon_command(command: str, address: str) -> str:
    """Change mpirun's command of a daemon so that it is right on another node.

    It gets one address of mpirun's node (`address`) in place of all: a daemon tries them in turn, and waits for minutes if one
    is not reachable. Hydra's daemon loses its folder: PATH has it.
    """
    path, found, arguments = command.partition('/hydra_pmi_proxy" ')
    if found and path.startswith('"') and '"' not in path[1:]:
        command = f"hydra_pmi_proxy {arguments}"
    first, *rest = command.split("tcp://")
    return "tcp://".join([first, *(_keep_address(text, address) for text in rest)])


def _keep_address(text: str, address: str) -> str:
    """Remove all addresses but one from a text behind tcp://; return the text unchanged if this one is not among them.

    The text: addresses, the port, with Open MPI 5 the length of each address's network.
    """
    listed, _, after = text.partition(":")
    addresses = listed.split(",")
    if address not in addresses:
        return text
    rest = after.lstrip("0123456789")
    port = after[: len(after) - len(rest)]
    if rest.startswith(":"):
        end = rest[1:].lstrip("0123456789,")
        lengths = rest[1 : len(rest) - len(end)].split(",")
        if len(lengths) == len(addresses):
            rest = f":{lengths[addresses.index(address)]}{end}"
    return f"{address}:{port}{rest}"
