"""Ctrl+C in every phase: 130, nothing of the job lives on any node soon after, and every node is reported."""

from __future__ import annotations

import fcntl
import os
import re
import signal
import struct
import termios
import time

import pytest

from tests.cases import POLITE, STUBBORN
from tests.cli import Running, until

SLACK = 20.0  # seconds that a loaded machine may add to the promised 2


def ready(running: Running, ranks: int) -> None:
    for rank in range(ranks):
        running.says(f"ready {rank}$")


def ended_by_hand(running: Running, site, at: float, within: float):
    done = running.wait()
    assert time.monotonic() - at < within + SLACK
    done.ends(130)
    assert done.last == "clustertool: exit 130 (tool): Ctrl+C"
    assert not site.living()
    return done


def reported(done, site) -> str:
    """What was printed of all nodes alike."""
    names = rf"{site.name(0)[:-1]}\[0-{site.count - 1}\]"
    found = re.findall(rf"^{names}: (.*)$", done.err.replace("\r", ""), re.M)
    assert len(found) == 1, done.err
    return found[0]


@pytest.mark.chaos  # test_typed_at_a_terminal is the same with a terminal
def test_while_running(site):
    three = site(3)
    three.workspace(train_py=POLITE)
    running = three.start("run", "-w", "job", "--nproc-per-node", 2, "--all-ranks")
    ready(running, 6)
    at = running.signal(signal.SIGINT)
    done = ended_by_hand(running, three, at, 2)
    assert reported(done, three) == "clean"
    outcome = three.inv("status", "--json").ends(0).json["outcome"]
    assert (outcome["state"], outcome["code"], outcome["reason"]) == ("stopped", 130, "Ctrl+C")


def test_terminated(site):
    """SIGTERM to the command is a stop too; only its code differs."""
    pair = site(2)
    pair.workspace(train_py=POLITE)
    running = pair.start("run", "-w", "job", "--all-ranks")
    ready(running, 2)
    running.signal(signal.SIGTERM)
    done = running.wait().ends(143)
    assert done.last == "clustertool: exit 143 (tool): SIGTERM"
    assert reported(done, pair) == "clean"
    assert not pair.living()


def test_typed_at_a_terminal(site):
    """The line discipline gives it to everything in the foreground: what must carry the stop must not get it."""
    pair = site(2)
    (pair.workspace(train_py=POLITE) / "some").write_bytes(b"\xa5" * (4 << 20))
    running = pair.start("run", "-w", "job", "--nproc-per-node", 2, "--all-ranks", terminal=True)
    ready(running, 4)
    at = running.type("\x03")
    done = running.wait().ends(130)
    assert time.monotonic() - at < 2 + SLACK
    assert not pair.living()
    assert "node[0-1]: clean" in done.err
    assert "exit 130" in done.last
    assert "Traceback" not in done.out
    assert done.out.count("\x1b[?25h") >= done.out.count("\x1b[?25l"), "the cursor is shown again"
    outcome = pair.inv("status", "--json").ends(0).json["outcome"]
    assert (outcome["state"], outcome["code"], outcome["reason"]) == ("stopped", 130, "Ctrl+C")


@pytest.mark.chaos  # test_while_the_workspace_is_sent and test_typed_at_a_terminal have its parts
def test_typed_while_the_workspace_is_sent(site):
    pair = site(2)
    (pair.workspace(train_py=POLITE) / "big").write_bytes(os.urandom(60 << 20))
    pair.lab.shape("uplink", "20mbit")
    running = pair.start("run", "-w", "job", terminal=True)
    until(lambda: list(pair.root(0).glob(".clustertool/pieces/*")))
    at = running.type("\x03")
    done = running.wait().ends(130)
    assert time.monotonic() - at < 2 + SLACK
    assert not pair.jobs(0) + pair.jobs(1)
    assert "Traceback" not in done.out
    assert done.out.count("\x1b[?25h") >= done.out.count("\x1b[?25l"), "the cursor is shown again"


def test_once_with_ranks_that_do_not_want_to_end(site):
    pair = site(2)
    pair.workspace(train_py=STUBBORN)
    running = pair.start("run", "-w", "job", "--all-ranks", "--grace", 2)
    ready(running, 2)
    assert len([p for p in pair.living() if p.name not in ("ct-supervisor", "ct-guard")]) == 8
    at = running.signal(signal.SIGINT)
    done = ended_by_hand(running, pair, at, 2 + 2)
    assert time.monotonic() - at > 2, "they had their grace"
    assert reported(done, pair) == "clean"


def test_twice_kills_now(site):
    pair = site(2)
    pair.workspace(train_py=STUBBORN)
    running = pair.start("run", "-w", "job", "--all-ranks", "--grace", 60)
    ready(running, 2)
    running.signal(signal.SIGINT)
    running.says("again kills at once")
    at = running.signal(signal.SIGINT)
    done = ended_by_hand(running, pair, at, 2)
    assert reported(done, pair) == "clean"


def test_three_times_leaves_and_tells_how_to_finish(site):
    pair = site(2)
    pair.workspace(train_py=STUBBORN)
    running = pair.start("run", "-w", "job", "--all-ranks", "--grace", 60)
    ready(running, 2)
    pair.lab.freeze(1)  # or the second one would have ended everything
    for output in ("again kills at once", "killing everything now"):
        running.signal(signal.SIGINT)
        running.says(output)
    at = running.signal(signal.SIGINT)
    done = running.wait()
    assert time.monotonic() - at < 1 + SLACK
    done.ends(130)
    job = re.search(r"inv stop --job (\S+)", done.err)
    assert job
    assert done.last == "clustertool: exit 130 (tool): Ctrl+C"
    pair.lab.thaw(1)
    assert pair.inv("stop", "--job", job.group(1)).ends(0)
    assert not pair.living()


def test_while_waiting_for_pservers(site):
    pair = site(2)
    pair.workspace(train_py=POLITE, pserver_py=POLITE)
    running = pair.start("run", "-w", "job", "--mode", "ps", "--all-ranks")
    ready(running, 2)
    at = running.signal(signal.SIGINT)
    done = ended_by_hand(running, pair, at, 2)
    assert reported(done, pair) == "clean"
    assert "[trainer" not in done.out


def test_while_the_workspace_is_sent(site):
    pair = site(2)
    (pair.workspace(train_py=POLITE) / "big").write_bytes(os.urandom(60 << 20))
    pair.lab.shape("uplink", "20mbit")
    running = pair.start("run", "-w", "job")
    until(lambda: list(pair.root(0).glob(".clustertool/pieces/*")))
    at = running.signal(signal.SIGINT)
    done = running.wait().ends(130)
    assert time.monotonic() - at < 2 + SLACK
    assert not pair.jobs(0) + pair.jobs(1)
    until(
        lambda: not [p for node in (0, 1) for p in pair.processes(node)]
    )  # what is in the kernel's buffers is slow too
    assert "Traceback" not in done.err


def test_while_connecting(site):
    pair = site(2)
    pair.workspace(train_py=POLITE)
    pair.conf(CONNECT_TIMEOUT=60)
    pair.lab.cut(1)
    running = pair.start("run", "-w", "job")
    running.says("^conf: ")
    until(lambda: [p for p in pair.processes(0) if p.name == "ct-agent"])
    at = running.signal(signal.SIGINT)
    ended_by_hand(running, pair, at, 2)
    assert not pair.jobs(0)
    until(lambda: not pair.processes(0))


def test_while_the_job_is_placed(site):
    """Copies of a thousand files take a moment; what was copied is taken back, and an older job stays."""
    pair = site(2)
    many = pair.workspace(train_py=POLITE)
    for number in range(800):
        (many / f"file{number}").write_text("x")
    assert pair.inv("run", "-w", "job", "--job-id", "old", "--script", "true").code == 0
    running = pair.start("run", "-w", "job", "--job-id", "new")
    until(lambda: (pair.root(0) / "JOBnew").exists())
    at = running.signal(signal.SIGINT)
    done = ended_by_hand(running, pair, at, 2)
    assert reported(done, pair).startswith("clean")
    if "starting the trainers" not in done.err:
        assert [path.name for node in (0, 1) for path in pair.jobs(node)] == ["JOBold"] * 2


@pytest.mark.chaos  # the tests above have the phases of the start one by one
@pytest.mark.parametrize("tenths", [2, 4, 6, 8, 10, 12])
def test_at_any_moment_of_the_start(site, tenths):
    """Wherever it hits: it ends soon, nothing lives, and a directory is there only of a job that has begun."""
    pair = site(2)
    pair.workspace(train_py=POLITE)
    running = pair.start("run", "-w", "job", "--env", "PYTHONDONTWRITEBYTECODE=1")
    until(lambda: time.monotonic() - running.start > tenths / 10)
    at = running.signal(signal.SIGINT)
    done = running.wait()
    assert time.monotonic() - at < 2 + SLACK
    if not done.interrupted_before_our_code:
        done.ends(130)
        assert "Traceback" not in done.err
        assert "clean" not in done.err or "may still run" not in done.err
    assert not pair.living()
    jobs = pair.jobs(0) + pair.jobs(1)
    assert len(jobs) in (0, 2), done.err
    if jobs:
        assert re.search(r"^node.*: clean$", done.err, re.M), done.err


def test_when_no_process_reads_our_output(site, tmp_path):
    """`inv run | less`, left alone: the write to stdout hangs, the stop must go out all the same."""
    pair = site(2)
    pair.workspace(train_py="while True: print('x' * 1000)")
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    reader = os.open(fifo, os.O_RDONLY | os.O_NONBLOCK)
    running = pair.start("run", "-w", "job", "--all-ranks", out=fifo)
    try:
        until(lambda: fionread(reader) > 40000)
        at = running.signal(signal.SIGINT)
        pair.gone(2 + SLACK)
        assert running.process.poll() is None
        os.set_blocking(reader, True)
        while os.read(reader, 1 << 16):
            pass
        running.wait().ends(130)
        assert time.monotonic() - at < 4 * SLACK
    finally:
        os.close(reader)


def fionread(fd: int) -> int:
    """Bytes that wait in a pipe."""
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"\0\0\0\0"))[0])
