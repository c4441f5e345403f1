"""A node's part of a dispatch: one process that fetches pieces from other nodes and serves at once those it has.

The laptop orders it through the agent's socket: the manifest's digest, a throw-away certificate, the other nodes. Its server
only reads. Number 0 is the manifest, the others are the manifest's pieces in order; a piece is kept only if its bytes have
the name that the manifest (whose own name came over SSH) gives it, so a false source can waste time and nothing else.
What nodes send goes from the network to the disk, and from there on, a little at a time: on a full machine new memory is
what takes longest. Its process (relaying.py) ends when the agent does, or the laptop is silent.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import os
import select
import socket
import time
import zlib
from typing import Any, Dict, Iterable, List, Optional, Set

from clustertool.model.dispatch import manifest, topology
from clustertool.model.wire.frames import Decoder, FrameError, Header, encode
from clustertool.model.wire.payload import Memory, Sink
from clustertool.node.dispatch.piece_saver import Saving
from clustertool.node.dispatch.relay_link import Address, Link
from clustertool.node.storage.piece_writer import Part
from clustertool.node.storage.release_store import Store, no_room
from clustertool.node.system.tls_link import Wire, context, listen

_WINDOW = 2  # pieces asked of one source at a time
_AHEAD = 256 << 10  # bytes that wait for a taker before the next piece is opened for it
_MOST_OWED = 8  # pieces one taker may wait for
_TAKERS = 16  # connections that are served
_STRANGERS = 16  # those that have not shown the certificate yet
_PATIENCE = 4.0  # seconds for a stranger to do so
_CONNECT = 6.0  # seconds for a source to be there
_STALL = 5.0  # seconds without a byte after which a source is replaced
_SLOW = (
    0.4  # seconds (or 4 times the usual) until a piece is asked of a second source, when there is nothing else to ask
)
_IDLE = 2.0  # seconds without anything new after which the laptop is told
_PAUSES = (1.0, 2.0, 4.0, 8.0)  # before a source that failed is tried again
_SILENCE = 60.0  # seconds without a word of the laptop, which beats every few
_MAX_HEADER = 1 << 20
_TICK = 0.1
_SAVING = 0.005  # the same while the last pieces are written to the disk
_FOREVER = 1e9


class Relay:
    """`order`: release, manifest (its name), size (bytes of its text), count (of its pieces, itself included), groups (None:
    all), helper (has the release and only serves), report (seconds).

    With a relay between nodes also certificate, key and address; without, the laptop sends everything.
    """

    def __init__(self, control: socket.socket, order: Header, root: str) -> None:
        self._control = control
        self._decoder = Decoder(max_payload=manifest.MOST)
        self._out = bytearray()
        self._order = order
        self._report = float(order["report"])  # how often the laptop hears how far we are
        self._size, self._count = int(order["size"]), int(order["count"])
        self._store = Store(root)
        self._text = self._packed = b""  # the manifest, and as it travels
        self._rows: List[manifest.Row] = []
        self._pieces: List[manifest.Piece] = []
        self._got: List[int] = []  # numbers we have, in the order they came
        self._have: Set[int] = set()
        self._lacking: Set[int] = {0}
        self._links: List[Link] = []
        self._sources: List[Address] = []  # the best first
        self._degree = 0  # of them at a time
        self._settled = False  # they are there: older ones are asked nothing more
        self._pace = 0.5  # seconds that a piece takes, about
        self._why: Dict[Address, str] = {}  # of each source that failed, why
        self._tries: Dict[Address, int] = {}
        self._again: Dict[Address, float] = {}
        self._between = 0  # bytes that came from other nodes
        self._from_laptop: List[int] = []  # pieces that came since the laptop last heard of it
        self._heard = self._new = time.monotonic()
        self._told = self._ticked = 0.0
        self._dirty = self._done = self._over = False
        self._saving = Saving(self._store)
        self._listener: Optional[socket.socket] = None
        if order.get("certificate"):
            self._server = context(order["certificate"], order["key"], server=True)
            self._client = context(order["certificate"], order["key"], server=False)
            self._listener = listen(str(order["address"]), 0, 64)

    def run(self) -> None:
        with self._store.used():  # else another dispatch might prune what this one has so far
            self._run()
        if (
            self._saving.over or not self._saving.begun
        ):  # else a release is being named, whose pieces are not known here
            self._store.prune()

    def _run(self) -> None:
        port = self._listener.getsockname()[1] if self._listener else 0
        self._tell("ready", port=port, empty=self._store.empty)
        if self._order.get("helper"):
            with contextlib.suppress(OSError):  # it may have another laptop's manifest of this release, or by now none
                text = self._store.manifest(str(self._order["release"]))
                if manifest.name_of(text) == self._order["manifest"]:
                    self._take_manifest(text, zlib.compress(text, 1))
        while not self._over:
            self._turn()

    def close(self) -> None:
        for link in list(self._links):
            self._forget(link)
        if self._listener is not None:
            self._listener.close()

    # -- the loop --

    def _turn(self) -> None:
        poll = select.poll()
        poll.register(self._control, select.POLLIN | (select.POLLOUT if self._out else 0))
        if self._listener is not None:
            poll.register(self._listener, select.POLLIN)
        by_fd = {}
        for link in self._links:
            by_fd[link.wire.fileno()] = link
            poll.register(link.wire.fileno(), select.POLLIN | (select.POLLOUT if link.wire.wants_write else 0))
        busy = any(link.wire.more for link in self._links)
        ready = {fd for fd, _ in poll.poll(1000 * (0.0 if busy else _SAVING if self._is_saving else _TICK))}
        if self._control.fileno() in ready:
            self._listen_to_laptop()
        if self._listener is not None and self._listener.fileno() in ready:
            self._accept(self._listener)
        for fd, link in by_fd.items():
            if link in self._links and (fd in ready or link.wire.more):
                self._hear(link)
        if self._saving.over and not self._done:
            self._saved()
        self._announce()
        self._ask_all()
        now = time.monotonic()
        if now - self._ticked >= _TICK:
            self._ticked = now
            self._tick(now)

    def _tick(self, now: float) -> None:
        if now - self._heard > _SILENCE:
            self._over = True
        for link in list(self._links):
            self._look(link, now)
        self._connect(now)
        self._retire()
        self._ask_again(now)
        slow = self._is_saving and now - self._told > _IDLE  # a slow disk is no silence
        if slow or self._dirty and now - self._told > self._report:
            self._told, self._dirty = now, False
            self._tell("got", **self._progress())
        if self._lacking and now - self._new > _IDLE and now - self._told > _IDLE:
            self._told = now
            why = list(self._why.values())
            self._tell("idle", lacks=self._lacks(), live=self._live(), why=why)

    def _look(self, link: Link, now: float) -> None:
        if not link.wire.secure and now - link.since > (_PATIENCE if link.taker else _CONNECT):
            self._drop(link, "no answer" if not link.taker else "")
        elif link.asked and now - link.moved > _STALL:
            self._drop(link, f"nothing came for {_STALL:g} s")

    # -- the laptop --

    def _tell(self, said: str, **more: Any) -> None:
        self._out += encode({"k": "relay", "s": said, **more})
        self._flush()

    def _flush(self) -> None:
        try:
            with memoryview(self._out) as view:
                sent = self._control.send(view)
            del self._out[:sent]
        except BlockingIOError:
            return
        except OSError:
            self._over = True

    def _listen_to_laptop(self) -> None:
        try:
            data = self._control.recv(1 << 18)
        except BlockingIOError:
            return self._flush()
        except OSError:
            data = b""
        if not data:
            self._over = True
        self._heard = time.monotonic()
        for header, payload in self._decoder.feed(data):
            self._obey(header, payload)
        return self._flush()

    def _obey(self, header: Header, payload: bytes) -> None:
        what = header["k"]
        if what == "sources":
            self._new = time.monotonic()
            self._sources = [(str(address), int(port)) for address, port in header["sources"]]
            self._degree = int(header["degree"])
            self._turn_to(self._sources[: self._degree], self._new)
        elif what == "piece":
            number = int(header["i"])
            sink = self._sink(number, len(payload))
            sink.write(memoryview(payload))
            self._came(number, sink, None)
        elif what == "end":
            self._over = True

    def _progress(self) -> Dict[str, Any]:
        """What the laptop is told; what came from it is told once."""
        left = sum(self._pieces[i - 1].size for i in self._lacking if i)
        came, self._from_laptop = self._from_laptop, []
        return {"left": left, "live": self._live(), "peers": self._between, "came": came}

    def _live(self) -> int:
        """Sources that are there."""
        return sum(link.wire.secure for link in self._links if not link.taker)

    def _lacks(self) -> str:
        return topology.bits(self._lacking, len(self._pieces) + 1)

    # -- pieces --

    def _sink(self, number: int, size: int) -> Sink:
        """Where a piece goes as it comes. What is not wanted, or can't be it, goes nowhere."""
        if number not in self._lacking:
            return Sink(size)
        if number == 0:
            return Memory(size) if size <= manifest.zipped(self._size) else Sink(size)
        piece = self._pieces[number - 1]
        return Part(self._store.top, piece.name, size) if size == piece.size else Sink(size)

    def _came(self, number: int, sink: Sink, link: Optional[Link]) -> None:
        """Bytes that should be piece `number`, from a source or (link None) from the laptop."""
        self._dirty = True
        if link is None:
            self._from_laptop.append(number)
        elif number in link.asked:
            self._pace += (time.monotonic() - link.asked.pop(number) - self._pace) / 8
        if number not in self._lacking:
            return sink.drop()
        if link is not None:
            self._between += sink.size
        try:
            good = self._keep(number, sink)
        except OSError as error:
            return self._fail(error)
        if good:
            self._new = time.monotonic()
        elif link is not None:
            link.asked[number] = 0.0  # still to be asked of others
            self._drop(link, "what it sent is wrong", trust=False)
        else:
            self._tell("wrong", i=number)
        return None

    def _keep(self, number: int, sink: Sink) -> bool:
        if isinstance(sink, Memory):
            packed = bytes(sink.data)
            text = manifest.unzip(packed, self._size)
            return manifest.name_of(text) == self._order["manifest"] and self._take_manifest(text, packed)
        if not sink.keep():
            return False
        self._lacking.discard(number)
        self._mine(number)
        self._saving.add([self._pieces[number - 1].name])
        self._finish()
        return True

    def _take_manifest(self, text: bytes, packed: bytes) -> bool:
        """From here on the pieces have numbers."""
        groups = self._order["groups"]
        found = manifest.piece_rows(text) if groups is None else manifest.read_rows(text)
        self._rows = manifest.take(found, groups)
        self._text, self._packed, self._pieces = text, packed, manifest.pieces(found)
        wanted = {piece.name: piece.size for piece in manifest.pieces(self._rows)}
        missing = set(self._store.missing({piece.name: piece.size for piece in self._pieces}))
        if self._order.get("helper"):
            wanted = {}
        self._saving.add(self._store.volatile(wanted.keys() - missing))
        self._lacking = {i for i, piece in enumerate(self._pieces, 1) if piece.name in missing and piece.name in wanted}
        self._mine(0)
        for number, piece in enumerate(self._pieces, 1):
            if piece.name not in missing:
                self._mine(number)
        for link in self._links:
            link.todo = _shuffled(number for number in link.has if number in self._lacking)
        count = len(self._pieces) + 1  # what it lacks is of its groups only: what it has is something else
        self._tell("lacks", lacks=self._lacks(), have=topology.bits(self._have, count), count=count)
        self._finish()
        return True

    def _mine(self, number: int) -> None:
        self._got.append(number)
        self._have.add(number)

    def _finish(self) -> None:
        """All pieces are there: they are saved, which takes a moment. A helper has nothing to save."""
        if self._lacking or self._done or self._saving.begun:
            return None
        if self._order.get("helper"):
            return self._saved()
        text = self._text if self._order["groups"] is None else manifest.text_of(self._rows)
        return self._saving.finish(str(self._order["release"]), text)

    @property
    def _is_saving(self) -> bool:
        """All is here, and not on the disk yet."""
        return self._saving.begun and not self._done

    def _saved(self) -> None:
        if self._saving.error is not None:
            return self._fail(self._saving.error)
        self._done = True
        return self._tell("done", **self._progress())

    def _fail(self, error: OSError) -> None:
        """A disk that takes nothing: the laptop is told, and nothing more is asked for."""
        self._lacking = set()
        self._done = True
        self._tell(
            "failed", what=f"a piece cannot be written below {self._store.top}: {error.strerror}", fix=no_room(error)
        )

    # -- sources --

    def _turn_to(self, first: List[Address], now: float) -> None:
        """The first of a new list: only if all have these does what anybody gets come to everybody.

        Those who met early would else have enough in one another, and nobody would ask those who came later.
        """
        for link in self._links:
            link.old = link.source is not None and link.source not in first
        self._settled = False
        self._again = {
            source: at for source, at in self._again.items() if source in self._why
        }  # others had nothing then
        self._connect(now)

    def _retire(self) -> None:
        """Sources of an older list go when those of the newest are there, and what they were asked for has come."""
        new = sum(link.wire.secure for link in self._links if link.source and not link.old)
        self._settled = new >= min(self._degree, len(self._sources))
        for link in [link for link in self._links if link.old and self._settled and not link.asked]:
            self._forget(link)

    def _connect(self, now: float) -> None:
        """As many sources as wanted, one more when nothing comes."""
        if now - self._new > _IDLE:
            for link in [
                link for link in self._links if not link.taker and link.wire.secure and not link.has & self._lacking
            ]:
                self._drop(link, "")  # it has nothing that is missing here; others may
        used = {link.source for link in self._links}
        wanted = self._degree + (now - self._new > _IDLE) if self._lacking else 0
        for address in self._sources:
            if sum(not link.taker and not link.old for link in self._links) >= wanted:
                return
            if address not in used and self._again.get(address, 0.0) <= now:
                self._dial(address, now)

    def _dial(self, address: Address, now: float) -> None:
        sock = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_STREAM)
        sock.setblocking(False)
        code = sock.connect_ex(address)
        link = Link(address, now)
        link.wire = Wire(sock, self._client, False, _MAX_HEADER, manifest.MOST, functools.partial(self._begins, link))
        self._links.append(link)
        if code not in (0, errno.EINPROGRESS):
            self._drop(link, os.strerror(code))

    def _drop(self, link: Link, why: str, trust: bool = True) -> None:
        """Close it; a source that failed is tried again later, and what it was asked for is asked of others."""
        self._forget(link)
        if link.source is None:
            return
        tries = self._tries.get(link.source, 0)
        if why:
            self._why[link.source] = f"{link.source[0]}: {why}"
        self._again[link.source] = time.monotonic() + (_PAUSES[min(tries, len(_PAUSES) - 1)] if trust else _FOREVER)
        self._tries[link.source] = tries + 1
        for other in self._links:
            other.todo += [number for number in link.asked if number in other.has]

    def _forget(self, link: Link) -> None:
        self._links.remove(link)
        link.wire.close()
        while link.coming:
            link.coming.popleft().drop()

    def _ask_all(self) -> None:
        asked = {number for link in self._links for number in link.asked}
        for link in self._links:
            while link.todo and len(link.asked) < _WINDOW and not (link.old and self._settled):
                number = link.todo.pop()
                if number in self._lacking and number not in asked:
                    asked.add(number)
                    self._ask(link, number)

    def _ask(self, link: Link, number: int) -> None:
        now = time.monotonic()
        if not link.asked:
            link.moved = now
        link.asked[number] = now
        link.wire.send({"get": number})
        link.wire.flush()

    def _ask_again(self, now: float) -> None:
        """Nothing else to ask for: what a slow source was asked for is asked of one more."""
        late = max(_SLOW, 4 * self._pace)
        slow = {number for link in self._links for number, since in link.asked.items() if now - since > late}
        for link in list(self._links):
            for number in slow:
                if not link.asked and not link.todo and number in link.has and number in self._lacking:
                    self._ask(link, number)

    # -- what comes from other nodes --

    def _accept(self, listener: socket.socket) -> None:
        """Strangers are bounded in number and time: the oldest leaves for a new one."""
        with contextlib.suppress(OSError):
            sock, _ = listener.accept()
            strangers = [link for link in self._links if link.taker and not link.wire.secure]
            takers = sum(link.taker for link in self._links) - len(strangers)
            if takers >= _TAKERS:
                return sock.close()
            if len(strangers) >= _STRANGERS:
                self._drop(strangers[0], "")
            link = Link(None, time.monotonic())
            link.wire = Wire(sock, self._server, True, _MAX_HEADER)
            self._links.append(link)
        return None

    def _hear(self, link: Link) -> None:
        got = link.wire.got
        try:
            frames = link.wire.frames()
            if link.wire.got > got:
                link.moved = time.monotonic()
            for header, _ in frames:
                if not link.taker:
                    self._answered(link, header)
                elif len(link.owed) < _MOST_OWED:
                    link.owed.append(int(header["get"]))
            if link.taker:
                self._serve(link)
        except (OSError, FrameError, KeyError, TypeError, ValueError) as error:
            if link in self._links:
                self._drop(link, str(error) or type(error).__name__)

    def _begins(self, link: Link, header: Header, size: int) -> Sink:
        """A source sends a piece: its frame follows when all of it is there."""
        link.coming.append(self._sink(int(header["piece"]), size))
        return link.coming[-1]

    def _answered(self, link: Link, header: Header) -> None:
        if "piece" in header:
            if not link.coming:
                raise FrameError("a piece without bytes, or after a wrong one")
            self._came(int(header["piece"]), link.coming.popleft(), link)
            return
        if "have" in header:
            self._why.pop(link.source or ("", 0), None)
            link.has |= topology.numbers(str(header["have"]), self._count)
            link.todo = _shuffled(number for number in link.has if number in self._lacking)
        else:
            new = {int(number) for number in header["new"] if 0 <= int(number) < self._count}
            link.has |= new
            link.todo += _shuffled(number for number in new if number in self._lacking)

    def _announce(self) -> None:
        """Takers hear of what we have: all of it first, then what came since."""
        for link in list(self._links):
            if not link.taker or not link.wire.secure or not self._got or link.told == len(self._got):
                continue
            if link.told is None:
                link.wire.send({"have": topology.bits(self._have, len(self._pieces) + 1), "of": len(self._pieces) + 1})
            else:
                link.wire.send({"new": self._got[link.told :]})
            link.told = len(self._got)
            link.wire.flush()

    def _serve(self, link: Link) -> None:
        while link.owed and link.wire.backlog < _AHEAD:
            number = link.owed.pop(0)
            if number not in self._have:
                raise ConnectionError("it asks for what we do not have")
            if number == 0:
                link.wire.send({"piece": number}, self._packed)
            else:
                piece = self._pieces[number - 1]
                link.wire.send_file({"piece": number}, self._store.open(piece.name), piece.size)
            link.wire.flush()


def _shuffled(numbers: Iterable[int]) -> List[int]:
    """Each node in another order: so they soon have different pieces to give."""
    return sorted(numbers, key=lambda _: os.urandom(4))
