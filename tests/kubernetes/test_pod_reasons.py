"""Why pods wait or have ended, by objects as an API server has them."""

from __future__ import annotations

from typing import Any

import pytest

from clustertool.model.kubernetes.pod_reasons import PodFault, PodView, end_of, view, waits_for


def pod(
    name: str = "ct-a-0", phase: str = "Pending", container: dict[str, Any] | None = None, **status: Any
) -> PodView:
    statuses = [{"name": "sidecar", "restartCount": 9}, {"name": "clustertool", "restartCount": 0, **(container or {})}]
    about = {"phase": phase, "containerStatuses": statuses, **status}
    return view({"metadata": {"name": name}, "spec": {"nodeName": "n1"}, "status": about})


def terminated(code: int, reason: str = "Error", message: str = "") -> dict[str, Any]:
    return {"state": {"terminated": {"exitCode": code, "reason": reason, "message": message}}}


def waiting(reason: str, message: str = "") -> dict[str, Any]:
    return {"state": {"waiting": {"reason": reason, "message": message}}}


def disrupted(reason: str, message: str = "") -> list[dict[str, str]]:
    return [{"type": "DisruptionTarget", "status": "True", "reason": reason, "message": message}]


ENDS = [
    (pod(phase="Failed", reason="Evicted", message="low on memory"), PodFault.EVICTED, "Evicted", 75),
    (pod(phase="Failed", container=terminated(137, "OOMKilled")), PodFault.OOM_KILLED, "OOMKilled", 137),
    (pod(phase="Failed", conditions=disrupted("PreemptionByScheduler")), PodFault.PREEMPTED, "preempted", 75),
    (
        pod(phase="Failed", container=terminated(143), conditions=disrupted("PreemptionByKubeScheduler")),
        PodFault.PREEMPTED,
        "preempted",
        75,
    ),
    (pod(phase="Running", conditions=disrupted("DeletionByTaintManager")), PodFault.NODE_LOST, "node lost", 75),
    (pod(phase="Failed", conditions=disrupted("DeletionByPodGC")), PodFault.NODE_LOST, "node lost", 75),
    (pod(phase="Failed", conditions=disrupted("EvictionByEvictionAPI")), PodFault.EVICTED, "kubectl drain", 75),
    (pod(phase="Unknown", reason="NodeLost"), PodFault.NODE_LOST, "node lost", 75),
    (pod(phase="Failed", reason="Terminated", message="shutdown"), PodFault.NODE_LOST, "shut down", 75),
    (
        pod(phase="Running", conditions=[{"type": "Ready", "status": "False", "reason": "NodeNotReady"}]),
        PodFault.NODE_LOST,
        "does not answer",
        75,
    ),
    (pod(container=waiting("ImagePullBackOff", "no such tag")), PodFault.IMAGE, "ImagePullBackOff: no such tag", 69),
    (pod(container=waiting("ErrImagePull", "denied")), PodFault.IMAGE, "ErrImagePull: denied", 69),
    (pod(container=waiting("CreateContainerConfigError", "no key")), PodFault.CONFIG, "no key", 69),
    (pod(phase="Failed", container=terminated(128, "StartError", "no python3")), PodFault.CONFIG, "no python3", 69),
    (pod(phase="Failed", container=terminated(7)), PodFault.FAILED, "exit code 7", 7),
    (pod(phase="Succeeded", container=terminated(0, "Completed")), PodFault.NONE, "", 0),
]


@pytest.mark.parametrize(("seen", "fault", "reason", "code"), ENDS)
def test_each_end_of_a_pod_has_a_reason_and_an_exit_code(
    seen: PodView, fault: PodFault, reason: str, code: int
) -> None:
    assert (seen.fault, seen.exit_code) == (fault, code)
    assert reason in seen.reason


def test_the_cause_of_the_cluster_comes_before_the_ends_that_follow_from_it() -> None:
    failed = pod("ct-a-0", "Failed", terminated(75))
    evicted = pod("ct-a-1", "Failed", reason="Evicted", message="low on disk")
    assert end_of([failed, evicted]) == ("pod ct-a-1: Evicted by the node: low on disk", 75)
    assert end_of([failed]) is None  # the job's own records have the verdict


def test_waiting_pods_are_counted_by_their_reason() -> None:
    full = [{"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/3 nodes: no GPU"}]
    pods = [pod(f"ct-a-{n}", conditions=full) for n in range(2)] + [pod("ct-a-2", "Running")]
    assert waits_for(pods) == "Unschedulable: 0/3 nodes: no GPU (2 of 3 pods)"
    assert waits_for([pod(container=waiting("ContainerCreating"))]) == "ContainerCreating (1 of 1 pods)"
    assert waits_for(pods[2:]) == ""


def test_an_image_error_explains_pods_that_only_wait() -> None:
    pods = [pod("ct-a-0", container=waiting("ContainerCreating")), pod("ct-a-1", container=waiting("ErrImagePull"))]
    assert waits_for(pods) == "ErrImagePull (1 of 2 pods)"


@pytest.mark.parametrize(
    "status", [None, [], "x", {"phase": 3, "containerStatuses": [None, 7], "conditions": {"a": 1}}]
)
def test_fields_of_another_type_count_as_absent(status: object) -> None:
    assert view({"metadata": None, "spec": [], "status": status}).fault is PodFault.NONE


def test_a_message_cannot_write_to_the_terminal() -> None:
    seen = pod(container=waiting("ErrImagePull", "a\x1b[2Jb\nc" + "x" * 1000))
    assert "\x1b" not in seen.reason and "\n" not in seen.reason and len(seen.reason) < 400


def test_restarts_node_and_termination_message_are_of_the_jobs_container() -> None:
    seen = pod(phase="Failed", container={**terminated(7, message='{"clustertool": 1}'), "restartCount": 2})
    assert (seen.restarts, seen.host, seen.code, seen.message) == (2, "n1", 7, '{"clustertool": 1}')
