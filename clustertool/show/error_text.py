"""A failure is printed once: what, where, the fix, and on the last line of stderr the exit code with its source.

Equal failures of many nodes are one message under their folded names, also where each message names its own node. A fix that
several messages share is printed once.
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
    """Print an error on stderr: a message for each cause, the fixes, and the exit code in the last line.

    If it was printed in detail before, the messages are left out.
    """
    for alike in grouped((for_node(one.fix, one.node), one) for one in singles(error)).values():
        for message in () if error.printed else _messages(alike):
            terminal.error(_indent(message))
        fix = joined_fix({one.node: one.fix for one in alike})
        if fix:
            terminal.note(_indent(f"  fix: {fix}"))
    terminal.note(f"clustertool: exit {error.code} ({error.source}): {error.brief or reason(error)}")


def exit_json(error: ClustertoolError | None, source: str = "job", done: str = "") -> ExitCode:
    """Build the field "exit" of a JSON answer.

    Without an error, `source` is the origin of the success and `done` its reason.
    """
    if error is None:
        return {"code": 0, "source": source, "reason": done}
    return {"code": error.code, "source": error.source, "reason": reason(error)}


def reason(error: ClustertoolError) -> str:
    """Summarize an error and its parts in one line: the message, or how many different ones and the first."""
    messages = _messages(singles(error), first_line=True)
    return messages[0] if len(messages) == 1 else f"{len(messages)} different failures, first {messages[0]}"


def for_node(text: str, node: str, name: str = "NODE") -> str:
    """Replace the name of the node in a text by `name`, so that the texts of several nodes can be compared."""
    return re.sub(rf"(?<![\w.-]){re.escape(node)}(?![\w-])", lambda _: name, text) if node else text


def joined_fix(fixes: Mapping[str, str]) -> str:
    """Return one fix for several nodes: their text, or if it names each node, the first one with NODE, and the folded names.

    fixes: {name of a node: its fix}; for_node() makes all of them equal.
    """
    node, fix = next(iter(fixes.items()))
    same = len(set(fixes.values())) == 1
    return fix if same else f"{for_node(fix, node)} (NODE: each of {fold(fixes)})"


def _messages(errors: Iterable[ClustertoolError], first_line: bool = False) -> list[str]:
    """Format a message for each cause, with the folded names of its nodes in front and in place of one name in the text.

    first_line: only the first line of the text.
    """
    found = []
    for alike in grouped((for_node(one.what, one.node), one) for one in errors).values():
        named, what = fold(one.node for one in alike if one.node), alike[0].what.strip()
        if len({one.what for one in alike}) > 1:
            what = for_node(what, alike[0].node, named)
        if first_line:
            what = what.splitlines()[0] if what else "no reason given"
        found.append(f"{named}: {what}" if named else what)
    return found


def _indent(text: str) -> str:
    """Indent the further lines of a message, so that its end is visible."""
    return text.rstrip().replace("\n", "\n    ")
