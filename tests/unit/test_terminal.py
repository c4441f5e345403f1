"""Colours on terminals only, no character that crashes, no word when the reader leaves."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from clustertool.show.terminal import RankLines, ReaderGone, Terminal, colour_of, prefix, widest_prefix

ROOT = Path(__file__).resolve().parents[2]
TALK = """
from clustertool.show.terminal import Terminal
from clustertool.show.terminal import RankLines
terminal = Terminal()
terminal.line("a line", "green")
terminal.warn("a warning")
RankLines(terminal).show("trainer", 3, "node2", ["text"])
"""


def environment(**extra: str) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "VIRTUAL_ENV")}
    return {**kept, "PYTHONPATH": str(ROOT), "TERM": "xterm", "LANG": "C.UTF-8", **extra}


def on_pty(code: str, **extra: str) -> str:
    """Output of a program whose stdout and stderr are a real terminal."""
    master, slave = os.openpty()
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, env=environment(**extra)
    ) as program:
        os.close(slave)
        data = b""
        while True:
            try:
                chunk = os.read(master, 65536)
            except OSError:  # EIO: the last holder of the terminal is gone
                break
            if not chunk:
                break
            data += chunk
        assert program.wait(timeout=120) == 0, data
    os.close(master)
    return data.decode()


def on_pipe(code: str, **extra: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment(**extra), timeout=120, check=False
    )


def plain_terminal(**environ: str) -> tuple[Terminal, io.StringIO, io.StringIO]:
    out, err = io.StringIO(), io.StringIO()
    return Terminal(out, err, environ), out, err


def test_a_terminal_gets_colours() -> None:
    shown = on_pty(TALK)
    assert "\x1b[32ma line\x1b[0m" in shown
    assert "\x1b[33mwarning:\x1b[0m a warning" in shown
    assert f"\x1b[{colour_of(3)}m[trainer 3 node2]\x1b[0m text" in shown


@pytest.mark.parametrize(
    "extra", [{"NO_COLOR": "1"}, {"TERM": "dumb"}, {"CLICOLOR": "0"}, {"NO_COLOR": "1", "FORCE_COLOR": "1"}]
)
def test_a_terminal_that_wants_no_colours_gets_none(extra: dict[str, str]) -> None:
    shown = on_pty(TALK, **extra)
    assert "\x1b" not in shown
    assert "[trainer 3 node2] text" in shown


def test_a_pipe_gets_plain_lines_and_warnings_go_to_stderr() -> None:
    done = on_pipe(TALK)
    assert (done.stdout, done.stderr) == ("a line\n[trainer 3 node2] text\n", "warning: a warning\n")


@pytest.mark.parametrize("name", ["FORCE_COLOR", "CLICOLOR_FORCE"])
def test_a_pipe_gets_colours_if_they_are_forced(name: str) -> None:
    assert "\x1b[32ma line\x1b[0m" in on_pipe(TALK, **{name: "1"}).stdout
    assert "\x1b" not in on_pipe(TALK, **{name: "0"}).stdout


def test_characters_that_the_encoding_lacks_are_escaped() -> None:
    code = "from clustertool.show.terminal import Terminal\nTerminal().line('caf\\xe9 \\u2713 \\ud800')"
    assert on_pipe(code, PYTHONIOENCODING="ascii").stdout == "caf\\xe9 \\u2713 \\ud800\n"
    assert on_pipe(code, PYTHONIOENCODING="utf-8").stdout == "café ✓ \\ud800\n"


def test_the_reader_may_leave() -> None:
    code = """
from clustertool.show.terminal import Terminal
terminal = Terminal()
while True:
    terminal.line("y" * 1000)
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as program:
        assert program.stdout is not None and program.stderr is not None
        assert program.stdout.readline() == b"y" * 1000 + b"\n"
        program.stdout.close()
        assert program.wait(timeout=120) == 141
        assert program.stderr.read() == b""


def test_a_closed_stdout_is_no_failure() -> None:
    closing = ["sh", "-c", f'exec "{sys.executable}" -c "$1" >&-', "sh", TALK]
    done = subprocess.run(closing, stderr=subprocess.PIPE, env=environment(), timeout=120, check=False)
    assert (done.returncode, done.stderr) == (0, b"warning: a warning\n")


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_disk_is_reported_once() -> None:
    code = """
from clustertool.show.terminal import ReaderGone, Terminal
terminal = Terminal()
try:
    terminal.line("one")
except ReaderGone:
    terminal.line("two")
"""
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", code], stdout=full, stderr=subprocess.PIPE, text=True, env=environment(), check=False
        )
    assert done.returncode == 74
    assert done.stderr == "clustertool: cannot write to stdout: [Errno 28] No space left on device\n"


def test_all_threads_learn_that_the_reader_is_gone() -> None:
    read, write = os.pipe()
    with open(write, "w") as stream:
        terminal = Terminal(stream, io.StringIO(), {})
        os.close(read)
        for _ in range(2):
            with pytest.raises(ReaderGone):
                terminal.line("text")
        terminal.error("stderr goes on")


def test_lines_of_many_threads_never_mix() -> None:
    terminal, out, _ = plain_terminal()
    lines = RankLines(terminal)

    def speak(rank: int) -> None:
        for at in range(200):
            lines.show("trainer", rank, "n", [f"{rank}" * 50, f"line {at}"])

    threads = [threading.Thread(target=speak, args=(rank,)) for rank in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = out.getvalue().splitlines()
    for rank in range(8):
        own = [line for line in found if line.startswith(f"[trainer {rank} n] ")]
        assert own[::2] == [f"[trainer {rank} n] " + f"{rank}" * 50] * 200
        assert own[1::2] == [f"[trainer {rank} n] line {at}" for at in range(200)]
    assert len(found) == 8 * 400


def test_messages_cannot_steer_the_terminal_but_keep_their_lines() -> None:
    terminal, out, err = plain_terminal(FORCE_COLOR="1")
    terminal.line("\x1b[2Jone\ntwo\r")
    terminal.error("\x1b]0;x\x07")
    assert out.getvalue() == "\\x1b[2Jone\n    two\\r\n"
    assert err.getvalue() == "\x1b[1;31merror:\x1b[0m \\x1b]0;x\\x07\n"


def test_json_is_ascii_and_reads_back() -> None:
    terminal, out, _ = plain_terminal(FORCE_COLOR="1")
    value = {"text": "é\x1b\x7f\u202e\x9b", "list": [1, None]}
    terminal.json(value)
    assert json.loads(out.getvalue()) == value
    assert out.getvalue().replace("\n", "").isprintable() and out.getvalue().isascii()


def test_raw_is_exact(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w", encoding="ascii") as stream:
        terminal = Terminal(stream, io.StringIO(), {})
        terminal.line("text")
        terminal.raw(b"\xff\x1b[31m\r\n\x00")
        terminal.line("more")
    assert (tmp_path / "out").read_bytes() == b"text\n\xff\x1b[31m\r\n\x00more\n"


def test_a_rank_has_the_same_colour_in_every_run() -> None:
    assert [colour_of(rank) for rank in (0, 1, 17)] == ["36", "32", "93"]
    assert all(colour_of(rank) != colour_of(rank + 1) for rank in range(100))


def test_prefixes() -> None:
    ranks = [("trainer", 3, "node2"), ("pserver", 10, "node2")]
    assert prefix("trainer", 3, "node2") == "[trainer 3 node2] "
    assert {len(prefix(*rank, widest_prefix(ranks))) for rank in ranks} == {widest_prefix(ranks)}
    assert prefix("trainer", 0, "\x1b[1m") == "[trainer 0 \\x1b[1m] "


def test_rank_lines_hide_secrets_and_control_characters() -> None:
    terminal, out, _ = plain_terminal()
    lines = RankLines(terminal, hide=lambda text: text.replace("secret", "***"), width=20)
    lines.show("trainer", 0, "node1", [])
    lines.show("trainer", 0, "node1", ["my secret", "\x1b[31m"])
    assert out.getvalue() == "[trainer 0 node1]   my ***\n[trainer 0 node1]   \\x1b[31m\n"


def test_a_hundred_thousand_lines_are_no_burden() -> None:
    terminal, _, _ = plain_terminal(FORCE_COLOR="1")
    lines = RankLines(terminal)
    text = ["2024-01-01 12:00:00 INFO step 123 loss 0.12345 lr 0.001 speed 1234 words/s"] * 100
    start = time.perf_counter()
    for _ in range(1000):
        lines.text("trainer", 3, "node2", text)
    assert time.perf_counter() - start < 5  # measured: about 0.01; a rich call per line would be 30
