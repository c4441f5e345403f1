"""The fan-out loses no item, waits no longer than it must, and lets nothing hold it up."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import traceback

import pytest

from clustertool.errors import AuthError, Interrupted, Several, Unreachable
from clustertool.ssh import parallel


def test_every_item_has_its_place_and_its_key() -> None:
    def do(number: int) -> int:
        if number % 3 == 0:
            raise AuthError(f"refused {number}")
        return number * 10

    got = parallel.each({key + 100: key for key in range(50)}, do, width=7)
    assert list(got.ok) == [key + 100 for key in range(50) if key % 3]
    assert got.ok[101] == 10
    assert list(got.failed) == [key + 100 for key in range(0, 50, 3)]
    assert got.failed[103].what == "refused 3"
    with pytest.raises(Several) as caught:
        got.all()
    assert caught.value.code == 77


def test_nothing_to_do() -> None:
    assert parallel.each([], str) == parallel.Gathered({}, {})


def test_sequences_are_numbered() -> None:
    assert parallel.each(["a", "b"], str.upper).all() == {0: "A", 1: "B"}


def test_no_more_than_width_at_a_time() -> None:
    lock = threading.Lock()
    running = [0, 0]

    def do(_: int) -> None:
        with lock:
            running[0] += 1
            running[1] = max(running)
        gate.wait(0.02)
        with lock:
            running[0] -= 1

    gate = threading.Event()
    parallel.each(range(40), do, width=5)
    assert running == [0, 5]


def test_64_trivial_items_cost_milliseconds() -> None:
    best = min(_timed(lambda: parallel.each(range(64), str)) for _ in range(5))
    assert best < 0.2


def test_time_is_over_for_what_hangs_and_only_for_that() -> None:
    gate = threading.Event()
    took = time.monotonic()
    got = parallel.each(range(8), lambda number: gate.wait(30) if number == 5 else number, timeout=1.0, width=3)
    assert time.monotonic() - took < 15, "what hangs takes 30 s"
    assert set(got.ok) == {0, 1, 2, 3, 4, 6, 7}
    assert isinstance(got.failed[5], Unreachable) and "1 s" in got.failed[5].what
    gate.set()


def test_items_that_never_started_are_not_lost() -> None:
    gate = threading.Event()
    got = parallel.each(range(10), lambda _: gate.wait(30), timeout=0.1, width=2)
    assert sorted(got.failed) == list(range(10)) and not got.ok
    gate.set()


def test_check_interrupts_at_once_and_nothing_new_starts() -> None:
    gate = threading.Event()
    started: list[int] = []
    calls = 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise Interrupted("Ctrl+C")

    def do(number: int) -> None:
        started.append(number)
        gate.wait(30)

    took = time.monotonic()
    with pytest.raises(Interrupted):
        parallel.each(range(10), do, width=2, check=check)
    assert time.monotonic() - took < 15, "what is under way takes 30 s"
    gate.set()
    deadline = time.monotonic() + 30
    while any(thread.name.startswith("fanout-") for thread in threading.enumerate()):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    assert sorted(started) == [0, 1]


def test_a_bug_reaches_the_caller_with_its_traceback() -> None:
    def broken(number: int) -> float:
        return 1 / number

    with pytest.raises(ZeroDivisionError) as caught:
        parallel.each([1, 0, 2], broken)
    assert "broken" in "".join(traceback.format_tb(caught.value.__traceback__))


def test_width_is_bounded_by_open_files() -> None:
    code = (
        "import resource, clustertool.ssh.parallel as f\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (128, 128))\n"
        "assert f._width(None) == 16 and f._width(1000) == 16 and f._width(3) == 3\n"
        "f.raise_file_limit(); assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 128\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (32, 128)); f.raise_file_limit.cache_clear(); f.raise_file_limit()\n"
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (128, 128)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (32, 32))\n"
        "assert f._width(None) == 1"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_hung_thread_does_not_keep_the_interpreter_alive_and_paramiko_is_not_imported() -> None:
    code = (
        "import sys, threading, clustertool.ssh.parallel as f\n"
        "got = f.each([1], lambda _: threading.Event().wait(), timeout=0.05)\n"
        "assert len(got.failed) == 1 and 'paramiko' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def _timed(do: object) -> float:
    start = time.perf_counter()
    do()  # type: ignore[operator]
    return time.perf_counter() - start
