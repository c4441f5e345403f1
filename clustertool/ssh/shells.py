"""What opens shells on a node: an ssh connection, or a link of another kind."""

from __future__ import annotations

from typing import Any, Protocol

from clustertool.errors import Unreachable


class Shells(Protocol):
    """node: its name. alive: whether new channels can be opened. A channel has the functions of paramiko's that are used, and
    behind it is a POSIX shell. noise: a regular expression of what the link may write to stderr after the end of a command.
    """

    @property
    def node(self) -> str: ...

    @property
    def noise(self) -> bytes: ...

    @property
    def alive(self) -> bool: ...

    def channel(self, *, window: int = 0, timeout: float = 10.0) -> Any: ...

    def lost(self, why: str) -> Unreachable: ...
