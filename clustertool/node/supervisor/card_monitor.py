"""The card monitor is a process next to the supervisor that samples the job's cards: a driver's library may hang or crash.

It sends its samples, and no process waits for it. It ends when the supervisor ends it, when the supervisor is gone (by the
kernel), or when its socket is closed. If it dies, it is started again, a few times. None of its errors makes a job fail.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
from typing import TYPE_CHECKING, Any, Callable, List, Optional, Sequence

from clustertool.model.devices.visibility import numbers
from clustertool.model.job.usage import CardUsage
from clustertool.node.devices import detect, nvml, vendor_tools
from clustertool.node.jobs.descendants import Descendants
from clustertool.node.supervisor import prctl
from clustertool.node.supervisor.usage_recorder import EVERY
from clustertool.node.system import processes

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec

_SHARE = 200  # it and the tools that it runs may take one part of so many of a core
_TRIES = 3  # gauges that there will be, each after the death of the one before
_FAREWELL = 1.0  # seconds for a killed process to end; one that is blocked in a driver ends when the driver returns
_MESSAGE = 1 << 16


class CardMonitor:
    """turn() with each sample of the descendants, changed() on its SIGCHLD, end() once; call it for the last sample."""

    def __init__(self, family: Descendants, spec: Spec, record: Callable[..., None]) -> None:
        self.pid = 0
        self._family, self._record = family, record
        self._mark, self._kind = spec["mark"], spec["device_kind"]
        taken = {card for rank in spec["processes"] for card in rank["devices"]}
        each = numbers(spec["allocated"]) if spec.get("allocated") else {card: card for card in taken}
        # Number on the node -> as in the plan.
        self._cards = {number: card for number, card in each.items() if card in taken}
        self._ids = sorted(self._cards)
        self._sock: Optional[socket.socket] = None
        self._tries = _TRIES if self._ids and self._kind != "cpu" else 0

    def turn(self) -> None:
        """Start it if there is none."""
        if self.pid or not self._tries:
            return
        self._tries -= 1
        if not readable(self._kind):
            self._tries = 0
            return
        with contextlib.suppress(OSError):  # no process to spare
            self._start()

    def changed(self, status: int) -> None:
        if os.WIFEXITED(status) or os.WIFSIGNALED(status):
            self._family.spare.discard(self.pid)
            self.pid, self._sock = 0, None

    def __call__(self) -> Sequence[CardUsage]:
        """Return the newest sample that came since the last call, () for none. Never waits. Called in the recorder's thread."""
        sock, newest = self._sock, b""
        with contextlib.suppress(BlockingIOError, ConnectionError):
            while sock is not None:
                data = sock.recv(_MESSAGE, socket.MSG_DONTWAIT)
                if not data:
                    break
                newest = data
        return [(self._cards[index], *load) for index, *load in json.loads(newest or b"[]")]

    def end(self) -> None:
        if not self.pid:
            return
        with contextlib.suppress(ChildProcessError):
            os.kill(self.pid, signal.SIGSTOP)  # so that no tool is started during the search
            tools = processes.descendants(self.pid)
            os.kill(self.pid, signal.SIGKILL)
            for tool in tools:
                processes.signal_one(tool, signal.SIGKILL)
            processes.reap(self.pid, 0.0, _FAREWELL)
        self.pid = 0

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            parent = os.getpid()
            pid = os.fork()
            if pid == 0:
                self._become(theirs, parent)
        self.pid, self._sock = pid, ours
        process = processes.identify(pid)
        if process:
            self._family.add(process)
            self._record("gauge", pid=pid, start=process.start)

    def _become(self, sock: socket.socket, parent: int) -> None:
        """Become the monitor in the child, which never returns.

        It closes the supervisor's descriptors: they keep locks and ports.
        """
        try:
            prctl.end_with_parent(signal.SIGKILL)
            processes.detach(sock.fileno())
            os.environ["CLUSTERTOOL_MARK"] = self._mark  # for the tools that it runs: a search by mark finds them
            if os.getppid() == parent:
                run(sock, self._kind, self._ids)
        finally:
            processes.leave(0)


def readable(kind: str) -> bool:
    """Check whether this node has something to sample; the result is another matter."""
    if kind == "gpu":
        return bool(nvml.newest()) and (bool(detect.library()) or os.path.exists("/dev/nvidiactl"))
    return bool(vendor_tools.program(kind))


def run(sock: socket.socket, kind: str, ids: Sequence[int]) -> None:
    """Sample, send and sleep: the loop of the card monitor. Its start is not counted."""
    processes.set_name("ct-gauge")
    read, used = reader(kind, ids), None
    while True:
        before = processes.used()
        try:
            sock.send(json.dumps(read()).encode(), socket.MSG_DONTWAIT)
        except BlockingIOError:  # the reader does not take it at the moment
            pass
        except ConnectionError:
            return
        used = 0.0 if used is None else processes.used() - before
        if select.select([sock], [], [], max(EVERY, _SHARE * used))[0]:
            return


def reader(kind: str, ids: Sequence[int]) -> Callable[[], List[CardUsage]]:
    """Create the function that samples these cards; it may hang."""
    if kind == "gpu":
        digest = nvml.newest()
        return lambda: nvml.load(digest, ids)
    return lambda: [
        _card(one) for one in vendor_tools.read(kind)["devices"] if one["index"] in ids and one.get("memory_total")
    ]


def _card(device: Any) -> CardUsage:
    return device["index"], device.get("utilisation") or 0, device.get("memory_used") or 0, device["memory_total"]
