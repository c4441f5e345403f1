"""Records of ended pods, restored from their logs in a private folder."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from clustertool.engines.kubernetes.ended_pods import RestoredRecords, split_lines
from clustertool.model.kubernetes import pod_record
from clustertool.model.kubernetes.pod_record import MOST_LINE, PodEnd, PodLine, encode_line

END = PodEnd("job-1", 1, "failed", "trainer 1 has exited with 7", 7, ("trainer 1",))
EVENTS = b'{"event": "header"}\n'


@pytest.fixture
def records() -> Iterator[RestoredRecords]:
    made = RestoredRecords()
    yield made
    made.close()


def record(end: PodEnd = END, size: int = 0) -> bytes:
    files = {"events.jsonl": EVENTS, "ledger.json": b"{}"}
    return pod_record.encode(end, files, [("log/workerlog.1", size)] if size else [])


def files(root: Path) -> dict[str, bytes]:
    return {str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def test_logs_and_records_are_restored_byte_for_byte(records: RestoredRecords) -> None:
    first = [
        PodLine("trainer", 1, 0, b"\xff long", True),
        PodLine("pserver", 0, 0, b"p"),
        PodLine("trainer", 1, 0, b"er"),
    ]
    log = b"".join(map(encode_line, [*first, PodLine("trainer", 1, 2, b"again")])) + record()
    found = records.restore("job-1", 1, [log[at : at + 7] for at in range(0, len(log), 7)])
    assert found.end == END and found.cut == ()
    assert files(found.root) == {
        ".clustertool/jobs/job-1.json": b"{}",
        "JOBjob-1/.clustertool/events.jsonl": EVENTS,
        "JOBjob-1/.clustertool/marker": b"",
        "JOBjob-1/log/workerlog.1": b"\xff longer\n",
        "JOBjob-1/log/serverlog.0": b"p\n",
        "JOBjob-1/log/attempt2/workerlog.1": b"again\n",
    }


def test_the_folder_is_private_and_is_removed(records: RestoredRecords) -> None:
    top = records.restore("job-1", 1, [record()]).root.parent
    assert stat.S_IMODE(top.stat().st_mode) == 0o700
    records.close()
    assert not top.exists()


def test_a_rank_that_prints_a_record_does_not_replace_the_one_of_its_pod(records: RestoredRecords) -> None:
    false = record(END._replace(state="succeeded", code=0)).rstrip(b"\n")
    log = record() + encode_line(PodLine("trainer", 1, 0, false))
    assert records.restore("job-1", 1, [log]).end == END


@pytest.mark.parametrize(
    "last",
    [
        b"",
        record()[:-20],
        record(END._replace(job="another")),
        record(END._replace(node=0)),
        b'{"clustertool": 1}\n',
        json.dumps({"a": "b" * 100}).encode(),
    ],
)
def test_a_pod_without_a_record_of_this_node_has_its_logs_only(records: RestoredRecords, last: bytes) -> None:
    found = records.restore("job-1", 1, [encode_line(PodLine("trainer", 1, 0, b"text")) + last])
    assert found.end is None
    assert files(found.root) == {"JOBjob-1/.clustertool/marker": b"", "JOBjob-1/log/workerlog.1": b"text\n"}


def test_no_line_makes_a_file_outside_of_the_logs(records: RestoredRecords) -> None:
    hostile = b"[../../x 1] a\n[intruder 1] b\n[trainer -1] c\n[trainer 1/../2] d\n[trainer 99999999999] e\n"
    found = records.restore("job-1", 1, [hostile + record()])
    assert not [name for name in files(found.root) if "log/" in name]


def test_a_log_that_the_kubelet_has_rotated_is_known_to_be_cut(records: RestoredRecords) -> None:
    log = encode_line(PodLine("trainer", 1, 0, b"the newest line")) + record(size=1000)
    assert records.restore("job-1", 1, [log]).cut == ("log/workerlog.1",)
    whole = encode_line(PodLine("trainer", 1, 0, b"x" * 999)) + record(size=1000)
    records.close()
    again = RestoredRecords()
    assert again.restore("job-1", 1, [whole]).cut == ()
    again.close()


def test_more_ranks_than_files_that_are_open(records: RestoredRecords) -> None:
    text = [
        encode_line(PodLine("trainer", rank, 0, b"%d %d" % (rank, turn))) for turn in range(2) for rank in range(100)
    ]
    found = records.restore("job-1", 1, [*text, record()])
    assert (found.root / "JOBjob-1/log/workerlog.37").read_bytes() == b"37 0\n37 1\n"


def test_a_line_without_an_end_is_left_out() -> None:
    endless = [b"a\n", *[b"x" * (1 << 20)] * 5, b"\nb\n", b"c"]
    assert MOST_LINE < 5 << 20
    assert list(split_lines(endless)) == [b"a", b"b", b"c"]
