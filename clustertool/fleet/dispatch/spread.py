"""Spreading pieces: the laptop gives each piece to one node, the nodes give it to one another; here is who gets what next.

Relays on the nodes tell what they lack and when they stand still. A node that reaches no other is served from here; what stays
missing somewhere although it was sent to somebody is sent once more; what a slow node should have by now goes to another one as
well. One thread decides, a few send.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from clustertool.errors import ClustertoolError, DispatchError, InternalError, Unreachable, from_wire
from clustertool.fleet.dispatch.pace import Pace
from clustertool.fleet.dispatch.receivers import Progress, Receiver, Tally, as_dispatch
from clustertool.fleet.dispatch.shipment import Shipment
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.identity import certificate
from clustertool.model.dispatch import topology
from clustertool.model.facts import Facts
from clustertool.model.wire.frames import Header
from clustertool.ssh.parallel import SLICE

_SENDERS = 3  # pieces on their way from here at a time, beside those to nodes that take them slowly:
_MOST_SENDERS = 32
_MEET = 3.0  # seconds after which those that are ready begin without the others
_CALM = 0.5  # seconds between two introductions while nodes still connect
_SOURCES = 12  # nodes that a node hears of: the best, and some for when they fail
_SETTLE = 1.0  # seconds that the others have to tell what they hold, once one did
_GRACE = 3.0  # seconds for the nodes to pass on a piece before it is sent once more
_BEAT = 5.0
_REPORT = 0.25  # seconds between two words of a node about how far it is
_WORDS = 64  # of them a second that we want to hear, from all nodes together
_RAREST = 4.0  # seconds; far less than _LOST
_STALL = 4.0  # seconds without a byte taken, after which a piece is sent to another node as well
_LOST = 20.0  # seconds without a word, or without a byte taken, after which a node is given up
_REST = 10.0  # seconds in which a slow node gets nothing that others wait for
_TRIES = 3  # times that a node may say that a piece came wrong
_END = 5.0


@dataclass
class _Node:
    """One participant. `lacks` None: not known yet."""

    receiver: Receiver
    helper: bool
    heard: float
    ready: bool = False
    port: int = 0
    empty: bool = False
    lacks: set[int] | None = None
    done: bool = False
    failed: bool = False
    alone: bool = False  # it reaches no other node: all it lacks comes from here
    direct: set[int] = field(default_factory=set)  # what it is to get from here, whoever else has it
    sending: float = 0.0  # when the last bytes for it went; 0: nothing is on its way
    news: Header | None = None  # who its sources are, if it has not been told yet
    piece: int = -1  # which one it is
    slow: float = 0.0  # until then it gets nothing that others wait for
    sent: int = 0
    between: int = 0
    wrong: int = 0

    @property
    def open(self) -> bool:
        return not (self.done or self.failed or self.helper)

    @property
    def seeds(self) -> bool:
        """What it is sent comes to the others."""
        return self.open and not self.alone

    @property
    def unsettled(self) -> bool:
        """It may hold pieces, and has not told which: one with a release or a store, until it has the manifest."""
        return not self.failed and (self.helper and self.lacks is None or self.lacks == {0} and not self.empty)


class Spread:
    """start(), add() nodes as they come, then `complete`, wait() until all that were added have everything, end().

    `tally` gets the bytes, the failures, and who was served from here and why.
    """

    def __init__(self, fleet: Fleet, shipment: Shipment, tally: Tally) -> None:
        self.shipment = shipment
        self.tally = tally
        self.progress: Progress | None = None
        self.complete = False  # all that take part have been added
        self.gentle = True  # they still connect over the same uplink, or are to hear of one another
        self._fleet = fleet
        self._report = min(max(_REPORT, len(fleet.cluster.hosts) / _WORDS), _RAREST)
        self._count = len(shipment.pieces)
        self._size = sum(piece.size for piece in shipment.pieces)
        self._words: queue.SimpleQueue[tuple[int, Header]] = queue.SimpleQueue()
        self._changed = threading.Condition()
        self._nodes: dict[int, _Node] = {}
        self._facts: dict[int, Facts] = {}
        self._seeded: dict[int, float] = {}  # pieces that a node other than a lonely one has, and since when
        self._sending: dict[int, int] = {}  # pieces on their way to be seeded -> the node
        self._there: set[int] = set()  # pieces that a node other than a lonely one has told to have come
        self._pace = Pace(self._report)
        self._late: dict[int, int] = {}  # pieces that should be there -> the slow node
        self._copied: set[int] = set()  # late pieces that another node was sent as well
        self._senders = 0
        self._wanted = _SENDERS
        self._over = False
        self._broken: BaseException | None = None  # a file changed under us, or a bug
        self._meet = self._beat = self._judged = self._settled = self._introduced = 0.0
        self._relays = fleet.cluster.relay != "off" and len(fleet.cluster.hosts) > 1
        self._secret: dict[str, str] = {}

    @property
    def nodes(self) -> tuple[int, ...]:
        return tuple(self._nodes)

    def start(self) -> None:
        if self._relays:
            self._secret["certificate"], self._secret["key"] = certificate()
        self._more_senders()
        self._begin(self._decide)

    def add(self, receivers: Sequence[Receiver], facts: Mapping[int, Facts], helper: bool = False) -> None:
        """Let these nodes take part. A helper has the release already and only serves."""
        if helper and not self._relays:
            return
        about = {"manifest": self.shipment.name, "size": len(self.shipment.text), "count": self._count}
        request = {"q": "relay", **about, "helper": helper, "report": self._report, **self._secret}
        requests = {}
        with self._changed:
            now = time.monotonic()
            for receiver in receivers:
                at = receiver.node
                self._facts[at] = facts[at]
                self._nodes[at] = _Node(receiver, helper, now, alone=not self._relays)
                self._fleet.agents[at].hear = lambda at, word: self._words.put((at, word))
                own = {"release": receiver.release, "groups": receiver.groups, "address": facts[at].address}
                requests[at] = {**request, **own}
            self._meet = now + _MEET
        gathered = self._fleet.ask(requests, patient=True)
        with self._changed:
            for at, error in gathered.failed.items():
                self._fail(at, error)

    def watch(self, progress: Progress) -> None:
        """Tell it how far all are, from now on."""
        with self._changed:
            self.progress = progress
            for at, node in self._nodes.items():
                if node.done and not node.helper:
                    progress.done(at)

    def wait(self) -> None:
        """Raises DispatchError when a file changes under us; nodes that fail are in the tally."""
        while self._broken is None and any(node.open for node in self._nodes.values()):
            if self._fleet.check:
                self._fleet.check()
            if self.progress:
                self.progress.uplink(self.tally.uplink, self._planned())
            with self._changed:
                self._changed.wait(SLICE)
        if self._broken is not None:
            raise self._broken
        if self.progress:
            self.progress.uplink(self.tally.uplink, self.tally.uplink)

    def end(self) -> None:
        """No relay is left, and no port of one."""
        self._stop()
        self._fleet.ask({at: {"q": "unrelay"} for at, node in self._nodes.items() if not node.failed}, timeout=_END)
        for at, node in self._nodes.items():
            self.tally.between += node.between
            if at in self._fleet.agents:
                self._fleet.agents[at].hear = None

    def _stop(self) -> None:
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def _begin(self, work: Callable[[], None]) -> None:
        threading.Thread(target=self._guarded, args=(work,), daemon=True).start()

    def _guarded(self, work: Callable[[], None]) -> None:
        """What ends a thread early ends the dispatch, in the thread that waits for it."""
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - a file that changed, or a bug: told by wait()
            self._broken = error
            self._stop()

    # -- what the nodes say --

    def _decide(self) -> None:
        while not self._over:
            with contextlib.suppress(queue.Empty):
                first = self._words.get(timeout=SLICE)
                with self._changed:
                    self._hear(*first)
                    while not self._words.empty():
                        self._hear(*self._words.get())
                    self._changed.notify_all()
            self._look(time.monotonic())

    def _hear(self, at: int, word: Header) -> None:
        try:
            self._obey(at, word)
        except ValueError as error:
            self._fail(
                at, DispatchError(f"its relay sent what is not valid: {error}", "run it again", self._fleet.name(at))
            )

    def _obey(self, at: int, word: Header) -> None:
        topology.require_below(self._count, (*word.get("came", ()), word.get("i", 0)))
        node = self._nodes[at]
        node.heard = time.monotonic()
        if node.failed:
            return
        what = word["s"]
        if what == "ready":
            node.ready, node.port, node.empty = True, int(word["port"]), bool(word["empty"])
            node.lacks = {0} if node.lacks is None else node.lacks
            node.direct = {0} if node.alone else set()
            self._meet = self._meet or node.heard  # the others have met already
        elif what == "lacks":
            self._holds(node, topology.numbers(word["lacks"], self._count), topology.numbers(word["have"], self._count))
        elif what == "got":
            self._got(at, node, word)
        elif what == "idle":
            self._idle(at, node, word)
        elif what == "wrong":
            self._wrong(at, node, int(word["i"]))
        elif what == "done":
            self._got(at, node, word)
            node.done = True
            node.lacks = set()
            if not node.helper and self.progress:
                self.progress.done(at)
        elif what in ("failed", "gone"):
            self._fail(at, self._reason(at, word))

    def _got(self, at: int, node: _Node, word: Header) -> None:
        node.between = int(word["peers"])
        for piece in map(int, word["came"]):
            self._pace.came(at, piece)
            if not node.alone:
                self._there.add(piece)
        if word["live"] and node.alone and self._relays:  # it was only slow
            node.alone, node.direct = False, set()
            self.tally.served.pop(at, None)
        if node.open and self.progress:
            self.progress.node(at, max(0, self._size - int(word["left"])), self._size)

    def _holds(self, node: _Node, lacks: set[int], have: set[int]) -> None:
        """It has the manifest, so it has told what it holds."""
        node.lacks = lacks
        now = time.monotonic()
        self._settled = self._settled or now + _SETTLE
        if not node.alone:
            for piece in have:
                self._seeded.setdefault(piece, now)
        if node.alone:
            node.direct = set(lacks)

    def _idle(self, at: int, node: _Node, word: Header) -> None:
        """It stands still: it is alone, or nobody near it has what it lacks, or everybody waits for the uplink."""
        if not self._relays:
            return
        lacks = topology.numbers(word["lacks"], self._count)
        why = [str(text) for text in word["why"]]
        others = sum(other.ready and not other.failed for other in self._nodes.values()) - 1
        if not word["live"] and len(why) >= min(topology.degree(others + 1), others):
            if not node.alone:
                self.tally.served[at] = why[0] if why else "no other node is there"
            node.alone = True
        missing = lacks - self._pace.owed(at)
        node.lacks, node.direct = lacks, missing if node.alone else self._lost(missing)

    def _lost(self, lacks: set[int]) -> set[int]:
        """Pieces that went to somebody and never came on: they are sent once more, to one node at a time."""
        now = time.monotonic()
        found = {piece for piece in lacks if self._seeded.get(piece, now) < now - _GRACE}
        self._seeded.update(dict.fromkeys(found, now))
        return found

    def _wrong(self, at: int, node: _Node, piece: int) -> None:
        node.wrong += 1
        if node.wrong > _TRIES:
            fix = "check the node's memory and network"
            self._fail(at, DispatchError("pieces arrive damaged", fix, self._fleet.name(at)))
        elif node.lacks is not None:
            node.lacks.add(piece)
            node.direct.add(piece)

    def _reason(self, at: int, word: Header) -> ClustertoolError:
        name = self._fleet.name(at)
        if word["s"] == "gone":
            return DispatchError(
                f"its relay has gone{': ' + word['why'] if word.get('why') else ''}", "run it again", name
            )
        if word.get("kind") == "InternalError":
            return InternalError(word["what"], "", name)
        return from_wire(word.get("kind", "DispatchError"), word["what"], word["fix"], name)

    def _fail(self, at: int, error: ClustertoolError) -> None:
        node = self._nodes[at]
        if node.failed or (node.done and not node.helper):
            return
        node.failed = True
        if not node.helper:
            self.tally.failed[at] = as_dispatch(error)

    # -- what is done about it --

    def _look(self, now: float) -> None:
        with self._changed:
            present = {at: node for at, node in self._nodes.items() if not node.failed}
            if now - self._judged > SLICE:
                self._judged = now
                self._judge(now)
            met = self._meet and (all(node.ready for node in present.values()) or now > self._meet)
            met = met and (self.complete or now - self._introduced > _CALM)
            if met:
                self._meet, self._introduced = 0.0, now
        if met:
            self._introduce()
        if self.complete and not self._meet:
            self.gentle = False
        if now - self._beat > _BEAT:
            self._beat = now
            for at, node in present.items():
                if not node.sending:
                    self._fleet.agents[at].nudge_relay()
        for at, node in present.items():
            silent = node.open and now - node.heard > _LOST
            stuck = node.sending and now - node.sending > _LOST
            if silent or stuck:
                what = f"it takes no bytes for {_LOST:g} s" if stuck else f"no message from it for {_LOST:g} s"
                fix = "check the node and the network, then run it again"
                with self._changed:
                    self._fail(at, Unreachable(what, fix, self._fleet.name(at)))
                agent = self._fleet.agents[at]
                threading.Thread(target=agent.link.close, daemon=True).start()  # a sender that waits for it goes on

    def _judge(self, now: float) -> None:
        """Who is slow: others come first, and for each sender that is stuck with one there is one more."""
        late = {(at, piece) for at, piece in self._pace.late(now) if not self._nodes[at].failed}
        stuck = 0
        for at, piece in late:
            node = self._nodes[at]
            node.slow = now + _REST
            stuck += bool(node.sending) and node.piece == piece
        self._late = {piece: at for at, piece in late if self._nodes[at].seeds}
        self._wanted = min(_SENDERS + stuck, _MOST_SENDERS)
        self._more_senders()

    def _introduce(self) -> None:
        """Everybody hears of everybody. Those that come later are told too, by a new list."""
        with self._changed:
            order = [at for at, node in self._nodes.items() if node.ready and not node.failed] if self._relays else []
            places = [[self._facts[at].address, self._nodes[at].port] for at in order]
            for me, at in enumerate(order):
                some = [places[other] for other in topology.sources(len(order), me)[:_SOURCES]]
                self._nodes[at].news = {"k": "sources", "sources": some, "degree": topology.degree(len(order))}
            idle = [at for at in order if not self._nodes[at].sending]  # behind a piece all others would wait
        for at in idle:
            self._tell_news(at)

    def _tell_news(self, at: int) -> None:
        with self._changed:
            node = self._nodes[at]
            news, node.news = node.news, None
        if news is None:
            return
        try:
            self._fleet.agents[at].tell_relay(news)
        except ClustertoolError as error:
            with self._changed:
                self._fail(at, error)

    def _planned(self) -> int:
        """Bytes that the uplink will have carried, as far as one can tell."""
        with self._changed:
            sizes = [piece.size for piece in self.shipment.pieces]
            first = sum(size for number, size in enumerate(sizes) if number not in self._seeded) if self._relays else 0
            direct = sum(sizes[piece] for node in self._nodes.values() if node.open for piece in node.direct)
            return self.tally.uplink + first + direct

    # -- sending --

    def _more_senders(self) -> None:
        for _ in range(self._senders, self._wanted):
            self._senders += 1
            self._begin(self._send)

    def _send(self) -> None:
        """One of the senders."""
        while True:
            with self._changed:
                while not self._over and self._senders <= self._wanted:
                    chosen = self._next()
                    if chosen is not None:
                        break
                    self._changed.wait(0.2)
                else:
                    self._senders -= 1
                    return
            self._one(*chosen)

    def _next(self) -> tuple[int, int] | None:
        """(node, piece) to send now."""
        if self._over:
            return None
        now = time.monotonic()
        free = sorted((node.slow > now, node.sent, at) for at, node in self._nodes.items() if self._takes(node))
        for _, _, at in free:
            node = self._nodes[at]
            lacks = node.lacks or set()
            ready = sorted(node.direct & lacks)
            if ready:
                return self._take(at, ready[0])
        unsettled = any(node.unsettled for node in self._nodes.values())
        if unsettled and now < self._settled and 0 in self._seeded:
            return None
        held = {*self._seeded, *(piece for piece, to in self._sending.items() if self._moves(self._nodes[to]))}
        for slow, _, at in free:
            node = self._nodes[at]
            if not node.seeds:
                continue
            piece = min((piece for piece in node.lacks or () if piece not in held), default=-1)
            if piece >= 0 and not (slow and self._quick_lack(piece, now)):
                return self._seed(at, piece)
        return self._copy([at for slow, _, at in free if not slow and self._nodes[at].seeds])

    def _quick_lack(self, piece: int, now: float) -> bool:
        return any(node.seeds and node.slow <= now and piece in (node.lacks or ()) for node in self._nodes.values())

    def _copy(self, quick: Sequence[int]) -> tuple[int, int] | None:
        """This sender has nothing else to do: what a slow node should have by now goes to one other as well."""
        for piece in sorted(self._late.keys() - self._copied - self._there):
            for at in quick:
                if at != self._late[piece] and piece in (self._nodes[at].lacks or ()):
                    self._copied.add(piece)
                    return self._seed(at, piece)
        return None

    def _seed(self, at: int, piece: int) -> tuple[int, int]:
        self._sending[piece] = at
        return self._take(at, piece)

    @staticmethod
    def _moves(node: _Node) -> bool:
        return not node.failed and time.monotonic() - node.sending < _STALL

    @staticmethod
    def _takes(node: _Node) -> bool:
        return node.ready and bool(node.lacks) and not (node.failed or node.done or node.sending)

    def _take(self, at: int, piece: int) -> tuple[int, int]:
        node = self._nodes[at]
        node.sending, node.piece = time.monotonic(), piece
        self._pace.begun(at, piece, self.shipment.pieces[piece].size, node.sending)
        return at, piece

    def _one(self, at: int, piece: int) -> None:
        node = self._nodes[at]
        data = self.shipment.read(piece)

        def moved(size: int) -> None:
            node.sending = time.monotonic()
            self.tally.uplink += size

        try:
            self._fleet.agents[at].tell_relay({"k": "piece", "i": piece}, data, moved, lambda: self.gentle)
            good = True
        except ClustertoolError as error:
            good = False
            with self._changed:
                self._fail(at, error)
        self._tell_news(at)
        with self._changed:
            node.sending = 0.0
            node.sent += len(data)
            if self._sending.get(piece) == at:
                del self._sending[piece]
            node.direct.discard(piece)
            if good and node.lacks is not None:
                node.lacks.discard(piece)
                if not node.alone:
                    self._seeded.setdefault(piece, time.monotonic())
            self._changed.notify_all()
        self._tell_news(at)  # which may have come in the last moment
