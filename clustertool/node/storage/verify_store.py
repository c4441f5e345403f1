"""Verifying hashes the pieces and releases of a node again, and removes damaged ones.

A dispatch sends them again. This finds damage that sizes do not show: a disk that returns other bytes, a program that
wrote here.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from typing import TYPE_CHECKING, Dict, Iterator, Sequence, Set, Tuple

from clustertool.model import paths
from clustertool.model.dispatch import manifest
from clustertool.model.dispatch.manifest import Entry
from clustertool.node.storage.release_store import Store, WrongPiece
from clustertool.node.system.node_context import NodeContext, step

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import VerifyAnswer
    from clustertool.model.wire.agent_requests import VerifyRequest

_PART = 1 << 20


def verify(node: NodeContext, request: VerifyRequest) -> VerifyAnswer:
    """Hash all pieces and check all releases; remove damaged pieces and the releases that need them, unless `remove` is False.

    Returns the numbers of releases, of pieces, of bytes in undamaged ones and of damaged ones, and `lost`, the names of the
    damaged releases; zeros if there is no store. Raises OSError or PreflightError if the store cannot be read.
    """
    root, remove = node.root, request["remove"]
    if not os.path.isdir(paths.releases(root)):
        return {"releases": 0, "pieces": 0, "bytes": 0, "damaged": 0, "lost": []}
    store = Store(root)
    with store.used():
        good, wrong = _hash_pieces(store)
        with os.scandir(store.releases) as entries:
            releases = [e.name for e in entries if "." not in e.name and e.name != "lock" and e.is_file()]
        lost = [release for release in releases if not _is_undamaged(store, release, good)]
        for name in wrong if remove else ():
            with contextlib.suppress(FileNotFoundError):
                os.unlink(os.path.join(store.top, name))
        for release in lost if remove else ():
            store.forget(release)
    return {
        "releases": len(releases),
        "pieces": len(good) + len(wrong),
        "bytes": sum(good.values()),
        "damaged": len(wrong),
        "lost": sorted(lost),
    }


def _hash_pieces(store: Store) -> Tuple[Dict[str, int], Set[str]]:
    """Hash the pieces: {name: size} of those whose bytes match their names; names of the others, unreadable ones too."""
    good: Dict[str, int] = {}
    wrong: Set[str] = set()
    with os.scandir(store.top) as entries:
        names = [entry.name for entry in entries if not entry.name.endswith(".part")]
    for name in names:
        try:
            size, digest = _hash_piece(store, name)
        except FileNotFoundError:
            continue
        except OSError:  # the disk cannot read it
            size, digest = 0, ""
        if digest == name:
            good[name] = size
        else:
            wrong.add(name)
    return good, wrong


def _hash_piece(store: Store, name: str) -> Tuple[int, str]:
    """Return size and SHA-256 of a piece. Raises OSError."""
    state, size = hashlib.sha256(), 0
    with open(store.open(name), "rb", buffering=0) as file:
        for data in iter(lambda: file.read(_PART), b""):
            state.update(data)
            size += len(data)
            step()
    return size, str(state.hexdigest())


def _is_undamaged(store: Store, release: str, good: Dict[str, int]) -> bool:
    """Check whether all pieces of a release are undamaged, and its manifest, made of them, matches its name."""
    with contextlib.suppress(OSError, ValueError, LookupError, TypeError, WrongPiece):
        rows = manifest.read_rows(store.manifest(release))
        if any(good.get(name) != size for name, size in manifest.sizes(rows).items()):
            return False
        return manifest.digest(_workspace_entries(store, rows)) == release
    return False


def _workspace_entries(store: Store, rows: Sequence[manifest.Row]) -> Iterator[Entry]:
    """Yield the entries of the workspace that a release has, as the laptop read them (fleet/dispatch/workspace.py)."""
    for kind, path, *more in rows:
        if kind == "d":
            yield Entry(path, "dir", more[0], 0, "")
        elif kind == "l":
            yield Entry(path, "link", 0, 0, more[0])
    for file in manifest.files(rows):
        names = [name for name, _, _ in file.parts]
        content = manifest.name_of(store.read_packed(file)) if file.pack else manifest.content_of(names)
        yield Entry(file.path, "file", file.mode, file.size, content)
        step()
