"""This module selects the part of a culprit's log to print: from its last Python traceback on, else its last lines."""

from __future__ import annotations

from collections.abc import Sequence

_START = "Traceback (most recent call last):"


def excerpt(lines: Sequence[str], most: int = 20) -> list[str]:
    """The last traceback whole (its head and the end of it when it is very long), or the last `most` lines."""
    starts = [i for i, line in enumerate(lines) if line.lstrip().startswith(_START)]
    if not starts:
        return list(lines[-most:])
    first = starts[-1]
    # A chained traceback ("During handling ...") is one story: begin with its first part.
    for earlier in reversed(starts[:-1]):
        between = " ".join(lines[earlier:first])
        if "During handling of the above exception" not in between and "direct cause of the following" not in between:
            break
        first = earlier
    found = list(lines[first:])
    if len(found) <= 3 * most:
        return found
    return [*found[:most], f"... {len(found) - 3 * most} lines ...", *found[-2 * most :]]
