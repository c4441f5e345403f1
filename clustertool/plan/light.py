"""Light is what `typing` is on the nodes: the shipped code imports it in its place, since `typing` takes 2 ms to import.

Only what is evaluated at run time matters there: named tuples, and types that have a name of their own.
"""

from __future__ import annotations

from collections import namedtuple
from typing import Any

TYPE_CHECKING = False


class _Named(type):
    def __new__(cls, name: str, bases: Any, space: Any) -> Any:
        if not bases:
            return super().__new__(cls, name, bases, space)
        fields = list(space.get("__annotations__", ()))
        made = namedtuple(name, fields, defaults=[space.pop(field) for field in fields if field in space])  # type: ignore[misc]
        made.__module__ = space["__module__"]
        for key, value in space.items():
            if key not in ("__annotations__", "__module__", "__qualname__", "__doc__"):
                setattr(made, key, value)
        return made


class NamedTuple(metaclass=_Named):
    """class Name(NamedTuple) with fields as annotations, and methods."""


class _Type:
    def __getitem__(self, arguments: Any) -> _Type:
        return self


def __getattr__(name: str) -> _Type:
    """Dict, List, Optional, ...: each may have arguments, and nobody asks what it means."""
    if name.startswith("_"):
        raise AttributeError(name)
    return _Type()
