"""What nodes need of `hashlib`: SHA-256 as OpenSSL does it, without all the other digests (1 ms to import)."""

from __future__ import annotations

from typing import Any

try:
    from _hashlib import openssl_sha256 as sha256
except ImportError:
    from hashlib import sha256

__all__ = ["sha256"]


def __getattr__(name: str) -> Any:
    import hashlib

    return getattr(hashlib, name)
