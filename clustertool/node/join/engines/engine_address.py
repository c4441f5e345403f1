"""An engine has the address of the coordinator where no name server has its name (yet)."""

from __future__ import annotations

import os
import re
import socket
from dataclasses import replace

from clustertool.model.joining.join_file import JoinFile
from clustertool.model.joining.join_offers import COORDINATOR
from clustertool.model.kubernetes.pod_variables import KUBERNETES, POD_IP
from clustertool.node.join import meeting
from clustertool.node.system import programs

_PATIENCE = 10.0  # seconds for the engine's program


def with_address(join: JoinFile) -> JoinFile:
    """Replace the coordinator's host by an address that the engine has for it, if it is not known here."""
    if join.engine == KUBERNETES and join.index == COORDINATOR:
        host = _of_this_pod() or join.coordinator.host
        return replace(join, coordinator=replace(join.coordinator, host=host))
    if join.engine != "slurm":
        return join
    try:
        meeting.addresses(join.coordinator.host)
    except (OSError, UnicodeError):
        address = _of_slurm(join.coordinator.host)
        return replace(join, coordinator=replace(join.coordinator, host=address)) if address else join
    return join


def _of_this_pod() -> str:
    """Find this pod's address, "" if it cannot be known.

    The name of node 0 comes from the name server, which may not have it yet; the address of a Service is none of the pod's.
    """
    known = (os.environ.get(POD_IP, ""), socket.gethostname())
    return next(filter(None, (meeting.own_address(name) for name in known if name)), "")


def _of_slurm(name: str) -> str:
    """NodeAddr of slurm.conf, "" if there is none: the name of a node need not be a host name (slurm.conf(5), NodeAddr)."""
    code, out, _ = programs.output(["scontrol", "-o", "show", "node", name], _PATIENCE)
    found = re.search(r"(?:^|\s)NodeAddr=(\S+)", out)
    return found.group(1) if code == 0 and found else ""
