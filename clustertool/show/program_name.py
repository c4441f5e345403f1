"""This module finds the name of the program that the user typed."""

from __future__ import annotations

import os
import sys

_TASKS = {"inv": "inv", "invoke": "inv", "fab": "fab", "fabric": "fab"}  # these have our verbs as tasks


def typed() -> str:
    """Return the name of the program of this process; `inv` for invoke, also as python -m invoke, and `fab` for fabric."""
    folder, name = os.path.split(sys.argv[0])
    name = os.path.basename(folder) if name == "__main__.py" else name
    return _TASKS.get(name, name)


def commanded() -> str:
    """Return the program in front of verbs in messages: inv or fab if the user has typed one, else clustertool."""
    name = typed()
    return name if name in _TASKS.values() else "clustertool"
