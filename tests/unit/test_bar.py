"""A bar on a terminal, a line every two seconds elsewhere, nothing at all where it was quick."""

from __future__ import annotations

import io
import re

from clustertool.show.progress_bars import Bar
from clustertool.show.terminal import Terminal
from tests.unit.terminals import far_end

MB = 1_000_000


def test_lines_every_two_seconds() -> None:
    out, now = io.StringIO(), [10.0]
    with Bar(Terminal(out, io.StringIO(), {}), "split", lambda: now[0]) as bar:
        for step in range(20):
            bar.tell("counting", step * MB, 20 * MB)
            now[0] += 0.25
        bar.tell("writing", 0, 50 * MB)
        now[0] += 2
        bar.tell("writing", 20 * MB, 50 * MB)
    assert out.getvalue().splitlines() == [
        "split: counting, 8.0 MB of 20.0 MB, 3.0 s left",
        "split: counting, 16.0 MB of 20.0 MB, 1.0 s left",
        "split: writing, 20.0 MB of 50.0 MB, 3.0 s left",
    ]


def test_what_is_quick_says_nothing() -> None:
    out = io.StringIO()
    with Bar(Terminal(out, io.StringIO(), {}), "split", lambda: 5.0) as bar:
        bar.tell("counting", 0, 0)
        bar.tell("counting", 5, 5)
    assert not out.getvalue()


def test_a_terminal_gets_a_bar_that_goes_away() -> None:
    with far_end() as (out, data):
        terminal = Terminal(out, io.StringIO(), {"TERM": "xterm"})
        with Bar(terminal, "split [x]") as bar:
            bar.tell("writing [bold]", 10 * MB, 40 * MB)
            assert bar._progress is not None
            bar._progress.refresh()
        terminal.line("done")
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", data.decode())
    assert "split [x]: writing [bold] " in shown
    assert "━" in shown
    assert "10.0 MB of 40.0 MB" in shown
    after = data.decode().rpartition("40.0 MB")[2]
    assert "\x1b[2K" in after, "the bar is wiped"
    assert after.endswith("done\r\n")
