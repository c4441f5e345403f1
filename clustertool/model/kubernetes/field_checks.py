"""These checks compare values with a form. Each finds what is wrong, with the path of the field: `containers[0].image`."""

from __future__ import annotations

import re
from typing import Callable, Iterator, Mapping, NamedTuple, Pattern

from clustertool.model.config.known_names import nearest


class Wrong(NamedTuple):
    """path: of the field, "" for the value itself. right: what it must be."""

    path: str
    right: str


Check = Callable[[object, str], Iterator[Wrong]]  # a value and its path
_NAME, _PART = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?"
_SUBDOMAIN = rf"{_NAME}(\.{_NAME})*"


def text(value: object, path: str) -> Iterator[Wrong]:
    if not isinstance(value, str):
        yield Wrong(path, "a string")


def filled(value: object, path: str) -> Iterator[Wrong]:
    if not isinstance(value, str) or not value:
        yield Wrong(path, "a string that is not empty")


def flag(value: object, path: str) -> Iterator[Wrong]:
    if not isinstance(value, bool):
        yield Wrong(path, "true or false")


def anything(value: object, path: str) -> Iterator[Wrong]:
    """Check for an object whose fields the API server checks."""
    if not isinstance(value, Mapping):
        yield Wrong(path, "an object with fields")


def several(value: object, path: str) -> Iterator[Wrong]:
    """Check for a list whose entries the API server checks."""
    if not isinstance(value, (list, tuple)):
        yield Wrong(path, "a list")


def number(low: int, high: int = 2**31 - 1) -> Check:
    def check(value: object, path: str) -> Iterator[Wrong]:
        if type(value) is not int or not low <= value <= high:
            yield Wrong(path, f"a whole number from {low}" + (f" to {high}" if high < 2**31 - 1 else ""))

    return check


def one_of(*names: str) -> Check:
    def check(value: object, path: str) -> Iterator[Wrong]:
        if value not in names:
            yield Wrong(path, f"one of {', '.join(names)}")

    return check


def matching(pattern: Pattern[str], right: str, most: int = 253) -> Check:
    def check(value: object, path: str) -> Iterator[Wrong]:
        if not isinstance(value, str) or len(value) > most or not pattern.fullmatch(value):
            yield Wrong(path, right)

    return check


label = matching(re.compile(_NAME), "a name of small letters, digits and -, at most 63 characters", 63)
subdomain = matching(re.compile(_SUBDOMAIN), "a name of small letters, digits, - and .")
label_value = matching(re.compile(f"({_PART})?"), "at most 63 letters, digits, -, _ and .", 63)
_path = matching(re.compile(r"/[^:\0\n]*"), "an absolute path without `:`", 1024)
_quantity = re.compile(r"([0-9]+(\.[0-9]*)?|\.[0-9]+)(m|[kMGTPE]|[KMGTPE]i|[eE][+-]?[0-9]+)?", re.ASCII)


def key(value: object, path: str) -> Iterator[Wrong]:
    """Check the key of a label, or the name of a resource."""
    prefix, slash, name = str(value).rpartition("/")
    known = isinstance(value, str) and re.fullmatch(_PART, name) and len(name) <= 63
    if not known or (slash and not re.fullmatch(_SUBDOMAIN, prefix)):
        yield Wrong(path, "a key of the form `name` or `example.org/name`")


def absolute(value: object, path: str) -> Iterator[Wrong]:
    yield from _path(value, path)


def quantity(value: object, path: str) -> Iterator[Wrong]:
    given = "" if isinstance(value, bool) else str(value)
    if not isinstance(value, (int, float, str)) or not _quantity.fullmatch(given):
        yield Wrong(path, 'a number, or one with a unit of Kubernetes: 4, "500m", "64Gi"')


def items(check: Check) -> Check:
    def each(value: object, path: str) -> Iterator[Wrong]:
        if not isinstance(value, (list, tuple)):
            yield Wrong(path, "a list")
            return
        for index, one in enumerate(value):
            yield from check(one, f"{path}[{index}]")

    return each


def mapping(keys: Check, values: Check) -> Check:
    def each(value: object, path: str) -> Iterator[Wrong]:
        if not isinstance(value, Mapping):
            yield Wrong(path, "an object with fields")
            return
        for name, one in value.items():
            place = below(path, str(name))
            yield from keys(name, place)
            yield from values(one, place)

    return each


def form(checks: Mapping[str, Check], *required: str) -> Check:
    """Create the check of an object that has no other fields than these."""

    def each(value: object, path: str) -> Iterator[Wrong]:
        if not isinstance(value, Mapping):
            yield Wrong(path, f"an object with the fields {', '.join(checks)}")
            return
        for name, one in value.items():
            if name in checks:
                yield from checks[name](one, below(path, name))
                continue
            fix = nearest(name, checks, "known are")
            yield Wrong(below(path, str(name)), f"left out, since no such field is known; {fix}")
        for name in required:
            if name not in value:
                yield Wrong(below(path, name), "given: it is required")

    return each


def below(path: str, name: str) -> str:
    """Build the path of a field. A name with a point or a slash is quoted."""
    if not re.fullmatch(r"[\w-]+", name):
        return f"{path}[{name!r}]"
    return f"{path}.{name}" if path else name
