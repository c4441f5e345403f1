"""Lines of JSON that this and the previous version exchange: events on disk, and messages in a job's control fifo."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any, Dict, Mapping, Optional, cast

if TYPE_CHECKING:
    from clustertool.model.wire.event_types import Event

# The previous version has the type of an event, and of a message in a job's control fifo, under these keys. They are written as
# well, so that it can read and stop jobs of this version, and read from its records.
OLD_EVENT_TYPE = "e"
OLD_CONTROL_TYPE = "m"


def written_event(type: str, t: float, fields: Mapping[str, object]) -> Dict[str, object]:
    """The object that stands in a line of events.jsonl. `t`: seconds since the epoch."""
    return {"t": t, "type": type, OLD_EVENT_TYPE: type, **fields}


def read_event(line: bytes) -> "Optional[Event]":
    """The event in a line of events.jsonl of this or the previous version. None for a torn line and for what is no event."""
    try:
        event = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(event, dict):
        return None
    old = event.pop(OLD_EVENT_TYPE, None)
    event.setdefault("type", old)
    return cast("Event", event) if event["type"] is not None else None


def control_line(type: str, fields: Mapping[str, object]) -> bytes:
    """A line for the control fifo of a job's supervisor, which may be of the previous version.

    Types: stop (by, code, grace, force), attached.
    """
    return json.dumps({"type": type, OLD_CONTROL_TYPE: type, **fields}).encode() + b"\n"


def read_control(line: bytes) -> Dict[str, Any]:
    """The message in a line of the fifo, from an agent of this or the previous version. Raises ValueError."""
    message = json.loads(line)
    if not isinstance(message, dict):
        raise ValueError("a message that is no object")
    message.setdefault("type", message.pop(OLD_CONTROL_TYPE, None))
    return message
