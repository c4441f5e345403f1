"""The log of a pod has the lines of all ranks of its node: `[trainer 3] text`.

After a restart by --max-restarts they are `[trainer 3 attempt 1] text`. A line that is longer than a piece, or that its program
has not ended, goes on in the next one of this rank: `[trainer 3 +] text`. So the logs can be restored byte for byte. A line of
the tool itself begins with another character.
"""

from __future__ import annotations

import re
from typing import NamedTuple, Optional

PIECE = 8 << 10  # bytes of a line after which it is continued: runtimes split at 16 KiB
_LINE = re.compile(
    rb"\[(?P<role>[a-z]{1,20}) (?P<rank>[0-9]{1,9})(?: attempt (?P<attempt>[0-9]{1,5}))?(?P<goes_on> \+)?\] (?P<text>.*)",
    re.DOTALL,
)


class PodLine(NamedTuple):
    """A line of a rank. text: without the newline, which it had unless it goes on."""

    role: str
    rank: int
    attempt: int
    text: bytes
    goes_on: bool = False

    @property
    def content(self) -> bytes:
        """The bytes of the rank's own log."""
        return self.text if self.goes_on else self.text + b"\n"


def written(line: PodLine) -> bytes:
    """Write a rank's line as it stands in the log of the pod."""
    attempt = f" attempt {line.attempt}" if line.attempt else ""
    head = f"[{line.role} {line.rank}{attempt}{' +' if line.goes_on else ''}] "
    return head.encode() + line.text + b"\n"


def read_line(line: bytes) -> Optional[PodLine]:
    """Read a line of the log of a pod, without its newline; None for a line that is none of a rank."""
    found = _LINE.fullmatch(line)
    if found is None:
        return None
    role, rank, attempt = found["role"].decode(), int(found["rank"]), int(found["attempt"] or 0)
    return PodLine(role, rank, attempt, found["text"], bool(found["goes_on"]))
