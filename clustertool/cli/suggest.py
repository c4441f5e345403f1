"""This module suggests names for one with a typing error."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

_MOST = 2


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Build the end of a sentence: ", did you mean 'status' or 'stop'?"; "" without a suggestion.

    One or two of `known` that begin with `name`, else the one that differs in few letters.
    """
    names = list(known) if name.strip("-") else []
    found = [each for each in names if each.startswith(name)]
    if not 0 < len(found) <= _MOST:
        found = difflib.get_close_matches(name, found or names, 1)
    return f", did you mean {' or '.join(map(repr, found))}?" if found else ""
