"""Ctrl+D at a terminal is seen; lines are not taken for it, and a program in the background is not stopped by reading."""

from __future__ import annotations

import os
import pty
import sys
import termios
import time
import tty
from collections.abc import Iterator
from pathlib import Path

import pytest

from clustertool.verbs.follow_session import DetachKey
from tests import forked
from tests.cli import PATIENCE, until

# Reports on stdout whether the key was pressed: once for each line of the pipe that its argument names.
PROGRAM = """
import os, sys, termios
from clustertool.verbs.follow_session import DetachKey
if sys.argv[2] == "background":
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, os.WUNTRACED)[1]))
    os.setpgid(0, 0)
key = DetachKey()
for command in open(sys.argv[1]):
    before = termios.tcgetattr(0)
    answer = key.pressed() if command == "pressed\\n" else (key.discard_input(), key.readable)[1]
    assert termios.tcgetattr(0) == before
    os.write(1, f"{answer}\\n".encode())
"""


class Keyboard:
    """A program with a terminal, keys that are typed there, and its answers."""

    def __init__(self, folder: Path, where: str) -> None:
        program, asked = folder / "program.py", folder / "asked"
        program.write_text(PROGRAM)
        os.mkfifo(asked)
        self._ask = os.open(asked, os.O_RDWR)  # O_WRONLY would wait for the program
        answers, answer = os.pipe()
        self.fd, theirs = pty.openpty()
        argv = [str(program), str(asked), where]
        self._process = forked.start(argv, folder, os.environ, (theirs, answer, theirs), terminal=True)
        os.close(theirs)
        os.close(answer)
        self._lines = os.fdopen(answers)

    def ask(self, what: str) -> bool:
        os.write(self._ask, f"{what}\n".encode())
        return self._lines.readline() == "True\n"

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def close(self) -> None:
        os.close(self._ask)
        self._process.wait(PATIENCE)
        self._lines.close()
        os.close(self.fd)


@pytest.fixture
def keyboard(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Keyboard]:
    one = Keyboard(tmp_path, getattr(request, "param", "foreground"))
    yield one
    one.close()


def test_ctrl_d_is_pressed_and_lines_are_not(keyboard: Keyboard) -> None:
    assert keyboard.ask("readable") and not keyboard.ask("pressed")
    keyboard.type("\n\nls -d\n")
    assert not keyboard.ask("pressed")
    keyboard.type("\x04")
    until(lambda: keyboard.ask("pressed"))
    keyboard.type("half a line\x04")
    until(lambda: keyboard.ask("pressed"))
    keyboard.type("\x04\x04")
    until(lambda: keyboard.ask("pressed"))
    assert not keyboard.ask("pressed"), "what was typed after it is discarded: it would end the shell"


def test_what_was_typed_before_does_not_count(keyboard: Keyboard) -> None:
    keyboard.ask("readable")
    keyboard.type("\x04")
    time.sleep(0.05)  # it has no effect that can be seen
    assert keyboard.ask("readable") and not keyboard.ask("pressed")


def test_a_terminal_without_line_mode(keyboard: Keyboard) -> None:
    keyboard.ask("readable")
    tty.setraw(keyboard.fd, termios.TCSANOW)
    keyboard.type("d")
    assert not keyboard.ask("pressed")
    keyboard.type("\x04")
    until(lambda: keyboard.ask("pressed"))


@pytest.mark.parametrize("keyboard", ["background"], indirect=True)
def test_a_program_in_the_background_does_not_read(keyboard: Keyboard) -> None:
    assert not keyboard.ask("readable")
    keyboard.type("\x04")
    assert not keyboard.ask("pressed")


def test_without_a_terminal_there_is_no_key(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """stdin is a file, was closed, or was not open when Python started: sys.stdin is None then."""
    (tmp_path / "keys").write_text("\x04")
    with open(tmp_path / "keys") as file, open(os.devnull) as closed:
        closed.close()
        for stdin in (file, closed, None):
            monkeypatch.setattr(sys, "stdin", stdin)
            key = DetachKey()
            assert (key.readable, key.pressed()) == (False, False)
