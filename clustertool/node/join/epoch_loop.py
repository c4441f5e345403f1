"""A member of an elastic job takes part in one epoch after another: gather, plan, place, run its ranks, gather again.

One process does so from the start of the job to its end. In each epoch it makes another plan of the same job and becomes the
supervisor of its node, as in a job that is not elastic. How an epoch ends, and what the next one waits for, comes from the
coordinator's supervisor (EpochEnd).
"""

from __future__ import annotations

from dataclasses import replace
from typing import FrozenSet, NamedTuple, Optional

from clustertool.model.elastic.epochs import EpochEnd, earliest_start
from clustertool.model.elastic.gathering import EpochBefore, Gathering, pause
from clustertool.model.joining.join_file import JoinFile, MeetingPoint
from clustertool.node.join.bundle_content import BundleContent
from clustertool.node.join.coordinator import JoinCoordinator
from clustertool.node.join.join_report import JoinReport
from clustertool.node.join.joiner import Joiner
from clustertool.node.join.joining_node import JoiningNode
from clustertool.node.join.member_record import MemberRecord, first_record
from clustertool.node.storage import files
from clustertool.node.system.child_signals import Signals
from clustertool.node.system.process_clock import boottime


class MemberPlace(NamedTuple):
    """The part of this machine in the next epoch. number: in the job, None until it has one. address: the
    coordinator's, if this machine coordinates, else ""."""

    number: Optional[int]
    address: str


class EpochLoop:
    """run() returns the exit code of the job on this node."""

    def __init__(self, join: JoinFile, report: JoinReport, umask: int, bundle: Optional[BundleContent]) -> None:
        elastic = join.job.elastic
        self._join = replace(join, join_timeout=elastic.timeout)
        self._report, self._umask, self._bundle = report, umask, bundle
        self._elastic = elastic
        self._short = 0  # epochs in a row that ended early
        self._began = boottime()  # the present epoch
        first = Gathering(0, elastic.minimum, elastic.maximum, elastic.timeout, self._began, started=join.nnodes)
        self._gathering = first

    def run(self, part: MemberPlace) -> int:
        signals = Signals()
        join = replace(self._join, index=part.number)
        record = first_record(join, files.resolve(join.own.root_dir or join.cluster.root_dir))
        while True:
            node = JoiningNode(replace(self._join, index=part.number), self._report, self._umask, self._bundle)
            node.epoch.record = record
            if part.address:
                code = JoinCoordinator(node, self._report, signals, part.address, self._gathering).run()
            else:
                code = Joiner(node, self._report, signals).run()
            end, spec = node.epoch.end, node.epoch.spec
            if end is None or spec is None:
                return code
            self._prepare(end, frozenset(spec["shape"]["nodes"]) if "shape" in spec else frozenset())
            lead = spec["lead"]
            self._join = replace(self._join, coordinator=MeetingPoint(lead["host"], lead["port"], lead["node"]))
            part = MemberPlace(spec["node"], part.address)
            signals, record = Signals(), MemberRecord(spec, self._join.for_others)

    def _prepare(self, end: EpochEnd, members: FrozenSet[int]) -> None:
        """What the next epoch waits for. members: of the epoch that has ended."""
        now, elastic = boottime(), self._elastic
        least, most = elastic.backoff
        self._short = self._short + 1 if now - self._began < most else 0
        lease = self._join.job.policy.loss_timeout
        lost, released = frozenset(end.lost), frozenset(end.left)
        before = EpochBefore(members, end.why, min(end.lost.values(), default=now), lost, released)
        self._gathering = Gathering(
            end.attempt + 1,
            elastic.minimum,
            elastic.maximum,
            elastic.timeout,
            now,
            first=False,
            earliest=max(earliest_start(end.lost, lease), now + pause(self._short, least, most)),
            expected=members - lost - released,
            patience=lease,
            restarts=end.restarts_used,
            before=before,
        )
        self._began = now
