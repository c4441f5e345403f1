"""The coordinator link joins a node's supervisor to the coordinator, which runs in this process or on another node.

CoordinatorServer is the link on the coordinator's own node. CoordinatorClient connects from another node, sends heartbeats, and
connects again until the loss timeout. In an elastic job a link has the node's lease.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Callable, Dict, List, Mapping, Optional, Sequence, Set, Tuple, cast

from clustertool.errors import UsageError
from clustertool.model.elastic.epochs import EpochEnd
from clustertool.model.elastic.lease import Lease
from clustertool.model.job.outcome import Key, Outcome, RankExit, describe_coordinator
from clustertool.model.job.progress import Metrics
from clustertool.model.job.state_names import JobState
from clustertool.model.shape import to_plain
from clustertool.model.wire.coordinator_messages import Incarnation, is_of_earlier_epoch, read_incarnation
from clustertool.model.wire.frames import Header
from clustertool.node.system import tls_link
from clustertool.node.system.process_clock import ProcessClock, boottime

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from clustertool.model.wire.coordinator_messages import MemberMessage, Order
    from clustertool.model.wire.spec_types import Spec
    from clustertool.node.supervisor.node_monitor import Reached

_RETRY = 0.05
# Beats of silence after which the cable counts as broken: a new connection is through as soon as it is whole again, where
# the old one would wait for its next retransmission.
_SILENCE = 3
_MAX_HEADER = 4 << 20
_NO_ANSWER = ("", "the port is open, but the coordinator does not answer")
_SILENT = ("", "no message from it any more")  # on a connection that was established
_ORDERS = ("start", "launch", "stop", "release", "finish")
_MOST_RANKS = 256  # ranks with reported progress: more do not fit into a message
_REPORT_AFTER = 3.0  # seconds without a connection
_FAREWELL = 1.0  # seconds for the last message

Cause = Tuple[str, str]  # the name of an errno, or "", and text
Record = Optional[Callable[..., None]]
Gone = Optional[Tuple[Incarnation, str]]
StoreEnd = Optional[Callable[[], float]]


class LeaseKeeper:
    """The lease of a node in an epoch of an elastic job, kept by what it sends to the coordinator and receives from it.

    Call stamp() for each beat, read() for each message of the coordinator, and check() each loop, before orders are obeyed. The
    node may have ranks once the lease is armed, by the first order. Before that, a lease that has ended may come back. seconds:
    how long it lasts. store_end: by when another epoch may begin, since this node has not reached the store of the job; None if
    there is no store. All times are of CLOCK_BOOTTIME.
    """

    def __init__(self, seconds: float, store_end: Optional[Callable[[], float]] = None) -> None:
        self.armed = False
        self._store_end = store_end
        self._end_taken = False
        self._lease = Lease(seconds, boottime())

    @property
    def seconds(self) -> float:
        """How long the lease lasts."""
        return self._lease.seconds

    @property
    def ended(self) -> bool:
        """Whether the lease has ended."""
        return self._lease.ended

    @property
    def end(self) -> float:
        """The time by which the node's ranks must be dead, by lease and store; infinite before the first order."""
        return min(self._lease.end, self._store_deadline) if self.armed else math.inf

    @property
    def _store_deadline(self) -> float:
        """When the node must have reached the store of the job again; infinite if there is no store."""
        return math.inf if self._store_end is None else self._store_end()

    @property
    def lacks_store(self) -> bool:
        """Whether the node has not reached the store of the job until its deadline."""
        return boottime() >= self._store_deadline

    def stamp(self, message: Header) -> Header:
        """Return a copy of the beat with the lease's next number, and record in the lease when that number was sent."""
        self._lease = self._lease.send(boottime())
        return {**message, "beat": self._lease.number}

    def read(self, message: Header) -> None:
        """Renew the lease by the number of the acknowledged beat in a message of the coordinator, if it has one.

        Raises ValueError if that is no integer.
        """
        seen = message.get("seen", 0)
        if type(seen) is not int:
            raise ValueError("an acknowledgement that is no number")
        self._lease = self._lease.acknowledge(seen)

    def check(self) -> bool:
        """Return whether the lease has ended. If it is armed, end it now where its time or that of the store has passed.

        An ended lease never comes back.
        """
        if self.armed:
            self._lease = self._lease.check(boottime())
            if self.lacks_store:
                self.lose()
        return self.ended

    def take_end(self) -> bool:
        """Return True at the first call after the lease has ended, else False."""
        new = self.ended and not self._end_taken
        self._end_taken = self.ended
        return new

    def lose(self) -> None:
        """End the lease at once: the guard has ended the node's ranks because of it, or the store was not reached."""
        self._lease = self._lease._replace(ended=True)


class OwnLease(LeaseKeeper):
    """The lease of the coordinator's own node, which each turn of its loop renews."""

    def __init__(self, seconds: float, store_end: Optional[Callable[[], float]]) -> None:
        super().__init__(seconds, store_end)
        self.armed = True

    @property
    def why(self) -> str:
        """The reason why the lease has ended, as text."""
        if self.lacks_store:
            return "it did not reach the store of the job"
        return f"it did not run for {self.seconds:g} s"

    def check(self) -> bool:
        """Renew the lease, unless its time or that of the store has passed, which ends it. Return whether it has ended."""
        self._lease = self._lease.renew(boottime())
        if self.lacks_store:
            self.lose()
        return self.ended


def may_leave(spec: Spec, coordinates: bool) -> bool:
    """Return whether the job is elastic and can go on without this node: if the node coordinates it, only with a store.

    coordinates: whether this is the coordinator's node.
    """
    return "elastic" in spec and not (coordinates and not spec["elastic"]["store"])


def require_may_leave(spec: Spec, coordinates: bool) -> None:
    """Raise UsageError, with the reason, where may_leave() is False. coordinates: see there."""
    if "elastic" not in spec:
        what = f"job {spec['job']} is not elastic: {spec['name']} belongs to it until it ends"
        raise UsageError(what, "stop the job, or start it with --nnodes MIN:MAX")
    if not may_leave(spec, coordinates):
        what = f"{spec['name']} coordinates the job, which has no --elastic-server: it cannot leave"
        raise UsageError(what, "stop the job, or release another node")


class CoordinatorLink:
    """The connection of a node's supervisor to the coordinator: messages go there by post(), and orders come into `orders`.

    Call turn() each loop, post() for each message to the coordinator, and close() once. This class has no connection:
    CoordinatorServer, on the coordinator's own node, and CoordinatorClient have one.
    """

    def __init__(self) -> None:
        self.orders: List[Order] = []  # of the coordinator; the supervisor removes those that it obeys
        self.attempt = 0  # of the job, as this node knows it
        self.progress: Sequence[Reached] = ()  # of this node's ranks
        self.metrics: Mapping[Key, Metrics] = {}  # of this node's ranks, with METRICS_FILE
        # Seconds for which the running trainers of this node have made no progress; None without any.
        self.quiet: Optional[float] = None
        self.other_metrics: Dict[Key, Metrics] = {}  # on the coordinator's node: of ranks of other nodes
        self.lease: Optional[LeaseKeeper] = None  # of this node, in an elastic job

    @property
    def connecting(self) -> bool:
        """Whether turn() must be called to try to connect again, since no descriptor wakes the caller; here False."""
        return False

    @property
    def done(self) -> bool:
        """Whether this node need not stay for the other nodes: they have the verdict, or this is not the coordinator's node."""
        return True

    @property
    def loss(self) -> Optional[Outcome]:
        """The outcome, as this node knows it, if the coordinator was silent for too long, or the lease has ended; here None."""
        return None

    def lose_lease(self) -> None:
        """End the lease of this node, if it has one: the guard has ended the ranks, since the supervisor did not run."""
        if self.lease is not None:
            self.lease.lose()

    def epoch_end(self, outcome: Outcome) -> EpochEnd:
        """Build the record of how the epoch of an elastic job has ended, as this node knows it. outcome: of the epoch."""
        lease = self.lease
        return EpochEnd(self.attempt, outcome.reason, {}, silent=lease is not None and self.loss is not None)

    @property
    def silent(self) -> bool:
        """Whether a node was lost because nothing came from it: the program that started its supervisor waits for it then."""
        return False

    def wires(self) -> Sequence[FileDescriptorLike]:
        """Return the connections whose descriptors wake the caller's loop; here none."""
        return []

    def post(self, message: MemberMessage) -> None:
        """Do nothing; a subclass sends a message of this node's supervisor to the coordinator, or keeps it until it can."""
        return

    def note(self, kind: str, fields: Dict[str, object]) -> None:
        """Do nothing; the coordinator's own node makes a notification of an event, if it is of such a type."""

    def launch(self, key: Key, command: str) -> None:
        """Do nothing; the coordinator's own node, the only one with mpirun, orders a node to start a daemon of it by `command`.

        key: the daemon's process, which names the node.
        """

    def ended_daemons(self) -> List[RankExit]:
        """Return the exits of mpirun's daemons, of all nodes, that have become known since the last call; here none."""
        return []

    def turn(self, ready: Set[int]) -> None:
        """Do nothing; a subclass reads and sends what is due, once. ready: descriptors that can be read or written."""

    def close(self, outcome: Optional[Outcome] = None) -> None:
        """Do nothing; a subclass closes the connections, after the last messages.

        outcome: with which the supervisor ends, None if it has none.
        """


class ConnectionReport:
    """The state of the connection to the coordinator, and the events about it: each new cause of silence, and its end.

    `record` writes an event; without it nothing is recorded. All times are of the client's own clock.
    """

    def __init__(self, endpoint: str, record: Record) -> None:
        self.up = False  # the coordinator answers on the present connection
        self.joined = False  # it has answered once
        self.cause: Optional[Cause] = None  # why the last connection failed
        self._endpoint = endpoint
        self._record = record
        self._down = (0.0, time.time())  # since when it does not answer, by the own clock and by that of the machine
        self._recorded: Optional[Cause] = None

    def broken(self, now: float, why: Cause) -> None:
        """Record that the connection has ended, why, and, if the coordinator answered on it, since when it does not answer."""
        if self.up:
            self._down = (now, time.time())
        self.up, self.cause = False, why

    def turn(self, now: float, why: Cause) -> None:
        """Write an event "unconnected" for each new `why` after 3 s without an answer, and "connected" when there is one."""
        if self._record is None:
            return
        if self.up:
            if self._recorded:
                self._record("connected")
            self._recorded = None
        elif now - self._down[0] >= _REPORT_AFTER and why != self._recorded:
            name, text = self._recorded = why
            since = round(self._down[1], 3)
            self._record("unconnected", endpoint=self._endpoint, errno=name, why=text, since=since, again=self.joined)


class CoordinatorClient(CoordinatorLink):
    """The link of a node that does not coordinate: it connects to the coordinator, sends heartbeats, and connects again.

    me: this process. gone: the supervisor in whose place a guard joins, and why it has died. store_end: see LeaseKeeper.

    The coordinator may be silent for the loss timeout, or until its first order for the time that all nodes need to join. Only
    seconds in which this process ran are counted. In an elastic job it is the lease of this node that counts, from the first
    order on.
    """

    def __init__(
        self, spec: Spec, me: Incarnation, record: Record = None, gone: Gone = None, store_end: StoreEnd = None
    ) -> None:
        """Create the link, and the node's lease in an elastic job. No connection is opened before the first turn()."""
        super().__init__()
        self._spec = spec
        self._me = me
        self._gone = gone
        self._loss_timeout = spec["policy"]["loss_timeout"]
        self._join_timeout = tls_link.join_patience(self._loss_timeout, len(spec["header"]["nodes"]))
        if spec["policy"]["timeout"]:  # the coordinator waits no longer
            self._join_timeout = min(self._join_timeout, spec["policy"]["timeout"] + self._loss_timeout)
        self._ordered = False  # the coordinator has given an order: all nodes have joined, or the job ends
        self._received_at = 0.0
        self._coordinator: Optional[Incarnation] = None  # the one that this process obeys
        self._context = tls_link.context(spec["certificate"], spec["key"], server=False)
        self._mail = tls_link.Mailbox()
        self._wire: Optional[tls_link.TlsLink] = None
        self._report = ConnectionReport(spec["lead"]["endpoint"], record)
        self._clock = ProcessClock()
        self._tried_at = self._retry_at = self._beat_at = 0.0
        self._sent: Sequence[Reached] = ()  # the progress that the coordinator has
        self._sent_metrics = self.metrics
        if "elastic" in spec and gone is None:
            self.lease = LeaseKeeper(spec["elastic"]["lease"], store_end)

    @property
    def connecting(self) -> bool:
        """Whether there is no connection, so that turn() must be called to try again."""
        return self._wire is None

    @property
    def joined(self) -> bool:
        """Whether the coordinator has answered once."""
        return self._report.joined

    @property
    def loss(self) -> Optional[Outcome]:
        """The outcome if the lease has ended, or nothing came from the coordinator for too long; else None.

        Only the lease counts once it is armed; else the loss timeout, or before the first order the join timeout. The state is
        NEXT_EPOCH in an elastic job, else LOST. turn() reads first what has arrived.
        """
        timeout = self._loss_timeout if self._ordered else self._join_timeout
        coordinator, name, lease = self._spec["lead"], self._spec["name"], self.lease
        if lease is not None and lease.armed:
            if not lease.ended:
                return None
            brief = f"the lease of {name} has ended"
            where = describe_coordinator(coordinator["name"], coordinator["endpoint"])
            why = f"{where} has acknowledged nothing for {lease.seconds:g} s"
            reason = f"{brief}: it did not reach the store of the job" if lease.lacks_store else f"{brief}: {why}"
            return Outcome(JobState.NEXT_EPOCH, 75, "tool", reason, node=coordinator["node"], brief=brief)
        if self._clock.now - self._received_at <= timeout:
            return None
        if self.joined:
            brief = f"node {coordinator['name']} is lost"
            why = f"it coordinates the job, and {name} has received nothing from it for {self._loss_timeout:g} s"
        else:
            errno_name, text = self._failure_cause()
            brief = f"{name} cannot connect to {describe_coordinator(coordinator['name'], coordinator['endpoint'])}"
            why = f"{text} ({errno_name})" if errno_name else text
        state = JobState.LOST if lease is None else JobState.NEXT_EPOCH
        return Outcome(state, 75, "tool", f"{brief}: {why}", node=coordinator["node"], brief=brief)

    @property
    def silent(self) -> bool:
        """Whether the coordinator is lost: see `loss`."""
        return self.loss is not None

    def wires(self) -> List[tls_link.TlsLink]:
        """Return the connection in a list, [] if there is none."""
        return [self._wire] if self._wire is not None else []

    def post(self, message: MemberMessage) -> None:
        """Give a message its number, and keep it until it is acknowledged; send it now if the connection is secure."""
        numbered = self._mail.post({**message, "sender": self._me})
        if self._wire is not None and self._wire.secure:
            self._wire.send(numbered)

    def turn(self, ready: Set[int]) -> None:
        """Connect, or read and send on the connection; then record the state of the connection, and check the lease.

        A connection that breaks, or has messages that no coordinator sends, is closed, and a new one is tried later.
        """
        now = self._clock.turn()
        if self._wire is not None:
            try:
                self._exchange(self._wire, now)
            except (ConnectionError, ValueError) as error:
                self._drop(now, tls_link.describe_failure(error))
        elif now >= self._retry_at:
            self._connect(now)
        self._report.turn(now, self._failure_cause())
        if self.lease is not None:
            self.lease.check()

    def _exchange(self, wire: tls_link.TlsLink, now: float) -> None:
        """Join if the handshake is complete, send a beat if it is due, read messages, and add new orders to `orders`.

        Closes a connection that was silent for too long. The first order arms the lease. Raises ConnectionError, or ValueError
        for messages that no coordinator sends.
        """
        fresh = not wire.secure
        came = wire.turn()
        if fresh and wire.secure:
            self._join(wire)
        self._send_beat(wire, now)
        if came:
            self._report.joined = self._report.up = True
            self._received_at = now
        elif now > self._give_up_at(wire):
            self._drop(now, _SILENT if self._report.up else _NO_ANSWER if wire.connected else tls_link.TIMED_OUT)
        self._require_coordinator(came)
        new = [message for message in came if self._mail.take(message)]
        if any(message.get("type") in _ORDERS for message in new):
            self._ordered, self._beat_at = True, 0.0
            if self.lease is not None:
                self.lease.armed = True
            self._send_beat(wire, now)  # the coordinator allows more time until it has this acknowledgement
        self.orders += cast("List[Order]", new)

    def _require_coordinator(self, messages: Sequence[Header]) -> None:
        """Raise ValueError for messages of another process than the first that answered as the coordinator.

        In an elastic job, also for those of an earlier epoch; the acknowledgements in the messages renew the lease.
        """
        for message in messages:
            sender = read_incarnation(message.get("sender"))
            self._coordinator = self._coordinator or sender
            if sender != self._coordinator:
                raise ValueError("another process answers as the coordinator")
            if self.lease is not None:
                if is_of_earlier_epoch(message, self._spec["elastic"]["epoch"]):
                    raise ValueError("the coordinator of an earlier epoch answers")
                self.lease.read(message)

    def _stamped(self, message: Header) -> Header:
        """Copy a message, with the number of the last received one, the attempt, and this process as the sender."""
        return {**message, "ack": self._mail.got, "attempt": self.attempt, "sender": self._me}

    def _send_beat(self, wire: tls_link.TlsLink, now: float) -> None:
        """Send a heartbeat if one is due and the connection is secure, with the progress of up to 256 ranks if it has changed.

        The times of the progress are ages in seconds, since the clock of the coordinator differs.
        """
        if not wire.secure or now < self._beat_at:
            return
        message: Header = {"type": "beat"}
        if self.progress is not self._sent:
            self._sent, t = self.progress, time.time()
            message["ranks"] = [[*one[:4], round(max(0.0, t - one[4]), 1)] for one in self._sent[:_MOST_RANKS]]
        if self.quiet is not None:
            message["quiet"] = round(self.quiet, 1)
        if self.metrics is not self._sent_metrics:
            self._sent_metrics = self.metrics
            message["metrics"] = [[*key, to_plain([*one])] for key, one in [*self.metrics.items()][:_MOST_RANKS]]
        wire.send(self._stamped(message if self.lease is None else self.lease.stamp(message)))
        wire.flush()
        self._beat_at = now + tls_link.heartbeat_interval(self._loss_timeout)

    def close(self, outcome: Optional[Outcome] = None) -> None:
        """Close the connection as leave() does, and wait at most 1 s."""
        self.leave(_FAREWELL)

    def leave(self, seconds: float) -> None:
        """Send that this node leaves and has all messages, so that the coordinator does not wait for it; close the connection.

        Waits at most `seconds` for the coordinator to close it. Does nothing without a secure connection.
        """
        if self._wire is None or not self._wire.secure:
            return
        self._wire.send(self._stamped({"type": "beat", "bye": True}))
        self._wire.finish(seconds)
        self._drop(self._clock.turn(), _NO_ANSWER)

    def _give_up_at(self, wire: tls_link.TlsLink) -> float:
        """Compute when this connection counts as broken, by the client's clock.

        If the coordinator answers: after three beats of silence. Else half the loss timeout (at least 1 s) after the connection
        was tried, or half the join timeout while a connected node waits for its first order: a coordinator to which many
        connect at once answers late.
        """
        if self._report.up:
            return self._received_at + tls_link.heartbeat_interval(self._loss_timeout) * _SILENCE
        waiting = wire.connected and not self._ordered
        return self._tried_at + (self._join_timeout / 2 if waiting else max(1.0, self._loss_timeout / 2))

    def _connect(self, now: float) -> None:
        """Begin to connect to the coordinator, without waiting; record the cause of an error. The next try is 0.05 s later."""
        self._tried_at, self._retry_at = now, now + _RETRY
        coordinator = self._spec["lead"]
        try:
            sock = tls_link.dial(coordinator["host"], coordinator["port"])
        except OSError as error:
            self._report.cause = tls_link.describe_failure(error)
            return
        self._wire = tls_link.TlsLink(sock, self._context, server=False, max_header=_MAX_HEADER)

    def _join(self, wire: tls_link.TlsLink) -> None:
        """Send the join message with the job's token, and after it all messages that the coordinator has not acknowledged."""
        self._sent = ()
        hello: Header = {"type": "join", "node": self._spec["node"], "token": self._spec["token"]}
        if self._gone:
            hello["of"], hello["gone"] = self._gone
        wire.send(self._stamped(hello if self.lease is None else self.lease.stamp(hello)))
        for message in self._mail.kept():
            wire.send(message)

    def _drop(self, now: float, why: Cause) -> None:
        """Close the connection, if any, record why it is broken, and set the time of the next attempt."""
        if self._wire is not None:
            self._wire.close()
        self._wire = None
        self._report.broken(now, why)
        self._retry_at = now + _RETRY

    def _failure_cause(self) -> Cause:
        """Return why the last connection failed. Before one has failed: a timeout, or that the coordinator does not answer."""
        pending = self._wire is None or not self._wire.connected
        return self._report.cause or (tls_link.TIMED_OUT if pending else _NO_ANSWER)


def report_death(spec: Spec, me: Incarnation, supervisor: Incarnation, why: str, seconds: float) -> None:
    """Report to the coordinator, for a guard, that its supervisor has died and why.

    Returns when the coordinator has answered, or after `seconds`.
    """
    link = CoordinatorClient(spec, me, gone=(supervisor, why))
    link.attempt = spec.get("attempt", 0)
    end = time.monotonic() + seconds
    while not link.joined and time.monotonic() < end:
        link.turn(set())
        time.sleep(0.005)
    link.leave(0.0)
