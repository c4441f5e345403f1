"""The engine with objects in memory: records of ended pods, a stop, and nodes. An agent on this machine reads the records."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from clustertool.api.silent_caller import SilentCaller
from clustertool.engines.base import EngineState
from clustertool.engines.kubernetes.kubernetes_engine import KubernetesEngine
from clustertool.errors import ConfigError
from clustertool.model.config.cluster import Cluster
from clustertool.model.kubernetes import pod_record
from clustertool.model.kubernetes.pod_log import PodLine, written
from clustertool.model.kubernetes.pod_record import PodEnd
from tests.kubernetes.test_job_objects import ObjectsInMemory, made

END = PodEnd("a", 0, "failed", "trainer 0 has exited with 7", 7)


class LogsInMemory(ObjectsInMemory):
    reads = 0

    def log(self, pod: str) -> Iterator[bytes]:
        self.reads += 1
        yield written(PodLine("trainer", 0, 0, b"the last words")) + pod_record.encode(END, {})


def engine(api: LogsInMemory, **settings: object) -> KubernetesEngine:
    return KubernetesEngine(Cluster((), settings=settings, where="conf.py"), SilentCaller(), api=api)


def ended() -> list[dict[str, Any]]:
    objects = made("a", phase="Failed")
    state = {"terminated": {"exitCode": 7, "reason": "Error", "message": pod_record.message(END).decode()}}
    objects[0]["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "BackoffLimitExceeded"}]}
    objects[1]["status"]["containerStatuses"] = [{"name": "clustertool", "state": state}]
    return objects


def test_logs_of_ended_pods_are_restored_once_and_removed_at_the_end() -> None:
    api = LogsInMemory("ann", ended())
    with engine(api) as opened:
        fleet = opened.open()
        assert not fleet.failed
        opened.open()
        assert api.reads == 1
        assert opened.describe({})["a"].state is EngineState.ENDED
        root = opened._records.root
        assert (root / "node0/JOBa/log/workerlog.0").read_bytes() == b"the last words\n"
    assert not root.exists()


def test_a_stop_leaves_no_object_of_the_job() -> None:
    api = LogsInMemory("ann", [*made("a"), *made("b")])
    with engine(api) as opened:
        assert opened.cancel("a", {"grace": 1.0, "force": False}) == {}
    assert {one["metadata"]["uid"].rpartition("-")[2] for one in api.objects} == {"b"}


def test_settings_of_another_type_name_their_key() -> None:
    with pytest.raises(ConfigError, match="namespace"):
        KubernetesEngine(Cluster((), settings={"namespace": 3}), SilentCaller())
