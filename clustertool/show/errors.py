"""A failure is printed once: what, where, the fix, and on the last line of stderr the exit code with its source.

Equal failures of many nodes are one message under their folded names. A fix that several messages share is printed once.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypedDict

from clustertool.errors import ClustertoolError, Several
from clustertool.show.table import fold
from clustertool.show.terminal import Terminal


class ExitCode(TypedDict):
    """The `exit` of every JSON answer."""

    code: int
    source: str
    reason: str


def show_error(error: ClustertoolError, terminal: Terminal) -> None:
    """Print an error on stderr; of one that was printed in detail already, the fix and the last line."""
    for fix, messages in _by_fix(_each(error)).items():
        for what, nodes in () if error.printed else messages.items():
            terminal.error(_indented(f"{_where(nodes)}{what}"))
        if fix:
            terminal.note(_indented(f"  fix: {fix}"))
    terminal.note(f"clustertool: exit {error.code} ({error.source}): {error.brief or reason(error)}")


def exit_json(error: ClustertoolError | None, source: str = "job") -> ExitCode:
    """How a verb ended, for scripts; without an error `source` is the origin of the success."""
    if error is None:
        return {"code": 0, "source": source, "reason": ""}
    return {"code": error.code, "source": error.source, "reason": reason(error)}


def reason(error: ClustertoolError) -> str:
    """The failure in one line."""
    errors = list(_each(error))
    groups: dict[str, list[str]] = {}
    for one in errors:
        groups.setdefault(one.what, []).append(one.node)
    what, nodes = next(iter(groups.items()), ("", []))
    first = f"{_where(nodes)}{what.strip().splitlines()[0] if what.strip() else 'no reason given'}"
    return first if len(groups) < 2 else f"{len(groups)} different failures, first {first}"


def _each(error: ClustertoolError) -> Iterator[ClustertoolError]:
    """The single errors inside, in order."""
    if isinstance(error, Several):
        for one in error.errors:
            yield from _each(one)
    else:
        yield error


def _by_fix(errors: Iterable[ClustertoolError]) -> dict[str, dict[str, list[str]]]:
    """fix -> what -> nodes, each in the order of its first error."""
    found: dict[str, dict[str, list[str]]] = {}
    for error in errors:
        found.setdefault(error.fix, {}).setdefault(error.what, []).append(error.node)
    return found


def _where(nodes: Iterable[str]) -> str:
    named = fold(node for node in nodes if node)
    return f"{named}: " if named else ""


def _indented(text: str) -> str:
    """Further lines of a message are indented, so that its end is visible."""
    return text.rstrip().replace("\n", "\n    ")
