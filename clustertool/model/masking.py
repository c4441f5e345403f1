"""Masking hides the values of SECRETS in text that programs have written. Pure; the laptop and the nodes use it."""

from __future__ import annotations

import re
from typing import Callable, Iterable

HIDDEN = "***"  # stands for a value
Hide = Callable[[str], str]  # what mask() returns
_SHORTEST_PART = 4


def mask(values: Iterable[str]) -> Hide:
    """Create a function that replaces every one of `values` by `***`, the longest first.

    A value of several lines (a private key) is seen line by line, so each of its lines is masked too, if it has at least four
    characters: a lone `}` would blank half of what a program prints.
    """
    secrets = {value for value in values if value}
    parts = {part for value in secrets for part in value.splitlines() if part != value}
    secrets |= {part for part in parts if len(part) >= _SHORTEST_PART}
    if not secrets:
        return str
    pattern = re.compile("|".join(re.escape(value) for value in sorted(secrets, key=lambda v: (-len(v), v))))
    return lambda text: pattern.sub(HIDDEN, text)
