"""What is known of jobs by the termination messages of their pods, where no log and no record is left."""

from __future__ import annotations

import json
from typing import Any

import pytest

from clustertool.engines.base import EngineState
from clustertool.engines.kubernetes.ended_pods import PodWatch
from clustertool.engines.kubernetes.job_objects import JobObjects, describe_job, disruption_unknown
from clustertool.errors import DataError
from clustertool.model.job.node_status import record_of
from clustertool.model.job.state_names import JobState
from clustertool.model.kubernetes import pod_record
from clustertool.model.kubernetes.object_names import JobAbout, annotations_of_job, labels
from clustertool.model.kubernetes.pod_record import PodEnd, Stated
from clustertool.model.wire.record_lines import read_events

ABOUT = JobAbout(name="words", command="python3 train.py", mode="ps", nodes=2, created=1000.0)
JOINED = PodEnd("a", 1, "failed", "trainer 3 on pod 1 ended with exit code 7", 7, ("trainer 3",))
ALONE = PodEnd("a", -1, "lost", "1 of 2 nodes have joined within 600 s; missing: ct-a-1", 75)


def pod(number: int, stated_text: str = "", code: int = 7, **waiting: str) -> dict[str, Any]:
    ended = {"exitCode": code, "reason": "Error", "message": stated_text, "finishedAt": "2026-01-01T00:00:00Z"}
    state = {"waiting": waiting} if waiting else {"terminated": ended}
    status = {
        "phase": "Pending" if waiting else "Failed",
        "containerStatuses": [{"name": "clustertool", "state": state}],
    }
    return {"kind": "Pod", "metadata": {"name": f"ct-a-{number}", "labels": labels("a", "ann")}, "status": status}


def workload(*conditions: str) -> dict[str, Any]:
    found = [{"type": kind, "status": "True", "reason": "BackoffLimitExceeded"} for kind in conditions]
    metadata = {"name": "ct-a", "uid": "1", "annotations": annotations_of_job("a", "ann", ABOUT)}
    return {"kind": "Job", "metadata": metadata, "spec": {}, "status": {"conditions": found}}


def stated(end: PodEnd) -> str:
    return pod_record.encode_message(end).decode()


def test_events_of_a_message_have_the_end_of_the_job() -> None:
    lines = pod_record.stated_events("a", 1, Stated(ABOUT, JOINED, 1234.0), {}).splitlines()
    found = record_of(read_events(lines))
    assert found.ended is not None and not found.damaged
    assert (found.ended.state, found.ended.code, found.ended.reason) == (JobState.FAILED, 7, JOINED.reason)
    assert found.ended.culprits == (("trainer", 3),) and found.ended_at == 1234.0
    header = json.loads(lines[0])
    assert (header["id"], header["node"], header["command"], header["mode"]) == ("a", 1, "python3 train.py", "ps")


@pytest.mark.parametrize(
    "wrong",
    [{"state": "fine"}, {"state": "running"}, {"failed": ["trainer x"]}, {"failed": ["../../x 1"]}, {"code": 256}],
)
def test_a_message_of_a_program_of_the_job_is_refused(wrong: dict[str, Any]) -> None:
    fields = {**json.loads(stated(JOINED)), **wrong}
    with pytest.raises(DataError):
        pod_record.decode_message(json.dumps(fields))


def test_a_job_without_a_record_has_ended_for_the_reason_that_a_pod_states() -> None:
    found = describe_job(JobObjects(workload("Failed"), [pod(0, stated(ALONE), 75), pod(1, "", 143)]))
    assert found.state is EngineState.ENDED
    assert found.reason == f"pod ct-a-0: {ALONE.reason}"
    assert found.cause == (found.reason, 69), "no node has joined: no record says more"


def test_what_python_prints_before_the_tool_starts_is_a_reason() -> None:
    text = "clustertool join: python3 is Python 3.7, too old\n  fix: start the bundle with Python 3.8 or newer\n"
    found = describe_job(JobObjects(workload("Failed"), [pod(0, text, 69)]))
    assert found.reason == "pod ct-a-0: " + " ".join(text.split()) and found.cause == (found.reason, 69)


def test_a_job_that_nodes_have_joined_has_records() -> None:
    found = describe_job(JobObjects(workload("Failed"), [pod(0, stated(JOINED)), pod(1, "x\x1b[31m")]))
    assert found.reason == f"pod ct-a-0: {JOINED.reason}" and found.cause is None


def disruption(reason: str, name: str, at: str = "2026-01-01T00:00:00Z") -> dict[str, Any]:
    return {"reason": reason, "message": "why", "involvedObject": {"kind": "Pod", "name": name}, "lastTimestamp": at}


def test_of_a_job_without_pods_the_events_or_the_workload_have_the_cause() -> None:
    events = [disruption("Evicted", "ct-a-1", "2026-01-01T00:00:09Z"), disruption("Preempted", "ct-a-0")]
    found = describe_job(JobObjects(workload("Failed"), [], [*events, disruption("Killing", "ct-a-2")]))
    assert found.cause == ("pod ct-a-0: preempted by a pod of a higher priority: why", 75)
    found = describe_job(JobObjects(workload("Failed")))
    assert found.cause == ("its pods were deleted, and their records with them: BackoffLimitExceeded", 75)
    assert describe_job(JobObjects(workload("Complete"))).cause == (found.cause[0], 0)
    assert disruption_unknown(JobObjects(workload("Failed")))
    assert disruption_unknown(JobObjects(workload("Failed"), [pod(0, stated(JOINED._replace(state="lost")))]))
    assert not disruption_unknown(JobObjects(workload("Failed"), [pod(0, stated(JOINED))])), "a rank has failed"
    assert not disruption_unknown(JobObjects(workload("Complete")))


def test_a_job_is_stuck_where_an_image_is_not_pulled_and_not_where_no_node_has_room() -> None:
    image = pod(1, reason="ImagePullBackOff", message="Back-off")
    assert describe_job(JobObjects(workload(), [image])).stuck == "pod ct-a-1: ImagePullBackOff: Back-off"
    config = pod(1, reason="CreateContainerConfigError", message='configmap "ct-a" not found')
    for waiting in (config, pod(1, reason="ContainerCreating")):
        assert describe_job(JobObjects(workload(), [waiting])).stuck == ""
    assert describe_job(JobObjects(workload("Failed"), [image])).stuck == ""


def test_an_image_that_was_not_pulled_is_the_cause_until_the_pod_starts() -> None:
    watch = PodWatch(None)  # type: ignore[arg-type]
    image = pod(1, reason="ErrImagePull", message="not found")
    watch.take(image)
    assert watch.cause("a") == ("pod ct-a-1: ErrImagePull: not found", 69)
    assert watch.cause("b") is None
    deleted = {**image, "metadata": {**image["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}}
    watch.take({**deleted, "status": {"phase": "Failed"}})
    assert watch.cause("a") is not None, "it never started"
    watch.take({**image, "status": {"phase": "Running"}})
    assert watch.cause("a") is None
