"""The node's code as nodes keep it. Without it, each node of each test would receive and compile it: 0.2 s of CPU.

Tests of that first start do without: tests/node/test_bootstrap.py, tests/ssh/test_local_cluster.py. Nodes of elastic jobs
compile the larger code of joining processes, too, which takes 0.7 s: `put_joining_into` spares it. A join bundle has
the text of all modules; `add_compiled` adds what Python makes of them, which takes 0.7 s of CPU at each start of the bundle.
"""

from __future__ import annotations

import fcntl
import functools
import importlib.util
import io
import os
import sys
import zipfile
from importlib._bootstrap_external import _code_to_hash_pyc  # type: ignore[import-not-found]
from importlib.machinery import SourceFileLoader
from pathlib import Path

from clustertool.fleet import node_bundle
from clustertool.fleet.joining import join_process
from clustertool.node.agent.install import install

REPO = Path(__file__).resolve().parents[1]
CACHE = Path(".cache/clustertool")


class NodeCode:
    """The code, installed once below `folder`, for nodes whose Python is this one. Several processes may share the folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.place = self._installed(node_bundle._content()[1], node_bundle.digest())
        self.name = self.place.name

    @functools.cached_property
    def joining(self) -> Path:
        """The code of joining processes, which the first use installs."""
        return self._installed(join_process._join_texts(join_process.code()), join_process.digest())

    def put_into(self, home: Path) -> None:
        """As after a first start there. The files are the same ones in all homes: nothing writes to them."""
        self._copy(self.place, home)

    def put_joining_into(self, home: Path) -> None:
        """As after an elastic job there: keep_code() of node/agent/members.py has written it."""
        self._copy(self.joining, home)

    def _installed(self, data: bytes, digest: str) -> Path:
        place = self._folder / CACHE / f"{digest}.{sys.implementation.cache_tag}-{sys.hexversion:x}"
        with open(self._folder / f"{digest}.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not place.exists():  # it is renamed to this when it is complete
                install(data, digest, str(place), safe=lambda _: None, complete=lambda _: False)
        return place

    def _copy(self, place: Path, home: Path) -> None:
        (home / CACHE).mkdir(mode=0o700, parents=True, exist_ok=True)
        source, target = str(place), str(home / CACHE / place.name)
        folders, files = _tree(source)
        for folder in folders:
            os.mkdir(target + folder, 0o700)
        for file in files:
            os.link(source + file, target + file)


@functools.cache  # shutil.copytree, which reads the tree each time, takes three times as long
def _tree(top: str) -> tuple[list[str], list[str]]:
    """Its folders, the outer ones before the inner ones, and its files: what follows the path of the top."""
    folders, files = [], []
    for folder, _, names in os.walk(top):
        below = folder.removeprefix(top)
        folders.append(below)
        files += [f"{below}/{name}" for name in names]
    return folders, files


@functools.lru_cache(maxsize=1)  # all pods of a job have the same
def add_compiled(bundle: bytes) -> bytes:
    """Add the compiled modules for this Python to a join bundle, which has their text. Other versions read the text."""
    file = io.BytesIO(bundle)
    with zipfile.ZipFile(file, "a") as archive:
        for name, data in _compiled():
            archive.writestr(name, data)
    return file.getvalue()


@functools.cache
def _compiled() -> list[tuple[str, bytes]]:
    """Read what Python has made of all modules of a bundle, which takes a tenth of the time that a compilation takes."""
    made = []
    for name, text in join_process.code().items():
        module = name.removesuffix(".py").replace("/", ".")
        code = SourceFileLoader(module, str(REPO / name)).get_code(module)
        made.append((name + "c", bytes(_code_to_hash_pyc(code, importlib.util.source_hash(text.encode()), False))))
    return made
