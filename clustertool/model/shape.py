"""Check values that come from another machine, a file or a pod: their types, sizes and ranges.

read() returns a value of JSON as its type states it, or raises Malformed, which names the place. The type is that of a plain
value, of a message (a TypedDict) or of a record (a dataclass or a NamedTuple, of which a field with a default may be missing).
A message stays the dict that it is, with lists for its tuples. A record is made anew, with tuples, sets and enums; in JSON it
is an object, or for a NamedTuple a list of its values.

The limit in `Annotated[type, limit]` is the check itself, or the most entries of a list, a tuple, a set or an object. For a
message or a dict it is the record whose fields this has too. For a union of messages it is the type that a message of an
unknown type has. Strings, lists and objects always have a limit, so that a value that passes has a bounded size. read_own()
needs no limits: it is for what the tool itself has written.
"""

from __future__ import annotations

import json
import math
import sys
import typing
from collections.abc import Hashable, Iterable, Mapping, Sequence
from enum import Enum
from functools import lru_cache
from typing import Any, Callable, Dict, List, Optional, Tuple, Type, TypeVar, Union, cast, get_args, get_origin

if sys.version_info >= (3, 9):
    from typing import Annotated as Annotated
else:

    class Annotated:
        """A replacement of typing.Annotated, which Python 3.8 does not have. typing accepts it, as it can be called."""

        def __init__(self, kind: object, limit: object) -> None:
            self.inner = kind, limit

        def __class_getitem__(cls, inner: Tuple[object, object]) -> Annotated:
            return cls(*inner)

        def __getitem__(self, variables: object) -> Annotated:
            return Annotated(self.inner[0][variables], self.inner[1])

        def __call__(self) -> None:
            raise TypeError("this is a type for annotations")


T = TypeVar("T")
Check = Callable[[object, str], object]  # of a value at a place: returns it as its type states it, or raises Malformed
_SHOWN = 60
_SMALL = 2000  # values inside a field that no check knows


class Malformed(ValueError):
    """The error of an invalid value: `path` is its place, "" for the whole, `why` the reason."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path or 'it'} {why}")


def read(kind: Type[T], value: object, path: str = "") -> T:
    """Check a value from another machine, a file or a pod, and return it as its type states it. Raises Malformed.

    path: the place of the value, for the error; "" for the whole.
    """
    return cast(T, check_of(cast(Hashable, kind))(value, path))


def read_own(kind: Type[T], value: object, path: str = "") -> T:
    """Read what to_plain() has made. Only types are checked, and an unknown field is an error. Raises Malformed.

    path: see read().
    """
    return cast(T, check_of(cast(Hashable, kind), own=True)(value, path))


def to_plain(value: object) -> object:
    """Convert a record to a value that JSON can express: a dict of its fields, with lists for tuples and sets, however deep.

    A number that JSON does not have becomes a string: "NaN", "Infinity", "-Infinity". Other values stay as they are.
    """
    names = _record_fields(type(value))
    if names:
        return {name: to_plain(getattr(value, name)) for name in names}
    if isinstance(value, (tuple, list, frozenset)):
        return [to_plain(one) for one in value]
    return json.dumps(value) if isinstance(value, float) and not math.isfinite(value) else value


def _record_fields(kind: type) -> Sequence[str]:
    """Return the names of the fields of a dataclass or a NamedTuple, () for another type."""
    return tuple(getattr(kind, "__dataclass_fields__", ())) or getattr(kind, "_fields", ())


def _wrong_value(path: str, value: object, wanted: str) -> Malformed:
    """Build the error of a value at `path` that is not what is wanted; it shows at most 60 characters of the value."""
    shown = repr(value) if isinstance(value, (str, int, float)) or value is None else f"a {type(value).__name__}"
    return Malformed(path, f"is {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '...'}, not {wanted}")


# -- checks of plain values


def text(most: int) -> Check:
    """Create the check of a string of at most `most` characters."""

    def check(value: object, path: str) -> object:
        if not isinstance(value, str):
            raise _wrong_value(path, value, "a string")
        if len(value) > most:
            raise Malformed(path, f"has {len(value)} characters, more than {most}")
        return value

    return check


def matching(true: Callable[[str], object], wanted: str) -> Check:
    """Create the check of a string for which `true` returns a true value; `wanted` describes it."""

    def check(value: object, path: str) -> object:
        if not isinstance(value, str) or not true(value):
            raise _wrong_value(path, value, wanted)
        return value

    return check


def one_of(names: Iterable[str]) -> Check:
    """Create the check of a string that is one of `names`."""
    known = sorted(names)
    return matching(known.__contains__, f"one of {', '.join(known)}")


def whole(low: int = 0, high: int = (1 << 63) - 1) -> Check:
    """Create the check of an integer from `low` to `high`."""

    def check(value: object, path: str) -> object:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _wrong_value(path, value, f"an integer from {low} to {high}")
        return value

    return check


def number(low: float = 0.0, high: float = 1e18) -> Check:
    """Create the check of a number from `low` to `high`; NaN and infinity are none."""

    def check(value: object, path: str) -> object:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise _wrong_value(path, value, f"a number from {low:g} to {high:g}")
        return value

    return check


def _flag(value: object, path: str) -> object:
    """Check for a bool."""
    if not isinstance(value, bool):
        raise _wrong_value(path, value, "true or false")
    return value


def _few_values(value: object, path: str) -> object:
    """Check that a value of any type has at most 2000 values inside, and return it."""
    left, count = [value], 0
    while left:
        one = left.pop()
        if isinstance(one, (dict, list)):
            left += one.values() if isinstance(one, dict) else one
        count += 1
        if count > _SMALL + 1:  # with the value itself
            raise Malformed(path[:_SHOWN], f"holds more than {_SMALL} values")
    return value


def _own_float(value: object, path: str) -> object:
    """Check for a number, and return it as a float."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _wrong_value(path, value, "a number")
    return float(value)


def _own_int(value: object, path: str) -> object:
    """Check for an int of any size, and no bool."""
    if type(value) is not int:
        raise _wrong_value(path, value, "a whole number")
    return value


# -- the check of a type

_PLAIN: Mapping[object, Check] = {str: text(1 << 16), int: whole(), float: number(), bool: _flag, object: _few_values}
_OWN: Mapping[object, Check] = {
    str: text(sys.maxsize),
    int: _own_int,
    float: _own_float,
    bool: _flag,
    object: lambda value, path: value,
}
_MANY: Mapping[object, Callable[[List[object]], object]] = {tuple: tuple, list: list, frozenset: frozenset}


@lru_cache(maxsize=None)
def check_of(hint: object, own: bool = False) -> Check:
    """Return the check of values of a type, made when it is first used. own: see read_own()."""
    plain = _OWN if own else _PLAIN
    if hint in plain:
        return plain[hint]
    origin, inner = _parts(hint)
    if origin is Annotated:
        return _limited(inner[0], inner[1], own)
    if origin is Union:
        return _maybe(check_of(inner[0], own))
    if origin is tuple and inner[-1] is not ...:
        return _row([check_of(one, own) for one in inner])
    if origin in _MANY or origin in (dict, Mapping):
        return _many(hint, sys.maxsize, own)
    if origin is typing.Literal:
        return one_of(inner)
    return _name(cast(Type[Enum], hint)) if issubclass(cast(type, hint), Enum) else _fields(hint, own)


def _parts(hint: object) -> Tuple[object, Tuple[Any, ...]]:
    """Return the origin of a type, and its arguments."""
    if sys.version_info < (3, 9) and isinstance(hint, Annotated):
        return Annotated, hint.inner
    return get_origin(hint), get_args(hint)


def _hints(kind: Any) -> Mapping[str, object]:
    """Return the types of the fields of a class, with their limits (Annotated)."""
    return (
        typing.get_type_hints(kind, include_extras=True) if sys.version_info >= (3, 9) else typing.get_type_hints(kind)
    )


def _limited(kind: Any, limit: Any, own: bool) -> Check:
    """Create the check of a type with a limit; see the module's docstring. own: see read_own()."""
    if get_origin(kind) is Union:
        return _one_message(kind, limit)
    if isinstance(limit, int):
        return _many(kind, limit, own)
    if isinstance(limit, type):
        return _fields(kind, own, limit)
    check: Check = limit
    return (
        (lambda value, path: kind(check(value, path))) if isinstance(kind, type) and issubclass(kind, Enum) else check
    )


def _name(kind: Type[Enum]) -> Check:
    """Create the check of a value of an enum of strings, which returns the member."""
    check = one_of(one.value for one in kind)
    return lambda value, path: kind(check(value, path))


def _many(hint: object, most: int, own: bool) -> Check:
    """Create the check of a list or an object with at most `most` entries of one type.

    It returns a list, tuple, frozenset or dict, as `hint` has it. own: see read_own().
    """
    origin = get_origin(hint)
    inner = [check_of(one, own) for one in get_args(hint) if one is not ...]
    of_object = origin in (dict, Mapping)

    def check(value: object, path: str) -> object:
        if not isinstance(value, dict if of_object else list):
            raise _wrong_value(path, value, "an object" if of_object else "a list")
        if len(value) > most:
            raise Malformed(path, f"has {len(value)} entries, more than {most}")
        if isinstance(value, dict):
            key, entry = inner
            return {key(name, f"a key of {path}"): entry(one, f"{path}[{name!r}]") for name, one in value.items()}
        return _MANY[origin]([inner[0](one, f"{path}[{at}]") for at, one in enumerate(value)])

    return check


def _maybe(inner: Check) -> Check:
    """Create the check of null, or of what `inner` accepts."""
    return lambda value, path: None if value is None else inner(value, path)


def _row(inner: Sequence[Check]) -> Check:
    """Create the check of a list of values of these types, one of each; it returns a tuple."""

    def check(value: object, path: str) -> object:
        if not isinstance(value, list):
            raise _wrong_value(path, value, "a list")
        if len(value) != len(inner):
            raise Malformed(path, f"has {len(value)} values, not {len(inner)}")
        return tuple([known(one, f"{path}[{at}]") for at, (one, known) in enumerate(zip(value, inner))])

    return check


def _fields(kind: Any, own: bool, record: Optional[type] = None) -> Check:
    """Create the check of an object with the fields of a message, which it returns as it is, or of a record, which it builds.

    A NamedTuple may also be a list. Unknown fields are an error with `own`; else each may have few values. record: the message
    has its fields, too.
    """
    names = _record_fields(kind)
    known, required = _known_fields(kind, own)
    if record is not None:
        more, needed = _known_fields(record, own)
        known, required = {**more, **known}, [*required, *needed]

    def check(value: object, path: str) -> object:
        if names and isinstance(value, list) and issubclass(kind, tuple) and len(value) <= len(names):
            value = dict(zip(names, value))
        if not isinstance(value, dict):
            raise _wrong_value(path, value, "an object")
        for name in required:
            if name not in value:
                raise Malformed(path, f"has no {name!r}")
        if own and not known.keys() >= value.keys():
            unknown = next(name for name in value if name not in known)
            raise Malformed(path, f"has the unknown field {str(unknown)[:_SHOWN]!r}")
        inside = f"{path}." if path else ""
        found = {name: known.get(name, _few_values)(one, inside + name) for name, one in value.items()}
        return kind(**{name: found[name] for name in names if name in found}) if names else value

    return check


def _known_fields(kind: Any, own: bool) -> Tuple[Dict[str, Check], Iterable[str]]:
    """Return the checks of the fields of a message or a record, and the names of those that must be there.

    own: see read_own().
    """
    if get_origin(kind) is dict:  # with the fields of another record
        return {}, ()
    hints, names = _hints(kind), _record_fields(kind)
    known = {name: check_of(hints[name], own) for name in names or hints}
    if not names:
        # Python 3.8 does not tell apart the fields of a base; there, types have no base with other ones.
        required = getattr(kind, "__required_keys__", known if kind.__total__ else ())
        return known, [name for name in known if name in required]
    make = kind.__new__ if issubclass(kind, tuple) else kind.__init__
    return known, names[: len(names) - len(make.__defaults__ or ())]


def by_type(union: object) -> Dict[str, Check]:
    """Create the checks of the messages of a union, by their `type`."""
    found: Dict[str, Check] = {}
    for one in get_args(union):
        origin, inner = _parts(one)
        hints = _hints(inner[0] if origin is Annotated else one)
        found.update(dict.fromkeys(get_args(hints["type"]), check_of(one)))
    return found


def _one_message(union: object, other: object) -> Check:
    """Create the check of a message of a union, or one of an unknown type, which a newer node may send.

    The latter has at least the fields of `other`.
    """
    checks, base = by_type(union), check_of(other)

    def check(value: object, path: str) -> object:
        base(value, path)
        if isinstance(value, dict) and value["type"] in checks:
            checks[value["type"]](value, f"{path} ({value['type']})")
        return value

    return check
