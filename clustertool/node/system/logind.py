"""This module predicts what systemd-logind does at logout: with KillUserProcesses=yes it ends the session's processes.

A scope of the user's own manager lasts longer than the session only if the user lingers (loginctl enable-linger).
"""

from __future__ import annotations

import os
from typing import Dict, NamedTuple, Tuple

from clustertool.node.system import processes, programs, users

_PATIENCE = 2.0  # seconds for loginctl, which asks a daemon
_LINGERING = "/var/lib/systemd/linger"
_FIX = "loginctl enable-linger (once, as this user on the node)"


# kills: logind ends what a login has started. lingers: the user's manager lasts without a login.
Logout = NamedTuple("Logout", [("kills", bool), ("lingers", bool)])


def predict_logout() -> Logout:
    """Determine whether logind ends this process at logout, and if so, whether the user lingers.

    Both are False if it does not, if this process is in no session of logind, or if logind does not answer.
    """
    if not _in_session():
        return Logout(False, False)
    user = users.name_of(os.getuid())
    manager = _read_properties("show-session", "KillUserProcesses", "KillOnlyUsers", "KillExcludeUsers")
    if not _kills(manager, user):
        return Logout(False, False)
    linger = _read_properties("show-user", "Linger", about=str(os.getuid())).get("Linger")
    return Logout(True, linger == "yes" if linger else os.path.exists(os.path.join(_LINGERING, user)))


def logout_warning() -> Tuple[str, str]:
    """Describe why logind would end detached jobs at logout (no linger, or no systemd-run), and the fix.

    Returns two empty texts if it would not.
    """
    state = predict_logout()
    if state.kills and not state.lingers:
        return "logind ends detached jobs at logout (KillUserProcesses=yes, and this user does not linger)", _FIX
    if state.kills and not programs.find("systemd-run"):
        what = "logind ends detached jobs at logout (KillUserProcesses=yes), and there is no systemd-run"
        return what, "install systemd-run"
    return "", ""


def _in_session() -> bool:
    """Check whether this process is in a session of logind, by the environment of pam_systemd or by its control group."""
    return "XDG_SESSION_ID" in os.environ or b"/session-" in processes.try_read("/proc/self/cgroup")


def _kills(manager: Dict[str, str], user: str) -> bool:
    """Check by logind's rule whether a logout ends this user's processes. manager: its properties.

    Not those of an excluded user, who is root if there is no list; else those of KillOnlyUsers, or if this is empty, of all
    users with KillUserProcesses=yes.
    """
    only, excluded = (manager.get(name, "").split() for name in ("KillOnlyUsers", "KillExcludeUsers"))
    if user in (excluded or ["root"]):
        return False
    return user in only if only else manager.get("KillUserProcesses") == "yes"


def _read_properties(what: str, *names: str, about: str = "") -> Dict[str, str]:
    """Read properties of logind's manager, or of the user `about`: {name: value}. what: the command of loginctl.

    Returns {} if loginctl is missing, fails, or takes more than 2 s.
    """
    tool = programs.find("loginctl")
    if not tool:
        return {}
    wanted = [part for name in names for part in ("-p", name)]
    arguments = ["--no-pager", what, *wanted, *([about] if about else [])]
    code, text, _ = programs.output([tool, *arguments], _PATIENCE)
    return {} if code else dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
