"""This class is the base of all enums whose values are strings."""

from __future__ import annotations

from enum import Enum


class Name(str, Enum):
    """A string of a fixed set. str() gives the value in every version of Python."""

    def __str__(self) -> str:
        return str(self.value)
