"""A launcher in the command of a job, such as torchrun, is an error of Cluster.run(): each trainer would train by itself.

The command line warns of it. A program does not see warnings, and such a job succeeds.
"""

from __future__ import annotations

import shlex

from clustertool.cli.launchers.nested_launcher import Inner, effect, separating
from clustertool.errors import UsageError
from clustertool.model.planning.plan import Plan

# Options of the command line: keywords with other names, with lists as values, and those that are no keywords.
_NAMES = {**dict.fromkeys(("gpus", "xpus", "npus"), "devices"), "trainers": "workers", "trainer_num": "worker_num"}
_LISTS = ("servers", "workers", "heter_workers")
_SHOWN = ("rank", "all_ranks")


def refuse_nested(made: Plan, folder: str = "") -> str:
    """Raise UsageError for a plan whose trainers would start a launcher each. Else there is nothing to warn of: "".

    folder: the workspace.
    """
    inner = separating(made, folder)
    if inner is None:
        return ""
    fix = f"start the program itself: {_keywords(inner)}; or give nested=True if they are intended"
    raise UsageError(effect(inner, made), fix)


def _keywords(inner: Inner) -> str:
    """Format the keywords of Cluster.run() that start the launcher's program in one training."""
    if not inner.program:
        return f"script without {inner.shown}, and nproc_per_node"
    found: dict[str, object] = {"script": shlex.join(inner.program)}
    env: dict[str, str] = {}
    for option, value in inner.options:
        key = option[2:].replace("-", "_")
        key = _NAMES.get(key, key)
        if key == "env":
            name, _, text = value.partition("=")
            env[name] = text
        elif key not in _SHOWN:
            found[key] = [value] if key in _LISTS else int(value) if value.isdecimal() else value or True
    if env:
        found["env"] = env
    return ", ".join(f"{key}={value!r}" for key, value in found.items())
