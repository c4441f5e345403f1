"""The fetch scheduler decides on a node which sources it connects to, and which piece it requests from which of them.

A method for each event takes in what happened and returns what to do. There are no sockets, threads or clock: `now` is the time
in seconds of any clock that only goes forward, and `salt` decides the order of requests.

A node keeps connections to the first `degree` sources of the newest list. Those of older lists are requested from as long as
too few of the new ones are there. A source has two requests at a time, none of which another source has, but for a piece that
is late: it is requested from one more source that has nothing else to do.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import AbstractSet, Dict, Iterable, List, NamedTuple, Optional, Sequence, Set, Tuple, Union

Address = Tuple[str, int]

IDLE = 2.0  # seconds without anything new after which one more source is tried, and the laptop gets a report
_WINDOW = 2  # pieces requested from one source at a time
_CONNECT = 6.0  # seconds for a source to answer
_STALL = 5.0  # seconds without a byte after which a source is replaced
_SLOW = 0.4  # seconds (or 4 times the usual) after which a piece is late
_USUAL = 0.5  # seconds that a piece takes, until some have come
_PAUSES = (1.0, 2.0, 4.0, 8.0)  # before a source that failed is tried again
_NEVER = 1e9


# -- actions ----------------------------------------------------------------------------------------------------------


class Connect(NamedTuple):
    """Connect to a source."""

    address: Address


class Disconnect(NamedTuple):
    """Close the connection to a source."""

    address: Address


class RequestPiece(NamedTuple):
    """Request a piece from a source."""

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
    """The sources of a node, and what it requests from them. `failures`: why each source that failed did.

    `lacking`: the pieces that the node still needs; 0 is the manifest.
    """

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

    @property
    def live(self) -> int:
        """The number of connected sources."""
        return sum(source.connected for source in self._sources.values())

    # -- what happens: a method for each event --

    def listed(self, addresses: Sequence[Address], degree: int, now: float) -> List[FetchAction]:
        """Take a new list of the nodes that may have pieces, the best first; return what to connect to and to request.

        degree: how many of them are wanted; other sources are old. Only if all nodes connect to the first of the newest list, a
        piece of one node comes to all (topology.py). Those that met early would else have enough in one another, and none would
        request from those that came later.
        """
        self.progress_at = now
        self._listed, self._degree = addresses, degree
        for source in self._sources.values():
            source.old = source.address not in self._listed[: self._degree]
        self._settled = False
        self._retry_at = {address: at for address, at in self._retry_at.items() if address in self.failures}
        return [*self._connect_sources(now), *self._choose_requests(now)]

    def manifest_read(self, lacking: Iterable[int], now: float) -> List[FetchAction]:
        """Set which pieces are lacking, by the manifest that was read, and return the requests."""
        self.lacking = set(lacking)
        for source in self._sources.values():
            source.todo = self._shuffled(source.has & self.lacking)
        return self._choose_requests(now)

    def connected(self, address: Address) -> None:
        """Record that a source is connected."""
        if address in self._sources:
            self._sources[address].connected = True

    def closed(self, address: Address, why: str, now: float) -> List[FetchAction]:
        """Drop a source whose connection is closed or failed; return the requests to others.

        why: "" for one that was not wanted.
        """
        if address in self._sources:
            self._drop_source(self._sources[address], why, now)
        return self._choose_requests(now)

    def moved(self, address: Address, now: float) -> None:
        """Record the time at which bytes have come from a source."""
        if address in self._sources:
            self._sources[address].moved = now

    def offered(self, address: Address, pieces: AbstractSet[int], now: float) -> List[FetchAction]:
        """Record which pieces a source has, forget its failure, and return the requests."""
        source = self._sources.get(address)
        if source is not None:
            self.failures.pop(address, None)
            source.todo += self._shuffled((pieces - source.has) & self.lacking)
            source.has |= pieces
        return self._choose_requests(now)

    def came(self, piece: int, address: Optional[Address], good: Optional[bool], now: float) -> List[FetchAction]:
        """Record a piece from a source, or (None) from the laptop, and return what to do next.

        good: False: it is damaged, and its source is dropped; None: it was not lacking any more.
        """
        source = self._sources.get(address) if address else None
        if source is not None and piece in source.requested:
            self._usual += (now - source.requested.pop(piece) - self._usual) / 8
        actions: List[FetchAction] = []
        if good:
            self.lacking.discard(piece)
            self.progress_at = now
        elif source is not None and good is False:
            source.requested[piece] = now  # to be requested from others
            actions = self._drop_source(source, "what it sent is wrong", now, trusted=False)
        return [*actions, *self._choose_requests(now)]

    def store_failed(self) -> None:
        """Stop all requests: the disk takes nothing."""
        self.lacking = set()

    def tick(self, now: float) -> List[FetchAction]:
        """Drop sources without an answer for 6 s or a byte for 5 s, and connect to others; disconnect old ones.

        Returns these actions, and the requests, also of late pieces. Call it ten times a second.
        """
        actions: List[FetchAction] = []
        for source in list(self._sources.values()):
            if not source.connected and now - source.since > _CONNECT:
                actions += self._drop_source(source, "no answer", now)
            elif source.requested and now - source.moved > _STALL:
                actions += self._drop_source(source, f"nothing came for {_STALL:g} s", now)
        actions += [*self._connect_sources(now), *self._retire_old_sources(), *self._request_again(now)]
        return [*actions, *self._choose_requests(now)]

    # -- which sources --

    def _connect_sources(self, now: float) -> List[FetchAction]:
        """Connect to listed sources up to the wanted number (`degree`), and to one more if nothing new has come for 2 s.

        In that case sources without lacking pieces are dropped, if there are others to try. Sources in a pause after a failure
        are left out; if nothing is lacking, none is wanted.
        """
        actions: List[FetchAction] = []
        idle = now - self.progress_at > IDLE
        wanted = self._degree + idle if self.lacking else 0
        others = [one for one in self._listed if one not in self._sources and self._retry_at.get(one, 0.0) <= now]
        used = sum(not source.old for source in self._sources.values())
        # Room for others, which may have what is lacking. Without others each source is kept: it may still get it.
        if idle:
            useless = [one for one in self._sources.values() if one.connected and not one.has & self.lacking]
            for source in useless[: max(0, used + len(others) - wanted)]:
                actions += self._drop_source(source, "", now)
                used -= not source.old
        for address in others[: max(0, wanted - used)]:
            self._sources[address] = Source(address, now, now)
            actions.append(Connect(address))
        return actions

    def _retire_old_sources(self) -> List[FetchAction]:
        """Disconnect sources of an older list that owe no piece, once enough sources of the newest list are connected.

        Enough: `degree`, or all of a shorter list. Sets `_settled`.
        """
        new = sum(source.connected and not source.old for source in self._sources.values())
        self._settled = new >= min(self._degree, len(self._listed))
        gone = [source for source in self._sources.values() if source.old and self._settled and not source.requested]
        for source in gone:
            del self._sources[source.address]
        return [Disconnect(source.address) for source in gone]

    def _drop_source(self, source: Source, why: str, now: float, trusted: bool = True) -> List[FetchAction]:
        """Disconnect a source. It is tried again after a pause (never if not `trusted`); others may get its open requests.

        why: its failure; "": it has not failed.
        """
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

    def _choose_requests(self, now: float) -> List[FetchAction]:
        """Request lacking pieces: up to two at a time from a source, none that is requested already.

        Old sources get no requests once enough of the newest list are connected.
        """
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
        """Record that a piece is requested from a source, and return the action."""
        if not source.requested:
            source.moved = now
        source.requested[piece] = now
        return RequestPiece(source.address, piece)

    def _request_again(self, now: float) -> List[FetchAction]:
        """Request the first late piece that a source has, from each source with nothing requested and nothing to request.

        Late: after 4 times the usual time, at least 0.4 s.
        """
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
        """Sort pieces in a new order, another one on each node, so that the nodes soon have different pieces to give."""
        self._salt = zlib.crc32(b"next", self._salt)
        return sorted(pieces, key=lambda piece: zlib.crc32(b"%d" % piece, self._salt))
