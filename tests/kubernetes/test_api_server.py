"""The test API server behaves as a real one, as the official client and kubectl see it.

The client is imported in functions: it takes 0.25 s, which each worker would need when it collects the tests.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.cli import until
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.api_store import parse_quantity
from tests.kubernetes.plain_pods import PlainPods

WAIT = 30.0


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ApiServer]:
    with ApiServer(PlainPods(tmp_path / "pods")) as made:
        yield made


def new_client(config: Path) -> Any:
    import kubernetes.config

    return kubernetes.config.new_client_from_config(str(config))


@pytest.fixture
def api(server: ApiServer, tmp_path: Path) -> Any:
    return new_client(server.kubeconfig(tmp_path / "kubeconfig"))


@pytest.fixture
def core(api: Any) -> Any:
    from kubernetes import client

    return client.CoreV1Api(api)


@pytest.fixture
def batch(api: Any) -> Any:
    from kubernetes import client

    return client.BatchV1Api(api)


def job(code: str, n: int = 2, secret: str = "", **spec: Any) -> dict[str, Any]:
    container = {"name": "clustertool", "image": "python", "command": [sys.executable, "-c", code]}
    volumes = [{"name": "bundle", "secret": {"secretName": secret}}] if secret else []
    pod = {"restartPolicy": "Never", "containers": [container], "volumes": volumes, "subdomain": "ct"}
    template = {"metadata": {"labels": {"run": "x"}}, "spec": {**pod, "terminationGracePeriodSeconds": 2}}
    same = {"completions": n, "parallelism": n, "completionMode": "Indexed", "backoffLimit": 0, "template": template}
    return {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "ct-x"}, "spec": {**same, **spec}}


def kinds(found: Any) -> list[str]:
    return [one.type for one in found.status.conditions or []]


def ends(batch: Any) -> list[str]:
    until(
        lambda: {"Complete", "Failed"} & set(kinds(batch.read_namespaced_job("ct-x", "default"))), WAIT, lambda: "a job"
    )
    return kinds(batch.read_namespaced_job("ct-x", "default"))


def running(core: Any, n: int) -> list[Any]:
    find = lambda: [p for p in core.list_namespaced_pod("default").items if p.status.phase == "Running"]  # noqa: E731
    until(lambda: len(find()) == n, WAIT, lambda: f"{n} pods to run")
    return find()


def test_an_indexed_job_completes(core: Any, batch: Any) -> None:
    batch.create_namespaced_job("default", job("import os; print('index', os.environ['JOB_COMPLETION_INDEX'])", 3))
    assert ends(batch) == ["SuccessCriteriaMet", "Complete"]
    status = batch.read_namespaced_job("ct-x", "default").status
    assert (status.succeeded, status.active) == (3, 0)
    pods = core.list_namespaced_pod("default", label_selector="job-name=ct-x").items
    assert [pod.spec.hostname for pod in pods] == ["ct-x-0", "ct-x-1", "ct-x-2"]
    assert [core.read_namespaced_pod_log(pod.metadata.name, "default") for pod in pods] == [
        f"index {n}\n" for n in range(3)
    ]
    assert [pod.status.container_statuses[0].state.terminated.reason for pod in pods] == ["Completed"] * 3


def test_one_failed_pod_ends_the_job(core: Any, batch: Any) -> None:
    code = "import os, sys, time\nif os.environ['JOB_COMPLETION_INDEX'] == '1': sys.exit(7)\ntime.sleep(99)"
    batch.create_namespaced_job("default", job(code))
    assert ends(batch) == ["FailureTarget", "Failed"]
    (left,) = core.list_namespaced_pod("default").items  # the other one was deleted
    assert left.status.container_statuses[0].state.terminated.exit_code == 7


def test_pods_wait_for_their_secret(core: Any, batch: Any) -> None:
    batch.create_namespaced_job("default", job("pass", 1, secret="ct-x"))
    find = lambda: core.list_namespaced_event("default", field_selector="reason=FailedMount").items  # noqa: E731
    until(find, WAIT, lambda: "the event")
    assert 'secret "ct-x" not found' in find()[0].message
    core.create_namespaced_secret("default", {"metadata": {"name": "ct-x"}, "data": {}})
    assert ends(batch)[-1] == "Complete"


def test_foreground_deletion_waits_for_the_pods(core: Any, batch: Any) -> None:
    code = (
        "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(99)"
    )
    made = batch.create_namespaced_job("default", job(code, 1))
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": "ct-x", "uid": made.metadata.uid}
    core.create_namespaced_secret("default", {"metadata": {"name": "s", "ownerReferences": [owner]}})
    (pod,) = running(core, 1)
    until(lambda: "deaf" in core.read_namespaced_pod_log(pod.metadata.name, "default"), WAIT, lambda: "the log")
    batch.delete_namespaced_job("ct-x", "default", propagation_policy="Foreground")
    assert batch.read_namespaced_job("ct-x", "default").metadata.finalizers == ["foregroundDeletion"]
    until(lambda: not batch.list_namespaced_job("default").items, WAIT, lambda: "the job to go")
    assert not core.list_namespaced_pod("default").items
    until(lambda: not core.list_namespaced_secret("default").items, WAIT, lambda: "the secret to go")


def test_a_program_in_a_pod(core: Any, batch: Any) -> None:
    from kubernetes.stream import stream

    batch.create_namespaced_job("default", job("import time; time.sleep(99)", 1))
    (pod,) = running(core, 1)
    code = (
        "import sys\nfor line in sys.stdin:\n print(line.upper(), end='', flush=True)\n if 'end' in line: sys.exit(3)"
    )
    options = {"stdin": True, "stdout": True, "stderr": True, "tty": False, "_preload_content": False}
    connect = core.connect_get_namespaced_pod_exec
    there = stream(connect, pod.metadata.name, "default", command=[sys.executable, "-c", code], **options)
    there.write_stdin("one\n")
    assert there.readline_stdout(timeout=WAIT) == "ONE"
    there.write_stdin("end\n")
    there.run_forever(timeout=WAIT)
    assert there.returncode == 3


def test_errors(server: ApiServer, core: Any, batch: Any, tmp_path: Path) -> None:
    from kubernetes import client
    from kubernetes.client.exceptions import ApiException

    with pytest.raises(ApiException, match="already exists") as found:
        for _ in range(2):
            core.create_namespaced_secret("default", {"metadata": {"name": "s"}})
    assert found.value.status == 409
    server.add_user("ann", [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list"]}])
    ann = client.CoreV1Api(new_client(server.kubeconfig(tmp_path / "ann", "ann")))
    ann.list_namespaced_pod("default")
    with pytest.raises(ApiException, match='User \\\\"ann\\\\" cannot list resource \\\\"secrets\\\\"') as found:
        ann.list_namespaced_secret("default")
    assert found.value.status == 403
    wrong = new_client(server.kubeconfig(tmp_path / "x", "unknown"))
    with pytest.raises(ApiException) as found:
        client.CoreV1Api(wrong).list_namespaced_pod("default")
    assert found.value.status == 401
    quota = {"metadata": {"name": "q"}, "spec": {"hard": {"pods": "1"}}}
    core.create_namespaced_resource_quota("default", quota)
    batch.create_namespaced_job("default", job("import time; time.sleep(99)"))
    find = lambda: core.list_namespaced_event("default", field_selector="reason=FailedCreate").items  # noqa: E731
    until(find, WAIT, lambda: "the event")
    assert "exceeded quota: q, requested: pods=1, used: pods=1, limited: pods=1" in find()[0].message


def test_quantities() -> None:
    from kubernetes.utils import parse_quantity as of_the_client

    for given in (1, 0, 2.5, "1", "100m", "2Gi", "5k", "3E", "2e3", "1.5Ti", "7n", "9u", "4M", "2Ki", "-3"):
        assert parse_quantity(given) == of_the_client(given), given


def test_a_watch(server: ApiServer, core: Any) -> None:
    import kubernetes.watch

    version = core.list_namespaced_secret("default").metadata.resource_version
    core.create_namespaced_secret("default", {"metadata": {"name": "s", "labels": {"a": "b"}}})
    core.create_namespaced_secret("default", {"metadata": {"name": "other"}})
    core.delete_namespaced_secret("s", "default")
    seen = kubernetes.watch.Watch().stream(
        core.list_namespaced_secret, "default", label_selector="a=b", resource_version=version, timeout_seconds=1
    )
    assert [(event["type"], event["object"].metadata.name) for event in seen] == [("ADDED", "s"), ("DELETED", "s")]
    server.store.expire()
    raw = core.list_namespaced_secret(
        "default", watch=True, resource_version=version, timeout_seconds=1, _preload_content=False
    )
    assert b'"code": 410' in raw.data


def test_kubectl(kubectl_here: None, core: Any, batch: Any, tmp_path: Path) -> None:
    def kubectl(*argv: str) -> str:
        config = f"--kubeconfig={tmp_path / 'kubeconfig'}"
        done = subprocess.run(
            ["kubectl", config, f"--cache-dir={tmp_path}/cache", *argv], text=True, capture_output=True, timeout=60
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    batch.create_namespaced_job("default", job("print('hello', flush=True)\nimport time; time.sleep(99)", 1))
    (pod,) = running(core, 1)
    name = pod.metadata.name
    assert name in kubectl("get", "pods")
    assert "JOB_COMPLETION_INDEX" in kubectl("describe", "pod", name)
    until(lambda: kubectl("logs", name) == "hello\n", WAIT, lambda: "the log")
    kubectl("delete", "job", "ct-x", "--wait=true")
    until(lambda: not core.list_namespaced_pod("default").items, WAIT, lambda: "the pods to go")
