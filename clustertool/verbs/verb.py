"""A verb is a function of a Call and a table of options; this file makes it an Invoke task and turns errors into exits.

Options reach a verb as text, flags or lists, exactly as typed; checking them is the verb's (and the plan's) work.
"""

from __future__ import annotations

import gc
import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

from invoke import Context, Exit, Task

from clustertool.errors import ClustertoolError, InternalError, UsageError
from clustertool.verbs import signals

_GARBAGE = 100_000  # objects


@dataclass(frozen=True)
class Opt:
    """`default` decides the kind: "" takes text, False is a flag, () may be given several times."""

    name: str
    help: str
    default: Any = ""
    short: str = ""


JSON = Opt("json", "answer as JSON on stdout", False)
NODES = (
    Opt("conf", "the conf.py to use (default: here, then upwards)"),
    Opt("hostfile", "hosts from an Open MPI, DeepSpeed or Horovod hostfile instead of HOSTS"),
    Opt("only", "only these hosts: names, ranges node[1-4], host:slot", ()),
    Opt("skip", "all but these hosts", ()),
)
PLACES = (
    *NODES,
    Opt("here", "only jobs that clusterrun has started on this machine alone, here or in a folder above", False),
)
JOB = Opt("job", "the job: its id or a unique prefix (default: your newest)", short="j")
ROLE = Opt("role", "pserver, trainer or heter", "trainer")
WORKSPACE = Opt("workspace", "the folder to send to every node", short="w")


class Call:
    """One call of a verb: its options as attributes of `given`, and the terminal (lazily: most of rich is not needed)."""

    def __init__(self, given: SimpleNamespace) -> None:
        self.given = given
        self._terminal: Any = None
        self._answered = False

    @property
    def json(self) -> bool:
        return bool(getattr(self.given, "json", False))

    @property
    def terminal(self) -> Any:
        """stdout for people; stderr when stdout belongs to a JSON answer."""
        if self._terminal is None:
            from clustertool.show.terminal import Terminal

            self._terminal = Terminal(out=sys.stderr) if self.json else Terminal()
        return self._terminal

    @property
    def answered(self) -> bool:
        """One call has one JSON answer: an error that follows it says no more on stdout."""
        return self._answered

    def answer(self, value: object) -> None:
        """The JSON answer, on stdout."""
        from clustertool.show.terminal import Terminal

        self._answered = True
        Terminal().json(value)


class VerbTask(Task):  # type: ignore[type-arg]
    """An Invoke task whose short flags are fixed by hand."""

    shorts: dict[str, str]

    def arg_opts(self, name: str, default: Any, taken_names: set[str]) -> dict[str, Any]:
        opts = super().arg_opts(name, default, taken_names)
        short = self.shorts.get(name)
        if short:
            opts["names"] = [*opts["names"], short]
        return opts


Body = Callable[[Call], None]


def verb(*options: Opt | Sequence[Opt]) -> Callable[[Body], VerbTask]:
    """Make a task of a function that takes a Call. The function's docstring is the verb's help."""
    table: list[Opt] = []
    for option in options:
        table += [option] if isinstance(option, Opt) else list(option)

    def make(body: Body) -> VerbTask:
        def run(context: Context, **values: Any) -> None:
            code = _run(body, context, values)
            if code:
                raise Exit(code=code)

        run.__doc__, run.__name__ = body.__doc__, body.__name__.rstrip("_")
        run.__module__ = body.__module__
        first = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
        rest = [_parameter(option) for option in table]
        run.__signature__ = inspect.Signature([first, *rest])  # type: ignore[attr-defined]
        task = VerbTask(
            run,
            auto_shortflags=False,
            positional=[],
            help={option.name: option.help for option in table},
            iterable=[option.name.replace("-", "_") for option in table if option.default == ()],
        )
        task.shorts = {option.name.replace("-", "_"): option.short for option in table if option.short}
        return task

    return make


def whole(text: str, option: str) -> int | None:
    """An option's whole number, None if it was not given. Raises UsageError."""
    if text == "":
        return None
    if not text.isdecimal():
        raise UsageError(f"{option} {text!r}", "a whole number")
    return int(text)


def role_of(text: str) -> str:
    """--role as the job's processes have it. Raises UsageError."""
    from clustertool.model.roles import ROLES, known

    role = known(text)
    if not role:
        raise UsageError(f"--role {text!r}", f"one of {', '.join(ROLES)}")
    return role


def _parameter(option: Opt) -> inspect.Parameter:
    default = None if option.default == () else option.default
    return inspect.Parameter(option.name.replace("-", "_"), inspect.Parameter.KEYWORD_ONLY, default=default)


def _run(body: Body, context: Context, values: dict[str, Any]) -> int:
    def obey(call: Call) -> None:
        if context.config.run.dry:
            if not hasattr(call.given, "dry"):
                raise UsageError(f"{body.__name__.rstrip('_')} has no --dry", "leave --dry out")
            call.given.dry = True
        body(call)

    given = SimpleNamespace(**{name: tuple(v) if isinstance(v, list) else v for name, v in values.items()})
    return outermost(obey, Call(given))


def outermost(body: Body, call: Call) -> int:
    """The outermost boundary: every error becomes words on stderr and an exit code here."""
    gc.set_threshold(_GARBAGE, 50, 50)  # most of what a command makes stays to its end: to look at it often is in vain
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
    from clustertool.show.errors import exit_json, show_error

    show_error(error, call.terminal)
    if call.json and not call.answered:
        call.answer({"exit": exit_json(error)})
    return error.code


def _bug(error: Exception) -> InternalError:
    import platform
    import traceback

    from clustertool import __version__

    text = "".join(traceback.format_exception(error))
    about = f"clustertool {__version__}, Python {platform.python_version()}, {platform.system()}"
    return InternalError(f"a bug of clustertool: {error!r}\n{text}", f"report it with the text above and: {about}")
