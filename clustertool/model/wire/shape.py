"""This module checks values that another machine sent: their types, sizes and ranges.

A check is a function (value, path). It raises Malformed, which names the path, and returns nothing. The functions below make
checks. Strings, lists and objects always have a limit, so that a value that passes has a bounded size.
"""

from __future__ import annotations

from typing import Callable, Iterator, Mapping, Optional

Check = Callable[[object, str], None]
TEXT = 1 << 16  # characters of a string, if a check has no other limit
_SHOWN = 60
_SMALL = 2000  # values inside a field that no check knows


class Malformed(ValueError):
    """A value is invalid: `path` is its place, `why` the reason."""

    def __init__(self, path: str, why: str) -> None:
        super().__init__(f"{path} {why}" if path else why)


def _wrong(path: str, value: object, wanted: str) -> Malformed:
    shown = repr(value) if isinstance(value, (str, int, float)) or value is None else f"a {type(value).__name__}"
    return Malformed(path, f"is {shown if len(shown) <= _SHOWN else shown[:_SHOWN] + '...'}, not {wanted}")


def text(most: int = TEXT) -> Check:
    """A string of at most `most` characters."""

    def check(value: object, path: str) -> None:
        if not isinstance(value, str):
            raise _wrong(path, value, "a string")
        if len(value) > most:
            raise Malformed(path, f"has {len(value)} characters, more than {most}")

    return check


def matching(true: Callable[[str], bool], wanted: str) -> Check:
    """A string for which `true` returns True; `wanted` describes it."""

    def check(value: object, path: str) -> None:
        if not isinstance(value, str) or not true(value):
            raise _wrong(path, value, wanted)

    return check


def whole(low: int = 0, high: int = (1 << 63) - 1) -> Check:
    """An integer from `low` to `high`."""

    def check(value: object, path: str) -> None:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise _wrong(path, value, f"an integer from {low} to {high}")

    return check


def number(low: float = 0.0, high: float = 1e18) -> Check:
    """A number from `low` to `high`; NaN and infinity are none."""

    def check(value: object, path: str) -> None:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not low <= value <= high:
            raise _wrong(path, value, f"a number from {low:g} to {high:g}")

    return check


def flag(value: object, path: str) -> None:
    """True or false."""
    if not isinstance(value, bool):
        raise _wrong(path, value, "true or false")


def maybe(inner: Check) -> Check:
    """Null, or what `inner` accepts."""

    def check(value: object, path: str) -> None:
        if value is not None:
            inner(value, path)

    return check


def rows(inner: Check, most: int) -> Check:
    """A list of at most `most` values."""

    def check(value: object, path: str) -> None:
        if not isinstance(value, list):
            raise _wrong(path, value, "a list")
        if len(value) > most:
            raise Malformed(path, f"has {len(value)} entries, more than {most}")
        for at, one in enumerate(value):
            inner(one, f"{path}[{at}]")

    return check


def row(*inner: Check) -> Check:
    """A list of exactly these values."""

    def check(value: object, path: str) -> None:
        if not isinstance(value, list) or len(value) != len(inner):
            raise _wrong(path, value, f"a list of {len(inner)}")
        for at, (one, known) in enumerate(zip(value, inner)):
            known(one, f"{path}[{at}]")

    return check


def table(key: Check, inner: Check, most: int) -> Check:
    """An object with at most `most` keys, all of one kind."""

    def check(value: object, path: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(path, value, "an object")
        if len(value) > most:
            raise Malformed(path, f"has {len(value)} entries, more than {most}")
        for name, one in value.items():
            key(name, f"a key of {path}")
            inner(one, f"{path}[{name!r}]")

    return check


def fields(required: Mapping[str, Check], optional: Optional[Mapping[str, Check]] = None) -> Check:
    """An object with the `required` keys, and possibly the `optional` ones. Other keys may have few values."""
    known = {**(optional or {}), **required}

    def check(value: object, path: str) -> None:
        if not isinstance(value, dict):
            raise _wrong(path, value, "an object")
        for name in required:
            if name not in value:
                raise Malformed(path, f"has no {name!r}")
        for name, one in value.items():
            inner = known.get(name, little)
            inner(one, f"{path}.{name}" if path else name)

    return check


def little(value: object, path: str) -> None:
    """Any value with few elements."""
    if isinstance(value, (list, dict)):
        for count, _ in enumerate(_inside(value)):
            if count > _SMALL:
                raise Malformed(path[:_SHOWN], f"holds more than {_SMALL} values")


def _inside(value: object) -> Iterator[object]:
    """Everything in a value, however deep."""
    left = [value]
    while left:
        one = left.pop()
        yield one
        if isinstance(one, dict):
            left += one.values()
        elif isinstance(one, list):
            left += one
