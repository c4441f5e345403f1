"""The event log writes the job's events file on this node, and copies to the ledger what a stop needs of it."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from clustertool.model.paths import OURS
from clustertool.model.wire import record_lines
from clustertool.node.jobs.ledger import Ledger
from clustertool.node.storage import files

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec

# Bytes of the events file that are kept free on the disk for the last events: for all, for each process of this node, and
# for each rank in a verdict.
_LAST_EVENTS, _OF_PROCESS, _OF_RANK = 16 << 10, 512, 64


class EventLog:
    """Call record() for each event, flush() each loop for what a full disk has refused, and close() once.

    `job`: the descriptor of the job's directory.
    """

    def __init__(self, spec: Spec, job: int) -> None:
        ahead = _LAST_EVENTS + _OF_PROCESS * len(spec["processes"]) + _OF_RANK * len(spec["endpoints"])
        self._journal = files.Journal(files.open_append(job, f"{OURS}/events.jsonl"), ahead)
        self._ledger = Ledger(spec)

    def record(self, kind: str, **fields: Any) -> None:
        self._journal.write(record_lines.written_event(kind, round(time.time(), 3), fields))
        self._ledger.note(kind, fields)

    def flush(self) -> None:
        self._journal.flush()

    def close(self) -> None:
        self._journal.close(durable=True)
