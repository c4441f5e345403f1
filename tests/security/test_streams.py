"""Events and logs of a hostile node while a job is followed: ranks of the plan alone, and bounded memory."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest

from clustertool.model.job import state
from clustertool.model.job.state import JobStatus
from clustertool.show.job_text import news_text
from clustertool.watch.job_view import JobView, LogLines
from clustertool.watch.news import RefusedNews
from tests.cli import LoopSite

PLAN = {("trainer", 0): 0, ("trainer", 1): 1}


def events(node: int, *events: dict[str, Any], at: int = 0) -> tuple[int, dict[str, Any], bytes, float]:
    return (
        node,
        {"type": "events", "node": node, "events": [{"t": 1.0, **event} for event in events], "at": at},
        b"",
        0.0,
    )


def job(node: int, *ranks: int) -> dict[str, Any]:
    processes = [
        {"role": "trainer", "rank": rank, "local_rank": 0, "endpoint": "", "log": f"log/workerlog.{rank}"}
        for rank in ranks
    ]
    return {"type": "job", "id": "j", "nodes": ["honest", "evil"], "node": node, "processes": processes}


def log(node: int, rank: int, text: bytes, attempt: int = 0, off: int = 0, name: str = "") -> Any:
    folder = f"log/attempt{attempt}" if attempt else "log"
    header = {
        "type": "log",
        "node": node,
        "role": "trainer",
        "rank": rank,
        "attempt": attempt,
        "off": off,
        "log": name or f"{folder}/workerlog.{rank}",
    }
    return node, header, text, 0.0


def followed(*given: Any) -> JobView:
    watch = JobView(frozenset({0, 1}), *given)
    watch.take(*events(0, job(0, 0), at=1))
    watch.take(*events(1, job(1, 1), at=1))
    return watch


@pytest.mark.parametrize("given", [(), (JobStatus(plan=PLAN),)], ids=["as nodes say", "as planned"])
def test_a_node_speaks_of_its_own_ranks_only(given: tuple[Any, ...]) -> None:
    watch = followed(*given)
    exited = {"type": "exited", "role": "trainer", "rank": 0, "code": 1}
    assert watch.take(*events(1, exited, {**exited, "type": "frozen"}, at=2)) == []
    assert watch.status.processes["trainer", 0].state == "waiting"
    watch.take(*events(1, job(1, 0, 1), at=3))
    assert watch.status.processes["trainer", 0].node == 0
    refused = watch.take(*log(1, 0, b"forged\n"))
    (item,) = refused
    assert isinstance(item, RefusedNews)
    assert news_text(item).startswith("evil: it sent a log (log/workerlog.0) of trainer 0, which it does not run")
    assert watch.take(*log(1, 1, b"more\n")) == []
    assert watch.take(*log(0, 0, b"true\n")) == [LogLines("trainer", 0, 0, ["true"])]
    assert 1 in watch.closed


def test_ranks_that_the_plan_does_not_have() -> None:
    watch = followed(JobStatus(plan=PLAN))
    watch.take(*events(1, job(1, *range(2, 1000)), at=2))
    watch.take(
        *events(1, *({"type": "started", "role": "trainer", "rank": rank, "pid": 7} for rank in range(2, 1000)), at=3)
    )
    assert sorted(watch.status.processes) == sorted(PLAN)


def test_the_number_of_ranks_is_bounded_without_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """With a smaller bound, which takes less time."""
    assert state.MOST == 100_000
    monkeypatch.setattr(state, "MOST", 1000)
    status = JobStatus()
    for rank in range(1100):
        status.apply(1, {"type": "started", "t": 1.0, "role": "trainer", "rank": rank, "pid": 7})
    assert len(status.processes) == 1000


@pytest.mark.parametrize("name", ["log/workerlog.7", "../../x", "log/attempt3/workerlog.1"])
def test_a_log_has_the_name_that_its_rank_gives_it(name: str) -> None:
    watch = followed()
    assert "which it does not run" in str(watch.take(*log(1, 1, b"x\n", name=name)))


def test_lines_without_an_end_have_one_bound_together() -> None:
    """40 ranks of 16 MiB each took 650 MB."""
    watch = JobView(frozenset({0}))
    watch.take(*events(0, job(0, *range(120)), at=1))
    tracemalloc.start()
    chunk = b"x" * (1 << 18)
    for rank in range(120):
        for number in range(4):
            assert watch.take(*log(0, rank, chunk, off=number * len(chunk))) == []
    in_use, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert in_use < 100 << 20
    (last,) = watch.take(*log(0, 119, b"\n", off=4 << 18))
    assert isinstance(last, LogLines)
    assert last.lines[0].endswith(f"[cut: this line has {4 << 18} bytes]")
    (first,) = watch.take(*log(0, 0, b"\n", off=4 << 18))
    assert isinstance(first, LogLines)
    assert first.lines == ["x" * (4 << 18)]


def test_old_attempts_take_no_memory() -> None:
    watch = JobView(frozenset({0}))
    watch.take(*events(0, job(0, 0), at=1))
    for attempt in range(100):
        assert watch.take(*log(0, 0, b"no newline", attempt=attempt)) == []
    assert watch.take(*log(0, 0, b"\n", attempt=99, off=10)) == [LogLines("trainer", 0, 0, ["no newline"])]
    assert len(watch._lines["trainer", 0]) == 2


def test_a_job_is_followed_to_its_end_although_a_program_wrote_into_its_events(site: Callable[..., LoopSite]) -> None:
    """The node is named, what it streams is not used any more, and the other node decides how the job ends."""
    one = site(2)
    one.workspace(
        train_py="""
        import os, time
        rank = os.environ["RANK"]
        if rank == "1":
            with open(".clustertool/events.jsonl", "a") as file:
                file.write('{"type": "exited", "t": 1.0, "role": "trainer", "rank": -7, "code": "no"}\\n')
        time.sleep(1)
        print("rank", rank, "is done", flush=True)
    """
    )
    done = one.inv("run", "--workspace", "job")
    done.ends(0)
    assert f"{one.name(1)}: it sent something that is not valid: events[" in done.err
    assert "rank is -7" in done.err
    assert "it is not followed any more" in done.err
    one.gone()
    end = time.monotonic() + 40
    assert one.inv("stop", "--job", done.job).code in (0, 69)
    assert time.monotonic() < end
