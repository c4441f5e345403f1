"""Records and control messages have one key for the type. The previous version reads the records, and obeys the messages."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clustertool.model.wire.record_lines import control_line, read_event, written_event

OLD = {
    "t": 5.0,
    "e": "started",
    "role": "trainer",
    "rank": 1,
    "pid": 7,
    "start": 9,
    "attempt": 0,
    "log": "log/workerlog.1",
}


def of_old_version(line: bytes, key: str) -> tuple[str, dict[str, Any]]:
    """What the previous version reads: its key, and the fields that it knows."""
    found = json.loads(line)
    return found[key], {name: found[name] for name in found if name not in (key, "type")}


def test_events_of_the_previous_version_are_read() -> None:
    event = read_event(json.dumps(OLD).encode())
    assert event == {"type": "started", **{name: value for name, value in OLD.items() if name != "e"}}


def test_events_are_read_by_both_versions() -> None:
    line = json.dumps(written_event("lost", 5.0, {"node": 1, "why": "x"})).encode()
    assert read_event(line) == {"t": 5.0, "type": "lost", "node": 1, "why": "x"}
    assert of_old_version(line, "e") == ("lost", {"t": 5.0, "node": 1, "why": "x"})


@pytest.mark.parametrize(
    "line",
    [b"", b"\n", b"[1]\n", b"\xff\xfe\n", b'"x"\n', b'{"type": "cle', b'{"t": 1.0}', b"[" * 100_000],
)
def test_torn_and_strange_lines_are_no_events(line: bytes) -> None:
    assert read_event(line) is None


def test_an_order_is_read_by_a_supervisor_of_the_previous_version() -> None:
    fields = {"by": "ann", "code": 143, "grace": 1.0, "force": False}
    line = control_line({"type": "stop", **fields})
    assert line.endswith(b"\n")
    assert of_old_version(line, "m") == ("stop", fields)
