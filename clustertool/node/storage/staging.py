"""Staging takes the files of a workspace that rsync brings, and builds a release of them (DISPATCH = "rsync").

ROOT_DIR/.clustertool/staging/<release>/ has the files by their paths. It stays when a dispatch is interrupted, so that the
next one sends only the rest, and is removed once the release is there.
"""

from __future__ import annotations

import binascii
import os
import time
from typing import TYPE_CHECKING, Iterable, Iterator, Set, Tuple

from clustertool.errors import DispatchError
from clustertool.model.dispatch import manifest
from clustertool.model.paths import OURS
from clustertool.node.storage import files
from clustertool.node.storage.release_store import Store, no_room, remove, within
from clustertool.node.system.node_context import NodeContext
from clustertool.node.system.work_counter import step

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Answer, StagedAnswer
    from clustertool.model.wire.agent_requests import BuildRequest, StageRequest

_STALE = 24 * 3600.0  # seconds after which no dispatch goes on with the files


def stage(node: NodeContext, request: StageRequest) -> StagedAnswer:
    """Make the folder that rsync is to fill: {dir: path}. Raises PreflightError where ROOT_DIR is not ours to use."""
    release = request["release"]
    files.make_root(node.root)
    top = files.make_dir(node.root, OURS, "staging")
    for name in os.listdir(top):
        path = os.path.join(top, name)
        if name != release and time.time() - os.lstat(path).st_mtime > _STALE:
            remove(path)
    folder = files.make_dir(top, release)
    os.utime(folder)
    return {"dir": folder}


def build(node: NodeContext, request: BuildRequest) -> Answer:
    """Hash the staged files into the store, and name the release. Raises DispatchError."""
    store = Store(node.root)
    folder = os.path.join(files.make_dir(node.root, OURS, "staging"), request["release"])
    text = manifest.unzip(binascii.a2b_base64(request["packed"]), request["size"])
    if manifest.name_of(text) != request["manifest"]:
        raise DispatchError("the list of files arrived damaged", "run it again")
    rows = manifest.take(manifest.read_rows(text), request["groups"])
    wanted = {piece.name: piece.size for piece in manifest.pieces(rows)}
    try:
        with store.used():
            missing = set(store.missing(wanted))
            for name in store.volatile(wanted.keys() - missing):
                store.sync(name)
            for path, name, data in _pieces(folder, rows, missing):
                if not store.add(name, data):
                    remove(folder)
                    what = f"{path!r} is not what it was when the dispatch began"
                    raise DispatchError(what, "run it again when nothing writes to the workspace")
                store.sync(name)
                step()
            store.complete(request["release"], text if request["groups"] is None else manifest.text_of(rows))
        store.prune()
        remove(folder)
    except OSError as error:
        what = f"the release cannot be written below {store.top}: {error.strerror}"
        raise DispatchError(what, no_room(error)) from None
    return {}


def _pieces(folder: str, rows: Iterable[manifest.Row], missing: Set[str]) -> Iterator[Tuple[str, str, bytes]]:
    """(path of a file that is in it, name, bytes) of each piece that is missing, as the staged files have it."""
    large, at = "", 0
    first, pack, data = "", "", bytearray()
    for kind, *row in [*rows, ["p", "", 0, ""]]:
        if kind == "f":
            large, at = str(row[0]), 0
        elif kind == "c":
            name, size = row
            if name in missing:
                yield large, name, _read(folder, large, at, size)
                missing.discard(name)
            at += size
        elif kind == "p":
            if pack in missing:
                yield first, pack, bytes(data)
                missing.discard(pack)
            first, pack, data = "", str(row[0]), bytearray(row[1])
        elif kind == "s" and pack in missing:
            path, _, _, offset, size = row
            first = first or path
            data[offset : offset + size] = _read(folder, path, 0, size)


def _read(folder: str, path: str, at: int, size: int) -> bytes:
    """So many bytes of a staged file; fewer where it is shorter, none where it is not there."""
    try:
        fd = os.open(within(folder, path), os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return b""
    with open(fd, "rb") as file:
        file.seek(at)
        return file.read(size)
