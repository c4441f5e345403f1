"""A log that its program truncates, as a follower reads it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from clustertool.node.jobs import rank_log
from clustertool.node.jobs.rank_log import TRUNCATED, RankLog, tail_offset

LOG = "log/workerlog.0"


class Folder:
    """The directory of a job with one log, and what the supervisor does with it."""

    def __init__(self, path: Path) -> None:
        self.file = path / ".clustertool" / LOG
        self.saved = self.file.with_name("workerlog.0.cut")
        self.file.parent.mkdir(parents=True)
        self.file.touch()
        self.fd = os.open(path, os.O_RDONLY)

    def write(self, text: bytes) -> None:
        with self.file.open("ab") as file:
            file.write(text)

    def save(self, text: bytes) -> None:
        with self.saved.open("ab") as file:
            file.write(text)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Folder]:
    folder = Folder(tmp_path)
    yield folder
    os.close(folder.fd)


@pytest.mark.parametrize("after", [b"", b"2\n", b"a 2\n", b"a much longer line\n"])
def test_a_reader_waits_until_what_was_before_is_saved(job: Folder, after: bytes) -> None:
    """The file is then empty, shorter, of the same size, or longer."""
    job.write(b"a 1\n")
    log = RankLog(job.fd, LOG)
    assert (log.read(100), log.read(100)) == (b"a 1\n", b"")
    os.utime(job.file, (1.0, 1.0))  # the time of a file has a resolution
    log.seek(log.at)
    job.file.write_bytes(after)
    assert log.read(100) == b"", "not in the middle of a line"
    job.save(b"a 1\n" + TRUNCATED)
    assert log.read(1000) + log.read(1000) == TRUNCATED + after
    assert (log.at, log.size()) == (4 + len(TRUNCATED + after),) * 2 and log.read(100) == b""
    log.close()
    again = RankLog(job.fd, LOG)
    assert again.read(1000) == b"a 1\n" + TRUNCATED + after
    assert tail_offset(again, 2, again.size()) == (4 if after else 0)
    again.close()


def test_what_a_reader_had_and_nothing_has_saved_moves_no_line(job: Folder) -> None:
    """The supervisor had read less than the reader: the next line is whole."""
    job.write(b"a 1\nb 2\n")
    log = RankLog(job.fd, LOG)
    log.read(100)
    job.file.write_bytes(b"c 3\n")
    job.save(b"a 1\n" + TRUNCATED)
    assert log.read(1000) == TRUNCATED + b"c 3\n"
    log.close()


def test_a_file_that_is_being_saved_counts_when_it_is_complete(job: Folder) -> None:
    job.write(b"a 1\n")
    log = RankLog(job.fd, LOG)
    log.read(100)
    job.file.write_bytes(b"")
    job.save(b"a 1\n")
    job.saved.chmod(0o200)
    assert (log.read(100), log.base) == (b"", 0)
    job.save(TRUNCATED)
    job.saved.chmod(0o600)
    assert log.read(1000) == TRUNCATED
    log.close()


def test_without_a_supervisor_a_reader_goes_on_with_the_file(job: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    job.write(b"a 1\nb 2\n")
    log = RankLog(job.fd, LOG)
    log.read(100)
    job.file.write_bytes(b"c 3\n")
    assert log.read(100) == b""
    monkeypatch.setattr(rank_log, "_PATIENCE", -1.0)
    log._until = 0.0
    assert (log.read(100), log.read(100)) == (b"c 3\n", b"")
    log.close()


def test_what_was_truncated_before_a_reader_came_is_read_late(job: Folder) -> None:
    """The program is faster than the supervisor."""
    job.write(b"c 3\n")
    log = RankLog(job.fd, LOG)
    assert log.read(100) == b"c 3\n"
    job.save(b"a 1\n" + TRUNCATED)
    assert log.read(1000) == b"a 1\n" + TRUNCATED
    job.write(b"d 4\n")
    assert (log.read(100), log.read(100), log.at) == (b"d 4\n", b"", log.size())
    log.close()
