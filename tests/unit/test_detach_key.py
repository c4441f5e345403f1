"""Ctrl+D at a terminal is seen; lines are not taken for it, and a program in the background is not stopped by reading."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
import termios
import time
import tty
from collections.abc import Iterator

import pytest

from tests.cli import until

# Reports on stdout whether the key was pressed: once for each line on the pipe, which is its argument.
PROGRAM = """
import os, sys, termios
from clustertool.verbs.follow_session import DetachKey
if sys.argv[2] == "background":
    child = os.fork()
    if child:
        sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, os.WUNTRACED)[1]))
    os.setpgid(0, 0)
key = DetachKey()
for command in open(int(sys.argv[1])):
    before = termios.tcgetattr(0)
    answer = key.pressed() if command == "pressed\\n" else (key.discard_input(), key.readable)[1]
    assert termios.tcgetattr(0) == before
    os.write(1, f"{answer}\\n".encode())
"""


class Keyboard:
    """A program with a terminal, keys that are typed there, and its answers."""

    def __init__(self, where: str) -> None:
        asked, self._ask = os.pipe()
        self._answers, answer = os.pipe()
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.dup2(answer, 1)
            os.set_inheritable(asked, True)
            os.execv(sys.executable, [sys.executable, "-c", PROGRAM, str(asked), where])
        os.close(asked)
        os.close(answer)
        self._lines = os.fdopen(self._answers)

    def ask(self, what: str) -> bool:
        os.write(self._ask, f"{what}\n".encode())
        return self._lines.readline() == "True\n"

    def type(self, keys: str) -> None:
        os.write(self.fd, keys.encode())

    def close(self) -> None:
        os.close(self._ask)
        os.waitpid(self.pid, 0)
        self._lines.close()
        os.close(self.fd)


@pytest.fixture
def keyboard(request: pytest.FixtureRequest) -> Iterator[Keyboard]:
    one = Keyboard(getattr(request, "param", "foreground"))
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


def test_without_a_terminal_there_is_no_key() -> None:
    program = "from clustertool.verbs.follow_session import DetachKey; k = DetachKey(); print(k.readable, k.pressed())"
    for stdin in ("", "x"):
        done = subprocess.run([sys.executable, "-c", program], input=stdin, capture_output=True, text=True, check=True)
        assert done.stdout == "False False\n"
    closed = subprocess.run(
        ["sh", "-c", 'exec "$0" "$@" <&-', sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert closed.stdout == "False False\n"
