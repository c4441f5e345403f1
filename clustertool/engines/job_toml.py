"""This module parses job.toml, which is in the workspace of this machine or on the nodes."""

from __future__ import annotations

import sys

from clustertool.engines import known_engines
from clustertool.errors import DataError
from clustertool.model.config.job_tables import Toml

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def job_toml(text: str) -> Toml:
    """job.toml's text -> its tables, without those of engines. Raises DataError with the line."""
    engines = known_engines.names()
    return {name: table for name, table in _loads(text).items() if name not in engines}


def engine_table(text: str, engine: str) -> Toml:
    """The settings of an engine ("" for the default) in job.toml's text; the tables of other engines have no effect. Raises
    DataError."""
    name = engine or known_engines.DEFAULT
    table = _loads(text).get(name, {})
    if not isinstance(table, dict):
        raise DataError(f"job.toml: {name} = {table!r} is no table", f"write [{name}] and its keys below it")
    return table


def _loads(text: str) -> Toml:
    try:
        return dict(tomllib.loads(text))
    except tomllib.TOMLDecodeError as error:
        raise DataError(f"job.toml: {error}", "correct it; docs/reference.md has an example") from None
