"""Modules that only some requests need are imported with the first of them: to import all takes an agent 35 ms of CPU time."""

from __future__ import annotations

import importlib
from typing import Any


def named(place: str) -> Any:
    """Return what a module of the node's code defines. place: "folder.module:name"."""
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"clustertool.node.{module}"), name)
