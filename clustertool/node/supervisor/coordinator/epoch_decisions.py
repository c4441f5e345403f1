"""The coordinator's decisions in an elastic job: those of job_decisions, but for what changes which nodes take part.

    phase      event                                      next     actions
    any        a node is lost, or absent                  ending   Stop        of the epoch, not of the job
    any        the coordinator's own lease has ended      ending   Stop        the same
    any        a node asks to leave                       ending   Stop        the same: the next epoch begins without it
    any        a node is shut down                        ending   Stop        the same, or of the job if too few are left
    ending     a node asks to leave                                (the restart that is under way becomes an epoch)
    any        a machine offers itself, grow is restart   ending   Stop        the same, if there is room for it
    ending     because of failed ranks, a node is lost             (they may have failed because of it: no failure is counted)
    ending     the attempt before has failed on the same node, too  (the restart becomes an epoch, which prefers standby)
    ending     all that failed by themselves did so with 101       (they ask to be started again: no failure is counted)
    ending     three restarts in a row without a later step        (no restart: the job fails; changes of nodes do not count)
    ending     all nodes clean or lost                    over     Finish(NEXT_EPOCH)

An epoch ends as an attempt does: the nodes that can be reached prove that no process is left. The outcome of the job has
priority over the end of the epoch if all trainers have succeeded, or a stop is asked. With a store, a restart because of
--max-restarts is an epoch, too, because the number of each attempt comes from the store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Optional, Sequence, Tuple, Union

from clustertool.model.elastic.epochs import suspect
from clustertool.model.job.outcome import Outcome, RankExit, exit_code, some
from clustertool.model.job.state_names import JobState
from clustertool.model.roles import role_name
from clustertool.node.supervisor.coordinator import job_decisions
from clustertool.node.supervisor.coordinator.job_decisions import Shape, State, Step

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import ElasticSpec, Spec

AGAIN = 101  # the exit code of a program that asks to be started again, as Paddle's elastic training defines it
_SURVIVED = "the next epoch cannot start while processes of this one live"


class Leaves(NamedTuple):
    """A node asks to be released. by: what asked for it."""

    node: int
    by: str


class ShutDown(NamedTuple):
    """A node has got a signal that ends it, and its ranks.

    stop: how the job ends if fewer than the minimum are left. standby: machines that wait.
    """

    node: int
    stop: job_decisions.StopAsked
    standby: int = 0


class Returned(NamedTuple):
    """The process of a node offers itself again: its supervisor has ended the ranks because its lease has ended."""

    node: int


class OnStandby(NamedTuple):
    """A machine offers itself during an epoch."""

    name: str


class LeaseEnded(NamedTuple):
    """The lease of the coordinator's own node has ended."""

    node: int
    why: str


Event = Union[job_decisions.Event, Leaves, ShutDown, Returned, OnStandby, LeaseEnded]


def shape_of(spec: Spec) -> Shape:
    """Build the Shape of a job, or of an epoch of an elastic one, from its spec: nodes, names, places and policy.

    The restarts that earlier epochs used are subtracted from max_restarts.
    """
    given, policy, first = spec["shape"], spec["policy"], spec.get("attempt", 0)
    names = tuple(given["names"])
    nodes = frozenset(given.get("nodes", range(len(names))))
    place = tuple(((role, rank), node) for role, rank, node in given["place"])
    left = policy["max_restarts"] - (spec["elastic"]["restarts"] if "elastic" in spec else 0)
    most_idle = policy["max_restarts_without_progress"]
    return Shape(nodes, names, place, policy["on_failure"], left, first, policy["grace"], most_idle)


def decide(elastic: ElasticSpec, state: State, event: Event) -> Step:
    """Return (next state, actions) for an event: by the rules of an epoch if it changes which nodes take part.

    For other events they are those of job_decisions.decide. elastic: the rules of the epoch. Nothing changes after its end.
    """
    if state.phase == "over":
        return state, ()
    if isinstance(event, (job_decisions.Lost, job_decisions.Absent)):
        return job_decisions.with_release(*_on_loss(state, event))
    if isinstance(event, Leaves):
        return _on_leaves(state, event)
    if isinstance(event, ShutDown):
        return _on_shut_down(elastic, state, event)
    if isinstance(event, Returned):
        return job_decisions.with_release(*_on_returned(state, event))
    if isinstance(event, LeaseEnded):
        why = f"{state.shape.names[event.node]} coordinates the job, and its lease has ended: {event.why}"
        return _end_epoch(state, why)
    if isinstance(event, OnStandby):
        room = elastic["grow"] == "restart" and len(state.shape.nodes) < elastic["maximum"]
        return _end_epoch(state, f"{event.name} joins") if room and not _is_ending(state) else (state, ())
    if isinstance(event, job_decisions.StopAsked) and _is_next(state.ending):
        return job_decisions.decide(state._replace(ending=None), event)
    if isinstance(event, job_decisions.Exited) and event.attempt == state.attempt:
        return _on_exited(state, event)
    if isinstance(event, job_decisions.Clean) and event.attempt == state.attempt:
        return _on_clean(elastic, state, event)
    return job_decisions.decide(state, event)


def restarts_used(elastic: ElasticSpec, state: State) -> int:
    """Count the restarts that count for max_restarts, with those of earlier epochs."""
    return elastic["restarts"] + state.attempt - state.shape.first + int(state.counted)


def asks_again(failed: Sequence[RankExit]) -> bool:
    """Check whether the failed ranks ask to be started again: all with an error of their own have exited with code 101."""
    causes = [exit for exit in failed if not exit.consequence]
    return bool(causes) and all(exit_code(exit.code, exit.signal) == AGAIN for exit in causes)


def _is_next(outcome: Optional[Outcome]) -> bool:
    """Check whether an outcome is the end of an epoch, not of the job."""
    return outcome is not None and outcome.state is JobState.NEXT_EPOCH


def _is_ending(state: State) -> bool:
    """Check whether the attempt ends: it has an outcome, or will be restarted."""
    return state.ending is not None or state.restart


def _next_epoch(why: str) -> Outcome:
    """Build the outcome NEXT_EPOCH: this epoch ends because of `why`, and not the job."""
    return Outcome(JobState.NEXT_EPOCH, 75, "tool", why)


def _end_epoch(state: State, why: str) -> Step:
    """Return (state, actions) that end the epoch for the reason `why`, since the nodes that take part change.

    Changes nothing if the attempt ends already, unless because of a failure of ranks: that is dropped and not counted, as it is
    an effect of the change, or must not wait for it.
    """
    if state.ending is not None and state.ending.state is not JobState.FAILED:
        return state, ()
    return job_decisions.end(state._replace(counted=False, culprits=()), _next_epoch(why))


def _on_loss(state: State, event: Union[job_decisions.Lost, job_decisions.Absent]) -> Step:
    """Return (state, actions): nodes are lost and gone, and the epoch ends; finish at once if all nodes are gone."""
    names = state.shape.names
    if isinstance(event, job_decisions.Lost):
        nodes, why = frozenset({event.node}), f"node {names[event.node]} is lost: {event.why}"
    else:
        nodes = frozenset(event.nodes)
        missing = some([names[node] for node in event.nodes])
        why = f"no connection from {missing} to {event.where} within {event.seconds:g} s"
    state, actions = _end_epoch(state._replace(lost=state.lost | nodes, gone=state.gone | nodes), why)
    state, more = job_decisions.settle(_without_survivors(state, ()))
    return state, actions + more


def _on_returned(state: State, event: Returned) -> Step:
    """Return (state, actions): a node is gone and not lost, since it has ended its ranks, and the epoch ends.

    Finishes at once if all nodes are gone.
    """
    why = f"the lease of {state.shape.names[event.node]} has ended: it had no connection"
    state, actions = _end_epoch(state._replace(gone=state.gone | {event.node}, lost=state.lost - {event.node}), why)
    state, more = job_decisions.settle(_without_survivors(state, ()))
    return state, actions + more


def _on_leaves(state: State, event: Leaves) -> Step:
    """Return (state, actions): a node leaves, and the epoch ends because of it, unless the attempt ends already.

    Ranks that failed before still count, and end the job if there were too many.
    """
    state = state._replace(left=state.left | {event.node})
    if _is_ending(state):
        return state, ()
    return _end_epoch(state, f"node {state.shape.names[event.node]} leaves: {event.by}")


def _on_shut_down(elastic: ElasticSpec, state: State, event: ShutDown) -> Step:
    """Return (state, actions): a node leaves, and the epoch ends, or the job if too few are left, with those on standby.

    Ranks of other nodes may have failed because those of this node have ended: their failure is dropped, as after a loss.
    """
    state = state._replace(left=state.left | {event.node})
    if len(state.shape.nodes - state.left - state.lost) + event.standby < elastic["minimum"]:
        return decide(elastic, state, event.stop)
    return _end_epoch(state, f"node {state.shape.names[event.node]} leaves: {event.stop.by}")


def _on_exited(state: State, event: job_decisions.Exited) -> Step:
    """Decide as job_decisions, with the rules of an epoch for exits.

    A supervisor that ended its processes unasked ends the epoch. If all trainers have succeeded in an ending epoch, the job
    has. Ranks that exit with 101 are restarted, also without restarts left; others only if restarts are left. Returns (state,
    actions).
    """
    if not _is_ending(state) and any(exit.stopped for exit in event.exits):
        node = state.shape.node_of[event.exits[0].key]
        state, actions = _end_epoch(state, f"the supervisor on {state.shape.names[node]} ended its processes unasked")
        return state._replace(exits=state.exits + event.exits), actions
    state, actions = job_decisions.decide(state, event)
    if _is_next(state.ending) and _has_succeeded(state):
        return state._replace(ending=Outcome(JobState.SUCCEEDED, 0, "job", "all trainers are done")), actions
    if not job_decisions.is_failing(state):
        return state, actions
    if asks_again(state.culprits):
        state = state._replace(restart=True, ending=None)  # until it is known how all others end
    elif state.restart and state.attempt - state.shape.first >= state.shape.max_restarts:
        state = state._replace(restart=False, ending=job_decisions.failure(state))
    return state, actions


def _has_succeeded(state: State) -> bool:
    """Check whether all trainers have exited by themselves without a failure, and mpirun, if it starts them, has ended, too."""
    trainers = [exit for exit in state.exits if exit.role == "trainer"]
    if any(exit.failed or exit.ended_by_others for exit in trainers) or job_decisions.waits_for_launcher(state):
        return False
    return len(trainers) == state.shape.trainers


def _on_clean(elastic: ElasticSpec, state: State, event: job_decisions.Clean) -> Step:
    """Record that a node has no processes left; it is no longer lost if it was. When all nodes are gone, choose how to go on.

    A restart becomes an epoch if its ranks asked for it (not counted), or there is a store, a leaving node, or a node that
    failed first twice (counted). Survivors end the job. Returns (state, actions).
    """
    if state.phase == "ending":
        state = state._replace(lost=state.lost - {event.node})
    if state.gone | {event.node} >= state.shape.nodes:  # all is known
        if state.restart and asks_again(state.culprits):
            first = state.culprits[0]
            what = f"{role_name(first.role)} {first.rank} on {state.shape.names[state.shape.node_of[first.key]]}"
            state = _as_next_epoch(state, f"{what} asks to be started again (exit code {AGAIN})", counted=False)
        elif (
            state.restart
            and not job_decisions.makes_no_progress(state)
            and (elastic["store"] or state.left or suspect(job_decisions.blamed_nodes(state)) is not None)
        ):
            # Other nodes go on.
            why = f"restart after attempt {state.attempt}: {job_decisions.reason(state)}"
            state = _as_next_epoch(state._replace(blamed=job_decisions.blamed_nodes(state)), why, counted=True)
        state = _without_survivors(state, event.survivors)
    return job_decisions.decide(state, event)


def _as_next_epoch(state: State, why: str, counted: bool) -> State:
    """Turn a restart into the end of the epoch. counted: whether it counts for max_restarts."""
    return state._replace(restart=False, ending=_next_epoch(why), culprits=(), counted=counted)


def _without_survivors(state: State, more: Tuple[str, ...]) -> State:
    """Return the state; the job is lost, not only the epoch over, if processes could not be ended. more: survivors to add."""
    survivors = state.survivors + more
    if not survivors or state.ending is None or not _is_next(state.ending):
        return state
    reason = f"{_SURVIVED}: {some(survivors)} ({state.ending.reason})"
    return state._replace(ending=Outcome(JobState.LOST, 75, "tool", reason, brief=_SURVIVED))
