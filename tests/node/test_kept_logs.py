"""What a rank has printed stays, whatever its program does with files of the job's directory."""

from __future__ import annotations

import json
import sys
from contextlib import suppress
from typing import Any

import pytest
from _pytest.mark import ParameterSet

from clustertool.errors import NotFound
from clustertool.node.jobs.rank_log import TRUNCATED
from tests.node.harness import Bench, Job, Stream, read, until

LOG = "log/workerlog.0"
WAIT = "until [ -e {} ]; do sleep 0.05; done; "
OPENS = f'{sys.executable} -SE -c \'open("/dev/stdout", "w").write("2\\n")\''


def further(*values: str) -> ParameterSet:
    """Values that run with `make test-chaos` only."""
    return pytest.param(*values, marks=pytest.mark.chaos)


class Text(Stream):
    """What comes of one log, from any offset on."""

    def __init__(self) -> None:
        super().__init__()
        self.text = b""

    def take(self, header: dict[str, Any], payload: bytes) -> None:
        self.text += payload
        super().take({**header, "type": "beat"} if header["type"] == "log" else header, payload)


def shown(job: Job, **request: Any) -> bytes:
    """What `logs` shows of rank 0 after the end."""
    client = job.nodes[0].open()
    stream = client.stream = Text()
    job.follow(client=client, follow=False, **request)
    until(lambda: stream.ended)
    return stream.text


def copy(job: Job) -> bytes:
    """What `cat log/workerlog.0` shows."""
    return read(str(job.dir() / LOG))


@pytest.mark.parametrize("line", ["echo 2 > /dev/stderr", "echo 2 | tee /dev/stderr >/dev/null", OPENS])
def test_a_program_that_truncates_its_log_by_the_name_of_its_output(bench: Bench, line: str) -> None:
    """Before and after it, and a second time with a text of the same length, which a size alone does not show."""
    job = bench.run(None, f"echo 1; {WAIT.format('a')} {line}; {WAIT.format('b')} {line}; {WAIT.format('c')} echo 3")
    stream = job.follow()
    text = b"1\n"
    for step, more in (("a", TRUNCATED + b"2\n"), ("b", b"2\n"), ("c", b"3\n")):
        until(lambda text=text: bytes(stream.logs.get(LOG, b"")) == text, f"{text!r} is followed")
        until(lambda text=text: copy(job) == text, "the copy has it, so the supervisor has read it")
        (job.dir() / step).touch()
        text += more
    assert job.ended()["code"] == 0
    until(lambda: stream.ended)
    assert bytes(stream.logs[LOG]) == shown(job) == copy(job) == text
    assert shown(job, tail=2) == b"2\n3\n" and shown(job, offsets={LOG: 1}) == text[1:]
    assert job.nodes[0].ask("tail", job=job.id, log=LOG, lines=9)["text"].encode() == text
    sizes = [json.loads(line)[2] for line in (job.dir() / ".clustertool/growth.jsonl").read_text().splitlines()]
    assert sizes == sorted(sizes) and sizes[-1] == len(text)


TAKES = ("echo own > log/{0}", "rm log/{0}; echo own > log/{0}", "echo own > x; mv x log/{0}")
BEFORE = "echo 1; " + WAIT.format("a")


@pytest.mark.parametrize(
    "name, before, take",
    [
        ("train.log", "", TAKES[0]),
        ("workerlog.0", BEFORE, TAKES[0]),
        ("train.log", BEFORE, TAKES[1]),
        ("workerlog.0", "", TAKES[1]),
        ("train.log", BEFORE, TAKES[2]),
        ("workerlog.0", "", TAKES[2]),
        further("train.log", BEFORE, TAKES[0]),
        further("workerlog.0", "", TAKES[0]),
        further("train.log", "", TAKES[1]),
        further("workerlog.0", BEFORE, TAKES[1]),
        further("train.log", "", TAKES[2]),
        further("workerlog.0", BEFORE, TAKES[2]),
    ],
)
def test_a_name_that_a_program_takes_is_its_own(bench: Bench, name: str, before: str, take: str) -> None:
    job = bench.run(None, f"{before} {take.format(name)}; {WAIT.format('b')} echo 3; exit 5")
    text = b"1\n3\n" if before else b"3\n"
    if before:
        until(lambda: read(str(job.dir() / "log" / name)) == b"1\n")
        (job.dir() / "a").touch()
    until(lambda: read(str(job.dir() / "log" / name)) == b"own\n")
    (job.dir() / "b").touch()
    assert job.ended()["code"] == 5
    assert read(str(job.dir() / "log" / name)) == b"own\n"
    other = "workerlog.0" if name == "train.log" else "train.log"
    assert shown(job) == (job.dir() / "log" / other).read_bytes() == text


# The supervisor may create a file in a folder that `rm` is about to remove.
CLEAR = "until rm -rf {} 2>/dev/null; do :; done"


@pytest.mark.parametrize(
    "what", ["log", further("log/*"), ".clustertool", further(".clustertool log"), "* .clustertool"]
)
def test_a_program_that_clears_its_folder(bench: Bench, what: str) -> None:
    job = bench.run(None, f"echo 1; {CLEAR.format(what)}; echo 2; {WAIT.format('../go')} echo 3; exit 5")
    stream = job.follow()
    until(lambda: bytes(stream.logs.get(LOG, b"")) == b"1\n2\n")

    def supervised() -> bool:
        with suppress(NotFound):  # the program may still remove what the supervisor puts back
            return bool(job.nodes[0].ask("status", job=job.id)["supervised"])
        return False

    until(supervised, "the records are back")
    (job.dir().parent / "go").touch()
    assert job.ended()["code"] == 5
    until(lambda: stream.ended)
    job.gone()
    assert bytes(stream.logs[LOG]) == shown(job) == b"1\n2\n3\n"
    assert not list((job.dir().parent / ".clustertool/kept").iterdir())
    assert "log" not in what or not (job.dir() / LOG).exists(), "the tool does not make it again"


def test_a_program_that_is_started_twice_opens_its_log_anew(bench: Bench) -> None:
    program = "echo $CLUSTERTOOL_ATTEMPT; echo own $CLUSTERTOOL_ATTEMPT > log/train.log; exit 1"
    job = bench.run(None, program, policy={"max_restarts": 1})
    assert job.ended()["code"] == 1
    assert (job.dir() / "log/train.log").read_text() == "own 1\n"
    assert (job.log(), job.log(attempt=1), shown(job, attempt=0)) == (b"0\n", b"1\n", b"0\n")


def test_a_log_that_is_gone_is_named(bench: Bench) -> None:
    job = bench.run(None, "echo 1")
    job.ended()
    job.gone()
    (job.dir() / ".clustertool" / LOG).unlink()
    assert shown(job) == b"clustertool: log/workerlog.0 was removed, and all that it had\n"


def test_a_job_of_an_earlier_version_has_its_logs_under_the_shown_names(bench: Bench) -> None:
    job = bench.run(None, "echo 1")
    job.ended()
    job.gone()
    (job.dir() / ".clustertool" / LOG).unlink()
    (job.dir() / ".clustertool/log").rmdir()
    assert shown(job) == b"1\n"
