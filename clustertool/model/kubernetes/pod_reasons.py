"""The object of a pod states why it waits or has ended: text for people, and the exit code of a job that it ends."""

from __future__ import annotations

from typing import Dict, NamedTuple, Optional, Sequence, Tuple

from clustertool.model.kubernetes.api_objects import (
    Object,
    condition,
    fields,
    is_true,
    items,
    seconds,
    text,
    with_message,
)
from clustertool.model.name_enum import Name

CONTAINER = "clustertool"  # of a pod, the one with the job
_LOST, _REFUSED, _KILLED = 75, 69, 137  # exit codes: a lost node, what cannot start, a process killed by SIGKILL

_IMAGE = """ImagePullBackOff ErrImagePull ErrImageNeverPull InvalidImageName ImageInspectError
    RegistryUnavailable SignatureValidationFailed""".split()
_CONFIG = "CreateContainerConfigError CreateContainerError RunContainerError ContainerCannotRun StartError".split()
_DISRUPTIONS = {  # reasons of the condition DisruptionTarget
    "PreemptionByScheduler": "preempted by a pod of a higher priority",
    "PreemptionByKubeScheduler": "preempted by a pod of a higher priority",
    "EvictionByEvictionAPI": "Evicted through the API, as by kubectl drain",
}
_NODE_LOSSES = {
    "DeletionByTaintManager": "node lost: its pods were deleted because of a taint of the node",
    "DeletionByPodGC": "node lost: the node is not in the cluster any more",
}
_NODE_SHUTDOWN = ("Shutdown", "NodeShutdown", "Terminated")  # status.reason of a pod whose node is shut down


class PodFault(Name):
    """What is wrong with a pod. FAILED: its process has ended with an error."""

    NONE = ""
    EVICTED = "evicted"
    OOM_KILLED = "oom-killed"
    PREEMPTED = "preempted"
    NODE_LOST = "node-lost"
    IMAGE = "image"
    CONFIG = "config"
    UNSCHEDULABLE = "unschedulable"
    FAILED = "failed"


_ORDER = (  # the first one found in the pods of a job explains the others, which end because of it
    PodFault.NODE_LOST,
    PodFault.PREEMPTED,
    PodFault.EVICTED,
    PodFault.OOM_KILLED,
    PodFault.IMAGE,
    PodFault.CONFIG,
    PodFault.UNSCHEDULABLE,
    PodFault.FAILED,
)
_HOW_OTHERS_LEFT = (PodFault.NODE_LOST, PodFault.PREEMPTED, PodFault.EVICTED, PodFault.OOM_KILLED)


class PodView(NamedTuple):
    """A pod as `status` shows it.

    reason: with the message of the API server. host: the node of the cluster, "" before one is chosen. code: the exit code of
    its process, -1 while there is none. message: the termination message. deleted: it is being deleted. ended_at: when its
    process ended, seconds since the epoch; 0.0 if that is not known. sidecars: the other containers that run, such as that of a
    service mesh; they keep its resources when its process has ended.
    """

    name: str
    phase: str
    fault: PodFault
    reason: str
    restarts: int
    host: str
    code: int
    message: str = ""
    deleted: bool = False
    ended_at: float = 0.0
    sidecars: str = ""

    @property
    def ended(self) -> bool:
        """Whether the pod has no process of the job any more: its container has ended, or the whole pod."""
        return self.phase in ("Succeeded", "Failed") or self.code >= 0

    @property
    def exit_code(self) -> int:
        """The exit code of a job that ends because of this pod; 0 if it does not.

        75 for a lost node, preemption and eviction, 137 for too much memory, 69 for what cannot start; of a failure that of the
        process, at least 1.
        """
        if self.fault in (PodFault.NODE_LOST, PodFault.PREEMPTED, PodFault.EVICTED):
            return _LOST
        if self.fault is PodFault.OOM_KILLED:
            return _KILLED
        if self.fault in (PodFault.IMAGE, PodFault.CONFIG, PodFault.UNSCHEDULABLE):
            return _REFUSED
        return max(self.code, 1) if self.fault is PodFault.FAILED else 0


def view(pod: Object) -> PodView:
    """Build the PodView of a pod from its object in the API."""
    metadata, status = fields(pod, "metadata"), fields(pod, "status")
    container = _container(status)
    phase, host = text(status, "phase") or "Pending", text(fields(pod, "spec"), "nodeName")
    ended = fields(fields(container, "state"), "terminated")
    code = _whole_number(ended, "exitCode", -1)
    fault, reason = _explain(status, container, ended, phase)
    others = [one for one in items(status, "containerStatuses") if one.get("name") != CONTAINER]
    restarts = max(0, _whole_number(container, "restartCount", 0))
    message = ended.get("message")
    return PodView(
        text(metadata, "name"),
        phase,
        fault,
        reason,
        restarts,
        host,
        code if ended else -1,
        message if isinstance(message, str) else "",
        bool(text(metadata, "deletionTimestamp")),
        seconds(text(ended, "finishedAt")),
        ", ".join(text(one, "name") for one in others if "running" in fields(one, "state")),
    )


def end_of(pods: Sequence[PodView]) -> Optional[Tuple[str, int]]:
    """Return why the cluster has ended pods of a job, and the exit code; None if it has ended none: then the job itself knows.

    Reasons are a lost node, preemption, eviction, and too much memory. The first of them that a pod has counts: other pods end
    because of it.
    """
    found = _first_by_fault(pods, _HOW_OTHERS_LEFT)
    return None if found is None else (f"pod {found.name}: {found.reason}", found.exit_code)


def waits_for(pods: Sequence[PodView]) -> str:
    """Return the most important reason for which pods have not started, with the number of pods that have it.

    By the order of faults, else the first reason that is stated; "" if there is none.
    """
    waiting = [pod for pod in pods if pod.phase in ("Pending", "Unknown")]
    found = _first_by_fault(waiting, _ORDER)
    if found is None:
        found = next((pod for pod in waiting if pod.reason), None)
    if found is None:
        return ""
    same = sum(pod.reason.partition(":")[0] == found.reason.partition(":")[0] for pod in waiting)
    return f"{found.reason} ({same} of {len(pods)} pods)"


def _whole_number(of: Object, name: str, absent: int) -> int:
    """Return the whole number in a field; `absent` for another value."""
    found = of.get(name)
    return found if type(found) is int else absent


def _container(status: Object) -> Dict[str, object]:
    """Return the status of the job's container; {} if there is none."""
    return next((one for one in items(status, "containerStatuses") if one.get("name") == CONTAINER), {})


def _explain(status: Object, container: Object, ended: Object, phase: str) -> Tuple[PodFault, str]:
    """Return a pod's fault, and its reason as text. A cause that the cluster states comes before that of the container."""
    reason, message = text(status, "reason"), text(status, "message")
    disruption = condition(status, "DisruptionTarget")
    if is_true(disruption):
        why, more = text(disruption, "reason"), text(disruption, "message")
        if why in _NODE_LOSSES:
            return PodFault.NODE_LOST, with_message(_NODE_LOSSES[why], more)
        if why.startswith("Preemption"):
            return PodFault.PREEMPTED, with_message(_DISRUPTIONS.get(why, why), more)
        if reason not in _NODE_SHUTDOWN:
            named = _DISRUPTIONS.get(why, "Evicted by the node" if why == "TerminationByKubelet" else why)
            return PodFault.EVICTED, with_message(named, message or more)
    if reason == "NodeLost" or phase == "Unknown":
        return PodFault.NODE_LOST, with_message("node lost", message)
    if reason == "Evicted":
        return PodFault.EVICTED, with_message("Evicted by the node", message)
    if reason == "Preempting":
        return PodFault.PREEMPTED, with_message("preempted", message)
    if reason in _NODE_SHUTDOWN:
        return PodFault.NODE_LOST, with_message("node lost: it was shut down", message)
    ready = condition(status, "Ready")
    if phase == "Running" and ready.get("status") == "False" and ready.get("reason") == "NodeNotReady":
        return PodFault.NODE_LOST, "node lost: it does not answer the API server"
    if ended:
        return _explain_end(ended)
    return _explain_waiting(status, container, phase, with_message(reason, message))


def _explain_end(ended: Object) -> Tuple[PodFault, str]:
    """Return the fault and the reason of a container that has ended: memory, configuration, an exit code other than 0.

    NONE and "" for exit code 0.
    """
    why, code = text(ended, "reason"), _whole_number(ended, "exitCode", 0)
    if why == "OOMKilled":
        return PodFault.OOM_KILLED, "OOMKilled: it used more than its memory limit; raise `memory` in resources"
    if why in _CONFIG:
        return PodFault.CONFIG, with_message(why, text(ended, "message"))
    return (PodFault.FAILED, f"exit code {code}") if code else (PodFault.NONE, "")


def _explain_waiting(status: Object, container: Object, phase: str, stated: str) -> Tuple[PodFault, str]:
    """Return the fault and the reason of a pod whose container has not ended: image, configuration, no node, or failed.

    Else NONE; the reason is then why a pending pod waits, "" if that is not stated.
    """
    waiting = fields(fields(container, "state"), "waiting")
    why, message = text(waiting, "reason"), text(waiting, "message")
    if why in _IMAGE:
        return PodFault.IMAGE, with_message(why, message)
    if why in _CONFIG:
        return PodFault.CONFIG, with_message(why, message)
    scheduled = condition(status, "PodScheduled")
    if scheduled.get("status") == "False":
        chosen = text(scheduled, "reason") or "Unschedulable"
        return PodFault.UNSCHEDULABLE, with_message(chosen, text(scheduled, "message"))
    if phase == "Failed":
        return PodFault.FAILED, stated or "failed without a reason"
    if phase == "Pending" and (why or stated):
        return PodFault.NONE, stated or with_message(why, message)
    return PodFault.NONE, ""


def _first_by_fault(pods: Sequence[PodView], order: Sequence[PodFault]) -> Optional[PodView]:
    """Return the pod whose fault comes first in `order`; None if no pod has one of these."""
    found = [pod for pod in pods if pod.fault in order]
    return min(found, key=lambda pod: order.index(pod.fault)) if found else None
