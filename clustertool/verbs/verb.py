"""A verb is a function of a Call. This module runs it, and turns its errors into messages and exit codes.

Options reach a verb as text, flags or lists, exactly as typed. The verb and the plan check them.
"""

from __future__ import annotations

import functools
import gc
import getpass
import importlib
import math
import platform
import sys
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields
from types import SimpleNamespace

from clustertool import __version__
from clustertool.actions.conf_file import Selection
from clustertool.cli.options import Verb
from clustertool.engines.caller import DispatchView, WorkView
from clustertool.errors import ClustertoolError, InternalError, UsageError
from clustertool.model.config.folded_names import fold
from clustertool.model.quantities import DURATIONS, human_seconds, seconds_of
from clustertool.model.roles import ROLES, known
from clustertool.show.error_text import exit_json, show_error
from clustertool.show.program_name import typed
from clustertool.show.terminal import Terminal
from clustertool.ssh.prompter import Person
from clustertool.verbs import signals
from clustertool.watch.sanitize import harmless

_BARS = "clustertool.show.progress_bars"  # imported only by a verb that sends something


class Call:
    """One call of a verb: its options as attributes of `given`, and the terminal."""

    def __init__(self, given: SimpleNamespace) -> None:
        self.given = given
        self.dispatches = False  # the result of a dispatch is what it answers
        self.terse = False  # what follows without a wait is not announced
        self._remarks: list[str] | None = None  # None: each is a line at once
        self._answer: Mapping[str, object] = {}
        self._finished = False
        self.lines = False  # the answer is JSON Lines, of which the verb prints all but the last one

    @property
    def json(self) -> bool:
        return bool(getattr(self.given, "json", False))

    @property
    def typed(self) -> tuple[str, ...]:
        """The command line, as a shell would take it again."""
        return (typed(), *sys.argv[1:])

    @functools.cached_property
    def terminal(self) -> Terminal:
        """stdout for users; stderr when stdout belongs to a JSON answer."""
        return Terminal(out=sys.stderr) if self.json else Terminal()

    def answer(self, value: Mapping[str, object]) -> None:
        """Keep the JSON answer for finish(). One call has one."""
        self._answer = value

    def finish(self, error: ClustertoolError | None) -> None:
        """Print the JSON answer on stdout, with the exit code if the verb has not put it there."""
        if self.json and not self._finished:
            self._finished = True  # an error of the output is none of the answer
            answer = {**self._answer, "exit": self._answer.get("exit", exit_json(error, "tool"))}
            Terminal().json(answer, lines=self.lines)

    @property
    def selection(self) -> Selection:
        """Its options about hosts."""
        names = [field.name for field in fields(Selection)]
        return Selection(**{name: value for name, value in vars(self.given).items() if name in names and value})

    # -- as the caller of actions

    def note(self, text: str) -> None:
        self.terminal.note(text)

    def gather_remarks(self) -> None:
        """Keep remarks from now on, which show_remarks() prints in one line, unless -v is given."""
        self._remarks = None if self.given.verbose else []

    def remark(self, text: str) -> None:
        if self._remarks is None:
            self.terminal.note(f"note: {text}")
        else:
            self._remarks.append(text)

    def show_remarks(self) -> None:
        if self._remarks:
            self.terminal.note(f"note: {'; '.join(dict.fromkeys(self._remarks))}")
            self._remarks.clear()

    def warn(self, text: str) -> None:
        self.terminal.warn(text)

    def check(self) -> None:
        signals.check()

    def person(self) -> Person:
        return User()

    def dispatching(self, names: Sequence[str], since: float | None) -> DispatchView:
        self.show_remarks()
        bars = importlib.import_module(_BARS)
        return bars.DispatchProgress(self.terminal, names, since=since, answers=self.dispatches)  # type: ignore[no-any-return]

    def working(self, phase: str, names: Sequence[str]) -> WorkView:
        self.show_remarks()
        return importlib.import_module(_BARS).NodeProgress(self.terminal, phase, names, answers=self.dispatches)  # type: ignore[no-any-return]

    def starting(self, job: str) -> None:
        self.show_remarks()
        signals.count.job = job


class User:
    """The user at the terminal, for questions and notes of ssh/prompter.py; the texts may come from servers."""

    @property
    def present(self) -> bool:
        return sys.stdin is not None and sys.stdin.isatty()

    def ask(self, question: str, hidden: bool) -> str:
        signals.count.asking = True
        try:
            if hidden:
                return getpass.getpass(harmless(question))
            print(harmless(question), end="", file=sys.stderr, flush=True)
            return sys.stdin.readline().rstrip("\n")
        except EOFError:  # Ctrl+D: no answer
            return ""
        finally:
            signals.count.asking = False

    def tell(self, text: str) -> None:
        signals.count.note(text)

    def fold(self, names: Iterable[str]) -> str:
        return fold(names)


def one_of(call: Call, *names: str) -> str:
    """Return the value of an option and its aliases. Raises UsageError when two differ."""
    values = {name: getattr(call.given, name.replace("-", "_")) for name in names}
    given = {name: value for name, value in values.items() if value}
    if len(set(given.values())) > 1:
        both = " and ".join(f"--{name} {value}" for name, value in given.items())
        raise UsageError(f"{both} have different values", "they are two names of one option: give one")
    return str(next(iter(given.values()), ""))


def whole(text: str, option: str) -> int | None:
    """Convert an option to a whole number, None if it was not given. Raises UsageError."""
    if text == "":
        return None
    if not text.isdecimal():
        raise UsageError(f"{option} {text!r} is not a whole number", f"write {option} 3")
    return int(text)


def seconds(text: str, option: str, default: float, least: float = 0.0, most: float = math.inf) -> float:
    """Convert an option to a duration in seconds. Raises UsageError."""
    found = seconds_of(text) if text else default
    if found is None:
        raise UsageError(f"{option} {text!r} is not a duration", DURATIONS)
    if not least <= found <= most:
        raise UsageError(f"{option} {text} is out of range", f"from {human_seconds(least)} to {human_seconds(most)}")
    return found


def age(text: str, option: str) -> float:
    """Convert an option's time until now to seconds: 7d, 10m. Raises UsageError, also for a number alone: 7 may mean days."""
    found = seconds_of(text) if text[-1:].isalpha() else None
    if found is None:
        raise UsageError(f"{option} {text!r} is not a duration with a unit", "10m, 12h or 7d")
    return found


def role_of(text: str) -> str:
    """Convert --role to a role as the job's processes have it. Raises UsageError."""
    role = known(text)
    if not role:
        raise UsageError(f"--role {text!r} is not known", f"one of {', '.join(ROLES)}")
    return role


def run(verb: Verb, values: Mapping[str, object], dry: bool) -> int:
    """Carry out a verb and return the exit code.

    values: its options and positional arguments by attribute. dry: --dry stood before the verb.
    """

    def obey(call: Call) -> None:
        if dry:
            if not hasattr(call.given, "dry"):
                raise UsageError(f"{verb.name} has no --dry", "leave --dry out")
            call.given.dry = True
        module, name = verb.target(call.given).split(":")
        function = getattr(importlib.import_module(module), name)
        gc.freeze()  # what was imported stays
        function(call)

    given = SimpleNamespace(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})
    return outermost(obey, Call(given))


def refuse(error: UsageError, json: bool) -> int:
    """Report an error of a command line that names no verb and options to carry out. Returns the exit code."""
    return _fail(Call(SimpleNamespace(json=json)), error)


def outermost(body: Callable[[Call], None], call: Call) -> int:
    """Run a verb, and turn every error into a message on stderr and an exit code: the outermost boundary."""
    # Most objects of a command live until its end, so frequent collections find nothing.
    gc.set_threshold(100_000, 50, 50)
    try:
        signals.count.working = True
        signals.count.note = lambda text: call.terminal.note(text)
        body(call)
        call.show_remarks()
        call.finish(None)
    except ClustertoolError as error:
        return _fail(call, error)
    except Exception as error:  # noqa: BLE001 - the one place where everything ends
        return _fail(call, _bug(error))
    finally:
        signals.count.working = False
    return 0


def _fail(call: Call, error: ClustertoolError) -> int:
    call.show_remarks()
    show_error(error, call.terminal)
    call.finish(error)
    return error.code


def _bug(error: Exception) -> InternalError:
    text = "".join(traceback.format_exception(error))
    about = f"clustertool {__version__}, Python {platform.python_version()}, {platform.system()}"
    return InternalError(f"a bug of clustertool: {error!r}\n{text}", f"report it with the text above and: {about}")
