"""The end of a supervisor on its node: of the job, or of one epoch of an elastic job, and the events that record it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Dict, NamedTuple, Optional, Sequence, Tuple

from clustertool.model.elastic.epochs import EpochEnd
from clustertool.model.job.outcome import Outcome, some
from clustertool.model.job.state_names import JobState

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec
    from clustertool.node.supervisor.control_socket import UserRequests
    from clustertool.node.supervisor.coordinator.coordinator_link import CoordinatorLink

Event = Tuple[str, Dict[str, object]]  # its type and its fields


class NodeEnd(NamedTuple):
    """outcome: of the job on this node, or NEXT_EPOCH; None if no rank could run. epoch: in the second case only."""

    outcome: Optional[Outcome]
    epoch: Optional[EpochEnd] = None
    events: Tuple[Event, ...] = ()


def node_end(
    outcome: Optional[Outcome], requests: UserRequests, survivors: Sequence[str], link: CoordinatorLink, spec: Spec
) -> NodeEnd:
    """Determine how a supervisor ends.

    outcome: as the coordinator, or its silence, has decided it. survivors: processes that cannot be ended.
    """
    if outcome is None:
        return NodeEnd(None)
    left: Tuple[Event, ...] = (("left", {"why": requests.leave_by}),) if requests.leave_by else ()
    if outcome.state is not JobState.NEXT_EPOCH:
        alone = left if outcome == requests.left else ()
        return NodeEnd(outcome, None, (*alone, ("ended", outcome.as_record())))
    own = _own_outcome(requests, survivors, spec)
    if own is not None:
        verdict: Tuple[Event, ...] = (("verdict", own.as_record()),) if spec["node"] == spec["lead"]["node"] else ()
        return NodeEnd(own, None, (*verdict, ("ended", own.as_record())))
    end = link.epoch_end(outcome)
    ended: Event = ("epoch-ended", {"attempt": end.attempt, "why": end.why})
    if left:
        end = end._replace(left=tuple(sorted({*end.left, spec["node"]})), code=requests.code)
    return NodeEnd(outcome, end, (ended, *left))


def _own_outcome(requests: UserRequests, survivors: Sequence[str], spec: Spec) -> Optional[Outcome]:
    """Return why this node takes part in no other epoch, although there is one."""
    if survivors:
        brief = f"processes on {spec['name']} cannot be ended"
        return Outcome(JobState.LOST, 75, "tool", f"{brief}: {some(survivors)}", node=spec["node"], brief=brief)
    return requests.stopped  # the coordinator did not learn of it, or too late
