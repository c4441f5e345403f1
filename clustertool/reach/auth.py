"""Who we are to a node: the named key first, few tries (servers count them), each secret asked for once for all nodes.

Keys are read once per process. What a person types stays in memory. Questions are put by the thread that owns the
terminal, while the threads that need the answer wait: so Ctrl+C at a question ends the question, not the terminal.
"""

from __future__ import annotations

import base64
import binascii
import os
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from paramiko.agent import AgentSSH
from paramiko.message import Message
from paramiko.pkey import PKey, UnknownKeyType
from paramiko.ssh_exception import AuthenticationException, BadAuthenticationType, SSHException

from clustertool.errors import AuthError, Unreachable
from clustertool.reach.sshconfig import SshSettings

TRIES = 3  # of a passphrase or a password
_AGENT_TIMEOUT = 60.0  # an agent may ask its user to confirm
_TYPING_TIMEOUT = 120.0  # sshd's LoginGraceTime
_BAD_KEY = (SSHException, UnknownKeyType, UnsupportedAlgorithm, ValueError, OSError)


class Prompter:
    """Asks a person, each question once, and remembers the answer. Without `ask` nobody is there to be asked."""

    def __init__(self, ask: Callable[[str], str] | None = None) -> None:
        self._ask = ask
        self._owner = threading.get_ident()
        self._lock = threading.Lock()
        self._waiting: queue.Queue[tuple[str, queue.Queue[str]]] = queue.Queue()
        self._answers: dict[tuple[str, int], str] = {}

    @property
    def present(self) -> bool:
        return self._ask is not None

    @property
    def mine(self) -> bool:
        """True in the thread that puts the questions."""
        return threading.get_ident() == self._owner

    def answer(self, question: str, attempt: int = 0) -> str:
        """The answer to `question`; a second attempt is another question. "" if nobody answers."""
        with self._lock:
            if (question, attempt) not in self._answers:
                self._answers[question, attempt] = self.fresh(question)
            return self._answers[question, attempt]

    def fresh(self, question: str) -> str:
        """An answer that must not be remembered (a one-time code)."""
        if self._ask is None:
            return ""
        if self.mine:
            return self._ask(question)
        reply: queue.Queue[str] = queue.Queue()
        self._waiting.put((question, reply))
        return reply.get()

    def serve(self) -> None:
        """Put the questions of other threads; to be called often by the thread that made this object."""
        while self._ask is not None and self.mine:
            try:
                question, reply = self._waiting.get_nowait()
            except queue.Empty:
                return
            given = ""
            try:
                given = self._ask(question)
            finally:  # Ctrl+C: whoever waits gets no answer, but does not wait for ever
                reply.put(given)


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

    def _send_message(self, message: Any) -> Any:
        with self._one:
            return super()._send_message(message)


class _Keyring:
    """The keys of this process: files and agents, each read once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._agents: dict[str, _Agent] = {}
        self._files: dict[tuple[str, int, str], PKey | None] = {}

    def agent_keys(self, path: str) -> Sequence[Any]:
        if not path:
            return ()
        with self._lock:
            if path not in self._agents:
                self._agents[path] = _Agent(path)
            return self._agents[path].get_keys()  # type: ignore[no-any-return]

    def load(self, path: str, passphrase: str = "") -> PKey | None:
        """The key in a file; None if it is locked and this is not its passphrase. Raises what _BAD_KEY lists."""
        which = (path, os.stat(path).st_mtime_ns, passphrase)
        with self._lock:
            if which not in self._files:
                try:
                    self._files[which] = PKey.from_path(path, passphrase.encode() or None)
                except TypeError:  # how cryptography says: a passphrase is needed
                    self._files[which] = None
                except ValueError:
                    if not passphrase:
                        raise
                    self._files[which] = None
            return self._files[which]


_keyring = _Keyring()


class Login:
    """paramiko's `auth_strategy` for one node: one attempt to log in, with all we have."""

    def __init__(self, to: SshSettings, prompter: Prompter, deadline: float) -> None:
        self._to = to
        self._prompter = prompter
        self._deadline = deadline
        self._tried: list[str] = []
        self._locked: list[str] = []  # key files whose passphrase nobody could give
        self._bad: list[str] = []
        self.began = 0.0

    def authenticate(self, transport: Any) -> None:
        """Returns when logged in. Raises AuthError or Unreachable."""
        self.began = time.monotonic()
        allowed = self._with_keys(transport)
        if allowed is None:
            return
        if not allowed and transport.is_active() and (self._prompter.present or not self._tried):
            allowed = self._methods(transport)
        if transport.is_authenticated() or self._with_words(transport, allowed):
            return
        raise self._refused(transport)

    def _with_keys(self, transport: Any) -> set[str] | None:
        """None: logged in. Else the methods with which the server wants to go on, as far as it said."""
        for name, key in self._keys():
            self._tried.append(name)
            try:
                rest = self._attempt(transport, transport.auth_publickey, key)
            except BadAuthenticationType as error:
                return set(error.allowed_types)
            except AuthenticationException:
                if not transport.is_active():
                    return set()
                continue
            return set(rest) or None
        return set()

    def _attempt(self, transport: Any, method: Callable[..., Any], *values: Any) -> Any:
        """One try, bounded in time. A server that hangs is no server that refuses."""
        transport.auth_timeout = max(1.0, self._deadline - time.monotonic())
        try:
            return method(self._to.user, *values)
        except AuthenticationException as error:
            if "timeout" in str(error).lower():
                raise Unreachable(
                    f"stopped answering during the login (within {self._to.connect_timeout:g} s)",
                    "look at the machine; a slow one: CONNECT_TIMEOUT in conf.py", self._to.name,
                ) from None  # fmt: skip
            raise

    def _keys(self) -> Iterator[tuple[str, Any]]:
        """The keys to try, the likeliest first; locked files last, since their passphrase must be asked for."""
        in_agent = {key.asbytes(): key for key in _keyring.agent_keys(self._to.agent)}
        waiting: list[str] = []
        for path in self._to.identity_files:
            known = in_agent.pop(_public(path), None)
            key = None if known else self._from_file(path, waiting)
            if known or key:
                yield path, known or key
        if not self._to.identities_only:
            for key in in_agent.values():
                yield f"agent's {getattr(key, 'comment', '') or key.get_name()}", key
        for path in waiting:
            key = self._unlocked(path)
            if key:
                yield path, key

    def _from_file(self, path: str, waiting: list[str]) -> PKey | None:
        try:
            key = _keyring.load(path)
        except FileNotFoundError:
            if self._to.identities_given:
                self._bad.append(f"{path} does not exist")
            return None
        except _BAD_KEY as error:
            self._bad.append(f"{path} cannot be used ({error})")
            return None
        if key is None:
            waiting.append(path)
        return key

    def _unlocked(self, path: str) -> PKey | None:
        for attempt in range(TRIES if self._prompter.present else 0):
            passphrase = self._prompter.answer(f"Passphrase of {path}: ", attempt)
            # the time a person needs for typing is not the node's
            self._deadline = max(self._deadline, time.monotonic() + self._to.connect_timeout)
            try:
                key = _keyring.load(path, passphrase) if passphrase else None
            except _BAD_KEY as error:
                self._bad.append(f"{path} cannot be used ({error})")
                return None
            if key or not passphrase:
                break
        else:
            key = None
        if not key:
            self._locked.append(path)
        return key

    def _methods(self, transport: Any) -> set[str]:
        try:
            self._attempt(transport, transport.auth_none)
        except BadAuthenticationType as error:
            return set(error.allowed_types)
        except SSHException:
            return set()
        return set()

    def _with_words(self, transport: Any, allowed: set[str]) -> bool:
        """Passwords and the server's own questions, if a person is there."""
        if not self._prompter.present or not allowed & {"password", "keyboard-interactive"}:
            return False
        for attempt in range(TRIES):
            if not transport.is_active():
                return False
            self._deadline = time.monotonic() + _TYPING_TIMEOUT
            try:
                if "keyboard-interactive" in allowed:
                    rest = self._attempt(transport, transport.auth_interactive, self._questions(attempt))
                else:
                    rest = self._attempt(transport, transport.auth_password, self._password(attempt), None, False)
            except SSHException:
                self._tried.append("password")
                continue
            if not rest:
                return True
            allowed = set(rest)
        return False

    def _password(self, attempt: int) -> str:
        return self._prompter.answer(f"Password of {self._to.user}: ", attempt)

    def _questions(self, attempt: int) -> Callable[[str, str, list[tuple[str, bool]]], list[str]]:
        """The server's questions: its password is the same everywhere, anything else is asked for every node."""

        def reply(title: str, instructions: str, fields: list[tuple[str, bool]]) -> list[str]:
            return [
                self._password(attempt) if "password" in text.lower() and not echo
                else self._prompter.fresh(f"{self._to.name}: {text}")
                for text, echo in fields
            ]  # fmt: skip

        return reply

    def _refused(self, transport: Any) -> AuthError:
        to = self._to
        tried = ", ".join(self._tried) or "no key"
        notes = "".join(f"; {note}" for note in self._bad)
        what = f"{to.user}@{to.hostname} does not let us in (tried {tried}{notes})"
        if self._locked:
            alone = "" if self._prompter.present else " (there is no terminal to ask for its passphrase)"
            fix = f"unlock the key: ssh-add {self._locked[0]}{alone}"
        elif len(self._tried) > 1 and not transport.is_active():
            fix = "too many keys were tried: name the right one, IDENTITY_FILE in conf.py or IdentityFile in ~/.ssh/config"
        elif not self._tried:
            fix = "make a key (ssh-keygen), bring it there (ssh-copy-id), or name one: IDENTITY_FILE in conf.py"
        else:
            port = f"-p {to.port} " if to.port != 22 else ""
            fix = f"ssh-copy-id {port}{to.user}@{to.hostname}, or correct USER or IDENTITY_FILE in conf.py"
        return AuthError(what, fix, to.name)


def _public(path: str) -> bytes:
    """The public half of a key file, without its passphrase; b"" if it cannot be told."""
    for name, read in ((path + ".pub", _from_pub), (path, _from_private)):
        try:
            with open(name, "rb") as file:
                found = read(file.read(1 << 20))
        except OSError:
            continue
        if found:
            return found
    return b""


def _from_pub(text: bytes) -> bytes:
    words = text.split()
    try:
        return base64.b64decode(words[1]) if len(words) > 1 else b""
    except binascii.Error:
        return b""


def _from_private(text: bytes) -> bytes:
    """OpenSSH's own format keeps the public key in the clear: magic, cipher, kdf, its options, number, key."""
    try:
        raw = base64.b64decode(b"".join(line for line in text.splitlines() if not line.startswith(b"-----")))
    except binascii.Error:
        return b""
    magic = b"openssh-key-v1\0"
    if not raw.startswith(magic):
        return b""
    message = Message(raw[len(magic) :])
    for _ in range(3):
        message.get_string()
    message.get_int()
    return bytes(message.get_string())
