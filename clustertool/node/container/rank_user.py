"""The user of ranks in an image, in a container or a pod: its name, and the folder that is its HOME if the image has none."""

from __future__ import annotations

import os

from clustertool.model.container.container_command import RankUser
from clustertool.model.paths import rank_home
from clustertool.node.storage import files
from clustertool.node.system import users


def rank_user(root: str) -> RankUser:
    """Return the user of this process, with its HOME for containers below ROOT_DIR, made if missing.

    Raises PreflightError or OSError as files.make_dir().
    """
    uid = os.getuid()
    home = files.make_dir(root, *os.path.relpath(rank_home(root), root).split(os.sep))
    return RankUser(users.name_of(uid), uid, os.getgid(), home)


def home_inside(user: RankUser) -> str:
    """Choose HOME in the image, as HOME_SCRIPT does: that of the environment if this user can write it, else user.home."""
    found = os.environ.get("HOME", "")
    return found if found not in ("", "/") and os.path.isdir(found) and os.access(found, os.W_OK) else user.home
