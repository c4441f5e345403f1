"""Following: every byte once and in order, whatever breaks in between, and the end after the last one."""

from __future__ import annotations

import json
import os
import threading
import time
from typing import Any

import pytest

from clustertool.node.jobs.rank_log import TRUNCATED
from tests.node import programs as p
from tests.node.harness import Bench, Job, Stream, cpu, kill, until

LOG = "log/workerlog.0"
COUNTING = "echo ready; i=0; until [ -e go ]; do echo line $i; i=$((i+1)); sleep 0.005; done; echo last"


def end(stream: Stream) -> Stream:
    until(lambda: stream.ended, "the stream has ended")
    assert stream.after_end == 0
    return stream


def finish(job: Job) -> None:
    for node in range(len(job.nodes)):
        (job.dir(node) / "go").touch()


def test_growing_log(bench: Bench) -> None:
    job = bench.run(None, COUNTING)
    stream = job.follow()
    until(lambda: len(stream.logs.get(LOG, b"")) > 200)
    until(lambda: stream.beats >= 2, "heartbeats come while lines do")
    finish(job)
    assert not end(stream).ended["orphan"]  # type: ignore[index]
    assert bytes(stream.logs[LOG]) == job.log()
    assert stream.events == job.events()
    kinds = ["job", "started", "exited", "ended"]
    assert [event["type"] for event in stream.events if event["type"] in kinds] == kinds
    assert stream.beats


def test_agent_killed_in_the_middle(bench: Bench) -> None:
    """A new one, given the offsets, sends exactly the rest: three times in one job."""
    job = bench.run(None, COUNTING, per_node=2).ready()
    whole = Stream()
    for _ in range(3):
        client = job.nodes[0].open()
        client.stream = whole
        job.follow(client=client, **whole.resume())
        size = len(whole.logs.get(LOG, b""))
        until(lambda size=size: len(whole.logs.get(LOG, b"")) > size + 100)
        client.kill()
        until(lambda: whole.closed)
        whole.closed = False
    finish(job)
    client = job.nodes[0].open()
    client.stream = whole
    end(job.follow(client=client, **whole.resume()))
    for rank in range(2):
        assert bytes(whole.logs[f"log/workerlog.{rank}"]) == job.log(rank)
    assert whole.events == job.events()


def test_resumed_after_the_end(bench: Bench) -> None:
    """All events were had, some of the log was not."""
    job = bench.run(None, "seq 1000")
    job.ended()
    stream = Stream()
    stream.logs[LOG] = bytearray(job.log()[:1000])
    stream.events_at = os.stat(job.dir() / ".clustertool/events.jsonl").st_size
    client = job.nodes[0].open()
    client.stream = stream
    end(job.follow(client=client, **stream.resume()))
    assert bytes(stream.logs[LOG]) == job.log()
    assert stream.events == []


def test_big_log(bench: Bench) -> None:
    """64 MiB of every byte there is, followed while they are written."""
    program = p.python("import os\nblock = bytes(range(256)) * 4096\nfor _ in range(64): os.write(1, block)")
    job = bench.run(None, program)
    stream = end(job.follow())
    assert len(stream.logs[LOG]) == 64 << 20
    assert bytes(stream.logs[LOG]) == job.log()


def test_slow_reader_bounds_the_agent(bench: Bench) -> None:
    """A laptop that does not read stops the agent, not the rank, and costs no memory."""
    program = p.python("import os\nblock = bytes(1 << 20)\nfor _ in range(64): os.write(1, block)\nprint('x')")
    job = bench.run(None, program)
    job.ended()
    client = job.nodes[0].open()
    before, read = _memory(client.pid), threading.Event()
    client.stream = _Slow(read)
    job.follow(client=client)
    until(lambda: client.stream.logs)
    until(lambda: _settled(client.pid), "the agent waits for the laptop")
    assert len(client.stream.logs[LOG]) < 1 << 20
    assert _memory(client.pid) - before < 16 << 20
    read.set()
    assert len(end(client.stream).logs[LOG]) == (64 << 20) + 2


class _Slow(Stream):
    """Reads one piece of a log, and goes on when it gets the order."""

    def __init__(self, read: threading.Event) -> None:
        super().__init__()
        self._read = read

    def take(self, header: dict[str, Any], payload: bytes) -> None:
        super().take(header, payload)
        if header["type"] == "log":
            self._read.wait(30)


def _settled(pid: int) -> bool:
    """It asks for no CPU for a while that is long for who reads 64 MiB."""
    before, start = cpu(pid), time.monotonic()
    until(lambda: time.monotonic() - start > 0.3)
    return cpu(pid) == before


def _memory(pid: int) -> int:
    with open(f"/proc/{pid}/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


LONG = "x" * 600_000 + "\nlast\n"


TAILS = [  # a text, the number of lines, and these
    ("a\nb\nc\n", 2, "b\nc\n"),
    ("a\nb\nc", 2, "b\nc"),
    ("a\n", 5, "a\n"),
    ("", 3, ""),
    ("\n\n\n", 2, "\n\n"),
    ("a\nb\n", 0, ""),
    (LONG, 1, "last\n"),
    (LONG, 2, LONG),
]


def test_tail(bench: Bench) -> None:
    """The last lines, over the borders of what is read at once: each rank prints a text."""
    for rank, (text, _, _) in enumerate(TAILS):
        (bench.tmp / f"text{rank}").write_text(text)
    job = bench.run(None, f"cat {bench.tmp}/text$RANK", per_node=len(TAILS))
    job.ended()
    client = job.nodes[0].open()
    for rank, (text, lines, shown) in enumerate(TAILS):
        stream = client.stream = _Anywhere()
        job.follow(client=client, logs=[["trainer", rank]], tail=lines, follow=False)
        end(stream)
        assert bytes(stream.logs.get(f"log/workerlog.{rank}", b"")) == shown.encode(), (text[:9], lines)


class _Anywhere(Stream):
    """Logs may begin in the middle."""

    def take(self, header: dict[str, Any], payload: bytes) -> None:
        if header["type"] == "log":
            self.logs.setdefault(header["log"], bytearray()).extend(payload)
        else:
            super().take(header, payload)


def test_the_tail_of_a_log_that_grows_fast_has_no_more_lines(bench: Bench) -> None:
    job = bench.run(None, "echo ready; while :; do echo line; done").ready()
    client = job.nodes[0].open()
    for _ in range(20):
        stream = client.stream = _Anywhere()
        job.follow(client=client, tail=1, follow=False)
        end(stream)
        assert bytes(stream.logs[LOG]) == b"line\n"
    job.stop()


def test_tail_then_grows(bench: Bench) -> None:
    job = bench.run(None, "seq 100; echo ready; until [ -e go ]; do sleep 0.05; done; echo last").ready()
    client = job.nodes[0].open()
    client.stream = _Anywhere()
    stream = job.follow(client=client, tail=2)
    until(lambda: stream.logs)
    finish(job)
    end(stream)
    assert bytes(stream.logs[LOG]) == b"100\nready\nlast\n"


def test_only_wanted_ranks(bench: Bench) -> None:
    job = bench.run(None, "echo $RANK", per_node=3)
    stream = end(job.follow(logs=[["trainer", 2], ["pserver", 0]]))
    assert {name: bytes(log) for name, log in stream.logs.items()} == {"log/workerlog.2": b"2\n"}


def test_attempts(bench: Bench) -> None:
    """Logs of all attempts, or of one."""
    job = bench.run(None, "echo attempt $CLUSTERTOOL_ATTEMPT; exit 1", policy={"max_restarts": 1})
    stream = end(job.follow())
    assert {name: bytes(log) for name, log in stream.logs.items()} == {
        LOG: b"attempt 0\n",
        "log/attempt1/workerlog.0": b"attempt 1\n",
    }
    assert list(end(job.follow(attempt=1)).logs) == ["log/attempt1/workerlog.0"]


def test_order_by_time(bench: Bench) -> None:
    """Logs of several ranks as they were written, and the rest too."""
    program = "for i in 1 2 3; do until [ -e go$i$RANK ]; do sleep 0.05; done; echo $i $RANK; done"
    job = bench.run(None, program, per_node=2)
    growth = job.dir() / ".clustertool/growth.jsonl"
    for step in ("11", "10", "20", "21", "30", "31"):
        (job.dir() / f"go{step}").touch()
        grown = f'"log/workerlog.{step[1]}",{4 * int(step[0])}]\n'
        until(lambda grown=grown: growth.exists() and grown in growth.read_text(), f"{grown} is written down")
    job.ended()
    client = job.nodes[0].open()
    stream = client.stream = _InOrder()
    end(job.follow(client=client, follow=False, by_time=True))
    assert stream.text == b"1 1\n1 0\n2 0\n2 1\n3 0\n3 1\n"


def test_order_of_a_log_that_its_program_truncates(bench: Bench) -> None:
    """The record names more bytes than the file has: the agent sends those that were saved, and those that are there."""
    program = "echo one; echo two; until [ -e go ]; do sleep 0.05; done; echo 3 > /dev/stderr"
    job = bench.run(None, program)
    until(lambda: (job.dir() / ".clustertool/growth.jsonl").exists(), "the growth is written down")
    finish(job)
    job.ended()
    job.gone()  # what was truncated is saved a moment later
    client = job.nodes[0].open()
    stream = client.stream = _InOrder()
    end(job.follow(client=client, follow=False, by_time=True))
    assert stream.text == b"one\ntwo\n" + TRUNCATED + b"3\n"
    assert job.nodes[0].ask("jobs")["jobs"]


def test_a_log_that_grows_fast_has_few_records_of_it(bench: Bench) -> None:
    """Two a second, and the last size. One for each turn of the loop would be 143 MB a day for four ranks."""
    program = "for i in $(seq 300); do echo $i; sleep 0.01; done"
    job = bench.run(None, program)
    job.ended()
    job.gone()
    lines = [json.loads(line) for line in (job.dir() / ".clustertool/growth.jsonl").read_text().splitlines()]
    began, ended = lines[0][0], lines[-1][0]
    assert len(lines) <= 2 * (ended - began) + 3
    assert [log for _, log, _ in lines] == [LOG] * len(lines) and lines[-1][2] == len(job.log())


def grew(job: Job, *records: tuple[float, int]) -> None:
    """The job's log is as if it had grown so, and been written last at 300."""
    lines = (json.dumps([t, LOG, size]) + "\n" for t, size in records)
    (job.dir() / ".clustertool/growth.jsonl").write_text("".join(lines))
    os.utime(job.dir() / ".clustertool" / LOG, (300.0, 300.0))


@pytest.fixture
def three_lines(bench: Bench) -> Job:
    """An ended job whose log has `a 1` since 100, `b 2` since 200, and `c 3`, which was not recorded, at 300."""
    job = bench.run(None, "echo a 1; echo b 2; echo c 3")
    job.ended()
    job.gone()
    grew(job, (100.0, 4), (200.0, 8))
    return job


def since(job: Job, t: float, **request: Any) -> bytes:
    """What is read since `t`."""
    client = job.nodes[0].open()
    stream = client.stream = _InOrder()
    end(job.follow(client=client, follow=False, since=t, **request))
    return stream.text


def test_lines_since_a_time(three_lines: Job) -> None:
    assert since(three_lines, 50.0) == b"a 1\nb 2\nc 3\n"
    assert since(three_lines, 150.0) == b"b 2\nc 3\n"
    assert since(three_lines, 250.0) == b"c 3\n"
    assert since(three_lines, 300.0) == b"c 3\n", "the time that the request takes to the node counts for nothing"
    assert since(three_lines, 310.0) == b""
    assert since(three_lines, 150.0, tail=1) == b"c 3\n"
    assert since(three_lines, 150.0, tail=9) == b"b 2\nc 3\n"
    assert since(three_lines, 150.0, offsets={LOG: 10}) == b"3\n", "a resumed stream begins where it broke off"
    grew(three_lines, (100.0, 4), (150.0, 6), (200.0, 8))
    assert since(three_lines, 160.0) == b"b 2\nc 3\n", "a line that was begun before and completed later is shown whole"
    grew(three_lines, (100.0, 4), (200.0, 1000))
    assert since(three_lines, 250.0) == b"a 1\nb 2\nc 3\n", "its program has truncated it since"


def test_records_of_growth_that_are_damaged_count_for_nothing(three_lines: Job) -> None:
    growth = three_lines.dir() / ".clustertool/growth.jsonl"
    damaged = [f'[{t},"{LOG}",{size}]\n' for t, size in ((1, "1e999"), (201, -7), ("NaN", 2), (-1, 2), (1e300, 9))]
    growth.write_text("".join([*damaged, growth.read_text(), *damaged, "[" * 100_000]))
    assert since(three_lines, 250.0) == b"c 3\n"
    client = three_lines.nodes[0].open()
    stream = client.stream = _InOrder()
    end(three_lines.follow(client=client, follow=False, by_time=True))
    assert stream.times == [(100.0, b"a 1\n"), (200.0, b"b 2\n"), (300.0, b"c 3\n")]


def test_pieces_have_the_times_of_their_records(three_lines: Job) -> None:
    client = three_lines.nodes[0].open()
    stream = client.stream = _InOrder()
    end(three_lines.follow(client=client, follow=False, by_time=True))
    assert stream.times == [(100.0, b"a 1\n"), (200.0, b"b 2\n"), (300.0, b"c 3\n")]


def test_a_role_is_followed_without_its_ranks(bench: Bench) -> None:
    job = bench.run(None, "echo one", per_node=2)
    job.ended()
    assert sorted(end(job.follow(logs="trainer")).logs) == ["log/workerlog.0", "log/workerlog.1"]
    assert not end(job.follow(logs="pserver")).logs


class _InOrder(_Anywhere):
    text = b""

    def __init__(self) -> None:
        super().__init__()
        self.times: list[tuple[float | None, bytes]] = []

    def take(self, header: dict[str, Any], payload: bytes) -> None:
        self.text += payload
        if payload:
            self.times.append((header.get("t"), payload))
        super().take(header, payload)


def test_several_at_once(bench: Bench) -> None:
    """Two jobs over one agent, and requests next to them."""
    nodes = bench.nodes(1)
    jobs = [bench.run(nodes, COUNTING).ready() for _ in range(2)]
    streams = [job.follow() for job in jobs]
    until(lambda: all(stream.logs for stream in streams))
    assert len(nodes[0].ask("jobs")["jobs"]) == 2
    for job, stream in zip(jobs, streams):
        finish(job)
        end(stream)
        assert bytes(stream.logs[LOG]) == job.log()


def test_supervisor_lost_while_followed(bench: Bench) -> None:
    """The guard ends the job; the stream has its last words and says that there was no verdict."""
    job = bench.run(None, p.PLAIN).ready()
    stream = job.follow()
    until(lambda: stream.logs)
    kill(job.process("supervisor"))
    assert end(stream).ended["orphan"]  # type: ignore[index]
    assert [event["type"] for event in stream.events][-2:] == ["supervisor-lost", "clean"]


def test_rank_replaces_its_log(bench: Bench) -> None:
    """By a link to what is not the job's, in the place of the copy and of the log: it is neither followed nor shown."""
    secret = bench.tmp / "secret"
    secret.write_text("not yours")
    link = "; ".join(f"ln -sf {secret} {place}{LOG}" for place in ("", ".clustertool/"))
    job = bench.run(None, f"{link}; until [ -e go ]; do sleep 0.05; done")
    until(lambda: (job.dir() / LOG).is_symlink())
    stream = job.follow()
    assert job.nodes[0].ask("tail", job=job.id, log=LOG, lines=5)["text"] == ""
    finish(job)
    end(stream)
    assert stream.logs == {}


def test_status_and_tail(bench: Bench) -> None:
    job = bench.run(bench.nodes(2), "seq 9; echo ready; exec sleep 1000").ready()
    status = job.nodes[1].ask("status", job=job.id)
    assert (status["node"], status["dir"], status["supervised"]) == (1, str(job.dir(1)), True)
    assert status["events"] == job.events(1)
    cpu, memory = status["usage"][str(job.rank(1).pid)]
    assert cpu >= 0 and memory > 100_000
    assert job.nodes[1].ask("tail", job=job.id, log="log/workerlog.1", lines=2)["text"] == "9\nready\n"
    job.stop()
    until(lambda: not job.nodes[1].ask("status", job=job.id)["supervised"])
    assert job.nodes[1].ask("status", job=job.id)["usage"] == {}
