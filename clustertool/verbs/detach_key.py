"""Ctrl+D at the terminal leaves a job alone while it is followed.

The terminal stays in its line mode, where Ctrl+D makes an end of file. So no mode has to be restored, however the program ends,
and a question for a password is asked as ever: the same thread reads the answer and the key.
"""

from __future__ import annotations

import os
import select
import sys
import termios

_LINE = 4096  # bytes: no line of a terminal is longer
_LOCAL = 3  # the place of the local modes in what tcgetattr() returns
_CTRL_D = b"\x04"


class DetachKey:
    """forget() what was typed before, then pressed() several times a second. What is typed besides is not used."""

    def __init__(self) -> None:
        terminal = sys.stdin is not None and not sys.stdin.closed and sys.stdin.isatty()
        self._fd = sys.stdin.fileno() if terminal else -1

    @property
    def readable(self) -> bool:
        """Whether stdin is a terminal that this program may read: a read in the background would stop it (SIGTTIN)."""
        try:
            return self._fd >= 0 and os.tcgetpgrp(self._fd) == os.getpgrp()
        except OSError:  # stdin is a terminal, but not the one that controls this program
            return False

    def forget(self) -> None:
        """Discard what was typed and not read."""
        if self.readable:
            termios.tcflush(self._fd, termios.TCIFLUSH)

    def pressed(self) -> bool:
        """Check whether Ctrl+D was pressed since the last call."""
        try:
            while self.readable and select.select([self._fd], [], [], 0)[0]:
                lines = bool(termios.tcgetattr(self._fd)[_LOCAL] & termios.ICANON)
                typed = os.read(self._fd, _LINE)
                # A line without its newline was ended by Ctrl+D. Without line mode, another program's doing, it is a character.
                if not typed.endswith(b"\n") if lines else _CTRL_D in typed:
                    self.forget()  # a second Ctrl+D, while this program ends, would end the shell
                    return True
        except (OSError, termios.error):  # the terminal is gone, which SIGHUP reports
            return False
        return False
