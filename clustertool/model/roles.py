"""Roles are what a process can be: what each mode needs of them, and their names for users and for Paddle."""

from __future__ import annotations

from typing import Dict, Tuple

# The roles of a mode in the order of their start: trainers wait until every pserver listens, heter trainers start with them.
# In mode mpi a job has pservers only where they are asked for.
MODES: Dict[str, Tuple[str, ...]] = {
    "collective": ("trainer",),
    "ps": ("pserver", "trainer"),
    "ps-heter": ("pserver", "trainer", "heter"),
    "rpc": ("trainer",),
    "mpi": ("pserver", "trainer"),
}
RANKS = MODES["ps-heter"]  # of the processes that users ask for and count
# In mode mpi: the one mpirun, on node 0, and its daemon (orted, hydra_pmi_proxy) on each node with trainers, whose rank is the
# number of the node. They are processes of a job and no ranks of it.
MPIRUN, MPI_DAEMON = LAUNCHERS = ("mpirun", "mpidaemon")
ROLES = (*RANKS, *LAUNCHERS)
PADDLE = {"pserver": "PSERVER", "trainer": "TRAINER", "heter": "HETER_TRAINER"}
_NAMES = {"heter": "heter trainer", "mpidaemon": "MPI daemon"}
_ALIASES = {"heter_trainer": "heter", "heter-trainer": "heter"}


def role_name(role: str) -> str:
    """Name the role for users: `heter trainer`."""
    return _NAMES.get(role, role)


def find_role(name: str, roles: Tuple[str, ...] = ROLES) -> str:
    """Return the role of `roles` that a user means, "" if there is none. heter_trainer and heter-trainer mean heter."""
    role = _ALIASES.get(name, name)
    return role if role in roles else ""
