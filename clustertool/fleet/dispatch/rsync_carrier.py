"""The rsync carrier brings the files of a workspace to each node by the real rsync (DISPATCH = "rsync").

rsync fills a staging folder over the connection that the command has anyway. The node builds the release from that folder, and
verifies it against the manifest (node/storage/staging.py): the release is the same as that of the swarm.
"""

from __future__ import annotations

import base64
import shutil
import threading
from collections.abc import Mapping, Sequence

from clustertool.errors import Interrupted, PreflightError
from clustertool.fleet.dispatch.receivers import DispatchCounts, ProgressReceiver, Receiver, as_dispatch
from clustertool.fleet.dispatch.shipment import Shipment
from clustertool.fleet.dispatch.workspace import Workspace
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.transfer.rsync_session import push
from clustertool.model.wire.agent_answers import Answer
from clustertool.model.wire.messages import BUILD, STAGE, Request
from clustertool.ssh.parallel import each

_WIDTH = 8  # nodes at a time: each has an rsync process on this machine
_PATIENCE = 60.0  # seconds without progress, while a node hashes the files


class RsyncCarrier:
    """carry() once. `group`: files that not every node takes -> a name for those that take them."""

    def __init__(
        self,
        fleet: Fleet,
        workspace: Workspace,
        group: Mapping[str, str],
        tally: DispatchCounts,
        progress: ProgressReceiver,
    ) -> None:
        self._fleet = fleet
        self._workspace = workspace
        self._group = group
        self._tally = tally
        self._progress = progress
        self._shipment = Shipment(workspace, group)
        self._sent: dict[int, int] = {}  # bytes, by node
        self._built: set[int] = set()
        self._ended = threading.Event()

    def carry(self, receivers: Sequence[Receiver]) -> None:
        """Until each receiver has the release, or is in the tally as failed. Raises PreflightError without rsync here."""
        if not shutil.which("rsync"):
            fix = 'install the package rsync here, or use DISPATCH = "swarm"'
            raise PreflightError("rsync is missing on this machine", fix)
        self._sent = {one.node: 0 for one in receivers}
        try:
            gathered = each({one.node: one for one in receivers}, self._one, width=_WIDTH, check=self._check)
        finally:
            self._ended.set()
        self._tally.failed.update({node: as_dispatch(error) for node, error in gathered.failed.items()})
        self._show()

    def _one(self, receiver: Receiver) -> None:
        node = receiver.node
        names = self._files(receiver.groups)
        link = self._fleet.agents[node].link

        def moved(size: int) -> None:
            self._sent[node] += size

        folder = self._fleet.ask_one(node, STAGE({"release": receiver.release}))["dir"]
        push(link, self._workspace.top, names, folder, moved, self._require_wanted)
        self._fleet.ask_one(node, self._order(receiver), _PATIENCE)
        self._built.add(node)

    def _order(self, receiver: Receiver) -> Request[Answer]:
        packed = base64.b64encode(self._shipment.packed).decode()
        return BUILD(
            {
                "release": receiver.release,
                "groups": receiver.groups,
                "manifest": self._shipment.name,
                "packed": packed,
                "size": len(self._shipment.text),
            }
        )

    def _files(self, groups: Sequence[str] | None) -> list[str]:
        """The paths that a receiver takes. Empty files are made without being sent."""
        return [
            entry.path
            for entry in self._workspace.entries
            if entry.kind == "file"
            and entry.size
            and (groups is None or self._group.get(entry.path, "") in ("", *groups))
        ]

    def _require_wanted(self) -> None:
        if self._ended.is_set():
            raise Interrupted("the dispatch was interrupted")

    def _check(self) -> None:
        self._show()
        if self._fleet.check:
            self._fleet.check()

    def _show(self) -> None:
        """Report how far all are, from the caller's thread."""
        size = self._workspace.size
        self._tally.uplink = sum(self._sent.values())
        self._progress.uplink(self._tally.uplink, max(self._tally.uplink, size * len(self._sent)))
        for node, sent in self._sent.items():
            if node in self._built:
                self._progress.done(node)
            elif sent and node not in self._tally.failed:
                self._progress.node(node, min(sent, size), size)
