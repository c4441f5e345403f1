"""The last line of a pod's log, the message of its end, and the lines of its ranks: written, read, and too large."""

from __future__ import annotations

import base64
import json
import os
import random
import zlib
from collections.abc import Callable

import pytest

from clustertool.errors import DataError
from clustertool.model.kubernetes import pod_record
from clustertool.model.kubernetes.pod_record import EVENTS, GROWTH, LEDGER, SPEC, USAGE, PodEnd, PodLine

END = PodEnd("20261124-110000-abcd", 2, "failed", "trainer 3 exited with code 7", 7, ("trainer 3", "trainer 5"))


def test_a_record_comes_back_as_it_was():
    files = {EVENTS: b'{"type": "job"}\n{"type": "ended"}\n', SPEC: b"{}", GROWTH: os.urandom(1000)}
    line = pod_record.encode(END, files, [("log/workerlog.3", 17)])
    assert line.endswith(b"\n") and line.count(b"\n") == 1
    found = pod_record.decode(line)
    assert found.end == END and found.files == files and found.logs == (("log/workerlog.3", 17),)


@pytest.mark.engines
def test_of_large_records_the_newest_lines_stay():
    """What cannot be compressed is cut: usage and growth before the events, of which the first line always stays."""
    rows = b"".join(json.dumps({"n": n, "x": os.urandom(300).hex()}).encode() + b"\n" for n in range(20_000))
    line = pod_record.encode(END, {EVENTS: b'{"type": "job"}\n' + rows, LEDGER: b"{}", USAGE: rows, GROWTH: rows})
    assert len(line) < pod_record.MOST_LINE
    kept = pod_record.decode(line).files
    lines = kept[EVENTS].split(b"\n")
    assert lines[0] == b'{"type": "job"}' and lines[-1] == b"" and json.loads(lines[-2])["n"] == 19_999
    assert [json.loads(one)["n"] for one in lines[1:-1]] == list(range(20_000 - len(lines) + 2, 20_000))
    assert len(lines) > 1000 and kept[LEDGER] == b"{}"


def test_a_message_fits_whatever_is_in_it():
    end = END._replace(reason="ß" * 5000, failed=tuple(f"trainer {rank}" for rank in range(5000)))
    text = pod_record.encode_message(end)
    assert len(text) <= pod_record.MOST_MESSAGE
    found = pod_record.decode_message(text.decode())
    assert found[:3] == end[:3] and found.code == 7 and set(found.failed) <= set(end.failed)
    assert pod_record.decode_message(pod_record.encode_message(END).decode()) == END


WRONG = [
    b"",
    b"{",
    b"[]",
    b"[" * 100_000,
    b'{"clustertool": 2}',
    b'"clustertool"',
    b"Traceback (most recent call last):",
    *(
        json.dumps({"clustertool": 1, **END._asdict(), "logs": [], "records": "", **changed}).encode()
        for changed in (
            {"job": "../../etc"},
            {"job": 3},
            {"node": -2},
            {"node": True},
            {"code": 256},
            {"code": "7"},
            {"state": "x" * 33},
            {"failed": 3},
            {"reason": None},
        )
    ),
]


def _with_records(data: bytes) -> bytes:
    packed = base64.b64encode(data).decode()
    return json.dumps({"clustertool": 1, **END._asdict(), "logs": [], "records": packed}).encode()


# Made in the test: to compress 17 MB takes 0.1 s.
WRONG_RECORDS = [
    lambda: b"no zlib",
    lambda: zlib.compress(b'[["events.jsonl", 10]]\nshort'),
    lambda: zlib.compress(b'[["../../.bashrc", 1]]\nx'),
    lambda: zlib.compress(b'[["events.jsonl", -1]]\nx'),
    lambda: zlib.compress(b"\0" * (17 << 20)),
    lambda: zlib.compress(b"[]\n" + os.urandom(100))[:-20],
]


@pytest.mark.parametrize("line", [*WRONG, b" " * (pod_record.MOST_LINE + 1)])
def test_what_is_no_record_is_refused(line: bytes):
    with pytest.raises(DataError):
        pod_record.decode(line)


@pytest.mark.parametrize("make", WRONG_RECORDS)
def test_wrong_records_in_a_line_are_refused(make: Callable[[], bytes]):
    with pytest.raises(DataError):
        pod_record.decode(_with_records(make()))


@pytest.mark.parametrize("text", WRONG)
def test_what_is_no_message_is_refused(text: bytes):
    with pytest.raises(DataError):
        pod_record.decode_message(text.decode())


def test_lines_of_ranks():
    assert pod_record.encode_line(PodLine("trainer", 3, 0, b"hello")) == b"[trainer 3] hello\n"
    assert pod_record.encode_line(PodLine("pserver", 0, 2, b"x", True)) == b"[pserver 0 attempt 2 +] x\n"
    rng = random.Random(5)
    for _ in range(500):
        text = bytes(rng.choice(b"[]trainer 3+\r\x00\xffattempt{}") for _ in range(rng.randrange(30)))
        line = PodLine(rng.choice(["trainer", "mpirun"]), rng.randrange(9), rng.randrange(3), text, rng.random() < 0.5)
        data = pod_record.encode_line(line)
        assert data.endswith(b"\n") and pod_record.decode_line(data[:-1]) == line
        assert line.content == text + (b"" if line.goes_on else b"\n")
    for other in (
        b'{"clustertool": 1}',
        b"clustertool join: 1 of 3 nodes",
        b"",
        b"[trainer] x",
        b"[trainer -1] x",
        b"[x",
    ):
        assert pod_record.decode_line(other) is None
