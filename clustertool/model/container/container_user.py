"""This module computes as which user a rank runs in an image: the entries of its user and group, and its HOME. Pure.

A rank has the uid of the user on the node, which the image need not know: getpass.getuser() and `~user` then fail, and HOME may
be a folder that this user cannot write.
"""

from __future__ import annotations

from typing import NamedTuple

_SHELL = "/bin/sh"


class RankUser(NamedTuple):
    """name: on the node. home: where the image's own HOME cannot be written: ROOT_DIR/.clustertool/home."""

    name: str
    uid: int
    gid: int
    home: str


def passwd(text: str, user: RankUser) -> str:
    """Return the text of an image's /etc/passwd with an entry for the user; unchanged where it has one."""
    entry = f"{_field(user.name)}:x:{user.uid}:{user.gid}::{_field(user.home)}:{_SHELL}"
    return _with(text, entry, user.uid)


def group(text: str, user: RankUser) -> str:
    """Return the same of /etc/group, with the primary group of the user."""
    return _with(text, f"{_field(user.name)}:x:{user.gid}:", user.gid)


def _with(text: str, entry: str, number: int) -> str:
    lines = [line for line in text.split("\n") if line]
    known = any(line.split(":")[2:3] == [str(number)] for line in lines)
    return "\n".join([*lines, *([] if known else [entry]), ""])


def _field(text: str) -> str:
    """Replace what separates fields and lines."""
    return "".join("_" if sign == ":" or not sign.isprintable() else sign for sign in text)


# Of a shell in an image: HOME is the image's where this user can write it. `/` is that of a user without an entry.
# CLUSTERTOOL_HOME: the folder of RankUser.home, "" where HOME stays.
HOME_SCRIPT = """\
if [ -n "$CLUSTERTOOL_HOME" ] && { [ ! -d "$HOME" ] || [ ! -w "$HOME" ] || [ "$HOME" = / ]; }; then
    export HOME="$CLUSTERTOOL_HOME"
fi
"""
