"""The plain form of a frozen dataclass is a value that JSON can express: an object of its fields, tuples as lists.

to_plain() and from_plain() are inverses. from_plain() is strict: a missing field, an unknown field or a value of another type
is an error that names the place. It reads the types of the fields, so a dataclass needs no code of its own. Known types: str,
int, float, bool, Optional, Tuple, FrozenSet, Mapping, and other dataclasses. It runs on nodes, where model/wire/shape.py
cannot: that needs Python 3.9.
"""

from __future__ import annotations

from collections.abc import Mapping as MappingOrigin
from dataclasses import MISSING, fields, is_dataclass
from functools import lru_cache
from typing import Callable, Dict, Mapping, Tuple, Type, TypeVar, Union, cast, get_args, get_origin, get_type_hints

T = TypeVar("T")
_NAMES = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
_SHOWN = 40  # characters of a wrong value in an error


class WrongForm(ValueError):
    """`path` is the place of the value in the whole, "" for the whole itself."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} {why}" if path else f"it {why}")


def to_plain(value: object) -> object:
    """Convert a dataclass to a dict, tuples to lists; other values stay as they are."""
    if is_dataclass(value):
        return {each.name: to_plain(getattr(value, each.name)) for each in fields(value)}
    return [to_plain(one) for one in value] if isinstance(value, (tuple, list, frozenset)) else value


def from_plain(cls: Type[T], value: object, path: str = "") -> T:
    """Convert the result of to_plain() back. Raises WrongForm."""
    return cast(T, _read(cls, value, path))


def _read(hint: object, value: object, path: str) -> object:
    if is_dataclass(hint):
        return _read_fields(cast(type, hint), value, path)
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Union:  # Optional is the only one
        return None if value is None else _read(inner[0], value, path)
    if origin is tuple:
        return _read_tuple(inner, value, path)
    if origin is frozenset:
        return frozenset(_read_tuple((inner[0], ...), value, path))
    if origin is MappingOrigin:
        return _read_mapping(value, path)
    if hint is float and type(value) is int:
        return float(value)
    if type(value) is not hint:
        raise _wrong(path, value, _NAMES[cast(type, hint)])
    return value


def _read_tuple(inner: Tuple[object, ...], value: object, path: str) -> Tuple[object, ...]:
    if not isinstance(value, list):
        raise _wrong(path, value, "a list")
    if len(inner) == 2 and inner[1] is ...:
        return tuple(_read(inner[0], one, f"{path}[{at}]") for at, one in enumerate(value))
    if len(value) != len(inner):
        raise WrongForm(path, f"has {len(value)} values, not {len(inner)}")
    return tuple(_read(hint, one, f"{path}[{at}]") for at, (hint, one) in enumerate(zip(inner, value)))


def _read_mapping(value: object, path: str) -> object:
    """Read an object whose values are not checked: their reader does that."""
    if not isinstance(value, dict):
        raise _wrong(path, value, "an object")
    return value


def _read_fields(cls: type, value: object, path: str) -> object:
    if not isinstance(value, dict):
        raise _wrong(path, value, "an object")
    hints = _hints(cls)
    unknown = sorted(str(name) for name in value if name not in hints)
    if unknown:
        raise WrongForm(path, f"has the unknown field {unknown[0][:_SHOWN]!r}")
    missing = [name for name, (_, optional) in hints.items() if name not in value and not optional]
    if missing:
        raise WrongForm(path, f"has no {missing[0]!r}")
    found = {name: _read(hints[name][0], one, f"{path}.{name}" if path else name) for name, one in value.items()}
    return cast(Callable[..., object], cls)(**found)


@lru_cache(maxsize=None)
def _hints(cls: type) -> Mapping[str, Tuple[object, bool]]:
    """Return the type of each field, and whether the field has a default."""
    types: Dict[str, object] = get_type_hints(cls)
    return {
        each.name: (types[each.name], each.default is not MISSING or each.default_factory is not MISSING)
        for each in fields(cls)
    }


def _wrong(path: str, value: object, wanted: str) -> WrongForm:
    plain = isinstance(value, (str, int, float)) or value is None
    shown = repr(value) if plain else f"a {type(value).__name__}"
    return WrongForm(path, f"is {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '...'}, not {wanted}")
