"""The lead's ear and mouth: turns messages and silence into events for decide(), and its actions into messages.

A stranger costs one descriptor for two seconds at most, and their number is bounded: when the places are taken, the ones that
had time to show who they are leave, and new ones wait in the kernel's queue. All nodes of a big job may knock at once.
"""

from __future__ import annotations

import hmac
import time
from typing import TYPE_CHECKING, Any, Callable, Dict, FrozenSet, List, Optional, Set, Tuple, cast

from clustertool.model.job.outcome import Key, coordinator
from clustertool.model.job.state_names import JobState
from clustertool.model.wire.frames import Header
from clustertool.model.wire.lead_messages import Incarnation, read_incarnation
from clustertool.node.supervisor import lead_decisions as l
from clustertool.node.system.process_clock import OwnClock
from clustertool.node.system.tls_link import Mailbox, Wire, beat, context, join_patience, listen

if TYPE_CHECKING:
    from clustertool.model.wire.event_types import OutcomeFields, RankOutput
    from clustertool.model.wire.lead_messages import ExitRow, MemberMessage, Order, StartOrder
    from clustertool.model.wire.spec_types import Spec

_STRANGERS = 64  # places beside two for each node
_PATIENCE = 2.0  # for a stranger, and this much more for each node: many that join at once take turns
_PATIENCE_EACH = 0.02
_HASTE = 0.5  # the same when places are short
_LATE = 1.0  # for a node that has not joined when the job ends
_MAX_HEADER = 1 << 16
_LONGEST_PAUSE = 30.0  # seconds before a new attempt: 1, 2, 4, ... up to this
_MAX_BACKLOG = 4 << 20
_MALFORMED = (KeyError, TypeError, ValueError, OverflowError)
_LONGEST_REASON = 200
# Seconds between the first failure and the stop. The ranks of a job fail of the same error (a module that is missing, a wrong
# setting) a few 10 ms apart; a rank that is stopped in this time would count as a victim of an error that it has itself.
_HOLD = 0.5
_LARGE = 1e18  # steps and seconds


class _Peer:
    """A joined node: what is on its way to it outlives its connection."""

    def __init__(self, heard: float) -> None:
        self.mail = Mailbox()
        self.wire: Optional[Wire] = None
        self.heard = heard  # by the lead's own clock
        self.blocked = 0.0  # seconds that this clock had left out by then
        self.joined = False
        self.left = False
        self.first_order = 0  # the number of the first message that is an order, 0 before
        self.ranks: List[RankOutput] = []  # how far its ranks were when it reported that
        self.sender: Optional[Incarnation] = None  # the supervisor that has joined


class LeadServer:
    """`deliver` hands an order to this node's own supervisor, `me`; `record` writes an event of the lead."""

    def __init__(
        self, spec: Spec, me: Incarnation, deliver: Callable[[Order], None], record: Callable[..., None]
    ) -> None:
        shape = spec["shape"]
        self._me = me
        self._node = int(spec["node"])
        self._token = str(spec["token"])
        self._timeout = float(spec["policy"]["loss_timeout"])
        self._deliver = deliver
        self._record = record
        self._state = l.State(
            l.Shape(
                frozenset(range(len(shape["names"]))),
                tuple(shape["names"]),
                tuple(((str(role), int(rank)), int(node)) for role, rank, node in shape["place"]),
                spec["policy"]["on_failure"],
                int(spec["policy"]["max_restarts"]),
            )
        )
        now = time.monotonic()
        self._clock = OwnClock()
        self._peers = {node: _Peer(0.0) for node in range(len(shape["names"])) if node != self._node}
        self._strangers: Dict[Wire, float] = {}
        self._endpoint = str(spec["lead"]["endpoint"])
        self._where = coordinator(str(spec["lead"]["name"]), self._endpoint)
        self._context = context(spec["certificate"], spec["key"], server=True)
        self._listener = listen(str(spec["lead"]["host"]), int(spec["lead"]["port"]), 1024)
        self._join_patience = join_patience(self._timeout, len(self._peers))
        self._stranger = _PATIENCE + _PATIENCE_EACH * len(self._peers)
        self._beat_at = 0.0
        limit = float(spec["policy"]["timeout"])
        self._deadline = now + limit if limit else None
        self._limit = limit
        self._finished_at: Optional[float] = None
        self._lease = float(spec["policy"]["lease"])
        self._attached_at = now
        self._restart: Optional[Tuple[float, StartOrder]] = None  # when a new attempt begins, and with which order
        self._all_started = False  # every node has acknowledged its first order
        self._stop_at: Optional[float] = None  # when the stop is sent that waits for further failures

    # -- for the supervisor's loop --

    def readers(self) -> List[Any]:
        return [*([] if self._full() else [self._listener]), *self._wires()]

    def writers(self) -> List[Any]:
        return [wire for wire in self._wires() if wire.wants_write]

    def _wires(self) -> List[Wire]:
        return [*self._strangers, *(peer.wire for peer in self._peers.values() if peer.wire is not None)]

    @property
    def done(self) -> bool:
        """The verdict has reached every node that is not lost, or by now they know that they are."""
        if self._finished_at is None:
            return False
        waiting = any(
            peer.mail.kept() and not peer.left for node, peer in self._peers.items() if node not in self._state.lost
        )
        return not waiting or self._clock.now - self._finished_at > self._timeout

    def turn(self, ready: Set[int]) -> None:
        """`ready`: descriptors that can be read or written. After this process was blocked it is old, and all are read."""
        now = self._clock.turn()
        everybody = self._clock.napped
        if everybody or self._full() or self._listener.fileno() in ready:
            self._accept(now)
        for wire, until in list(self._strangers.items()):
            if everybody or wire.fileno() in ready or now > until:
                self._meet(wire, now)
        for node, peer in self._peers.items():
            if peer.wire is not None and (everybody or peer.wire.fileno() in ready):
                self._hear(node, peer, now)
        self._beat(now)
        self._watch(now)

    def receive(self, node: int, message: MemberMessage) -> None:
        """A message of this node's own supervisor becomes an event."""
        event = self._event(node, dict(message))
        if event is not None:
            self._decide(event)

    def _event(self, node: int, message: Header) -> Optional[l.Event]:
        """What a supervisor reports. Raises one of _MALFORMED."""
        if message.get("type") == "attached":
            self._attached_at = time.monotonic()
        return _event(self._state.shape.on(node), node, message)

    # -- connections --

    def _full(self) -> bool:
        return len(self._strangers) >= _STRANGERS + 2 * len(self._peers)

    def _accept(self, now: float) -> None:
        if self._full():
            for wire, until in list(self._strangers.items()):
                if now > until - self._stranger + _HASTE:
                    self._dismiss(wire)
        while not self._full():
            try:
                sock, _ = self._listener.accept()
            except (BlockingIOError, ConnectionError, OSError):
                return
            self._strangers[Wire(sock, self._context, server=True, max_header=_MAX_HEADER)] = now + self._stranger

    def _meet(self, wire: Wire, now: float) -> None:
        """A connection is a stranger until it has shown the job's certificate, its token, a node id and its incarnation."""
        try:
            came = wire.turn()
        except ConnectionError:
            return self._dismiss(wire)
        if not came:
            if now > self._strangers[wire]:
                self._dismiss(wire)
            return None
        hello = came[0]
        node = hello["node"] if isinstance(hello.get("node"), int) else -1
        peer = self._peers.get(node)
        token = str(hello.get("token", "")).encode(errors="replace")
        if hello.get("type") != "join" or peer is None or not hmac.compare_digest(token, self._token.encode()):
            return self._dismiss(wire)
        try:
            sender = read_incarnation(hello.get("sender"))
            member = read_incarnation(hello.get("of")) if hello.get("gone") else sender
        except ValueError:
            return self._dismiss(wire)
        if peer.sender not in (None, member):
            return self._dismiss(wire)
        del self._strangers[wire]
        if peer.wire is not None:
            self._hear(node, peer, now)  # the last words of the old connection
        if peer.wire is not None:
            peer.wire.close()
        peer.wire, peer.left, peer.sender = wire, False, sender
        self._heard(peer, now)
        if not self._take(node, peer, hello):
            return None
        wire.send(self._stamped({"type": "welcome", "ack": peer.mail.got}))
        for message in peer.mail.kept():
            wire.send(message)
        if not peer.joined:
            peer.joined = True
            self._decide(l.Joined(node))
        if hello.get("gone"):
            return self._gone(node, str(hello["gone"])[:_LONGEST_REASON])
        for message in came[1:]:
            if not self._take(node, peer, message):
                break
        return None

    def _take(self, node: int, peer: _Peer, message: Header) -> bool:
        """One message of a member. A malformed one ends this member's part, and nothing else: then False.

        One of another process than the member is dropped.
        """
        try:
            if read_incarnation(message.get("sender")) != peer.sender:
                return True
            if "ranks" in message:
                peer.ranks = self._reached(node, message["ranks"])
            event = self._event(node, message) if peer.mail.take(message) else None
        except _MALFORMED as error:
            if peer.wire is not None:
                peer.wire.close()
                peer.wire = None
            self._gone(node, f"it sent a message that cannot be read ({error!r:.100})")
            return False
        if event is not None:
            self._decide(event)
        return True

    def _gone(self, node: int, why: str) -> None:
        """A guard's word: its supervisor is dead, and it ends the node's processes now."""
        self._peers[node].left = True
        if node not in self._state.gone:
            self._record("lost", node=node, why=why, ranks=self._peers[node].ranks)
            self._decide(l.Lost(node, why))

    def _dismiss(self, wire: Wire) -> None:
        del self._strangers[wire]
        wire.close()

    def _hear(self, node: int, peer: _Peer, now: float) -> None:
        assert peer.wire is not None
        try:
            came = peer.wire.turn()
            if peer.wire.backlog > _MAX_BACKLOG:
                raise ConnectionError("does not read")
        except ConnectionError:
            peer.wire.close()
            peer.wire = None
            return
        if came:
            self._heard(peer, now)
        for message in came:
            peer.left = peer.left or bool(message.get("bye"))
            if not self._take(node, peer, message):
                return

    def _heard(self, peer: _Peer, now: float) -> None:
        peer.heard, peer.blocked = now, self._clock.blocked

    def _reached(self, node: int, ranks: Any) -> List[RankOutput]:
        """[role, rank, epoch, step, time of the last output] of the ranks of a node: what is known of them if it is lost.

        Raises one of _MALFORMED.
        """
        own, now = self._state.shape.on(node), time.time()
        found: List[RankOutput] = []
        for role, rank, epoch, step, age in ranks:
            if (role, rank) in own:
                found.append((role, rank, _number(epoch), _number(step), round(now - (_number(age) or 0.0), 2)))
        return found

    def _beat(self, now: float) -> None:
        if now < self._beat_at:
            return
        self._beat_at = now + beat(self._timeout)
        for peer in self._peers.values():
            if peer.wire is not None:
                peer.wire.send(self._stamped({"type": "beat", "ack": peer.mail.got}))

    def _watch(self, now: float) -> None:
        """Silence and time become events. Silence is measured by the own clock: time in which this process did not run is
        not counted, and what arrived then was read before. A node whose lease ended meanwhile gives up the lead by itself.
        """
        self._all_started = self._all_started or all(
            peer.first_order and not peer.mail.keeps(peer.first_order)
            for node, peer in self._peers.items()
            if node not in self._state.gone
        )
        silent = [
            node
            for node, peer in self._peers.items()
            if now - peer.heard > self._patience(peer) and node not in self._state.gone
        ]
        for node in silent:
            peer = self._peers[node]
            if peer.joined:
                blocked = self._clock.blocked - peer.blocked
                what = f"no heartbeat for {self._patience(peer):g} s"
                what += f" (and {blocked:.0f} s in which the coordinator itself did not run)" if blocked >= 1 else ""
                self._record("lost", node=node, why=what, ranks=peer.ranks)
                self._decide(l.Lost(node, what))
        absent = [node for node in silent if not self._peers[node].joined]
        if absent:
            self._record("absent", nodes=absent, endpoint=self._endpoint, seconds=round(now))
            self._decide(l.Absent(tuple(absent), self._where, round(now)))
        self._watch_time(time.monotonic())

    def _watch_time(self, now: float) -> None:
        """What happens at a time: by the clock of the machine."""
        if self._deadline is not None and now > self._deadline:
            self._deadline = None
            missing = l.expected(self._state, self._where)
            waited = f"; it waited for {missing}" if missing else ""
            brief = f"the job's time is over: --timeout {self._limit:g}"
            self._decide(l.StopAsked(f"{brief}{waited}", 124, JobState.TIMEOUT, brief))
        if self._lease and now - self._attached_at > self._lease:
            self._lease = 0.0
            self._decide(l.StopAsked(f"no laptop was attached for {now - self._attached_at:.0f} s (--lease)", 143))
        if self._stop_at is not None and now >= self._stop_at:
            self._release()
        if self._restart is not None and now >= self._restart[0]:
            _, message = self._restart
            self._restart = None
            self._tell(message)

    def _patience(self, peer: _Peer) -> float:
        """Seconds of silence that are allowed. There are more until all nodes have acknowledged their first order."""
        ending = self._state.phase == "ending"
        if peer.joined:
            return self._timeout if self._all_started or ending else self._join_patience
        return _LATE if ending else self._join_patience

    # -- decisions --

    def join_self(self) -> None:
        self._decide(l.Joined(self._node))

    def _decide(self, event: l.Event) -> None:
        before = self._state.phase
        self._state, actions = l.decide(self._state, event)
        if self._state.phase != before and l.may_fail(self._state):
            self._stop_at = time.monotonic() + _HOLD
            return
        if self._stop_at is not None and (actions or not l.may_fail(self._state)):
            self._release()
        for action in actions:
            if (
                isinstance(action, l.Start) and action.again
            ):  # the phase that is recorded next belongs to the new attempt
                self._begin_again(action)
        if self._state.phase != before:
            self._record_phase()
        for action in actions:
            self._act(action)

    def _release(self) -> None:
        """Send the stop of a failure: no more failures are waited for."""
        self._stop_at = None
        self._record_phase()
        self._act(l.stop(self._state))

    def _record_phase(self) -> None:
        end = self._state.ending
        self._record("phase", name=self._state.phase, **self._cause(), **({"end": end.state} if end else {}))

    def _cause(self) -> Dict[str, Any]:
        """Of an ending: the failures that are known now, the first one first. The followers print them before anything else."""
        if self._state.phase != "ending" or not self._state.culprits:
            return {}
        culprits = [list(exit.key) for exit in self._state.culprits]
        return {"why": l.reason(self._state), "culprits": culprits, "attempt": self._state.attempt}

    def _begin_again(self, action: l.Start) -> None:
        pause = min(2.0 ** (action.attempt - 1), _LONGEST_PAUSE)
        self._record("restart", attempt=action.attempt, pause=pause)
        self._restart = (time.monotonic() + pause, self._start(action))

    def _start(self, action: l.Start) -> StartOrder:
        return {"type": "start", "role": action.role, "attempt": action.attempt, "sender": self._me}

    def _act(self, action: l.Action) -> None:
        if isinstance(action, l.Start):
            if not action.again:
                self._tell(self._start(action))
        elif isinstance(action, l.Stop):
            self._restart = None
            self._tell({"type": "stop", "why": action.why, "attempt": self._state.attempt, "sender": self._me})
        else:
            self._record("verdict", **action.outcome.as_record())
            self._finished_at = self._clock.now
            outcome = cast("OutcomeFields", action.outcome.as_record())
            self._tell({"type": "finish", "outcome": outcome, "attempt": self._state.attempt, "sender": self._me})

    def _tell(self, order: Order) -> None:
        for peer in self._peers.values():
            numbered = peer.mail.post(dict(order))
            peer.first_order = peer.first_order or int(numbered["number"])
            if peer.wire is not None:
                peer.wire.send(numbered)
        self._deliver(order)

    def _stamped(self, message: Header) -> Header:
        return {**message, "attempt": self._state.attempt, "sender": self._me}

    def close(self) -> None:
        for wire in self._wires():
            wire.close()
        self._listener.close()


def _event(ranks: FrozenSet[Key], node: int, message: Header) -> Optional[l.Event]:
    """`ranks`: those of the node. Raises one of _MALFORMED."""
    kind = message.get("type")
    if kind == "listening":
        return l.Listening(_key(ranks, message["role"], message["rank"]), int(message["attempt"]))
    if kind == "exited":
        return l.Exited(tuple(_exit(ranks, item) for item in message["exits"]), int(message["attempt"]))
    if kind == "clean":
        return l.Clean(node, tuple(str(s) for s in message["survivors"]), int(message["attempt"]))
    if kind == "stop":
        return l.StopAsked(str(message["by"]), int(message["code"]))
    return None


def _exit(ranks: FrozenSet[Key], item: ExitRow) -> l.Exit:
    role, rank, code, number, stopped, note, error, consequence = item
    key = _key(ranks, role, rank)
    if not (0 <= int(code) <= 255 and 0 <= int(number) <= 127):
        raise ValueError("an exit code or a signal that does not exist")
    return l.Exit(*key, int(code), int(number), bool(stopped), str(note), int(error), bool(consequence))


def _number(value: Any) -> Optional[float]:
    """A step or an epoch; None for what cannot be one, since programs print anything."""
    return float(value) if value is not None and -_LARGE < value < _LARGE else None


def _key(ranks: FrozenSet[Key], role: object, rank: Any) -> Key:
    key = (str(role), int(rank))
    if key not in ranks:
        raise ValueError("a process of another node, or of none")
    return key
