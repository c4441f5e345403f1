"""Readers convert values of conf.py and job.toml, for several keys. Each raises ValueError, which states what is right."""

from __future__ import annotations

from typing import Callable


def one_of(*allowed: str) -> Callable[[object], str]:
    def read(value: object) -> str:
        if value not in allowed:
            raise ValueError("one of " + ", ".join(allowed))
        return str(value)

    return read
