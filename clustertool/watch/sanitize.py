"""This module sanitizes text of remote programs, so that it cannot control the terminal.

Pure. Two filters process one line of text: `mask` (model/masking.py) hides secrets, `harmless` shows control characters as
text. Mask first: a secret may itself contain a control character, which would no longer match once it is spelled out.
"""

from __future__ import annotations

import re

# C0 but tab, DEL and C1 move the cursor, change colours or answer for the user; U+2028/2029 fake a new line; the bidi
# marks, overrides and isolates make text read as something else than it is.
_HARM = re.compile("[\x00-\x08\x0a-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]")


def harmless(text: str) -> str:
    r"""Spell out every control character of `text`: ESC becomes `\x1b`, a newline `\n`."""
    # isprintable() is a fast, narrower test; it is False for a tab, which the pattern lets pass.
    return text if text.isprintable() else _HARM.sub(_spell, text)


def harmless_lines(text: str, indent: str = "") -> str:
    """Spell out every control character of a text except the newlines.

    indent: is put before each further line, unless it is empty or begins with a blank, so that no line can pass for a message
    of its own.
    """
    if text.isprintable():
        return text
    first, *rest = map(harmless, text.split("\n"))
    return "\n".join([first, *(line if line[:1] == " " or not line else indent + line for line in rest)])


def _spell(match: re.Match[str]) -> str:
    """Return the escape of a matched character."""
    return match.group().encode("unicode_escape").decode("ascii")
