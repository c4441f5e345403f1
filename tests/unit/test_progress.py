"""A dispatch ends with one true line; before that bars on a terminal and a line every two seconds elsewhere."""

from __future__ import annotations

import io
import os
import re
import threading
import time
from collections.abc import Callable

import pytest

from clustertool.model.quantities import human_bytes, human_seconds
from clustertool.show.progress_bars import DispatchProgress
from clustertool.show.terminal import Terminal
from tests.unit.terminals import far_end

MB = 1_000_000


class Clock:
    """Time that passes only when a test says so."""

    def __init__(self) -> None:
        self.now = 50.0

    def __call__(self) -> float:
        return self.now


def plainly(names: list[str], play: Callable[[DispatchProgress, Clock], None]) -> list[str]:
    out, clock = io.StringIO(), Clock()
    try:
        with DispatchProgress(Terminal(out, io.StringIO(), {}), names, clock=clock) as progress:
            play(progress, clock)
    except InterruptedError:
        pass
    return out.getvalue().splitlines()


def on_pty(
    names: list[str],
    play: Callable[[DispatchProgress, Terminal], None],
    encoding: str = "utf-8",
    clock: Callable[[], float] = time.monotonic,
) -> str:
    """Everything a terminal of 80 columns is sent."""
    with far_end(encoding) as (out, data), open(os.dup(out.fileno()), "w", encoding="utf-8") as err:
        terminal = Terminal(out, err, {"TERM": "xterm", "NO_COLOR": "1"})
        with DispatchProgress(terminal, names, clock=clock) as progress:
            play(progress, terminal)
        terminal.write("\x1b[1mafter\x1b[0m\n")
    return data.decode(encoding)


@pytest.mark.parametrize(
    ("n", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.0 kB"),
        (1500, "1.5 kB"),
        (99_949, "99.9 kB"),
        (99_950, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1.0 MB"),
        (25_100_000, "25.1 MB"),
        (104e6, "104 MB"),
        (2.5e9, "2.5 GB"),
        (1e19, "10000 PB"),
    ],
)
def test_human_bytes(n: float, text: str) -> None:
    assert human_bytes(n) == text


@pytest.mark.parametrize(
    ("s", "text"),
    [
        (-1, "0.00 s"),
        (0, "0.00 s"),
        (0.05, "0.05 s"),
        (0.0949, "0.09 s"),
        (0.096, "0.1 s"),
        (2.44, "2.4 s"),
        (9.96, "10 s"),
        (59.4, "59 s"),
        (59.6, "1 min 00 s"),
        (65, "1 min 05 s"),
        (3599.6, "1 h 00 min"),
        (7380, "2 h 03 min"),
        (86399, "1 d 00 h"),
        (273600, "3 d 04 h"),
    ],
)
def test_human_seconds(s: float, text: str) -> None:
    assert human_seconds(s) == text


def test_it_ends_with_bytes_nodes_and_time() -> None:
    def play(progress: DispatchProgress, clock: Clock) -> None:
        clock.now += 2
        for i in range(16):
            progress.node(f"node{i}", 0, 25 * MB)
            progress.done(f"node{i}")
        progress.uplink(25 * MB, 25 * MB)
        progress.between = 375 * MB
        clock.now += 0.5

    last = "dispatch: 25.0 MB over the uplink, 375 MB between nodes, 16 nodes ready in 2.5 s"
    assert plainly([f"node{i}" for i in range(16)], play)[-1] == last


def test_time_that_passed_before_counts() -> None:
    out, clock = io.StringIO(), Clock()
    with DispatchProgress(Terminal(out, io.StringIO(), {}), ["a1"], clock=clock, since=clock.now - 3) as progress:
        progress.done("a1")
    assert out.getvalue() == "dispatch: nothing to send, 1 node ready in 3.0 s\n"


def test_plain_lines_come_every_two_seconds_at_most() -> None:
    def play(progress: DispatchProgress, clock: Clock) -> None:
        for step in range(1, 11):
            clock.now += 0.5
            progress.uplink(5 * step * MB, 50 * MB)
        progress.done("node1")
        progress.done("node2")

    assert plainly(["node1", "node2"], play) == [
        "dispatch: 20.0 MB of 50.0 MB over the uplink, 0 of 2 nodes done, 10.0 MB/s, 3.0 s left",
        "dispatch: 40.0 MB of 50.0 MB over the uplink, 0 of 2 nodes done, 10.0 MB/s, 1.0 s left",
        "dispatch: 50.0 MB over the uplink, 2 nodes ready in 5.0 s",
    ]


def test_nodes_that_fail_are_named() -> None:
    def play(progress: DispatchProgress, clock: Clock) -> None:
        clock.now += 1
        progress.done("node1")
        progress.node("node2", 0, 0)
        progress.done("node2")
        progress.node("node3", 5 * MB, 10 * MB)
        progress.done("node3")
        progress.node("node4", 5 * MB, 10 * MB)
        progress.uplink(10 * MB, 10 * MB)
        progress.failed("node4", "disk full")

    names = ["node1", "node2", "node3", "node4"]
    assert plainly(names, play) == ["dispatch: 10.0 MB over the uplink, 3 nodes ready in 1.0 s, failed: node4"]


def test_nothing_to_send() -> None:
    def play(progress: DispatchProgress, clock: Clock) -> None:
        progress.done("a1")
        progress.done("a2")

    assert plainly(["a1", "a2"], play) == ["dispatch: nothing to send, 2 nodes ready in 0.00 s"]


def test_no_node_at_all() -> None:
    assert plainly(["a1"], lambda p, _: p.failed("a1", "gone")) == ["dispatch: no node done after 0.00 s, failed: a1"]


def test_an_interrupted_dispatch_says_how_far_it_came() -> None:
    def play(progress: DispatchProgress, clock: Clock) -> None:
        clock.now += 1
        progress.done("a1")
        raise InterruptedError

    assert plainly(["a1", "a2"], play) == ["dispatch: stopped after 1.0 s, 1 of 2 nodes done"]


def test_few_nodes_have_a_bar_each_and_the_bars_are_gone_at_the_end() -> None:
    def play(progress: DispatchProgress, terminal: Terminal) -> None:
        progress.uplink(6 * MB, 10 * MB)
        progress.node("node1", 5 * MB, 10 * MB)
        progress.failed("node2", "disk full [/b]\x1b[5m")
        terminal.line("said meanwhile [b]")
        terminal.warn("warned meanwhile")

    shown = on_pty(["node1", "node2"], play)
    assert "6.0 MB of 10.0 MB" in shown and "5.0 MB of 10.0 MB" in shown
    assert "failed disk full [/b]\\x1b[5m" in shown
    assert re.search(r"\x1b\[2Ksaid meanwhile \[b\]", shown)  # the bars were wiped before the line was written
    assert "warning: warned meanwhile" in shown
    assert re.search(r"\x1b\[2Kdispatch: no node done after [^\n]*, failed: node2\r\n\x1b\[1mafter\x1b\[0m\r\n$", shown)
    assert shown.rindex("\x1b[?25h") > shown.rindex("\x1b[?25l")  # the cursor is back
    assert "\x1b[5m" not in shown


def test_a_bar_for_the_uplink_with_rate_and_time_left_and_one_for_nodes() -> None:
    clock = Clock()

    def play(progress: DispatchProgress, terminal: Terminal) -> None:
        terminal.line("at first")
        for step in (1, 2):
            clock.now += 1
            progress.uplink(10 * step * MB, 50 * MB)
        progress.done("node1")

    shown = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", on_pty(["node1", "node2"], play, clock=clock)).replace("\r", "\n")
    assert re.search(r"^uplink +[━╸╺ ]+20\.0 MB of 50\.0 MB, 10\.0 MB/s, 3\.0 s left *$", shown, re.M)
    assert re.search(r"^nodes +[━╸╺ ]+1 of 2 *$", shown, re.M)


def test_many_nodes_are_folded_by_state() -> None:
    names = [f"node{i}" for i in range(1, 17)]

    def play(progress: DispatchProgress, terminal: Terminal) -> None:
        for name in names:
            progress.node(name, MB, 2 * MB)
        for name in names[:14]:
            progress.done(name)
        terminal.line("draw it")

    assert "node[1-14] done, node[15-16] receiving" in on_pty(names, play)


def test_no_row_is_wider_than_a_terminal_without_unicode() -> None:
    def play(progress: DispatchProgress, terminal: Terminal) -> None:
        progress.node("né1", 5 * MB, 10 * MB)
        progress.failed("node2", "é" * 100)

    shown = on_pty(["né1", "node2"], play, encoding="ascii")
    rows = re.sub(r"\x1b\[[0-9?]*[a-zA-Z]", "\n", shown).split("\n")
    assert "n\\xe91" in shown
    assert max(len(row.strip("\r")) for row in rows) == 80  # a wider one would wrap, and its remains could not be wiped


def test_bars_go_away_when_an_error_ends_them() -> None:
    def play(progress: DispatchProgress, terminal: Terminal) -> None:
        progress.node("node1", MB, 2 * MB)
        raise InterruptedError

    with pytest.raises(InterruptedError):
        on_pty(["node1"], play)


def test_reports_from_many_threads_add_up() -> None:
    names = [f"node{i}" for i in range(20)]

    def play(progress: DispatchProgress, clock: Clock) -> None:
        def send(name: str) -> None:
            for step in range(500):
                progress.node(name, step, 500)
                progress.uplink(step, 500)
            progress.done(name)

        threads = [threading.Thread(target=send, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        clock.now += 1

    assert plainly(names, play) == ["dispatch: 499 B over the uplink, 20 nodes ready in 1.0 s"]
