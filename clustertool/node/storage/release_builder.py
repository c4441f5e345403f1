"""This module builds a release without a relay: a patch of one that differs little, or of files that rsync brings.

With DISPATCH = "rsync", ROOT_DIR/.clustertool/staging/<release>/ has the files by their paths. It stays when a dispatch is
interrupted, so that the next one sends only the rest, and is removed once the release is there.
"""

from __future__ import annotations

import binascii
import itertools
import os
import time
from typing import TYPE_CHECKING, Dict, Iterable, Iterator, Tuple

from clustertool.errors import DispatchError, WorkspaceChanged
from clustertool.model.dispatch import manifest
from clustertool.model.paths import OURS
from clustertool.node.storage import files
from clustertool.node.storage.release_store import Store, remove, within, writing
from clustertool.node.system.node_context import NodeContext, step

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Answer, PatchAnswer, StagedAnswer
    from clustertool.model.wire.agent_requests import BuildRequest, PatchRequest, StageRequest

_STALE = 24 * 3600.0  # seconds after which no dispatch goes on with the files


def patch(node: NodeContext, request: PatchRequest) -> PatchAnswer:
    """Build a release from the manifest of a base, the steps that change it, and new pieces, and prune the store.

    Answers {"have": True}, or {"have": False} if the base is missing, or gives another manifest than the laptop has, or pieces
    are missing or damaged; then the laptop sends the whole release. Raises DispatchError if the store cannot be written.
    """
    store = Store(node.root)
    try:
        text = manifest.apply(store.manifest(request["base"]), request["steps"])
    except (OSError, ValueError, UnicodeError):
        return {"have": False}
    if manifest.name_of(text) != request["manifest"]:
        return {"have": False}
    rows = manifest.take(manifest.read_rows(text), request["groups"])
    sizes = manifest.sizes(rows)
    missing = set(store.missing(sizes))
    if not missing <= set(request["pieces"]):
        return {"have": False}
    with writing(store):
        for name in sizes.keys() & request["pieces"].keys():  # those that the base does not name
            if name in missing and not store.add(name, binascii.a2b_base64(request["pieces"][name])):
                return {"have": False}
            store.sync(name)
        store.complete(request["release"], text if request["groups"] is None else manifest.text_of(rows))
        store.prune()
    return {"have": True}


def stage(node: NodeContext, request: StageRequest) -> StagedAnswer:
    """Create the folder that rsync is to fill, and remove those of other releases older than a day: {dir: path}.

    Raises PreflightError if ROOT_DIR is not this user's.
    """
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
    """Add the missing pieces from the staged files to the store, complete the release, prune, and remove the staged files.

    Raises DispatchError if the request's manifest is damaged, or the store cannot be written; WorkspaceChanged, after it has
    removed the staged files, if one has other bytes than the manifest says.
    """
    store = Store(node.root)
    folder = os.path.join(files.make_dir(node.root, OURS, "staging"), request["release"])
    text = manifest.unzip(binascii.a2b_base64(request["packed"]), request["size"])
    if manifest.name_of(text) != request["manifest"]:
        raise DispatchError("the list of files arrived damaged", "run it again")
    rows = manifest.take(manifest.read_rows(text), request["groups"])
    wanted = manifest.sizes(rows)
    with writing(store):
        with store.used():
            missing = {name: wanted[name] for name in store.missing(wanted)}
            for name in store.volatile(wanted.keys() - missing):
                store.sync(name)
            for path, name, data in _staged_pieces(folder, rows, missing):
                if not store.add(name, data):
                    remove(folder)
                    what = f"{path!r} is not what it was when the dispatch began"
                    raise WorkspaceChanged(what, "run it again when nothing writes to the workspace")
                store.sync(name)
                step()
            store.complete(request["release"], text if request["groups"] is None else manifest.text_of(rows))
        store.prune()
        remove(folder)
    return {}


def _staged_pieces(
    folder: str, rows: Iterable[manifest.Row], missing: Dict[str, int]
) -> Iterator[Tuple[str, str, bytes]]:
    """Yield (path of a file that is in it, name, bytes) of each missing piece, read from the staged files.

    Each piece is removed from `missing`.
    """
    for pack, group in itertools.groupby(manifest.files(rows), lambda file: file.pack):
        found = list(group)
        if pack in missing:
            data = bytearray(missing.pop(pack))
            for file in found:
                _, offset, size = file.parts[0]
                data[offset : offset + size] = _read_part(folder, file.path, 0, size)
            yield found[0].path, pack, bytes(data)
        for file in found if not pack else ():
            at = 0
            for name, _, size in file.parts:
                if missing.pop(name, None) is not None:
                    yield file.path, name, _read_part(folder, file.path, at, size)
                at += size


def _read_part(folder: str, path: str, at: int, size: int) -> bytes:
    """Read `size` bytes of a staged file from `at` on; fewer if it is shorter, none if it cannot be opened."""
    try:
        fd = files.open_file(within(folder, path))
    except OSError:
        return b""
    with open(fd, "rb") as file:
        file.seek(at)
        return file.read(size)
