"""Readers convert values of conf.py and job.toml, for several keys. Each raises ValueError, which states what is right."""

from __future__ import annotations

import difflib
from typing import Any, Callable, Collection, Dict, Mapping, Type

from clustertool.errors import ClustertoolError

Values = Mapping[str, object]  # by the names of settings
Reader = Callable[[object], object]
ErrorKind = Type[ClustertoolError]
Place = Callable[[str], str]  # how a message names a setting


def one_of(*allowed: str) -> Callable[[object], str]:
    """Create a reader that accepts only these texts, and raises ValueError, which lists them, for other values."""

    def read(value: object) -> str:
        if value not in allowed:
            raise ValueError("one of " + ", ".join(allowed))
        return str(value)

    return read


def nearest(name: object, known: Collection[str], lead: str = "known keys:") -> str:
    """Return "did you mean NAME?" with the known name that is most like it, else `lead` and all known names."""
    near = difflib.get_close_matches(str(name), known, 1)
    return f"did you mean {near[0]}?" if near else f"{lead} {', '.join(known)}"


def read_values(values: Values, readers: Mapping[str, Reader], error: ErrorKind, place: Place) -> Dict[str, Any]:
    """Convert each setting of one source by the reader of its name, and return {name: value}.

    Raises `error` for a name without a reader, and for a value whose reader raises ValueError. place: returns, for a name, the
    words with which the message begins, such as "job.toml: [container] NAME =".
    """
    found = {}
    for name, value in values.items():
        if name not in readers:
            raise error(f"{place(str(name))} {value!r}: this key is not known", nearest(name, readers))
        try:
            found[name] = readers[name](value)
        except ValueError as right:
            raise error(f"{place(name)} {value!r} is not right", f"{name} is {right}") from None
    return found
