"""The context of a request: what its handler knows of the node, the module of the handler, and the work that its thread counts.

The agent reports progress of a request in a thread as long as the count grows.
"""

from __future__ import annotations

import importlib
import threading
from typing import Any, Callable, List, Optional

from clustertool.errors import DispatchError
from clustertool.model.wire.messages import Kind


class WorkCounter(threading.Thread):
    """A thread that handles one request, started at once. step() counts its steps.

    number: of the request, for the answer; None if no answer is wanted.
    """

    def __init__(self, kind: Kind[Any, Any], number: Optional[int], handle: Callable[[], None]) -> None:
        super().__init__(target=handle, daemon=True)
        self.kind = kind
        self.number = number
        self.steps = self.reported = 0
        self.unwanted = False
        self.start()

    def moved(self) -> bool:
        """Check whether steps were done since the last call."""
        before, self.reported = self.reported, self.steps
        return self.steps != before

    def abandon(self) -> None:
        """Make the thread's next step() raise a DispatchError."""
        self.unwanted = True


def step() -> None:
    """Count a step of this thread's request: a file, a folder or a part of a file is done. Does nothing in other threads.

    Raises DispatchError, once, if the result is not wanted any more.
    """
    work = threading.current_thread()
    if isinstance(work, WorkCounter):
        work.steps += 1
        if work.unwanted:
            work.unwanted = False  # what it has done is taken back, which takes steps too
            raise DispatchError("was ended before it was complete")


class NodeContext:
    """What the handler of a request knows of its node. root: ROOT_DIR. entry: how conf.py names the node, user@host:port.

    base: None, or the request is about another node, whose jobs lie in this folder of a shared ROOT_DIR.
    """

    def __init__(self, root: str, entry: str, base: Optional[str] = None) -> None:
        self.root = root
        self.entry = entry
        self.base = base


class PlacingContext(NodeContext):
    """The context of requests that place jobs. threads: requests in progress.

    placed: the folder with the records of a job that waits for its start; "" if none.
    """

    def __init__(self, root: str, entry: str) -> None:
        super().__init__(root, entry)
        self.threads: List[WorkCounter] = []
        self.placed = ""


def load_on_demand(place: str) -> Any:
    """Import a module of the node's code that only some requests need, and return the object that "folder.module:name" names.

    To import all of them takes an agent 35 ms of CPU time.
    """
    module, _, name = place.partition(":")
    return getattr(importlib.import_module(f"clustertool.node.{module}"), name)
