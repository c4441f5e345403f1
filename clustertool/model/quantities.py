"""Read whole numbers and durations; write sizes and durations for people."""

from __future__ import annotations

import re
from typing import Optional

HIGHEST_PORT = 65535
MOST_FILES = 1 << 20  # open files that a rank is allowed
_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_WITH_UNIT = r"([0-9]{1,12}(?:\.[0-9]{0,12})?)(ms|[smhdw])"
DURATIONS = "seconds, or a number with a unit: 30s, 5m, 1h30m"  # what seconds_of() reads


def whole(value: object, low: int, high: int) -> Optional[int]:
    """Read an int, or its text, from `low` to `high`, with at most five digits, or those of `high`; else None."""
    text = str(value)
    short = len(text) <= max(5, len(str(high)))
    known = type(value) in (int, str) and short and text.isascii() and text.isdecimal()
    return int(text) if known and low <= int(text) <= high else None


def seconds_of(value: object) -> Optional[float]:
    """Read a duration in seconds: a number, or text such as 90, 1.5, 30s, 5m, 1h30m, 7d, 500ms. None for everything else."""
    text = "" if isinstance(value, bool) else str(value)
    if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{0,12})?", text):
        return float(text)
    if not re.fullmatch(f"({_WITH_UNIT})+", text):
        return None
    return sum(float(number) * _UNITS[unit] for number, unit in re.findall(_WITH_UNIT, text))


def human_bytes(n: float) -> str:
    """Format bytes: 512 B, 1.5 kB, 25.1 MB, 104 MB."""
    if n < 999.5:
        return f"{n:.0f} B"
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        n /= 1000
        if n < 99.95:
            return f"{n:.1f} {unit}"
        if n < 999.5:
            break
    return f"{n:.0f} {unit}"


def human_seconds(s: float) -> str:
    """Format seconds: 0.05 s, 2.4 s, 42 s, 1 min 05 s, 2 h 03 min, 3 d 04 h."""
    if s < 0.095:
        return f"{max(s, 0):.2f} s"
    if s < 9.95:
        return f"{s:.1f} s"
    seconds = round(s)
    if seconds < 60:
        return f"{seconds} s"
    if seconds < 3600:
        return f"{seconds // 60} min {seconds % 60:02} s"
    minutes = round(s / 60)
    if minutes < 24 * 60:
        return f"{minutes // 60} h {minutes % 60:02} min"
    hours = round(s / 3600)
    return f"{hours // 24} d {hours % 24:02} h"


def count(number: int, what: str) -> str:
    """Format a number of things: 1 node, 2 nodes."""
    return f"{number} {what}{'s' * (number != 1)}"
