"""The rsync carrier brings the files of a workspace to each node by the real rsync (DISPATCH = "rsync").

rsync fills a staging folder over the connection that the command has anyway. The node builds the release from that folder, and
verifies it against the manifest (node/storage/release_builder.py): the release is the same as that of the swarm.
"""

from __future__ import annotations

import base64
import shutil
import threading
from collections.abc import Mapping, Sequence

from clustertool.errors import Interrupted, PreflightError
from clustertool.fleet.dispatch.receivers import DispatchCounts, ProgressReceiver, Receiver, as_dispatch_error
from clustertool.fleet.dispatch.shipment import Shipment
from clustertool.fleet.dispatch.workspace import Workspace
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.transfer.rsync_session import push
from clustertool.model.wire.agent_requests import BuildRequest
from clustertool.model.wire.messages import BUILD, STAGE
from clustertool.ssh.parallel import each

_WIDTH = 8  # nodes at a time: each has an rsync process on this machine
_PATIENCE = 60.0  # seconds without progress, while a node hashes the files


def carry(
    fleet: Fleet,
    workspace: Workspace,
    group: Mapping[str, str],
    receivers: Sequence[Receiver],
    tally: DispatchCounts,
    progress: ProgressReceiver,
) -> None:
    """Send files by rsync, to eight nodes at a time, until each receiver has the release, or is in the tally as failed.

    group: {file that not every node takes: name of those that take it}. Raises PreflightError without rsync here.
    """
    if not shutil.which("rsync"):
        fix = 'install the package rsync here, or use DISPATCH = "swarm"'
        raise PreflightError("rsync is missing on this machine", fix)
    shipment = Shipment(workspace, group)
    packed = base64.b64encode(shipment.packed).decode()
    sent = {one.node: 0 for one in receivers}  # bytes
    built: set[int] = set()
    ended = threading.Event()

    def send_to(receiver: Receiver) -> None:
        """Copy the files to a staging folder of a node, and let it build the release of them."""
        node = receiver.node

        def moved(size: int) -> None:
            sent[node] += size

        def require_wanted() -> None:
            if ended.is_set():
                raise Interrupted("the dispatch was interrupted")

        folder = fleet.ask_one(node, STAGE({"release": receiver.release}))["dir"]
        names = _files_for(workspace, group, receiver.groups)
        push(fleet.agents[node].link, workspace.top, names, folder, moved, require_wanted)
        build: BuildRequest = {
            "release": receiver.release,
            "groups": receiver.groups,
            "manifest": shipment.name,
            "packed": packed,
            "size": len(shipment.text),
        }
        fleet.ask_one(node, BUILD(build), _PATIENCE)
        built.add(node)

    def show() -> None:
        """Report the bytes sent so far, in all and to each node, and which nodes have the release. In the caller's thread."""
        size, tally.uplink = workspace.size, sum(sent.values())
        progress.uplink(tally.uplink, max(tally.uplink, size * len(sent)))
        for node, amount in sent.items():
            if node in built:
                progress.done(fleet.name(node))
            elif amount and node not in tally.failed:
                progress.node(fleet.name(node), min(amount, size), size)

    def check() -> None:
        show()
        if fleet.check:
            fleet.check()

    try:
        gathered = each({one.node: one for one in receivers}, send_to, width=_WIDTH, check=check)
    finally:
        ended.set()
    tally.failed.update({node: as_dispatch_error(error) for node, error in gathered.failed.items()})
    show()


def _files_for(workspace: Workspace, group: Mapping[str, str], groups: Sequence[str] | None) -> list[str]:
    """List the paths of files that a receiver of these groups takes, without empty ones: the node makes those itself."""
    files = [entry.path for entry in workspace.entries if entry.kind == "file" and entry.size]
    return files if groups is None else [path for path in files if group.get(path, "") in ("", *groups)]
