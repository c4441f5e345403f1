"""A progress receiver gets the progress of a dispatch. It is apart from the dispatch, which most commands do not import."""

from __future__ import annotations

from typing import Protocol


class ProgressReceiver(Protocol):
    """Reports of a dispatch while it runs, from one thread. Nodes are named."""

    def uplink(self, sent: int, planned: int) -> None: ...

    def node(self, name: str, got: int, size: int) -> None: ...

    def done(self, name: str) -> None: ...
