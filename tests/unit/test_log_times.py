"""Where the lines of a log begin that were written at a time or later."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import pytest

from clustertool.node.jobs.rank_log import NO_RECORD, RankLog, offset_at, sizes_at

LOG = "log/workerlog.0"
TEXT = b"first\nsecond\nthird\n"
SECOND, THIRD = TEXT.index(b"second"), TEXT.index(b"third")


def offset(job: Path, t: float, written: float, records: Sequence[tuple[float, int]]) -> int:
    """`written`: when the log was written last. `records`: (time, size of the log)."""
    place = job / ".clustertool" / LOG
    place.parent.mkdir(parents=True)
    place.write_bytes(TEXT)
    os.utime(place, (written, written))
    (job / ".clustertool/growth.jsonl").write_text("".join(f'[{at},"{LOG}",{size}]\n' for at, size in records))
    folder = os.open(job, os.O_RDONLY)
    try:
        with closing(RankLog(folder, LOG)) as log:
            return offset_at(log, sizes_at(folder, t).get(LOG, NO_RECORD), t)
    finally:
        os.close(folder)


@pytest.mark.parametrize(
    "t, expected", [(100.0, 0), (100.1, SECOND), (100.5, SECOND), (101.0, THIRD), (101.1, len(TEXT))]
)
def test_a_line_has_the_time_of_its_record_and_not_of_the_last_write(tmp_path: Path, t: float, expected: int) -> None:
    """The supervisor records a log up to 0.5 s after it was written: this is the time that is printed with the line."""
    assert offset(tmp_path, t, 100.4, [(100.0, SECOND), (100.5, THIRD), (101.0, len(TEXT))]) == expected


@pytest.mark.parametrize("t, expected", [(100.4, SECOND), (100.5, len(TEXT))])
def test_what_is_not_recorded_has_the_time_of_the_last_write(tmp_path: Path, t: float, expected: int) -> None:
    assert offset(tmp_path, t, 100.4, [(100.0, SECOND)]) == expected


def test_a_log_without_records_has_the_time_of_the_last_write(tmp_path: Path) -> None:
    assert offset(tmp_path, 100.4, 100.4, []) == 0
