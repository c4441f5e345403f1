"""The coordinator of a job whose machines join turns messages into events for decide(), and executes its actions.

Its own machine takes part like the others, as connection 0.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Callable, Dict, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Set, Tuple

from clustertool.errors import (
    ClustertoolError,
    Interrupted,
    NodeLost,
    PreflightError,
    Terminated,
    TimedOut,
    as_one,
    singles,
)
from clustertool.model.dispatch import topology
from clustertool.model.elastic.epochs import Gathering, may_enter, next_number
from clustertool.model.facts import Facts
from clustertool.model.finding import Seen
from clustertool.model.joining import join_decisions as decisions
from clustertool.model.joining.join_errors import ended_by_engine, error_rows, read_errors
from clustertool.model.joining.join_file import OwnSettings
from clustertool.model.joining.join_offers import COORDINATOR, other_job, read_offer, read_settings
from clustertool.model.joining.join_plan import Arrival, cluster_of, facts_of, plan_of, specs
from clustertool.model.planning.environment import endpoint
from clustertool.model.quantities import HIGHEST_PORT
from clustertool.model.wire.frames import Header
from clustertool.node.join import meeting, workspace_relay
from clustertool.node.join.joining_node import JoiningNode
from clustertool.node.join.meeting import DoubtTimer, MemberPlace
from clustertool.node.supervisor.allocation import End
from clustertool.node.supervisor.coordinator.coordinator_server import JobLimits
from clustertool.node.supervisor.coordinator.member_connections import CoordinatorListener
from clustertool.node.system.child_signals import EndRequest, Signals
from clustertool.node.system.process_clock import ProcessClock, boottime
from clustertool.node.system.tls_link import TlsLink, context, heartbeat_interval, wait_for

if TYPE_CHECKING:
    from _typeshed import FileDescriptorLike

    from clustertool.model.wire.agent_requests import RelayRequest
    from clustertool.model.wire.join_messages import FetchOrder, PlaceOrder, RelayOrder
    from clustertool.model.wire.spec_types import ElasticSpec

TICK = 0.1  # seconds: a signal that is blocked wakes nothing
_MAX_BACKLOG = 64 << 20  # bytes that a machine has not read
_LAST_MESSAGE = 3.0  # seconds for the last message to all
_MAX_HEADER = 32 << 20  # the facts of a machine, with the files of its folder
_MALFORMED = (LookupError, TypeError, ValueError, OverflowError, AttributeError)


class JoinCoordinator:
    """The loop of the machine that coordinates the joining, and takes part in it. run() returns the exit code of this node.

    place: of this machine. elastic: what an epoch needs.
    """

    def __init__(
        self, node: JoiningNode, signals: Signals, place: MemberPlace, elastic: Optional[Gathering] = None
    ) -> None:
        """Listen as the coordinator, and take part as connection 0. Raises PreflightError where the port cannot be used."""
        join, address = node.join, place.address
        self._join, self._node, self._report, self._signals = join, node, node.report, signals
        self._address = address
        self._doubt = DoubtTimer(place.doubt, node.report, join)
        sock, self._port = meeting.open_port(join, address)
        ctx = context(join.identity.certificate, join.identity.key, server=True)
        listener = CoordinatorListener(ctx, sock, join.nnodes, _MAX_HEADER)
        self._members = JoinMembers(listener, join.cluster.loss_timeout)
        own = node.offer(address, join.index if elastic is not None else COORDINATOR)
        self._settings: Dict[int, OwnSettings] = {COORDINATOR: join.offered}  # of each connection
        self._order: Tuple[int, ...] = ()  # connections by node id
        self._facts: Dict[int, Tuple[object, float]] = {}  # of each connection, and when they came
        self._asked_at = 0.0
        self._ports: Dict[int, int] = {}  # of each connection's relay
        self._result: Optional[int] = None  # the exit code
        self._state = decisions.JoinState(own, join.join_timeout, join.names, join.engine, elastic=elastic)
        policy = join.job.policy
        self._limits = JobLimits(policy.timeout, policy.lease, time.monotonic())
        if elastic is not None:
            self._limits.include_earlier_epochs(boottime() - node.job_began, elastic.unattended)
        self._decide(decisions.Offered(COORDINATOR, own, boottime()))

    def run(self) -> int:
        """Coordinate until the job starts or the joining ends, run this node's supervisor, and return the exit code.

        It is 0 if this member has resigned.
        """
        while self._result is None and not self._state.ended:
            ready = wait_for([self._signals.wake, *self._node.wires(), *self._members.wires()], TICK)
            for request in self._signals.turn():
                self._decide(decisions.Signalled(interrupted(request, self._state.own.hostname)))
            for arrived in self._members.turn(ready):
                self._handle_arrived(arrived)
            self._take_own(ready)
            self._check_place()
            self._await_workspace()
            self._check_limits()
            if self._node.stopped is not None:
                self._decide(decisions.Signalled(self._node.stopped))
            store = self._node.store
            if store is not None and self._result is None and not self._state.ended and not store.owns_epoch:
                self._resign()
                break
            self._decide(decisions.Tick(boottime()))
        return self._result if self._result is not None else self._end_with_reason()

    def _check_place(self) -> None:
        """End the joining if the doubt about this place is due as an error. Another machine that joins removes the doubt."""
        if len(self._state.members) > 1:
            self._doubt.found()
        try:
            self._doubt.turn()
        except ClustertoolError as error:
            self._decide(decisions.Signalled(error))

    def _check_limits(self) -> None:
        """End an elastic job whose --timeout or --lease has passed between epochs.

        A laptop that follows it renews the lease.
        """
        record, now = self._node.record, time.monotonic()
        if self._state.elastic is None:
            return
        if record is not None and record.attended:
            record.attended = False
            self._limits.attached(now)
        for stop in self._limits.stops_due(now, lambda: ""):
            self._decide(decisions.Signalled((TimedOut if stop.code == TimedOut.code else Terminated)(stop.by)))

    def _end_with_reason(self) -> int:
        """Wait for the engine's reason for a signal, sending heartbeats, end the joining with it, and return the code."""
        outcome = self._node.allocation.turn()
        while outcome is None:
            ready = wait_for([self._signals.wake, *self._members.wires()], TICK)
            self._signals.turn()
            list(self._members.turn(ready))  # it sends heartbeats; no message counts any more
            outcome = self._node.allocation.turn()
        return self._end(ended_by_engine(outcome))

    # -- events --

    def _handle_arrived(self, arrived: Arrived) -> None:
        """Decide on the messages and the end of a connection. Close one that sends a message which cannot be read."""
        for message in arrived.messages:
            try:
                event = self._event_of(arrived.connection, message)
            except _MALFORMED as error:
                self._members.close(arrived.connection)
                why = f"it sent a message that cannot be read ({error!r:.100})"
                self._decide(decisions.Gone(arrived.connection, why))
                return
            if event is not None:
                self._decide(event)
        if arrived.ended:
            self._decide(decisions.Gone(arrived.connection, arrived.ended))

    def _event_of(self, connection: int, message: Header) -> Optional[decisions.Event]:
        """Convert a message to an event, and store the settings, facts and port in it. Raises one of _MALFORMED.

        Returns None if nothing is to be decided. An offer for another job is refused here.
        """
        kind = message["type"]
        if kind == "offer":
            offer = read_offer(message)
            if offer.job not in ("", self._join.identity.job_id):
                self._execute(decisions.Refuse(connection, other_job(offer, self._join.identity.job_id)))
                return None
            if self._state.phase == "gathering" and not self._ensure_number_above(offer.epoch):
                return None
            if offer.code == self._state.own.code:  # another version has other settings, and is refused
                self._settings[connection] = read_settings(message)
            return decisions.Offered(connection, offer, boottime())
        if kind == "stop" and self._state.elastic is not None:
            return decisions.Signalled(read_errors(message["errors"]))
        if kind == "leaving":
            return decisions.Left(connection, read_errors(message["errors"]))
        if kind == "failed":
            return decisions.Failed(connection, int(message["round"]), read_errors(message["errors"]))
        if kind == "done":
            if message.get("facts") is not None:
                self._facts[connection] = message["facts"], time.time()
            self._ports[connection] = port = int(message["port"])
            if not 0 <= port <= HIGHEST_PORT:
                raise ValueError("no port")
            return decisions.Done(connection, int(message["round"]))
        return None

    def _ensure_number_above(self, known: int) -> bool:
        """Ensure that the epoch's number is above `known`, an attempt there was; return False if this member has resigned.

        Without a store the number is raised. With a store this member resigns, to take a later epoch there.
        """
        elastic = self._state.elastic
        if elastic is None or may_enter(elastic.number, known):
            return True
        if self._node.store is None:
            self._state = self._state._replace(elastic=elastic._replace(number=next_number([known])))
            return True
        self._node.known = known
        self._resign()
        return False

    def _take_own(self, ready: Set[int]) -> None:
        """Decide on the result of this machine's own order, once there is one, and store its facts and port."""
        result = self._node.turn(ready)
        if result is None:
            return
        if result.facts is not None:
            self._facts[COORDINATOR] = result.facts, time.time()
        self._ports[COORDINATOR] = result.port
        if result.error is not None:
            self._decide(decisions.Failed(COORDINATOR, self._state.round, result.error))
        else:
            self._decide(decisions.Done(COORDINATOR, self._state.round))

    # -- decisions --

    def _decide(self, event: decisions.Event) -> None:
        """Pass an event to decide(), and execute the actions that it returns."""
        self._state, actions = decisions.decide(self._state, event)
        for action in actions:
            self._execute(action)

    def _execute(self, action: decisions.Action) -> None:
        """Execute an action of decide()."""
        if isinstance(action, decisions.Refuse):
            self._report.warning(f"refused: {action.error.what}")
            self._members.close(action.connection, {"type": "refused", "errors": error_rows(action.error)})
        elif isinstance(action, decisions.Drop):
            self._members.close(action.connection)
        elif isinstance(action, decisions.Wait):
            self._report_waiting(action)
        elif isinstance(action, decisions.Number):
            self._order = action.order
            self._node.all_have_joined()
        elif isinstance(action, decisions.Order):
            self._give_order(action)
        elif isinstance(action, decisions.MakePlan):
            self._decide(self._plan())
        elif isinstance(action, decisions.Coordinate):
            self._coordinate(action)
        elif isinstance(action, decisions.Go):
            for one in self._state.standby:  # they connect again, and wait at the coordinator
                self._members.close(one.connection)
            self._members.end({"type": "go"})
            self._signals.close()
            self._result = self._node.run()
        elif isinstance(action, decisions.OutOfEpoch):
            self._report.warning(f"{action.name} does not take part in the next epoch: {action.why}")
            self._node.record_event("left-out", name=action.name, why=action.why)
        else:
            self._abort(action.error)

    def _report_waiting(self, action: decisions.Wait) -> None:
        """Report how many machines have joined and which are missing, here and to each one that has joined."""
        join, present, missing = self._join, action.present, list(action.missing)
        wanted = min(join.nnodes, join.job.elastic.maximum or join.nnodes)  # for so many the job waits at first
        for member in self._state.members:
            message = {"type": "wait", "present": present, "nnodes": wanted, "missing": missing}
            self._members.send(member.connection, message)
        where = endpoint(join.coordinator.host, self._port)
        self._report.waiting(present, wanted, missing, where, join.names)

    def _give_order(self, action: decisions.Order) -> None:
        """Send an order to each other machine, and begin it here, or do it, if it is an undo.

        A launch is only sent: _coordinate() does this machine's part.
        """
        self._asked_at = now = time.time()
        if action.kind in ("probe", "launch", "undo"):
            self._send_each(lambda node: {"type": action.kind, "round": action.round, "now": now})
        if action.kind == "probe":
            self._facts.clear()
            self._address = self._address_for_others()
            self._node.probe(self._address)
        elif action.kind == "relay":
            self._start_relays(action.round)
        elif action.kind == "fetch":
            self._fetch(action.round)
        elif action.kind == "place":
            self._place(action.round)
        elif action.kind == "undo":
            self._node.undo()
            self._decide(decisions.Done(COORDINATOR, action.round))

    def _send_each(self, order: Callable[[int], Mapping[str, object]]) -> None:
        """Send each other machine its order. order: builds the message for a node. This machine is node 0, and gets none."""
        for node, connection in enumerate(self._order[1:], 1):
            self._members.send(connection, order(node))

    def _address_for_others(self) -> str:
        """Return this machine's address, or the one that others use if it is a loopback address (127.0.1.1 in /etc/hosts)."""
        seen = [one.offer.coordinator for one in self._state.members]
        others = [address for address in seen if address and not meeting.is_loopback(address)]
        return others[0] if others and meeting.is_loopback(self._address) else self._address

    def _plan(self) -> decisions.Planned:
        """Make the plan from offers, settings and facts. Returns why there is none, or whether the workspace must come first.

        An error that names machines only is split by their connections.
        """
        members = {member.connection: member.offer for member in self._state.members}
        addresses = {**{one: members[one].address for one in self._order}, COORDINATOR: self._address}
        numbered = self._state.elastic is not None
        self._arrivals = [
            Arrival(members[one].hostname, addresses[one], self._settings[one], members[one].node if numbered else None)
            for one in self._order
        ]
        cluster = cluster_of(self._join, self._arrivals, self._port)
        facts: Dict[int, Facts] = {}
        asked: Dict[int, Tuple[float, float]] = {}
        name = ""  # of the machine whose facts are read
        try:
            for node, connection in enumerate(self._order):
                name = cluster.hosts[node].name
                answer, at = self._facts[connection]
                facts[node], asked[node] = facts_of(node, answer, self._port), (self._asked_at, at)
            name = ""
            self._made = plan_of(self._join, cluster, self._arrivals, facts, Seen(asked=asked))
            if self._node.upload.expected:
                self._report.awaits_workspace()
                return decisions.Planned(later=True)
            return self._with_workspace()
        except ClustertoolError as error:
            names = [host.name for host in cluster.hosts]
            return decisions.Planned(error, failures=self._errors_by_connection(error, names))
        except _MALFORMED as error:
            what = f"the facts of {'this machine' if name else 'the machines'} are not valid: {error!r:.200}"
            return decisions.Planned(PreflightError(what, "install the same version on all machines", name))

    def _errors_by_connection(
        self, error: ClustertoolError, names: Sequence[str]
    ) -> Tuple[Tuple[int, ClustertoolError], ...]:
        """Return (connection, error) for each machine that parts of an error name; () if a part names none of `names`."""
        found: Dict[int, List[ClustertoolError]] = {}
        for one in singles(error):
            if one.node not in names:
                return ()
            found.setdefault(self._order[names.index(one.node)], []).append(one)
        return tuple((connection, as_one(errors) or error) for connection, errors in found.items())

    def _with_workspace(self) -> decisions.Planned:
        """Return Planned, with `fetch` if nodes lack the workspace: then store the request for their relays.

        Raises DispatchError if node 0 lacks it too.
        """
        release = self._join.release
        facts = {node: made.facts for node, made in enumerate(self._made.nodes)}
        if not (release and workspace_relay.receivers(facts, release)):
            return decisions.Planned()
        self._request = workspace_relay.build_request(self._node.root, release)
        return decisions.Planned(fetch=True)

    def _await_workspace(self) -> None:
        """Decide on the plan once the laptop has sent the workspace, or on the error; do nothing before and in other phases."""
        if self._state.phase != "awaiting":
            return
        try:
            if self._node.upload.turn():
                self._decide(self._with_workspace())
        except ClustertoolError as error:
            self._decide(decisions.Planned(error))

    def _start_relays(self, round: int) -> None:
        """Start this machine's relay, which serves the workspace, and order the machines that lack it to start one."""
        facts = {node: made.facts for node, made in enumerate(self._made.nodes)}
        relays = {COORDINATOR, *workspace_relay.receivers(facts, self._join.release)}

        def order(node: int) -> RelayOrder:
            own = node == COORDINATOR
            request: RelayRequest = {**self._request, "address": self._arrivals[node].address, "helper": own}
            return {"type": "relay", "round": round, "request": request if node in relays else None}

        self._node.relay.begin(order(COORDINATOR))
        self._send_each(order)

    def _fetch(self, round: int) -> None:
        """Send each machine the relays from which it fetches the workspace, in order. This machine is done at once."""
        relays = {
            node: (self._arrivals[node].address, self._ports[connection])
            for node, connection in enumerate(self._order)
            if self._ports.get(connection)
        }
        sources, degree = workspace_relay.sources(relays), topology.degree(len(relays))

        def order(node: int) -> FetchOrder:
            return {"type": "fetch", "round": round, "sources": sources.get(node, []), "degree": degree}

        self._send_each(order)
        self._decide(decisions.Done(COORDINATOR, round))

    def _place(self, round: int) -> None:
        """Set the attempt's number, send each machine its spec with the order to place the job, and begin that here.

        If this member resigns, since the number must be higher, nothing is sent.
        """
        parts = specs(self._made, self._arrivals, self._join.engine, self._elastic_spec())
        gathering = self._state.elastic
        began = self._node.known >= 0  # this process has been in an epoch
        attempt = 0 if began else self._node.first_attempt(parts[0]["job_dir"])
        if not self._ensure_number_above(attempt - 1):
            return
        if self._state.elastic != gathering:  # the engine has started the job again
            parts = specs(self._made, self._arrivals, self._join.engine, self._elastic_spec())
        elif gathering is None and attempt:
            for part in parts.values():
                part["attempt"] = attempt

        def order(node: int) -> PlaceOrder:
            warnings = list(self._made.warnings) if node == COORDINATOR else []
            release = self._join.release
            return {"type": "place", "round": round, "spec": parts[node], "release": release, "warnings": warnings}

        self._node.place(order(COORDINATOR))
        self._send_each(order)

    def _elastic_spec(self) -> "ElasticSpec | None":
        """Build the part of the spec with the epoch's number, limits, members and restarts; None if the job is not elastic."""
        gathering, settings = self._state.elastic, self._join.job.elastic
        if gathering is None:
            return None
        waiting = [one.offer.hostname for one in self._state.standby]
        members = len(self._state.members) + len(waiting)
        return {
            "epoch": gathering.number,
            "lease": self._join.job.policy.loss_timeout,
            "grow": settings.grow,
            "minimum": settings.minimum,
            "maximum": settings.maximum,
            "members": members,
            "waiting": waiting,
            "absent": max(0, self._join.nnodes - members),
            "restarts": gathering.restarts,
            "blamed": list(gathering.blamed),
            "steps": gathering.steps,
            "store": settings.server.present,
            "age": boottime() - self._node.job_began,
            "unattended": self._limits.unattended(time.monotonic()),
        }

    def _coordinate(self, action: decisions.Coordinate) -> None:
        """Stop listening, publish the epoch in the store, and prepare this node's supervisor, which takes the port.

        An error is a failure of this machine. In an elastic job, records `epoch`, and `standby` of each machine on standby.
        """
        self._members.stop_listening()
        members = [one.offer.node or 0 for one in self._state.members]
        try:
            if not self._publish(members):
                return
            self._node.launch(time.time())
        except ClustertoolError as error:
            self._decide(decisions.Failed(COORDINATOR, action.round, error))
            return
        elastic = self._state.elastic
        if elastic is not None:
            self._node.record_event("epoch", attempt=elastic.number, **elastic.before.change(members, boottime()))
            for one in self._state.standby:
                self._node.record_event("standby", name=one.offer.hostname, address=one.offer.address)
        self._decide(decisions.Done(COORDINATOR, action.round))

    def _publish(self, members: Sequence[int]) -> bool:
        """Write the epoch's members to the store, if there is one. False: it is not reached, and this node has resigned."""
        store = self._node.store
        if store is None or self._state.elastic is None:
            return True
        try:
            store.publish(members, self._state.elastic.restarts, self._join.cluster.loss_timeout / 2)
        except NodeLost as error:
            self._report.warning(error.what)
            self._resign()
            return False
        return True

    def _resign(self) -> None:
        """Close all connections, undo what was done here, and end run() with 0: another member has the epoch, or may take it.

        The job goes on, and this node joins like the others.
        """
        self._members.leave()
        self._node.undo()
        self._node.resigned = True
        self._signals.close()
        self._result = 0

    def _abort(self, error: ClustertoolError) -> None:
        """End the joining with an error. After a signal in an engine's job, only ask for the reason: run() ends it."""
        allocation = self._node.allocation
        if isinstance(error, (Interrupted, Terminated)) and allocation.present:
            allocation.ask(error.what, error.code)
        else:
            # A job that Slurm may start again is left to Slurm: a node that cannot join would not join the next time either.
            self._result = self._end(error, isinstance(error, NodeLost) and not self._join.of_engine.keep_bundle)

    def _end(self, error: ClustertoolError, silent: bool = False) -> int:
        """Report the error here and to all machines, undo what was done here, leave the allocation, and return the code.

        An elastic job's bundle is removed, too, unless the engine may start the job again. silent: a node does not answer.
        """
        self._report.failed(error)
        self._members.end({"type": "abort", "errors": error_rows(error)})
        self._node.undo()
        self._node.record_error(error, coordinates=True)
        if self._state.elastic is not None and not self._join.of_engine.keep_bundle:
            self._node.remove_bundle()  # it was kept so far
        self._node.leave_allocation(End(silent=silent))
        return error.code


def interrupted(request: EndRequest, hostname: str) -> ClustertoolError:
    """Create the error of a joining process that a signal ends: Interrupted for SIGINT, else Terminated."""
    what = f"the joining process on {hostname} {request.what}"
    return Interrupted(what) if request.code == Interrupted.code else Terminated(what)


class Arrived(NamedTuple):
    """Messages of a connection, the first one of a new connection among them; `ended`: why there will be no more."""

    connection: int
    messages: List[Header]
    ended: str = ""


class JoinMembers:
    """The connections to the machines that join, from their offers to the start of the job.

    Call turn() each loop. Connections have numbers from 1 on; a connection that is silent for the timeout is closed. Silence is
    measured by a clock that stops while this process does not run.
    """

    def __init__(self, listener: CoordinatorListener, loss_timeout: float) -> None:
        self._listener: Optional[CoordinatorListener] = listener
        self._timeout = loss_timeout
        self._clock = ProcessClock()
        self._links: Dict[int, TlsLink] = {}
        self._received: Dict[int, float] = {}
        self._next = 1
        self._beat_at = 0.0

    def wires(self) -> List[FileDescriptorLike]:
        """List the descriptors that wake turn()."""
        return [*(self._listener.wires() if self._listener else []), *self._links.values()]

    def turn(self, ready: Set[int]) -> Iterator[Arrived]:
        """Yield the messages of new and known connections, and the connections that failed, or were silent for the timeout.

        ready: descriptors that can be read. Sends all machines a heartbeat when it is due.
        """
        now = self._clock.turn()
        all_ready = None if self._clock.napped else ready
        if self._listener is not None:
            for wire, messages in self._listener.turn(now, all_ready):
                connection, self._next = self._next, self._next + 1
                self._links[connection], self._received[connection] = wire, now
                yield Arrived(connection, messages)
        for connection, wire in list(self._links.items()):
            if all_ready is None or wire.fileno() in all_ready:
                yield from self._messages(connection, wire, now)
        for connection in [one for one, at in self._received.items() if now - at > self._timeout]:
            self.close(connection)
            yield Arrived(connection, [], f"no heartbeat for {self._timeout:g} s")
        if now >= self._beat_at:
            self._beat_at = now + heartbeat_interval(self._timeout)
            self.send_all({"type": "beat"})

    def _messages(self, connection: int, wire: TlsLink, now: float) -> Iterator[Arrived]:
        """Yield the messages of a connection; if it has failed, or its machine does not read, close it and yield why."""
        if connection not in self._links:
            return
        try:
            if wire.backlog > _MAX_BACKLOG:
                raise ConnectionError("it does not read")
            messages = wire.turn()
        except ConnectionError as error:
            self.close(connection)
            yield Arrived(connection, [], str(error))
            return
        if messages:
            self._received[connection] = now
            yield Arrived(connection, messages)

    def send(self, connection: int, message: Mapping[str, object]) -> None:
        """Send a message to a connection, if it is open."""
        wire = self._links.get(connection)
        if wire is not None:
            wire.send(dict(message))

    def send_all(self, message: Mapping[str, object]) -> None:
        """Send a message to all connections."""
        for connection in self._links:
            self.send(connection, message)

    def close(self, connection: int, message: Optional[Mapping[str, object]] = None) -> None:
        """Close a connection, if it is open. message: a last one, of which is sent what the kernel accepts at once."""
        wire = self._links.pop(connection, None)
        self._received.pop(connection, None)
        if wire is not None:
            if message is not None:
                wire.send(dict(message))
                wire.flush()
            wire.close()

    def stop_listening(self) -> None:
        """Close the listening socket. The port is free when this returns."""
        if self._listener is not None:
            self._listener.close()
            self._listener = None

    def leave(self) -> None:
        """Close the listening socket and all connections without a message: the machines search another coordinator."""
        self.stop_listening()
        for connection in list(self._links):
            self.close(connection)

    def end(self, message: Mapping[str, object]) -> None:
        """Stop listening, send all a last message, and close each connection when the other side has, after 3 s at the latest.

        The other side has the message then. A kernel drops what it could not send so far if anything arrives at a closed
        connection.
        """
        self.stop_listening()
        self.send_all(message)
        until = time.monotonic() + _LAST_MESSAGE
        while self._links and time.monotonic() < until:
            for connection, wire in list(self._links.items()):
                try:
                    wire.turn()
                except ConnectionError:
                    self.close(connection)
            time.sleep(0.002)
        self.leave()
