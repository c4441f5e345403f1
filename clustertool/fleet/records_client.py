"""One agent on a shared directory stands for the agents of all nodes whose records lie there: one client for each base.

A base is the folder of a node below the shared ROOT_DIR (node/jobs/records.py). The clients of all bases send their
requests over one connection, with the base in the header. Frames come back with the base. Those without one are about the
connection, and go to every client.
"""

from __future__ import annotations

import posixpath
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from clustertool.errors import ClustertoolError
from clustertool.fleet.agent_client import AgentClient, Sink
from clustertool.model.config.hosts import Host
from clustertool.model.wire.messages import BASES, Answered, Request
from clustertool.model.wire.stream_messages import StreamFrame

Needed = Callable[[str, str, Mapping[str, object]], None]

_LISTING = 30.0  # seconds for the list of bases
_PAUSE = 1.0  # seconds after a connection has failed in which no client opens another one


class RecordsClient(AgentClient):
    """The client of one base. Its requests are answered as by an agent of that node that sees files only.

    close() ends this client, and not the connection.
    """

    def __init__(self, directory: SharedDirectory, base: str, host: Host, sink: Sink | None) -> None:
        super().__init__(directory.agent.link, host, sink)
        self.base = base
        self.agent = directory.agent
        self._directory = directory

    def ask(self, request: Request[Answered], timeout: float = 60.0) -> Answered:
        """Send a request about this base over the shared connection, after a call of `needed`, and return the answer.

        Errors name this client's host, but the error that has ended the connection names the shared one. timeout: as of
        AgentClient.
        """
        self._directory.needed(self.base, request.kind.type, request.fields)
        try:
            return self.agent.ask(request.about(self.base), timeout)
        except ClustertoolError as error:
            if error is not self.agent.dead:
                error.node = self.host.name
            raise

    def send(self, request: Request[Answered], number: int | None = None, now: float = 0.0) -> None:
        self.agent.send(request.about(self.base), number, now)

    def take(self, header: StreamFrame, payload: bytes) -> None:
        """Pass a frame to the sink, with the index of this client's host."""
        if self._sink is not None:
            self._sink(self.host.index, header, payload)

    def close(self) -> None:
        """Pass no more frames to the sink. The connection stays open."""
        super().close()
        self._directory.drop(self)


class SharedDirectory:
    """The agent on a shared directory, and the clients of its bases. sink: gets their frames.

    connect: opens an agent on a new connection; its frames are for route(). Raises Unreachable and other errors of that.
    needed: called before a request of this type and with these fields is sent about a base, in its thread. It may put there
    what the request reads.
    """

    agent: AgentClient  # of the newest connection; the caller sets that of the first one

    def __init__(self, connect: Callable[[], AgentClient], sink: Sink | None, needed: Needed) -> None:
        self._connect, self._sink, self.needed = connect, sink, needed
        self._opening = threading.Lock()
        self._failed: tuple[float, ClustertoolError] | None = None  # when it was tried last, and why it failed
        self._lock = threading.Lock()
        self._clients: list[RecordsClient] = []

    def add(self, host: Host, root: str, first: int) -> list[RecordsClient]:
        """Ask for the bases, and return a new client for each that has none, numbered from `first` on.

        host, root: of the shared directory. Until a job names its nodes, a client has the name of the host with its base.
        Raises Unreachable if the agent does not answer in 30 s, or the error that it answers.
        """
        known = {client.base for client in self._clients}
        found = self.agent.ask(BASES({}), _LISTING)["bases"]
        made: list[RecordsClient] = []
        for base in dict.fromkeys(found):
            if base not in known:
                name = f"{host.name}:{base}" if base else host.name
                place = replace(host, index=first + len(made), name=name, root_dir=posixpath.join(root, base))
                made.append(self._new(base, place))
        return made

    def client(self, base: str, host: Host) -> RecordsClient:
        """Return a new client of this base with the index and name of `host`, whose agent it replaces."""
        return self._new(base, replace(host, root_dir=""))

    def reopen(self, client: RecordsClient) -> RecordsClient:
        """Close a client, and return a new one of the same base on a new connection.

        The first client that asks for this opens the connection for all. If that fails, the error is raised, for all of them
        in the next second.
        """
        with self._opening:
            if self.agent is client.agent:
                if self._failed is not None and time.monotonic() - self._failed[0] < _PAUSE:
                    raise self._failed[1]
                try:
                    self.agent = self._connect()
                except ClustertoolError as error:
                    self._failed = time.monotonic(), error
                    raise
        client.close()
        return self._new(client.base, client.host)

    def route(self, _: int, header: StreamFrame, payload: bytes) -> None:
        """Pass a frame to the clients of its base, or to all where it names none.

        Called in the thread that reads the connection.
        """
        base = header.get("base")
        with self._lock:
            clients = [client for client in self._clients if base in (None, client.base)]
        for client in clients:
            client.take(header, payload)

    def drop(self, client: RecordsClient) -> None:
        """Remove a client: it gets no more frames."""
        with self._lock:
            self._clients = [one for one in self._clients if one is not client]

    def _new(self, base: str, host: Host) -> RecordsClient:
        """Make a client of a base, which gets its frames from now on."""
        client = RecordsClient(self, base, host, self._sink)
        with self._lock:
            self._clients.append(client)
        return client
