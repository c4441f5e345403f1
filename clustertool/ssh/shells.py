"""A link opens shells on a node, or programs without one: an ssh connection, or a link of another kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from clustertool.errors import Unreachable


class Shells(Protocol):
    """node: its name.

    alive: whether new channels can be opened. A channel has the functions of paramiko's that are used, and behind it is a POSIX
    shell. noise: a regular expression of what the link may write to stderr after the end of a command. no_shell: what happened,
    and the fix, where the shell does not start.
    """

    @property
    def node(self) -> str: ...

    @property
    def noise(self) -> bytes: ...

    @property
    def no_shell(self) -> tuple[str, str]: ...

    @property
    def alive(self) -> bool: ...

    def channel(self, *, window: int = 0, timeout: float = 10.0) -> Any: ...

    def lost(self, why: str) -> Unreachable: ...


@runtime_checkable
class Programs(Shells, Protocol):
    """A link that starts a program itself, so that the node needs no shell for it."""

    def program(self, argv: Sequence[str], *, window: int = 0, timeout: float = 10.0) -> Any:
        """Open a channel to the program."""
