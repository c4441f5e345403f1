"""The objects of a job in the API server state whether it is queued, running or ended, and why."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from clustertool.engines.base import Description, EngineState
from clustertool.engines.kubernetes.api.object_kinds import Object
from clustertool.errors import DataError, NodeLost, PreflightError
from clustertool.model.job.state_names import JobState
from clustertool.model.kubernetes.object_names import QUEUE_LABEL, about_of
from clustertool.model.kubernetes.pod_reasons import (
    PodFault,
    PodView,
    condition,
    end_of,
    fields,
    is_true,
    items,
    seconds,
    text,
    view,
    waits_for,
    with_message,
)
from clustertool.model.kubernetes.pod_record import PodEnd, read_message

_ENDS = {"Job": ("Failed", "Complete"), "JobSet": ("Failed", "Completed")}  # types of conditions
_ENDINGS = ("FailureTarget", "SuccessCriteriaMet")  # of a Job whose pods are being ended
_PADDLE_SUCCESSES = ("Completed", "Succeed", "Succeeded")  # status.phase
_PADDLE_ENDS = (*_PADDLE_SUCCESSES, "Failed", "Aborted", "Terminated")
_POD_NAME = re.compile(r'pods "[^" ]+" is')
_LAST = 300  # characters of a log
_CREATING = 60.0  # seconds in which the Secret of a job is created
_REFUSED = ("FailedCreate", "FailedScheduling", "FailedMount", "FailedAttachVolume")  # reasons of events
_DISRUPTED = {  # the same, of pods that are deleted then
    "Preempted": "preempted by a pod of a higher priority",
    "Evicted": "Evicted by the node",
    "TaintManagerEviction": "node lost: its pods were deleted because of a taint of the node",
    "NodeNotReady": "node lost: it does not answer the API server",
}


class JobObjects(NamedTuple):
    """workload: the Job, JobSet or PaddleJob.

    kueue: the Workload objects of Kueue that it owns. events: about the workload and what it owns.
    """

    workload: Object
    pods: Sequence[Object] = ()
    events: Sequence[Object] = ()
    kueue: Sequence[Object] = ()


def described(found: JobObjects) -> Description:
    """Compute the state of a job: it runs while the job's container of one pod does.

    It has ended when no pod is left that may have a process, and its controller makes no more. A controller does not see that
    where a sidecar runs on.
    """
    about, metadata = about_of(found.workload), fields(found.workload, "metadata")
    status, pods = fields(found.workload, "status"), [view(pod) for pod in found.pods]
    made = seconds(text(metadata, "creationTimestamp")) or about.created
    alive = [pod for pod in pods if not pod.ended]
    runs = [pod for pod in alive if pod.phase != "Pending"]
    over, succeeded, why, at = _over(found.workload)
    if not over and not alive and any(pod.sidecars for pod in pods) and len(pods) >= about.nodes:
        over, why, at = True, "its processes have ended", max(pod.ended_at for pod in pods)
    deleted = bool(text(metadata, "deletionTimestamp"))
    ending = over or deleted or any(is_true(condition(status, kind)) for kind in _ENDINGS)
    cause = end_of(pods)
    if over and not alive:
        cause = cause or _never_joined(found, pods) or _disrupted(found.events)
        if not pods and cause is None:
            cause = f"its pods were deleted, and their records with them: {why}", 0 if succeeded else NodeLost.code
    if runs:
        reason = cause[0] if cause else "its objects are being deleted" if deleted else ""
        reason = reason or _not_created(found) or waits_for(pods)
        began = seconds(text(status, "startTime")) or made
        state = Description(EngineState.RUNNING, reason, began, ending=ending)
    elif over and not alive:
        state = Description(EngineState.ENDED, cause[0] if cause else stated_end(pods) or why, at or made)
    elif ending or len(alive) < len(pods):  # its controller has not seen yet that its pods have ended
        state = Description(EngineState.RUNNING, cause[0] if cause else why, made, ending=ending or not alive)
    else:
        state = Description(EngineState.QUEUED, queued_reason(found, pods), made)
    return Description(
        state.state,
        state.reason,
        state.since,
        job_name=about.name,
        command=about.command,
        nodes=about.nodes,
        asked=about.asked,
        ending=state.ending,
        cause=cause,
        stuck=stuck(pods) if not over else "",
        created=about.created or made,
    )


def stuck(pods: Sequence[PodView]) -> str:
    """Name the first pod that was placed on a node of the cluster and cannot start there, with the reason."""
    return next((f"pod {pod.name}: {pod.reason}" for pod in pods if pod.fault is PodFault.IMAGE), "")


def stated_end(pods: Sequence[PodView]) -> str:
    """Return what the first pod that has failed states about it: the verdict, or the last lines of its log. "" if none does."""
    for pod in pods:
        if pod.code > 0 and pod.message:
            found = _end_of(pod)
            stated = found.reason if found is not None else " ".join(pod.message.split())[-_LAST:]
            return f"pod {pod.name}: {text({'': stated}, '')}"
    return ""


def _never_joined(found: JobObjects, pods: Sequence[PodView]) -> tuple[str, int] | None:
    """Collect what is stated about a job that no node has joined, and the exit code of the first pod that has failed.

    No record has its end. Nodes that did not come were not lost: they were not reached.
    """
    ends = [end for end in map(_end_of, pods) if end is not None]
    stated = stated_end(pods)
    if not stated or any(end.node >= 0 for end in ends):
        return None
    reasons = filter(None, (stated, _not_created(found)))
    code = next(pod.code for pod in pods if pod.code > 0)
    return "; ".join(reasons), PreflightError.code if code == NodeLost.code else code


def _not_created(found: JobObjects) -> str:
    """Return why the cluster does not create pods that are missing, such as a quota."""
    if len(found.pods) >= max(1, about_of(found.workload).nodes):
        return ""
    refused = _refusal(found.events, ("FailedCreate",))
    return _POD_NAME.sub("a pod is", refused)  # each attempt has another name


def _disrupted(events: Sequence[Object]) -> tuple[str, int] | None:
    """Return what the first of these events states about a pod that was deleted."""
    first = min((event for event in events if text(event, "reason") in _DISRUPTED), key=event_time, default=None)
    if first is None:
        return None
    why = with_message(_DISRUPTED[text(first, "reason")], text(first, "message"))
    return f"pod {text(fields(first, 'involvedObject'), 'name')}: {why}", NodeLost.code


def disruption_unknown(found: JobObjects) -> bool:
    """Return whether pods of a job that has failed are gone, and those that are left do not state why it has."""
    over, succeeded, _, _ = _over(found.workload)
    pods = [view(pod) for pod in found.pods]
    stated = any(end is not None and end.state != JobState.LOST.value for end in map(_end_of, pods))
    return over and not succeeded and not stated and end_of(pods) is None and len(pods) < about_of(found.workload).nodes


def _end_of(pod: PodView) -> PodEnd | None:
    try:
        return read_message(pod.message)
    except DataError:
        return None


def queued_reason(found: JobObjects, pods: Sequence[PodView]) -> str:
    """Describe why no process has started, in the words of what holds it back: Kueue, the quota, the scheduler, the kubelet."""
    spec, labels = fields(found.workload, "spec"), fields(fields(found.workload, "metadata"), "labels")
    if spec.get("suspend") is True:
        return _suspended(found.kueue, text(labels, QUEUE_LABEL))
    refused = _not_created(found)
    if refused:
        return refused
    waiting = waits_for(pods)
    if waiting and not waiting.startswith("ContainerCreating"):
        return waiting
    name, made = (
        text(fields(found.workload, "metadata"), "name"),
        seconds(text(fields(found.workload, "metadata"), "creationTimestamp")),
    )
    events = [event for event in found.events if not (_of_secret(event, name) and event_time(event) - made < _CREATING)]
    return _refusal(events, _REFUSED) or waiting or "waiting for its pods"


def _of_secret(event: Object, name: str) -> bool:
    """Check whether an event is about the Secret of the job, which is created after the workload."""
    return text(event, "reason") == "FailedMount" and f'secret "{name}" not found' in text(event, "message")


def _over(workload: Object) -> tuple[bool, bool, str, float]:
    """Check whether the controller has ended the workload, and whether with success; why, and when."""
    status = fields(workload, "status")
    for kind in _ENDS.get(text(workload, "kind"), ()):
        found = condition(status, kind)
        if is_true(found):
            why = with_message(text(found, "reason") or kind, text(found, "message"))
            return True, kind != "Failed", why, seconds(text(found, "lastTransitionTime"))
    phase = text(status, "phase")
    if text(workload, "kind") == "PaddleJob" and phase in _PADDLE_ENDS:
        succeeded = phase in _PADDLE_SUCCESSES
        return True, succeeded, f"PaddleJob: {phase}", seconds(text(status, "completionTime"))
    return False, False, "", 0.0


def _suspended(workloads: Sequence[Object], queue: str) -> str:
    """Describe why a workload is suspended, by the words of Kueue, where it has a Workload for this one."""
    name = f"suspended by Kueue, queue {queue}" if queue else "suspended"
    for one in workloads:
        status = fields(one, "status")
        for kind in ("Evicted", "QuotaReserved", "Admitted"):
            found = condition(status, kind)
            if found and is_true(found) == (kind == "Evicted"):
                return with_message(name, text(found, "message") or text(found, "reason"))
    return name


def _refusal(events: Sequence[Object], reasons: Sequence[str]) -> str:
    """Format the newest of these events, as `FailedCreate: exceeded quota: ...`."""
    fitting = [event for event in events if text(event, "reason") in reasons]
    newest = max(fitting, key=event_time, default=None)
    return "" if newest is None else with_message(text(newest, "reason"), text(newest, "message"))


def event_time(event: Object) -> float:
    """Return when an event was seen last, seconds since the epoch."""
    series = text(fields(event, "series"), "lastObservedTime")
    times = (series, *(text(event, name) for name in ("lastTimestamp", "eventTime", "firstTimestamp")))
    return max(map(seconds, times))


def owned(objects: Sequence[Object], uid: str) -> list[Object]:
    """Select the objects that have this owner."""
    return [one for one in objects if any(text(owner, "uid") == uid for owner in _owners(one))]


def _owners(of: Object) -> list[dict[str, object]]:
    return items(fields(of, "metadata"), "ownerReferences")
