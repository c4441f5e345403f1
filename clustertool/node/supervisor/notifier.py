"""The notifier of a coordinator sends one message about each of some events to NOTIFY, and never delays the job.

It offers a message to an attached laptop that has announced to send, and sends it itself if the laptop does not confirm that
in time. Each message is sent in a process of its own, which may outlive the supervisor, and records itself that it failed.
"""

from __future__ import annotations

import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Dict, Mapping, Tuple

from clustertool.model.notification import Notification, describe
from clustertool.node.jobs import records
from clustertool.node.jobs.descendants import APART
from clustertool.node.storage import files
from clustertool.node.system import processes
from clustertool.node.system.node_context import load_on_demand

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec

_ATTACHED = 3.0  # seconds since the last notice of an attached laptop, which sends one each second
_CONFIRMED = 10.0  # seconds in which it confirms that it has sent a message
_LONGEST_TEXT = 1000
_LONGEST = 110  # seconds that the process which sends may live: three tries and their pauses


class Notifier:
    """The messages of a coordinator, or of the last member of an elastic job. Call turn() each loop, and last with `last`.

    record: writes an event. offered: the messages that a laptop may still confirm. Without `notify` in the spec nothing is
    sent. Of the nodes that are lost before the end of the job, or its next attempt, only the first makes a message.
    """

    def __init__(self, spec: Spec, record: Callable[..., None]) -> None:
        self._spec, self._record = spec, record
        self.offered: Dict[str, Tuple[Notification, float]] = {}  # by id, each with the end of that time
        self._laptop, self._attached_at = "", 0.0
        self._why, self._lost = "", False  # of the newest attempt: why it failed, and whether it has lost a node

    def note(self, kind: str, event: Mapping[str, Any]) -> None:
        """Take an event that the coordinator records. If it makes a message, offer that to a laptop, or send it."""
        self._why = str(event.get("why", "")) if kind == "phase" else self._why
        about, text = describe(kind, event, self._why, self._spec["shape"]["names"] if kind == "lost" else ())
        if not about or not self._spec.get("notify") or (kind == "lost" and self._lost):
            return
        self._lost = kind == "lost"
        job, name, key = self._spec["job"], self._spec["header"]["job_name"], os.urandom(8).hex()
        text = f"job {name or job}: {text}"[:_LONGEST_TEXT]
        message = Notification(id=key, event=about, job=job, name=name, text=text, code=event.get("code"))
        laptop = self._laptop if time.monotonic() - self._attached_at < _ATTACHED else ""
        self._record("notification", **message, laptop=laptop, failed="")
        if laptop:
            self.offered[key] = message, time.monotonic() + _CONFIRMED
        else:
            self._send(message)

    def attached(self, notice: Mapping[str, object]) -> None:
        """Take the notice of an attached laptop: whether it sends messages, and which one it has sent."""
        self._laptop, self._attached_at = str(notice.get("laptop", "")), time.monotonic()
        self.offered.pop(str(notice.get("notified", "")), None)

    def turn(self, last: bool = False) -> None:
        """Send the messages that no laptop has confirmed in time. last: all that are not confirmed."""
        now = time.monotonic()
        for key in [key for key, (_, until) in self.offered.items() if last or now >= until]:
            self._send(self.offered.pop(key)[0])

    def _send(self, message: Notification) -> None:
        """Start the process that sends a message, or record why that is not possible."""
        try:
            APART.add(processes.fork(partial(_deliver, self._spec, message), quiet=True))
        except OSError as error:
            why = f"no process can be started: {error.strerror}"
            self._record("notification", **message, laptop="", failed=why)


def end_senders() -> None:
    """Wait up to 60 s for the processes that send messages, and kill those that are left."""
    end = time.monotonic() + 60.0
    while APART:
        processes.reap(APART.pop(), max(0.0, end - time.monotonic()))


def _deliver(spec: Spec, message: Notification) -> None:
    """Send the message, in its process, and record it if that fails."""
    processes.set_name("ct-notify")
    signal.alarm(_LONGEST)  # a resolver of names may wait for longer than the limit of a try
    why = load_on_demand("supervisor.notification_sender:deliver")(spec["notify"], message)
    if why:
        with files.closing(files.open_job_dir(spec["job_dir"])) as job:
            failed = {**message, "laptop": "", "failed": why}
            records.append_event(job, "notification", failed, make=False, durable=False)
