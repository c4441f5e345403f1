"""Channels to the nodes of a running Slurm job are steps of srun, which shells on the login host start."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from clustertool.errors import Unreachable
from clustertool.fleet.this_machine import HereChannel, Link
from clustertool.ssh.channel import NO_SHELL, Greeting

_NODES = 4  # of a connection: sshd admits 10 sessions, and a node may need two at a time
# Reads its values from stdin, so that none becomes a part of a command. --unbuffered: else srun keeps output until the end of
# a line, and frames have none. A step begins in the folder where srun is started.
_STEP = b"""\
IFS= read -r srun; IFS= read -r job; IFS= read -r node
cd 2>/dev/null
exec "$srun" "--jobid=$job" --overlap --unbuffered --quiet --mpi=none --nodes=1 --ntasks=1 "--nodelist=$node" /bin/sh"""


class SrunLink:
    """The link to a node of a running Slurm job: each of its channels is a step, started by a shell on the login host.

    login: the connection to the login host. srun: the path of the program there. job: the number of the Slurm job.
    """

    no_shell = NO_SHELL
    noise = rb"srun: error: [^\n]*: task 0: [^\n]*\n"  # how the command has ended, if srun has not closed its stderr by then

    def __init__(self, login: Link, srun: str, job: int, node: str) -> None:
        self.node = node
        self.times: Mapping[str, float] = {}
        self.waiting = 0
        self._login = login
        self._values = (srun, str(job), node)
        self._channels: list[HereChannel] = []

    @property
    def alive(self) -> bool:
        """Whether the connection to the login host lives."""
        return self._login.alive

    def channel(self, *, window: int = 0, timeout: float = 10.0) -> HereChannel:
        """Start a step on the node by a shell on the login host, and return the channel to the step's shell.

        If srun is refused, the channel ends, and its stderr has the reason.
        """
        channel: HereChannel = self._login.channel(window=window, timeout=timeout)
        self._channels.append(channel)
        Greeting(channel, self._login.node, timeout).start(_STEP)
        channel.sendall("".join(f"{value}\n" for value in self._values).encode())
        return channel

    def lost(self, why: str) -> Unreachable:
        """Create the error for a lost channel to the node."""
        return Unreachable(why, "is the Slurm job still running?", self.node)

    def close(self) -> None:
        """Close the channels of the node. The connection to the login host stays."""
        for channel in self._channels:
            channel.close()


class LoginLinks:
    """Connections to the login host, each for the steps of some nodes. first: one that is there; more: opens another one."""

    def __init__(self, first: Link, more: Callable[[], Link]) -> None:
        self._links = {0: first}
        self._more = more
        self._lock = threading.Lock()

    def for_node(self, node: int) -> Link:
        """Return the connection for a node, which four nodes share; open it if it is not there or was lost.

        Raises the error if that fails.
        """
        number = node // _NODES
        with self._lock:
            link = self._links.get(number)
            if link is None or not link.alive:
                link = self._links[number] = self._more()
            return link
