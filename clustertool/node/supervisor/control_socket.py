"""The control socket takes requests of other processes of this user on the node (model/wire/supervisor_messages).

The modification time of the socket's file is the supervisor's heartbeat.
"""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import time
from typing import TYPE_CHECKING, Callable, Dict, FrozenSet, List, NamedTuple, Optional, Tuple, Union

from clustertool.errors import ClustertoolError, NotFound, PreflightError, UsageError, as_wire
from clustertool.model.job.outcome import Key, Outcome, RankExit
from clustertool.model.job.state_names import JobState
from clustertool.model.paths import OURS
from clustertool.model.wire import supervisor_messages as messages
from clustertool.model.wire.frames import Decoder, FrameError, Header, head
from clustertool.node.mpi.launched_ranks import NOTICE, LaunchedRanks
from clustertool.node.storage import files
from clustertool.node.system import users

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec
    from clustertool.node.supervisor.coordinator.coordinator_link import CoordinatorLink
    from clustertool.node.supervisor.rank_table import LocalRank, RankTable

_NAME = f"{OURS}/control"
_MOST = 32  # connections
_WAITING = 128  # connections that the kernel keeps until they are accepted
_TIMEOUT = 2.0  # seconds for a request, and for each part of an answer to be read
_REQUEST = 1 << 16  # bytes
_TURN = 1 << 20  # bytes of an answer that are sent before others have their turn
Waiting = Tuple[str, str, int]  # the type of a request, and the process that it is about
Answer = Callable[[messages.SupervisorRequest], Union[Tuple[messages.SupervisorAnswer, bytes], Waiting]]
_ACCEPTED: messages.Accepted = {"type": "accepted"}


class UserRequests(NamedTuple):
    """What was requested on this node: the end of the job, and to release this node.

    by: what requested the end ("": not), with the exit code `code` and the state of the outcome. stop_at: when an agent has
    requested that, by the clock of the machine (0.0: not). leave_by: what requested the release ("": not).
    """

    by: str = ""
    code: int = 0
    stop_at: float = 0.0
    leave_by: str = ""
    state: JobState = JobState.STOPPED

    @property
    def stopped(self) -> Optional[Outcome]:
        """The outcome of a job whose end was requested, None if it was not."""
        return Outcome(self.state, self.code, "tool", self.by) if self.by else None

    @property
    def left(self) -> Optional[Outcome]:
        """The outcome of a node whose release was requested, None if it was not."""
        return Outcome(JobState.STOPPED, self.code, "tool", self.leave_by) if self.leave_by else None

    def leave(self, by: str, code: int, now: float) -> UserRequests:
        """Return a copy for a node that is shut down, with `code`, stop_at `now`, and `by` unless a release was requested.

        By stop_at, the node does not wait long for the coordinator's verdict.
        """
        return self._replace(leave_by=self.leave_by or by, code=code, stop_at=now)


class ControlClient:
    """A connection to the control socket, of the process `pid`, with its request and answer. until: when it is closed."""

    def __init__(self, sock: socket.socket, pid: int) -> None:
        self.pid = pid
        sock.setblocking(False)
        self._sock = sock
        self._decoder = Decoder(_REQUEST, 0)
        self._left: List[memoryview] = []  # of the answer
        self.until = time.monotonic() + _TIMEOUT

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether a part of the answer is not sent yet."""
        return bool(self._left)

    def receive(self) -> Optional[Header]:
        """Read what has arrived, and return the request once it is complete, else None.

        Raises FrameError for invalid data, and OSError if the connection is broken, or the client has closed it.
        """
        with contextlib.suppress(BlockingIOError):
            data = self._sock.recv(_REQUEST)
            if not data:
                raise ConnectionError("closed before the request")
            for header, _ in self._decoder.feed(data):
                return header
        return None

    def is_closed(self) -> bool:
        """Check whether the client has closed the connection. Drops what the client has sent after its request."""
        try:
            return not self._sock.recv(_REQUEST)
        except BlockingIOError:
            return False
        except OSError:
            return True

    def reply(self, header: Header, payload: bytes) -> None:
        """Make an answer ready to be sent, and allow the client two seconds to read from it."""
        self._left = [memoryview(part) for part in (head(header, len(payload)), payload) if part]
        self.until = time.monotonic() + _TIMEOUT

    def send(self) -> None:
        """Send as much of the answer as the kernel accepts now, at most 1 MiB; each sent part gives the client two seconds.

        Raises OSError.
        """
        room = _TURN
        with contextlib.suppress(BlockingIOError):
            while self._left and room > 0:
                sent = self._sock.send(self._left[0][:room])
                room -= sent
                self._left[0] = self._left[0][sent:]
                self._left = [part for part in self._left if part]
                self.until = time.monotonic() + _TIMEOUT

    def close(self) -> None:
        self._sock.close()


class ControlSocket:
    """The socket for requests to the supervisor. Call create() once, turn() each loop, touch() as heartbeat, and remove().

    It never waits for a client. A client that sends nothing, or reads nothing, is closed after two seconds, and before that
    where new ones come: the oldest of 32 leaves. A client that waits for the end of a process is not counted, and has no limit
    of time. job: the descriptor of the job's directory.
    """

    def __init__(self, job: int) -> None:
        self._job = job
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        self._made = False
        self._clients: List[ControlClient] = []  # the oldest first
        self._waiting: Dict[Waiting, ControlClient] = {}

    def create(self, spec: Spec) -> None:
        """Bind the socket in the job's directory, for this user only, and listen.

        Raises PreflightError if the job has a supervisor on this node, or the file system has no sockets. The path begins with
        the descriptor: the path of a socket has at most 107 bytes, and those of jobs are longer.
        """
        try:
            os.fchmod(self._sock.fileno(), 0o600)  # bind() gives the file this mode
            self._sock.bind(f"{files.path_of(self._job)}/{_NAME}")
            self._made = True
            self._sock.listen(_WAITING)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                what, fix = f"job {spec['job']} was started here already", "take another --job-id"
            else:
                what = f"cannot create a unix socket below {spec['root']}: {error.strerror}"
                fix = "set ROOT_DIR to a folder on a file system with unix sockets (ext4, xfs)"
            raise PreflightError(what, fix) from None

    def wires(self) -> List[Union[socket.socket, ControlClient]]:
        """List what the supervisor's loop waits for: the listening socket and all clients."""
        return [self._sock, *self._clients, *self._waiting.values()]

    def has_waiting_client(self, key: Waiting) -> bool:
        """Check whether a client waits for the answer to `key`. turn() has removed those that have closed."""
        return key in self._waiting

    def waiting_pids(self) -> List[int]:
        """Return the pids of the clients that wait for the end of a process."""
        return [client.pid for client in self._waiting.values()]

    def resolve(self, key: Waiting, answer: messages.SupervisorAnswer, payload: bytes = b"") -> None:
        """Send `answer` and its payload to the client that waits for `key`; do nothing if there is none."""
        client = self._waiting.pop(key, None)
        if client is not None:
            client.reply({**answer}, payload)
            self._clients.append(client)

    def turn(self, answer: Answer) -> None:
        """Accept clients, answer requests that have arrived, send more of the answers, and close clients that are done or late.

        answer: returns the answer to a request, or a key for which the client waits until resolve(). May raise
        ClustertoolError, which is sent to the client.
        """
        self._accept()
        for key, client in list(self._waiting.items()):
            if client.is_closed():
                self._waiting.pop(key).close()
        for client in list(self._clients):
            try:
                request = None if client.wants_write else client.receive()
                found = None if request is None else _compute_answer(request, answer)
                if found is not None and len(found) == 3:
                    self._let_wait(found, client)
                    continue
                if found is not None:
                    client.reply(*found)
                answered = client.wants_write
                client.send()
                done = answered and not client.wants_write
            except (OSError, FrameError):
                done = True
            if done or time.monotonic() > client.until:
                self._close(client)

    def _let_wait(self, key: Waiting, client: ControlClient) -> None:
        """Move a client to those that wait, under `key`. A client that waits for the same key already is closed."""
        self._clients.remove(client)
        if key in self._waiting:
            self._waiting.pop(key).close()
        self._waiting[key] = client

    def _accept(self) -> None:
        """Accept up to 32 clients of this user, and close others. With 32 connected ones, each new one closes the oldest.

        In a flood, each has one turn: those that sent their request with the connection are answered.
        """
        for _ in range(_MOST):
            try:
                sock, _ = self._sock.accept()
            except OSError:  # there is none, or no descriptor for it
                return
            peer = users.peer(sock)
            if peer.uid != os.getuid():
                sock.close()
                continue
            if len(self._clients) == _MOST:
                self._close(self._clients[0])
            self._clients.append(ControlClient(sock, peer.pid))

    def _close(self, client: ControlClient) -> None:
        """Close a client, and forget it."""
        self._clients.remove(client)
        client.close()

    def touch(self) -> None:
        """Set the time of the socket's file to now, as a heartbeat."""
        with contextlib.suppress(OSError):
            os.utime(_NAME, dir_fd=self._job, follow_symlinks=False)

    def remove(self) -> bool:
        """Remove the socket, and close all connections. Returns False, and does nothing, if create() has not made it.

        Then it belongs to another supervisor.
        """
        if not self._made:
            return False
        with contextlib.suppress(FileNotFoundError):
            os.unlink(_NAME, dir_fd=self._job)
        for wire in self.wires():
            wire.close()
        return True


def _compute_answer(message: Header, answer: Answer) -> Union[Tuple[Header, bytes], Waiting]:
    """Return the answer to a message and its payload, or the key that the client waits for. Errors become answers."""
    try:
        try:
            request = messages.read_request(message)
        except ValueError as error:
            raise UsageError(f"the supervisor does not know this request: {error}") from None
        found = answer(request)
        return found if len(found) == 3 else ({**found[0]}, found[1])
    except ClustertoolError as error:
        return {"type": "error", **as_wire(error)}, b""


class LauncherRequests:
    """The handler of requests of mpirun's helpers: agents that start daemons, and wrappers of ranks.

    adopt: makes a process a rank of the supervisor, by key and pid, or raises ClustertoolError.
    """

    def __init__(self, ranks: RankTable, control: ControlSocket, adopt: Callable[[Key, int], None]) -> None:
        self._ranks = ranks
        self._control = control
        self._adopt = adopt

    def answer(
        self, request: messages.LauncherRequest, link: CoordinatorLink, may_launch: bool
    ) -> Union[Tuple[messages.SupervisorAnswer, bytes], Waiting]:
        """Carry out a request of mpirun's helpers; return the answer and its payload, or the key that the sender waits for.

        Requests: start a daemon, wait for a rank's end, adopt a started rank, note that a rank was signalled. Raises NotFound
        for an unknown host, rank or process, or if nothing can be started now; UsageError for a second daemon on a host, or a
        rank that is not expected; PreflightError if a log cannot be opened. may_launch: this is the coordinator's node, and the
        job does not end.
        """
        if request["type"] == "launch-daemon":
            key = self._ranks.launched.daemon_of(request["host"])
            if not may_launch:
                raise NotFound("no MPI daemon can be started now", "start the job again")
            if self._control.has_waiting_client(("launch-daemon", *key)):
                raise UsageError(f"mpirun wants a second MPI daemon on {request['host']}", "name each host once")
            link.launch(key, request["command"])
            return ("launch-daemon", *key)
        role, number = request["role"], request["rank"]
        self._ranks.launched.require(role, number, self._ranks.find((role, number)))
        if request["type"] == "rank-end":
            self._ranks.launched.waits_for_end((role, number))
            return ("rank-end", role, number)
        if request["type"] == "rank-started":
            self._adopt((role, number), request["pid"])
        else:
            self._ranks.launched.signalled((role, number))
        return _ACCEPTED, b""

    def turn(self, link: CoordinatorLink) -> None:
        """Answer wrappers that came after their ranks had ended well, and agents whose daemons have ended on any node."""
        for key in self._ranks.launched.take_late():  # a rank may end before its wrapper has sent the request
            self.answer_wrapper(key)
        for exit in link.ended_daemons():
            self._resolve("launch-daemon", exit)

    def answer_wrapper(self, key: Key) -> None:
        """Send the exit of a rank to its waiting wrapper, if the rank has ended well and was not stopped.

        mpirun does not learn of a failure: it would end other ranks before the coordinator does.
        """
        rank = self._ranks.find(key)
        if rank is not None and rank.exit is not None and not rank.exit.failed and not rank.exit.stopped:
            self._resolve("rank-end", rank.exit)

    def _resolve(self, request: str, exit: RankExit) -> None:
        """Send the code and signal of an exit to the client that waits for it by a request of this type."""
        answer: messages.ProcessEnd = {"type": "process-end", "code": exit.code, "signal": exit.signal}
        self._control.resolve((request, *exit.key), answer)

    def may_have_ended(self, rank: LocalRank, exit: RankExit) -> bool:
        """Check whether a rank ended a moment ago as those do that mpirun ends, and mpirun may still report that.

        False for a rank that mpirun has not started, and once it is known that mpirun has ended the rank.
        """
        if not self._ranks.launched.starts(rank.key[0]) or self.has_ended(rank):
            return False
        return LaunchedRanks.may_be_ended(exit.code, exit.signal) and time.monotonic() - rank.ended_at <= NOTICE

    def has_ended(self, rank: LocalRank) -> bool:
        """Check whether mpirun has ended a rank: its wrapper got the signal as well, or is gone."""
        waits = self._control.has_waiting_client(("rank-end", *rank.key))
        return self._ranks.launched.ended_by_launcher(rank.key, waits)

    def helpers(self) -> FrozenSet[int]:
        """Return the pids of mpirun, its daemons and their descendants on this node, and of the waiting wrappers and agents.

        The latter may have lost their parents.
        """
        return LaunchedRanks.helpers([*self._ranks.launchers(), *self._control.waiting_pids()])
