"""Spreading sends each piece to one node; the nodes pass it on to one another (node/dispatch/relay.py).

One loop, in the caller's thread, takes events from a queue, as calls, and carries out what the scheduler decides
(model/dispatch/scheduler.py). Threads only read the nodes' messages, and send.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import time
from collections.abc import Callable, Iterator, Mapping, Sequence

from clustertool.errors import ClustertoolError, DispatchError, InternalError, Unreachable, from_wire
from clustertool.fleet.dispatch.receivers import DispatchCounts, ProgressReceiver, Receiver, as_dispatch_error
from clustertool.fleet.dispatch.shipment import RemoteShipment, Shipment
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.identity import certificate
from clustertool.model.dispatch import topology
from clustertool.model.dispatch.scheduler import (
    LOST,
    Action,
    Cause,
    DispatchPhase,
    Member,
    Scheduler,
    SendBeat,
    SendPiece,
    SendSources,
)
from clustertool.model.facts import Facts
from clustertool.model.wire.agent_answers import Answer
from clustertool.model.wire.agent_requests import RelayRequest, RelaySecret
from clustertool.model.wire.messages import END_RELAY, RELAY, Request
from clustertool.model.wire.stream_messages import (
    RelayFailed,
    RelayGone,
    RelayOrder,
    RelayPiece,
    RelayReport,
    RelaySources,
)
from clustertool.ssh.parallel import SLICE, in_background

_REPORT = 0.25  # seconds between two reports of a node
_MESSAGES = 64  # reports a second from all nodes together, at most
_RAREST = 4.0  # seconds; far less than the silence after which a node is given up
_ROUND = 1000  # events before Ctrl+C is checked: a hostile node may send without end
_END = 5.0


class Spread:
    """One distribution of the pieces of a shipment to nodes, by run(), which is called once.

    `tally` gets the bytes, the failures, and the nodes that only the laptop could serve.
    """

    def __init__(
        self, fleet: Fleet, shipment: Shipment | RemoteShipment, tally: DispatchCounts, progress: ProgressReceiver
    ) -> None:
        self._fleet = fleet
        self._shipment = shipment
        self._tally = tally
        self._progress = progress
        self._sizes = [piece.size for piece in shipment.pieces]
        self._between: dict[int, int] = {}  # bytes that a node got from other nodes
        self._relays = fleet.cluster.relay != "off" and len(fleet.cluster.hosts) > 1
        self._interval = min(max(_REPORT, len(fleet.cluster.hosts) / _MESSAGES), _RAREST)
        self._scheduler = Scheduler((), self._sizes, self._interval, self._relays, 0.0)
        self._queue: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._broken: BaseException | None = None  # a file changed while it was sent, or a bug

    def run(self, receivers: Sequence[Receiver], helpers: Sequence[Receiver], facts: Mapping[int, Facts]) -> None:
        """Spread the pieces until all receivers have everything, or have failed.

        Helpers have the release already and only serve. Raises DispatchError when a file changes. Nodes that fail are in the
        tally.
        """
        part = [*receivers, *(helpers if self._relays else ())]
        members = [Member(one.node, facts[one.node].address, one in helpers) for one in part]
        now, has_pieces = time.monotonic(), isinstance(self._shipment, Shipment)
        self._scheduler = Scheduler(members, self._sizes, self._interval, self._relays, now, has_pieces)
        self._start(part)
        ticked = 0.0
        while not self._scheduler.over:
            for call in self._arrived():
                call()
            if self._broken is not None:
                raise self._broken
            if time.monotonic() - ticked > SLICE:
                ticked = time.monotonic()
                self._carry_out(self._scheduler.tick(ticked))
                self._progress.uplink(self._tally.uplink, self._tally.uplink + self._scheduler.unsent())
                if self._fleet.check:
                    self._fleet.check()
        self._progress.uplink(self._tally.uplink, self._tally.uplink)
        self._end_relays()

    def _arrived(self) -> Iterator[Callable[[], None]]:
        """Yield calls that threads have queued, at most about a thousand; wait for the first one at most 0.05 s."""
        with contextlib.suppress(queue.Empty):
            yield self._queue.get(timeout=SLICE)
            for _ in range(_ROUND):
                yield self._queue.get_nowait()

    def _start(self, part: Sequence[Receiver]) -> None:
        """Send each node the request that starts its relay, in threads; from now on its reports are queued for run().

        Pieces are sent as soon as one relay is ready.
        """
        secret: RelaySecret = {}
        if self._relays:
            secret["certificate"], secret["key"] = certificate()
        for one in part:
            member = self._scheduler.members[one.node]
            order: RelayRequest = {
                "manifest": self._shipment.name,
                "size": len(self._shipment.text),
                "count": len(self._sizes),
                "report": self._interval,
                "release": one.release,
                "groups": one.groups,
                "address": member.address,
                "helper": member.helper,
                **secret,
            }
            self._fleet.agents[one.node].on_relay = functools.partial(self._queue_call, self._take_report)
            self._in_background(functools.partial(self._request_relay, one.node, RELAY(order)))

    def _end_relays(self) -> None:
        """End the relays of all nodes that have not failed, carry out the calls that are left, and count bytes in the tally."""
        members = self._scheduler.members
        self._fleet.ask({node: END_RELAY({}) for node, one in members.items() if not one.failed}, timeout=_END)
        for node in members.keys() & self._fleet.agents.keys():
            self._fleet.agents[node].on_relay = None
        while not self._queue.empty():
            self._queue.get()()
        self._tally.between += sum(self._between.values())
        self._tally.served.update(self._scheduler.served)

    # -- in the loop --

    def _take_report(self, node: int, message: RelayReport) -> None:
        """Process a message of a node's relay. A node that sends one which is not valid has failed."""
        try:
            self._read_report(node, message)
        except ValueError as error:
            self._record_failure(node, self._run_again_error(node, f"its relay sent what is not valid: {error}"))

    def _count_bytes(self, node: int, size: int) -> None:
        """Count bytes that were sent to a node, in the tally and for the scheduler."""
        self._tally.uplink += size
        self._scheduler.taken(node, time.monotonic())

    def _take_sent(self, node: int, good: bool) -> None:
        """Report to the scheduler that a message was sent (good) or has failed, and do what it decides."""
        self._carry_out(self._scheduler.sent(node, good, time.monotonic()))

    def _carry_out(self, actions: Sequence[Action]) -> None:
        """Do what the scheduler decides: send pieces, sources and signs of life to relays, and let nodes fail.

        The connection of a node that is silent or takes no bytes is closed.
        """
        for action in actions:
            agent = self._fleet.agents[action.node]
            if isinstance(action, SendPiece):
                piece: RelayPiece = {"type": "relay-piece", "piece": action.piece}
                self._in_background(functools.partial(self._send, action.node, piece, action.piece))
            elif isinstance(action, SendSources):
                sources: RelaySources = {"type": "relay-sources", "sources": action.sources, "degree": action.degree}
                self._in_background(functools.partial(self._send, action.node, sources))
            elif isinstance(action, SendBeat):
                agent.nudge_relay()
            else:
                what, fix = _CAUSES[action.cause]
                silent = action.cause in (Cause.STUCK, Cause.SILENT)
                error, why = Unreachable if silent else DispatchError, self._scheduler.served.get(action.node, "")
                self._record_failure(action.node, error(what.format(LOST, why=why), fix, self._fleet.name(action.node)))
                if silent:
                    self._in_background(agent.link.close)  # a thread that still sends to it continues

    def _read_report(self, node: int, message: RelayReport) -> None:
        """Process a message of a node's relay, and do what the scheduler decides.

        Raises ValueError for pieces that do not exist.
        """
        if message["type"] == "relay-failed" or message["type"] == "relay-gone":
            self._record_failure(node, self._relay_error(node, message))
            return
        scheduler, count, now = self._scheduler, len(self._sizes), time.monotonic()
        if not scheduler.reported(node, now):
            return
        if message["type"] == "relay-ready":
            self._carry_out(scheduler.ready(node, message["port"], message["empty"], now))
        elif message["type"] == "relay-lacks":
            lacks, has = topology.numbers(message["lacks"], count), topology.numbers(message["have"], count)
            self._carry_out(scheduler.compared(node, lacks, has, now))
        elif message["type"] == "relay-idle":
            lacks = topology.numbers(message["lacks"], count)
            self._carry_out(scheduler.idle(node, lacks, int(message["live"]), list(map(str, message["why"])), now))
        elif message["type"] == "relay-wrong":
            topology.require_below(count, [message["piece"]])
            self._carry_out(scheduler.damaged(node, message["piece"], now))
        else:
            topology.require_below(count, message["came"])
            self._between[node] = message["peers"]
            self._carry_out(scheduler.came(node, message["came"], message["live"], now))
            if message["type"] == "relay-done":
                self._carry_out(scheduler.done(node, now))
            self._show(node, message["left"])

    def _show(self, node: int, left: int) -> None:
        """Report the progress of a node that receives: the bytes that it has, or that it has everything."""
        member = self._scheduler.members[node]
        if member.open:
            size = sum(self._sizes)
            self._progress.node(self._fleet.name(node), max(0, size - left), size)
        elif not member.helper and not member.failed:
            self._progress.done(self._fleet.name(node))

    def _relay_error(self, node: int, message: RelayFailed | RelayGone) -> ClustertoolError:
        """Build the error of a node whose relay has failed or ended."""
        if message["type"] == "relay-gone":
            why = f": {message['why']}" if message.get("why") else ""
            return self._run_again_error(node, f"its relay has gone{why}")
        if message.get("kind") == "InternalError":
            return InternalError(message["what"], "", self._fleet.name(node))
        kind = message.get("kind", "DispatchError")
        return from_wire(kind, message["what"], message["fix"], self._fleet.name(node))

    def _run_again_error(self, node: int, what: str) -> DispatchError:
        """Build the error of a node whose fix is to run the command again. what: its text."""
        return DispatchError(what, "run it again", self._fleet.name(node))

    def _record_failure(self, node: int, error: ClustertoolError) -> None:
        """Record that a node has failed, unless it has received everything, and do what the scheduler decides.

        A helper is not recorded in the tally: it has the release.
        """
        member = self._scheduler.members[node]
        if node not in self._tally.failed and (member.helper or member.phase is not DispatchPhase.DONE):
            if not member.helper:
                self._tally.failed[node] = as_dispatch_error(error)
            self._carry_out(self._scheduler.failed(node, time.monotonic()))

    # -- in other threads --

    def _queue_call(self, call: Callable[..., None], *arguments: object) -> None:
        """Queue a call, from another thread, for the loop of run()."""
        self._queue.put(functools.partial(call, *arguments))

    def _in_background(self, work: Callable[[], None]) -> None:
        """Do work in a thread. Any exception that it raises ends run()."""

        def run() -> None:
            try:
                work()
            except BaseException as error:  # noqa: BLE001 - raised again by the loop
                self._broken = error

        in_background(run)

    def _request_relay(self, node: int, request: Request[Answer]) -> None:
        """Send a node the request that starts its relay. After an error the node has failed."""
        try:
            self._fleet.ask_one(node, request)
        except ClustertoolError as error:
            self._queue_call(self._record_failure, node, error)

    def _send(self, node: int, message: RelayOrder, piece: int | None = None) -> None:
        """Send a node's relay a message, with the bytes of a piece, if given.

        Queue calls for the bytes sent, a failure, and the end.
        """
        data = b"" if piece is None else self._shipment.read(piece)

        def moved(size: int) -> None:
            if data:
                self._queue_call(self._count_bytes, node, size)

        try:
            self._fleet.agents[node].send_to_relay(message, data, moved, lambda: self._scheduler.gentle)
            good = True
        except ClustertoolError as error:
            self._queue_call(self._record_failure, node, error)
            good = False
        self._queue_call(self._take_sent, node, good)


_CAUSES = {
    Cause.DAMAGED: ("pieces arrive damaged", "check the node's memory and network"),
    Cause.STUCK: ("it takes no bytes for {:g} s", "check the node and the network, then run it again"),
    Cause.ALONE: ("it cannot connect to a node that has it ({why})", "check the firewall between the nodes"),
    Cause.SOURCELESS: ("no node is left that has all of it", "run it again"),
    Cause.SILENT: ("no message from it for {:g} s", "check the node and the network, then run it again"),
}
