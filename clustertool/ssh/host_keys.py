"""known_hosts defines a host's key, or the authority that certifies it.

The policy accepts or refuses a new key; a changed one is always refused.

Files are parsed once, for any number of hosts. New keys are appended, one write under a lock of the file: threads and
processes of the tool cannot mix their lines, a parallel ssh loses nothing, and a linked file stays a link.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import fnmatch
import functools
import hashlib
import hmac
import os
import re
import stat
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import IO, Any

from clustertool.errors import AuthError
from clustertool.ssh.certificates import SUFFIX, read_certificate
from clustertool.ssh.prompter import NewKey
from clustertool.ssh.settings import SshSettings

_ELLIPTIC = ("ssh-ed25519", "ecdsa-sha2-nistp256", "ecdsa-sha2-nistp384", "ecdsa-sha2-nistp521")
# What is asked for in the key exchange, best first, and the type under which known_hosts keeps such a key.
ALGORITHMS = {**{name: name for name in _ELLIPTIC}, "rsa-sha2-512": "ssh-rsa", "rsa-sha2-256": "ssh-rsa"}
_TYPES = set(ALGORITHMS.values())
_AUTHORITY = "@cert-authority"
_PATTERN = re.compile(r"[*?!#]")  # what has a meaning in a line of known_hosts, and is allowed in a name


@dataclass(frozen=True)
class HostKeyEntry:
    """One line of a known_hosts file: its content and its place. `hashed`: salt and digest, where the name is a digest."""

    names: str
    type: str
    key: str  # base64
    path: str
    line: int
    marker: str = ""
    hashed: tuple[bytes, ...] = ()

    @property
    def where(self) -> str:
        """The file and line, for a message."""
        return f"{self.path} line {self.line}" if self.line else f"{self.path} (added by this run)"

    def fits(self, name: str) -> bool:
        """Check that one of its patterns matches `name`, which is in small letters, and no negated one does.

        Of a hashed line: that it has the digest of the name.
        """
        if self.hashed:
            salt, digest = self.hashed
            return hmac.digest(salt, name.encode("utf-8", "surrogateescape"), "sha1") == digest
        parts = self.names.split(",")
        patterns = [one for one in parts if fnmatch.fnmatchcase(name, one.lstrip("!").replace("[", "[[]"))]
        return bool(patterns) and not any(one.startswith("!") for one in patterns)


class KnownHosts:
    """The known_hosts files of one set of paths. Safe to use from several threads."""

    def __init__(self, files: Sequence[str], system: Sequence[str]) -> None:
        self._paths = (*files, *system)
        self._stamps: list[tuple[int, int, int]] = []
        # Lines with plain names are found by the name: there can be thousands.
        self._plain: dict[str, list[HostKeyEntry]] = {}
        self._others: list[HostKeyEntry] = []
        self._lock = threading.Lock()
        self._accepted: dict[str, HostKeyEntry] = {}  # this process's own, in case the file cannot be written
        self._found: dict[str, list[HostKeyEntry]] = {}

    def algorithms(self, to: SshSettings) -> tuple[str, ...]:
        """List algorithms to ask a host for: certificates where an authority is known, then its known types, then others."""
        with self._lock:
            self._refresh()
            known = {entry.type for entry in self._lookup(to.host_key_name) if not entry.marker}
            certified = any(entry.marker == _AUTHORITY for entry in self._lines_of_host(to))
        plain = sorted(ALGORITHMS, key=lambda algorithm: ALGORITHMS[algorithm] not in known)
        return (*(name + SUFFIX for name in ALGORITHMS if certified), *plain)

    def verify(self, to: SshSettings, kind: str, key: str, certificate: bytes = b"") -> NewKey | None:
        """Check the key that a host has shown (`kind` as in known_hosts, `key` in base64). Raises AuthError if it is refused.

        certificate: what certifies the key, if the host has shown that. Returns the key if it is new and was added by the
        policy accept-new, else None. With the policy "off" nothing is checked.
        """
        if to.host_keys == "off":
            return None
        if to.revoked_host_keys:
            _check_revoked(to, kind, key, certificate)
        with self._lock:
            self._refresh()
            if self._is_certified(to, key, certificate) or self._is_known(to, kind, key):
                return None
            if to.host_keys == "strict":
                authorities = any(entry.marker == _AUTHORITY for entry in self._lines_of_host(to))
                raise _unknown_error(to, kind, key, authorities)
            return self._accept(to, kind, key)

    def _lookup(self, name: str) -> list[HostKeyEntry]:
        """List the lines for a name that have a marker or a supported type of key, and the key accepted by this process.

        Lines are remembered: hashed names cost a digest for every line.
        """
        name = name.lower()
        if name not in self._found:
            found = [*self._plain.get(name, ()), *(entry for entry in self._others if entry.fits(name))]
            self._found[name] = [entry for entry in found if entry.type in _TYPES or entry.marker]
        ours = self._accepted.get(name)
        return self._found[name] + ([ours] if ours else [])

    def _lines_of_host(self, to: SshSettings) -> list[HostKeyEntry]:
        """List the lines for a host with its port, and for its name alone: ssh takes both."""
        return [entry for name in dict.fromkeys((to.host_key_name, _bare(to))) for entry in self._lookup(name)]

    def _is_certified(self, to: SshSettings, key: str, blob: bytes) -> bool:
        """Check whether a known authority certifies the key.

        Raises AuthError for a revoked key or authority, and for a certificate of a known authority that is not right, unless
        known_hosts has a plain key of the host, too.
        """
        certificate = read_certificate(blob)
        authority = base64.b64encode(certificate.authority).decode() if certificate else ""
        for entry in self._lines_of_host(to):
            if entry.marker == "@revoked" and entry.key in (key, authority):
                whose = "host key" if entry.key == key else "host certificate's authority"
                what = f"its {whose} is revoked by {entry.where}: {fingerprint(entry.key)}"
                raise AuthError(what, "do not use this machine; ask its administrator", to.name)
        found = [entry for entry in self._lines_of_host(to) if (entry.marker, entry.key) == (_AUTHORITY, authority)]
        problem = certificate.problem(_bare(to)) if certificate and found else ""
        if problem and not any(not entry.marker for entry in self._lines_of_host(to)):
            what = f"its host certificate, of the authority in {found[0].where}, {problem}"
            raise AuthError(what, f"let the authority sign another one, or {_how_to_add(to)}", to.name)
        return bool(found) and not problem

    def _is_known(self, to: SshSettings, kind: str, key: str) -> bool:
        """Check whether a line for the host with its port, or for its name alone, has the key.

        kind, key: see verify(). Raises AuthError for a changed key: only other keys are known for the host with its port.
        """
        known = [entry for entry in self._lookup(to.host_key_name) if not entry.marker]
        if any((entry.type, entry.key) == (kind, key) for entry in known):
            return True
        if known:
            raise _changed_error(to, kind, key, known)
        return any((entry.type, entry.key, entry.marker) == (kind, key, "") for entry in self._lines_of_host(to))

    def _accept(self, to: SshSettings, kind: str, key: str) -> NewKey | None:
        """Add a new key to known_hosts, and return it; None if another process has done so in the meantime.

        Where the file cannot be written, the key counts for this process.
        """
        path, written = to.known_hosts[0] if to.known_hosts else "", False
        # Where the file cannot be written, the key counts for this process.
        with contextlib.suppress(OSError), _open_known_hosts(path) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            self._refresh()
            if self._is_known(to, kind, key):
                return None
            written = self._append(file.fileno(), to.host_key_name, f"{kind} {key}")
        self._accepted[to.host_key_name.lower()] = HostKeyEntry(to.host_key_name, kind, key, path or "this run", 0)
        return NewKey(to.name, kind, fingerprint(key), path if written else "")

    def _append(self, handle: int, name: str, key: str) -> bool:
        """Append a key to known_hosts in one write. Return False if that is no regular file, as /dev/null.

        Raises OSError, as for a full disk. Names are hashed where the user's other names are, and where they would be a
        pattern.
        """
        if not stat.S_ISREG(os.fstat(handle).st_mode):  # /dev/null is a popular known_hosts
            return False
        hashes = any(entry.hashed for entry in self._others if entry.path == self._paths[0])
        name = hashed_name(name) if hashes or _PATTERN.search(name) else name
        size = os.fstat(handle).st_size
        torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"  # the last line lacks its line break
        os.write(handle, (b"\n" if torn else b"") + f"{name} {key}\n".encode("utf-8", "surrogateescape"))
        self._stamps[0] = _stamp(self._paths[0])
        return True

    def _refresh(self) -> None:
        """Parse the files again if one of them has changed."""
        stamps = [_stamp(path) for path in self._paths]
        if stamps == self._stamps:
            return
        self._stamps, self._plain, self._others, self._found = stamps, {}, [], {}
        for path in self._paths:
            with contextlib.suppress(OSError), open(path, encoding="utf-8", errors="surrogateescape") as lines:
                for number, line in enumerate(lines, 1):
                    self._add(_parse_line(line, path, number))

    def _add(self, entry: HostKeyEntry | None) -> None:
        """Store a line by its names, or among those with patterns and hashed names. None: do nothing."""
        if entry and (entry.hashed or set(entry.names) & set("*?!")):
            self._others.append(entry)
        elif entry:
            for name in entry.names.split(","):
                self._plain.setdefault(name, []).append(entry)


_known_in = functools.cache(KnownHosts)  # by the paths of the user's files and of the system's
_known_lock = threading.Lock()


def known_hosts(to: SshSettings) -> KnownHosts:
    """Return the shared KnownHosts of a host's files."""
    with _known_lock:
        return _known_in(to.known_hosts, to.system_known_hosts)


class HostKeyPolicy:
    """The policy that paramiko asks about every key, since its own store stays empty. `learned` gets new keys."""

    def __init__(self, to: SshSettings, learned: Callable[[NewKey], None]) -> None:
        self._to = to
        self._learned = learned

    def missing_host_key(self, client: object, hostname: str, key: Any) -> None:
        """Check a host's key, and pass a new one to `learned`. Raises AuthError if it is refused. Called for every key."""
        certificate = key.public_blob.key_blob if key.public_blob else b""
        new = known_hosts(self._to).verify(self._to, key.get_name(), key.get_base64(), certificate)
        if new:
            self._learned(new)


def fingerprint(key: str) -> str:
    """Compute the fingerprint of a key as ssh-keygen -l prints it."""
    digest = hashlib.sha256(base64.b64decode(key)).digest()
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def hashed_name(name: str) -> str:
    """Hash the name of a host with a random salt, as ssh-keygen -H writes it."""
    salt = os.urandom(20)
    digest = hmac.digest(salt, name.encode("utf-8", "surrogateescape"), "sha1")
    return f"|1|{base64.b64encode(salt).decode()}|{base64.b64encode(digest).decode()}"


def _check_revoked(to: SshSettings, kind: str, key: str, certificate: bytes) -> None:
    """Raise AuthError if the file of RevokedHostKeys has the key or its certificate, or cannot be read.

    kind, key: see HostKeys.verify(). A binary list (KRL) is read by ssh-keygen.
    """
    path, problem = to.revoked_host_keys, f"its host key is revoked by {to.revoked_host_keys}: {fingerprint(key)}"
    try:
        with open(path, "rb") as file:
            content = file.read()
        revoked = key.encode() in content.split()
        if content.startswith(b"SSHKRL"):  # ssh-keygen -k has made it
            with tempfile.NamedTemporaryFile() as shown:
                blob = base64.b64encode(certificate).decode() if certificate else key
                shown.write(f"{kind + SUFFIX if certificate else kind} {blob}\n".encode())
                shown.flush()
                argv = ["ssh-keygen", "-Q", "-f", path, shown.name]
                done = subprocess.run(argv, stdin=subprocess.DEVNULL, capture_output=True, timeout=20)
                revoked = done.returncode != 0
    except (OSError, subprocess.SubprocessError) as error:
        revoked, problem = True, f"RevokedHostKeys of ~/.ssh/config cannot be read: {error}"
    if revoked:
        raise AuthError(problem, f"ask its administrator, or correct RevokedHostKeys ({path})", to.name)


def _changed_error(to: SshSettings, kind: str, key: str, known: Iterable[HostKeyEntry]) -> AuthError:
    """Build the error of a host key that differs from the known ones."""
    entry = next((entry for entry in known if entry.type == kind), None) or next(iter(known))
    other = "" if entry.type == kind else f" (known is {entry.type}, shown was {kind})"
    what = f"its host key has changed: {fingerprint(key)} is not what {entry.where} says{other}"
    remove = f"ssh-keygen -R '{to.host_key_name}' -f {entry.path}"
    fix = f"if the machine was installed anew: {remove} (otherwise the connection may be intercepted)"
    return AuthError(what, fix, to.name)


def _unknown_error(to: SshSettings, kind: str, key: str, authorities: bool) -> AuthError:
    """Build the error of a new host key with the policy "strict". authorities: known_hosts has one for the host."""
    shown = ", it has no certificate of an authority in known_hosts" if authorities else ""
    what = f"its host key is not known ({kind} {fingerprint(key)}){shown}, and HOST_KEYS is strict"
    return AuthError(what, f'{_how_to_add(to)}; or HOST_KEYS = "accept-new"', to.name)


def _how_to_add(to: SshSettings) -> str:
    """Describe, for a fix, how to add the plain key of a host to known_hosts."""
    where = to.known_hosts[0] if to.known_hosts else "known_hosts"
    port = f"-p {to.port} " if to.port != 22 else ""
    return f"compare the fingerprint, then: ssh-keyscan {port}{to.hostname} >> {where}"


def _bare(to: SshSettings) -> str:
    """Return the name of a host without its port, which its certificate must have: HostKeyAlias, else the address.

    Lines of known_hosts may have this name, too.
    """
    name = to.hostname.lower()
    return name if to.host_key_name.lower() == f"[{name}]:{to.port}" else to.host_key_name


def _parse_line(line: str, path: str, number: int) -> HostKeyEntry | None:
    """Parse a line: [marker] names type key [comment]. None for comments and for what is no such line."""
    fields = line.split()
    marker = fields.pop(0) if fields and fields[0].startswith("@") else ""
    if len(fields) < 3 or fields[0].startswith("#"):
        return None
    names = fields[0]
    if not names.startswith("|1|"):
        return HostKeyEntry(names.lower(), fields[1], fields[2], path, number, marker)
    try:
        salt, digest = (base64.b64decode(part) for part in names.split("|")[2:4])
    except ValueError:  # a broken line is no line
        return None
    return HostKeyEntry(names, fields[1], fields[2], path, number, marker, (salt, digest))


def _stamp(path: str) -> tuple[int, int, int]:
    """Return inode, size and time of a file, zeros where there is none: they change with its content."""
    try:
        found = os.stat(path)
    except OSError:
        return (0, 0, 0)
    return (found.st_ino, found.st_size, found.st_mtime_ns)


def _open_known_hosts(path: str) -> IO[bytes]:
    """Open a known_hosts file, and create it with its folder. Raises OSError, also for an empty path."""
    os.makedirs(os.path.dirname(os.path.abspath(path)), mode=0o700, exist_ok=True)
    flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
    return open(os.open(path, flags, 0o600), "r+b", buffering=0)
