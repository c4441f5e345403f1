"""Every line of a rank gets a prefix: `[trainer 3 node2] text`, with the same colour for a rank in every run.

This is the hot path of `run` and `logs`: a batch of lines is one write.
"""

from __future__ import annotations

import json
import re
from collections import deque
from collections.abc import Sequence
from datetime import datetime

from clustertool.model.masking import Hide
from clustertool.show.terminal import Terminal, colour_of
from clustertool.watch.sanitize import harmless

# Servers start at another place of the palette, so that pserver 0 and trainer 0 have different colours.
_OFFSETS = {"pserver": 4, "heter": 7, "mpirun": 2, "mpidaemon": 5}
_SCREEN = 40  # lines that a reader still sees


def prefix(role: str, rank: int, node: str, width: int = 0) -> str:
    """Format the prefix of a rank's lines: `[trainer 3 node2] `, padded to `width` columns to align several ranks."""
    return f"[{harmless(f'{role} {rank} {node}'.rstrip())}] ".ljust(width)


class RankLines:
    """Writes the lines of ranks that match `grep`. `hide` masks secrets; `width`: of the longest prefix (see `widest`).

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
        """Write the lines of one rank in one piece, so that no other thread's line comes between or into them."""
        if self._pattern.pattern:
            lines = [line for line in lines if self._pattern.search(line)]
        if lines:
            self._terminal.write(self.text(role, rank, node, lines, t))

    def text(self, role: str, rank: int, node: str, lines: Sequence[str], t: float | None = None) -> str:
        """Format lines of a rank with their prefix, or as JSON objects, as show() writes them. t: seconds since the epoch."""
        if self._objects:
            about = {"role": role, "rank": rank, "node": node, "time": t}
            texts = map(self._hide, lines) if self._hide else lines
            # The backslash of a DEL is in the document, as for other answers.
            return "".join(json.dumps({**about, "line": line}).replace("\x7f", "\\u007f") + "\n" for line in texts)
        plain = prefix(role, rank, node, self._width)
        text = plain.rstrip()
        mark = self._terminal.paint(text, colour_of(rank + _OFFSETS.get(role, 0))) + plain[len(text) :]
        if self._times and t is not None:
            mark += datetime.fromtimestamp(max(t, 0.0)).astimezone().isoformat(timespec="seconds") + " "
        if self._hide is not None:
            lines = [self._hide(line) for line in lines]
        clean = [line if line.isprintable() else harmless(line) for line in lines]
        self._recent.append((role, rank, clean[-_SCREEN:]))
        return mark + ("\n" + mark).join(clean) + "\n"

    def on_screen(self, role: str, rank: int, lines: Sequence[str]) -> bool:
        """Check whether these are the last lines of a rank, and all of them are among the last lines that were written."""
        recent = [(name, number, line) for name, number, found in self._recent for line in found][-_SCREEN:]
        own = [line for name, number, line in recent if (name, number) == (role, rank)]
        return 0 < len(lines) <= len(own) and own[-len(lines) :] == list(lines)


def widest(ranks: Sequence[tuple[str, int, str]]) -> int:
    """Compute the width that lines up the prefixes of these (role, rank, node)."""
    return max((len(prefix(*key)) for key in ranks), default=0)
