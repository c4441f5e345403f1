"""A member of an elastic job takes part in one epoch after another: gather, plan, place, run its ranks, gather again.

One process does so from the start of the job to its end. In each epoch it makes another plan of the same job and becomes the
supervisor of its node, as in a job that is not elastic. How an epoch ends, and what the next one waits for, comes from the
coordinator's supervisor (EpochEnd).
"""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace
from typing import TYPE_CHECKING, FrozenSet, Optional, Tuple

from clustertool.errors import NodeLost
from clustertool.model.elastic.epochs import EpochEnd, former_leases, lost_leases
from clustertool.model.elastic.gathering import EpochBefore, Gathering, pause
from clustertool.model.hints import PROGRAM
from clustertool.model.job.outcome import Outcome
from clustertool.model.job.state_names import JobState
from clustertool.model.joining.join_file import JoinFile, MeetingPoint
from clustertool.model.joining.store_rules import ttl
from clustertool.node.join.bundle_content import BundleContent
from clustertool.node.join.epoch_store import StoreMeeting, Won
from clustertool.node.join.join_coordinator import JoinCoordinator
from clustertool.node.join.join_report import JoinReport
from clustertool.node.join.joiner import Joiner
from clustertool.node.join.joining_node import JoiningNode, own_incarnation
from clustertool.node.join.member_record import MemberRecord, first_record
from clustertool.node.join.place_doubt import MemberPlace
from clustertool.node.storage import files
from clustertool.node.system.child_signals import Signals
from clustertool.node.system.process_clock import boottime

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec


class EpochLoop:
    """run() returns the exit code of the job on this node."""

    def __init__(self, join: JoinFile, report: JoinReport, umask: int, bundle: Optional[BundleContent]) -> None:
        elastic = join.job.elastic
        self._join = replace(join, join_timeout=elastic.timeout)
        self._report, self._umask, self._bundle = report, umask, bundle
        self._short = 0  # epochs in a row that ended early
        self._began = boottime()  # the present gathering
        self._gathering = Gathering(
            0,
            elastic.minimum,
            elastic.maximum,
            elastic.timeout,
            self._began,
            started=join.nnodes,
            job_began=self._began,
        )
        self._known = -1  # the highest attempt in which this member has been
        self._continues = False  # this member coordinated the last epoch to its end
        self._lost: FrozenSet[int] = frozenset()  # members that were lost and have not joined again
        self._fix = ""  # what to do if no coordinator is found
        self._meeting: Optional[StoreMeeting] = None  # with a store, once this member knows the identity of the job

    def run(self, place: MemberPlace) -> int:
        if self._join.job.elastic.server.present and (place.address or not self._join.typed):
            self._meeting = StoreMeeting(self._join, own_incarnation())
        over: Optional[int] = None
        try:
            code, final = self._epochs(place)
            over = code if final else None
            return code
        finally:
            if self._meeting is not None:
                self._meeting.close(over)

    def _epochs(self, place: MemberPlace) -> Tuple[int, bool]:
        """Run one epoch after the other.

        Returns the exit code, and whether it is the job's: this member coordinated the last epoch, and no other start follows.
        """
        signals = Signals()
        join = replace(self._join, index=place.number)
        record = first_record(join, files.resolve(join.own.root_dir or join.cluster.root_dir))
        taken = False  # the next epoch
        while True:
            if self._meeting is not None and place.address and not taken:
                place = self._take_next(self._meeting, place)
            taken = False
            node = JoiningNode(replace(self._join, index=place.number), self._report, self._umask, self._bundle)
            part = node.epoch
            part.record, part.meeting, part.known, part.fix = record, self._meeting, self._known, self._fix
            part.lost = self._lost
            if place.address:
                code = JoinCoordinator(node, self._report, signals, place, self._gathering).run()
            else:
                code = Joiner(node, self._report, signals, place.doubt).run()
            self._meeting, self._known = part.meeting, max(self._known, part.known)
            if part.spec is not None:
                self._join = self._join.of_job(part.spec)
                self._gathering = self._gathering._replace(job_began=part.job_began)
            if part.resigned and self._meeting is not None:
                self._meeting.give_up()
                place, signals, record = MemberPlace(place.number, ""), Signals(), part.record
                continue
            if part.won is not None:
                place, taken = self._take_over(part.won), True
                signals, record = Signals(), part.record
                continue
            end, spec = part.end, part.spec
            if end is None or spec is None:
                return code, bool(place.address) and not part.comes_back
            place = self._after(end, spec, place)
            signals, record = Signals(), MemberRecord(spec, self._join.for_others)
            if spec["node"] in end.left:
                if self._meeting is not None and place.address:
                    self._hand_over(self._meeting, end)
                record.end(Outcome(JobState.STOPPED, end.code, "tool", end.why), coordinates=False)
                record.close()
                return end.code, False

    def _after(self, end: EpochEnd, spec: Spec, place: MemberPlace) -> MemberPlace:
        """Prepare for the next epoch. Returns the place of this member there."""
        self._known, coordinator = max(self._known, end.attempt), spec["lead"]
        self._continues = bool(place.address) and not end.silent
        members = frozenset(spec["shape"]["nodes"]) if "shape" in spec else frozenset()
        self._lost = (self._lost - members) | frozenset(end.lost)
        self._prepare(end, members, len(spec["header"]["nodes"]))
        # The job stays where it is here, also if no other node shares ROOT_DIR in the next epoch.
        own = replace(self._join.own, base=os.path.dirname(spec["job_dir"]))
        self._join = replace(
            self._join, coordinator=MeetingPoint(coordinator["host"], coordinator["port"], coordinator["node"]), own=own
        )
        again = f"{PROGRAM} run --resume {spec['job']} --skip {coordinator['name']}"
        self._fix = f"{again} starts the job again on the other nodes, from its output"
        return MemberPlace(spec["node"], place.address)

    def _take_next(self, meeting: StoreMeeting, place: MemberPlace) -> MemberPlace:
        """Take the next epoch in the store: the coordinator of the last one, or the one of the start, does.

        Raises NodeLost where the store is not reached at the start.
        """
        if self._known >= 0 and not self._continues:  # its lease has ended: other members may be quicker
            meeting.give_up()
            return place._replace(address="")
        at = self._join.coordinator
        seconds = self._join.cluster.loss_timeout
        won = meeting.win(place.number or 0, self._known, MeetingPoint(place.address, at.port, at.member), seconds)
        if won is None:
            if self._known < 0 and meeting.view.content is None:
                what = f"the store of --elastic-server does not answer: {meeting.view.problem or 'it is late'}"
                raise NodeLost(what, "check that each node reaches it")
            return place._replace(address="")
        if won.first or won.previous == self._known:  # it knows which nodes have ended the last epoch
            self._gathering = self._gathering._replace(number=won.number)
            return place
        return self._take_over(won)

    def _hand_over(self, meeting: StoreMeeting, end: EpochEnd) -> None:
        """Let another member take the next epoch at once. Only nodes that were lost may have ranks."""
        with contextlib.suppress(NodeLost):  # then it waits for all leases
            meeting.publish(sorted(end.lost), end.restarts_used, self._join.cluster.loss_timeout / 2)
        meeting.give_up()

    def _take_over(self, won: Won) -> MemberPlace:
        """Coordinate from now on. Nodes of the last epoch may have ranks until they join, or their leases end."""
        now, elastic, lease = boottime(), self._join.job.elastic, ttl(self._join.cluster.loss_timeout)
        again = self._known < 0 and bool(self._join.engine)  # it has started the job again, all nodes together
        worked = self._gathering.before.since or won.at  # a member that was in no epoch does not know it
        self._join = replace(self._join, coordinator=won.place)
        self._gathering = Gathering(
            won.number,
            elastic.minimum,
            elastic.maximum,
            elastic.timeout,
            now,
            first=won.first,
            leases=former_leases(frozenset(won.before), won.at, lease, won.former),
            expected=frozenset(range(self._join.nnodes) if again else won.before),
            patience=elastic.timeout if again else 1.0,  # the members had the time of their leases to join
            restarts=won.restarts,
            before=EpochBefore(frozenset(won.before), "its coordinator was lost", worked),
            job_began=self._gathering.job_began,
            numbers=max(self._gathering.numbers, won.place.member + 1, *(node + 1 for node in won.before)),
        )
        self._began = now
        return MemberPlace(won.place.member, won.place.host)

    def _prepare(self, end: EpochEnd, members: FrozenSet[int], numbers: int) -> None:
        """Prepare what the next epoch waits for. members: of the epoch that has ended. numbers: theirs are below it."""
        now, elastic = boottime(), self._join.job.elastic
        least, most = elastic.backoff
        self._short = self._short + 1 if now - self._began < most else 0
        lease = self._join.job.policy.loss_timeout
        lost, released = frozenset(end.lost), frozenset(end.left)
        worked = now - lease if end.silent else now  # a silent one has lost its lease, which began with the last answer
        before = EpochBefore(members, end.why, min(end.lost.values(), default=worked), lost, released)
        self._gathering = Gathering(
            end.attempt + 1,
            elastic.minimum,
            elastic.maximum,
            elastic.timeout,
            now,
            first=False,
            earliest=now + pause(self._short, least, most),
            leases=lost_leases(end.lost, lease),
            expected=members - lost - released,
            patience=lease,
            restarts=end.restarts_used,
            before=before,
            job_began=self._gathering.job_began,
            unattended=end.unattended,
            blamed=end.blamed,
            numbers=max(self._gathering.numbers, numbers),
        )
        self._began = now
