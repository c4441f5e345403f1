"""Text that only a shell would interpret, in --script and in values of variables: no shell reads them. Pure."""

from __future__ import annotations

import re
import shlex
from typing import Iterable, Iterator, Tuple

_EXPANDED = re.compile(r"\$(?:\{?([A-Za-z_][A-Za-z0-9_]*)|\()|`")
_SHELLS = re.compile(r"(?:\S*/)?(?:ba|da|z|k)?sh")
_OPERATORS = re.compile(r"&&|\|\|?|;|(?:\d|&)?>>?(?:&\d)?|<|&(?=\s|$)")


def operator(text: str) -> str:
    """Find the first operator of a shell outside of quotes: && | ; > < or a last &. "" if there is none.

    Inside of an argument only && | ; > < count, since & stands in addresses.
    """
    unquoted = "".join(letter if state == "" else "_" for letter, state in _letters(text))
    found = _OPERATORS.search(unquoted)
    return found[0] if found else ""


def expansion(text: str) -> str:
    """Find the first $NAME, ${NAME}, $( or ` of a command that a shell would replace; "" if there is none.

    "", too, where the command passes a text to a shell (sh -c), and for text with an open quote.
    """
    try:
        arguments = shlex.split(text)
    except ValueError:  # an error of its own
        return ""
    if any(_SHELLS.fullmatch(name) and re.fullmatch(r"-\w*c", after) for name, after in zip(arguments, arguments[1:])):
        return ""
    return in_value("".join(letter if state in ("", '"') else "_" for letter, state in _letters(text)))


def in_value(text: str) -> str:
    """Find the first $NAME, ${NAME}, $( or ` in the value of a variable, which has no quotes; "" if there is none.

    ${NAME} is returned as $NAME.
    """
    found = _EXPANDED.search(text)
    return f"${found[1]}" if found and found[1] else found[0] if found else ""


def find_own_variable(pairs: Iterable[Tuple[str, str]]) -> str:
    """Return the name of the first variable whose value contains the variable itself, as in PATH=/x:$PATH; "" if none does."""
    return next((name for name, value in pairs if re.search(rf"\$\{{?{name}\b", value)), "")


def in_shell(text: str) -> str:
    """Return a command for --script by which bash runs this text. A script of Python gets the interpreter in front."""
    first = text.split(maxsplit=1)[:1]
    python = "python3 -u " if first and first[0].endswith(".py") else ""
    return f"bash -c {shlex.quote(python + text)}"


def _letters(text: str) -> Iterator[Tuple[str, str]]:
    """Yield each character and its quote: "", ' or ", or the backslash for a quote itself and for what it precedes."""
    quote, escaped = "", False
    for letter in text:
        if escaped or (letter == "\\" and quote != "'"):
            escaped = not escaped
            yield letter, "\\"
        elif letter in ("'", '"') and quote in ("", letter):
            quote = "" if quote else letter
            yield letter, "\\"
        else:
            yield letter, quote
