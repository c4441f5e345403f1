"""Machines that start one job together without ssh have a secret, from which each of them derives the same certificate.

All machines that have the same secret derive the same certificate and key, byte for byte, so the job's mutual TLS admits them
and no others. The certificate is visible to any program that connects to the coordinator. A secret that can be guessed can
therefore be found without a further connection, which is why it has at least 128 bits.
"""

from __future__ import annotations

import base64
import contextlib
import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from clustertool.errors import ConfigError, UsageError
from clustertool.fleet import this_user
from clustertool.fleet.identity import self_signed
from clustertool.model.hints import PROGRAM
from clustertool.model.launcher_variables import SECRET

BITS = 128
_NEW = 20  # bytes of a new secret: 160 bits, 32 characters
_MOST = 4096  # bytes of a file that is read
_LEAST_DIFFERENT = 8  # different characters: of 26 random ones, fewer is as likely as guessing the secret
_INFO = b"clustertool: certificate of a job, 1"
_FIX = f"{PROGRAM} secret makes a new one; all machines need the same"
_SERIAL = 1


@dataclass(frozen=True)
class Secret:
    """A secret, and where it was found (`source`), for messages."""

    text: str = field(repr=False)
    source: str


def default_file() -> Path:
    """Return the path of the file that is read where the variable is not set: ~/.config/clustertool/secret."""
    return this_user.config() / "secret"


def new() -> str:
    """Make a new secret: letters and digits, without a character that a shell interprets."""
    return base64.b32encode(secrets.token_bytes(_NEW)).decode().lower()


def find(environ: Mapping[str, str]) -> Secret | None:
    """Find the secret of this user: that of the variable, else of the file. None if there is neither.

    Raises UsageError for one that is too short or has other characters, ConfigError for a file that another user can read or
    has written.
    """
    if environ.get(SECRET):
        return Secret(_require_strong(environ[SECRET].strip(), SECRET), SECRET)
    path = default_file()
    text = _read_file(path)
    return None if text is None else Secret(_require_strong(text.strip(), str(path)), str(path))


def of_this_machine(make: bool = True) -> Secret:
    """Read a secret that only this user's programs on this machine have, for jobs that stay on it; make it at the first use.

    make: False for a command that changes nothing: the text is empty as long as there is none.
    """
    path = this_user.state() / "loopback-secret"
    text = _read_file(path)
    if text is None and not make:
        return Secret("", str(path))
    if text is None:
        this_user.make_folder(path.parent, "XDG_STATE_HOME")
        with contextlib.suppress(FileExistsError):  # another command was faster
            write(path, new())
        text = _read_file(path) or ""
    return Secret(_require_strong(text.strip(), str(path)), str(path))


def write(path: Path, text: str) -> None:
    """Write a new file with mode 0600, complete as soon as it has its name.

    Raises FileExistsError if `path` exists, and OSError if it cannot be written.
    """
    part = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    handle = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        with open(handle, "w", encoding="ascii") as file:
            os.fchmod(handle, 0o600)  # whatever the umask and the access list of the folder
            file.write(f"{text}\n")
            file.flush()
            os.fsync(handle)
        os.link(part, path, follow_symlinks=False)
    finally:
        os.unlink(part)


def bits(text: str) -> float:
    """Estimate the bits of a random secret of these characters.

    Digits have 3.3 each, hex digits 4, one case and digits 5, others 6.
    """
    kinds = ((r"[0-9]*", 3.3), (r"[0-9a-f]*|[0-9A-F]*", 4.0), (r"[0-9a-z]*|[0-9A-Z]*", 5.0))
    each = next((size for pattern, size in kinds if re.fullmatch(pattern, text)), 6.0)
    return each * len(text)


def certificate(secret: str, salt: str) -> tuple[str, str]:
    """Derive a certificate from the secret, the same on every machine; return (certificate, key) in PEM.

    The seed of its Ed25519 key is HKDF-SHA256 of the secret. salt: what the machines of one job have in common, so that no two
    jobs of one secret have the same certificate.
    """
    seed = HKDF(algorithm=hashes.SHA256(), length=32, salt=salt.encode(), info=_INFO).derive(secret.encode())
    return self_signed(Ed25519PrivateKey.from_private_bytes(seed), _SERIAL, None)


def _require_strong(text: str, source: str) -> str:
    """Return the text. Raises UsageError where it has blanks or characters that are not ASCII, or can be guessed.

    It needs 128 bits, as bits() estimates them, and eight different characters.
    """
    if not re.fullmatch(r"[!-~]+", text):
        what = f"the secret in {source} is empty, or has blanks or characters that are not ASCII"
        raise UsageError(what, _FIX)
    if bits(text) < BITS or len(set(text)) < _LEAST_DIFFERENT:
        needed = f"at least {BITS} random bits (26 random letters and digits)"
        raise UsageError(f"the secret in {source} is too short: it needs {needed}", _FIX)
    return text


def _read_file(path: Path) -> str | None:
    """Read the first 4 KiB of a file that only this user can read, as text; None if there is none.

    Raises ConfigError for any other file, and for one that cannot be opened.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}", "correct its permissions") from None
    try:
        _require_own(path, os.fstat(handle))
        return os.read(handle, _MOST).decode("ascii", "replace")
    finally:
        os.close(handle)


def _require_own(path: Path, info: os.stat_result) -> None:
    """Raise ConfigError for what is no file of this user, or a file that others can read or write."""
    again = f"remove it; {PROGRAM} secret --to {path} makes a new one"
    if not stat.S_ISREG(info.st_mode):
        raise ConfigError(f"{path} is no file", again)
    if info.st_uid != os.geteuid():
        raise ConfigError(f"{path} belongs to uid {info.st_uid}", again)
    if stat.S_IMODE(info.st_mode) & 0o077:
        what = f"other users can read or write {path} (mode {stat.S_IMODE(info.st_mode):04o})"
        raise ConfigError(what, f"chmod 600 {path}; if they may have read it, make a new secret")
