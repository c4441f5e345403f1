"""The record of a member of an elastic job while no supervisor runs: its events, and the socket for requests of its user.

A supervisor writes the same events file and has the same socket during an epoch, so this record is closed before one is
prepared.
"""

from __future__ import annotations

import os
import socket
import time
from typing import TYPE_CHECKING, List, Optional, Tuple, cast

from clustertool.errors import ClustertoolError, NodeLost, NotFound, Terminated, TimedOut
from clustertool.model.hints import PROGRAM
from clustertool.model.job.outcome import Outcome
from clustertool.model.job.state_names import JobState
from clustertool.model.joining.join_file import JoinFile
from clustertool.model.joining.join_plan import unplanned_spec
from clustertool.model.paths import OURS, JobPaths
from clustertool.model.wire import record_lines
from clustertool.node.agent import place
from clustertool.node.jobs.ledger import Ledger
from clustertool.node.jobs.records import Record
from clustertool.node.storage import files
from clustertool.node.storage.reserving_journal import ReservingJournal
from clustertool.node.supervisor.control_socket import ControlSocket
from clustertool.node.supervisor.notifier import Notifier
from clustertool.node.system import processes

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from clustertool.model.wire.event_types import Event, JobHeader
    from clustertool.model.wire.spec_types import Spec
    from clustertool.model.wire.supervisor_messages import LiveStatus, SupervisorAnswer, SupervisorRequest

_ROOM = 16 << 10  # bytes of the events file that are kept free on the disk for the last events
_TOUCH = 0.5  # seconds between two heartbeats


class MemberRecord:
    """The events file and the socket of a member between two epochs. Call turn() each loop, and close() once.

    `spec`: of the last epoch. bundle: what another machine needs to join. stopped: the error that stands for a stop by the
    user, None without one. released: what the user has typed to release this member, "" for nothing, and code: with which it
    ends then. attended: a laptop has followed the job since this record was opened.
    """

    def __init__(self, spec: Spec, bundle: bytes) -> None:
        """Open the record and the socket of this member between two epochs.

        Raises NotFound if the job has no directory here, and PreflightError if the socket cannot be created.
        """
        self.spec, self.bundle = spec, bundle
        self.stopped: Optional[ClustertoolError] = None
        self.released, self.code = "", 0
        self.attended = False
        self._job = files.open_job_dir(spec["job_dir"])
        self._events = ReservingJournal(files.open_append(self._job, f"{OURS}/events.jsonl"), _ROOM)
        self._ledger = Ledger(spec)
        self._control = ControlSocket(self._job)
        self._touched_at = 0.0
        try:
            files.remove(self._job, f"{OURS}/control")  # of a supervisor that was killed
            self._control.create(spec)
        except ClustertoolError:
            self.close()
            raise

    def wires(self) -> List[FileDescriptorLike]:
        """List the descriptors that wake turn()."""
        return list(self._control.wires())

    def turn(self) -> None:
        """Answer requests at the socket, touch it every half second as a heartbeat, and flush the events."""
        self._control.turn(self._answer)
        now = time.monotonic()
        if now - self._touched_at > _TOUCH:
            self._touched_at = now
            self._control.touch()
        self._events.flush()

    def record(self, kind: str, **fields: object) -> None:
        """Write an event to the events file, and note it in the ledger."""
        self._events.write(record_lines.written_event(kind, round(time.time(), 3), fields))
        self._ledger.note(kind, fields)

    def begin(self) -> None:
        """Record the header of the job, and this process as its supervisor here."""
        me = processes.this_process()
        self.record("job", **self.spec["header"])
        space = processes.namespace("pid")
        self.record("supervisor", pid=me.pid, start=me.start, boot=processes.boot_id(), space=space)

    def end(self, outcome: Outcome, coordinates: bool) -> None:
        """Record the outcome as the job's end, and before as its verdict, if this member decides (coordinates)."""
        if coordinates:
            self.record("verdict", **outcome.as_record())
            Notifier(self.spec, self.record).note("verdict", outcome.as_record())
        self.record("ended", **outcome.as_record())

    def close(self) -> None:
        """Remove the socket, make the events durable, and close the files."""
        self._control.remove()
        self._events.close(durable=True)
        os.close(self._job)

    def _answer(self, request: SupervisorRequest) -> Tuple[SupervisorAnswer, bytes]:
        """Answer a request for status or bundle, and note a stop, a laptop that follows, or the release of this member.

        Raises NotFound for other requests, which need an epoch, and for a release of the last epoch's coordinator.
        """
        if request["type"] == "status":
            return self._status(), b""
        if request["type"] == "bundle":
            return {"type": "bundle"}, self.bundle
        if request["type"] == "stop":
            error = Terminated(request["by"])
            error.code = request["code"]
            self.stopped = self.stopped or error
        elif request["type"] == "attached":
            self.attended = True
        elif request["type"] == "leave" and self.spec["node"] != self.spec["lead"]["node"]:
            self.released, self.code = self.released or request["by"], request.get("code", 0)
        else:
            what = f"no ranks run on {self.spec['name']}: the job waits for its next epoch"
            raise NotFound(what, "try again when it has begun")
        return {"type": "accepted"}, b""

    def _status(self) -> LiveStatus:
        """Build the status of a node that has no ranks."""
        spec = self.spec
        return {
            "type": "status",
            "job": spec["job"],
            "node": spec["node"],
            "attempt": spec.get("attempt", 0),
            "leads": spec["node"] == spec["lead"]["node"],
            "stopping": "",
            "outcome": None,
            "ranks": [],
        }


def first_record(join: JoinFile, root: str) -> Optional[MemberRecord]:
    """Make the job's directory and the record of a member before the plan, with its first events.

    Returns None if the directory's place is not known by then. A machine that was started again has a directory already. Raises
    PreflightError if something cannot be made, UsageError if another job has the directory, and NodeLost as
    _require_no_epoch().
    """
    if not join.own.base or join.index is None:
        return None
    spec = unplanned_spec(join, root, socket.gethostname())
    files.make_root(root)
    if os.path.lexists(spec["job_dir"]) and place.is_placed_with(spec["job_dir"], spec["token"]):
        _require_no_epoch(join, spec)
    else:
        os.close(files.make_job_dir(spec["job_dir"]))
    Ledger(spec).place()
    record = MemberRecord(spec, join.for_others)
    record.begin()
    return record


def _require_no_epoch(join: JoinFile, spec: Spec) -> None:
    """Raise NodeLost if this machine coordinates a job without a store, and its records already have an epoch.

    No process knows any more which numbers were used, and which nodes may have ranks.
    """
    if join.job.elastic.server.present or join.index != join.coordinator.member:
        return
    if any(event["type"] == "epoch" for event in events_in(spec["job_dir"])):
        what = f"{spec['name']} has coordinated the job, and its process has died: the job ends, as it has no --elastic-server"
        fix = f"{PROGRAM} run --resume {spec['job']} --skip {spec['name']} starts it again on the other nodes"
        raise NodeLost(what, fix)


def events_in(job_dir: str) -> List[Event]:
    """Read the events in a job's directory, which an earlier start on this machine may have left."""
    paths = JobPaths.at(job_dir)
    return Record(paths.base, paths.job, cast("JobHeader", {})).events()


def outcome_of(error: ClustertoolError, node: Optional[int] = None) -> Outcome:
    """Convert the error that ends an elastic job to an outcome, with its code. node: in the outcome.

    LOST for NodeLost, TIMEOUT for TimedOut, STOPPED for Terminated and the code 130, else FAILED.
    """
    kinds = ((NodeLost, JobState.LOST), (TimedOut, JobState.TIMEOUT), (Terminated, JobState.STOPPED))
    state = next((state for kind, state in kinds if isinstance(error, kind)), JobState.FAILED)
    if error.code == 130:
        state = JobState.STOPPED
    return Outcome(state, error.code, "tool", error.what, node=-1 if node is None else node)
