"""The inventory of a relay has the manifest of the release that comes, and which of its pieces are in the node's store."""

from __future__ import annotations

import contextlib
import zlib
from typing import TYPE_CHECKING, Callable, FrozenSet, Iterable, List, Optional, Set

from clustertool.model.dispatch import manifest, topology
from clustertool.model.wire.frames import MemorySink, Sink
from clustertool.node.storage.disk_worker import DiskWorker
from clustertool.node.storage.release_store import Part, Store

if TYPE_CHECKING:
    from clustertool.model.wire.agent_requests import RelayRequest


class PieceSaver:
    """A thread that writes the pieces of a dispatch to the disk: each one as it arrives, then the manifest.

    So little is left to write after the last piece, and a slow disk does not delay what the relay sends to others. Call add()
    with names of pieces in the store, then finish() once. `over`: all is on the disk, or `error` is the reason why not. After
    an error nothing more is written: a release is named only if each of its pieces is on the disk.
    """

    def __init__(self, store: Store) -> None:
        self.error: Optional[OSError] = None
        self.begun = self.over = False  # begun: finish() was called
        self._store = store
        self._worker = DiskWorker()

    def add(self, names: Iterable[str]) -> None:
        """Queue the pieces of these names, which are in the store, to be made durable."""
        for name in names:
            self._put_work(self._store.sync, name)

    def finish(self, release: str, text: bytes) -> None:
        """Queue the naming of the release, since all pieces of it are there; the thread ends after that."""
        self.begun = True
        self._put_work(self._store.complete, release, text)
        self._worker.end()

    def _put_work(self, work: Callable[..., None], *arguments: object) -> None:
        """Queue work for the thread, or do it here if there is no thread for it."""
        if not self._worker.put(self._do_work, work, *arguments):
            self._do_work(work, *arguments)

    def _do_work(self, work: Callable[..., None], *arguments: object) -> None:
        """Do the work, unless there was an error, which is stored. After the naming of the release, set `over`."""
        try:
            if self.error is None:
                work(*arguments)
        except OSError as error:
            self.error = error
        self.over = self.over or work == self._store.complete


class Inventory:
    """The pieces of a release on this node, by number: 0 is the manifest, the others are its pieces in order.

    `arrived`: the numbers of those that are here, in the order in which they came.
    """

    def __init__(self, store: Store, order: RelayRequest) -> None:
        self.saving = PieceSaver(store)
        self.arrived: List[int] = []
        self.packed = b""  # the manifest as it travels
        self._store = store
        self._order = order
        self._text = b""
        self._rows: List[manifest.Row] = []
        self._pieces: List[manifest.Piece] = []
        self._has: Set[int] = set()

    @property
    def has_bits(self) -> str:
        """The numbers of the pieces that are here, as topology.bits()."""
        return topology.bits(self._has)

    def bytes_of(self, numbers: Set[int]) -> int:
        """Sum up the bytes of the pieces of these numbers; the manifest counts none."""
        return sum(self._pieces[number - 1].size for number in numbers if number)

    def __contains__(self, number: int) -> bool:
        return number in self._has

    def piece(self, number: int) -> manifest.Piece:
        """Return the piece of this number."""
        return self._pieces[number - 1]

    def sink(self, number: int, size: int) -> Sink:
        """Create the destination of a piece as it arrives. Data that cannot be the piece is dropped."""
        if number == 0:
            return MemorySink(size) if size <= manifest.zipped(int(self._order["size"])) else Sink(size)
        piece = self.piece(number)
        return Part(self._store.top, piece.name, size) if size == piece.size else Sink(size)

    def keep(self, number: int, sink: Sink) -> bool:
        """Store a piece that has arrived. Returns False for bytes that are not what the manifest names. Raises OSError.

        Of a manifest only the text is kept, and take() is to be called.
        """
        if isinstance(sink, MemorySink):
            self.packed = bytes(sink.data)
            self._text = manifest.unzip(self.packed, int(self._order["size"]))
            return manifest.name_of(self._text) == str(self._order["manifest"])
        if not sink.keep():
            return False
        self._add_piece(number)
        self.saving.add([self.piece(number).name])
        return True

    def read_stored_manifest(self) -> bool:
        """Read the manifest in this node's store, for a helper. Returns whether it is that of the order.

        It may be removed meanwhile, or another laptop's of the same release.
        """
        with contextlib.suppress(OSError):
            self._text = self._store.manifest(str(self._order["release"]))
            self.packed = zlib.compress(self._text, 1)
        return manifest.name_of(self._text) == str(self._order["manifest"])

    def take(self) -> FrozenSet[int]:
        """Assign numbers to the pieces of the manifest, note which are in the store, and return the numbers of those that lack.

        Those of other groups than the order's do not lack, and for a helper none. Needed pieces in the store that a crash could
        take are queued to be made durable.
        """
        groups = self._order["groups"]
        found = manifest.piece_rows(self._text) if groups is None else manifest.read_rows(self._text)
        self._rows = manifest.take(found, groups)
        self._pieces = manifest.pieces(found)
        missing = set(self._store.missing(manifest.sizes(found)))
        wanted = {} if self._order.get("helper") else manifest.sizes(self._rows)
        self.saving.add(self._store.volatile(wanted.keys() - missing))
        self._add_piece(0)
        lacking = set()
        for number, piece in enumerate(self._pieces, 1):
            if piece.name not in missing:
                self._add_piece(number)
            elif piece.name in wanted:
                lacking.add(number)
        return frozenset(lacking)

    def finish(self) -> None:
        """Queue the naming of the release, since its pieces are all here; `saving` shows when that is done."""
        text = self._text if self._order["groups"] is None else manifest.text_of(self._rows)
        self.saving.finish(str(self._order["release"]), text)

    def _add_piece(self, number: int) -> None:
        """Note that a piece is here."""
        self.arrived.append(number)
        self._has.add(number)
