"""The objects of jobs in the API server: they are found by the labels of one owner, state how each job is, and are deleted.

A job is queued, running or ended, and its objects state why.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from clustertool.engines.base import Description, EngineState
from clustertool.engines.kubernetes.cluster_api import ClusterApi
from clustertool.errors import AuthError, ClustertoolError, DataError, NodeLost, PreflightError, Survivors, raise_all
from clustertool.model.hints import PROGRAM
from clustertool.model.job.state_names import JobState
from clustertool.model.kubernetes.api_objects import (
    Manifest,
    Object,
    condition,
    fields,
    is_true,
    items,
    seconds,
    text,
    with_message,
)
from clustertool.model.kubernetes.object_names import (
    JOB_LABEL,
    OWNER_LABEL,
    QUEUE_LABEL,
    about_of,
    job_hash,
    job_label,
    job_of,
    owner_hash,
)
from clustertool.model.kubernetes.pod_places import WORKLOADS
from clustertool.model.kubernetes.pod_reasons import PodFault, PodView, end_of, view, waits_for
from clustertool.model.kubernetes.pod_record import PodEnd, decode_message
from clustertool.model.kubernetes.workload import KEPT

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
_KEPT = ("Secret", "Service")  # what a job has besides its workload and the pods
_POLL = 0.3  # seconds


class JobObjects(NamedTuple):
    """The objects of one job in the API server. workload: the Job, JobSet or PaddleJob.

    kueue: the Workload objects of Kueue that it owns. events: about the workload and what it owns.
    """

    workload: Object
    pods: Sequence[Object] = ()
    events: Sequence[Object] = ()
    kueue: Sequence[Object] = ()


def describe_job(found: JobObjects) -> Description:
    """Describe a job by its objects: its state (QUEUED, RUNNING, ENDED), since when, and why.

    It runs while the job's container of one pod does. It has ended when no pod is left that may have a process, and its
    controller makes no more; also if sidecars run on, which the controller does not see. Between the two, while it is being
    ended or some of its pods have ended, it counts as RUNNING; before, as QUEUED.
    """
    about, metadata = about_of(found.workload), fields(found.workload, "metadata")
    status, pods = fields(found.workload, "status"), [view(pod) for pod in found.pods]
    made = _created(found.workload) or about.created
    alive = [pod for pod in pods if not pod.ended]
    runs = [pod for pod in alive if pod.phase != "Pending"]
    over, succeeded, why, at = _end_of_workload(found.workload)
    if not over and not alive and any(pod.sidecars for pod in pods) and len(pods) >= about.nodes:
        over, why, at = True, "its processes have ended", max(pod.ended_at for pod in pods)
    deleted = bool(text(metadata, "deletionTimestamp"))
    ending = over or deleted or any(is_true(condition(status, kind)) for kind in _ENDINGS)
    cause = end_of(pods)
    if over and not alive:
        cause = cause or _end_before_joining(found, pods) or _disruption(found.events)
        if not pods and cause is None:
            cause = f"its pods were deleted, and their records with them: {why}", 0 if succeeded else NodeLost.code
    since = made
    if runs:
        state, since = EngineState.RUNNING, seconds(text(status, "startTime")) or made
        reason = cause[0] if cause else "its objects are being deleted" if deleted else ""
        reason = reason or _not_created(found) or waits_for(pods)
    elif over and not alive:
        state, since, ending = EngineState.ENDED, at or made, False
        reason = cause[0] if cause else stated_end(pods) or why
    elif ending or len(alive) < len(pods):  # its controller has not seen yet that its pods have ended
        state, ending = EngineState.RUNNING, ending or not alive
        reason = cause[0] if cause else why
    else:
        state, reason = EngineState.QUEUED, queued_reason(found, pods)
    return Description(
        state,
        reason,
        since,
        job_name=about.name,
        command=about.command,
        nodes=about.nodes,
        asked=about.asked,
        ending=ending,
        cause=cause,
        stuck=stuck_pod(pods) if not over else "",
        created=about.created or made,
    )


def stuck_pod(pods: Sequence[PodView]) -> str:
    """Return the name and reason of the first pod that cannot start on its node because of its image; "" if there is none."""
    return next((f"pod {pod.name}: {pod.reason}" for pod in pods if pod.fault is PodFault.IMAGE), "")


def stated_end(pods: Sequence[PodView]) -> str:
    """Return "pod NAME: TEXT" of the first failed pod with a termination message; "" if none has one.

    TEXT is the verdict in the message, or the last 300 characters of a message that is none of ours.
    """
    for pod in pods:
        if pod.code > 0 and pod.message:
            found = _decode_end(pod)
            stated = found.reason if found is not None else " ".join(pod.message.split())[-_LAST:]
            return f"pod {pod.name}: {text({'': stated}, '')}"
    return ""


def _end_before_joining(found: JobObjects, pods: Sequence[PodView]) -> tuple[str, int] | None:
    """Return why a job has failed that no node has joined, and the exit code of its first failed pod; None for other jobs.

    The exit code of a lost node becomes that of a node that was not reached: the others had not joined.
    """
    ends = [end for end in map(_decode_end, pods) if end is not None]
    stated = stated_end(pods)
    if not stated or any(end.node >= 0 for end in ends):
        return None
    reasons = filter(None, (stated, _not_created(found)))
    code = next(pod.code for pod in pods if pod.code > 0)
    return "; ".join(reasons), PreflightError.code if code == NodeLost.code else code


def _not_created(found: JobObjects) -> str:
    """Return why the cluster does not create the pods that are missing, by the newest event FailedCreate.

    Returns "" if none is missing, or there is no such event.
    """
    if len(found.pods) >= max(1, about_of(found.workload).nodes):
        return ""
    refused = _newest_event(found.events, ("FailedCreate",))
    return _POD_NAME.sub("a pod is", refused)  # each attempt has another name


def _disruption(events: Sequence[Object]) -> tuple[str, int] | None:
    """Return the reason in the first event about a preempted, evicted or lost pod, and the exit code of a lost node.

    Returns None without such an event.
    """
    first = min((event for event in events if text(event, "reason") in _DISRUPTED), key=event_time, default=None)
    if first is None:
        return None
    why = with_message(_DISRUPTED[text(first, "reason")], text(first, "message"))
    return f"pod {text(fields(first, 'involvedObject'), 'name')}: {why}", NodeLost.code


def disruption_unknown(found: JobObjects) -> bool:
    """Return whether a job has failed, some of its pods are gone, and the others do not state why it has failed."""
    over, succeeded, _, _ = _end_of_workload(found.workload)
    pods = [view(pod) for pod in found.pods]
    stated = any(end is not None and end.state != JobState.LOST.value for end in map(_decode_end, pods))
    return over and not succeeded and not stated and end_of(pods) is None and len(pods) < about_of(found.workload).nodes


def _decode_end(pod: PodView) -> PodEnd | None:
    """Decode the termination message of a pod; None if it is none of ours."""
    try:
        return decode_message(pod.message)
    except DataError:
        return None


def queued_reason(found: JobObjects, pods: Sequence[PodView]) -> str:
    """Return why no process of a job has started.

    The first of these counts: why Kueue suspends it, why pods are not created, what its pods wait for, the newest event of
    _REFUSED, "ContainerCreating", and "waiting for its pods". Events about its Secret in the first 60 s are ignored.
    """
    spec, labels = fields(found.workload, "spec"), fields(fields(found.workload, "metadata"), "labels")
    if spec.get("suspend") is True:
        return _suspension(found.kueue, text(labels, QUEUE_LABEL))
    refused = _not_created(found)
    if refused:
        return refused
    waiting = waits_for(pods)
    if waiting and not waiting.startswith("ContainerCreating"):
        return waiting
    name, made = _name(found.workload), _created(found.workload)
    events = [event for event in found.events if not (_of_secret(event, name) and event_time(event) - made < _CREATING)]
    return _newest_event(events, _REFUSED) or waiting or "waiting for its pods"


def _of_secret(event: Object, name: str) -> bool:
    """Return whether an event states that the job's Secret is not there, which is created after the workload."""
    return text(event, "reason") == "FailedMount" and f'secret "{name}" not found' in text(event, "message")


def _end_of_workload(workload: Object) -> tuple[bool, bool, str, float]:
    """Return (the controller has ended the workload, with success, why, when: seconds since the epoch).

    (False, False, "", 0.0) if it has not.
    """
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


def _suspension(workloads: Sequence[Object], queue: str) -> str:
    """Return "suspended", with the queue if there is one, and the message of the first condition of Kueue that explains it.

    That is Evicted, or QuotaReserved or Admitted that is not true. workloads: of Kueue.
    """
    name = f"suspended by Kueue, queue {queue}" if queue else "suspended"
    for one in workloads:
        status = fields(one, "status")
        for kind in ("Evicted", "QuotaReserved", "Admitted"):
            found = condition(status, kind)
            if found and is_true(found) == (kind == "Evicted"):
                return with_message(name, text(found, "message") or text(found, "reason"))
    return name


def _newest_event(events: Sequence[Object], reasons: Sequence[str]) -> str:
    """Return the newest event with one of these reasons as a text, `FailedCreate: exceeded quota: ...`; "" without one."""
    fitting = [event for event in events if text(event, "reason") in reasons]
    newest = max(fitting, key=event_time, default=None)
    return "" if newest is None else with_message(text(newest, "reason"), text(newest, "message"))


def event_time(event: Object) -> float:
    """Return when an event was last seen, seconds since the epoch."""
    series = text(fields(event, "series"), "lastObservedTime")
    times = (series, *(text(event, name) for name in ("lastTimestamp", "eventTime", "firstTimestamp")))
    return max(map(seconds, times))


def owned_by(objects: Sequence[Object], uid: str) -> list[Object]:
    """Return the objects that have the object with this uid as an owner."""
    owners = [items(fields(one, "metadata"), "ownerReferences") for one in objects]
    return [one for one, of in zip(objects, owners) if any(text(owner, "uid") == uid for owner in of)]


class JobStore:
    """The jobs of the user of `api` in its namespace. Those of other owners are not found, whatever their ids."""

    def __init__(self, api: ClusterApi) -> None:
        self._api = api
        self._owner = ""

    @property
    def owner(self) -> dict[str, str]:
        """The label that all objects of this user have, as a dict. Asks for the user's name at the first use."""
        if not self._owner:
            self._owner = owner_hash(self._api.user())
        return {OWNER_LABEL: self._owner}

    def read_all(self) -> dict[str, JobObjects]:
        """Read the workloads and pods of all jobs of the user, by the ids of the jobs. Raises ClustertoolError."""
        return self._find_jobs(self.owner)

    def read_one(self, job: str) -> JobObjects | None:
        """Read workload and pods of a job; None if the user has no job with this id. Raises ClustertoolError."""
        return self._find_jobs(self._labels(job)).get(job)

    def pods(self, job: str) -> list[Manifest]:
        """List the pods of one job, as the server has them. Raises ClustertoolError if it cannot be asked."""
        return self._api.list_objects("Pod", self._labels(job))

    def describe(self) -> dict[str, Description]:
        """Return {job id: description} of each job of the user. Raises ClustertoolError if the server cannot be asked.

        Events and Kueue's Workloads are listed only for jobs that are queued, lack pods, or have lost pods without a known
        reason.
        """
        found = self.read_all()
        states = {job: describe_job(objects) for job, objects in found.items()}
        queued = [job for job, state in states.items() if state.state is EngineState.QUEUED]
        lost = [job for job in found if disruption_unknown(found[job])]
        running = {job: one for job, one in states.items() if one.state is EngineState.RUNNING}
        waiting = [job for job, one in running.items() if one.nodes > len(found[job].pods)]
        events = self._list_if_allowed("Event", fields="type=Warning") if queued or lost or waiting else []
        kueue = self._list_if_allowed("Workload") if queued else []
        if lost:  # a preemption is no warning
            events += self._list_if_allowed("Event", fields="involvedObject.kind=Pod")
        for job in (*queued, *lost, *waiting):
            states[job] = describe_job(_with_reasons(found[job], events, kueue))
        return states

    def remove(
        self, job: str, seconds: float, turn: Callable[[], None] = lambda: None, grace: int | None = None
    ) -> bool:
        """Delete the workload of a job, and wait until it, its pods, the Secret and the Service are gone.

        Returns whether there was anything to delete. turn: called every 0.3 s. grace: seconds that pods have to end, None:
        their own. Raises Survivors if something is left after `seconds`, and the error of a request.
        """
        end, asked = time.monotonic() + seconds, set[str]()
        while True:
            left = self._remaining_objects(job)
            if not left:
                return bool(asked)
            if time.monotonic() > end:
                names = ", ".join(f"{text(one, 'kind').lower()} {_name(one)}" for one in left)
                fix = f"{PROGRAM} stop --job {job} tries again; kubectl -n {self._api.namespace} describe shows what holds it"
                raise Survivors(f"job {job}: left in namespace {self._api.namespace}: {names}", fix)
            for one in _to_delete(left, hurry=grace is not None):
                uid, kind = _uid(one), str(one["kind"])
                if uid not in asked:
                    self._api.delete(kind, _name(one), uid=uid, grace=grace if kind == "Pod" else None)
                    asked.add(uid)
            turn()
            time.sleep(_POLL)

    def _remaining_objects(self, job: str) -> list[Manifest]:
        """List the workloads and pods of a job.

        If there are none, its Secret and Service, which are deleted with the workload.
        """
        labels = self._labels(job)
        found = [*self._workloads(labels), *self._api.list_objects("Pod", labels)]
        return found or [one for kind in _KEPT for one in self._api.list_objects(kind, labels, whole=False)]

    def orphans(self) -> list[Manifest]:
        """List this user's Secrets and Services older than a day (KEPT) whose job has no workload and no pod any more.

        Those that kubectl has applied have no owner, and so are not deleted with it. Raises ClustertoolError if the server
        cannot be asked.
        """
        jobs = {job_label(one) for one in (*self._workloads(self.owner), *self._api.list_objects("Pod", self.owner))}
        kept = [one for kind in _KEPT for one in self._api.list_objects(kind, self.owner, whole=False)]
        return [one for one in kept if job_label(one) not in jobs and time.time() - _created(one) > KEPT]

    def _labels(self, job: str) -> dict[str, str]:
        """Return the labels that all objects of a job of this user have."""
        return {**self.owner, JOB_LABEL: job_hash(job)}

    def _find_jobs(self, labels: Mapping[str, str]) -> dict[str, JobObjects]:
        """Read the workloads and pods with these labels, and return them by job id.

        Workloads that another workload owns are left out.
        """
        workloads, pods = self._workloads(labels), self._api.list_objects("Pod", labels)
        by_hash: dict[str, list[Manifest]] = {}
        for pod in pods:
            by_hash.setdefault(job_label(pod), []).append(pod)
        uids = {_uid(one) for one in workloads}
        tops = [one for one in workloads if not any(owned_by([one], uid) for uid in uids)]
        return {job: JobObjects(one, by_hash.get(job_hash(job), ())) for one in tops for job in [job_of(one)] if job}

    def _workloads(self, labels: Mapping[str, str]) -> list[Manifest]:
        """List the workloads of all kinds with these labels. Raises AuthError if the user may list none of the kinds."""
        found: list[Manifest] = []
        refused: list[ClustertoolError] = []
        for kind in WORKLOADS.values():
            try:
                found += self._api.list_objects(kind, labels)
            except AuthError as error:
                refused.append(error)
        if len(refused) == len(WORKLOADS):
            raise_all(refused[:1])
        return found

    def _list_if_allowed(self, kind: str, fields: str = "") -> list[Manifest]:
        """List the objects of a kind that only explains something; [] without the right to list them.

        fields: a field selector.
        """
        try:
            return self._api.list_objects(kind, None, fields)
        except AuthError:
            return []


def _with_reasons(found: JobObjects, events: Sequence[Manifest], kueue: Sequence[Manifest]) -> JobObjects:
    """Return the objects of a job with the events about it, and with the Workloads of Kueue that its workload owns.

    The events are about its workload, its pods, pods of such a name that are gone, or Jobs of its JobSet.
    """
    about = {_uid(one) for one in (found.workload, *found.pods)}
    name, made = _name(found.workload), _created(found.workload)
    pod = re.compile(rf"{re.escape(name)}-([a-z]+-)?[0-9]+(-[0-9]+)?(-[a-z0-9]{{5}})?")
    mine = []
    for event in events:
        of = fields(event, "involvedObject")
        child = text(of, "kind") == "Job" and text(of, "name").startswith(f"{name}-")  # of a JobSet
        gone = text(of, "kind") == "Pod" and pod.fullmatch(text(of, "name")) and event_time(event) >= made
        if text(of, "uid") in about or child or gone:
            mine.append(event)
    return found._replace(events=mine, kueue=owned_by(kueue, _uid(found.workload)))


def _to_delete(left: Sequence[Manifest], hurry: bool) -> list[Manifest]:
    """Choose the objects to delete next: the workloads; the rest if there is no workload. hurry: the pods at once, too.

    The deletion of a workload in the foreground ends the pods, and controllers make no new ones.
    """
    workloads = [one for one in left if one["kind"] in WORKLOADS.values()]
    pods = [one for one in left if one["kind"] == "Pod"] if hurry else []
    return [*workloads, *pods] if workloads else list(left)


def _created(of: Object) -> float:
    """Return when an object was created, seconds since the epoch."""
    return seconds(text(fields(of, "metadata"), "creationTimestamp"))


def _name(of: Object) -> str:
    """Return the name of an object, "" without one."""
    return text(fields(of, "metadata"), "name")


def _uid(of: Object) -> str:
    """Return the uid of an object, "" without one."""
    return text(fields(of, "metadata"), "uid")
