"""What nodes need of `socket`: sockets and numbers as C has them, without an enum of each, and selectors (3 ms to import)."""

from __future__ import annotations

import _socket
from _socket import *  # noqa: F403
from typing import Any, Tuple


class socket(_socket.socket):  # type: ignore[no-redef]
    def __enter__(self) -> socket:
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def accept(self) -> Tuple[socket, Any]:
        fd, address = self._accept()  # type: ignore[attr-defined]
        return socket(self.family, self.type, self.proto, fileno=fd), address


def socketpair(  # type: ignore[no-redef]
    family: int = _socket.AF_UNIX, kind: int = _socket.SOCK_STREAM
) -> Tuple[socket, socket]:
    one, other = _socket.socketpair(family, kind)
    return socket(fileno=one.detach()), socket(fileno=other.detach())


def __getattr__(name: str) -> Any:
    import socket

    return getattr(socket, name)
