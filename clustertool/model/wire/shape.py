"""This module checks values that another machine sent: their types, sizes and ranges.

A check is a function (value, path). It raises Malformed, which names the path, and returns nothing. check_of() makes the check
of a message from its type. The limit in `Annotated[type, limit]` is the check itself, or the most entries of a list or an
object, or for a union of messages the type that a message of an unknown type has. Strings, lists and objects always have a
limit, so that a value that passes has a bounded size.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Annotated, Any, Callable, Iterable, Iterator, Literal, Union, get_args, get_origin, get_type_hints

Check = Callable[[object, str], None]
_SHOWN = 60
_SMALL = 2000  # values inside a field that no check knows


class Malformed(ValueError):
    """A value is invalid: `path` is its place, `why` the reason."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} {why}" if path else why)


def _wrong(path: str, value: object, wanted: str) -> Malformed:
    shown = repr(value) if isinstance(value, (str, int, float)) or value is None else f"a {type(value).__name__}"
    return Malformed(path, f"is {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '...'}, not {wanted}")


# -- checks of plain values


def text(most: int) -> Check:
    """Create the check of a string of at most `most` characters."""

    def check(value: object, path: str) -> None:
        if not isinstance(value, str):
            raise _wrong(path, value, "a string")
        if len(value) > most:
            raise Malformed(path, f"has {len(value)} characters, more than {most}")

    return check


def matching(true: Callable[[str], bool], wanted: str) -> Check:
    """Create the check of a string for which `true` returns True; `wanted` describes it."""

    def check(value: object, path: str) -> None:
        if not isinstance(value, str) or not true(value):
            raise _wrong(path, value, wanted)

    return check


def one_of(names: Iterable[str]) -> Check:
    known = sorted(names)
    return matching(known.__contains__, f"one of {', '.join(known)}")


def whole(low: int = 0, high: int = (1 << 63) - 1) -> Check:
    """Create the check of an integer from `low` to `high`."""

    def check(value: object, path: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _wrong(path, value, f"an integer from {low} to {high}")

    return check


def number(low: float = 0.0, high: float = 1e18) -> Check:
    """Create the check of a number from `low` to `high`; NaN and infinity are none."""

    def check(value: object, path: str) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise _wrong(path, value, f"a number from {low:g} to {high:g}")

    return check


def _flag(value: object, path: str) -> None:
    if not isinstance(value, bool):
        raise _wrong(path, value, "true or false")


def _little(value: object, path: str) -> None:
    """Check that a value of any type has few elements."""
    if isinstance(value, (list, dict)):
        for count, _ in enumerate(_inside(value)):
            if count > _SMALL:
                raise Malformed(path[:_SHOWN], f"holds more than {_SMALL} values")


def _inside(value: object) -> Iterator[object]:
    """Yield everything in a value, however deep."""
    left = [value]
    while left:
        one = left.pop()
        yield one
        if isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list):
            left += one


# -- the check of a type

_PLAIN: dict[object, Check] = {str: text(1 << 16), int: whole(), float: number(), bool: _flag, object: _little}


@lru_cache(maxsize=None)
def check_of(hint: object) -> Check:
    """Return the check of values of a type, made when it is first used."""
    if hint in _PLAIN:
        return _PLAIN[hint]
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        kind, limit = inner
        if get_origin(kind) is Union:
            return _one_message(kind, limit)
        return limit if callable(limit) else _many(kind, limit)
    if origin is Union:
        return _maybe(check_of(inner[0]))
    if origin is tuple:
        return _row([check_of(one) for one in inner])
    return one_of(inner) if origin is Literal else _fields(hint)


def _many(hint: object, most: int) -> Check:
    """Create the check of a list or an object with at most `most` entries, all of one type."""
    inner = [check_of(one) for one in get_args(hint) if one is not ...]
    of_object = get_origin(hint) is dict

    def check(value: object, path: str) -> None:
        if not isinstance(value, dict if of_object else list):
            raise _wrong(path, value, "an object" if of_object else "a list")
        if len(value) > most:
            raise Malformed(path, f"has {len(value)} entries, more than {most}")
        if isinstance(value, dict):
            for name, one in value.items():
                inner[0](name, f"a key of {path}")
                inner[1](one, f"{path}[{name!r}]")
        else:
            for at, one in enumerate(value):
                inner[0](one, f"{path}[{at}]")

    return check


def _maybe(inner: Check) -> Check:
    """Null, or what `inner` accepts."""

    def check(value: object, path: str) -> None:
        if value is not None:
            inner(value, path)

    return check


def _row(inner: list[Check]) -> Check:
    """Create the check of a list of exactly these values."""

    def check(value: object, path: str) -> None:
        if not isinstance(value, list) or len(value) != len(inner):
            raise _wrong(path, value, f"a list of {len(inner)}")
        for at, (one, known) in enumerate(zip(value, inner)):
            known(one, f"{path}[{at}]")

    return check


def _fields(message: Any) -> Check:
    """Create the check of an object with the fields of a TypedDict. Unknown ones may have few values."""
    known = {name: check_of(hint) for name, hint in get_type_hints(message, include_extras=True).items()}
    required = [name for name in known if name in message.__required_keys__]

    def check(value: object, path: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(path, value, "an object")
        for name in required:
            if name not in value:
                raise Malformed(path, f"has no {name!r}")
        for name, one in value.items():
            known.get(name, _little)(one, f"{path}.{name}" if path else name)

    return check


def by_type(union: object) -> dict[str, Check]:
    """Create the checks of the messages of a union, by their `type`."""
    return {name: check_of(one) for one in get_args(union) for name in get_args(get_type_hints(one)["type"])}


def _one_message(union: object, other: object) -> Check:
    """Create the check of a message of a union, or one of an unknown type, which a newer node may send.

    The latter has at least the fields of `other`.
    """
    checks, base = by_type(union), check_of(other)

    def check(value: object, path: str) -> None:
        base(value, path)
        if isinstance(value, dict) and value["type"] in checks:
            checks[value["type"]](value, f"{path} ({value['type']})")

    return check
