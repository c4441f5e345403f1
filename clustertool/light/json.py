"""What nodes need of `json`: the same C code, without the modules around it, which take 4 ms to import.

`_json` is CPython's own affair. Where it is not there, or not as we know it, `json` does it all.
"""

from __future__ import annotations

from typing import Any, Callable, Tuple

_SPACE = " \t\n\r"
_SAMPLE = '{"a": [1, -2.5, true, null, "\\u20ac"], "b": {}}'


class _Settings:
    """A decoder's, as json.loads() has them."""

    strict = True
    object_hook = object_pairs_hook = None
    parse_float, parse_int = float, int

    @staticmethod
    def parse_constant(name: str) -> float:
        """NaN, Infinity, -Infinity."""
        return float(name)


def _refuse(value: Any) -> Any:
    raise TypeError(f"Object of type {type(value).__name__} is not JSON serializable")


def _tools() -> Tuple[Callable[..., Any], Callable[..., Any]]:
    """A scanner, and what makes encoders. Raises what it likes where `_json` is another one."""
    import _json

    make_scanner: Any = _json.make_scanner
    make_encoder: Any = _json.make_encoder

    def encoder(item: str, key: str) -> Any:
        return make_encoder({}, _refuse, _json.encode_basestring_ascii, None, key, item, False, False, True)

    scan = make_scanner(_Settings)
    if "".join(encoder(", ", ": ")(scan(_SAMPLE, 0)[0], 0)) != _SAMPLE:
        raise ImportError("another _json")
    return scan, encoder


def loads(text: Any) -> Any:
    """Of str, or of UTF-8. Raises ValueError: for what is no JSON json finds the words, which the C code leaves to it."""
    if not isinstance(text, str):
        text = bytes(text).decode("utf-8", "surrogatepass")
    text = text.strip(_SPACE)
    if not text:  # what follows the last line of a file
        raise ValueError("no JSON, but nothing at all")
    try:
        value, end = _scan(text, 0)
    except (StopIteration, SystemError):
        end = -1
    if end != len(text):
        from json import loads

        return loads(text)
    return value


def dumps(value: Any, separators: Tuple[str, str] = (", ", ": ")) -> str:
    """Raises TypeError, ValueError."""
    return "".join(_encoder(*separators)(value, 0))


try:
    _scan, _encoder = _tools()
except (ImportError, AttributeError, TypeError, ValueError):
    from json import dumps, loads  # type: ignore[assignment]  # noqa: F401


def __getattr__(name: str) -> Any:
    import json

    return getattr(json, name)
