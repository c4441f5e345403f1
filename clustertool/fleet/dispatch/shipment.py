"""A shipment is a workspace cut into pieces: its manifest, and the bytes of any piece, compared with its name when read."""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Collection, Container, Mapping, Sequence
from functools import cached_property

from clustertool.errors import DataError, DispatchError, WorkspaceChanged
from clustertool.fleet.dispatch.cache import WorkspaceCache
from clustertool.fleet.dispatch.workspace import Workspace, read_exactly
from clustertool.model.dispatch import manifest
from clustertool.model.dispatch.manifest import Entry, Pack, Piece
from clustertool.node.storage.files import closing

_Part = tuple[str, int, int]  # path, offset, size


class Shipment:
    """A workspace as it is sent: its manifest, its pieces, and where their bytes are. Packs and manifest are cached.

    `group`: {file that not every node takes: a name for those that take it}. Raises DispatchError if a file has changed.
    `common`: releases that all receivers have; `receivers`: names for their ROOT_DIRs. The packs of the last release sent are
    used again. Those that contain files which are no more cannot be read here: only where it was sent to all receivers in
    these packs, and all have it still. Others may have the same release in other packs.
    """

    def __init__(
        self,
        workspace: Workspace,
        group: Mapping[str, str],
        common: Container[str] = (),
        receivers: Collection[str] = (),
    ) -> None:
        self._top = os.fsencode(workspace.top)
        self._workspace = workspace
        self._parts: dict[str, list[_Part]] = {}
        self.memory = WorkspaceCache(workspace.top)
        files = [entry for entry in workspace.entries if entry.kind == "file"]
        small = [entry for entry in files if entry.size <= (manifest.TINY if entry.path in group else manifest.SMALL)]
        alone = {entry.path for entry in files} - {entry.path for entry in small}
        chunks = {path: workspace.chunks[path] for path in alone}
        last, nodes, known = self.memory.packs()
        by_content = {entry.content: entry for entry in small}
        if not (receivers and last in common and nodes.issuperset(receivers)):
            known = [pack for pack in known if all(content in by_content for content, _ in pack.files)]
        packs = self._name_packs(manifest.pack(small, group, known), by_content)
        self._place_pieces(chunks)
        self.rows = list(manifest.rows(workspace.entries, workspace.times, chunks, group, packs))
        self.text = manifest.text_of(self.rows)
        self.name = manifest.name_of(self.text)
        self.pieces = [Piece("", len(self.packed)), *manifest.pieces(self.rows)]
        self.memory.keep_packs(workspace.release, receivers, [pack for some in packs.values() for pack in some])
        self.memory.keep_manifest(workspace.release, self.text)

    @cached_property
    def packed(self) -> bytes:
        """The manifest as it is sent, packed by zlib: piece number 0. Raises DataError if it is too large."""
        made = zlib.compress(self.text, 6)
        if len(made) > manifest.MOST:
            raise DataError("the workspace has too many files", "pack the data into fewer, larger files")
        return made

    def read(self, number: int) -> bytes:
        """Read the bytes of a piece. Raises DispatchError if a file has changed since its digest was made.

        Before it raises, it forgets the packs in the cache.
        """
        if number == 0:
            return self.packed
        name = self.pieces[number].name
        parts = self._parts[name]
        data = b"".join(self._read_part(part) for part in parts)
        if manifest.name_of(data) != name:
            self.memory.keep_packs("", (), [])
            raise self._changed_error(parts)
        return data

    # -- where the bytes are --

    def _name_packs(self, packs: Mapping[str, list[Pack]], by_content: Mapping[str, Entry]) -> dict[str, list[Pack]]:
        """Name the packs of each group, and record where the bytes of their files are.

        A known pack has its name, and may contain removed files: it is not read.
        """
        made: dict[str, list[Pack]] = {}
        for group, some in packs.items():
            made[group] = []
            for pack in some:
                found = [by_content[content] for content, _ in pack.files if content in by_content]
                name = pack.name or manifest.name_of(b"".join(map(self._read_small, found)))
                made[group].append(Pack(name, pack.files))
                self._parts[name] = [(entry.path, 0, entry.size) for entry in found]
        return made

    def _read_small(self, entry: Entry) -> bytes:
        """Read a small file. Raises DispatchError if it has changed since its digest was made.

        The digest may be of an earlier dispatch: the bytes are then read only here.
        """
        data = self._read_part((entry.path, 0, entry.size))
        if entry.path not in self._workspace.read and manifest.name_of(data) != entry.content:
            raise self._changed_error([(entry.path, 0, entry.size)])
        return data

    def _place_pieces(self, chunks: Mapping[str, Sequence[str]]) -> None:
        """Record path, offset and size of each piece of the files that are not in packs."""
        sizes = {entry.path: entry.size for entry in self._workspace.entries}
        for path, names in chunks.items():
            at = 0
            for name, size in zip(names, manifest.cut(sizes[path])):
                self._parts[name] = [(path, at, size)]
                at += size

    def _read_part(self, part: _Part) -> bytes:
        """Return the bytes of a part of a file, fewer where the file is shorter now, none where it cannot be read."""
        path, offset, size = part
        if len(self._workspace.read.get(path, b"")) == size:
            return self._workspace.read[path]
        place, flags = self._top + b"/" + os.fsencode(path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK
        with contextlib.suppress(OSError), closing(os.open(place, flags)) as fd:
            return read_exactly(fd, size, offset)
        return b""

    def _changed_error(self, parts: list[_Part]) -> DispatchError:
        """Build the error that names which files of the parts have changed.

        If none has, a node lacks files of an earlier dispatch, which are not in the workspace any more.
        """
        entries = {entry.path: entry for entry in self._workspace.entries}
        changed = [path for path, _, _ in parts if len(parts) == 1]
        for path, _, size in parts if not changed else ():
            if manifest.name_of(self._read_part((path, 0, size))) != entries[path].content:
                changed.append(path)
        if not changed:
            what = "a node does not have files of an earlier dispatch any more, which are not in the workspace now"
            return DispatchError(what, "run it again: all files are packed anew")
        names = ", ".join(map(repr, changed[:5]))
        fix = "run it again when nothing writes to the workspace"
        return WorkspaceChanged(f"{names} changed while it was sent", fix)


class RemoteShipment:
    """The shipment of a release that a node has, and not this machine: only the manifest can be read here.

    Raises ValueError for a manifest that is not valid.
    """

    def __init__(self, packed: bytes, size: int) -> None:
        self.text = manifest.unzip(packed, size)
        self.rows = manifest.read_rows(self.text)
        self.name = manifest.name_of(self.text)
        self.packed = packed
        self.pieces = [Piece("", len(packed)), *manifest.pieces(self.rows)]

    @property
    def size(self) -> int:
        """The bytes of all pieces but the manifest."""
        return sum(piece.size for piece in self.pieces[1:])

    def read(self, number: int) -> bytes:
        """Return the manifest, which is piece number 0. Raises DispatchError for any other piece."""
        if number:
            raise DispatchError("a piece was requested that only nodes have", "run it again")
        return self.packed
