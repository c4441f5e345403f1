"""The cache keeps what two dispatches of a workspace share: digests, packs, manifests. Losing it costs only time.

It is below the user's cache directory, with a folder for each workspace's path. A damaged file counts as missing.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from clustertool.errors import ConfigError
from clustertool.fleet import this_user
from clustertool.model.dispatch.manifest import Pack
from clustertool.model.paths import MANIFEST_END

_KEEP = 4  # manifests
_DIGESTS = "digests-2"  # that of earlier versions has private keys, too
_FRESH = 2.0  # seconds; a file that changed this recently may change again without a trace

Key = tuple[int, int, int, int]  # size, mtime and ctime in ns, inode


class WorkspaceCache:
    """The cached files of one workspace. For a user without a home folder it keeps nothing."""

    def __init__(self, top: Path) -> None:
        name = hashlib.sha256(os.fsencode(top.resolve())).hexdigest()[:32]
        self._dir = Path(os.devnull)  # nothing is kept below it
        with contextlib.suppress(ConfigError):
            self._dir = this_user.cache() / "workspaces" / name

    # -- digests of files --

    def digests(self) -> dict[str, tuple[Key, list[str]]]:
        """Read {path: (size, times and inode of the file, the names of its pieces)}; empty where there is no such file."""
        try:
            return {path: (tuple(key), names) for path, (key, names) in self._load(_DIGESTS).items()}
        except (AttributeError, TypeError, ValueError):
            return {}

    def keep_digests(self, found: Mapping[str, tuple[Key, list[str]]]) -> None:
        """Write digests for later dispatches, without those of files that changed in the last two seconds.

        Errors are ignored.
        """
        limit = (time.time() - _FRESH) * 1e9
        old = {path: (key, names) for path, (key, names) in found.items() if max(key[1], key[2]) < limit}
        self._save(_DIGESTS, old)

    # -- packs and manifests --

    def packs(self) -> tuple[str, set[str], list[Pack]]:
        """Read the release that was sent last, the nodes to which it was sent in these packs, and the packs.

        Returns "", an empty set and an empty list where they are not stored.
        """
        found = self._load("packs")
        try:
            packs = [Pack(name, tuple((content, size) for content, size in files)) for name, files in found["packs"]]
            return str(found["release"]), set(found["nodes"]), packs
        except (KeyError, TypeError, ValueError):
            return "", set(), []

    def keep_packs(self, release: str, nodes: Iterable[str], packs: Sequence[Pack]) -> None:
        """Write the release that was sent last, the nodes to which it was sent, and its packs. Errors are ignored."""
        self._save("packs", {"release": release, "nodes": list(nodes), "packs": packs})

    def manifest(self, release: str) -> bytes | None:
        """Read the manifest of a release as it was sent.

        None where there is none, or one that a crash of this machine has left empty or torn.
        """
        try:
            text = (self._dir / f"{release}.manifest").read_bytes()
        except OSError:
            return None
        return text if text.endswith(MANIFEST_END) else None

    def manifests(self) -> list[str]:
        """List the releases that have a manifest, the newest first."""
        return [path.name[: -len(".manifest")] for path in reversed(self._by_age())]

    def keep_manifest(self, release: str, text: bytes) -> None:
        """Write the manifest of a release, and remove all manifests but the newest four. Errors are ignored."""
        with contextlib.suppress(OSError):
            self._write_file(f"{release}.manifest", text)
            for path in self._by_age()[:-_KEEP]:
                path.unlink()

    def _by_age(self) -> list[Path]:
        """List the files of manifests, the oldest first."""
        return sorted(self._dir.glob("*.manifest"), key=lambda path: path.stat().st_mtime)

    # -- files --

    def _load(self, name: str) -> Any:
        """Read a file of JSON; {} where there is none, or a damaged one."""
        try:
            return json.loads((self._dir / name).read_bytes())
        except (OSError, ValueError):
            return {}

    def _save(self, name: str, value: object) -> None:
        """Write a file of JSON. Errors are ignored."""
        with contextlib.suppress(OSError):
            self._write_file(name, json.dumps(value).encode())

    def _write_file(self, name: str, data: bytes) -> None:
        """Write a file of the cache whole or not at all, and make the folder. Raises OSError."""
        self._dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        part = self._dir / f".{name}.{secrets.token_hex(4)}"
        part.write_bytes(data)
        part.replace(self._dir / name)
