"""The engine with objects in memory: agents of running pods, records of ended ones, a stop, and nodes.

An exec channel is a process of this machine, and the folder of a pod a folder of the test.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from clustertool.actions.find_jobs import attach_to
from clustertool.actions.follow_job import Inbox, JobFollower
from clustertool.actions.read_status import read
from clustertool.actions.stop_jobs import unfinished_jobs
from clustertool.api.silent_caller import SilentCaller
from clustertool.engines.base import EngineState
from clustertool.engines.kubernetes.kubernetes_engine import KubernetesEngine
from clustertool.errors import ConfigError, NotFound, PreflightError
from clustertool.fleet.agent_client import Sink
from clustertool.fleet.records_client import RecordsClient
from clustertool.fleet.this_machine import HereChannel
from clustertool.model.config.cluster import Cluster
from clustertool.model.job.state_names import JobState, StopState
from clustertool.model.job.stop_result import read_result
from clustertool.model.kubernetes import pod_record
from clustertool.model.kubernetes.object_names import JobAbout, annotations_of_job
from clustertool.model.kubernetes.pod_places import FIRST_LABEL, INDEX_LABEL
from clustertool.model.kubernetes.pod_record import PodEnd, PodLine, Stated, encode_line
from clustertool.model.wire.messages import LIST_FILES, LIST_JOBS, STATUS
from tests.kubernetes.test_job_objects import ObjectsInMemory, made

END = PodEnd("a", 0, "failed", "trainer 0 has exited with 7", 7)


class PodsInMemory(ObjectsInMemory):
    """reads: the requests for logs, by `tail`."""

    def __init__(self, user: str, objects: list[dict[str, Any]]) -> None:
        super().__init__(user, objects)
        self.reads: list[int | None] = []
        self.channels: list[HereChannel] = []
        self.unreadable = False
        self.end = pod_record.encode(END, {})

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        return next((one for one in self.objects if (one["kind"], one["metadata"]["name"]) == (kind, name)), None)

    def log(self, pod: str, *, tail: int | None = None, limit: int = 0) -> Iterator[bytes]:
        self.reads.append(tail)
        if self.unreadable:
            raise PreflightError("the kubelet does not answer")
        lines = [*encode_line(PodLine("trainer", 0, 0, b"the last words")).splitlines(True), self.end]
        yield b"".join(lines if tail is None else list(filter(None, lines))[-tail:])

    def watch(self, kind: str, labels: Any) -> Iterator[tuple[str, Any]]:
        return iter(())

    def channel(self, pod: str, argv: Any) -> HereChannel:
        self.channels.append(HereChannel(argv))
        return self.channels[-1]

    def patiently(self) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()


def engine(api: PodsInMemory, sink: Sink | None = None) -> KubernetesEngine:
    cluster = Cluster((), where="conf.py", python=sys.executable)
    return KubernetesEngine(cluster, SilentCaller(), sink, api)


def objects_of(job: str, root: Path, phase: str = "Running") -> list[dict[str, Any]]:
    found = made(job, phase=phase)
    found[1]["metadata"]["labels"] = {**found[1]["metadata"]["labels"], FIRST_LABEL: "0", INDEX_LABEL: "0"}
    mount = {"name": "clustertool-root", "mountPath": str(root)}
    found[1]["spec"] = {"hostname": f"{job}-0", "containers": [{"name": "clustertool", "volumeMounts": [mount]}]}
    return found


def end(objects: list[dict[str, Any]]) -> None:
    state = {"terminated": {"exitCode": 7, "reason": "Error", "message": pod_record.encode_message(END).decode()}}
    objects[0]["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]}
    objects[1]["status"].update(phase="Failed", containerStatuses=[{"name": "clustertool", "state": state}])


def test_of_ended_pods_the_records_are_read_at_once_and_the_logs_when_they_are_wanted(tmp_path: Path) -> None:
    objects = objects_of("a", tmp_path)
    end(objects)
    api = PodsInMemory("ann", objects)
    with engine(api) as opened:
        fleet = opened.open()
        opened.open()
        assert not fleet.failed and api.reads == [1]
        assert opened.describe({})["a"].state is EngineState.ENDED
        root = opened._ended.records.root
        log = root / "node0/JOBa/log/workerlog.0"
        assert not log.exists()
        for agent in fleet.agents.values():
            with contextlib.suppress(Exception):  # the other bases have no such job
                agent.ask(LIST_FILES({"job": "a", "exact": True}))
        assert log.read_bytes() == b"the last words\n"
        assert api.reads == [1, None]
    assert not root.exists()


def test_a_pod_that_runs_has_an_agent_and_its_records_take_its_place(tmp_path: Path) -> None:
    objects = objects_of("a", tmp_path / "root")
    api = PodsInMemory("ann", objects)
    with engine(api) as opened:
        fleet = opened.open()
        (node,) = [host.index for host in fleet.cluster.hosts if not host.here]
        assert fleet.name(node) == "a-0"
        assert fleet.agents[node].ask(LIST_JOBS({"job": ""}))["jobs"] == []
        opened.open()
        assert len(api.channels) == 1
        api.channels[0].close()
        end(objects)
        assert isinstance(fleet.reopen(node), RecordsClient)
        assert api.reads == [1]
        assert fleet.agents[node].ask(LIST_JOBS({"job": "a"}))["jobs"]
        fleet = opened.open()
        assert all(host.here for host in fleet.cluster.hosts)


def test_the_records_of_a_pod_that_ends_meanwhile_answer_for_it(tmp_path: Path) -> None:
    """The API server knows a moment later that it has ended."""
    objects = objects_of("a", tmp_path / "root")
    api = PodsInMemory("ann", objects)
    with engine(api) as opened:
        opened.open()
        api.channels[0].close()
        timer = threading.Timer(0.5, end, [objects])
        timer.start()
        job = attach_to(opened, "a")
        assert (job["state"], job["reason"], len(api.channels)) == (JobState.LOST, f"pod ct-a: {END.reason}", 1)
        timer.join()


def test_a_pod_that_ends_before_it_is_followed_is_followed_to_its_verdict(tmp_path: Path) -> None:
    objects = objects_of("a", tmp_path / "root")
    api, inbox = PodsInMemory("ann", objects), Inbox()
    stated = Stated(JobAbout(created=1000.0), END, 1001.0)
    api.end = pod_record.encode(END, {"events.jsonl": pod_record.stated_events("a", 0, stated, {})})
    with engine(api, inbox.put) as opened:
        fleet = opened.open()
        api.channels[0].close()
        follower = JobFollower(fleet, inbox, "a")
        follower.start({"logs": "all", "tail": None})
        assert not follower.over
        end(objects)
        for _ in follower.items(lambda: None):
            pass
        outcome = follower.watch.status.outcome
        assert outcome is not None and (outcome.state, outcome.reason) == (JobState.FAILED, END.reason)


def test_a_pod_that_runs_again_gets_a_new_agent(tmp_path: Path) -> None:
    api = PodsInMemory("ann", objects_of("a", tmp_path / "root"))
    with engine(api) as opened:
        fleet = opened.open()
        (node,) = [host.index for host in fleet.cluster.hosts if not host.here]
        api.channels[0].close()
        assert not isinstance(fleet.reopen(node), RecordsClient)
        assert fleet.agents[node].ask(LIST_JOBS({"job": ""}))["jobs"] == []


def test_a_log_that_cannot_be_read_is_a_failure_of_its_node_only(tmp_path: Path) -> None:
    objects = objects_of("a", tmp_path)
    end(objects)
    del objects[1]["status"]["containerStatuses"][0]["state"]["terminated"]["message"]
    api = PodsInMemory("ann", [*objects, *objects_of("b", tmp_path / "b")])
    api.unreadable = True
    with engine(api) as opened:
        fleet = opened.open()
        assert [error.what for error in fleet.failed.values()] == ["the kubelet does not answer"]
        assert {host.host for host in fleet.cluster.hosts if not host.here} == {"ct-a", "ct-b"}


def test_the_termination_message_stands_for_a_log_that_cannot_be_read(tmp_path: Path) -> None:
    objects = objects_of("a", tmp_path)
    end(objects)
    api = PodsInMemory("ann", objects)
    api.unreadable = True
    with engine(api) as opened:
        fleet = opened.open()
        assert not fleet.failed
        (job,) = [job for answer in fleet.ask_all(LIST_JOBS({"job": "a"})).values() for job in answer["jobs"]]
        assert (job["state"], job["code"], job["reason"]) == ("failed", 7, END.reason)
        (agent,) = [agent for agent in fleet.agents.values() if agent.ask(LIST_JOBS({"job": "a"}))["jobs"]]
        with pytest.raises(PreflightError, match="the kubelet does not answer"):
            agent.ask(LIST_FILES({"job": "a", "exact": True}))
        api.unreadable = False
        assert "workerlog.0" in agent.ask(LIST_FILES({"job": "a", "exact": True}))["files"]


def test_the_log_of_a_pod_that_was_killed_has_its_ranks(tmp_path: Path) -> None:
    """It has no record, and the termination message is the end of the log."""
    objects = objects_of("a", tmp_path)
    end(objects)
    ended = objects[1]["status"]["containerStatuses"][0]["state"]["terminated"]
    ended.update(exitCode=137, reason="OOMKilled", message="[trainer 0] step 1")
    api = PodsInMemory("ann", objects)
    api.end = b""
    with engine(api) as opened:
        fleet = opened.open()
        job = attach_to(opened, "a")
        assert (job["state"], job["code"]) == (JobState.LOST, 137)
        status = read(fleet.ask_all(STATUS({"job": "a"})), job["known"])
        assert status.ranks_in() == {("trainer", 0): 0} and status.outcome is not None and status.outcome.code == 137
        assert fleet.agents[0].ask(LIST_FILES({"job": "a", "exact": True}))["files"] == {"workerlog.0": 15}
        assert unfinished_jobs({0: fleet.agents[0].ask(LIST_JOBS({"job": ""}))}, opened.describe({})) == []


def test_of_all_jobs_the_newest_and_those_that_run_are_read(tmp_path: Path) -> None:
    objects = []
    for number, job in enumerate(("old", "running", "new")):
        of_job = objects_of(job, tmp_path / job)
        of_job[0]["metadata"]["annotations"].update(annotations_of_job(job, "ann", JobAbout(created=1000.0 + number)))
        objects += of_job
        if job != "running":
            end(of_job)
    with engine(PodsInMemory("ann", objects)) as opened:
        opened.open(newest=True)
        assert set(opened._ended.places) == {"ct-running", "ct-new"}
        opened.open()
        assert set(opened._ended.places) == {"ct-running", "ct-new", "ct-old"}


def test_the_pods_of_a_job_are_in_the_order_of_its_nodes(tmp_path: Path) -> None:
    objects = objects_of("a", tmp_path)
    first = {**objects[1], "metadata": {**objects[1]["metadata"], "name": "x", "uid": "x"}, "spec": {"nodeName": "n1"}}
    objects[1]["metadata"]["labels"][INDEX_LABEL] = "1"
    first["metadata"]["labels"] = {**objects[1]["metadata"]["labels"], INDEX_LABEL: "0"}
    with engine(PodsInMemory("ann", [*objects, first])) as opened:
        found = [(pod.pod, pod.node, pod.host, pod.phase) for pod in opened.pods("a")]
    assert found == [("x", 0, "n1", "Running"), ("ct-a", 1, "", "Running")]


def test_only_the_pods_of_the_job_that_is_asked_for_are_opened(tmp_path: Path) -> None:
    api = PodsInMemory("ann", [*objects_of("a", tmp_path / "a"), *objects_of("b", tmp_path / "b")])
    with engine(api) as opened:
        fleet = opened.open(job="b")
        assert [host.host for host in fleet.cluster.hosts if not host.here] == ["ct-b"]


def test_a_stop_asks_the_agents_and_leaves_no_object_of_the_job(tmp_path: Path) -> None:
    api = PodsInMemory("ann", [*objects_of("a", tmp_path / "a"), *objects_of("b", tmp_path / "b")])
    with engine(api) as opened:
        answers = opened.cancel("a", {"by": "test", "code": 143, "grace": 1.0, "force": False})
        assert list(answers) == ["a-0"]
        assert read_result(answers["a-0"], "a").state in (StopState.CLEAN, StopState.NEVER_STARTED)
    assert {one["metadata"]["uid"].rpartition("-")[2] for one in api.objects} == {"b"}


def test_the_nodes_of_a_job_without_pods_that_run_are_not_live(tmp_path: Path) -> None:
    objects = objects_of("a", tmp_path)
    end(objects)
    with engine(PodsInMemory("ann", objects)) as opened:
        opened.open()
        with pytest.raises(NotFound, match="no pod of job a runs"):
            opened.fleet_of_job("a")


def test_settings_of_another_type_name_their_key() -> None:
    with pytest.raises(ConfigError, match="namespace"):
        KubernetesEngine(Cluster((), settings={"namespace": 3}), SilentCaller())
