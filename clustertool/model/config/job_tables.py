"""This module checks the tables of job.toml: commands, shards, variables, outputs, and the options of mpirun."""

from __future__ import annotations

import posixpath
from dataclasses import dataclass, fields
from typing import Any, Dict, Mapping, Optional, Tuple, Type

from clustertool.errors import ClustertoolError, DataError
from clustertool.model.config.hosts import VARIABLE
from clustertool.model.config.value_readers import nearest
from clustertool.model.container.container_settings import ContainerSettings
from clustertool.model.mpi.launch_command import refused_option
from clustertool.model.paths import OURS
from clustertool.model.quantities import whole
from clustertool.model.roles import MODES

Command = Optional[Tuple[str, ...]]
Pairs = Tuple[Tuple[str, str], ...]
Toml = Mapping[str, Any]  # the values of a file that the user wrote
MOST = 10000  # processes of one role on one node, and nodes
NUMBER = f"a whole number from 1 to {MOST}"
READY = ("listen", "started")  # [pserver] ready


@dataclass(frozen=True)
class Role:
    """Processes of a role and their command. None and "": not given, so the plan's default."""

    command: Command = None
    per_node: Optional[int] = None
    endpoints: Tuple[str, ...] = ()
    device: str = ""  # of a stage of heter trainers: cpu, gpu or xpu
    ready: str = "listen"  # of pservers, one of READY: what each must do before trainers start


COMMANDS = ("trainer", "pserver", "heter_trainer")
_TABLES: Dict[str, Tuple[str, ...]] = {
    **dict.fromkeys(COMMANDS, ("command", "per_node")),
    "pserver": ("command", "per_node", "ready"),
    "shards": ("files", "only_where_read"),
    "outputs": ("path",),
    "policy": (
        "timeout",
        "grace",
        "on_failure",
        "max_restarts",
        "max_restarts_without_progress",
        "hang_timeout",
        "on_hang",
    ),
    "mpi": ("options",),
    "container": tuple(field.name for field in fields(ContainerSettings)),
}
_READ_LATER = ("elastic",)  # tables whose keys their own reader checks


def read_tables(toml: Toml) -> Dict[str, Any]:
    """Check the keys and values of job.toml, and return {name: value}, with defaults for what is missing.

    The values of [policy], [container] and [elastic] are not checked here, and are returned as they are. Raises DataError for
    an unknown key (but in [elastic]), a wrong value, and an output that is no folder of its own in the job's directory.
    """
    for key, value in toml.items():
        if key not in ("mode", "resume", "env", *_TABLES, *_READ_LATER):
            known = ", ".join(("mode", "resume", "env", *_TABLES, *_READ_LATER))
            raise DataError(f"job.toml: unknown key {key!r}", f"known: {known}")
        if key == "mode":
            if value not in tuple(MODES):
                raise DataError(f"job.toml: mode = {value!r} is not known", f"one of {', '.join(MODES)}")
        elif key == "resume":
            if not isinstance(value, bool):
                raise DataError(f"job.toml: resume = {value!r} is not a bool", "true or false")
        elif not isinstance(value, dict):
            raise DataError(f"job.toml: {key} = {value!r} is no table", f"write [{key}] and its keys below it")
        for name in value if key in _TABLES else ():
            if name not in _TABLES[key]:
                what = f"job.toml: [{key}] has the unknown key {name!r}"
                raise DataError(what, nearest(name, _TABLES[key], "known:"))
    only = toml.get("shards", {}).get("only_where_read", False)
    if not isinstance(only, bool):
        raise DataError(f"job.toml: [shards] only_where_read = {only!r} is not a bool", "true or false")
    output = toml.get("outputs", {}).get("path", "output")
    first = posixpath.normpath(output).split("/")[0] if _is_text(output) else ""
    if first in ("", ".", "..", "log", "nodefile", OURS):
        what = f"job.toml: [outputs] path = {output!r} is not a folder inside the job's directory"
        raise DataError(what, 'path = "output"')
    return {
        "mode": toml.get("mode", ""),
        **{name: _read_role(toml, name) for name in COMMANDS},
        "env": _read_env(toml.get("env", {})),
        "shards": patterns(toml.get("shards", {}).get("files", []), "job.toml: [shards] files =", DataError),
        "only_where_read": only,
        "output": posixpath.normpath(output),
        "policy": toml.get("policy", {}),
        "mpi": _read_mpi_options(toml.get("mpi", {}).get("options", [])),
        "container": toml.get("container", {}),  # container_keys.py reads its values
        "elastic": toml.get("elastic", {}),  # elastic_keys.py reads its values
        "pservers": "pserver" in toml,
    }


def _read_role(toml: Toml, name: str) -> Role:
    """Read the table `name` of a role; without it a Role with its defaults.

    Raises DataError for a command that is not a list of strings, and for a wrong per_node or ready.
    """
    table = toml.get(name, {})
    command, per_node = table.get("command"), table.get("per_node")
    if command is not None and not (isinstance(command, list) and command and all(map(_is_text, command))):
        what = f"job.toml: [{name}] command = {command!r} is not a list of strings"
        raise DataError(what, 'command = ["python3", "-u", "train.py"]')
    if per_node is not None and (isinstance(per_node, str) or not whole(per_node, 1, MOST)):
        raise DataError(f"job.toml: [{name}] per_node = {per_node!r} is not valid", NUMBER)
    ready = table.get("ready", READY[0])  # only pservers have it
    if ready not in READY:
        raise DataError(f"job.toml: [{name}] ready = {ready!r} is not known", '"listen" (the default) or "started"')
    return Role(None if command is None else tuple(command), per_node, ready=ready)


def _read_mpi_options(value: object) -> Tuple[str, ...]:
    """Read the options of mpirun in [mpi]. Raises DataError, also for one that the tool sets itself."""
    if not isinstance(value, list) or not all(map(_is_text, value)):
        what = f"job.toml: [mpi] options = {value!r} is not a list of strings"
        raise DataError(what, 'options = ["--bind-to", "core"]')
    wrong = refused_option(value)
    if wrong:
        raise DataError(f"job.toml: [mpi] options has {wrong}", "leave it out")
    return tuple(value)


def _is_text(value: object) -> bool:
    """Check for a string without NUL."""
    return isinstance(value, str) and "\0" not in value


def _read_env(table: Toml) -> Pairs:
    """Read [env]: names and values as texts. Raises DataError for a wrong name, a list, a table, and a NUL."""
    for name, value in table.items():
        if not VARIABLE.fullmatch(name) or isinstance(value, (dict, list)) or "\0" in str(value):
            raise DataError(f"job.toml: [env] {name} = {value!r} is not a variable", 'NAME = "value"')
    return tuple((name, str(value)) for name, value in table.items())


def patterns(value: object, where: str, error: Type[ClustertoolError]) -> Tuple[str, ...]:
    """Read a pattern of files, or a list of them, normalized, each once.

    where: the option or key that has them, for the error. Raises `error` for another value, and for a pattern that is refused
    by _is_inside().
    """
    found = [value] if isinstance(value, str) else value
    if not isinstance(found, list) or not all(isinstance(pattern, str) and _is_inside(pattern) for pattern in found):
        raise error(f"{where} {value!r}", 'a pattern of files inside the workspace: "data/*-[0-9]*"')
    return tuple(dict.fromkeys(posixpath.normpath(pattern) for pattern in found))


def _is_inside(pattern: str) -> bool:
    """Check that a pattern is for files below the workspace: relative, without `..`, and without a slash at its end.

    `**` is refused: it suggests any depth and would mean one folder.
    """
    return bool(pattern) and pattern[0] != "/" and pattern[-1] != "/" and not {"..", "**"} & set(pattern.split("/"))
