"""The context of a request is what its handler knows of the node besides the request itself."""

from __future__ import annotations

from typing import List, Optional

from clustertool.node.system.work_counter import WorkCounter


class NodeContext:
    """`root`: ROOT_DIR on this node. `entry`: how conf.py names the node, user@host:port.

    base: None, or the request is about another node, whose jobs lie in this folder of a shared ROOT_DIR.
    """

    def __init__(self, root: str, entry: str, base: Optional[str] = None) -> None:
        self.root = root
        self.entry = entry
        self.base = base


class PlacingContext(NodeContext):
    """The same for what places jobs. `threads`: requests in progress. `placed`: the records of a job that waits to start."""

    def __init__(self, root: str, entry: str) -> None:
        super().__init__(root, entry)
        self.threads: List[WorkCounter] = []
        self.placed = ""
