"""A link is a connection of a relay to another node: what was asked of it, and what it is to be sent."""

from __future__ import annotations

from collections import deque
from typing import Deque, Dict, List, Optional, Set, Tuple

from clustertool.model.wire.payload import Sink
from clustertool.node.system.tls_link import Wire

Address = Tuple[str, int]


class Link:
    """A connection to another node. As a source it has pieces for us; as a taker it is sent some."""

    wire: Wire

    def __init__(self, source: Optional[Address], now: float) -> None:
        self.source = source  # where it is; None: a taker
        self.old = False  # it is a source by an older list
        self.since = self.moved = now
        self.has: Set[int] = set()
        self.todo: List[int] = []
        self.asked: Dict[int, float] = {}
        self.coming: Deque[Sink] = deque()  # where pieces go that it sends
        self.owed: List[int] = []
        self.told: Optional[int] = None  # how many of our own pieces a taker knows of

    @property
    def taker(self) -> bool:
        return self.source is None
