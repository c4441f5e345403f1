"""The installer writes the node's code to a directory and compiles it there.

The laptop sends the text of this module, and the code, to a node that does not have the code (fleet/node_bundle.py): when it
runs, there is no module of ours to import.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import py_compile
import shutil
import tempfile
import time
from typing import Callable, Dict, List, Tuple

_UNUSED = 30 * 86400.0  # seconds after which a version is removed; a start that uses one sets its time (the loader)
_TEMPORARY = ("/tmp", "/dev/shm")
_PART = "new-"  # begins the name of a directory that is not complete


def install(
    data: bytes, digest: str, place: str, safe: Callable[[str], None], complete: Callable[[str], bool]
) -> Tuple[str, Callable[[], None]]:
    """Write the code to `place`, or else to a temporary directory. Return the directory, and a function to call at the end.

    The function removes a temporary directory. `data`: name and text of each file, with NUL between all of them, named by its
    digest. `place`: the directory of ~/.cache/clustertool where the code belongs. If that cannot be written, or other users can
    write to it, the directory is a temporary one. `safe` raises OSError for a path that other users can change. `complete`
    returns whether a directory has all files. Raises ValueError for damaged data, OSError where no directory can be written.
    """
    if hashlib.sha256(data).hexdigest()[:32] != digest:
        raise ValueError("the archive is damaged")
    parts = data.decode().split("\0")
    files = dict(zip(parts[::2], parts[1::2]))
    mask = os.umask(0o077)
    try:
        try:
            _install(files, place, safe, complete)
            return place, lambda: None
        except OSError:
            temporary = _install_temporary(files)
            return temporary, lambda: shutil.rmtree(temporary, ignore_errors=True)
    finally:
        os.umask(mask)


def _install(files: Dict[str, str], place: str, safe: Callable[[str], None], complete: Callable[[str], bool]) -> None:
    """Write the files to a new directory below the cache, and rename it to `place`; before, remove versions that are not used.

    safe, complete: see install(). Raises OSError, also for a cache that other users can change.
    """
    cache = os.path.dirname(place)
    os.stat(os.path.dirname(os.path.dirname(cache)))  # a home that does not exist is not created
    os.makedirs(cache, exist_ok=True)
    safe(cache)
    _remove_unused(cache)
    part = tempfile.mkdtemp(prefix=_PART, dir=cache)
    try:
        _write(files, part, place)
        _rename(part, place, complete)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _rename(part: str, place: str, complete: Callable[[str], bool]) -> None:
    """Rename the new directory to its place. A complete one that is there stays; a damaged one is removed."""
    try:
        os.rename(part, place)
    except OSError:
        if complete(place):  # another start was faster
            return
        os.rename(place, part + ".damaged")
        os.rename(part, place)
        _remove(part + ".damaged")


def _install_temporary(files: Dict[str, str]) -> str:
    """Write the files to a new directory in /tmp, else /dev/shm, and return its path.

    Raises OSError if neither can be written.
    """
    for folder in _TEMPORARY:
        with contextlib.suppress(OSError):
            part = tempfile.mkdtemp(prefix="clustertool-code-", dir=folder)
            try:
                _write(files, part, part)
                return part
            except OSError:
                shutil.rmtree(part, ignore_errors=True)
    raise OSError(f"neither ~/.cache nor {' nor '.join(_TEMPORARY)} can be written")


def _write(files: Dict[str, str], part: str, place: str) -> None:
    """Write the files, each compiled, and the list by which a start finds out whether the directory is complete.

    part: the directory. place: its later path, for tracebacks. A compiled file is used without a comparison with its source,
    whose times a backup or a file server may change.
    """
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    for name, text in files.items():
        path = os.path.join(part, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(text.encode())
        py_compile.compile(path, dfile=os.path.join(place, name), doraise=True, invalidation_mode=mode)
    lines: List[str] = []
    for folder, _, names in os.walk(part):
        at = os.path.relpath(folder, part)
        lines.append(f"- {at}\n")
        lines += [f"{os.path.getsize(os.path.join(folder, name))} {os.path.join(at, name)}\n" for name in names]
    with open(os.path.join(part, "FILES"), "w", encoding="utf-8") as file:
        file.write("".join(lines) + "end")


def _remove_unused(cache: str) -> None:
    """Remove versions, and directories that are not complete, whose time is older than 30 days."""
    for name in os.listdir(cache):
        path = os.path.join(cache, name)
        if len(name.partition(".")[0]) == 32 or name.startswith(_PART):
            with contextlib.suppress(OSError):
                if time.time() - os.lstat(path).st_mtime > _UNUSED:
                    _remove(path)


def _remove(path: str) -> None:
    """Remove a folder, as far as possible, or a file or link. Raises OSError for the latter."""
    if os.path.isdir(path) and not os.path.islink(path):
        shutil.rmtree(path, ignore_errors=True)
    else:
        os.unlink(path)
