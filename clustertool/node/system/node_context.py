"""The context of a request: what its handler knows of the node besides the request itself."""

from __future__ import annotations


class NodeContext:
    """`root`: ROOT_DIR on this node. `entry`: how conf.py names the node, user@host:port."""

    def __init__(self, root: str, entry: str) -> None:
        self.root = root
        self.entry = entry
