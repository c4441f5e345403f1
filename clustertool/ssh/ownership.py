"""This module checks that only root and this user can have written a file of this machine.

The rule is that of OpenSSH for its own files: the owner is root or the user, and no other user may write. A group may
write if it is the user's private group: it has the user's name and no other member.
"""

from __future__ import annotations

import os
import stat

from clustertool.node.system import users


def problem(where: str | int, info: os.stat_result, *, sticky: bool = False) -> str:
    """How another user can have written a file or folder, as the end of a sentence; "" if none can.

    where: its path or descriptor, `info` what is known of it. sticky: accept a folder in which users can replace their own
    files only, as in /tmp.
    """
    mode = stat.S_IMODE(info.st_mode)
    if info.st_uid != os.getuid() and info.st_uid not in users.roots():
        name = users.name_of(info.st_uid)
        return f"belongs to uid {info.st_uid}" + (f" ({name})" if name != str(info.st_uid) else "")
    if stat.S_ISLNK(info.st_mode) or (sticky and stat.S_ISDIR(info.st_mode) and mode & stat.S_ISVTX):
        return ""  # a link's mode means nothing
    if mode & stat.S_IWOTH:
        return f"can be changed by every user (mode {mode:04o})"
    if mode & stat.S_IWGRP and not users.only_private(where, info.st_gid):
        return f"can be changed by the group {users.group_name(info.st_gid)} (mode {mode:04o})"
    return ""
