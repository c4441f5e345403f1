"""The node's code as nodes keep it. Without it, each node of each test would receive and compile it: 0.2 s of CPU.

Tests of that first start do without: tests/node/test_bootstrap.py, and those that use the embedded cluster.
"""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

from clustertool.fleet import node_bundle
from clustertool.node.agent.install import install

CACHE = Path(".cache/clustertool")


class NodeCode:
    """The code, installed once below `folder`, for nodes whose Python is this one."""

    def __init__(self, folder: Path) -> None:
        data = node_bundle._content()[1]
        self.name = f"{node_bundle.digest()}.{sys.implementation.cache_tag}-{sys.hexversion:x}"
        self._place = folder / CACHE / self.name
        install(data, node_bundle.digest(), str(self._place), safe=lambda _: None, complete=lambda _: False)

    def put_into(self, home: Path) -> None:
        """As after a first start there. The files are the same ones in all homes: nothing writes to them."""
        (home / CACHE).mkdir(mode=0o700, parents=True, exist_ok=True)
        shutil.copytree(self._place, home / CACHE / self.name, copy_function=os.link)
