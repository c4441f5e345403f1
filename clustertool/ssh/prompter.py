"""The prompter asks the user at the terminal: passphrases, passwords, and questions of servers.

The thread that owns the terminal asks, one question at a time, while the threads that need the answers wait. So Ctrl+C at a
question ends the question, not the terminal. Answers stay in memory.

A password belongs to one account: a user on one host. Another host gets it only if the user agrees, after the first host
has accepted it, to a question that names the hosts.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

from clustertool.model.config.folded_names import grouped
from clustertool.ssh.settings import SshSettings

_TURN = 0.05  # seconds between two checks of what waits
_GATHER = 0.3  # seconds in which new host keys, or hosts that want a password, are collected for one message


class Person(Protocol):
    """The user at the terminal, or the reader of a script's output."""

    @property
    def present(self) -> bool:
        """Whether questions can be put."""

    def ask(self, question: str, hidden: bool) -> str:
        """Ask a question and return the answer, "" for none. hidden: it does not appear on the screen."""

    def tell(self, text: str) -> None:
        """Print a message on stderr."""

    def fold(self, names: Iterable[str]) -> str:
        """Shorten names of hosts."""


class NewKey(NamedTuple):
    """A host key that was accepted as new: its host, type, fingerprint, and the file that contains it now ("" for none)."""

    host: str
    type: str
    fingerprint: str
    path: str


# User, and whether it is for a gateway: accounts that may share a password, if the user agrees.
_Group = tuple[str, bool]


class _Account(NamedTuple):
    """What a password is for. Hosts with the same name may differ, so the gateways or the command to the host belong to it."""

    group: _Group
    host: str
    port: int
    way: tuple[object, ...]


@dataclass(eq=False)
class _Request:
    """A question of a thread. `to`: the host that wants a password, None for any other question."""

    question: str
    hidden: bool = True
    to: SshSettings | None = None
    retry: bool = False
    reply: queue.SimpleQueue[str] = field(default_factory=queue.SimpleQueue)


class Prompter:
    """The queue of questions to `person`, with the answers. Without a person every answer is "".

    It is created by the thread that owns the terminal, which puts the questions in serve().
    """

    def __init__(self, person: Person | None = None) -> None:
        self._person = person
        self._owner = threading.get_ident()
        self._lock = threading.Lock()
        self._remembering = threading.Lock()
        self._answers: dict[tuple[str, int], str] = {}
        self._waiting: list[_Request] = []
        self._came = 0.0  # when the last host began to wait for a password
        self._passwords: dict[_Account, str] = {}  # those that their hosts have accepted
        self._trials: set[_Account] = set()  # accounts whose password is being tried
        self._offer: dict[_Group, SshSettings] = {}  # the host whose password is offered to the others
        self._declined: set[_Group] = set()
        self._keys: list[NewKey] = []
        self._keys_since = 0.0
        self._silent = False

    @property
    def present(self) -> bool:
        """Whether there is a person who can answer questions."""
        return self._person is not None and self._person.present

    def silence(self) -> None:
        """Put no more questions: a live view has the terminal. Answers and passwords given before are still used."""
        self._silent = True

    @property
    def mine(self) -> bool:
        """Whether this is the thread that made the prompter, which puts the questions."""
        return threading.get_ident() == self._owner

    def answer(self, question: str, attempt: int = 0) -> str:
        """Return the answer to `question`, "" for none. It is asked once for all hosts, and once for each further `attempt`."""
        with self._remembering:
            if (question, attempt) not in self._answers:
                self._answers[question, attempt] = self.fresh(question)
            return self._answers[question, attempt]

    def fresh(self, question: str, hidden: bool = True) -> str:
        """Ask a question and return the answer, "" for none; it is not remembered (a one-time code).

        hidden: the answer does not appear on the screen. Waits until the thread that puts the questions has done so.
        """
        if self._silent or not self.present:
            return ""
        request = _Request(question, hidden)
        with self._lock:
            self._waiting.append(request)
        return self._wait(request)

    def password(self, to: SshSettings, retry: bool) -> str:
        """Return the password of the user on this host, "" for none. One that the host has accepted before is used again.

        The caller passes to report_password() whether the host accepts it. retry: the host has refused the last one, so another
        one is asked for.
        """
        account = _account(to)
        with self._lock:
            if retry:
                self._trials.discard(account)
                self._passwords.pop(account, None)
            elif account in self._passwords:
                return self._passwords[account]
            if self._silent or not self.present:
                return ""
            request = _Request(f"Password of {describe_account(to)}: ", to=to, retry=retry)
            self._waiting.append(request)
            self._came = time.monotonic()
        return self._wait(request)

    def report_password(self, to: SshSettings, password: str, accepted: bool) -> None:
        """End the trial of a password; if the host has accepted it, store it for this account.

        A stored password answers the questions of other threads for the same account, and is offered to other hosts.
        """
        account = _account(to)
        with self._lock:
            self._trials.discard(account)
            if not accepted:
                return
            self._passwords[account] = password
            self._offer.setdefault(_account(to).group, to)
            for twin in self._remove_first_requests(lambda other: other == account):
                twin.reply.put(password)

    def add_new_key(self, key: NewKey) -> None:
        """Queue a new host key: announce() shows it, before the next question at the latest."""
        with self._lock:
            self._keys_since = self._keys_since if self._keys else time.monotonic()
            self._keys.append(key)

    def serve(self) -> None:
        """Announce new host keys, and put the questions of other threads that wait.

        To be called often by the thread that made this object; does nothing in another one.
        """
        if not self.mine:
            return
        if self._keys and time.monotonic() - self._keys_since > _GATHER:
            self.announce()
        while True:
            request = self._next()
            if request is None:
                return
            self.announce()
            if request.to is None or not self._offer_password(request, request.to):
                self._ask(request)

    def announce(self) -> None:
        """Show the new host keys that were not shown yet, equal ones together."""
        with self._lock:
            keys, self._keys = self._keys, []
        if self._person is None:
            return
        hosts = grouped(((key.type, key.fingerprint, key.path), key.host) for key in keys)
        for (kind, fingerprint, path), names in hosts.items():
            where = f"added to {path}" if path else "not written down"
            self._person.tell(f"new host key of {self._person.fold(names)}: {kind} {fingerprint} ({where})")

    def _wait(self, request: _Request) -> str:
        """Wait for the answer to a question that is queued, and return it; in the thread that puts them, put it."""
        while self.mine and request.reply.empty():
            self.serve()
            time.sleep(_TURN)
        return request.reply.get()

    def _next(self) -> _Request | None:
        """Take the question to put now out of the queue, None if there is none. First passwords of hosts come last.

        While a password is being tried, questions for passwords of the same user wait: that one may be offered to their hosts.
        Before it is offered, hosts that want one are collected for 0.3 s.
        """
        with self._lock:
            busy = {account.group for account in self._trials}
            if time.monotonic() - self._came < _GATHER:
                busy |= set(self._offer) - self._declined
            ready = [one for one in self._waiting if one.to is None or _account(one.to).group not in busy]
            if not ready:
                return None
            chosen = next((request for request in ready if request.retry or request.to is None), ready[0])
            self._waiting.remove(chosen)
            return chosen

    def _offer_password(self, request: _Request, to: SshSettings) -> bool:
        """Ask whether the accepted password of another host may go to this one, and to all that wait for theirs.

        Returns whether they have it. False, without a question, if there is no such password, this host has refused it, or the
        user has declined before, which is remembered.
        """
        group = _account(to).group
        with self._lock:
            source = self._offer.get(group)
            password = self._passwords.get(_account(source)) if source else None
            if source is None or password is None or request.retry or group in self._declined:
                return False
            others = self._remove_first_requests(lambda other: other.group == group)
        assert self._person is not None
        names = self._person.fold(one.to.name for one in (request, *others) if one.to)
        question = f"Send the password of {describe_account(source)} to {to.user}@{names} too? [y/N] "
        agreed = False
        try:
            agreed = self._person.ask(question, False).strip().lower() in ("y", "yes")
        finally:
            if not agreed:
                with self._lock:
                    self._declined.add(group)
                    self._waiting[:0] = others
        if agreed:
            for one in (request, *others):
                one.reply.put(password)
        return agreed

    def _remove_first_requests(self, which: Callable[[_Account], bool]) -> list[_Request]:
        """Remove the first questions for the passwords of accounts from the queue, and return them. which: selects accounts.

        Called under the lock. A question that is repeated because the host has refused the last password stays.
        """
        taken = [one for one in self._waiting if one.to and not one.retry and which(_account(one.to))]
        self._waiting = [one for one in self._waiting if one not in taken]
        return taken

    def _ask(self, request: _Request) -> None:
        """Put one question to the user, and give the thread that waits the answer, "" after Ctrl+C.

        A password counts as being tried from the question on.
        """
        assert self._person is not None
        question, given = request.question, ""
        if request.to is not None:
            with self._lock:
                self._trials.add(_account(request.to))
            question = f"{describe_account(request.to)} refused it. {question}" if request.retry else question
        try:
            given = self._person.ask(question, request.hidden)
        finally:  # after Ctrl+C the thread gets no answer, but does not wait for ever
            request.reply.put(given)


def describe_account(to: SshSettings) -> str:
    """Describe an account as questions name it: user and host, the address if it is another, and whether it is a gateway."""
    about = [to.hostname] * (to.hostname != to.name) + ["a gateway"] * to.gateway
    return f"{to.user}@{to.name}" + (f" ({', '.join(about)})" if about else "")


def _account(to: SshSettings) -> _Account:
    """Return the account for which a password is valid: user, host, port, and the gateways to it."""
    return _Account((to.user, to.gateway), to.hostname, to.port, (to.gateways, to.proxy_command))
