"""Write sizes and durations for people; the range of port numbers."""

from __future__ import annotations

HIGHEST_PORT = 65535


def human_bytes(n: float) -> str:
    """512 B, 1.5 kB, 25.1 MB, 104 MB."""
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
    """0.05 s, 2.4 s, 42 s, 1 min 05 s, 2 h 03 min, 3 d 04 h."""
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
