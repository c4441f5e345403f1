"""What goes wrong while a job is submitted, runs and ends: verdict, exit code, and no object is left."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.cli import until
from tests.kubernetes.cluster_faults import preempt
from tests.kubernetes.kube_site import KubeSite
from tests.kubernetes.test_kubernetes_rights import role
from tests.kubernetes.test_kubernetes_runs import TRAIN, run

# Further objects that are created; `make test` has jobs.
REPETITIONS = [pytest.param(kind, marks=pytest.mark.chaos) for kind in ("secrets", "services")]


@pytest.fixture
def job(site: KubeSite) -> KubeSite:
    site.workspace(train_py=TRAIN)
    return site


def asked(job: KubeSite, verb: str, resource: str) -> bool:
    return any(one[:2] == (verb, resource) for one in job.server.requests)


def arrived(job: KubeSite) -> int:
    """Bytes of the workspace in pods."""
    files = [one for pod in job.living_pods for one in pod.at("/clustertool").rglob("*") if one.is_file()]
    return sum(one.stat().st_size for one in files)


# -- Ctrl+C in the phases that test_kubernetes_runs.py does not have


def test_ctrl_c_while_the_user_is_asked_for(job: KubeSite) -> None:
    """The first request of a run."""
    job.server.busy.add(("create", "selfsubjectreviews"))
    command = job.start(*run())
    command.says("waiting for the API server")
    command.signal(signal.SIGINT)
    command.wait().ends(130)
    assert not asked(job, "create", "jobs") and job.left() == []


@pytest.mark.engines
@pytest.mark.parametrize("kind", ["jobs", *REPETITIONS])
def test_ctrl_c_while_objects_are_created(job: KubeSite, kind: str) -> None:
    """A request is not left alone: its object could be created after the others were removed."""
    job.server.busy.add(("create", kind))
    command = job.start(*run())
    until(lambda: asked(job, "create", kind), 60, lambda: command.err)
    command.signal(signal.SIGINT)
    job.server.busy.clear()
    command.wait().ends(130)
    assert asked(job, "delete", "jobs")
    job.is_empty(5)


@pytest.mark.engines
def test_ctrl_c_while_the_workspace_is_sent(job: KubeSite) -> None:
    size = 100_000_000
    (job.workspace() / "large.bin").write_bytes(os.urandom(size))
    command = job.start(*run())
    until(lambda: arrived(job) > size // 20, 60, lambda: command.err)
    command.signal(signal.SIGINT)
    command.wait().ends(130)
    assert not asked(job, "get", "pods/log")
    job.is_empty(5)


@pytest.mark.engines
def test_ctrl_c_while_the_output_is_fetched(job: KubeSite) -> None:
    job.workspace(
        train_py="""
        import os
        if os.environ["RANK"] == "0":
            with open(os.environ["CLUSTERTOOL_OUTPUT"] + "/model.bin", "wb") as file:
                file.truncate(300_000_000)
        """
    )
    command = job.start(*run())
    until(lambda: any(files(job.folder, "JOB*")), 60, lambda: command.err)
    command.signal(signal.SIGINT)
    done = command.wait().ends(130)
    assert "the output is not fetched: Ctrl+C; its node waits" in done.err
    assert job.inv("status", "--json").json["outcome"]["code"] == 0
    assert files(job.folder, "JOB*") == []
    job.inv("fetch").ends(0)
    assert [one.stat().st_size for one in files(job.folder, "JOB*") if one.name == "model.bin"] == [300_000_000]
    until(lambda: not job.living_pods, 30, lambda: f"{job.living_pods} to end")
    job.inv("clean", "--older-than", "0s").ends(0)
    job.is_empty()


def files(folder: Path, name: str) -> list[Path]:
    return [one for top in folder.glob(name) for one in top.rglob("*") if one.is_file()]


def test_a_job_that_fails_while_it_joins_shows_the_log_and_the_exit_code(job: KubeSite) -> None:
    """--nproc-per-node gpu in pods without one: the nodes refuse it (64) before one has a record."""
    job.conf(KUBERNETES={"nodes": 2})
    done = job.inv(*run("--nproc-per-node", "gpu")).ends(64)
    why = "--nproc-per-node gpu: "
    assert (
        why in done.last
        and "last lines of the log of pod ct-" in done.err
        and "fix: give a number, or auto" in done.err
    )
    status = job.inv("status", "--json").ends(0).json
    assert status["outcome"]["code"] == 64 and "  fix: give a number, or auto" in status["join_log"]["lines"]
    assert not any(line.startswith("{") for line in status["join_log"]["lines"])
    assert "fix: give a number, or auto" in job.inv("logs").ends(66).err
    assert "fix: give a number, or auto" in job.inv("attach").ends(64).err


# -- what the cluster does


@pytest.mark.engines
def test_a_watch_that_has_expired_is_begun_again(job: KubeSite) -> None:
    """Pods that were preempted are soon gone, so only the watch knows why."""
    command = job.start(*run("--env", "STEPS=400"))
    command.says("rank 2 of 3")
    before = sum(one[:2] == ("list", "pods") for one in job.server.requests)
    job.server.store.expire()
    until(lambda: sum(one[:2] == ("list", "pods") for one in job.server.requests) > before, 30)
    preempt(job.server, job.pods()[1])
    done = command.wait(90).ends(75)
    assert "preempted by a pod of a higher priority" in done.err
    job.inv("clean", "--older-than", "0s").ends(0)
    job.is_empty()


@pytest.mark.parametrize("resource", ["jobs", *REPETITIONS])
def test_without_the_right_to_create_an_object_nothing_is_left(
    job: KubeSite, another_user: Callable[[str], KubeSite], resource: str
) -> None:
    ann = another_user("ann")
    rules = [{**rule, "resources": [one for one in rule["resources"] if one != resource]} for rule in role()]
    rules.append({"apiGroups": ["", "batch"], "resources": [resource], "verbs": ["get", "list", "delete"]})
    ann.server.add_user("ann", rules)
    ann.workspace(train_py=TRAIN)
    refused = ann.inv(*run()).ends(77)
    assert f"ann may not create {resource}" in refused.last
    ann.is_empty(5)


@pytest.mark.parametrize("key", ["count/jobs.batch", "count/secrets"])
def test_a_quota_of_objects_refuses_the_job(job: KubeSite, key: str) -> None:
    quota = {"metadata": {"name": "none"}, "spec": {"hard": {key: "0"}}}
    job.server.store.create("ResourceQuota", "default", quota)
    refused = job.inv(*run()).ends(69)
    assert f"exceeded quota: none, requested: {key}=1" in refused.err
    until(lambda: job.left() == ["ResourceQuota none"], 10, lambda: str(job.left()))


def test_a_wrong_manifest_is_refused_before_anything_is_created(job: KubeSite) -> None:
    (job.folder / "pod.yaml").write_text("spec:\n  tolerations:\n  - {key: gpu, efect: NoSchedule}\n")
    job.conf(KUBERNETES={"pod_template": "pod.yaml"})
    refused = job.inv(*run()).ends(78)
    assert "spec.template.spec.tolerations[0].efect" in refused.err
    assert [request[:2] for request in job.server.requests] == [("create", "selfsubjectreviews"), ("validate", "jobs")]
    assert job.left() == []
