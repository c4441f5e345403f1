"""A job that hangs ends or begins again, as --on-hang says; its stacks, and the dumps of what torch records, are kept."""

from __future__ import annotations

from collections.abc import Callable

from tests.cli import LoopSite

# As torch with NCCL does it: a thread waits for a byte in the pipe, and writes what was recorded. The dump is a pickle of {}.
PROGRAM = """
import os, threading, time
PIPE = f".clustertool/flight-{os.environ['RANK']}.pipe"

def write_dump():
    pipe = os.open(PIPE, os.O_RDWR)
    if os.read(pipe, 1):
        with open(os.path.dirname(PIPE) + f"/flight/rank-{os.environ['RANK']}", "wb") as file:
            file.write(b"\\x80\\x02}q\\x00.")

if os.environ["CLUSTERTOOL_ATTEMPT"] == "0":
    os.mkfifo(PIPE)
    threading.Thread(target=write_dump, daemon=True).start()
    print("ready", flush=True)
    time.sleep(1000)
print("done")
"""


def test_a_job_that_hangs_is_ended_with_124(site: Callable[..., LoopSite]) -> None:
    two = site(2)
    two.workspace(train_py=PROGRAM)
    done = two.inv("run", "-w", "job", "--hang-timeout=2", "--on-hang=abort").ends(124)
    assert "no progress: all 2 ranks wait in clock_nanosleep (train.py:15)" in done.err
    assert "exit 124 (tool): hang: all 2 ranks wait in clock_nanosleep" in done.last
    assert all((path / ".clustertool/stacks.jsonl").stat().st_size for node in range(2) for path in two.jobs(node))
    two.inv("report", "--to=page.html").ends(0)
    assert "Stacks when no rank made progress" in (two.folder / "page.html").read_text()
    fetched = two.inv("fetch", "--path=.clustertool/flight", "--to=flight").ends(0)
    assert "2 dumps -> flight" in fetched.out
    assert sorted(path.name for path in (two.folder / "flight").iterdir()) == ["rank-0", "rank-1"]


def test_a_job_that_hangs_begins_again(site: Callable[..., LoopSite]) -> None:
    two = site(2)
    two.workspace(train_py=PROGRAM)
    done = two.inv("run", "-w", "job", "--hang-timeout=2", "--on-hang=restart", "--max-restarts=1").ends(0)
    assert "no progress: " in done.err and "attempt 1 begins" in done.err
    assert "done" in done.out
