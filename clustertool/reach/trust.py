"""Which files on this machine only root and this user can have written: what is found and then obeyed must be one of them.

The rule is that of OpenSSH for its own files: the owner is root or the user, and nobody else may write. A group may write
if it is the user's private group: it has the user's name and no other member.
"""

from __future__ import annotations

import functools
import grp
import os
import pwd
import stat

_PASSWD = "/etc/passwd"


def problem(info: os.stat_result, *, sticky: bool = False) -> str:
    """How another user can have written what `info` describes, as the end of a sentence; "" if none can.

    sticky: accept a folder in which users can only replace their own files, as /tmp.
    """
    mode = stat.S_IMODE(info.st_mode)
    if info.st_uid not in (0, os.geteuid()):
        return f"belongs to {user(info.st_uid)}"
    if stat.S_ISLNK(info.st_mode) or (sticky and stat.S_ISDIR(info.st_mode) and mode & stat.S_ISVTX):
        return ""  # a link's mode means nothing
    if mode & stat.S_IWOTH:
        return f"can be changed by every user (mode {mode:04o})"
    if mode & stat.S_IWGRP and not private_group(info.st_gid):
        return f"can be changed by the group {_group(info.st_gid)} (mode {mode:04o})"
    return ""


def user(uid: int) -> str:
    """A user as a message names it: the name if there is one, and the number."""
    try:
        return f"{pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"uid {uid}"


@functools.lru_cache(maxsize=64)
def private_group(gid: int) -> bool:
    """Whether the group has this user's name and no other member.

    Users whose first group it is are looked for in /etc/passwd alone: to list those of a directory service can take long.
    """
    try:
        name, found = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    except KeyError:
        return False
    return found.gr_name == name and not set(found.gr_mem) - {name} and not _primary_of_others(gid)


def _primary_of_others(gid: int) -> bool:
    try:
        with open(_PASSWD, encoding="utf-8", errors="replace") as lines:
            users = [line.split(":") for line in lines]
    except OSError:
        return False
    return any(len(one) > 3 and one[3] == str(gid) and one[2] != str(os.geteuid()) for one in users)


def _group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
