"""This module checks whether other users can replace a path, as sshd does with StrictModes, for each folder up to /.

Symbolic links on the way are followed one at a time: the link and the folders on its path are checked.
"""

from __future__ import annotations

import os
import stat
from typing import NamedTuple, Optional

from clustertool.model.paths import IN_POD
from clustertool.node.system import users

_MOST_LINKS = 40  # as in the kernel
_TRUSTED = "trusted"
_group_trusted = _all_trusted = False


Unsafe = NamedTuple("Unsafe", [("what", str), ("fix", str)])  # what is wrong with one folder of a path, and the fix


def set_group(root_dir_group: str) -> None:
    """Set which other writers unsafe() allows, by conf.py's ROOT_DIR_GROUP: for "trusted" a group, for IN_POD all, else none.

    Applies to this process and its children. In a pod there are no other users, and the kubelet makes an emptyDir with mode
    0777.
    """
    global _group_trusted, _all_trusted
    _all_trusted = root_dir_group == IN_POD
    _group_trusted = _all_trusted or root_dir_group == _TRUSTED


def in_pod() -> bool:
    """Check whether set_group() was called with IN_POD."""
    return _all_trusted


def is_of_pod(path: str) -> bool:
    """Check whether a path is a directory that the kubelet has made for this pod: it belongs to root. False outside of pods.

    Raises OSError.
    """
    info = os.lstat(path)
    return _all_trusted and stat.S_ISDIR(info.st_mode) and info.st_uid in users.roots()


def unsafe(path: str) -> Optional[Unsafe]:
    """Find the first thing, from / on, that lets another user replace the folder `path` (absolute); None if there is nothing.

    Follows links, 40 at most: more are unsafe. A folder that cannot be examined is unsafe. Folders that do not exist are not
    judged, but the target of a link must exist.
    """
    at, links, rest = "/", 0, 0
    todo = path.split("/")[::-1]
    found = _judge_folder(at, os.lstat(at))
    while todo and found is None:
        name = todo.pop()
        if name in ("", "."):
            continue
        below = os.path.dirname(at) if name == ".." else os.path.join(at, name)
        try:
            info = os.lstat(below)
            target = os.readlink(below) if stat.S_ISLNK(info.st_mode) else ""
        except FileNotFoundError:
            if links and len(todo) >= rest:
                return Unsafe(f"{path} is a link to {below}, which is not there", "choose another folder")
            return None
        except OSError as error:
            return Unsafe(f"{below} cannot be examined: {error.strerror}", "choose another folder")
        if target:
            links += 1
            if links > _MOST_LINKS:
                return Unsafe(f"{path} leads through too many links", "choose another folder")
            found = _judge_folder(below, info)
            rest = len(todo)
            todo += target.split("/")[::-1]
            at = "/" if target.startswith("/") else at
        else:
            found = _judge_folder(below, info)
            at = below
    return found


def _judge_folder(path: str, info: os.stat_result) -> Optional[Unsafe]:
    """Return why the thing at a path is unsafe; None for a safe folder or link.

    Unsafe: another kind of file; an owner other than this user and root; a folder that is not sticky, and that other users may
    write to whom set_group() has not allowed.
    """
    if not stat.S_ISDIR(info.st_mode) and not stat.S_ISLNK(info.st_mode):
        return Unsafe(f"{path} is no directory", "choose another folder")
    writers = users.other_writers(path, info, sticky=True)
    if writers == "owner":
        what = f"{path} belongs to user {users.name_of(info.st_uid)}, who can replace its content"
        return Unsafe(what, "choose a folder that belongs to you or root, as all folders above it")
    if writers == "all" and not _all_trusted:
        fix = f"chmod o-w {path}, or choose another folder"
        return Unsafe(f"all users may write to {path}, and so replace what lies there", fix)
    if writers == "group" and not _group_trusted:
        what = f"the group {users.group_name(info.st_gid)} may write to {path}, and so replace what lies there"
        fix = f'chmod g-w {path}, or, if you trust its members, ROOT_DIR_GROUP = "{_TRUSTED}" in conf.py'
        return Unsafe(what, fix)
    return None
