"""Authentication tries the configured key first, with few attempts (servers count them), then asks the user at the terminal.

Keys are read once per process, and each passphrase is requested once. A password is sent to the host that it was typed for.
"""

from __future__ import annotations

import functools
import io
import os
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from cryptography.exceptions import InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from paramiko import key_classes
from paramiko.agent import AgentSSH
from paramiko.message import Message
from paramiko.pkey import PKey, PublicBlob
from paramiko.ssh_exception import AuthenticationException, BadAuthenticationType, SSHException

from clustertool.errors import AuthError, Unreachable
from clustertool.ssh.certificates import read_certificate, read_private, read_public
from clustertool.ssh.paramiko_fixes import Untyped
from clustertool.ssh.prompter import Prompter, describe_account
from clustertool.ssh.settings import SshSettings
from clustertool.watch.sanitize import harmless

TRIES = 3  # of a passphrase or a password
_AGENT_TIMEOUT = 60.0  # an agent may ask its user to confirm
_TYPING_TIMEOUT = 120.0  # sshd's LoginGraceTime
_MARGIN = 0.1  # seconds: paramiko measures a timeout by another clock
_TYPED = ("keyboard-interactive", "password")
_MOST_SHOWN = 300  # characters of each text of a server
# A server's question for the account's password, by itself: "Password:", "(ann@node1) Password:", "ann@node1's password:".
_PASSWORD = re.compile(r"\s*(\(\S+\)\s*)?(\S+'s\s+)?password(\s+for\s+\S+)?\s*:?\s*", re.IGNORECASE)
_BAD_KEY = (SSHException, UnsupportedAlgorithm, ValueError, OSError)


class _Agent(AgentSSH):  # type: ignore[misc]
    """An ssh agent, asked by one thread at a time."""

    def __init__(self, path: str) -> None:
        super().__init__()
        self._one = threading.Lock()
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            connection.settimeout(_AGENT_TIMEOUT)
            connection.connect(path)
            self._connect(connection)
        except (OSError, SSHException, struct.error):  # no agent there: no keys
            connection.close()
        for key in self.get_keys():
            key.inner_key = None  # for a certificate of RSA paramiko would show and use the plain key of it

    def _send_message(self, message: Untyped) -> Untyped:
        """Send a message of one thread at a time, and return the answer."""
        with self._one:
            return super()._send_message(message)


_agent_at = functools.cache(_Agent)  # by the path of its socket
_reading = threading.Lock()  # the threads of all nodes ask at once, and each agent and file is read once


def _agent_keys(path: str) -> Sequence[Untyped]:
    """List the keys of the agent at this socket; none for "", and where no agent answers."""
    if not path:
        return ()
    with _reading:
        return _agent_at(path).get_keys()  # type: ignore[no-any-return]


def _load_key(path: str, passphrase: str = "") -> PKey | None:
    """Load the key in a file; None if it is locked and this is not its passphrase.

    The result is kept as long as the file does not change. Raises OSError; ValueError, SSHException or UnsupportedAlgorithm for
    a key that cannot be used.
    """
    with _reading:
        return _read_key(path, os.stat(path).st_mtime_ns, passphrase)


@functools.cache
def _read_key(path: str, _: int, passphrase: str) -> PKey | None:
    """Read the key in a file, as _load_key() does. The time of the file's last change is there for the cache."""
    try:
        return _private_key(Path(path).read_bytes(), passphrase.encode() or None)
    except TypeError:  # the message of cryptography for a missing passphrase
        return None
    except (ValueError, InvalidTag):
        if not passphrase:
            raise
        return None


def _private_key(text: bytes, passphrase: bytes | None) -> PKey:
    """Build paramiko's key of a key file's text, in each form that ssh reads: OpenSSH's, PEM of old kinds, PKCS#8.

    paramiko does not read all of them. Raises TypeError without a passphrase that is needed, ValueError for other text.
    """
    own = b"BEGIN OPENSSH" in text
    key = (serialization.load_ssh_private_key if own else serialization.load_pem_private_key)(text, passphrase)
    plain, encoding = serialization.NoEncryption(), serialization.Encoding
    written = key.private_bytes(encoding.PEM, serialization.PrivateFormat.OpenSSH, plain).decode()
    public = key.public_key().public_bytes(encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    (kind,) = (kind for kind in key_classes if public.split()[0].decode() in kind.identifiers())
    return kind.from_private_key(io.StringIO(written))


class _Identity:
    """What a login shows, a public key or a certificate, and the key of a file or an agent that signs for it."""

    def __init__(self, key: Untyped, shown: bytes) -> None:
        self._key = key
        self.public_blob = PublicBlob(Message(shown).get_text(), shown)
        self.refused = ""

    def sign_ssh_data(self, data: bytes, algorithm: str = "") -> Untyped:
        """Sign data with the key. If an agent refuses, return b"", and `refused` has the reason."""
        try:
            return self._key.sign_ssh_data(data, algorithm)
        except (SSHException, OSError, struct.error) as error:  # of an agent: its user said no, or a token is missing
            self.refused = str(error)
            return b""  # no server accepts it, so that the next key has its turn


class Login:
    """paramiko's `auth_strategy` for one login to a node: with keys, then with what the user types."""

    def __init__(self, to: SshSettings, prompter: Prompter, deadline: float) -> None:
        self._to = to
        self._prompter = prompter
        self._deadline = deadline
        self._tried: list[str] = []
        self._locked: list[str] = []  # key files whose passphrase was not given
        self._bad: list[str] = []
        self._fix = ""  # the way to use one of them
        self.began = 0.0

    def authenticate(self, transport: Untyped) -> None:
        """Log in: with keys, then with what the user types.

        Raises AuthError if the server accepts none of them, and Unreachable if it stops answering.
        """
        self.began = time.monotonic()
        allowed = self._try_keys(transport)
        if transport.is_authenticated():
            return
        if not allowed and transport.is_active() and (self._prompter.present or not self._tried):
            allowed = self._ask_methods(transport)
        if transport.is_authenticated() or self._try_typed(transport, allowed):
            return
        if allowed and not allowed & {"publickey", *_TYPED}:
            self._bad.append(f"it takes only {harmless(', '.join(sorted(allowed))[:_MOST_SHOWN])}")
            keys = "let its sshd take public keys (PubkeyAuthentication): clustertool has no other way"
            self._fix = self._fix or keys
        if allowed & set(_TYPED) and not self._prompter.present:
            self._bad.append("it takes a password, and there is no terminal to ask for one")
        raise self._refusal(transport)

    def _try_keys(self, transport: Untyped) -> set[str]:
        """Try the keys until one is accepted.

        Return the methods that the server takes next; none if the login is complete, or if it does not report them.
        """
        shown: set[bytes] = set()
        for name, identity in self._keys():
            if identity.public_blob.key_blob in shown:
                continue
            shown.add(identity.public_blob.key_blob)
            self._tried.append(name)
            try:
                return set(self._attempt(transport, transport.auth_publickey, identity))
            except BadAuthenticationType as error:
                return set(error.allowed_types)
            except AuthenticationException:
                if identity.refused:
                    self._bad.append(f"the agent does not sign with {name}")
                if not transport.is_active():
                    break
        return set()

    def _attempt(self, transport: Untyped, method: Callable[..., Untyped], *values: Untyped) -> Untyped:
        """Try to log in once, and return the methods that the server still requires, as paramiko's method returns them.

        Raises paramiko's error if the login is refused; Unreachable if the server does not answer until the deadline.
        """
        began, seconds = time.monotonic(), max(1.0, self._deadline - time.monotonic())
        transport.auth_timeout = seconds
        try:
            return method(self._to.user, *values)
        except AuthenticationException:
            if time.monotonic() - began > seconds - _MARGIN:
                what = f"stopped answering during the login (within {self._to.connect_timeout:g} s)"
                fix = "check the machine; if it is slow, raise CONNECT_TIMEOUT in conf.py"
                raise Unreachable(what, fix, self._to.name) from None
            raise

    def _keys(self) -> Iterator[tuple[str, _Identity]]:
        """Yield (name, key or certificate) to try: configured files, then the agent's, then files that need a passphrase.

        With IdentitiesOnly, keys of the agent that are not configured are left out. A passphrase is asked for only when all
        others have been tried.
        """
        agent = {key.asbytes(): key for key in _agent_keys(self._to.agent)}
        given = {path: self._read_certificate_file(path) for path in self._to.certificate_files}
        waiting: list[str] = []
        for path in self._to.identity_files:
            key = agent.pop(_read_public_half(path), None) if agent else None
            key = key or self._load_file(path, waiting)
            if key:
                yield from self._with_certificates(path, key, given or _implicit_certificate(path))
        for key in agent.values():
            for name, identity in self._with_certificates(f"agent's {key.comment or key.get_name()}", key, given):
                if name in given or not self._to.identities_only:
                    yield name, identity
        for path in waiting:
            key = self._load_locked_file(path)
            if key:
                yield from self._with_certificates(path, key, given or _implicit_certificate(path))

    def _with_certificates(
        self, name: str, key: Untyped, certificates: Mapping[str, bytes]
    ) -> Iterator[tuple[str, _Identity]]:
        """Yield the certificates of a key by the names of their files, then the key by `name`.

        For a certificate that is not valid now, the problem is recorded.
        """
        for path, blob in certificates.items():
            certificate = read_certificate(blob)
            if certificate and certificate.key == key.asbytes():
                if certificate.outdated():
                    self._bad.append(f"{path} {certificate.outdated()}")
                yield path, _Identity(key, blob)
        yield name, _Identity(key, key.asbytes())

    def _read_certificate_file(self, path: str) -> bytes:
        """Read a configured certificate; record a problem if it is missing (b"") or another kind of key, which is returned."""
        blob = read_public(path)
        if not read_certificate(blob):
            self._bad.append(f"{path} {'is no certificate' if os.path.exists(path) else 'does not exist'}")
        return blob

    def _load_file(self, path: str, waiting: list[str]) -> PKey | None:
        """Load the key in a file without a passphrase; None, and the path in `waiting`, if it needs one.

        None, too, for one that is missing or cannot be used: the problem is recorded, unless a default file is missing.
        """
        try:
            key = _load_key(path)
        except FileNotFoundError:
            if self._to.identities_given:
                self._bad.append(f"{path} does not exist")
            return None
        except _BAD_KEY as error:
            self._record_unusable(path, error)
            return None
        if key is None:
            waiting.append(path)
        return key

    def _record_unusable(self, path: str, error: Exception) -> None:
        """Record why the key of a file cannot be used, and how to use it."""
        public = _read_public_half(path)
        if public and public == read_public(path):
            self._bad.append(f"{path} is a public key, and no agent has its private key")
            self._fix = f"add the private key to the agent: ssh-add {path.removesuffix('.pub')}"
        elif public.startswith(b"sk-", 4):
            self._bad.append(f"{path} is on a security key, which only an agent can use")
            self._fix = f"add it to the agent: ssh-add {path}"
        else:
            self._bad.append(f"{path} cannot be used ({error})")
            if isinstance(error, OSError):  # its text states the problem
                return
            self._fix = f"write it in the usual form (ssh-keygen -p -f {path}), or add it to the agent (ssh-add {path})"

    def _load_locked_file(self, path: str) -> PKey | None:
        """Load the key in a file with a passphrase that is asked for, up to three times; else None, which is recorded.

        The time of typing does not count for the deadline.
        """
        for attempt in range(TRIES if self._prompter.present else 0):
            passphrase = self._prompter.answer(f"Passphrase of {path}: ", attempt)
            # the time of typing does not count for the node's deadline
            self._deadline = max(self._deadline, time.monotonic() + self._to.connect_timeout)
            if not passphrase:
                break
            try:
                key = _load_key(path, passphrase)
            except _BAD_KEY as error:
                self._record_unusable(path, error)
                return None
            if key:
                return key
        self._locked.append(path)
        return None

    def _ask_methods(self, transport: Untyped) -> set[str]:
        """Ask the server which methods it takes, by a login without a key or password; none if it does not report them."""
        try:
            self._attempt(transport, transport.auth_none)
        except BadAuthenticationType as error:
            return set(error.allowed_types)
        except SSHException:
            pass
        return set()

    def _try_typed(self, transport: Untyped, allowed: set[str]) -> bool:
        """Ask the user for a password, or the server's own questions, up to three times; return whether the login is complete.

        False, without a question, if no user is present.
        """
        if not self._prompter.present:
            return False
        typed = _Typed(self._to, self._prompter)
        rest = set(allowed)
        try:
            for _ in range(TRIES):
                method = next((name for name in _TYPED if name in rest), "")
                if not method or not transport.is_active():
                    break
                typed.begin()
                if method == "password" and not typed.password():
                    break
                self._deadline = time.monotonic() + _TYPING_TIMEOUT
                try:
                    if method == "password":
                        rest = set(self._attempt(transport, transport.auth_password, typed.given, None, False))
                    else:
                        rest = set(self._attempt(transport, transport.auth_interactive, typed.replies))
                except SSHException:
                    if typed.asked:
                        self._tried.append("an answer" if typed.given is None else "a password")
                    else:
                        rest.discard(method)
                    if typed.none:
                        break
                    continue
                if not rest:
                    return True
                typed.end(True)
        finally:
            typed.end(transport.is_authenticated())
        return False

    def _refusal(self, transport: Untyped) -> AuthError:
        """Build the error of a login that was refused: what was tried, what could not be, and how to go on."""
        to = self._to
        tried = ", ".join(_count_names(self._tried)) or "no key"
        notes = "".join(f"; {note}" for note in self._bad)
        user = to.user if to.hostname == to.name else f"{to.user}@{to.hostname}"
        what = f"permission denied for {user} (tried {tried}{notes})"
        if self._locked:
            alone = "" if self._prompter.present else " (there is no terminal to ask for its passphrase)"
            fix = f"unlock the key: ssh-add {self._locked[0]}{alone}"
        elif self._fix:
            fix = self._fix
        elif len(self._tried) > 1 and not transport.is_active():
            fix = "too many keys were tried: name the right one, IDENTITY_FILE in conf.py or IdentityFile in ~/.ssh/config"
        elif not self._tried:
            fix = "make a key (ssh-keygen), bring it there (ssh-copy-id), or name one: IDENTITY_FILE in conf.py"
        else:
            port = f"-p {to.port} " if to.port != 22 else ""
            copy = f"ssh-copy-id {port}{to.user}@{to.hostname}"
            fix = f"{copy}; or name another user (user@{to.hostname}, USER in conf.py) or another key (IDENTITY_FILE)"
        return AuthError(what, fix, to.name)


class _Typed:
    """Answers of the user for one login: the password of this account, and answers to the server's own questions."""

    def __init__(self, to: SshSettings, prompter: Prompter) -> None:
        self._to = to
        self._prompter = prompter
        self._retry = False
        self._trial = False  # a password was given, and what came of it is not reported yet
        self.asked = False  # something was asked in this attempt
        self.none = False  # the user gave no answer
        self.given: str | None = None  # the password of this attempt

    def begin(self) -> None:
        """Forget the password of the last attempt before a new one; if there was one, it counts as refused.

        password() then asks for another one. A password that end() has reported does not count. Nothing is sent to the server.
        """
        self._retry = self.given is not None
        self.asked, self.given = False, None

    def end(self, accepted: bool) -> None:
        """Report to the prompter whether the server has accepted the password, if one was asked for, and forget it."""
        if self._trial:
            self._prompter.report_password(self._to, self.given or "", accepted and bool(self.given))
        self._trial, self.given = False, None

    def password(self) -> str:
        """Ask for the password of this account for this attempt, and return it; "" for none."""
        self.asked = self._trial = True
        self.given = self._prompter.password(self._to, self._retry)
        self.none = self.none or not self.given
        return self.given

    def replies(self, title: str, instructions: str, fields: list[tuple[str, bool]]) -> list[str]:
        """Return the answers to the server's questions: the password of the account, or what the user types.

        The server's texts are shown as such, in quotation marks, without control characters.
        """
        notes = [_quoted(text) for text in (title, instructions) if text.strip()] if fields else []
        answers = []
        for text, echo in fields:
            if len(text) < _MOST_SHOWN and _PASSWORD.fullmatch(text) and not echo and self.given is None:
                answers.append(self.password())
                continue
            self.asked = True
            question = " ".join([f"{describe_account(self._to)} asks", *notes, _quoted(text)])
            answers.append(self._prompter.fresh(f"{question}: ", not echo))
            notes, self.none = [], self.none or not answers[-1]
        return answers


def _quoted(text: str) -> str:
    """Put a text of a server into quotation marks, on one line."""
    text = text.strip()
    return f'"{harmless(text[:_MOST_SHOWN])}{"..." * (len(text) > _MOST_SHOWN)}"'


def _count_names(names: Sequence[str]) -> list[str]:
    """List each name once, with the number of tries if there were several."""
    return [name if names.count(name) == 1 else f"{name} ({names.count(name)} times)" for name in dict.fromkeys(names)]


def _read_public_half(path: str) -> bytes:
    """Read the public half of the key at `path`, without a passphrase; b"" if it is unknown.

    It is read from the file, if that is a public key, else from PATH.pub, else from a private key in OpenSSH's own format.
    """
    try:
        return read_public(path) or read_public(path + ".pub") or read_private(Path(path).read_bytes())
    except OSError:
        return b""


def _implicit_certificate(path: str) -> dict[str, bytes]:
    """Read PATH-cert.pub of a key file, for a configuration that names no certificate: {its path: content, b"" for none}."""
    path += "-cert.pub"
    return {path: read_public(path)}
