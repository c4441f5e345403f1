"""Readers convert values of conf.py and job.toml, for several keys. Each raises ValueError, which states what is right."""

from __future__ import annotations

import difflib
from typing import Callable, Collection


def one_of(*allowed: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        if value not in allowed:
            raise ValueError("one of " + ", ".join(allowed))
        return str(value)

    return read


def nearest(name: object, known: Collection[str], lead: str = "known keys:") -> str:
    """Name the known name that is most like it, as a question; else `lead` and all of them."""
    near = difflib.get_close_matches(str(name), known, 1)
    return f"did you mean {near[0]}?" if near else f"{lead} {', '.join(known)}"
