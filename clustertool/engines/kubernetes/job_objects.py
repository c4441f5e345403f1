"""This module finds the objects of jobs in the API server by the labels of one owner, and deletes them until none is left."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from clustertool.engines.base import Description, EngineState
from clustertool.engines.kubernetes.api.object_kinds import Object
from clustertool.engines.kubernetes.job_description import JobObjects, described, disruption_unknown, event_time, owned
from clustertool.errors import AuthError, ClustertoolError, Survivors, raise_all
from clustertool.model.hints import PROGRAM
from clustertool.model.kubernetes.object_names import JOB_LABEL, OWNER_LABEL, job_hash, job_of, owner_hash
from clustertool.model.kubernetes.pod_places import WORKLOADS
from clustertool.model.kubernetes.pod_reasons import fields, seconds, text
from clustertool.model.kubernetes.workload import KEPT

Manifest = dict[str, object]
_KEPT = ("Secret", "Service")  # what a job has besides its workload and the pods
_POLL = 0.3  # seconds


class ObjectReader(Protocol):
    """Of ClusterApi, what is used here."""

    @property
    def namespace(self) -> str: ...

    def user(self) -> str: ...

    def listed(
        self, kind: str, labels: Mapping[str, str] | None = None, fields: str = "", whole: bool = True
    ) -> list[Manifest]: ...

    def delete(self, kind: str, name: str, uid: str = "", grace: int | None = None) -> bool: ...


class JobStore:
    """The jobs of the user of `api` in its namespace. Those of other owners are not found, whatever their ids."""

    def __init__(self, api: ObjectReader) -> None:
        self._api = api
        self._owner = ""

    @property
    def owner(self) -> dict[str, str]:
        """The label of all objects of this user."""
        if not self._owner:
            self._owner = owner_hash(self._api.user())
        return {OWNER_LABEL: self._owner}

    def all(self) -> dict[str, JobObjects]:
        """Read the jobs by their ids. Raises ClustertoolError."""
        return self._found(self.owner)

    def one(self, job: str) -> JobObjects | None:
        """Read the objects of a job, None if this user has none with this id. Raises ClustertoolError."""
        return self._found(self._labels(job)).get(job)

    def pods(self, job: str) -> list[Manifest]:
        """List the pods of one job. Raises ClustertoolError."""
        return self._api.listed("Pod", self._labels(job))

    def describe(self) -> dict[str, Description]:
        """Compute the state of each job. Raises ClustertoolError."""
        found = self.all()
        states = {job: described(objects) for job, objects in found.items()}
        queued = [job for job, state in states.items() if state.state is EngineState.QUEUED]
        lost = [job for job in found if disruption_unknown(found[job])]
        waiting = [
            job for job, one in states.items() if one.state is EngineState.RUNNING and one.nodes > len(found[job].pods)
        ]
        events = self._optional("Event", fields="type=Warning") if queued or lost or waiting else []
        kueue = self._optional("Workload") if queued else []
        if lost:  # a preemption is no warning
            events += self._optional("Event", fields="involvedObject.kind=Pod")
        for job in (*queued, *lost, *waiting):
            states[job] = described(_with_reasons(found[job], events, kueue))
        return states

    def remove(
        self, job: str, seconds: float, turn: Callable[[], None] = lambda: None, grace: int | None = None
    ) -> bool:
        """Delete the workload, and wait until it, its pods, the Secret and the Service are gone. False if there was nothing.

        turn: called several times a second. grace: seconds that pods have, if not their own. Raises Survivors after `seconds`,
        ClustertoolError."""
        end, asked = time.monotonic() + seconds, set[str]()
        while True:
            left = self._left(job)
            if not left:
                return bool(asked)
            if time.monotonic() > end:
                names = ", ".join(f"{text(one, 'kind').lower()} {_name(one)}" for one in left)
                fix = f"{PROGRAM} stop --job {job} tries again; kubectl -n {self._api.namespace} describe shows what holds it"
                raise Survivors(f"job {job}: left in namespace {self._api.namespace}: {names}", fix)
            for one in _to_delete(left, hurry=grace is not None):
                uid, kind = text(fields(one, "metadata"), "uid"), str(one["kind"])
                if uid not in asked:
                    self._api.delete(kind, _name(one), uid=uid, grace=grace if kind == "Pod" else None)
                    asked.add(uid)
            turn()
            time.sleep(_POLL)

    def _left(self, job: str) -> list[Manifest]:
        """List the objects with the labels of this job.

        The Secret and the Service are left out as long as others are there: they go with the workload.
        """
        labels = self._labels(job)
        found = [*self._workloads(labels), *self._api.listed("Pod", labels)]
        return found or [one for kind in _KEPT for one in self._api.listed(kind, labels, whole=False)]

    def abandoned(self) -> list[Manifest]:
        """List Secrets and Services of this user whose workload is gone: those that kubectl has applied have no owner.

        They are as old as an ended workload becomes. A workload that this user may not list has pods. Raises ClustertoolError.
        """
        jobs = {_job_label(one) for one in (*self._workloads(self.owner), *self._api.listed("Pod", self.owner))}
        kept = [one for kind in _KEPT for one in self._api.listed(kind, self.owner, whole=False)]
        return [one for one in kept if _job_label(one) not in jobs and time.time() - _created(one) > KEPT]

    def _labels(self, job: str) -> dict[str, str]:
        return {**self.owner, JOB_LABEL: job_hash(job)}

    def _found(self, labels: Mapping[str, str]) -> dict[str, JobObjects]:
        workloads, pods = self._workloads(labels), self._api.listed("Pod", labels)
        by_hash: dict[str, list[Manifest]] = {}
        for pod in pods:
            by_hash.setdefault(_job_label(pod), []).append(pod)
        uids = {text(fields(one, "metadata"), "uid") for one in workloads}
        tops = [one for one in workloads if not any(owned([one], uid) for uid in uids)]
        return {job: JobObjects(one, by_hash.get(job_hash(job), ())) for one in tops for job in [job_of(one)] if job}

    def _workloads(self, labels: Mapping[str, str]) -> list[Manifest]:
        """List the workloads of all kinds. Raises why none of the kinds can be listed.

        A user may have the rights for one dialect only.
        """
        found: list[Manifest] = []
        refused: list[ClustertoolError] = []
        for kind in WORKLOADS.values():
            try:
                found += self._api.listed(kind, labels)
            except AuthError as error:
                refused.append(error)
        if len(refused) == len(WORKLOADS):
            raise_all(refused[:1])
        return found

    def _optional(self, kind: str, fields: str = "") -> list[Manifest]:
        """List objects that only explain something: [] without the right to list them."""
        try:
            return self._api.listed(kind, None, fields)
        except AuthError:
            return []


def _with_reasons(found: JobObjects, events: Sequence[Manifest], kueue: Sequence[Manifest]) -> JobObjects:
    """Add the events about the workload and its pods, and the Workloads of Kueue that it owns, to the objects of a job."""
    about = {text(fields(one, "metadata"), "uid") for one in (found.workload, *found.pods)}
    name, made = text(fields(found.workload, "metadata"), "name"), _created(found.workload)
    pod = re.compile(rf"{re.escape(name)}-([a-z]+-)?[0-9]+(-[0-9]+)?(-[a-z0-9]{{5}})?")
    mine = []
    for event in events:
        of = fields(event, "involvedObject")
        child = text(of, "kind") == "Job" and text(of, "name").startswith(f"{name}-")  # of a JobSet
        gone = text(of, "kind") == "Pod" and pod.fullmatch(text(of, "name")) and event_time(event) >= made
        if text(of, "uid") in about or child or gone:
            mine.append(event)
    return found._replace(events=mine, kueue=owned(kueue, text(fields(found.workload, "metadata"), "uid")))


def _to_delete(left: Sequence[Manifest], hurry: bool) -> list[Manifest]:
    """Choose the objects to delete next: the workloads first, then the rest. hurry: the pods at once, too.

    The deletion of a workload in the foreground ends the pods, and controllers make no new ones.
    """
    workloads = [one for one in left if one["kind"] in WORKLOADS.values()]
    pods = [one for one in left if one["kind"] == "Pod"] if hurry else []
    return [*workloads, *pods] if workloads else list(left)


def _job_label(of: Manifest) -> str:
    return text(fields(fields(of, "metadata"), "labels"), JOB_LABEL)


def _created(of: Object) -> float:
    return seconds(text(fields(of, "metadata"), "creationTimestamp"))


def _name(of: Manifest) -> str:
    return text(fields(of, "metadata"), "name")
