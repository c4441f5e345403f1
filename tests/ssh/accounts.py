"""SSH servers that want a password, or have questions of their own (OpenSSH's would need accounts of this machine)."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import paramiko
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.ssh import sshd


class Typist:
    """A person at a terminal: `answers` maps a question to what is typed. Questions and messages are kept, in order."""

    def __init__(self, answers: Callable[[str], str], present: bool = True) -> None:
        self._answers = answers
        self.present = present
        self.asked: list[str] = []
        self.messages: list[str] = []

    def ask(self, question: str, hidden: bool) -> str:
        self.asked.append(question)
        assert hidden or not question.startswith("Password")
        return self._answers(question)

    def tell(self, text: str) -> None:
        self.messages.append(text)

    def fold(self, names: Iterable[str]) -> str:
        return ",".join(sorted(names))


class Claimed(list[Any]):
    """A list that claims to be longer than it is, by `more`."""

    more = 0

    def __len__(self) -> int:
        return super().__len__() + self.more


class Account(paramiko.ServerInterface):  # type: ignore[misc]
    """One connection. `got` collects each password and answer that came, right or wrong."""

    def __init__(self, host: Host) -> None:
        self.host = host

    def get_allowed_auths(self, username: str) -> str:
        return self.host.methods

    def check_auth_password(self, username: str, password: str) -> Any:
        self.host.got.append(password)
        return paramiko.AUTH_SUCCESSFUL if password == self.host.password else paramiko.AUTH_FAILED

    def check_auth_interactive(self, username: str, submethods: str) -> Any:
        if not self.host.fields:
            return paramiko.AUTH_FAILED
        query = paramiko.InteractiveQuery(self.host.title, "", *self.host.fields)
        query.prompts = Claimed(query.prompts)
        query.prompts.more = self.host.more
        return query

    def check_auth_interactive_response(self, responses: list[str]) -> Any:
        self.host.got += responses
        return paramiko.AUTH_SUCCESSFUL if responses == list(self.host.replies) else paramiko.AUTH_FAILED


class Host:
    """A server on `address`, all on one port as nodes have it."""

    def __init__(
        self,
        dir: Path,
        address: str,
        port: int = 0,
        *,
        methods: str = "publickey,password",
        password: str = "right",
        title: str = "",
        fields: Sequence[tuple[str, bool]] = (),
        replies: Sequence[str] = (),
        more: int = 0,
    ) -> None:
        self.methods, self.password, self.title = methods, password, title
        self.fields, self.replies, self.more = fields, replies, more
        self.got: list[str] = []
        self.address = address
        self._sessions: list[paramiko.Transport] = []
        file = sshd.write_key(dir / f"host-{address}", ed25519.Ed25519PrivateKey.generate())
        self.key = paramiko.Ed25519Key.from_private_key_file(str(file))
        self._listener = socket.create_server((address, port))
        self.port = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, daemon=True).start()

    def _serve(self) -> None:
        while True:
            try:
                sock = self._listener.accept()[0]
            except OSError:  # closed
                return
            session = paramiko.Transport(sock)
            session.add_server_key(self.key)
            self._sessions.append(session)
            session.start_server(threading.Event(), Account(self))

    def close(self) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for session in self._sessions:
            session.close()
