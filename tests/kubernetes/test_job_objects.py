"""Which objects are of a job, and the order in which they are deleted, with objects in memory."""

from __future__ import annotations

from typing import Any

import pytest

from clustertool.engines.base import EngineState
from clustertool.engines.kubernetes.job_objects import JobStore
from clustertool.errors import AuthError, Survivors
from clustertool.model.kubernetes.object_names import JobAbout, annotations_of_job, labels


class ObjectsInMemory:
    """Deletes a workload with what it owns; a pod stays for `slow` further lists."""

    namespace = "team"

    def __init__(self, user: str, objects: list[dict[str, Any]], slow: int = 0) -> None:
        self._user, self.objects, self._slow = user, objects, slow
        self.deleted: list[str] = []
        self.graces: list[int | None] = []
        self.refused: set[str] = set()

    def user(self) -> str:
        return self._user

    def list_objects(self, kind: str, labels: Any = None, fields: str = "", whole: bool = True) -> list[dict[str, Any]]:
        if kind in self.refused:
            raise AuthError(f"may not list {kind}")
        if self.deleted and kind == "Pod" and self._slow:
            self._slow -= 1
        elif self.deleted and kind == "Pod":
            self.objects = [one for one in self.objects if one["metadata"]["uid"] not in self._gone()]
        wanted = (labels or {}).items()
        return [one for one in self.objects if one["kind"] == kind and wanted <= one["metadata"]["labels"].items()]

    def delete(self, kind: str, name: str, uid: str = "", grace: int | None = None) -> bool:
        assert uid and (kind == "Pod" or grace is None)
        self.graces.append(grace)
        self.deleted.append(uid)
        return True

    def _gone(self) -> set[str]:
        owners = {uid for uid in self.deleted if uid.startswith("Job")}
        return {*self.deleted, *(one["metadata"]["uid"] for one in self.objects if one.get("of") in owners)}


def made(job: str, owner: str = "ann", phase: str = "Running") -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    for kind in ("Job", "Pod", "Secret", "Service"):
        metadata = {"name": f"ct-{job}", "uid": f"{kind}-{owner}-{job}", "labels": labels(job, owner)}
        found.append({"kind": kind, "metadata": metadata, "status": {"phase": phase} if kind == "Pod" else {}})
        if kind == "Job":
            metadata["annotations"] = annotations_of_job(job, owner, JobAbout(nodes=1))
        elif kind != "Service":  # the Service has lost its owner
            found[-1]["of"] = found[0]["metadata"]["uid"]
    return found


def test_jobs_of_another_owner_are_not_found() -> None:
    store = JobStore(ObjectsInMemory("ann", [*made("a"), *made("b", "bob"), *made("a", "bob")]))
    assert set(store.describe()) == {"a"}
    assert store.read_one("b") is None
    one = store.read_one("a")
    assert one is not None and one.workload["metadata"]["uid"] == "Job-ann-a"
    assert [pod["metadata"]["uid"] for pod in one.pods] == ["Pod-ann-a"]


def test_a_removal_returns_when_nothing_is_left_and_touches_no_other_job() -> None:
    api = ObjectsInMemory("ann", [*made("a"), *made("b"), *made("a", "bob")], slow=2)
    turns: list[int] = []
    assert JobStore(api).remove("a", 30, lambda: turns.append(1))
    assert {one["metadata"]["uid"].partition("-")[2] for one in api.objects} == {"ann-b", "bob-a"}
    assert api.deleted == ["Job-ann-a", "Service-ann-a"] and len(turns) > 2
    assert not JobStore(api).remove("a", 30)


def test_in_a_hurry_the_pods_are_deleted_with_their_workload() -> None:
    api = ObjectsInMemory("ann", made("a"))
    assert JobStore(api).remove("a", 30, grace=1)
    assert api.deleted[:2] == ["Job-ann-a", "Pod-ann-a"] and api.graces[:2] == [None, 1]


def test_what_does_not_go_is_named() -> None:
    api = ObjectsInMemory("ann", made("a"), slow=10**6)
    with pytest.raises(Survivors, match="pod ct-a") as caught:
        JobStore(api).remove("a", 0.5)
    assert caught.value.code == 76 and "team" in str(caught.value)


def test_the_rights_for_one_kind_of_workload_are_enough() -> None:
    api = ObjectsInMemory("ann", made("a"))
    api.refused = {"JobSet", "PaddleJob", "Event", "Workload"}
    assert JobStore(api).describe()["a"].state is EngineState.RUNNING
    api.refused.add("Job")
    with pytest.raises(AuthError):
        JobStore(api).describe()


def test_a_job_of_a_jobset_is_not_a_job_of_its_own() -> None:
    top, *rest = made("a")
    child = {**top, "metadata": {**top["metadata"], "uid": "child", "ownerReferences": [{"uid": "Job-ann-a"}]}}
    top = {**top, "kind": "JobSet"}
    found = JobStore(ObjectsInMemory("ann", [child, top, *rest])).read_all()
    assert [objects.workload["kind"] for objects in found.values()] == ["JobSet"]


def test_events_explain_a_job_that_is_queued() -> None:
    objects = [*made("a", phase="Pending"), *made("b", phase="Pending")]
    about = {"kind": "Pod", "uid": "Pod-ann-a"}
    event = {"reason": "FailedMount", "message": "no secret", "involvedObject": about}
    objects.append({"kind": "Event", "metadata": {"uid": "e", "labels": {}}, **event})
    found = JobStore(ObjectsInMemory("ann", objects)).describe()
    assert found["a"].reason == "FailedMount: no secret"
    assert found["b"].reason == "waiting for its pods"
