"""A failure is printed once: what, where, the fix, and on the last line of stderr the exit code with its source.

Equal failures of many nodes are one message under their folded names. A fix that several messages share is printed once.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import TypedDict

from clustertool.errors import ClustertoolError, singles
from clustertool.model.config.folded_names import fold, grouped
from clustertool.show.terminal import Terminal


class ExitCode(TypedDict):
    """The `exit` of every JSON answer."""

    code: int
    source: str
    reason: str


def show_error(error: ClustertoolError, terminal: Terminal) -> None:
    """Print an error on stderr; of one that was printed in detail already, the fix and the last line."""
    for alike in grouped((for_node(one.fix, one.node), one) for one in singles(error)).values():
        messages = grouped((one.what, one.node) for one in alike)
        for what, nodes in () if error.printed else messages.items():
            terminal.error(_indented(f"{_where(nodes)}{what}"))
        fix = joined_fix({one.node: one.fix for one in alike})
        if fix:
            terminal.note(_indented(f"  fix: {fix}"))
    terminal.note(f"clustertool: exit {error.code} ({error.source}): {error.brief or reason(error)}")


def exit_json(error: ClustertoolError | None, source: str = "job", done: str = "") -> ExitCode:
    """How a verb ended, for scripts; without an error `source` is the origin of the success, and `done` its reason."""
    if error is None:
        return {"code": 0, "source": source, "reason": done}
    return {"code": error.code, "source": error.source, "reason": reason(error)}


def reason(error: ClustertoolError) -> str:
    """The failure in one line."""
    groups = grouped((one.what, one.node) for one in singles(error))
    what, nodes = next(iter(groups.items()), ("", []))
    first = f"{_where(nodes)}{what.strip().splitlines()[0] if what.strip() else 'no reason given'}"
    return first if len(groups) < 2 else f"{len(groups)} different failures, first {first}"


def for_node(fix: str, node: str) -> str:
    """A fix with NODE in place of the node's name, so that the fixes of several nodes can be compared."""
    return re.sub(rf"(?<![\w.-]){re.escape(node)}(?![\w-])", "NODE", fix) if node else fix


def joined_fix(fixes: Mapping[str, str]) -> str:
    """One text for the fixes of several nodes (by their names) that for_node() makes equal."""
    node, fix = next(iter(fixes.items()))
    same = len(set(fixes.values())) == 1
    return fix if same else f"{for_node(fix, node)} (NODE: each of {fold(fixes)})"


def _where(nodes: Iterable[str]) -> str:
    named = fold(node for node in nodes if node)
    return f"{named}: " if named else ""


def _indented(text: str) -> str:
    """Further lines of a message are indented, so that its end is visible."""
    return text.rstrip().replace("\n", "\n    ")
