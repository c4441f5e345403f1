"""This module checks what a job.toml sets of [container] and of an engine's table (decision 71).

A workspace may come from somebody else. It states what its job needs. Which rights the job gets, conf.py and the command line
state. A name is KEY or KEY.PART: an option, the source of a volume, a key of a dict. WORKSPACE_MAY_SET of conf.py has names
with the table before them: "container.volumes", "container.volumes./data", "kubernetes.volumes.hostpath".
"""

from __future__ import annotations

import difflib
from typing import Collection, Dict, Iterator, Mapping, Tuple

from clustertool.errors import DataError
from clustertool.model.config.job_tables import Toml


def check(table: str, values: Toml, usual: Collection[str], more: Collection[str]) -> None:
    """Raise DataError for the first name of a table that neither `usual` nor `more` has. A KEY there allows all its parts.

    usual: names without the table. more: WORKSPACE_MAY_SET.
    """
    allowed = {*(f"{table}.{name}" for name in usual), *more}
    for key, value in values.items():
        if f"{table}.{key}" in allowed:
            continue
        for part in _parts(value):
            name = f"{table}.{key}.{part}" if part else f"{table}.{key}"
            if name not in allowed:
                near = difflib.get_close_matches(key, usual, 1, 0.8)
                fix = f"did you mean {near[0]}? Else " if near else ""
                fix += "take it out, or set it in conf.py; conf.py can allow it to workspaces: "
                what = f"job.toml: [{table}] {key} = {repr(value)[:200]}: a workspace may not set {name}"
                raise DataError(what, f"{fix}WORKSPACE_MAY_SET = [{name!r}]")


def describe_tables(tables: Mapping[str, Toml]) -> str:
    """Format what the tables set, in one line; "" for nothing. Values are cut at 200 characters."""
    texts: Dict[str, str] = {
        table: ", ".join(f"{key} = {repr(value)[:200]}" for key, value in values.items())
        for table, values in tables.items()
    }
    return "; ".join(f"[{table}] {text}" for table, text in texts.items() if text)


def _parts(value: object) -> Iterator[str]:
    """Yield the names of the parts of a value that need a right each; "" for a value that is no dict or list.

    Of a dict its keys, but instead of a key that is a path, the source of this volume. Of a list its options, without their
    values, and the sources of volumes.
    """
    if isinstance(value, Mapping):
        for name, one in value.items():
            if not name.startswith("/"):
                yield name
            elif isinstance(one, Mapping):  # the source of a volume as in a manifest
                yield from map(str, one)
            else:
                yield str(one).partition(":")[0]
    elif isinstance(value, list):
        yield from _parts_of_list(tuple(map(str, value)))
    else:
        yield ""


def _parts_of_list(items: Tuple[str, ...]) -> Iterator[str]:
    """Yield the names of options, without the values that may follow them, and the sources of volumes."""
    value_may_follow = False
    for item in items:
        name, equals, _ = item.partition("=")
        if item.startswith("-"):
            yield name
        elif not value_may_follow:
            yield item.partition(":")[0]
        value_may_follow = item.startswith("-") and not equals
