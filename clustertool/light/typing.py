"""Light is what `typing` is on the nodes: the shipped code imports it in its place, since `typing` takes 2 ms to import.

Only what is evaluated at run time matters there: named tuples, and types that have a name of their own.
"""

from __future__ import annotations

from operator import itemgetter
from typing import Any

TYPE_CHECKING = False


class _Named(type):
    """Makes the classes of named tuples: what collections.namedtuple() makes, without compiling anything (100 us a class)."""

    def __new__(cls, name: str, bases: Any, space: Any) -> Any:
        if not bases:
            return super().__new__(cls, name, bases, space)
        fields = tuple(space.get("__annotations__", ()))
        defaults = {field: space.pop(field) for field in fields if field in space}
        each = {field: property(itemgetter(number)) for number, field in enumerate(fields)}
        return type(name, (_Tuple,), {**space, **each, "__slots__": (), "_fields": fields, "_defaults": defaults})


class _Tuple(tuple):  # type: ignore[type-arg]
    __slots__ = ()
    _fields: Any = ()
    _defaults: Any = {}

    def __new__(cls, *values: Any, **named: Any) -> Any:
        if named or len(values) != len(cls._fields):
            given = {**cls._defaults, **dict(zip(cls._fields, values)), **named}
            twice = named.keys() & set(cls._fields[: len(values)])
            if twice or len(values) > len(cls._fields) or given.keys() != set(cls._fields):
                raise TypeError(f"{cls.__name__} has the fields {', '.join(cls._fields)}")
            values = tuple(given[field] for field in cls._fields)
        return tuple.__new__(cls, values)

    def _asdict(self) -> Any:
        return dict(zip(self._fields, self))

    def _replace(self, **changed: Any) -> Any:
        return type(self)(**{**self._asdict(), **changed})

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{field}={value!r}' for field, value in self._asdict().items())})"


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
