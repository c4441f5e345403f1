"""conf.py is a program: it is run only if the user named it, or if it was found where only root and the user can write.

It is searched in the current folder, then upwards, as far as the home folder or the top of a mounted file system. Other
programs have files of this name, too. A command that needs none leaves theirs out, and does not run it.
"""

from __future__ import annotations

import ast
import os
import re
import sys
import threading
import traceback
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from clustertool.errors import ConfigError
from clustertool.fleet import this_user
from clustertool.ssh import ownership

_NAME = "conf.py"
NO_CONF = "--no-conf"
_COMMON = ("USER", "PORT", "ENV", "PYTHON", "ENGINE", "GRACE", "SECRETS")  # other programs have these names, too
_DYNAMIC = ("exec", "globals", "locals", "vars")  # set names that the text does not show
_OURS, _OTHERS, _UNCLEAR = "ours", "others", "unclear"
_EXECUTING = threading.RLock()  # one at a time in a program with threads: it is the module `conf` while it runs


@dataclass(frozen=True)
class Selection:
    """How a cluster is selected: the options of verbs that concern hosts, "" and () where they are not given.

    engine: in place of ENGINE of conf.py. no_conf: no conf.py is searched. here: only jobs that clusterrun has started on this
    machine. job: the job that the command is about, "" for the newest one; None: it is about no single job. Without a conf.py
    its hosts are those that are stored (fleet/job_places.py).
    """

    conf: str = ""
    hostfile: str = ""
    only: Sequence[str] = ()
    skip: Sequence[str] = ()
    dispatch: str = ""
    engine: str = ""
    here: bool = False
    job: str | None = None
    no_conf: bool = False


class NotNeeded(ConfigError):
    """The conf.py that was found is of another program or user, and the command does not need one."""


def find_conf(given: str) -> Path | None:
    """Find the conf.py: `given` (--conf), else the nearest one in the current folder or above, else None.

    Raises ConfigError if `given` is no file.
    """
    if given:
        if not os.path.isfile(given):
            raise ConfigError(f"there is no {given}", "give the path of your conf.py")
        return Path(given).resolve()
    return next((folder / _NAME for folder in _folders() if os.path.isfile(folder / _NAME)), None)


def find_and_run(
    given: str, keys: Collection[str], nodes_known: bool, optional: bool
) -> tuple[Path | None, dict[str, object]]:
    """Find and run conf.py, and return (its path, {key: value}), or (None, {}) if there is none.

    A file that `given` names is run unchecked. One that the search found is run only if no other user can have written it (else
    ConfigError, or NotNeeded with nodes_known). With `optional`, one that looks like another program's is not run, and one that
    may be either counts only if it sets a key without an error: else NotNeeded. keys: the names of all keys. nodes_known: the
    nodes are named without it. Raises ConfigError also for an error in the file.
    """
    path = find_conf(given)
    if path is None:
        return None, {}
    if given:
        return path, _execute(path, _read_named(path))
    try:
        text = _read_found(path)
    except ConfigError as error:
        raise NotNeeded(error.what, error.fix) if nodes_known else error from None
    kind = _guess_owner(text, keys) if optional else _OURS
    if kind != _OTHERS:
        try:
            values = _execute(path, text)
            if kind == _OURS or not values.keys().isdisjoint(keys):
                return path, values
        except ConfigError as error:
            if kind == _OURS:
                error.fix += f"; if it is another program's: {NO_CONF}"
                raise
    raise NotNeeded(f"{path} is that of another program")


def _guess_owner(text: bytes, keys: Collection[str]) -> str:
    """Guess from its text, without running it, whose a conf.py is: "ours" (clustertool's), "others" or "unclear".

    It is "ours" if it sets more of `keys`, the names of all keys, than other names in capitals, or a key that other programs do
    not have. A text that Python cannot parse is "ours" if a line begins with a key. "unclear": the text does not show which
    names it sets (import *; exec or the like, without a name in capitals that is no key).
    """
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return _OURS if any(re.search(rb"(?m)^[ \t]*%b\b" % key.encode(), text) for key in keys) else _OTHERS
    names = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    names.update(node.asname or node.name for node in nodes if isinstance(node, ast.alias))
    known = names.intersection(keys)
    unknown = {name for name in names - known if name.isupper() and not name.startswith("_")}
    if len(known) > len(unknown) or known.difference(_COMMON):
        return _OURS
    dynamic = any(isinstance(node, ast.Name) and node.id in _DYNAMIC for node in nodes)
    return _UNCLEAR if "*" in names or (dynamic and not unknown) else _OTHERS


def _folders() -> Iterator[Path]:
    """Yield the current folder and those above it, by their physical paths, up to the home folder or a mount point.

    Raises ConfigError if the current folder was removed.
    """
    try:
        here = Path.cwd()
    except OSError as error:
        raise ConfigError(f"the current folder cannot be used: {error.strerror}", "cd to another folder") from None
    for folder in (here, *here.parents):
        yield folder
        if os.path.ismount(folder) or this_user.is_home(folder):
            return


def _read_named(path: Path) -> bytes:
    """Read the file that --conf names. Raises ConfigError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "correct its permissions") from None


def _read_found(path: Path) -> bytes:
    """Check that only root and the user can have written the conf.py of the search, or changed its folders, and read it.

    The open file is checked again. A link is followed if root or the user made it. Raises ConfigError if another user can have
    done so, or if it cannot be read.
    """
    folders = [folder for folder in _folders() if folder.is_relative_to(path.parent)]
    target = path
    try:
        if path.is_symlink():
            _require_safe(path, os.lstat(path), path)
            target = path.resolve(strict=True)
            folders.append(target.parent)
        for folder in folders:
            _require_safe(folder, os.stat(folder), path)
        # Not through a link: another user could make one after the check.
        handle = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            _require_safe(target, os.fstat(handle), path, handle)
            return file.read()
    except OSError as error:
        fix = f"correct its permissions, or give --conf FILE, or {NO_CONF}"
        raise ConfigError(f"{path} cannot be read: {error.strerror}", fix) from None


def _require_safe(what: Path, info: os.stat_result, conf: Path, handle: int = -1) -> None:
    """Raise ConfigError, which says that `conf` is not run, if another user can have written the file or folder `what`.

    info: its stat. handle: its descriptor if it is open, else -1.
    """
    problem = ownership.problem(handle if handle >= 0 else str(what), info, sticky=True)
    if problem:
        fix = f"remove what is not yours, or correct it (chown, chmod go-w); if you trust it: --conf {conf}; else {NO_CONF}"
        raise ConfigError(f"{conf} is not run: {'it' if what == conf else what} {problem}", fix)


def _execute(path: Path, text: bytes) -> dict[str, object]:
    """Run conf.py, one at a time, and return {name: value} of its names in capitals without a leading underscore.

    Raises ConfigError for an exception of it, with the line, and if it sets no such name.
    """
    with _EXECUTING:
        return _run_as_module(path, text)


def _run_as_module(path: Path, text: bytes) -> dict[str, object]:
    """Run conf.py as the module `conf` without writing bytecode, and return its keys: see _execute()."""
    module = ModuleType("conf")
    module.__file__ = str(path)
    before, sys.modules["conf"] = sys.modules.get("conf"), module  # as an import does: dataclasses read it
    writes, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    try:
        exec(compile(text, str(path), "exec", dont_inherit=True), module.__dict__)
    except SyntaxError as error:
        raise ConfigError(f"{path}, line {error.lineno}: {error.msg}", "correct that line") from None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - it is the user's program, anything may come out of it
        line = _line_of(error, path)
        raise ConfigError(f"{path}{line}: {type(error).__name__}: {error}", "correct that line") from None
    finally:
        sys.dont_write_bytecode = writes
        if before is None:
            sys.modules.pop("conf", None)
        else:
            sys.modules["conf"] = before
    keys = {name: value for name, value in vars(module).items() if name.isupper() and not name.startswith("_")}
    if not keys:
        raise ConfigError(f"{path} sets no key", 'name your machines: HOSTS = ["user@10.0.0.1"]')
    return keys


def _line_of(error: BaseException, path: Path) -> str:
    """Return ", line N" for the innermost line of the file `path` in the traceback of an error, "" if it has none."""
    lines = [line for frame, line in traceback.walk_tb(error.__traceback__) if frame.f_code.co_filename == str(path)]
    return f", line {lines[-1]}" if lines else ""
