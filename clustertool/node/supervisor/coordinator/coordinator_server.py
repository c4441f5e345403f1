"""The coordinator's server turns messages, silence and time into events for decide(), and its actions into messages."""

from __future__ import annotations

import hmac
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, FrozenSet, Iterator, List, Optional, Sequence, Set, Tuple, cast

from clustertool.errors import PreflightError
from clustertool.model.elastic.epochs import EpochEnd
from clustertool.model.elastic.lease import ends_by
from clustertool.model.job.hang import RankTrace, describe
from clustertool.model.job.job_steps import JobSteps
from clustertool.model.job.outcome import MESSAGE_FIELDS, Key, Outcome, RankExit, describe_coordinator, some
from clustertool.model.job.progress import Metrics
from clustertool.model.job.state_names import JobState
from clustertool.model.roles import MPI_DAEMON
from clustertool.model.shape import read, to_plain
from clustertool.model.wire.coordinator_messages import Incarnation, is_of_earlier_epoch, read_incarnation
from clustertool.model.wire.frames import Header
from clustertool.node.supervisor.allocation import Allocation
from clustertool.node.supervisor.coordinator import epoch_decisions, job_decisions
from clustertool.node.supervisor.coordinator.coordinator_link import CoordinatorLink, OwnLease, StoreEnd
from clustertool.node.supervisor.coordinator.hang_watch import HangWatch
from clustertool.node.supervisor.coordinator.member_connections import CoordinatorListener, JobMember, JobMembers
from clustertool.node.supervisor.coordinator.standby_offers import StandbyOffer, StandbyOffers
from clustertool.node.supervisor.notifier import Notifier
from clustertool.node.system.process_clock import ProcessClock, boottime
from clustertool.node.system.tls_link import TlsLink, context, listen

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from clustertool.model.field_types import RankOutput
    from clustertool.model.wire.coordinator_messages import DaemonOrder, MemberMessage, Order, StartOrder, StopOrder
    from clustertool.model.wire.spec_types import Spec

_LEAST = 5.0  # seconds for the ends of mpirun and of its ranks to become known
_BACKLOG = 1024
_LONGEST_PAUSE = 30.0  # seconds before a new attempt: 1, 2, 4, ... up to this
_MALFORMED = (KeyError, TypeError, ValueError, OverflowError)
_LONGEST_REASON = 200
# Seconds between the first failure and the stop. The ranks of a job fail of the same error (a module that is missing, a wrong
# setting) a few 10 ms apart; a rank that is stopped in this time would count as a victim of an error that it has itself.
_HOLD = 0.5
# Seconds after the first failure in which its cause may arrive: a rank that others have lost may still write its traceback or
# its core while they fail of the closed connection.
_CAUSE = 2.0
_LARGE = 1e18  # steps and seconds


class LauncherWatch:
    """The watch of how mpirun and its daemons end. limit: seconds that mpirun and its ranks may wait for the other's end."""

    def __init__(self, grace: float) -> None:
        self.limit = max(_LEAST, grace)
        self._waits = ""
        self._since = 0.0
        self._ended: List[RankExit] = []

    def note(self, exits: Sequence[RankExit]) -> None:
        """Keep those exits that are of daemons of mpirun, for take_ended()."""
        self._ended += [exit for exit in exits if exit.role == MPI_DAEMON]

    def take_ended(self) -> List[RankExit]:
        """Return the exits of daemons that were noted since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def is_exceeded(self, now: float, waits: str) -> bool:
        """Check whether the job has waited for the same thing for longer than the limit; record when another wait begins.

        waits: for what it waits now, "" for nothing.
        """
        if waits != self._waits:
            self._waits, self._since = waits, now
        return bool(waits) and now - self._since > self.limit


class JobLimits:
    """The time limit of a job, the limit of its time without a laptop, and that of a wait for mpirun.

    timeout, lease: seconds; 0: there is no limit. grace: see LauncherWatch. All times are of time.monotonic().
    """

    def __init__(self, timeout: float, lease: float, now: float, grace: float = 0.0) -> None:
        self.launcher = LauncherWatch(grace)
        self._timeout, self._lease = timeout, lease  # 0 also when it has passed
        self._began = self._attached_at = now

    def include_earlier_epochs(self, age: float, unattended: float) -> None:
        """Start both limits earlier, so that earlier epochs count.

        age: seconds since the first epoch began. unattended: seconds since a laptop was attached.
        """
        self._began -= age
        self._attached_at -= unattended

    def unattended(self, now: float) -> float:
        """Return for how many seconds no laptop was attached."""
        return now - self._attached_at

    def attached(self, now: float) -> None:
        """Record that a laptop follows the job at the time `now`, which renews the limit for jobs without a laptop."""
        self._attached_at = now

    def stops_due(self, now: float, missing: Callable[[], str]) -> Iterator[job_decisions.StopAsked]:
        """Yield a StopAsked for each limit that has passed, once per job: of its time, and of its time without a laptop.

        missing: describes what the job waits for, or returns "".
        """
        if self._timeout and now - self._began > self._timeout:
            brief = f"the job exceeded its time limit (--timeout {self._timeout:g} s)"
            self._timeout = 0.0
            what = missing()
            waited = f"; it waited for {what}" if what else ""
            yield job_decisions.StopAsked(f"{brief}{waited}", 124, JobState.TIMEOUT, brief)
        if self._lease and now - self._attached_at > self._lease:
            self._lease = 0.0
            yield job_decisions.StopAsked(f"no laptop was attached for {now - self._attached_at:.0f} s (--lease)", 143)


class CoordinatorServer(CoordinatorLink):
    """The link of the coordinator's own node: it connects all members, turns messages into events, and actions into orders.

    me: this node's own supervisor, whose messages come by post(). record: writes an event of the coordinator. allocation: knows
    why an engine ends the job. store_end: of an elastic job with a store, see OwnLease.
    """

    def __init__(
        self, spec: Spec, me: Incarnation, record: Callable[..., None], allocation: Allocation, store_end: StoreEnd
    ) -> None:
        """Listen on the coordinator's port, and decide that this node has joined.

        Raises PreflightError if the port cannot be used.
        """
        super().__init__()
        policy, coordinator = spec["policy"], spec["lead"]
        self._spec = spec
        self._me = me
        self._record = record
        self._allocation = allocation
        self._outside = False  # the job is stopped because of a signal
        self._notifier = Notifier(spec, record)
        made = epoch_decisions.shape_of(spec)
        if made.first and "elastic" not in spec:
            record("restart", attempt=made.first, pause=0.0)
        if made.first:
            self.note("restart", {"attempt": made.first})
        blamed = tuple(spec["elastic"]["blamed"]) if "elastic" in spec else ()
        steps = read(JobSteps, to_plain(spec["elastic"]["steps"]) or {}) if "elastic" in spec else JobSteps()
        self._state = job_decisions.State(made, attempt=made.first, blamed=blamed, steps=steps)
        self._clock = ProcessClock()
        others = sorted(made.nodes - {spec["node"]})
        self._members = JobMembers(others, policy["loss_timeout"], self._clock, "elastic" in spec)
        try:
            sock = listen(coordinator["host"], coordinator["port"], _BACKLOG)
        except OSError as error:
            what = f"port {coordinator['port']} (the coordinator's) cannot be used: {error.strerror}"
            raise PreflightError(what, "set LEAD_PORT") from None
        self._listener = CoordinatorListener(context(spec["certificate"], spec["key"], server=True), sock, len(others))
        self._limits = JobLimits(policy["timeout"], policy["lease"], time.monotonic(), policy["grace"])
        self._standby: Optional[StandbyOffers] = None  # in an elastic job
        if "elastic" in spec:
            elastic = spec["elastic"]
            self.lease = OwnLease(elastic["lease"], store_end)
            late = len(elastic["waiting"]) + elastic["absent"]
            self._standby = StandbyOffers(policy["loss_timeout"], len(made.nodes), elastic["maximum"], late)
            self._limits.include_earlier_epochs(elastic.get("age", 0.0), elastic.get("unattended", 0.0))
        trainers = {node for (role, _), node in made.node_of.items() if role == "trainer"}
        self._hang = HangWatch(policy["hang_timeout"], made.nodes, trainers) if policy["hang_timeout"] else None
        self._finished_at: Optional[float] = None
        # When a new attempt begins, and with which orders.
        self._restart: Optional[Tuple[float, List[StartOrder]]] = None
        self._stop_at: Optional[float] = None  # when the stop is sent that waits for further failures
        self._failed_at = 0.0  # when the phase began: in an ending, when the first failure was known
        self._decide(job_decisions.Joined(spec["node"]))

    # -- for the supervisor's loop --

    def wires(self) -> List[FileDescriptorLike]:
        """Return what wakes the loop: the listener, its new connections, and those of members and machines on standby."""
        return [*self._listener.wires(), *self._members.wires(), *(self._standby.wires() if self._standby else [])]

    @property
    def done(self) -> bool:
        """Whether the job is over, and all nodes that are not lost know it or have left, or the loss timeout has passed.

        It also waits while an attached laptop may confirm a notification.
        """
        if self._finished_at is None or self._notifier.offered:
            return False
        late = self._clock.now - self._finished_at > self._spec["policy"]["loss_timeout"]
        return late or not self._members.unacknowledged(self._state.lost)

    def epoch_end(self, outcome: Outcome) -> EpochEnd:
        """Build the record of the epoch's end: the nodes that leave, the used restarts, and the lost nodes that had joined.

        A lost node has the time of its last message: it may have ranks until its lease ends.
        """
        state, members = self._state, self._members.nodes
        lost = {node: members[node].last_at for node in sorted(state.lost & set(members)) if members[node].joined}
        used = epoch_decisions.restarts_used(self._spec["elastic"], state)
        unattended = self._limits.unattended(time.monotonic())
        end = EpochEnd(state.attempt, outcome.reason, lost, tuple(sorted(state.left)), used, unattended=unattended)
        return end._replace(blamed=state.blamed, steps=state.steps.next_attempt(state.counted))

    @property
    def silent(self) -> bool:
        """Whether the supervisor of a lost node may still run: its guard has not reported its death, and it has not left."""
        lost = (member for node, member in self._members.nodes.items() if node in self._state.lost)
        return any(not member.left for member in lost)

    def note(self, kind: str, fields: Dict[str, object]) -> None:
        """Make a notification of an event of this node's supervisor, if it is of such a type."""
        self._notifier.note(kind, fields)

    def launch(self, key: Key, command: str) -> None:
        """Order the node of the process `key` to start a daemon of mpirun by `command`; for this node, add it to `orders`."""
        order: DaemonOrder = {"type": "launch", "command": command, "attempt": self._state.attempt, "sender": self._me}
        node = self._state.shape.node_of[key]
        if node == self._spec["node"]:
            self.orders.append(order)
        else:
            self._members.post_to(node, dict(order))

    def ended_daemons(self) -> List[RankExit]:
        """Return the exits of mpirun's daemons, of all nodes, that have become known since the last call."""
        return self._limits.launcher.take_ended()

    def turn(self, ready: Set[int]) -> None:
        """Read the connections that are ready, send heartbeats that are due, and decide on messages, silence and time limits.

        After this process was blocked, `ready` is old, and all connections are read.
        """
        now = self._clock.turn()
        all_ready = self._clock.napped
        for wire, messages in self._listener.turn(now, None if all_ready else ready):
            self._admit(wire, messages)
        for node, member in self._members.nodes.items():
            if member.wire is not None and (all_ready or member.wire.fileno() in ready):
                self._read_member(node, member)
        if self._standby is not None:
            for offer in self._standby.turn(now, None if all_ready else ready):
                self._record("standby-left", name=offer.name, address=offer.address)
        self._keep_lease()  # what was acknowledged so far came before
        self._members.beat(self._stamped({"type": "beat"}))
        self._watch_silence(now)
        self._watch_time(time.monotonic())
        self._watch_progress(now)
        self._notifier.turn()
        outcome = self._allocation.turn()
        if outcome is not None:
            self._decide(job_decisions.Explained(outcome))

    def _keep_lease(self) -> None:
        """Renew this node's own lease; once it has ended, decide so, and acknowledge no beats any more."""
        if isinstance(self.lease, OwnLease) and not self.lease.ended and self.lease.check():
            self._lose_lease(self.lease.why)

    def _lose_lease(self, why: str) -> None:
        """Acknowledge no beats of members any more, and decide that this node's lease has ended."""
        self._members.acknowledge_no_more()
        self._decide(epoch_decisions.LeaseEnded(self._spec["node"], why))

    def lose_lease(self) -> None:
        """End this node's own lease, as CoordinatorLink, and decide so."""
        super().lose_lease()
        if isinstance(self.lease, OwnLease):
            self._lose_lease(self.lease.why)

    def post(self, message: MemberMessage) -> None:
        """Turn a message of this node's own supervisor into an event, and decide on it; ignore messages of unknown types."""
        event = self._read_event(self._spec["node"], dict(message))
        if event is not None:
            self._decide(event)

    def _read_event(self, node: int, message: Header) -> Optional[epoch_decisions.Event]:
        """Build the event for a message of a supervisor, or return None if its type has none. Raises one of _MALFORMED.

        The message "attached" renews the time without a laptop, and is for notifications. A stop because of a signal is noted
        for the orders to stop. A stop of a leaving node in an elastic job becomes a ShutDown.
        """
        if message.get("type") == "attached":
            self._limits.attached(time.monotonic())
            self._notifier.attached(message)
        elif message.get("type") == "sampled" and self._hang is not None:
            traces = [read(RankTrace, one, "a trace") for one in message["traces"]]
            own = self._state.shape.on(node)
            self._hang.note_traces(node, message["of"], [one for one in traces if (one.role, one.rank) in own])
        event = _parse_event(self._state.shape.on(node), node, message)
        if not isinstance(event, job_decisions.StopAsked):
            return event
        if event.outside and not self._state.ending:
            self._outside = True
        stop = event._replace(outside=event.outside and self._allocation.present)  # an engine could answer
        if self._standby is None or not message.get("leaves"):
            return stop
        return epoch_decisions.ShutDown(node, stop, self._standby.count)

    # -- members --

    def _admit(self, wire: TlsLink, messages: List[Header]) -> None:
        """Handle the first messages of a new connection: connect a member, keep an offer of a machine, or close the connection.

        A member needs the job's token, its node id and the incarnation that joined first, or the guard's report of that one's
        death. It gets a welcome and all orders that it has not acknowledged; a first join or reported death becomes an event.
        """
        hello = messages[0]
        node = hello["node"] if isinstance(hello.get("node"), int) else -1
        member = self._members.nodes.get(node)
        token = str(hello.get("token", "")).encode(errors="replace")
        if hello.get("type") == "offer":
            return self._take_offer(self._standby, wire, hello) if self._standby is not None else self._refuse(wire)
        right = hmac.compare_digest(token, self._spec["token"].encode())
        if hello.get("type") != "join" or member is None or not right:
            return wire.close()
        try:
            sender = read_incarnation(hello.get("sender"))
            supervisor = read_incarnation(hello.get("of")) if hello.get("gone") else sender
            earlier = self._standby is not None and is_of_earlier_epoch(hello, self._state.shape.first)
        except ValueError:
            return wire.close()
        if earlier or member.sender not in (None, supervisor):
            return wire.close()
        self._read_member(node, member)  # what the old connection still has
        self._members.connect(member, wire, sender)
        if not self._take_message(node, member, hello):
            return None
        wire.send(self._stamped({"type": "welcome", "ack": member.mail.got}))  # the connection is accepted
        for message in member.mail.kept():
            wire.send(message)
        first, member.joined = not member.joined, True
        if first and not hello.get("gone"):  # else the ranks of the others would start for a moment
            self._decide(job_decisions.Joined(node))
        if hello.get("gone"):
            return self._take_loss_report(node, str(hello["gone"])[:_LONGEST_REASON])
        for message in messages[1:]:
            if not self._take_message(node, member, message):
                break
        return None

    def _take_offer(self, standby: StandbyOffers, wire: TlsLink, hello: Header) -> None:
        """Add a machine that waits for the next epoch to the standby, and decide on the offer; close a malformed one.

        A machine that was a member of this epoch has ended its ranks before it offers itself: that member is given up as
        returned.
        """
        try:
            offer = StandbyOffer(hello)
        except ValueError:
            return wire.close()
        if standby.add(wire, offer, self._clock.now):
            self._record("standby", name=offer.name, address=offer.address)
        for node, member in self._members.nodes.items():
            ended = member.sender == offer.sender and offer.epoch >= self._state.shape.first
            if ended and (node not in self._state.gone or node in self._state.lost):
                self._members.give_up(member)
                self._decide(epoch_decisions.Returned(node))
        self._decide(epoch_decisions.OnStandby(offer.name))
        return None

    def _refuse(self, wire: TlsLink) -> None:
        """Send a machine that joins too late (node/join) an error that the job has all its nodes, and close the connection."""
        names = self._state.shape.names
        what = f"the job has all its {len(names)} nodes ({some(names)}), and has started"
        fix = "start the command on as many machines as it has nodes, or raise the number of nodes on all of them"
        wire.send({"type": "refused", "errors": [{"kind": "UsageError", "what": what, "fix": fix, "node": ""}]})
        wire.flush()
        wire.close()

    def _read_member(self, node: int, member: JobMember) -> None:
        """Handle the messages that have arrived from a member, up to the first malformed one; note if it has left."""
        for message in self._members.read(member):
            member.left = member.left or bool(message.get("bye"))
            if not self._take_message(node, member, message):
                return

    def _take_message(self, node: int, member: JobMember, message: Header) -> bool:
        """Handle one message of a member: its progress, beat and event. Messages of other processes are ignored.

        A malformed one disconnects the member and loses its node; then it returns False, else True.
        """
        try:
            if read_incarnation(message.get("sender")) != member.sender:
                return True
            if "ranks" in message:
                member.ranks = self._read_progress(node, message["ranks"])
            for role, rank, row in message.get("metrics", ()):
                if (role, rank) in self._state.shape.on(node):
                    self.other_metrics[role, rank] = read(Metrics, row)
            if "quiet" in message and self._hang is not None:
                self._hang.note_quiet(node, _finite(message["quiet"]) or 0.0, self._clock.now)
            if "beat" in message:
                member.note_beat(message["beat"])
            event = self._read_event(node, message) if member.mail.take(message) else None
        except _MALFORMED as error:
            member.disconnect()
            self._take_loss_report(node, f"it sent a message that cannot be read ({error!r:.100})")
            return False
        if event is not None:
            self._decide(event)
        return True

    def _take_loss_report(self, node: int, why: str) -> None:
        """Mark a member as left, and lose its node, unless it is gone already.

        why: its guard reports that the supervisor is dead and ends the node's processes, or the member has sent a malformed
        message.
        """
        self._members.nodes[node].left = True
        if node not in self._state.gone:
            self._lose_node(node, why)

    def _lose_node(self, node: int, why: str) -> None:
        """Record that a node is lost, with its ranks' last progress, and decide on it.

        In an elastic job, beats of a node that had joined are not acknowledged from now on, and the event has the time by which
        its ranks end.
        """
        member, until = self._members.nodes[node], {}
        if self._standby is not None and member.joined:  # its ranks may live so long
            member.given_up = True
            left = ends_by(member.last_at, self._spec["elastic"]["lease"]) - boottime()
            until = {"ends_by": round(time.time() + left, 1)}
        self._record("lost", node=node, why=why, ranks=member.ranks, **until)
        self._decide(job_decisions.Lost(node, why))

    def _read_progress(self, node: int, ranks: Any) -> List[RankOutput]:
        """Read [role, rank, epoch, step, seconds since the last output] of a node's ranks; leave out ranks of other nodes.

        The ages become times of this machine. This is all that is known of the ranks of a lost node. Raises one of _MALFORMED.
        """
        own, now = self._state.shape.on(node), time.time()
        found: List[RankOutput] = []
        for role, rank, epoch, step, age in ranks:
            if (role, rank) in own:
                found.append((role, rank, _finite(epoch), _finite(step), round(now - (_finite(age) or 0.0), 2)))
        return found

    def _watch_silence(self, now: float) -> None:
        """Lose each joined node that was silent for too long, and decide that nodes which never joined in time are absent.

        Silence is measured by the own clock: time in which this process did not run is not counted, and what arrived then was
        read before. A node whose lease ended meanwhile gives up the coordinator by itself.
        """
        absent: List[int] = []
        for node, limit, blocked in self._members.silent(self._state.gone, self._state.phase == "ending"):
            if self._members.nodes[node].joined:
                what = f"no heartbeat for {limit:g} s"
                what += f" (and {blocked:.0f} s in which the coordinator itself did not run)" if blocked >= 1 else ""
                self._lose_node(node, what)
            else:
                absent.append(node)
        if absent:
            self._record("absent", nodes=absent, endpoint=self._spec["lead"]["endpoint"], seconds=round(now))
            self._decide(job_decisions.Absent(tuple(absent), self._describe_self(), round(now)))

    def _describe_self(self) -> str:
        """Return the coordinator's name and endpoint as text."""
        return describe_coordinator(self._spec["lead"]["name"], self._spec["lead"]["endpoint"])

    def _watch_time(self, now: float) -> None:
        """Do what is due at `now`: stop the job at a limit, send a delayed stop, end a wait for mpirun, or begin an attempt."""
        for stop in self._limits.stops_due(
            now, lambda: job_decisions.describe_wait(self._state, self._describe_self())
        ):
            self._decide(stop)
        if self._stop_at is not None and now >= self._stop_at:
            self._send_delayed_stop()
        if self._limits.launcher.is_exceeded(now, job_decisions.waits_for_launcher(self._state)):
            self._decide(job_decisions.LauncherTimeout(self._limits.launcher.limit))
        if self._restart is not None and now >= self._restart[0]:
            _, orders = self._restart
            self._restart = None
            for order in orders:
                self._send_order(order)

    def _watch_progress(self, now: float) -> None:
        """Have all nodes sample their ranks if no trainer makes progress; record a hang that they show, and do as on_hang says.

        now: of the own clock.
        """
        if self._hang is None or self._state.phase != "trainer":
            return
        if self.quiet is not None:
            self._hang.note_quiet(self._spec["node"], self.quiet, now)
        due, found = self._hang.turn(now, self._state.gone)
        if due:
            of = self._hang.number
            self._send_order({"type": "sample", "of": of, "attempt": self._state.attempt, "sender": self._me})
        if found is None:
            return
        names, place = self._state.shape.names, self._state.shape.node_of
        since = {node: time.strftime("%H:%M:%S", time.localtime(time.time() - s)) for node, s in found.quiet.items()}
        times = {key: since[node] for key, node in place.items() if node in since}
        text = describe(found.hang, {key: names[node] for key, node in place.items()}, times)
        self._record("hang", text=text, ranks=[(one.role, one.rank) for one in found.hang.named])
        action = self._spec["policy"]["on_hang"]
        if action != "report":
            self._decide(job_decisions.Hung(text, action == "restart"))

    # -- decisions --

    def _decide(self, event: epoch_decisions.Event) -> None:
        """Compute the next state for an event, and carry out the actions; but delay the stop of a failure.

        The stop waits 0.5 s for further failures, and 2 s while no failed rank has an error of its own; a user's stop or
        another action ends the wait. Records a new phase, and that an attempt begins again.
        """
        if isinstance(event, job_decisions.Exited) and event.attempt == self._state.attempt:
            self._limits.launcher.note(event.exits)
            event = event._replace(late=self._stop_at is None and time.monotonic() > self._failed_at + _CAUSE)
        before = self._state.phase
        if "elastic" in self._spec:
            self._state, actions = epoch_decisions.decide(self._spec["elastic"], self._state, event)
        else:
            self._state, actions = job_decisions.decide(self._state, cast("job_decisions.Event", event))
        now = time.monotonic()
        if self._state.phase != before:
            self._failed_at = now
        if self._state.phase != before and job_decisions.may_fail(self._state):
            self._stop_at = now + (_HOLD if job_decisions.cause_known(self._state) else _CAUSE)
            return
        if self._stop_at is not None and job_decisions.cause_known(self._state):
            self._stop_at = min(self._stop_at, now + _HOLD)
        asked = isinstance(event, job_decisions.StopAsked)  # a user does not wait for further failures
        if self._stop_at is not None and (asked or actions or not job_decisions.may_fail(self._state)):
            self._send_delayed_stop()
        again = [action for action in actions if isinstance(action, job_decisions.Start) and action.again]
        if again:
            self._begin_again(again)  # the phase that is recorded next belongs to the new attempt
        if self._state.phase != before:
            self._record_phase()
        for action in actions:
            self._perform(action)

    def _send_delayed_stop(self) -> None:
        """Record the phase, and send the stop of a failure that was delayed for further failures."""
        self._stop_at = None
        self._record_phase()
        self._perform(job_decisions.stop(self._state))

    def _record_phase(self) -> None:
        """Write a "phase" event: the phase, the known failures of an ending, and how the job ends if that is decided."""
        end = self._state.ending
        known = {"end": end.state} if end is not None and end.state is not JobState.NEXT_EPOCH else {}
        self._record("phase", name=self._state.phase, **self._known_failures(), **known)

    def _known_failures(self) -> Dict[str, object]:
        """Return {why, culprits, attempt} for the known failures of an ending, the first one first; {} if there is none.

        Followers print them before anything else.
        """
        if self._state.phase != "ending" or not self._state.culprits:
            return {}
        culprits = [list(exit.key) for exit in self._state.culprits]
        return {"why": job_decisions.reason(self._state), "culprits": culprits, "attempt": self._state.attempt}

    def _begin_again(self, actions: List[job_decisions.Start]) -> None:
        """Record a restart, and schedule the start orders of its attempt after a pause of 1, 2, 4, ... at most 30 s."""
        attempt = actions[0].attempt
        if self._hang is not None:
            self._hang.begin()
        earlier = self._spec["elastic"]["epoch"] if "elastic" in self._spec else 0
        pause = min(2.0 ** (attempt - earlier - 1), _LONGEST_PAUSE)
        self._record("restart", attempt=attempt, pause=pause)
        self._restart = (time.monotonic() + pause, [self._start_order(action) for action in actions])

    def _start_order(self, action: job_decisions.Start) -> StartOrder:
        """Build the order to all nodes to start the ranks of a role in an attempt."""
        return {"type": "start", "role": action.role, "attempt": action.attempt, "sender": self._me}

    def _perform(self, action: job_decisions.Action) -> None:
        """Carry out an action: send an order to all nodes, ask the allocation's engine, or record and send the verdict.

        A start that follows a failed attempt is not sent here, but after its pause. A stop cancels a scheduled restart.
        """
        if isinstance(action, job_decisions.Start):
            if not action.again:
                self._send_order(self._start_order(action))
        elif isinstance(action, job_decisions.Stop):
            self._restart = None
            order: StopOrder = {"type": "stop", "why": action.why, "attempt": self._state.attempt, "sender": self._me}
            if action.grace is not None:
                order["grace"] = action.grace
            if self._outside:
                order["outside"] = True
            self._send_order(order)
        elif isinstance(action, job_decisions.Release):
            self._send_order({"type": "release", "attempt": self._state.attempt, "sender": self._me})
        elif isinstance(action, job_decisions.Ask):
            self._allocation.ask(action.by, action.code)
        else:
            if action.outcome.state is JobState.NEXT_EPOCH:
                self._notifier.turn(last=True)  # the next epoch does not wait for a laptop
            else:
                self._record("verdict", **action.outcome.as_record())
            self._finished_at = self._clock.now
            outcome = action.outcome.as_record()
            self._send_order({"type": "finish", "outcome": outcome, "attempt": self._state.attempt, "sender": self._me})

    def _send_order(self, order: Order) -> None:
        """Send an order to all members, and add it to the orders of this node's supervisor."""
        self._members.post(dict(order))
        self.orders.append(order)

    def _stamped(self, message: Header) -> Header:
        """Copy a message, with the present attempt, and this process as the sender."""
        return {**message, "attempt": self._state.attempt, "sender": self._me}

    def close(self, outcome: Optional[Outcome] = None) -> None:
        """Close all connections. If an elastic job is over, send its outcome to the machines on standby before that.

        All notifications that are left are sent.
        """
        self._notifier.turn(last=True)
        self._members.close()
        if self._standby is not None and outcome is not None and outcome.state is not JobState.NEXT_EPOCH:
            self._standby.end(outcome, self._admit_late_offers)
        elif self._standby is not None:
            self._standby.close()
        self._listener.close()

    def _admit_late_offers(self, standby: StandbyOffers) -> None:
        """Add the machines that have connected since the last turn to the standby; close all other new connections."""
        now = self._clock.turn()
        for wire, messages in self._listener.turn(now, None):
            try:
                if messages[0].get("type") != "offer":
                    raise ValueError("a member of the epoch that has ended")
                standby.add(wire, StandbyOffer(messages[0]), now)
            except ValueError:
                wire.close()


def _parse_event(ranks: FrozenSet[Key], node: int, message: Header) -> Optional[epoch_decisions.Event]:
    """Build the event for a message of a node, None if its type has none. ranks: those of the node.

    Raises one of _MALFORMED, also for a rank of another node.
    """
    kind = message.get("type")
    if kind == "listening":
        return job_decisions.Listening(_rank_of_node(ranks, message["role"], message["rank"]), int(message["attempt"]))
    if kind == "exited":
        exits = tuple(_read_exit(ranks, item) for item in message["exits"])
        steps = read(JobSteps, message.get("steps", {}))
        return job_decisions.Exited(exits, int(message["attempt"]), steps=steps)
    if kind == "quiet":
        return job_decisions.Quiet(node, int(message["attempt"]))
    if kind == "clean":
        return job_decisions.Clean(node, tuple(str(s) for s in message["survivors"]), int(message["attempt"]))
    if kind == "stop":
        grace = _finite(message.get("grace"))
        if grace is not None and grace < 0:
            raise ValueError("a time before the stop")
        by, code, outside = str(message["by"]), int(message["code"]), bool(message.get("outside"))
        end = JobState.LOST if message.get("lost") else JobState.STOPPED
        return job_decisions.StopAsked(by, code, end, outside=outside, grace=grace)
    if kind == "leave":
        return epoch_decisions.Leaves(node, str(message["by"])[:_LONGEST_REASON])
    return None


def _read_exit(ranks: FrozenSet[Key], item: Sequence[Any]) -> RankExit:
    """Build a RankExit from a message's list.

    Raises ValueError for a rank of another node, or for a code or signal out of range.
    """
    if len(item) != MESSAGE_FIELDS:
        raise ValueError("an exit with other fields")
    exit = read(RankExit, list(item), "an exit")
    _rank_of_node(ranks, exit.role, exit.rank)
    return exit


def _finite(value: Any) -> Optional[float]:
    """Read a step or an epoch; None for what cannot be one, since programs print anything."""
    return float(value) if value is not None and -_LARGE < value < _LARGE else None


def _rank_of_node(ranks: FrozenSet[Key], role: object, rank: Any) -> Key:
    """Return (role, rank). Raises ValueError if it is not one of the node's."""
    key = (str(role), int(rank))
    if key not in ranks:
        raise ValueError("a process of another node, or of none")
    return key
