"""A verb is a function of a Call. This module runs it, and turns its errors into messages and exit codes.

Options reach a verb as text, flags or lists, exactly as typed. The verb and the plan check them.
"""

from __future__ import annotations

import gc
import getpass
import importlib
import platform
import sys
import traceback
from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

from invoke import Context

from clustertool import __version__
from clustertool.errors import ClustertoolError, InternalError, UsageError
from clustertool.model.roles import ROLES, known
from clustertool.show.errors import exit_json, show_error
from clustertool.show.table import fold
from clustertool.show.terminal import Terminal
from clustertool.verbs import signals
from clustertool.verbs.table import Verb
from clustertool.watch.sanitize import harmless

_GARBAGE = 100_000  # objects


class Call:
    """One call of a verb: its options as attributes of `given`, and the terminal."""

    def __init__(self, given: SimpleNamespace) -> None:
        self.given = given
        self._terminal: Terminal | None = None
        self._answered = False

    @property
    def json(self) -> bool:
        return bool(getattr(self.given, "json", False))

    @property
    def terminal(self) -> Terminal:
        """stdout for users; stderr when stdout belongs to a JSON answer."""
        if self._terminal is None:
            self._terminal = Terminal(out=sys.stderr) if self.json else Terminal()
        return self._terminal

    @property
    def answered(self) -> bool:
        """One call has one JSON answer: a later error prints nothing more on stdout."""
        return self._answered

    def answer(self, value: object) -> None:
        """The JSON answer, on stdout."""
        self._answered = True
        Terminal().json(value)


class User:
    """The user at the terminal, for questions and notes of ssh/prompter.py; the texts may come from servers."""

    @property
    def present(self) -> bool:
        return sys.stdin is not None and sys.stdin.isatty()

    def ask(self, question: str, hidden: bool) -> str:
        signals.count.asking = True
        try:
            return getpass.getpass(harmless(question)) if hidden else _visible(harmless(question))
        except EOFError:  # Ctrl+D: no answer
            return ""
        finally:
            signals.count.asking = False

    def tell(self, text: str) -> None:
        signals.count.note(text)

    def fold(self, names: Iterable[str]) -> str:
        return fold(names)


def _visible(question: str) -> str:
    print(question, end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().rstrip("\n")


Body = Callable[[Call], None]


def _body(verb: Verb) -> Body:
    module, name = verb.target.split(":")
    body: Body = getattr(importlib.import_module(module), name)
    return body


def whole(text: str, option: str) -> int | None:
    """An option's whole number, None if it was not given. Raises UsageError."""
    if text == "":
        return None
    if not text.isdecimal():
        raise UsageError(f"{option} {text!r}", "a whole number")
    return int(text)


def role_of(text: str) -> str:
    """--role as the job's processes have it. Raises UsageError."""
    role = known(text)
    if not role:
        raise UsageError(f"--role {text!r}", f"one of {', '.join(ROLES)}")
    return role


def run(verb: Verb, context: Context, values: dict[str, Any]) -> int:
    def obey(call: Call) -> None:
        if context.config.run.dry:
            if not hasattr(call.given, "dry"):
                raise UsageError(f"{verb.name} has no --dry", "leave --dry out")
            call.given.dry = True
        _body(verb)(call)

    given = SimpleNamespace(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})
    return outermost(obey, Call(given))


def outermost(body: Body, call: Call) -> int:
    """The outermost boundary: every error becomes a message on stderr and an exit code here."""
    gc.set_threshold(
        _GARBAGE, 50, 50
    )  # most objects of a command live until its end, so frequent collections find nothing
    try:
        signals.count.working = True
        signals.count.note = lambda text: call.terminal.note(text)
        body(call)
    except ClustertoolError as error:
        return _fail(call, error)
    except Exception as error:  # noqa: BLE001 - the one place where everything ends
        return _fail(call, _bug(error))
    finally:
        signals.count.working = False
    return 0


def _fail(call: Call, error: ClustertoolError) -> int:
    show_error(error, call.terminal)
    if call.json and not call.answered:
        call.answer({"exit": exit_json(error)})
    return error.code


def _bug(error: Exception) -> InternalError:
    text = "".join(traceback.format_exception(error))
    about = f"clustertool {__version__}, Python {platform.python_version()}, {platform.system()}"
    return InternalError(f"a bug of clustertool: {error!r}\n{text}", f"report it with the text above and: {about}")
