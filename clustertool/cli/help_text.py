"""This module writes the help of `clustertool` from the table of commands. Pure: the width is given.

The form is that of docker and kubectl: what the program is, its commands by purpose, examples. Options of a command stand in
groups with the type of their value and their default.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from clustertool.cli.options import Opt, Verb

_WIDEST = 120  # columns: longer lines are hard to read
_INDENT, _GAP = "  ", "  "
_LEFT = 28  # columns for names; an option with a longer one has its text on the next line
_DURATION = "DURATION is a number of seconds, or numbers with the units ms, s, m, h, d, w: 90, 30s, 5m, 1h30m."


def overview(
    about: str, verbs: Sequence[Verb], common: Sequence[Opt], examples: Sequence[tuple[str, str]], width: int
) -> str:
    """Format the help of the program: usage, `about`, commands by purpose, examples, options; lines of at most 120 columns.

    A command has its help up to the first semicolon. examples: (command, what it does). width: columns, if fewer than 120.
    """
    parts = ["usage: clustertool COMMAND [options]", _fill(about, width)]
    for purpose in dict.fromkeys(verb.purpose for verb in verbs):
        rows = [(verb.name, _before_semicolon(verb.help)) for verb in verbs if verb.purpose == purpose]
        parts.append(_block(purpose, rows, width, _longest(verb.name for verb in verbs)))
    rows = [(f"clustertool {command}", text) for command, text in examples]
    parts.append(_block("Examples", rows, width, _longest(command for command, _ in rows)))
    parts.append(_options("Options", common, width))
    parts.append(_fill("`clustertool help COMMAND` shows the options of a command.", width))
    return "\n\n".join(parts)


def listing(verbs: Sequence[Verb]) -> str:
    """List the commands: one line each with the name and the help up to its first semicolon."""
    left = _longest(verb.name for verb in verbs)
    return "\n".join(f"{_INDENT}{verb.name:<{left}}{_GAP}{_before_semicolon(verb.help)}" for verb in verbs)


def of_verb(verb: Verb, common: Sequence[Opt], width: int) -> str:
    """Format the help of one command: usage, examples, arguments, options by group, and the form of a DURATION if one takes it.

    common: options that each command has.
    """
    after = f" {verb.positional.value}" if verb.positional else ""
    parts = [f"usage: clustertool {verb.name}{' [options]' * bool(verb.options)}{after}", _fill(verb.help, width)]
    if verb.examples:
        parts.append("Examples\n" + "\n".join(f"{_INDENT}clustertool {example}" for example in verb.examples))
    if verb.positional:
        parts.append(_block("Arguments", [(verb.positional.value, verb.positional.help)], width, _LEFT))
    options = (*verb.options, *common)
    for group in dict.fromkeys(option.group for option in options):
        parts.append(_options(group, [option for option in options if option.group == group], width))
    if any("DURATION" in option.value.split("|") for option in options):
        parts.append(_fill(_DURATION, width))
    return "\n\n".join(parts)


def _options(title: str, options: Sequence[Opt], width: int) -> str:
    """Format a group of options, with their aliases in the same row."""
    rows = []
    for option in options:
        if not option.alias:
            names = [option.name, *(other.name for other in options if other.alias == option.name)]
            short = f"-{option.short}, " if option.short else "    "
            spelled = short + ", ".join(f"--{name}" for name in names)
            rows.append((f"{spelled} {option.type}".rstrip(), option.text))
    return _block(title, rows, width, _LEFT)


def _block(title: str, rows: Iterable[tuple[str, str]], width: int, left: int) -> str:
    """Format a title and rows in two columns, the texts wrapped; a name that is longer than `left` has a line of its own."""
    lines = [title]
    pad = " " * (len(_INDENT) + left + len(_GAP))
    for name, text in rows:
        filled = _wrapped(text, min(width, _WIDEST) - len(pad)) or [""]
        if len(name) > left:
            lines += [_INDENT + name, *(pad + line for line in filled)]
        else:
            lines += [f"{_INDENT}{name:<{left}}{_GAP}{filled[0]}".rstrip(), *(pad + line for line in filled[1:])]
    return "\n".join(lines)


def _fill(text: str, width: int) -> str:
    """Wrap a text to `width` columns, at most 120."""
    return "\n".join(_wrapped(text, min(width, _WIDEST)))


def _wrapped(text: str, width: int) -> list[str]:
    """Wrap a text to lines of `width` columns, at least 20; no word is broken."""
    return textwrap.wrap(text, max(width, 20), break_long_words=False, break_on_hyphens=False)


def _before_semicolon(text: str) -> str:
    """Return a text up to its first semicolon."""
    return text.partition(";")[0].rstrip(".")


def _longest(names: Iterable[str]) -> int:
    return max(map(len, names))
