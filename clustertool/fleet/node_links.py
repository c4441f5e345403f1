"""The connections of one command to nodes. A command that needs no agent there, such as `exec`, uses nothing else."""

from __future__ import annotations

from collections.abc import Callable

from clustertool.fleet.this_machine import HereLink, Link
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.ssh.connection import SshLink
from clustertool.ssh.parallel import each
from clustertool.ssh.prompter import Prompter


class NodeLinks:
    """The open connections of one command, all of which close() closes."""

    def __init__(
        self, cluster: Cluster, prompter: Prompter, reach: Callable[[Host], Link | None] = lambda host: None
    ) -> None:
        """Prepare connections to the nodes of a cluster; none is open yet.

        reach: returns an engine's connection to a host, None for ssh or, if the host is this machine, a child. It is called in
        a thread, and raises Unreachable.
        """
        self._cluster = cluster
        self.prompter = prompter
        self.reach = reach
        self._open: list[Link] = []

    def connect(self, host: Host) -> Link:
        """Open a new connection to a host, and keep it for close(). Raises why there is none.

        Called in a thread: see Prompter.serve().
        """
        link = self.reach(host)
        if link is None:
            link = HereLink(host) if host.here else SshLink(host, self._cluster, self.prompter)
        self._open.append(link)
        return link

    def close(self) -> None:
        """Close all connections, in parallel."""
        each(self._open, lambda link: link.close())  # in parallel: a dead gateway costs a moment
