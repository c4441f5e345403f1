"""What ranks use is written down while they run, whole trees of them, and costs the node next to nothing."""

from __future__ import annotations

import json
import math
import os
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from clustertool.model.job.progress import Metrics, find_metrics
from clustertool.node.jobs import rank_log
from clustertool.node.storage import files
from clustertool.node.supervisor.node_monitor import Book, RankMetrics, Running, Sampler, UsageRecorder
from clustertool.node.system import processes
from tests.node import programs as p
from tests.node.harness import Bench, Job, read, until

# A rank whose children work until CPU is spent, and end when the test has seen them.
FAMILY = p.python("""
import os, time
for _ in range(3):
    if os.fork() == 0:
        end = time.process_time() + 0.2
        while time.process_time() < end: pass
        while not os.path.exists("go"): time.sleep(0.05)
        os._exit(0)
say("ready")
for _ in range(3): os.wait()
say("step=3 done")
time.sleep(1000)
""")


def usage(job: Job, node: int = 0) -> list[dict[str, Any]]:
    lines = read(str(job.dir(node) / ".clustertool/usage.jsonl")).split(b"\n")[:-1]
    return [json.loads(line) for line in lines]


def rows(job: Job, rank: int = 0) -> list[list[Any]]:
    return [row for line in usage(job) for row in line["r"] if row[1] == rank]


def test_a_rank_is_its_whole_tree(bench: Bench) -> None:
    job = bench.run(None, p.one_each(FAMILY, p.PLAIN), per_node=2)
    until(lambda: any(row[3] >= 0.6 and row[5] == 4 for row in rows(job)), f"0.6 s of CPU: {rows(job)}")
    (job.dir() / "go").touch()
    ended = until(lambda: [row for row in rows(job) if row[3] >= 0.6 and row[5] == 1], f"they have ended: {rows(job)}")
    last = ended[0]
    role, rank, attempt, cpu, memory, count, size = last
    assert (role, rank, attempt, count) == ("trainer", 0, 0, 1)
    assert 0.6 <= cpu < 1.2
    assert memory > 1 << 20
    assert size == len(job.log(0))
    assert max(row[5] for row in rows(job)) == 4
    idle = rows(job, 1)[-1]
    assert idle[3] < 0.4
    busy, cores, used, total = usage(job)[-1]["n"]
    assert busy > 0.6
    assert cores == os.cpu_count()
    assert 0 < used < total
    job.stop()
    job.gone()


def test_exits_tell_what_was_used(bench: Bench) -> None:
    code = (
        "import time\nend = time.process_time() + 0.3\nwhile time.process_time() < end: pass\nx = bytearray(50 << 20)"
    )
    job = bench.run(None, p.python(code))
    (event,) = job.until("exited")
    assert 0.3 <= event["cpu"] < 3.0
    assert event["memory"] > 50 << 20
    job.gone()


def test_one_answer_tells_all(bench: Bench) -> None:
    chatty = "i=0; while :; do i=$((i+1)); echo step=$i; sleep 0.05; done"
    crash = "echo ready; until [ -e go ]; do sleep 0.2; done; echo last words; exit 7"
    job = bench.run(None, p.one_each(chatty, crash), per_node=2)
    until(lambda: len(rows(job)) >= 3, "three looks")
    running = job.nodes[0].ask("report", job=job.id, points=100)
    (first, _) = running["ranks"]
    assert first["progress"][-1][2] > 1
    assert running["supervised"]
    assert abs(running["now"] - time.time()) < 60
    (job.dir() / "go").touch()
    job.ended()
    answer = job.nodes[0].ask("report", job=job.id, points=2)
    assert [event["type"] for event in answer["events"]][-1] == "ended"
    assert {len(rank["rows"]) for rank in answer["ranks"]} == {3}
    assert [text for role, rank, text in answer["tails"] if rank == 1] == ["ready\nlast words\n"]
    assert answer["plan"]["processes"][0]["command"].startswith("sh -c")
    steps = [step for _, _, step in answer["ranks"][0]["progress"]]
    assert steps == sorted(steps)
    assert steps[-1] == job.log(0).count(b"\n")
    job.gone()


def test_a_job_that_left_no_record_of_use(bench: Bench) -> None:
    job = bench.run(None, "exit 3")
    job.ended()
    job.gone()  # the supervisor writes its last sample after it has ended the job
    (job.dir() / ".clustertool/usage.jsonl").unlink(missing_ok=True)
    answer = job.nodes[0].ask("report", job=job.id, points=50)
    assert answer["machine"] == {"cores": 0, "total": 0, "rows": []}
    assert answer["ranks"][0]["rows"] == []


@pytest.fixture
def job_dir(tmp_path: Path) -> int:
    (tmp_path / "job").mkdir()
    return os.open(tmp_path / "job", os.O_RDONLY)


def me() -> tuple[processes.Process, Running]:
    process = processes.identify(os.getpid())
    assert process
    return process, Running("trainer", 0, 0, process.pid, 0)


def written(tmp_path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (tmp_path / "job/.clustertool/usage.jsonl").read_text().splitlines() if line]


def test_a_slow_card_delays_no_other_request(tmp_path: Path, job_dir: int) -> None:
    """The driver hangs: the loop goes on, and the end waits for a moment only."""
    hang = threading.Event()

    def cards() -> list[tuple[int, float, int, int]]:
        hang.wait(60)
        return [(0, 50.0, 1, 2)]

    process, rank = me()
    recorder = UsageRecorder(job_dir, cards)
    began = time.monotonic()
    for _ in range(1000):
        recorder.turn([process], [rank])
    recorder.close()
    assert time.monotonic() - began < 5.0
    hang.set()
    usage = tmp_path / "job/.clustertool/usage.jsonl"
    until(lambda: usage.exists() and usage.stat().st_size > 0, "the line came late")
    (line,) = written(tmp_path)
    assert line["d"] == [[0, 50.0, 1, 2]]


def test_nothing_runs_nothing_is_written(tmp_path: Path, job_dir: int) -> None:
    recorder = UsageRecorder(job_dir)
    recorder.turn([], [])
    recorder.close()
    assert not (tmp_path / "job/.clustertool").exists()


def test_the_file_is_thinned_out_whole(tmp_path: Path, job_dir: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("clustertool.node.supervisor.node_monitor._MORE", 100)
    book = Book(job_dir, ".clustertool/usage.jsonl")
    for n in range(5000):
        book.write(n * 60.0, {"t": n * 60.0, "n": [], "r": []})
    book.close()
    times = [line["t"] for line in written(tmp_path)]
    assert times[0] == 0.0
    assert times[-1] == 4999 * 60.0
    assert times == sorted(times)
    assert len(times) < 2500
    assert not (tmp_path / "job/.clustertool/usage.jsonl.new").exists()


def test_restarts_add_up(job_dir: int) -> None:
    """CPU counts on over attempts, whose processes are others."""
    sample = Sampler()
    process, rank = me()
    first = sample(1.0, [process], [rank])["r"][0][3]
    assert first > 0
    other = processes.identify(os.getppid())
    assert other
    again = sample(2.0, [other], [Running("trainer", 0, 1, other.pid, 0)])["r"][0]
    assert again[2] == 1
    assert again[3] >= first


def test_processes_may_be_nested_deeply() -> None:
    """Deeper than Python nests calls."""
    _, rank = me()
    stat = processes.stat(rank.pid)
    assert stat
    stats = {rank.pid + n: stat._replace(parent=rank.pid + n - 1) for n in range(5000)}
    owned = Sampler()._owned(dict(reversed(stats.items())), {rank.pid: ("trainer", 0)})
    assert len(owned["trainer", 0]) == 5000


def test_a_log_that_has_not_grown_is_not_read_again(tmp_path: Path, job_dir: int) -> None:
    log = tmp_path / "job/log/workerlog.0"
    log.parent.mkdir()
    recorder = UsageRecorder(job_dir)
    _, rank = me()
    log.write_text("step=1\n")
    recorder._read_logs([rank._replace(log_size=7)])
    log.write_text("step=2\n")
    recorder._read_logs([rank._replace(log_size=7)])
    assert recorder.progress[0][3] == 1
    recorder._read_logs([rank._replace(log_size=14)])
    assert recorder.progress[0][3] == 2


def test_a_step_below_the_one_before_is_found_within_an_attempt(tmp_path: Path, job_dir: int) -> None:
    """Another attempt may repeat steps. What pservers print does not count."""
    recorder = UsageRecorder(job_dir)
    _, rank = me()
    samples = [(0, 5, (5, True)), (0, 7, (7, True)), (1, 6, (7, True)), (1, 9, (9, True)), (1, 8, (9, False))]
    for attempt, step, (highest, steady) in samples:
        log = tmp_path / "job/log" / ("attempt1" if attempt else "") / "workerlog.0"
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text(f"step={step}\n")
        server = rank._replace(role="pserver", log_size=step)
        (log.parent / "serverlog.0").write_text(f"step={100 + step}\n")
        recorder._read_logs([rank._replace(attempt=attempt, log_size=step), server._replace(attempt=attempt)])
        assert (recorder.steps.highest, recorder.steps.steady) == ((None, highest), steady), step


def test_without_a_rank_no_thread_is_started(job_dir: int) -> None:
    before = threading.active_count()
    recorder = UsageRecorder(job_dir)
    recorder.close()
    assert recorder._worker._thread is None
    assert threading.active_count() == before


def test_a_sample_costs_little() -> None:
    """80 processes, as eight ranks with nine helpers each: every two seconds, well under half a percent of a core."""
    found = [processes.identify(pid) for pid in processes.pids()]
    members = [process for process in found if process][:80]
    ranks = [Running("trainer", n, 0, process.pid, 0) for n, process in enumerate(members[:8])]
    sample = Sampler()
    sample(0.0, members, ranks)
    began = time.thread_time()
    for n in range(50):
        sample(float(n), members, ranks)
    per_sample = (time.thread_time() - began) / 50 * 80 / len(members)
    assert per_sample / 2.0 < 0.005


def test_files_of_hostile_neighbours(tmp_path: Path, job_dir: int) -> None:
    """A link in the file's place is not followed: nothing is recorded, the job goes on."""
    target = tmp_path / "target"
    (tmp_path / "job/.clustertool").mkdir()
    (tmp_path / "job/.clustertool/usage.jsonl").symlink_to(target)
    with pytest.raises(OSError):
        files.open_append(job_dir, ".clustertool/usage.jsonl")
    process, rank = me()
    recorder = UsageRecorder(job_dir)
    recorder.turn([process], [rank])
    recorder.close()
    assert not target.exists()


TRAINER, LOG = ("trainer", 0), "log/workerlog.0"


def test_numbers_are_recorded_when_they_change(tmp_path: Path, job_dir: int) -> None:
    metrics = RankMetrics(job_dir)
    for t, line in enumerate(
        ("step=10/100 loss=nan", "step=10/100 loss=nan", "saving", "step=20/100", "step=30/100 lr=0.1")
    ):
        metrics.take(TRAINER, LOG, 1e9 + 10 * t, find_metrics(f"{line}\n"))
    metrics.take(TRAINER, "log/attempt1/workerlog.0", 1e9 + 50, find_metrics("step=25/100\n"))
    metrics.close()
    rows = list(rank_log.metrics(job_dir))
    assert [(t - 1e9, log[4:12], one.step, one.percent, one.lr) for t, log, one in rows] == [
        (0.0, "workerlo", 10, 10.0, None),
        (30.0, "workerlo", 20, 20.0, None),
        (40.0, "workerlo", 30, 30.0, 0.1),
        (50.0, "attempt1", 25, 25.0, None),
    ]
    losses = [one.loss for _, _, one in rows]
    assert all(loss is not None and math.isnan(loss) for loss in losses[:3]), "the newest loss stays"
    assert losses[3] is None, "another attempt begins without numbers"
    assert [one.steps_per_second for _, _, one in rows] == [None, pytest.approx(1 / 3, abs=1e-3), 0.5, None]
    assert [one.eta for _, _, one in rows] == [None, 240.0, 140.0, None]
    assert metrics.newest == {TRAINER: rows[-1][2]}
    assert len(list(rank_log.metrics(job_dir, 160))) == 1


def test_a_printed_rate_counts(tmp_path: Path, job_dir: int) -> None:
    metrics = RankMetrics(job_dir)
    metrics.take(TRAINER, LOG, 1.0, find_metrics("step=1 5 steps/s\n"))
    metrics.take(TRAINER, LOG, 2.0, find_metrics("step=2\n"))
    metrics.close()
    assert metrics.newest[TRAINER] == Metrics(step=2, steps_per_second=5.0)


def test_records_of_numbers_that_are_none(tmp_path: Path, job_dir: int) -> None:
    good = [None, 3, None, None, None, None, "NaN", None, None, None, None]
    bad = [[1.0, LOG, None], {"t": 3}, [1.0, LOG, [[]] * 11], [1.0, LOG, ["x"] * 11], [-1, LOG, good]]
    files.create(
        job_dir, ".clustertool/metrics.jsonl", b"".join(json.dumps(one).encode() + b"\n" for one in bad) + b"[1"
    )
    assert list(rank_log.metrics(job_dir)) == []
    files.create(job_dir, ".clustertool/metrics.jsonl", json.dumps([2.0, LOG, good]).encode() + b"\n", exclusive=False)
    ((t, log, numbers),) = rank_log.metrics(job_dir)
    assert (t, log, numbers.step) == (2.0, LOG, 3)
