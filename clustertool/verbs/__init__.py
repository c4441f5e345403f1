"""This package has the verbs. A tasks.py needs only `from clustertool.verbs import ns`, their Invoke collection."""

from __future__ import annotations

from clustertool.verbs import signals

signals.install()

import importlib  # noqa: E402 - the SIGINT handler is installed before slow imports
from typing import Any  # noqa: E402

from clustertool.cli.verb_table import VERBS  # noqa: E402

ns: Any  # clustertool.verbs.ns


def __getattr__(name: str) -> Any:
    """Return `ns`, created at its first use; raise AttributeError for other names.

    The `clustertool` command needs no Invoke, whose import takes 0.13 s.
    """
    if name == "ns":
        return globals().setdefault("ns", importlib.import_module("clustertool.cli.invoke_tasks").collection(VERBS))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
