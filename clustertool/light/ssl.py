"""What nodes need of `ssl`: contexts and connections as C has them, without an enum of each constant (8 ms to import).

`_ssl` is CPython's own affair: where it is not there, or not as we know it, `ssl` does it all. What a context demands of the
other side is set in C, and the same for both.
"""

from __future__ import annotations

from typing import Any

try:
    import _ssl
    from _ssl import *  # noqa: F403

    _Context: Any = _ssl._SSLContext
    _known = hasattr(_Context, "_wrap_socket") and hasattr(_Context, "minimum_version")
except (ImportError, AttributeError):
    _known = False


if _known:

    class TLSVersion:
        TLSv1_2 = _ssl.PROTO_TLSv1_2

    class SSLSocket:
        """A TCP connection that is there, and TLS upon it."""

        def __init__(self, sock: Any, context: Any, server_side: bool) -> None:
            self._sock = sock
            self._tls = context._wrap_socket(sock, server_side)
            self.fileno, self.close = sock.fileno, sock.close
            self.do_handshake, self.send = self._tls.do_handshake, self._tls.write

        def recv(self, size: int) -> bytes:
            return self._read(size) or b""

        def recv_into(self, buffer: Any) -> int:
            return self._read(len(buffer), buffer) or 0

        def _read(self, *where: Any) -> Any:
            """None: the other side is gone, without a word."""
            try:
                return self._tls.read(*where)
            except _ssl.SSLError as error:
                if error.args[0] == _ssl.SSL_ERROR_EOF:
                    return None
                raise

    class SSLContext(_Context):  # type: ignore[misc]
        def wrap_socket(self, sock: Any, server_side: bool = False, do_handshake_on_connect: bool = False) -> SSLSocket:
            return SSLSocket(sock, self, server_side)


def __getattr__(name: str) -> Any:
    import ssl

    return getattr(ssl, name)
