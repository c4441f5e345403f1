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
from clustertool.model.roles import ROLES, find_role
from clustertool.show.error_text import exit_json, show_error
from clustertool.show.program_name import typed
from clustertool.show.terminal import Terminal
from clustertool.ssh.prompter import Person
from clustertool.verbs import signals
from clustertool.watch.sanitize import harmless

_BARS = "clustertool.show.progress_bars"  # imported only by a verb that sends something


class Call:
    """One call of a verb: its options as attributes of `given`, its terminal and its JSON answer. It is a Caller of actions."""

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
        """The arguments of this program, as a tuple, the name by which it was called first."""
        return (typed(), *sys.argv[1:])

    @functools.cached_property
    def terminal(self) -> Terminal:
        """The terminal on stdout, or on stderr if stdout belongs to a JSON answer."""
        return Terminal(out=sys.stderr) if self.json else Terminal()

    def answer(self, value: Mapping[str, object]) -> None:
        """Store the JSON answer, which finish() prints if the command has --json."""
        self._answer = value

    def finish(self, error: ClustertoolError | None) -> None:
        """Print the stored JSON answer on stdout, once and only with --json.

        If the verb has not added the exit code, that of `error` is added.
        """
        if self.json and not self._finished:
            self._finished = True  # an error of the output is none of the answer
            answer = {**self._answer, "exit": self._answer.get("exit", exit_json(error, "tool"))}
            Terminal().json(answer, lines=self.lines)

    @property
    def selection(self) -> Selection:
        """The options about hosts that this call has, with the defaults of Selection for others."""
        names = [field.name for field in fields(Selection)]
        return Selection(**{name: value for name, value in vars(self.given).items() if name in names and value})

    # -- as the caller of actions

    def note(self, text: str) -> None:
        self.terminal.note(text)

    def gather_remarks(self) -> None:
        """Collect remarks from now on, which show_remarks() prints in one line. With -v they are still printed at once."""
        self._remarks = None if self.given.verbose else []

    def remark(self, text: str) -> None:
        """Print a remark as a note, or collect it: see gather_remarks()."""
        if self._remarks is None:
            self.terminal.note(f"note: {text}")
        else:
            self._remarks.append(text)

    def show_remarks(self) -> None:
        """Print the collected remarks in one line, each once, and remove them."""
        if self._remarks:
            self.terminal.note(f"note: {'; '.join(dict.fromkeys(self._remarks))}")
            self._remarks.clear()

    def warn(self, text: str) -> None:
        self.terminal.warn(text)

    def check(self) -> None:
        """Raise Interrupted or Terminated if a signal has come: see signals.check()."""
        signals.check()

    def person(self) -> Person:
        """Return the user at the terminal, for questions."""
        return User()

    def dispatching(self, names: Sequence[str], since: float | None) -> DispatchView:
        """Show the collected remarks, and create the progress bars of a dispatch to the nodes. since: when it began."""
        self.show_remarks()
        bars = importlib.import_module(_BARS)
        return bars.DispatchProgress(self.terminal, names, since=since, answers=self.dispatches)  # type: ignore[no-any-return]

    def working(self, phase: str, names: Sequence[str]) -> WorkView:
        """Show the collected remarks, and create the progress of a phase on the nodes."""
        self.show_remarks()
        return importlib.import_module(_BARS).NodeProgress(self.terminal, phase, names, answers=self.dispatches)  # type: ignore[no-any-return]

    def starting(self, job: str) -> None:
        """Show the collected remarks, and store the job's id for messages about signals."""
        self.show_remarks()
        signals.count.job = job


class User:
    """The user at the terminal, for questions and notes of ssh/prompter.py; the texts may come from servers."""

    @property
    def present(self) -> bool:
        """Whether stdin is a terminal."""
        return sys.stdin is not None and sys.stdin.isatty()

    def ask(self, question: str, hidden: bool) -> str:
        """Print a question and read the answer from the terminal, without echo if `hidden`; "" for Ctrl+D.

        A Ctrl+C is raised at once.
        """
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
        """Print a line, as a note while a verb runs."""
        signals.count.note(text)

    def fold(self, names: Iterable[str]) -> str:
        """Join names in short, as node[0-3]."""
        return fold(names)


def choose_alias(call: Call, *names: str) -> str:
    """Return the value of the first option that is given of several with one meaning, "" if none is.

    Raises UsageError if two have different values.
    """
    values = {name: getattr(call.given, name.replace("-", "_")) for name in names}
    given = {name: value for name, value in values.items() if value}
    if len(set(given.values())) > 1:
        both = " and ".join(f"--{name} {value}" for name, value in given.items())
        raise UsageError(f"{both} have different values", "they are two names of one option: give one")
    return str(next(iter(given.values()), ""))


def read_whole_number(text: str, option: str) -> int | None:
    """Convert the text of an option to a whole number from 0 on, None if it is empty. Raises UsageError for another text."""
    if text == "":
        return None
    if not text.isdecimal():
        raise UsageError(f"{option} {text!r} is not a whole number", f"write {option} 3")
    return int(text)


def read_seconds(text: str, option: str, default: float, least: float = 0.0, most: float = math.inf) -> float:
    """Convert the text of an option to seconds, `default` if it is empty.

    Raises UsageError if it is no duration, or not from `least` to `most`.
    """
    found = seconds_of(text) if text else default
    if found is None:
        raise UsageError(f"{option} {text!r} is not a duration", DURATIONS)
    if not least <= found <= most:
        raise UsageError(f"{option} {text} is out of range", f"from {human_seconds(least)} to {human_seconds(most)}")
    return found


def seconds_with_unit(text: str, option: str) -> float:
    """Convert the text of an option such as 7d or 10m to seconds.

    Raises UsageError if it is no duration, or has no unit: 7 may mean days.
    """
    found = seconds_of(text) if text[-1:].isalpha() else None
    if found is None:
        raise UsageError(f"{option} {text!r} is not a duration with a unit", "10m, 12h or 7d")
    return found


def role_of(text: str) -> str:
    """Convert the value of --role to the name of a role. Raises UsageError if it is not known."""
    role = find_role(text)
    if not role:
        raise UsageError(f"--role {text!r} is not known", f"one of {', '.join(ROLES)}")
    return role


def run(verb: Verb, values: Mapping[str, object], dry: bool) -> int:
    """Import and call the function of a verb, report its errors on stderr, and return the exit code, 0 without one.

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
    return run_and_report(obey, Call(given))


def report_usage_error(error: UsageError, json: bool) -> int:
    """Report a UsageError of a command line that could not be parsed, as a verb does, and return the exit code.

    json: --json is given.
    """
    return _fail(Call(SimpleNamespace(json=json)), error)


def run_and_report(body: Callable[[Call], None], call: Call) -> int:
    """Call a verb's function, report every error on stderr and in the JSON answer, and return its exit code, 0 without one.

    body: the verb's function.
    """
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
        return _fail(call, _internal_error(error))
    finally:
        signals.count.working = False
    return 0


def _fail(call: Call, error: ClustertoolError) -> int:
    """Print the collected remarks and an error, finish the JSON answer with it, and return its exit code."""
    call.show_remarks()
    show_error(error, call.terminal)
    call.finish(error)
    return error.code


def _internal_error(error: Exception) -> InternalError:
    """Convert an unexpected exception to an InternalError with its traceback, the versions, and how to report it."""
    text = "".join(traceback.format_exception(error))
    about = f"clustertool {__version__}, Python {platform.python_version()}, {platform.system()}"
    return InternalError(f"a bug of clustertool: {error!r}\n{text}", f"report it with the text above and: {about}")
