"""The state of a job and its reason, by objects as an API server has them."""

from __future__ import annotations

from typing import Any

import pytest

from clustertool.engines.base import EngineState
from clustertool.engines.kubernetes.job_objects import JobObjects, describe_job, owned_by, seconds
from clustertool.model.kubernetes.object_names import JobAbout, annotations_of_job, labels

MADE = "2026-11-24T10:00:00Z"


def workload(kind: str = "Job", suspend: bool = False, deleted: bool = False, **status: Any) -> dict[str, Any]:
    about = annotations_of_job("a", "ann", JobAbout("digits", "asked", "python train.py", "collective", 2))
    metadata = {"labels": labels("a", "ann"), "annotations": about, "creationTimestamp": MADE}
    if deleted:
        metadata["deletionTimestamp"] = MADE
    return {"kind": kind, "metadata": metadata, "spec": {"suspend": suspend}, "status": status}


def pod(phase: str, number: int = 0, **status: Any) -> dict[str, Any]:
    return {"metadata": {"name": f"ct-a-{number}"}, "spec": {}, "status": {"phase": phase, **status}}


def true(kind: str, reason: str = "", message: str = "") -> list[dict[str, str]]:
    return [{"type": kind, "status": "True", "reason": reason, "message": message}]


def event(reason: str, message: str, at: str = MADE) -> dict[str, Any]:
    return {"reason": reason, "message": message, "lastTimestamp": at}


FULL = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes"}]
PULLING = [{"name": "clustertool", "state": {"waiting": {"reason": "ImagePullBackOff", "message": "no tag"}}}]
QUEUED = [
    (JobObjects(workload()), "waiting for its pods"),
    (JobObjects(workload(), [pod("Pending", conditions=FULL)]), "Unschedulable: 0/3 nodes (1 of 1 pods)"),
    (JobObjects(workload(), [pod("Pending", containerStatuses=PULLING)]), "ImagePullBackOff: no tag (1 of 1 pods)"),
    (
        JobObjects(workload(), [], [event("FailedCreate", "exceeded quota: gpu")]),
        "FailedCreate: exceeded quota: gpu",
    ),
    (
        JobObjects(
            workload(),
            [],
            [
                event("FailedCreate", "new", "2026-11-24T10:05:00Z"),
                event("FailedCreate", "old"),
                event("Other", "newer", "2026-11-24T11:00:00Z"),
            ],
        ),
        "FailedCreate: new",
    ),
    (JobObjects(workload(suspend=True)), "suspended"),
    (
        JobObjects(
            workload(suspend=True),
            kueue=[
                {"status": {"conditions": [{"type": "QuotaReserved", "status": "False", "message": "needs 8 gpus"}]}}
            ],
        ),
        "suspended: needs 8 gpus",
    ),
    (
        JobObjects(workload(), [pod("Pending")], [event("FailedMount", "secret not found")]),
        "FailedMount: secret not found",
    ),
]


@pytest.mark.parametrize(("objects", "reason"), QUEUED)
def test_a_job_without_a_process_is_queued_for_the_reason_that_the_cluster_gives(
    objects: JobObjects, reason: str
) -> None:
    found = describe_job(objects)
    assert (found.state, found.reason, found.since) == (EngineState.QUEUED, reason, seconds(MADE))
    assert (found.job_name, found.asked, found.command, found.nodes) == ("digits", "asked", "python train.py", 2)


def test_the_queue_of_kueue_is_named() -> None:
    suspended = workload(suspend=True)
    suspended["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = "team-a"
    assert describe_job(JobObjects(suspended)).reason == "suspended by Kueue, queue team-a"


def test_one_pod_that_runs_makes_the_job_a_running_one() -> None:
    found = describe_job(JobObjects(workload(), [pod("Running"), pod("Pending", 1, conditions=FULL)]))
    assert found.state is EngineState.RUNNING and not found.ending
    assert found.reason == "Unschedulable: 0/3 nodes (1 of 2 pods)"


def test_a_running_job_whose_other_pods_are_not_created_names_the_reason() -> None:
    refused = [event("FailedCreate", "exceeded quota: gpu")]
    found = describe_job(JobObjects(workload(), [pod("Running")], refused))
    assert (found.state, found.reason) == (EngineState.RUNNING, "FailedCreate: exceeded quota: gpu")
    assert describe_job(JobObjects(workload(), [pod("Running"), pod("Running", 1)], refused)).reason == ""


@pytest.mark.parametrize(
    ("kind", "status"),
    [
        ("Job", {"conditions": true("Failed", "BackoffLimitExceeded", "too many")}),
        ("Job", {"conditions": true("Complete")}),
        ("JobSet", {"conditions": true("Completed")}),
        ("JobSet", {"conditions": true("Failed")}),
        ("PaddleJob", {"phase": "Completed"}),
        ("PaddleJob", {"phase": "Failed"}),
    ],
)
def test_an_end_is_proved_by_the_workload_and_by_all_its_pods(kind: str, status: dict[str, Any]) -> None:
    over = workload(kind, **status)
    assert describe_job(JobObjects(over, [pod("Failed"), pod("Succeeded", 1)])).state is EngineState.ENDED
    assert describe_job(JobObjects(over)).state is EngineState.ENDED
    left = describe_job(JobObjects(over, [pod("Failed"), pod("Running", 1)]))
    assert (left.state, left.ending) == (EngineState.RUNNING, True)


def test_the_condition_of_another_kind_is_no_end() -> None:
    assert describe_job(JobObjects(workload("JobSet", conditions=true("Complete")))).state is EngineState.QUEUED


def test_a_workload_that_is_being_deleted_is_ending() -> None:
    found = describe_job(JobObjects(workload(deleted=True), [pod("Running")]))
    assert (found.state, found.ending) == (EngineState.RUNNING, True)
    assert describe_job(JobObjects(workload(deleted=True))).state is EngineState.RUNNING


def test_the_reason_of_an_end_is_that_of_the_cluster() -> None:
    evicted = pod("Failed", reason="Evicted", message="low on memory")
    over = workload(conditions=true("Failed", "BackoffLimitExceeded"))
    found = describe_job(JobObjects(over, [pod("Failed", 1), evicted]))
    assert found.reason == "pod ct-a-0: Evicted by the node: low on memory"
    assert describe_job(JobObjects(over, [pod("Failed", 1)])).reason == "BackoffLimitExceeded"


def test_owned_objects_are_those_of_the_same_uid() -> None:
    mine = {"metadata": {"ownerReferences": [{"uid": "u1"}]}}
    assert owned_by([mine, {"metadata": {"ownerReferences": [{"uid": "u2"}]}}, {"metadata": {}}], "u1") == [mine]


def with_sidecar(number: int, ended: bool = True) -> dict[str, Any]:
    state = {"terminated": {"exitCode": 0, "reason": "Completed", "finishedAt": MADE}} if ended else {"running": {}}
    mesh = {"name": "istio-proxy", "state": {"running": {}}}
    return pod("Running", number, containerStatuses=[mesh, {"name": "clustertool", "state": state}])


def test_a_sidecar_that_runs_on_is_no_process_of_the_job() -> None:
    found = describe_job(JobObjects(workload(), [with_sidecar(0), with_sidecar(1)]))
    assert (found.state, found.since) == (EngineState.ENDED, seconds(MADE))
    found = describe_job(JobObjects(workload(), [with_sidecar(0), with_sidecar(1, ended=False)]))
    assert (found.state, found.ending) == (EngineState.RUNNING, False)
    assert describe_job(JobObjects(workload(), [with_sidecar(0)])).state is EngineState.RUNNING, (
        "a pod is not there so far"
    )


def test_pods_that_have_ended_before_their_controller_has_seen_it_are_not_queued() -> None:
    found = describe_job(JobObjects(workload(), [pod("Failed"), pod("Succeeded", 1)]))
    assert (found.state, found.ending) == (EngineState.RUNNING, True)
    found = describe_job(JobObjects(workload(), [pod("Failed"), pod("Pending", 1)]))
    assert (found.state, found.ending) == (EngineState.RUNNING, False)
