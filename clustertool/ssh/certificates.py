"""The form in which OpenSSH writes public keys and certificates: in .pub files, in agents, and in the key exchange.

A certificate (PROTOCOL.certkeys of OpenSSH) is a public key, with names and a time, that an authority has signed. A server
checks the certificate of a user; that of a host is checked here, by the rules of ssh.
"""

from __future__ import annotations

import base64
import contextlib
import time
from dataclasses import dataclass
from pathlib import Path

from paramiko.message import Message
from paramiko.pkey import PKey, UnknownKeyType
from paramiko.ssh_exception import SSHException

from clustertool.watch.sanitize import harmless

SUFFIX = "-cert-v01@openssh.com"
_ECDSA = ("ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521")
# Type of a plain key -> number of its fields.
_FIELDS = {"ssh-ed25519": 1, "ssh-rsa": 2, **dict.fromkeys(_ECDSA, 2)}
_FIELDS |= {"sk-ssh-ed25519@openssh.com": 2, "sk-ecdsa-sha2-nistp256@openssh.com": 3}
_SIGNATURES = ("ssh-ed25519", *_ECDSA, "rsa-sha2-512", "rsa-sha2-256")  # of an authority: SHA-1 of ssh-rsa is no proof
_HOST = 2  # the kind of a certificate; 1 is a user's
_MOST_NAMES = 256  # as ssh


@dataclass(frozen=True)
class Certificate:
    """The fields of a certificate. `key`: the plain public key that it certifies. Times in seconds since 1970."""

    key: bytes
    kind: int
    names: tuple[str, ...]
    after: int
    before: int
    critical: bytes
    authority: bytes
    authority_type: str
    signed: bytes  # what the signature covers
    signature: bytes

    def outdated(self) -> str:
        """Describe, as the end of a sentence, why the certificate is not valid now; "" if it is."""
        if time.time() < self.after:
            return f"is not valid before {_date(self.after)}"
        return f"has expired on {_date(self.before)}" if time.time() >= self.before else ""

    def problem(self, host: str) -> str:
        """Describe, as the end of a sentence, why the certificate does not prove the key of `host`; "" if it does.

        The rules are those of ssh. A certificate without names is for all hosts.
        """
        if self.kind != _HOST:
            return "is no certificate of a host"
        if self.names and host not in self.names:
            return f"is for {harmless(', '.join(self.names)[:200])}, not for {host}"
        if self.critical:
            return "has critical options, and ssh knows none for a host"
        if self.authority_type.startswith("sk-"):
            return f"is signed by a key of the type {self.authority_type}, which clustertool cannot check"
        return self.outdated() or ("" if self._is_signed() else "is not signed by that authority")

    def _is_signed(self) -> bool:
        """Check the authority's signature; False for a kind that is not supported, and for broken data."""
        with contextlib.suppress(SSHException, UnknownKeyType, ValueError, TypeError):
            if Message(self.signature).get_text() in _SIGNATURES:
                authority = PKey.from_type_string(self.authority_type, self.authority)
                return bool(authority.verify_ssh_sig(self.signed, Message(self.signature)))
        return False


def read_certificate(blob: bytes) -> Certificate | None:
    """Parse the certificate in `blob`, without a check of its validity; None for another kind of key, or broken data."""
    message = Message(blob)
    with contextlib.suppress(ValueError, OverflowError):
        certified = message.get_text()
        kind = certified.replace(SUFFIX, "@openssh.com" if certified.startswith("sk-") else "")
        if certified == kind or kind not in _FIELDS:
            return None
        message.get_string()  # a random value
        key = _strings(kind.encode(), *(message.get_string() for _ in range(_FIELDS[kind])))
        message.get_int64()  # serial number
        usage = message.get_int()
        message.get_string()  # the authority's name for it
        names: list[str] = []
        listed = Message(message.get_string())
        while listed.get_remainder() and len(names) < _MOST_NAMES:
            names.append(listed.get_text())
        after, before = message.get_int64(), message.get_int64()
        critical = message.get_string()
        message.get_string(), message.get_string()  # extensions, and a field that is not used
        authority, signed = message.get_string(), message.get_so_far()
        signer, signature = Message(authority).get_text(), message.get_string()
        if signed + _strings(signature) == blob:
            return Certificate(key, usage, tuple(names), after, before, critical, authority, signer, signed, signature)
    return None


def read_public(path: str) -> bytes:
    """Read the public key or certificate, decoded, in the first line "TYPE BASE64 [COMMENT]" of a file; b"" without one."""
    with contextlib.suppress(OSError):
        for line in Path(path).read_text("utf-8", "surrogateescape").splitlines():
            fields = line.split()
            with contextlib.suppress(ValueError):
                blob = base64.b64decode(fields[1]) if len(fields) > 1 else b""
                if blob and Message(blob).get_text() == fields[0]:
                    return blob
    return b""


def read_private(text: bytes) -> bytes:
    """Extract the public half of a private key in OpenSSH's own format, which keeps it in the clear; b"" for other formats.

    text: the content of the key file. Of several keys in it the first one counts.
    """
    raw = b""
    with contextlib.suppress(ValueError):
        raw = base64.b64decode(b"".join(line for line in text.splitlines() if not line.startswith(b"-----")))
    magic = b"openssh-key-v1\0"
    if not raw.startswith(magic):
        return b""
    message = Message(raw[len(magic) :])
    for _ in range(3):  # cipher, key derivation, its options
        message.get_string()
    message.get_int()  # number of keys
    return bytes(message.get_string())


def _strings(*fields: bytes) -> bytes:
    """Encode fields as ssh does: each with its length in front."""
    message = Message()
    for field in fields:
        message.add_string(field)
    return bytes(message.asbytes())


def _date(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime(min(seconds, 2**40)))
