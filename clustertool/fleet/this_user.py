"""This user of this machine: the name, and the folders for configuration, state and cache. Without a home folder: 78.

Files of stored jobs are found by their names. The import of this module is fast: completion needs no more than these.

A container or an outage of a directory service leaves a user without an entry in the password file, and often without HOME.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from platformdirs import user_cache_path, user_config_path, user_state_path

from clustertool.errors import ConfigError
from clustertool.model.paths import is_job_id
from clustertool.node.system import users

JOB_FILE_END = ".json"


class NoHome(ConfigError):
    """The user has no home folder. A command that only reads finds nothing there."""


def name() -> str:
    """Return this user's name: of the password file, else of USER, else the number as text."""
    return users.own_name()


def config() -> Path:
    """Return the folder of this user's configuration. Raises NoHome."""
    return _system_folder(user_config_path, "XDG_CONFIG_HOME")


def state() -> Path:
    """Return the folder of this user's state. Raises NoHome."""
    return _system_folder(user_state_path, "XDG_STATE_HOME")


def cache() -> Path:
    """Return the folder of this user's cache. Raises NoHome."""
    return _system_folder(user_cache_path, "XDG_CACHE_HOME")


def expand_home(path: str) -> Path:
    """Expand a path whose first part may be ~ or ~USER, as in --to=~/results. Raises NoHome for ~ without a home folder."""
    if path.partition("/")[0] != "~":
        return Path(os.path.expanduser(path))
    return Path((users.home() or _no_home("HOME")) + path[1:])


def shorten_home(path: Path) -> str:
    """Shorten a path for messages: the home folder becomes ~, other paths stay."""
    home = users.home()
    return f"~/{path.relative_to(home)}" if home and path.is_relative_to(home) else str(path)


def is_home(folder: Path) -> bool:
    """Check whether a folder is the home folder; False as well where there is none, or one that cannot be read."""
    try:
        return bool(users.home()) and folder.samefile(users.home())
    except OSError:
        return False


def make_folder(folder: Path, variable: str) -> None:
    """Make a folder with mode 0700, and missing ones above it with the default mode; leave one that exists as it is.

    Raises ConfigError if this fails, or the folder cannot be written. variable: of the environment; the fix in the error names
    it, and HOME.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(0, "it cannot be written", str(folder))
    except OSError as error:
        what = f"nothing can be kept in {folder}: {error.filename}: {error.strerror}"
        raise ConfigError(what, f"export HOME=DIR, a folder that you can write, or {variable}=DIR") from None


def _system_folder(find: Callable[[str], Path], variable: str) -> Path:
    """Return this tool's folder by a function of platformdirs. Raises NoHome where the path is not absolute.

    find: the function, which gets the name of the tool. variable: of the environment, which sets the folder, for the error.
    """
    try:
        path = find("clustertool")
    except RuntimeError:  # of platformdirs since 4.10; earlier ones return ~ as it is
        path = Path()
    return path if path.is_absolute() else _no_home(variable)


def _no_home(variable: str) -> NoReturn:
    """Raise NoHome, with a fix that names HOME and this variable of the environment."""
    other = f", or {variable}=DIR" if variable != "HOME" else ""
    fix = f"export HOME=DIR, a folder that you can write{other} (in a container: --env HOME=DIR)"
    raise NoHome(f"this user (uid {os.getuid()}) has no home folder: HOME is not set to one", fix)


# -- files of stored jobs ----------------------------------------------------------------------------------------------


def jobs_folder() -> Path:
    """Return the folder of this user's stored jobs. Raises NoHome."""
    return state() / "jobs"


def job_of_file(path: Path) -> str:
    """Return the id of the job whose file this is, from the file's name."""
    return path.name[: -len(JOB_FILE_END)]


def job_files(directory: Path) -> list[Path]:
    """List the files of stored jobs in a folder, in any order; none if the folder cannot be read."""
    try:
        names = [name for name in os.listdir(directory) if name.endswith(JOB_FILE_END)]
    except OSError:
        return []
    return [directory / name for name in names if is_job_id(name[: -len(JOB_FILE_END)])]


def job_files_by_age(directory: Path) -> list[Path]:
    """List the files of stored jobs by the time of their last change, the oldest first."""
    found: list[tuple[int, Path]] = []
    for path in job_files(directory):
        with contextlib.suppress(OSError):  # another command has removed it
            found.append((path.lstat().st_mtime_ns, path))
    return [path for _, path in sorted(found)]
