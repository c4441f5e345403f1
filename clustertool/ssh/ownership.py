"""This module checks that only root and this user can have written a file of this machine.

The rule is that of OpenSSH for its own files (node/system/users.py).
"""

from __future__ import annotations

import os
import stat

from clustertool.node.system import users


def problem(where: str | int, info: os.stat_result, *, sticky: bool = False) -> str:
    """Describe how another user can have written a file or folder, as the end of a sentence; "" if none can.

    where: its path or descriptor, `info` what is known of it. sticky: accept a folder in which users can replace their own
    files only, as in /tmp.
    """
    mode, name = f"mode {stat.S_IMODE(info.st_mode):04o}", users.name_of(info.st_uid)
    return {
        "": "",
        "owner": f"belongs to uid {info.st_uid}" + f" ({name})" * (name != str(info.st_uid)),
        "all": f"can be changed by every user ({mode})",
        "group": f"can be changed by the group {users.group_name(info.st_gid)} ({mode})",
    }[users.other_writers(where, info, sticky=sticky)]
