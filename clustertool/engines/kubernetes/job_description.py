"""The objects of a job in the API server state whether it is queued, running or ended, and why."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from clustertool.engines.base import Description, EngineState
from clustertool.engines.kubernetes.api.object_kinds import Object
from clustertool.errors import DataError
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
_PADDLE_ENDS = ("Failed", "Completed", "Succeed", "Succeeded", "Aborted", "Terminated")  # status.phase
_LAST = 300  # characters of a log
_CREATING = 60.0  # seconds in which the Secret of a job is created
_REFUSED = ("FailedCreate", "FailedScheduling", "FailedMount", "FailedAttachVolume")  # reasons of events


class JobObjects(NamedTuple):
    """workload: the Job, JobSet or PaddleJob. kueue: the Workload objects of Kueue that it owns. events: about the workload and
    what it owns."""

    workload: Object
    pods: Sequence[Object] = ()
    events: Sequence[Object] = ()
    kueue: Sequence[Object] = ()


def described(found: JobObjects) -> Description:
    """Compute the state of a job: it runs while the job's container of one pod does, and has ended when no pod is left that may
    have a process, and its controller makes no more. A controller does not see that where a sidecar runs on."""
    about, metadata = about_of(found.workload), fields(found.workload, "metadata")
    status, pods = fields(found.workload, "status"), [view(pod) for pod in found.pods]
    made = seconds(text(metadata, "creationTimestamp")) or about.created
    alive = [pod for pod in pods if not pod.ended]
    runs = [pod for pod in alive if pod.phase != "Pending"]
    over, why, at = _over(found.workload)
    if not over and not alive and any(pod.sidecars for pod in pods) and len(pods) >= about.nodes:
        over, why, at = True, "its processes have ended", max(pod.ended_at for pod in pods)
    deleted = bool(text(metadata, "deletionTimestamp"))
    ending = over or deleted or any(is_true(condition(status, kind)) for kind in _ENDINGS)
    cause = end_of(pods) or (_never_joined(pods) if over and not alive else None)
    if runs:
        reason = cause[0] if cause else "its objects are being deleted" if deleted else waits_for(pods)
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
    )


def stuck(pods: Sequence[PodView]) -> str:
    """The first pod that was placed on a node of the cluster and cannot start there, with the reason."""
    return next((f"pod {pod.name}: {pod.reason}" for pod in pods if pod.fault is PodFault.IMAGE), "")


def stated_end(pods: Sequence[PodView]) -> str:
    """What the first pod that has failed states about it: the verdict, or the last lines of its log. "" if none does."""
    for pod in pods:
        if pod.code > 0 and pod.message:
            found = _end_of(pod)
            stated = found.reason if found is not None else " ".join(pod.message.split())[-_LAST:]
            return f"pod {pod.name}: {text({'': stated}, '')}"
    return ""


def _never_joined(pods: Sequence[PodView]) -> tuple[str, int] | None:
    """What is stated about a job that no node has joined, so no record has its end; and the exit code of the first pod that has
    failed."""
    ends = [end for end in map(_end_of, pods) if end is not None]
    stated = stated_end(pods)
    if not stated or any(end.node >= 0 for end in ends):
        return None
    return stated, next(pod.code for pod in pods if pod.code > 0)


def _end_of(pod: PodView) -> PodEnd | None:
    try:
        return read_message(pod.message)
    except DataError:
        return None


def queued_reason(found: JobObjects, pods: Sequence[PodView]) -> str:
    """Why no process has started, in the words of what holds it back: Kueue, the quota, the scheduler, the kubelet."""
    spec, labels = fields(found.workload, "spec"), fields(fields(found.workload, "metadata"), "labels")
    if spec.get("suspend") is True:
        return _suspended(found.kueue, text(labels, QUEUE_LABEL))
    refused = _refusal(found.events, ("FailedCreate",))
    if refused and len(pods) < max(1, about_of(found.workload).nodes):
        return refused
    waiting = waits_for(pods)
    if waiting and not waiting.startswith("ContainerCreating"):
        return waiting
    name, made = (
        text(fields(found.workload, "metadata"), "name"),
        seconds(text(fields(found.workload, "metadata"), "creationTimestamp")),
    )
    events = [event for event in found.events if not (_of_secret(event, name) and _when(event) - made < _CREATING)]
    return _refusal(events, _REFUSED) or waiting or "waiting for its pods"


def _of_secret(event: Object, name: str) -> bool:
    """Whether it is about the Secret of the job, which is created after the workload."""
    return text(event, "reason") == "FailedMount" and f'secret "{name}" not found' in text(event, "message")


def _over(workload: Object) -> tuple[bool, str, float]:
    """Whether the controller has ended the workload; why, and when."""
    status = fields(workload, "status")
    for kind in _ENDS.get(text(workload, "kind"), ()):
        found = condition(status, kind)
        if is_true(found):
            why = with_message(text(found, "reason") or kind, text(found, "message"))
            return True, why, seconds(text(found, "lastTransitionTime"))
    phase = text(status, "phase")
    if text(workload, "kind") == "PaddleJob" and phase in _PADDLE_ENDS:
        return True, f"PaddleJob: {phase}", seconds(text(status, "completionTime"))
    return False, "", 0.0


def _suspended(workloads: Sequence[Object], queue: str) -> str:
    """By the words of Kueue, where it has a Workload for this one."""
    name = f"suspended by Kueue, queue {queue}" if queue else "suspended"
    for one in workloads:
        status = fields(one, "status")
        for kind in ("Evicted", "QuotaReserved", "Admitted"):
            found = condition(status, kind)
            if found and is_true(found) == (kind == "Evicted"):
                return with_message(name, text(found, "message") or text(found, "reason"))
    return name


def _refusal(events: Sequence[Object], reasons: Sequence[str]) -> str:
    """The newest of these events, as `FailedCreate: exceeded quota: ...`."""
    fitting = [event for event in events if text(event, "reason") in reasons]
    newest = max(fitting, key=_when, default=None)
    return "" if newest is None else with_message(text(newest, "reason"), text(newest, "message"))


def _when(event: Object) -> float:
    series = text(fields(event, "series"), "lastObservedTime")
    times = (series, *(text(event, name) for name in ("lastTimestamp", "eventTime", "firstTimestamp")))
    return max(map(seconds, times))


def owned(objects: Sequence[Object], uid: str) -> list[Object]:
    """Those of the objects that have this owner."""
    return [one for one in objects if any(text(owner, "uid") == uid for owner in _owners(one))]


def _owners(of: Object) -> list[dict[str, object]]:
    return items(fields(of, "metadata"), "ownerReferences")
