"""What nodes need of `collections`: deque, without named tuples and what they need (1 ms to import)."""

from __future__ import annotations

from _collections import deque  # type: ignore[import-not-found]
from typing import Any

__all__ = ["deque"]


def __getattr__(name: str) -> Any:
    if name == "__path__":  # `from ... import` asks for it
        raise AttributeError(name)
    import collections

    return getattr(collections, name)
