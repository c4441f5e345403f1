"""This module reads records of other nodes on a shared directory, for an engine without an agent on each node.

A base is the folder of a node in a shared ROOT_DIR, by its name: node0, node1, ... (model/paths.base). "" is ROOT_DIR itself,
where the nodes that do not share it, or the only node of a job, have their jobs. Whatever host name a record below a base has,
its processes are not of this machine. So no pid in it is used, and nothing is signalled. Only files show whether its
supervisor lives: the outcome, the guard's last event, or a recent heartbeat. If none of these is there, that is not known, and
the engine has to be asked.
"""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Container, Iterator, List, Optional

from clustertool.errors import NotFound, PreflightError
from clustertool.model.job.caretakers import CaretakerRecord
from clustertool.model.job.node_status import NodeRecord
from clustertool.model.paths import is_base, node_of
from clustertool.node.jobs import ledger
from clustertool.node.jobs.records import Record
from clustertool.node.storage import files
from clustertool.node.system.node_context import NodeContext
from clustertool.node.system.processes import Process

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import BasesAnswer
    from clustertool.model.wire.agent_requests import NoFields

_RECENT = 60.0  # seconds; a client of NFS may have attributes of a file that are as old as this
_PROOF = "ask the engine whether the job has ended"


class SharedRecord(Record):
    """The record of a job on another node."""

    here = False

    def process(self, kind: str, own: Optional[CaretakerRecord] = None) -> Optional[Process]:
        """Return None: a process of this machine with the same pid is another one."""
        return None

    def supervised(self, own: Optional[NodeRecord] = None) -> bool:
        """Check whether its supervisor has moved recently, and has not recorded its end."""
        own = self.own() if own is None else own
        beat = self.heartbeat()
        return beat is not None and beat < _RECENT and own.ended is None and not own.clean

    def other_machine(self) -> str:
        return ""

    def unknown(self) -> str:
        own = self.own()
        if self.trouble:
            return self.trouble.what
        if own.clean or own.ended is not None or self.supervised(own) or not (own.caretakers or own.entered):
            return ""
        beat = self.heartbeat()
        since = "" if beat is None else f" for {beat:.0f} s"
        return f"its supervisor on {self.header.get('hostname') or 'its node'} has given no sign of life{since}"

    def abandoned(self, own: NodeRecord) -> bool:
        """Check whether the guard has recorded that the supervisor was lost and that nothing lives."""
        return own.clean

    def require_followed(self) -> None:
        """Accept every record: the engine knows when a job has ended."""


def list_bases(node: NodeContext, request: NoFields) -> BasesAnswer:
    """List the bases that are there now, in the order of their nodes."""
    try:
        found = os.listdir(node.root)
    except FileNotFoundError:
        found = []
    except OSError as error:
        fix = "check ROOT_DIR on that machine: jobs may run"
        raise PreflightError(f"the jobs below {node.root} cannot be read: {error.strerror}", fix) from None
    bases = (name for name in found if is_base(name) and _is_folder(os.path.join(node.root, name)))
    return {"bases": ["", *sorted(bases, key=lambda name: (len(name), name))]}


def find_shared(root: str, base: str, job: str, exact: bool) -> List[Record]:
    """Find the records below a base, newest first; see find() in records.py. Nothing is written.

    Raises NotFound, PreflightError.
    """
    found = [record for record in _records(_folder(root, base), job if exact else "") if exact or record.called(job)]
    number = node_of(base)
    for record in found:
        if number is not None:
            record.header["node"] = number
    return sorted(found, key=lambda record: float(record.header["created"]), reverse=True)


def _folder(root: str, base: str) -> str:
    """Return the path of a base. Raises NotFound for a folder that is none, or of another user."""
    path = os.path.join(root, base) if base else root
    if not is_base(base) or (base and not _is_folder(path)):
        raise NotFound(f"{base!r} is no folder of a node below {root}", "check ROOT_DIR")
    return path


def _is_folder(path: str) -> bool:
    with contextlib.suppress(OSError):
        return files.is_own_dir(path)
    return False


def _records(folder: str, job: str) -> Iterator[Record]:
    for name in ledger.names(folder, job):
        record = SharedRecord.read(folder, name)
        if os.path.islink(record.paths.ours):  # to the records of another job, or to what is no record
            record.trouble = PreflightError(
                f"{record.paths.ours} is a link", "remove the directory of this job by hand"
            )
        yield record


def require_ended(record: Record, ended: Container[str]) -> None:
    """Check that a job has ended, before it is removed. ended: jobs that the engine has proved to have ended.

    Raises PreflightError.
    """
    if record.trouble:
        raise record.trouble
    if record.job not in ended:
        raise PreflightError("it is not proved that it has ended", _PROOF)
    if record.supervised():
        what = f"its supervisor gave a sign of life {record.heartbeat() or 0.0:.0f} s ago"
        raise PreflightError(what, f"try again in {_RECENT:.0f} s")
