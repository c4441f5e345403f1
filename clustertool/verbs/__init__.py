"""This package has the verbs as one Invoke collection. A tasks.py needs only `from clustertool.verbs import ns`."""

from __future__ import annotations

from clustertool.verbs import signals

signals.install()

import importlib  # noqa: E402 - the SIGINT handler is installed before slow imports
import inspect  # noqa: E402
from typing import Any  # noqa: E402

from invoke import Collection, Context, Exit, Task  # noqa: E402

from clustertool.verbs.table import CLUSTER_VERBS, VERBS, Opt, Verb  # noqa: E402


class VerbTask(Task):  # type: ignore[type-arg]
    """An Invoke task with fixed short flags."""

    shorts: dict[str, str]

    def arg_opts(self, name: str, default: Any, taken_names: set[str]) -> dict[str, Any]:
        opts = super().arg_opts(name, default, taken_names)
        short = self.shorts.get(name)
        if short:
            opts["names"] = [*opts["names"], short]
        return opts


def make_task(verb: Verb) -> VerbTask:
    """The Invoke task of a verb. The verb's module, and what runs a verb, are imported when the task runs."""

    def run(context: Context, **values: Any) -> None:
        code = importlib.import_module("clustertool.verbs.verb").run(verb, context, values)
        if code:
            raise Exit(code=code)

    run.__doc__, run.__name__ = verb.help, verb.name
    first = inspect.Parameter("context", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    rest = [_parameter(option) for option in verb.options]
    run.__signature__ = inspect.Signature([first, *rest])  # type: ignore[attr-defined]
    task = VerbTask(
        run,
        auto_shortflags=False,
        positional=[],
        help={option.name: option.help for option in verb.options},
        iterable=[option.name.replace("-", "_") for option in verb.options if option.default == ()],
    )
    task.shorts = {option.name.replace("-", "_"): option.short for option in verb.options if option.short}
    return task


def _parameter(option: Opt) -> inspect.Parameter:
    default = None if option.default == () else option.default
    return inspect.Parameter(option.name.replace("-", "_"), inspect.Parameter.KEYWORD_ONLY, default=default)


ns = Collection()
for _verb in VERBS:
    ns.add_task(make_task(_verb))
ns.add_collection(Collection("cluster", **{_verb.name: make_task(_verb) for _verb in CLUSTER_VERBS}))
