"""The node monitor samples what the job does on this node twice a second: descendants, disk, memory, devices, usage, logs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Callable

from clustertool.node.jobs.descendants import Descendants
from clustertool.node.supervisor.card_monitor import CardMonitor
from clustertool.node.supervisor.rank_table import RankTable
from clustertool.node.supervisor.usage_recorder import UsageRecorder
from clustertool.node.system.pressure import DiskWatch

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec

_SAMPLE_EVERY = 0.5


class NodeMonitor:
    """Call turn() each loop and close() once. `job`: the descriptor of the job's directory; `record` writes an event."""

    def __init__(
        self, spec: Spec, job: int, family: Descendants, ranks: RankTable, record: Callable[..., None]
    ) -> None:
        self._root = spec["root"]
        self._family = family
        self._ranks = ranks
        self._record = record
        self._disk = DiskWatch(job)
        self.devices = CardMonitor(family, spec, record)
        self.recorder = UsageRecorder(job, self.devices)
        self._sampled_at = 0.0

    def turn(self) -> bool:
        """Return whether it has taken a sample now."""
        self.record_growth()
        now = time.monotonic()
        if now < self._sampled_at + _SAMPLE_EVERY:
            return False
        self._sampled_at = now
        self._family.update()
        self.disk_is_full()
        for rank in self._ranks.running.values():
            if rank.sample() and rank.container is not None:
                role, number = rank.key
                self._record("frozen" if rank.container.frozen else "thawed", role=role, rank=number)
        if self._ranks.running:
            self.devices.turn()
        self.recorder.turn(self._family.members, self._ranks.snapshot())
        return True

    def record_growth(self, at_once: bool = False) -> None:
        """Record how the logs grew; `at_once`: also of a log whose growth was recorded a moment ago."""
        self.recorder.grown(self._ranks.growth(at_once))

    def disk_is_full(self) -> bool:
        """Sample the disk now, and record a change."""
        if self._disk.update():
            self._record("disk", full=self._disk.full, root=self._root)
        return self._disk.full

    def close(self) -> None:
        self.record_growth(at_once=True)
        self.recorder.close()
