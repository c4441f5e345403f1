"""The error file of a rank is read as data of a program that may be broken or hostile: it never fails, and is never long."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from clustertool.model.paths import JobPaths
from clustertool.node.supervisor import rank_error

NAME = JobPaths.error_file("trainer", 3)


@pytest.fixture
def job(tmp_path: Path) -> Iterator[int]:
    (tmp_path / NAME).parent.mkdir()
    fd = os.open(tmp_path, os.O_RDONLY)
    yield fd
    os.close(fd)


def read(job: int, *secrets: str) -> str:
    return rank_error.read_file(job, "trainer", 3, secrets)


def recorded(text: object) -> dict[str, object]:
    """As torch 2.13 writes it."""
    return {"message": {"message": text, "extraInfo": {"py_callstack": "Traceback ...", "timestamp": "1700000000"}}}


GOOD: list[tuple[object, str]] = [
    (recorded("ValueError: boom"), "ValueError: boom"),
    ({"message": "RuntimeError: as older versions wrote it"}, "RuntimeError: as older versions wrote it"),
    (recorded("\n  RuntimeError: CUDA error\nCUDA kernel errors might ...\n"), "RuntimeError: CUDA error"),
    (recorded("KeyError: \x1b[31mred\t\u202e text\u2028next"), "KeyError: [31mred text"),
    (recorded("E: " + "x" * 1000), "E: " + "x" * 294 + "..."),
    (recorded("错误: 内存不足"), "错误: 内存不足"),
]


@pytest.mark.parametrize("content, shown", GOOD)
def test_the_first_line_of_the_exception(job: int, tmp_path: Path, content: object, shown: str) -> None:
    (tmp_path / NAME).write_text(json.dumps(content))
    assert read(job) == shown


BAD = [
    b"",
    b"not JSON",
    b"\xff\xfe\x00",
    b"[]",
    b"3",
    b"null",
    b'{"message": 3}',
    b'{"message": null}',
    b'{"message": {"message": ["x"]}}',
    b'{"message": {}}',
    b'{"other": "x"}',
    b'{"message": "   \\n  "}',
    b"[" * 100_000,
    b'{"message": "' + b"x" * (1 << 20) + b'"}',
]


@pytest.mark.parametrize("content", BAD, ids=range(len(BAD)))
def test_what_is_no_record_of_an_exception_is_ignored(job: int, tmp_path: Path, content: bytes) -> None:
    (tmp_path / NAME).write_bytes(content)
    assert read(job) == ""


def test_what_is_no_file_of_the_job_is_not_read(job: int, tmp_path: Path) -> None:
    assert read(job) == ""
    other_place = tmp_path / "elsewhere"
    other_place.write_text(json.dumps(recorded("ValueError: of another file")))
    (tmp_path / NAME).symlink_to(other_place)
    assert read(job) == ""
    rank_error.remove_file(job, "trainer", 3)
    assert other_place.exists()
    os.mkfifo(tmp_path / NAME)  # must not make the supervisor wait
    assert read(job) == ""
    rank_error.remove_file(job, "trainer", 3)
    (tmp_path / NAME).mkdir()
    rank_error.remove_file(job, "trainer", 3)
    assert read(job) == ""


def test_values_of_secrets_are_hidden(job: int, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps(recorded("HTTPError: 401 for ?key=s3cr3t-long&k=s3cr3t and line-of-a-key")))
    shown = read(job, "s3cr3t", "", "s3cr3t-long", "x\nline-of-a-key\n")
    assert shown == "HTTPError: 401 for ?key=***&k=*** and ***"


def test_the_file_of_an_earlier_attempt_is_removed(job: int, tmp_path: Path) -> None:
    (tmp_path / NAME).write_text(json.dumps(recorded("ValueError: old")))
    rank_error.remove_file(job, "trainer", 3)
    assert not (tmp_path / NAME).exists()
    rank_error.remove_file(job, "trainer", 3)


def test_equal_errors_have_equal_numbers() -> None:
    """Whatever the ranks and ports in them."""

    def classify(line: bytes) -> tuple[int, bool]:
        return rank_error.classify(rank_error.LoggedError(line, line))[:2]

    one, other = (f"RuntimeError: rank {rank} at 10.0.0.{rank}:5{rank}".encode() for rank in (1, 22))
    assert classify(one) == classify(other)
    assert classify(one) != classify(b"ValueError")
    assert classify(b"") == (0, False)
    assert classify(b"RuntimeError: Connection closed by peer [10.0.0.1]:5")[1]
