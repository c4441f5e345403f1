"""A relay is a node's part of a dispatch: one process that fetches pieces from other nodes, and serves at once those it has.

The laptop orders it through the agent's socket: the manifest's digest, a throw-away certificate, the other nodes. Its server
only reads. A piece is kept only if its bytes have the name that the manifest (whose own name came over SSH) gives it, so a
false source can waste time and nothing else. What it fetches, and from which source, the fetch scheduler decides.
What nodes send goes from the network to the disk, and from there on, a little at a time: on a full machine new memory is
what takes longest. Its process (relay_process.py) ends when the agent does, or the laptop is silent.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import time
from collections import deque
from typing import TYPE_CHECKING, Deque, Dict, List, Optional

from clustertool.model.dispatch import fetch_scheduler as fetch
from clustertool.model.dispatch import manifest, topology
from clustertool.model.wire.frames import Decoder, Frame, FrameError, Header, Sink, encode
from clustertool.node.dispatch.piece_inventory import Inventory
from clustertool.node.storage.release_store import Store, no_room
from clustertool.node.system.tls_link import TlsLink, context, dial, listen, wait_for

if TYPE_CHECKING:
    from clustertool.model.wire.agent_requests import RelayRequest

_AHEAD = 256 << 10  # bytes that wait for a taker before the next piece is opened for it
_MOST_OWED = 8  # pieces one taker may wait for
_TAKERS = 16  # connections that are served
_STRANGERS = 16  # those that have not shown the certificate yet
_PATIENCE = 4.0  # seconds for a stranger to do so
_SILENCE = 60.0  # seconds without a message of the laptop, which beats every few
_MAX_HEADER = 1 << 20
_TICK = 0.1
_SAVING = 0.005  # the same while the last pieces are written to the disk


class PeerLink:
    """A connection to another node: a source, which sends pieces to us, or a taker, which is sent some."""

    wire: TlsLink

    def __init__(self, source: Optional[fetch.Address], now: float) -> None:
        self.source = source  # its address; None: a taker
        self.since = now
        self.coming: Deque[Sink] = deque()  # where pieces go that a source sends
        self.owed: List[int] = []  # pieces that a taker has requested
        self.announced: Optional[int] = None  # number of this node's pieces that a taker knows of

    @property
    def taker(self) -> bool:
        """Whether the other node is a taker."""
        return self.source is None


class LaptopLink:
    """The relay's end of a socket pair to the agent. `closed`: the agent has ended, and the relay ends."""

    def __init__(self, sock: socket.socket, now: float) -> None:
        self.active_at = now  # when something came last
        self.closed = False
        self._sock = sock
        self._decoder = Decoder(max_payload=manifest.MOST)
        self._out = bytearray()

    def fileno(self) -> int:
        return self._sock.fileno()

    @property
    def wants_write(self) -> bool:
        """Whether messages wait to be sent."""
        return bool(self._out)

    def report(self, kind: str, **more: object) -> None:
        """Send the laptop a message of type relay-<kind>, as far as the socket takes it."""
        self._out += encode({"type": f"relay-{kind}", **more})
        self._flush()

    def turn(self, now: float) -> List[Frame]:
        """Receive messages, return them as (header, payload), and send what is left.

        Sets `closed` at the end of the connection.
        """
        try:
            data = self._sock.recv(1 << 18)
        except BlockingIOError:
            self._flush()
            return []
        except OSError:
            data = b""
        self.closed = self.closed or not data
        self.active_at = now
        frames = list(self._decoder.feed(data))
        self._flush()
        return frames

    def _flush(self) -> None:
        """Send queued messages as far as the socket takes them; note a connection that has failed."""
        try:
            with memoryview(self._out) as view:
                sent = self._sock.send(view)
            del self._out[:sent]
        except BlockingIOError:
            return
        except OSError:
            self.closed = True


class Relay:
    """A node's part of a dispatch: its connections, the pieces that it has, and the scheduler of what it fetches.

    Without a certificate in the order the laptop sends all pieces, and no other node is connected.
    """

    def __init__(self, control: socket.socket, order: RelayRequest, root: str) -> None:
        now = time.monotonic()
        self._order = order
        self._store = Store(root)
        self._inventory = Inventory(self._store, order)
        self._scheduler = fetch.FetchScheduler(os.urandom(8), now)
        self._laptop = LaptopLink(control, now)
        self._links: List[PeerLink] = []
        self._between = 0  # bytes that came from other nodes
        self._from_laptop: List[int] = []  # pieces that came since the last report
        self._reported = self._ticked = 0.0
        self._unreported = False  # something has come since then
        self._done = self._ended = False
        self._listener: Optional[socket.socket] = None
        if order.get("certificate"):
            self._server = context(order["certificate"], order["key"], server=True)
            self._client = context(order["certificate"], order["key"], server=False)
            self._listener = listen(str(order["address"]), 0, 64)

    def run(self) -> None:
        """Fetch and serve pieces until the laptop ends that, then prune the store, unless the release is still being saved.

        It reports its port first. A helper begins with the stored manifest.
        """
        with self._store.used():  # else another dispatch might prune what this one has so far
            port = self._listener.getsockname()[1] if self._listener else 0
            self._laptop.report("ready", port=port, empty=self._store.empty)
            if self._order.get("helper") and self._inventory.read_stored_manifest():
                self._take_manifest()
            while not self._ended and not self._laptop.closed:
                self._turn()
        saving = self._inventory.saving
        if saving.over or not saving.begun:  # else a release is being named, whose pieces are not known here
            self._store.prune()

    def close(self) -> None:
        """Close the connections to other nodes, and the port.

        The socket to the laptop's agent stays open: an error is reported by it afterwards.
        """
        for link in list(self._links):
            self._close_link(link)
        if self._listener is not None:
            self._listener.close()

    # -- the loop --

    def _turn(self) -> None:
        """Wait for something to do, handle orders, connections and frames, send the numbers of new pieces, and call _tick()."""
        listening = [] if self._listener is None else [self._listener]
        by_fd = {link.wire.fileno(): link for link in self._links}
        busy = any(link.wire.more for link in self._links)
        wait = 0.0 if busy else _SAVING if self._is_saving else _TICK
        ready = wait_for([self._laptop, *listening, *(link.wire for link in self._links)], wait)
        if self._laptop.fileno() in ready:
            for header, payload in self._laptop.turn(time.monotonic()):
                self._obey(header, payload)
        if self._listener is not None and self._listener.fileno() in ready:
            self._accept(self._listener)
        for fd, link in by_fd.items():
            if link in self._links and (fd in ready or link.wire.more):
                self._read_link(link)
        if self._inventory.saving.over and not self._done:
            self._report_saved()
        self._announce()
        now = time.monotonic()
        if now - self._ticked >= _TICK:
            self._ticked = now
            self._tick(now)

    def _tick(self, now: float) -> None:
        """End after a minute without the laptop, close strangers that are late, let the scheduler act, and report progress.

        After a time without progress, report `idle`, with the pieces that are lacking and the failures of sources.
        """
        if now - self._laptop.active_at > _SILENCE:
            self._ended = True
        for link in list(self._links):
            if link.taker and not link.wire.secure and now - link.since > _PATIENCE:
                self._close_link(link)
        self._carry_out(self._scheduler.tick(now))
        slow = self._is_saving and now - self._reported > fetch.IDLE  # a slow disk is no silence
        if slow or self._unreported and now - self._reported > float(self._order["report"]):
            self._reported, self._unreported = now, False
            self._laptop.report("got", **self._progress())
        lacking = self._scheduler.lacking
        if lacking and now - self._scheduler.progress_at > fetch.IDLE and now - self._reported > fetch.IDLE:
            self._reported = now
            why = list(self._scheduler.failures.values())
            self._laptop.report("idle", lacks=topology.bits(lacking), live=self._scheduler.live, why=why)

    def _progress(self) -> Dict[str, object]:
        """Return {left: bytes that lack, live: connected sources, peers: bytes from nodes, came: pieces from the laptop}.

        A piece is in one report only.
        """
        came, self._from_laptop = self._from_laptop, []
        left = self._inventory.bytes_of(self._scheduler.lacking)
        return {"left": left, "live": self._scheduler.live, "peers": self._between, "came": came}

    def _obey(self, header: Header, payload: bytes) -> None:
        """Execute an order of the laptop: a list of sources, or a piece. Other messages only show that it is there."""
        kind = header["type"]
        if kind == "relay-sources":
            addresses = tuple((str(address), int(port)) for address, port in header["sources"])
            self._carry_out(self._scheduler.listed(addresses, int(header["degree"]), time.monotonic()))
        elif kind == "relay-piece":
            number = int(header["piece"])
            sink = self._sink(number, len(payload))
            sink.write(memoryview(payload))
            self._piece_came(number, sink, None)

    # -- what the scheduler decides --

    def _carry_out(self, actions: List[fetch.FetchAction]) -> None:
        """Execute actions of the scheduler: connect to a source, request a piece from it, or close the connection."""
        for action in actions:
            link = self._source(action.address)
            if isinstance(action, fetch.Connect):
                self._connect(action.address)
            elif link is not None and isinstance(action, fetch.RequestPiece):
                link.wire.send({"type": "get", "piece": action.piece})
                link.wire.flush()
            elif link is not None:
                self._close_link(link)

    def _source(self, address: fetch.Address) -> Optional[PeerLink]:
        """Return the connection to a source, None if there is none."""
        return next((link for link in self._links if link.source == address), None)

    def _connect(self, address: fetch.Address) -> None:
        """Begin a connection to a source; if that fails at once, let the scheduler choose others."""
        try:
            sock = dial(*address)
        except OSError as error:
            self._carry_out(self._scheduler.closed(address, str(error.strerror), time.monotonic()))
            return
        link = PeerLink(address, time.monotonic())
        sink_of = functools.partial(self._sink_of_source, link)
        link.wire = TlsLink(sock, self._client, False, _MAX_HEADER, manifest.MOST, sink_of)
        self._links.append(link)

    def _lose_link(self, link: PeerLink, why: str) -> None:
        """Close a connection that has failed; if it is to a source, let the scheduler choose others."""
        self._close_link(link)
        if link.source is not None:
            self._carry_out(self._scheduler.closed(link.source, why, time.monotonic()))

    def _close_link(self, link: PeerLink) -> None:
        """Close a connection, and drop the pieces that were coming."""
        self._links.remove(link)
        link.wire.close()
        while link.coming:
            link.coming.popleft().drop()

    # -- pieces --

    def _sink(self, number: int, size: int) -> Sink:
        """Create the destination of a piece; it drops the data of one that is not lacking."""
        return self._inventory.sink(number, size) if number in self._scheduler.lacking else Sink(size)

    def _piece_came(self, number: int, sink: Sink, link: Optional[PeerLink]) -> None:
        """Store the bytes of piece `number`, from a source or (link None) from the laptop, and let the scheduler continue.

        A wrong piece of the laptop is reported. Bytes of a piece that is not lacking are dropped.
        """
        self._unreported = True
        source = link.source if link is not None else None
        if link is None:
            self._from_laptop.append(number)
        if number not in self._scheduler.lacking:
            sink.drop()
            return self._carry_out(self._scheduler.came(number, source, None, time.monotonic()))
        if link is not None:
            self._between += sink.size
        try:
            good = self._inventory.keep(number, sink)
        except OSError as error:
            return self._fail(error)
        self._carry_out(self._scheduler.came(number, source, good, time.monotonic()))
        if not good and link is None:
            self._laptop.report("wrong", piece=number)
        elif good and number == 0:
            self._take_manifest()
        elif good:
            self._finish()
        return None

    def _take_manifest(self) -> None:
        """Assign numbers to the pieces of the manifest, give the lacking ones to the scheduler, and report them."""
        self._carry_out(self._scheduler.manifest_read(self._inventory.take(), time.monotonic()))
        # what it lacks is of its groups only: what it has is something else
        lacks, have = topology.bits(self._scheduler.lacking), self._inventory.has_bits
        self._laptop.report("lacks", lacks=lacks, have=have)
        self._finish()

    def _finish(self) -> None:
        """Begin to save the release once no piece is lacking. A helper, which saves nothing, is done then."""
        if self._scheduler.lacking or self._done or self._inventory.saving.begun:
            return
        if self._order.get("helper"):
            self._report_saved()
        else:
            self._inventory.finish()

    @property
    def _is_saving(self) -> bool:
        """Whether all pieces are here, and the release is not on the disk yet."""
        return self._inventory.saving.begun and not self._done

    def _report_saved(self) -> None:
        """Report that the relay is done, or the error of the disk."""
        if self._inventory.saving.error is not None:
            return self._fail(self._inventory.saving.error)
        self._done = True
        return self._laptop.report("done", **self._progress())

    def _fail(self, error: OSError) -> None:
        """Report an error of the disk to the laptop, and fetch no more."""
        self._done = True
        self._scheduler.store_failed()
        what = f"a piece cannot be written below {self._store.top}: {error.strerror}"
        self._laptop.report("failed", what=what, fix=no_room(error))

    # -- other nodes --

    def _accept(self, listener: socket.socket) -> None:
        """Accept a connection of a taker, unless there are 16. Of 16 strangers the oldest is closed for a new one."""
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            strangers = [link for link in self._links if link.taker and not link.wire.secure]
            takers = sum(link.taker for link in self._links) - len(strangers)
            if takers >= _TAKERS:
                return sock.close()
            if len(strangers) >= _STRANGERS:
                self._close_link(strangers[0])
            link = PeerLink(None, time.monotonic())
            link.wire = TlsLink(sock, self._server, True, _MAX_HEADER)
            self._links.append(link)
        return None

    def _read_link(self, link: PeerLink) -> None:
        """Read the frames of a connection: requests of a taker, or answers of a source. After an error close it."""
        got, secure = link.wire.got, link.wire.secure
        try:
            frames = link.wire.frames()
            if link.source is None:
                self._read_requests(link, [header for header, _ in frames])
                return
            if link.wire.secure and not secure:
                self._scheduler.connected(link.source)
            if link.wire.got > got:
                self._scheduler.moved(link.source, time.monotonic())
            for header, _ in frames:
                self._handle_answer(link, link.source, header)
        except (OSError, FrameError, KeyError, TypeError, ValueError) as error:
            if link in self._links:
                self._lose_link(link, str(error) or type(error).__name__)

    def _sink_of_source(self, link: PeerLink, header: Header, size: int) -> Sink:
        """Create the destination of a piece that a source sends: its frame follows when all of it is there."""
        link.coming.append(self._sink(int(header["piece"]), size))
        return link.coming[-1]

    def _handle_answer(self, link: PeerLink, source: fetch.Address, header: Header) -> None:
        """Handle a frame of a source: a piece that has come, or the numbers that it has, for the scheduler.

        Raises FrameError for a piece without bytes, and KeyError, TypeError or ValueError for a malformed frame.
        """
        if header["type"] == "piece":
            if not link.coming:
                raise FrameError("a piece without bytes, or after a wrong one")
            self._piece_came(int(header["piece"]), link.coming.popleft(), link)
            return
        count = int(self._order["count"])
        if header["type"] == "have":
            offered = frozenset(topology.numbers(str(header["have"]), count))
        else:
            offered = frozenset(int(number) for number in header["new"] if 0 <= int(number) < count)
        self._carry_out(self._scheduler.offered(source, offered, time.monotonic()))

    def _read_requests(self, link: PeerLink, headers: List[Header]) -> None:
        """Note up to 8 requests of a taker, and send it pieces while less than 256 KiB wait.

        Raises ConnectionError if it requests a piece that is not here, KeyError or ValueError for another message, and OSError
        if a piece cannot be opened.
        """
        for header in headers:
            if len(link.owed) < _MOST_OWED:
                if header["type"] != "get":
                    raise ValueError(f"a message of type {str(header['type'])[:20]!r}")
                link.owed.append(int(header["piece"]))
        while link.owed and link.wire.backlog < _AHEAD:
            number = link.owed.pop(0)
            if number not in self._inventory:
                raise ConnectionError("it requests what is not here")
            if number == 0:
                link.wire.send({"type": "piece", "piece": number}, self._inventory.packed)
            else:
                piece = self._inventory.piece(number)
                link.wire.send_file({"type": "piece", "piece": number}, self._store.open(piece.name), piece.size)
            link.wire.flush()

    def _announce(self) -> None:
        """Send each taker the numbers of the pieces that are here: all of them first, later those that are new."""
        arrived = self._inventory.arrived
        for link in list(self._links):
            if not link.taker or not link.wire.secure or not arrived or link.announced == len(arrived):
                continue
            if link.announced is None:
                link.wire.send({"type": "have", "have": self._inventory.has_bits})
            else:
                link.wire.send({"type": "new", "new": arrived[link.announced :]})
            link.announced = len(arrived)
            link.wire.flush()
