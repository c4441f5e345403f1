"""This module finds the processes that take care of a job, in its records. A probe needs no more of records.py."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Iterator, List, Optional, Sequence, cast

from clustertool.errors import PreflightError
from clustertool.model.job import formats
from clustertool.model.job.caretakers import CARETAKERS, CaretakerRecord
from clustertool.model.paths import JobPaths
from clustertool.model.wire.record_lines import read_events
from clustertool.node.jobs import ledger
from clustertool.node.storage import files
from clustertool.node.system import processes
from clustertool.node.system.processes import Process

if TYPE_CHECKING:
    from clustertool.model.wire.event_types import Event, JobHeader


class JobProcesses:
    """Supervisor, guard and gauge of one job on this node.

    `header` is its first event, as far as the caller knows it; `trouble` is why its records cannot be used, or None.
    """

    def __init__(self, base: str, job: str, header: JobHeader, trouble: Optional[PreflightError] = None) -> None:
        self.paths = JobPaths(base, job)
        self.job = job
        self.header = header
        self.trouble = trouble
        self._entry: Optional[ledger.Entry] = None

    @property
    def entry(self) -> ledger.Entry:
        """The job's entry in the ledger, read once; {} if there is none, or if its format is unknown, which sets `trouble`."""
        if self._entry is None:
            self._entry = ledger.read(self.paths)
            try:
                formats.require_known(self._entry, self.paths.ledger)
            except PreflightError as error:
                self.trouble, self._entry = self.trouble or error, {}
        return self._entry

    def events(self) -> List[Event]:
        """Read all events.

        If the event "job" is missing, since a program has emptied the file, put those of the ledger first.
        """
        found: List[Event] = []
        with contextlib.suppress(OSError):
            found = read_events(files.read_file(self.paths.events).split(b"\n"))
        return found if any(event["type"] == "job" for event in found) else [*self._ledger_events(), *found]

    def first_event(self) -> Event:
        """Build the event "job" from the header."""
        return {**self.header, "t": self.header.get("created", 0.0), "type": "job"}

    def _ledger_events(self) -> Iterator[Event]:
        """Yield the events job, supervisor, guard, gauge and ended that the ledger has; none if it has no supervisor."""
        entry = self.entry
        if "supervisor" in entry:
            t = self.header.get("created", 0.0)
            yield cast("Event", {**self.first_event(), "restored": True})
            for kind in CARETAKERS:
                process = ledger.process(entry, kind)
                if process:
                    about = {"t": t, "type": kind, "pid": process.pid, "start": process.start}
                    if kind == "supervisor":
                        about.update(boot=entry.get("boot", ""), space=entry.get("space", ""))
                    yield cast("Event", about)
            if isinstance(entry.get("ended"), dict):
                yield cast("Event", {**entry["ended"], "t": t, "type": "ended"})

    def own(self) -> CaretakerRecord:
        """Read the events, and fold them to a record of supervisor, guard and gauge, and of the end."""
        found = CaretakerRecord()
        for event in self.events():
            found.take(event)
        return found

    def process(self, kind: str, own: Optional[CaretakerRecord] = None) -> Optional[Process]:
        """Return the newest process of a kind (supervisor, guard, gauge), alive or not.

        None if none is recorded, or the newest supervisor is of another boot or process id namespace. own: the record of the
        job's events that own() has read, if the caller has it.
        """
        own = self.own() if own is None else own
        found = own.caretakers.get(kind)
        return Process(*found) if found and recorded_here(own.boot, own.space) else None

    def main_processes(self) -> List[Process]:
        """List the processes of ranks that its events name, alive or not. A program may have written these events."""
        pairs = [(event.get("pid"), event.get("start")) for event in self.events() if event["type"] == "started"]
        return [Process(pid, start) for pid, start in pairs if isinstance(pid, int) and isinstance(start, int)]

    def caretakers(self, own: Optional[CaretakerRecord] = None, kinds: Sequence[str] = CARETAKERS[:2]) -> List[Process]:
        """List the living ones of supervisor and guard, or of other `kinds`. own: the record that own() has read, if any."""
        own = self.own() if own is None else own
        found = [self.process(kind, own) for kind in kinds]
        return [process for process in found if process and processes.alive(process)]


def recorded_here(boot: str, space: str) -> bool:
    """Check whether recorded pids are those of this boot and of this process id namespace; "" for one that is not recorded."""
    return boot == processes.boot_id() and space in ("", processes.namespace("pid"))
