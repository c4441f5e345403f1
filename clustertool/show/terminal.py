"""A Terminal writes every byte that a user or a pipe sees, and decides once how to write it.

A terminal gets colours, tables and live bars; other outputs get plain, stable lines. Text given to line(), warn() and error()
is sanitized first, and its commands get the name of the program (model/hints.py); write() and raw() write it unchanged.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import TextIO, cast

from clustertool.model.hints import fill_program, fill_program_in_value
from clustertool.model.masking import Hide
from clustertool.show.program_name import commanded
from clustertool.watch.sanitize import harmless, harmless_lines

# The names are rich's, the numbers are those of ANSI escape sequences.
STYLES = {"": "", "bold": "1", "dim": "2", "red": "31", "green": "32", "yellow": "33", "cyan": "36", "bold red": "1;31"}
# Colours of ranks: no red (it means failure), no black, white or dark blue (invisible on some backgrounds).
_PALETTE = ("36", "32", "35", "33", "94", "96", "92", "95", "93")
_INDENT = "    "  # of the further lines of a message
_READER_GONE, _NOT_WRITTEN = 141, 74  # 128 + SIGPIPE, and EX_IOERR
# The reader left, the terminal's window was closed, or the descriptor was closed before the start: no message is needed.
_QUIET = (errno.EPIPE, errno.EIO, errno.EBADF)
_NO_DESCRIPTOR = (OSError, ValueError, AttributeError)  # of a stream that has none, or is closed
# Servers start at another place of the palette, so that pserver 0 and trainer 0 have different colours.
_ROLE_OFFSETS = {"pserver": 4, "heter": 7, "mpirun": 2, "mpidaemon": 5}
_SCREEN = 40  # lines that a reader still sees


def colour_of(rank: int) -> str:
    """Return the ANSI colour number of a rank, which is the same in every run."""
    return _PALETTE[rank % len(_PALETTE)]


class ReaderGone(SystemExit):
    """stdout cannot be written any more (`| head` has ended). If it is not handled, the program ends without a message."""


class Terminal:
    """The writer to `out` and `err` (stdout and stderr) for all threads of a program.

    is_terminal: bars and tables may be drawn on stdout. colour: stdout takes ANSI colours. environ: the environment that
    decided it.
    """

    def __init__(
        self, out: TextIO | None = None, err: TextIO | None = None, environ: Mapping[str, str] | None = None
    ) -> None:
        self.environ = os.environ if environ is None else environ
        self._out = _Sink(sys.stdout if out is None else out)
        self._err = _Sink(sys.stderr if err is None else err)
        capable = self.environ.get("TERM", "") != "dumb"
        self.is_terminal = capable and self._out.is_tty()
        self.colour = _uses_colour(self.environ, self.is_terminal)
        self._err_is_terminal = capable and self._err.is_tty()
        self._err_colour = _uses_colour(self.environ, self._err_is_terminal)
        self._lock = threading.RLock()
        self._reported = False
        self._above: Callable[[str], None] | None = None
        self._program = commanded()

    @property
    def encoding(self) -> str:
        """The encoding of stdout."""
        return self._out.encoding

    @property
    def width(self) -> int:
        """The columns of stdout now, since a window may be resized; 80 if they are not known."""
        return self._out.columns() or 80

    def line(self, text: str = "", style: str = "") -> None:
        """Write one message to stdout, with its further lines indented and control characters spelled out.

        style: one of STYLES.
        """
        self.write(_paint(self._message(text), style, self.colour) + "\n")

    def block(self, text: str) -> None:
        """Write lines to stdout, with control characters spelled out: the output of a command, a help text."""
        self.write(harmless_lines(text) + "\n")

    def warn(self, text: str) -> None:
        """Write a message with "warning:" in front to stderr."""
        self._write_message("warning", "yellow", text)

    def error(self, text: str) -> None:
        """Write a message with "error:" in front to stderr."""
        self._write_message("error", "bold red", text)

    def note(self, text: str) -> None:
        """Write a message to stderr."""
        self._write_err(self._message(text) + "\n")

    def json(self, value: object, lines: bool = False) -> None:
        """Write `value` to stdout as one JSON document of several lines, or with `lines` of one line. It is ASCII only."""
        text = json.dumps(fill_program_in_value(value, self._program), indent=None if lines else 2, default=str)
        self.write(text.replace("\x7f", "\\u007f") + "\n")

    def write(self, text: str) -> None:
        """Write trusted text to stdout in one piece, or to the live display if there is one.

        Raises ReaderGone if stdout cannot be written.
        """
        (self._above or self.write_drawn)(text)

    def raw(self, data: bytes) -> None:
        """Write exactly these bytes to stdout (`logs --raw`). Raises ReaderGone if it cannot be written."""
        with self._lock:
            self._out.send_bytes(data)
            self._check()

    def printable(self, text: str) -> str:
        """Replace control characters, and characters that stdout cannot encode, by escapes.

        Measure and align only such texts.
        """
        return self._out.encodable(harmless(fill_program(text, self._program)))

    def paint(self, text: str, style: str) -> str:
        """Colour a text if stdout takes colours. style: one of STYLES or an ANSI number."""
        return _paint(text, style, self.colour)

    def divert(self, above: Callable[[str], None] | None) -> None:
        """Pass all further text to `above`, a live display that prints it above itself; None: write it directly again."""
        self._above = above

    def write_drawn(self, text: str) -> None:
        """Write text to stdout also if a live display gets other texts: it is what the display draws.

        Raises ReaderGone if it cannot be written.
        """
        with self._lock:
            self._out.send(text)
            self._check()

    def _check(self) -> None:
        """Raise ReaderGone if stdout could not be written, after a message unless its reader has left."""
        failure = self._out.failure
        if failure is None:
            return
        if not isinstance(failure, OSError) or failure.errno in _QUIET:
            raise ReaderGone(_READER_GONE)
        if not self._reported:
            self._reported = True
            self._err.send(f"clustertool: cannot write to stdout: {failure}\n")
        raise ReaderGone(_NOT_WRITTEN)

    def _write_message(self, kind: str, style: str, text: str) -> None:
        """Write a message to stderr, with `kind:` in front in this style."""
        self._write_err(f"{_paint(kind + ':', style, self._err_colour)} {self._message(text)}\n")

    def _message(self, text: str) -> str:
        """Fill in the program's name, spell out control characters, and indent the further lines."""
        return harmless_lines(fill_program(text, self._program), _INDENT)

    def _write_err(self, text: str) -> None:
        """Write to stderr after all of stdout; if there is a live display and stderr is a terminal, to the display."""
        above = self._above
        if above is not None and self._err_is_terminal:
            above(text)
            return
        with self._lock:
            if self._out.failure is None:
                self._out.flush()
            self._err.send(text)


def _paint(text: str, style: str, colour: bool) -> str:
    """Put a text between escape sequences for a style; return it as it is without `colour`, style or text."""
    code = STYLES.get(style, style)
    return f"\x1b[{code}m{text}\x1b[0m" if colour and code and text else text


def _uses_colour(environ: Mapping[str, str], is_terminal: bool) -> bool:
    """Decide whether to use colours: by NO_COLOR, then FORCE_COLOR and CLICOLOR_FORCE, else for terminals.

    is_terminal: the output is one; CLICOLOR=0 turns them off there. These are the rules of no-color.org.
    """
    if environ.get("NO_COLOR"):
        return False
    if any(environ.get(name, "0") not in ("", "0") for name in ("FORCE_COLOR", "CLICOLOR_FORCE")):
        return True
    return is_terminal and environ.get("CLICOLOR") != "0"


class _Sink:
    """One output stream. It never raises: the error is in `failure`, and later output is dropped."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream  # None: the program was started with this descriptor closed
        self.failure: Exception | None = None
        # Some parents (node.js, a few CI runners) hand over a non-blocking pipe, where a long write would be torn.
        with contextlib.suppress(*_NO_DESCRIPTOR):
            os.set_blocking(self._descriptor(), True)

    @property
    def encoding(self) -> str:
        return getattr(self._stream, "encoding", None) or "utf-8"

    def encodable(self, text: str) -> str:
        """Replace characters that the encoding of the stream lacks by backslash escapes."""
        return text if text.isascii() else text.encode(self.encoding, "backslashreplace").decode(self.encoding)

    def is_tty(self) -> bool:
        try:
            return self._stream is not None and self._stream.isatty()
        except ValueError:  # closed
            return False

    def columns(self) -> int:
        """Return the columns of the terminal, 0 if the stream is none."""
        with contextlib.suppress(*_NO_DESCRIPTOR):
            return os.get_terminal_size(self._descriptor()).columns
        return 0

    def send(self, text: str) -> None:
        """Write and flush a text, with escapes for what cannot be encoded; drop it after an error, stored in `failure`."""
        if self._stream is None or self.failure is not None:
            return
        try:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                self._stream.write(self.encodable(text))
            self._stream.flush()
        except (OSError, ValueError) as problem:
            self._store_failure(problem)

    def send_bytes(self, data: bytes) -> None:
        """Write and flush bytes, or as text if the stream takes no bytes. An error is stored in `failure`."""
        buffer = getattr(self._stream, "buffer", None)
        if buffer is None:
            self.send(data.decode("utf-8", "backslashreplace"))
        elif self.failure is None:
            try:
                self.flush()
                buffer.write(data)
                buffer.flush()
            except (OSError, ValueError) as problem:
                self._store_failure(problem)

    def flush(self) -> None:
        """Flush the stream. An error is stored in `failure`."""
        try:
            if self._stream is not None:
                self._stream.flush()
        except (OSError, ValueError) as problem:
            self._store_failure(problem)

    def _store_failure(self, problem: Exception) -> None:
        """Store the first error, and direct the descriptor to /dev/null.

        Else the interpreter complains about buffered text at its exit.
        """
        if self.failure is None:
            self.failure = problem
            with contextlib.suppress(*_NO_DESCRIPTOR), open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), self._descriptor())

    def _descriptor(self) -> int:
        return cast(TextIO, self._stream).fileno()


# -- the lines of ranks ------------------------------------------------------------------------------------------------


def prefix(role: str, rank: int, node: str, width: int = 0) -> str:
    """Format the prefix of a rank's lines: `[trainer 3 node2] `, padded to `width` columns to align several ranks.

    node: its name.
    """
    return f"[{harmless(f'{role} {rank} {node}'.rstrip())}] ".ljust(width)


class RankLines:
    """A writer of the lines of ranks that match `grep`, each with a prefix: `[trainer 3 node2] text`.

    This is the hot path of `run` and `logs`: a batch of lines is one write. A rank has the same colour in every run. `hide`
    masks secrets; `width`: of the longest prefix (see `widest`).

    times: each line has the time when it was written, in the time zone of the laptop, to the second. objects: each line is
    a JSON object.
    """

    def __init__(
        self,
        terminal: Terminal,
        *,
        hide: Hide | None = None,
        width: int = 0,
        grep: str = "",
        times: bool = False,
        objects: bool = False,
    ) -> None:
        self._objects = objects
        self._terminal, self._hide, self._width, self._times = terminal, hide, width, times
        self._pattern = re.compile(grep)
        self._recent: deque[tuple[str, int, list[str]]] = deque(maxlen=_SCREEN)

    def show(self, role: str, rank: int, node: str, lines: Sequence[str], t: float | None = None) -> None:
        """Write the lines of a rank that match the pattern, in one piece, so that no other thread's line comes between them."""
        if self._pattern.pattern:
            lines = [line for line in lines if self._pattern.search(line)]
        if lines:
            self._terminal.write(self.text(role, rank, node, lines, t))

    def text(self, role: str, rank: int, node: str, lines: Sequence[str], t: float | None = None) -> str:
        """Format lines of a rank with their prefix, masked, and remember them for on_screen().

        With `objects`, they become JSON objects, and are not remembered. t: seconds since the epoch.
        """
        if self._objects:
            about = {"role": role, "rank": rank, "node": node, "time": t}
            texts = map(self._hide, lines) if self._hide else lines
            # The backslash of a DEL is in the document, as for other answers.
            return "".join(json.dumps({**about, "line": line}).replace("\x7f", "\\u007f") + "\n" for line in texts)
        plain = prefix(role, rank, node, self._width)
        text = plain.rstrip()
        mark = self._terminal.paint(text, colour_of(rank + _ROLE_OFFSETS.get(role, 0))) + plain[len(text) :]
        if self._times and t is not None:
            mark += datetime.fromtimestamp(max(t, 0.0)).astimezone().isoformat(timespec="seconds") + " "
        if self._hide is not None:
            lines = [self._hide(line) for line in lines]
        clean = [line if line.isprintable() else harmless(line) for line in lines]
        self._recent.append((role, rank, clean[-_SCREEN:]))
        return mark + ("\n" + mark).join(clean) + "\n"

    def on_screen(self, role: str, rank: int, lines: Sequence[str]) -> bool:
        """Check whether these lines are the last ones of a rank and among the last 40 that were written."""
        recent = [(name, number, line) for name, number, found in self._recent for line in found][-_SCREEN:]
        own = [line for name, number, line in recent if (name, number) == (role, rank)]
        return 0 < len(lines) <= len(own) and own[-len(lines) :] == list(lines)


def widest_prefix(ranks: Sequence[tuple[str, int, str]]) -> int:
    """Return the length of the longest prefix of these (role, rank, node)."""
    return max((len(prefix(*key)) for key in ranks), default=0)
