"""Trainers wait until every pserver listens at its endpoint. A pserver that listens on another address is reported.

A port alone is not sufficient: on one machine several addresses may have a listener each at the same port. If an endpoint is
not an address of this machine (a name, or one that a router translates), any listener at the port counts.
"""

from __future__ import annotations

import contextlib
import time
from typing import TYPE_CHECKING, Dict, List, Sequence, Tuple

from clustertool.model.job.outcome import Key
from clustertool.node.ports import listeners as ports
from clustertool.node.ports.listeners import Listener
from clustertool.node.system import processes

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import SpecProcess

OtherAddress = Tuple[Key, str, str]  # of which pserver, where it listens, its endpoint

# Seconds between two searches for pservers that listen on another address; they may yet open the right port.
_CHECK_EVERY = 3.0


class PendingServer:
    def __init__(self, spec: SpecProcess, pid: int) -> None:
        self.pid = pid
        self.endpoint = spec["endpoint"]
        self.ports = frozenset(spec["ready"])
        self.address = ports.own_address(self.endpoint.rpartition(":")[0].strip("[]"))
        self.check_at = time.monotonic() + _CHECK_EVERY

    def listens_at(self, listeners: Sequence[Listener]) -> bool:
        at = [listener for listener in listeners if listener.port in self.ports]
        return any(not self.address or ports.serves(listener, self.address) for listener in at)

    def other_address(self, listeners: Sequence[Listener]) -> str:
        """Find the address at which it listens on its own port, if not where it is expected; "" if it does not listen yet."""
        at = [listener for listener in listeners if listener.port in self.ports]
        own: List[Listener] = []
        for pid in [self.pid, *(process.pid for process in processes.descendants(self.pid))] if at else ():
            with contextlib.suppress(OSError):
                own += ports.of_process(pid, at)
        return ", ".join(sorted({f"{listener.address} port {listener.port}" for listener in own}))


class ListenWatch:
    """`pending`: the pservers that were started and do not listen yet."""

    def __init__(self) -> None:
        self.pending: Dict[Key, PendingServer] = {}
        self._reported: Dict[Key, str] = {}

    def check(self) -> Tuple[List[Key], List[OtherAddress]]:
        """Find the pservers that listen now, which are no longer pending; and those on another address, each place once."""
        if not self.pending:
            return [], []
        listeners = ports.listeners()
        ready = sorted(key for key, server in self.pending.items() if server.listens_at(listeners))
        for key in ready:
            del self.pending[key]
        return ready, self._strays(listeners)

    def _strays(self, listeners: Sequence[Listener]) -> List[OtherAddress]:
        found, now = [], time.monotonic()
        for key in sorted(self.pending):
            server = self.pending[key]
            if now >= server.check_at:
                server.check_at = now + _CHECK_EVERY
                listens = server.other_address(listeners)
                if listens and self._reported.get(key) != listens:
                    self._reported[key] = listens
                    found.append((key, listens, server.endpoint))
        return found
