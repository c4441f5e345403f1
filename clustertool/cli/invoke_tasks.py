"""Verbs become tasks of Invoke, for `inv VERB`. Help and parser are Invoke's own."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from typing import Any

from invoke import Collection, Context, Exit, Task

from clustertool.cli.options import MANY, Verb


class VerbTask(Task):  # type: ignore[type-arg]
    """An Invoke task with fixed short flags."""

    shorts: dict[str, str]

    def arg_opts(self, name: str, default: Any, taken_names: set[str]) -> dict[str, Any]:
        """Return Invoke's options of an argument, with the short flag of the table added."""
        opts = super().arg_opts(name, default, taken_names)
        if name in self.shorts:
            opts["names"] = [*opts["names"], self.shorts[name]]
        return opts


def make_task(verb: Verb) -> VerbTask:
    """Create the Invoke task that runs a verb, and exits with its code if that is not 0.

    The module of the verb is imported when the task runs.
    """

    bare = [option for option in verb.options if option.bare]

    def run(task_context: Context, /, **values: object) -> None:
        empty = {verb.positional.name: ()} if verb.positional else {}  # Invoke has none that may be left out
        values.update((option.attribute, option.bare) for option in bare if values[option.attribute] is True)
        dry = bool(task_context.config.run.dry)
        code = importlib.import_module("clustertool.verbs.verb").run(verb, {**values, **empty}, dry)
        if code:
            raise Exit(code=code)

    run.__doc__, run.__name__ = verb.help, verb.name
    # Invoke calls it by position; an option of `run` has the usual name of it.
    first = inspect.Parameter("task_context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    defaults = {option.attribute: None if option.default == MANY else option.default for option in verb.options}
    rest = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=d) for name, d in defaults.items()]
    run.__signature__ = inspect.Signature([first, *rest])  # type: ignore[attr-defined]
    task = VerbTask(
        run,
        auto_shortflags=False,
        positional=[],
        help={option.name: option.text for option in verb.options},
        optional=[option.attribute for option in bare],
        iterable=[option.attribute for option in verb.options if option.default == MANY],
    )
    task.shorts = {option.attribute: option.short for option in verb.options if option.short}
    return task


def collection(verbs: Iterable[Verb]) -> Collection:
    """Create the Invoke collection of all verbs; `cluster.up` is the task `up` of the collection `cluster`."""
    top = Collection()
    for verb in verbs:
        group, _, name = verb.name.rpartition(".")
        if group and group not in top.collections:
            top.add_collection(Collection(group))
        (top.collections[group] if group else top).add_task(make_task(verb), name)
    return top
