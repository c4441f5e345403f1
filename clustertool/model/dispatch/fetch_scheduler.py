"""The fetch scheduler decides on a node which sources it connects to, and which piece it requests from which of them.

decide(event, now) takes in what happened and returns what to do. It has no sockets, threads or clock: `now` is the time in
seconds of any clock that only goes forward, and `salt` decides the order of requests.

A node keeps connections to the first `degree` sources of the newest list. Those of older lists are requested from as long as
too few of the new ones are there. A source has two requests at a time, none of which another source has, but for a piece that
is late: it is requested from one more source that has nothing else to do.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Callable, Dict, FrozenSet, Iterable, List, Optional, Sequence, Set, Tuple, Union

Address = Tuple[str, int]

IDLE = 2.0  # seconds without anything new after which one more source is tried, and the laptop gets a report
_WINDOW = 2  # pieces requested from one source at a time
_CONNECT = 6.0  # seconds for a source to answer
_STALL = 5.0  # seconds without a byte after which a source is replaced
_SLOW = 0.4  # seconds (or 4 times the usual) after which a piece is late
_USUAL = 0.5  # seconds that a piece takes, until some have come
_PAUSES = (1.0, 2.0, 4.0, 8.0)  # before a source that failed is tried again
_NEVER = 1e9


# -- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class SourcesListed:
    """The nodes that may have pieces, the best first."""

    addresses: Tuple[Address, ...]
    degree: int


@dataclass(frozen=True)
class ManifestRead:
    """From here on it is known which pieces are lacking."""

    lacking: FrozenSet[int]


@dataclass(frozen=True)
class SourceConnected:
    address: Address


@dataclass(frozen=True)
class SourceClosed:
    """The connection has gone, or never was. `why` is "" for one that was not wanted any more."""

    address: Address
    why: str


@dataclass(frozen=True)
class SourceMoved:
    """Bytes have come."""

    address: Address


@dataclass(frozen=True)
class PiecesOffered:
    address: Address
    pieces: FrozenSet[int]


@dataclass(frozen=True)
class PieceCame:
    """From a source, or (None) from the laptop. `good` None: it was not lacking any more."""

    piece: int
    address: Optional[Address]
    good: Optional[bool]


@dataclass(frozen=True)
class StoreFailed:
    """The disk takes nothing: nothing more is requested."""


@dataclass(frozen=True)
class FetchTick:
    """Time has passed: expected ten times a second."""


FetchEvent = Union[
    SourcesListed,
    ManifestRead,
    SourceConnected,
    SourceClosed,
    SourceMoved,
    PiecesOffered,
    PieceCame,
    StoreFailed,
    FetchTick,
]


# -- actions ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connect:
    address: Address


@dataclass(frozen=True)
class Disconnect:
    address: Address


@dataclass(frozen=True)
class RequestPiece:
    address: Address
    piece: int


FetchAction = Union[Connect, Disconnect, RequestPiece]


# -- state ------------------------------------------------------------------------------------------------------------


@dataclass
class Source:
    """A connection to a node that has pieces, or the attempt at one."""

    address: Address
    since: float
    moved: float
    connected: bool = False
    old: bool = False  # it is not among the first of the newest list
    has: Set[int] = field(default_factory=set)
    todo: List[int] = field(default_factory=list)  # what may be requested from it, the next one last
    requested: Dict[int, float] = field(default_factory=dict)  # and since when


class FetchScheduler:
    """`lacking` is what the node still needs; 0 is the manifest. `failures`: why each source that failed did."""

    def __init__(self, salt: bytes, now: float) -> None:
        self.lacking: Set[int] = {0}
        self.progress_at = now  # when something new came last
        self.failures: Dict[Address, str] = {}
        self._salt = zlib.crc32(salt)
        self._listed: Sequence[Address] = ()
        self._degree = 0
        self._sources: Dict[Address, Source] = {}
        self._settled = False  # enough sources of the newest list are there: older ones get no more requests
        self._usual = _USUAL
        self._attempts: Dict[Address, int] = {}
        self._retry_at: Dict[Address, float] = {}

    def decide(self, event: FetchEvent, now: float) -> List[FetchAction]:
        """Take the event in, and return what to do now."""
        return [*_TABLE[type(event)](self, event, now), *self._requests(now)]

    @property
    def live(self) -> int:
        """Sources that are connected."""
        return sum(source.connected for source in self._sources.values())

    # -- what happens: a handler for each event --

    def _listed_anew(self, event: SourcesListed, now: float) -> List[FetchAction]:
        """Only if all nodes connect to the first of the newest list does what one gets come to all (topology.py).

        Those that met early would else have enough in one another, and none would request from those that came later.
        """
        self.progress_at = now
        self._listed, self._degree = event.addresses, event.degree
        for source in self._sources.values():
            source.old = source.address not in self._listed[: self._degree]
        self._settled = False
        self._retry_at = {address: at for address, at in self._retry_at.items() if address in self.failures}
        return self._connect(now)

    def _manifest_read(self, event: ManifestRead, now: float) -> List[FetchAction]:
        self.lacking = set(event.lacking)
        for source in self._sources.values():
            source.todo = self._shuffled(source.has & self.lacking)
        return []

    def _connected(self, event: SourceConnected, now: float) -> List[FetchAction]:
        if event.address in self._sources:
            self._sources[event.address].connected = True
        return []

    def _closed(self, event: SourceClosed, now: float) -> List[FetchAction]:
        if event.address in self._sources:
            self._drop(self._sources[event.address], event.why, now)
        return []

    def _moved(self, event: SourceMoved, now: float) -> List[FetchAction]:
        if event.address in self._sources:
            self._sources[event.address].moved = now
        return []

    def _offered(self, event: PiecesOffered, now: float) -> List[FetchAction]:
        source = self._sources.get(event.address)
        if source is not None:
            self.failures.pop(source.address, None)
            source.todo += self._shuffled((event.pieces - source.has) & self.lacking)
            source.has |= event.pieces
        return []

    def _came(self, event: PieceCame, now: float) -> List[FetchAction]:
        source = self._sources.get(event.address) if event.address else None
        if source is not None and event.piece in source.requested:
            self._usual += (now - source.requested.pop(event.piece) - self._usual) / 8
        if event.good:
            self.lacking.discard(event.piece)
            self.progress_at = now
        elif source is not None and event.good is False:
            source.requested[event.piece] = now  # to be requested from others
            return self._drop(source, "what it sent is wrong", now, trusted=False)
        return []

    def _store_failed(self, event: StoreFailed, now: float) -> List[FetchAction]:
        self.lacking = set()
        return []

    def _tick(self, event: FetchTick, now: float) -> List[FetchAction]:
        actions: List[FetchAction] = []
        for source in list(self._sources.values()):
            if not source.connected and now - source.since > _CONNECT:
                actions += self._drop(source, "no answer", now)
            elif source.requested and now - source.moved > _STALL:
                actions += self._drop(source, f"nothing came for {_STALL:g} s", now)
        return [*actions, *self._connect(now), *self._retire(now), *self._request_again(now)]

    # -- which sources --

    def _connect(self, now: float) -> List[FetchAction]:
        """As many sources as wanted, one more when nothing comes."""
        actions: List[FetchAction] = []
        idle = now - self.progress_at > IDLE
        for source in list(self._sources.values()) if idle else ():
            if source.connected and not source.has & self.lacking:
                actions += self._drop(source, "", now)  # it has nothing that is lacking here; others may
        wanted = self._degree + idle if self.lacking else 0
        used = sum(not source.old for source in self._sources.values())
        for address in self._listed:
            if used >= wanted:
                break
            if address not in self._sources and self._retry_at.get(address, 0.0) <= now:
                self._sources[address] = Source(address, now, now)
                actions.append(Connect(address))
                used += 1
        return actions

    def _retire(self, now: float) -> List[FetchAction]:
        """Sources of an older list go once enough of the newest are there, and what was requested from them has come."""
        new = sum(source.connected and not source.old for source in self._sources.values())
        self._settled = new >= min(self._degree, len(self._listed))
        gone = [source for source in self._sources.values() if source.old and self._settled and not source.requested]
        for source in gone:
            del self._sources[source.address]
        return [Disconnect(source.address) for source in gone]

    def _drop(self, source: Source, why: str, now: float, trusted: bool = True) -> List[FetchAction]:
        """A source that failed is tried again later, and what was requested from it is requested from others."""
        address = source.address
        del self._sources[address]
        attempts = self._attempts.get(address, 0)
        self._attempts[address] = attempts + 1
        self._retry_at[address] = now + (_PAUSES[min(attempts, len(_PAUSES) - 1)] if trusted else _NEVER)
        if why:
            self.failures[address] = f"{address[0]}: {why}"
        for other in self._sources.values():
            other.todo += [piece for piece in source.requested if piece in other.has]
        return [Disconnect(address)]

    # -- which pieces --

    def _requests(self, now: float) -> List[FetchAction]:
        actions: List[FetchAction] = []
        requested = {piece for source in self._sources.values() for piece in source.requested}
        for source in self._sources.values():
            while source.todo and len(source.requested) < _WINDOW and not (source.old and self._settled):
                piece = source.todo.pop()
                if piece in self.lacking and piece not in requested:
                    requested.add(piece)
                    actions.append(self._request(source, piece, now))
        return actions

    def _request(self, source: Source, piece: int, now: float) -> RequestPiece:
        if not source.requested:
            source.moved = now
        source.requested[piece] = now
        return RequestPiece(source.address, piece)

    def _request_again(self, now: float) -> List[FetchAction]:
        """There is nothing else to request: a piece that is late is requested from one more source."""
        limit = max(_SLOW, 4 * self._usual)
        actions: List[FetchAction] = []
        sources = self._sources.values()
        late = {piece for source in sources for piece, since in source.requested.items() if now - since > limit}
        for source in sources:
            found = late & source.has & self.lacking if not source.requested and not source.todo else set()
            if found:
                actions.append(self._request(source, min(found), now))
        return actions

    def _shuffled(self, pieces: Iterable[int]) -> List[int]:
        """Each node in another order, and each time: so the nodes soon have different pieces to give."""
        self._salt = zlib.crc32(b"next", self._salt)
        return sorted(pieces, key=lambda piece: zlib.crc32(b"%d" % piece, self._salt))


_TABLE: Dict[type, Callable[..., List[FetchAction]]] = {
    SourcesListed: FetchScheduler._listed_anew,
    ManifestRead: FetchScheduler._manifest_read,
    SourceConnected: FetchScheduler._connected,
    SourceClosed: FetchScheduler._closed,
    SourceMoved: FetchScheduler._moved,
    PiecesOffered: FetchScheduler._offered,
    PieceCame: FetchScheduler._came,
    StoreFailed: FetchScheduler._store_failed,
    FetchTick: FetchScheduler._tick,
}
