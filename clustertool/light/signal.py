"""What nodes need of `signal`: numbers and functions as C has them, without an enum of each (1 ms to import)."""

from __future__ import annotations

from _signal import *  # type: ignore[import-not-found]  # noqa: F403
from typing import Any


def __getattr__(name: str) -> Any:
    import signal

    return getattr(signal, name)
