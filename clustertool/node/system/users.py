"""This module finds users and groups of this node by name."""

from __future__ import annotations

import contextlib
import grp
import os
import pwd
import socket
import stat
import struct
from typing import NamedTuple, Set, Union

_PEER = struct.Struct("3i")  # pid, uid, gid: struct ucred of the kernel
_roots: Set[int] = set()


def roots() -> Set[int]:
    """Return the uids that mean root: 0, and the overflow uid in a user namespace that does not map 0 (a rootless container).

    There, files of root and those of all users who are not mapped have the overflow uid.
    """
    global _roots
    if not _roots:
        _roots = {0}
        with contextlib.suppress(OSError, ValueError):
            with open("/proc/self/uid_map", encoding="utf-8") as file:
                mapped = maps_root(file.read())
            if not mapped:
                with open("/proc/sys/kernel/overflowuid", encoding="utf-8") as file:
                    _roots.add(int(file.read()))
    return _roots


def maps_root(uid_map: str) -> bool:
    """Check whether uid 0 is among the uids of a user namespace. uid_map: as in /proc/self/uid_map. Raises ValueError."""
    return any(int(line.split()[0]) == 0 for line in uid_map.splitlines())


Peer = NamedTuple("Peer", [("pid", int), ("uid", int)])  # pid 0: of another namespace of pids


def peer(sock: socket.socket) -> Peer:
    """Return pid and uid of the process at the other end of a unix socket, as it was when it connected or began to listen.

    Raises OSError if the kernel does not report it.
    """
    pid, uid, _ = _PEER.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return Peer(pid, uid)


def name_of(uid: int) -> str:
    """Return the user's name, or the number as text if there is none."""
    with contextlib.suppress(KeyError):
        return pwd.getpwuid(uid).pw_name
    return str(uid)


def own_name() -> str:
    """Return the name of this user: from the password file, else of USER, else the number.

    Containers have users without an entry there.
    """
    name = name_of(os.getuid())
    return os.environ.get("USER") or name if name.isdigit() else name


def home() -> str:
    """Return the home folder of this user: HOME, else that of the password file; "" if it is no absolute path."""
    path = os.environ.get("HOME", "")
    if not path:
        with contextlib.suppress(KeyError):
            path = pwd.getpwuid(os.getuid()).pw_dir
    return path if os.path.isabs(path) else ""


def group_name(gid: int) -> str:
    """Return the group's name, or the number as text if there is none."""
    with contextlib.suppress(KeyError):
        return grp.getgrgid(gid).gr_name
    return str(gid)


def other_writers(where: Union[str, int], info: os.stat_result, *, sticky: bool = False) -> str:
    """Determine which users other than root and this one can change a file or folder, in this order of priority.

    Returns "owner" if it belongs to another user, "all" or "group" if those may write, or "". The rule is that of OpenSSH for
    its own files. A group may write if it is the user's private group: it has the user's name and no other member. where: the
    path or descriptor of `info`. sticky: accept a folder in which users can replace their own files only, as in /tmp.
    """
    if info.st_uid != os.getuid() and info.st_uid not in roots():
        return "owner"
    if stat.S_ISLNK(info.st_mode) or (sticky and stat.S_ISDIR(info.st_mode) and info.st_mode & stat.S_ISVTX):
        return ""  # a link's mode means nothing
    if info.st_mode & stat.S_IWOTH:
        return "all"
    return "group" if info.st_mode & stat.S_IWGRP and not _only_private(where, info.st_gid) else ""


def _only_private(where: Union[str, int], gid: int) -> bool:
    """Check whether the group `gid` of a file or folder is the user's private group, so that only this user writes by it.

    The group has the user's name, and no other user is in it. Users who have it as their primary group are found in /etc/passwd
    only: a directory service can have many. False with an access list: the mode's group bits are then the maximum of all its
    entries, so more users may write. where: a path or a descriptor.
    """
    with contextlib.suppress(OSError, AttributeError):  # a laptop with macOS has no listxattr
        if "system.posix_acl_access" in os.listxattr(where):
            return False
    try:
        group, own = grp.getgrgid(gid), pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return False
    return group.gr_name == own and set(group.gr_mem) <= {own} and not _primary_of_others(gid)


def _primary_of_others(gid: int) -> bool:
    """Check whether /etc/passwd has another user with this primary group."""
    with contextlib.suppress(OSError), open("/etc/passwd", encoding="utf-8", errors="replace") as file:
        for line in file:
            fields = line.split(":")
            if len(fields) > 3 and fields[3] == str(gid) and fields[2] != str(os.getuid()):
                return True
    return False
