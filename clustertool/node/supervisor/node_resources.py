"""A supervisor reserves the ports and devices of its node for a job: from before the first rank starts until the job ends."""

from __future__ import annotations

import contextlib
import os
import time
from typing import TYPE_CHECKING, Optional, Tuple

from clustertool.errors import PreflightError
from clustertool.node.devices import locks
from clustertool.node.ports import claims, listeners
from clustertool.node.ports.reservations import Reservations

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec

_TOUCH_EVERY = 3600.0  # seconds; many machines remove files in /tmp after days


class NodeResources:
    """The ports and devices that a job reserves here. reserve() comes before a rank starts, refresh() and release() later."""

    def __init__(self, spec: Spec) -> None:
        self._spec = spec
        self._ports = Reservations()
        self._devices: Optional[locks.DeviceLock] = None
        self._touched_at = time.monotonic()  # the file of the claims

    def reserve(self) -> None:
        """Reserve the node's ports, check that they are free, and lock its devices unless an engine allocates them.

        Raises PreflightError if a port or device is in use or cannot be used; release() then releases what was reserved before.
        """
        processes = self._spec["processes"]
        each = [process["ports"] for process in processes]
        others = [port for its in each for port in its[1:]]
        wanted = [*(port for its in each for port in its[:1]), *self._spec["extra_ports"], *others]
        self._ports.take(wanted)
        listeners.require_free(wanted)
        kind, ids = self._spec["device_kind"], {card for process in processes for card in process["devices"]}
        if ids and kind != "cpu" and not self._spec.get("engine"):  # an engine allocates devices to one job
            self._devices = locks.take(kind, sorted(ids), self._spec["job"])

    @property
    def inherited(self) -> Tuple[int, ...]:
        """The descriptor of the lock of devices, () without a lock: while it or a copy is open, the devices are reserved."""
        return () if self._devices is None else (self._devices.fd,)

    def refresh(self) -> None:
        """Answer questions for the owners of reserved ports, renew the lock of devices, and each hour the file of claims."""
        self._ports.turn()
        if self._devices is not None:
            self._devices.touch()
        now = time.monotonic()
        if now >= self._touched_at + _TOUCH_EVERY:
            self._touched_at = now
            claims.touch()

    def release(self, claimed: bool) -> None:
        """Release the ports and devices; `claimed`: also take back what was claimed when the job was placed.

        The event `ended` makes these claims void, too.
        """
        self._ports.close()
        if self._devices is not None:
            self._devices.release()
        with contextlib.suppress(PreflightError):
            if claimed:
                claims.take_back(self._spec["job"], os.path.dirname(self._spec["job_dir"]))
