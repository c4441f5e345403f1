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
from clustertool.model.elastic.epochs import EpochBefore, EpochEnd, Gathering, former_leases, lost_leases, pause
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
from clustertool.node.join.meeting import MemberPlace
from clustertool.node.join.member_record import MemberRecord, first_record
from clustertool.node.system.child_signals import Signals
from clustertool.node.system.process_clock import boottime

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec


class EpochLoop:
    """A member of an elastic job in all its epochs. run() returns the exit code of the job on this node."""

    def __init__(self, join: JoinFile, report: JoinReport, umask: int, bundle: Optional[BundleContent]) -> None:
        elastic = join.job.elastic
        self._node = JoiningNode(replace(join, join_timeout=elastic.timeout), report, umask, bundle)
        self._short = 0  # epochs in a row that ended early
        self._continues = False  # this member coordinated the last epoch to its end
        began = self._node.job_began
        self._gathering = Gathering(0, elastic.minimum, elastic.maximum, elastic.timeout, began, started=join.nnodes)

    def run(self, place: MemberPlace) -> int:
        """Take part in the epochs of the job, with its store, if it has one, and return the exit code.

        place: of this machine at the start. When the coordinator of the last epoch ends, it writes the exit code to the store.
        """
        node, over = self._node, None
        if node.join.job.elastic.server.present and (place.address or not node.join.typed):
            node.store = StoreMeeting(node.join, own_incarnation())
        try:
            code, final = self._run_epochs(place)
            over = code if final else None
            return code
        finally:
            if node.store is not None:
                node.store.close(over)

    def _run_epochs(self, place: MemberPlace) -> Tuple[int, bool]:
        """Coordinate or join one epoch after the other, until the job ends or this member leaves it.

        Returns the exit code, and whether it is the job's: this member coordinated the last epoch, and no other start follows.
        """
        node, signals = self._node, Signals()
        node.record = first_record(replace(node.join, index=place.number), node.root)
        taken = False  # the next epoch
        while True:
            if node.store is not None and place.address and not taken:
                place = self._take_next(node.store, place)
            node.begin(replace(node.join, index=place.number))
            if place.address:
                code = JoinCoordinator(node, signals, place, self._gathering).run()
            else:
                code = Joiner(node, signals, place.doubt).run()
            taken = node.won is not None
            if not (node.resigned or taken or node.end is not None):
                return code, bool(place.address) and not node.comes_back
            signals = Signals()
            if node.resigned and node.store is not None:
                node.store.give_up()
                place = MemberPlace(place.number, "")
            elif node.won is not None:
                place = self._take_over(node.won)
            elif node.end is not None and node.spec is not None:
                end = node.end
                place = self._after_epoch(end, node.spec, place.address)
                node.record = MemberRecord(node.spec, node.join.for_others)
                if node.spec["node"] in end.left:
                    if node.store is not None and place.address:
                        self._hand_over(node.store, end)
                    node.record_outcome(Outcome(JobState.STOPPED, end.code, "tool", end.why))
                    return end.code, False

    def _after_epoch(self, end: EpochEnd, spec: Spec, address: str) -> MemberPlace:
        """Update the node and the gathering by the end of an epoch, and return this member's place in the next one.

        address: at which this member has coordinated, "" if it has not.
        """
        node, coordinator = self._node, spec["lead"]
        node.known = max(node.known, end.attempt)
        self._continues = bool(address) and not end.silent
        members = frozenset(spec["shape"]["nodes"]) if "shape" in spec else frozenset()
        node.lost = (node.lost - members) | frozenset(end.lost)
        self._set_gathering(end, members, len(spec["header"]["nodes"]))
        # The job stays where it is here, also if no other node shares ROOT_DIR in the next epoch.
        own = replace(node.join.own, base=os.path.dirname(spec["job_dir"]))
        meets = MeetingPoint(coordinator["host"], coordinator["port"], coordinator["node"])
        node.join = replace(node.join, coordinator=meets, own=own)
        again = f"{PROGRAM} run --resume {spec['job']} --skip {coordinator['name']}"
        node.fix = f"{again} starts the job again on the other nodes, from its output"
        return MemberPlace(spec["node"], address)

    def _take_next(self, store: StoreMeeting, place: MemberPlace) -> MemberPlace:
        """Campaign for the next epoch in the store, as the coordinator of the last one or of the start; return the new place.

        Its address is "" if it does not win: another member coordinates the epoch, its lease has ended, so that it gives up, or
        the store does not answer within LOSS_TIMEOUT. Raises NodeLost in the latter case at the start.
        """
        if self._node.known >= 0 and not self._continues:  # its lease has ended: other members may be quicker
            store.give_up()
            return place._replace(address="")
        at = self._node.join.coordinator
        seconds = self._node.join.cluster.loss_timeout
        won = store.win(place.number or 0, self._node.known, MeetingPoint(place.address, at.port, at.member), seconds)
        if won is None:
            if self._node.known < 0 and store.view.content is None:
                what = f"the store of --elastic-server does not answer: {store.view.problem or 'it is late'}"
                raise NodeLost(what, "check that each node reaches it")
            return place._replace(address="")
        if won.first or won.previous == self._node.known:  # it knows which nodes have ended the last epoch
            self._gathering = self._gathering._replace(number=won.number)
            return place
        return self._take_over(won)

    def _hand_over(self, store: StoreMeeting, end: EpochEnd) -> None:
        """Write the lost nodes to the store (only they may have ranks), and give up the epoch: another member takes it."""
        with contextlib.suppress(NodeLost):  # then it waits for all leases
            store.publish(sorted(end.lost), end.restarts_used, self._node.join.cluster.loss_timeout / 2)
        store.give_up()

    def _take_over(self, won: Won) -> MemberPlace:
        """Set the gathering for an epoch that was won in the store, and return the place of this member as its coordinator.

        Nodes of the last epoch may have ranks until they join, or their leases end.
        """
        now, elastic, lease = boottime(), self._node.join.job.elastic, ttl(self._node.join.cluster.loss_timeout)
        # It has started the job again, all nodes together.
        again = self._node.known < 0 and bool(self._node.join.engine)
        worked = self._gathering.before.since or won.at  # a member that was in no epoch does not know it
        self._node.join = replace(self._node.join, coordinator=won.place)
        self._gathering = Gathering(
            won.number,
            elastic.minimum,
            elastic.maximum,
            elastic.timeout,
            now,
            first=won.first,
            leases=former_leases(frozenset(won.before), won.at, lease, won.former),
            expected=frozenset(range(self._node.join.nnodes) if again else won.before),
            patience=elastic.timeout if again else 1.0,  # the members had the time of their leases to join
            restarts=won.restarts,
            before=EpochBefore(frozenset(won.before), "its coordinator was lost", worked),
            numbers=max(self._gathering.numbers, won.place.member + 1, *(node + 1 for node in won.before)),
        )
        return MemberPlace(won.place.member, won.place.host)

    def _set_gathering(self, end: EpochEnd, members: FrozenSet[int], numbers: int) -> None:
        """Set the gathering for the epoch that follows this end: its number, its pause, and the nodes and leases to wait for.

        members: of the epoch that has ended. numbers: those of all members are below it.
        """
        now, elastic = boottime(), self._node.join.job.elastic
        least, most = elastic.backoff
        self._short = self._short + 1 if now - self._gathering.began < most else 0
        lease = self._node.join.job.policy.loss_timeout
        lost, released = frozenset(end.lost), frozenset(end.left)
        worked = now - lease if end.silent else now  # a silent one has lost its lease, which began with the last answer
        before = EpochBefore(members, end.why, min(end.lost.values(), default=worked), lost, released)
        self._gathering = self._gathering._replace(
            number=end.attempt + 1,
            began=now,
            first=False,
            earliest=now + pause(self._short, least, most),
            leases=lost_leases(end.lost, lease),
            expected=members - lost - released,
            patience=lease,
            restarts=end.restarts_used,
            before=before,
            unattended=end.unattended,
            blamed=end.blamed,
            steps=end.steps,
            numbers=max(self._gathering.numbers, numbers),
        )
