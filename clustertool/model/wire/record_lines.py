"""This and the previous version exchange lines of JSON: events on disk, and orders to a supervisor of that version."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Dict, Iterable, List, Mapping, Optional, cast

if TYPE_CHECKING:
    from clustertool.model.wire.event_types import Event

# The previous version has the type of an event, and of an order in a job's control fifo, under these keys. They are written as
# well, so that it can read the records of jobs of this version, and its supervisors can be stopped.
OLD_EVENT_TYPE = "e"
OLD_CONTROL_TYPE = "m"
_MOST_SKEW = 1e11  # seconds; the limit of the field's type, too


def written_event(type: str, t: float, fields: Mapping[str, object]) -> Dict[str, object]:
    """Build the object that stands in a line of events.jsonl. t: seconds since the epoch."""
    return {"t": t, "type": type, OLD_EVENT_TYPE: type, **fields}


def read_event(line: bytes) -> "Optional[Event]":
    """Read the event in a line of events.jsonl of this or the previous version. None for a torn line and for no event.

    A skew that is wrong becomes 0.
    """
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict):
        return None
    old = event.pop(OLD_EVENT_TYPE, None)
    event.setdefault("type", old)
    if "skew" in event:  # a wrong value would make the laptop refuse the job
        event["skew"] = known_skew(event)
    return cast("Event", event) if event["type"] is not None else None


def known_skew(header: Mapping[str, object]) -> float:
    """Return the seconds by which the node's clock was ahead of the laptop's when the job started; 0 if that is not known.

    header: the first event of a job, which its programs may have written.
    """
    skew = header.get("skew")
    known = isinstance(skew, (int, float)) and not isinstance(skew, bool) and abs(skew) < _MOST_SKEW
    return float(cast("float", skew)) if known else 0.0


def read_events(lines: Iterable[bytes]) -> "List[Event]":
    """Parse the events of whole lines; lines that are no event are left out."""
    return [event for event in map(read_event, lines) if event is not None]


def control_line(order: Mapping[str, object]) -> bytes:
    """Build a line for the control fifo of a supervisor of the previous version.

    order: a request `stop` or `attached` of supervisor_messages.
    """
    return json.dumps({**order, OLD_CONTROL_TYPE: order["type"]}).encode() + b"\n"
