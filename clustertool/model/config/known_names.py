"""This module writes the fix of an error about a name that is not known."""

from __future__ import annotations

import difflib
from typing import Collection


def nearest(name: object, known: Collection[str], lead: str = "known keys:") -> str:
    """Name the known name that is most like it, as a question; else `lead` and all of them."""
    near = difflib.get_close_matches(str(name), known, 1)
    return f"did you mean {near[0]}?" if near else f"{lead} {', '.join(known)}"
