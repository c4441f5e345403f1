"""Roles are what a process can be: what each mode needs of them, and their names for users and for Paddle."""

from __future__ import annotations

from typing import Dict, Tuple

# The roles of a mode in the order of their start: trainers wait until every pserver listens, heter trainers start with them.
MODES: Dict[str, Tuple[str, ...]] = {
    "collective": ("trainer",),
    "ps": ("pserver", "trainer"),
    "ps-heter": ("pserver", "trainer", "heter"),
    "rpc": ("trainer",),
}
ROLES = MODES["ps-heter"]
PADDLE = {"pserver": "PSERVER", "trainer": "TRAINER", "heter": "HETER_TRAINER"}
_NAMES = {"heter": "heter trainer"}
_ALIASES = {"heter_trainer": "heter", "heter-trainer": "heter"}


def role_name(role: str) -> str:
    """The role for users: `heter trainer`."""
    return _NAMES.get(role, role)


def known(name: str) -> str:
    """The role that a user means, "" if there is none: heter_trainer is its long name, in job.toml too."""
    role = _ALIASES.get(name, name)
    return role if role in ROLES else ""
