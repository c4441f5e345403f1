"""What verbs show and leave of jobs on Kubernetes, by the command line: pods, outputs that wait, images, exports, rights."""

from __future__ import annotations

import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertool.engines.kubernetes.kubernetes_check import rights
from tests.cli import REPO, until
from tests.kubernetes.kube_site import IMAGE, KubeSite
from tests.kubernetes.test_kubernetes_runs import TRAIN, run


@pytest.fixture
def job(site: KubeSite) -> KubeSite:
    site.workspace(train_py=TRAIN)
    return site


def id_of(site: KubeSite) -> str:
    (found,) = site.inv("jobs", "--json").ends(0).json["jobs"]
    return str(found["id"])


def hold_third_pod(site: KubeSite) -> None:
    """One node of three has no room for a pod."""
    site.conf(KUBERNETES={"resources": {"cpu": 5}}, JOIN_TIMEOUT=12)
    site.server.store.update("Node", "", "worker-2", lambda node: node["status"]["allocatable"].update(cpu="1"))


@pytest.mark.engines
def test_status_shows_phase_node_and_restarts_of_each_pod(job: KubeSite) -> None:
    command = job.start(*run("--env", "STEPS=200"))
    command.says("rank 2 of 3")
    pods = job.pods()
    found = job.inv("status", "--json").ends(0).json
    assert found["pods"] == [
        {
            "pod": pod["metadata"]["name"],
            "node": node,
            "host": pod["spec"]["nodeName"],
            "phase": "Running",
            "reason": "",
            "restarts": 0,
        }
        for node, pod in enumerate(pods)
    ]
    assert found["holds_output"] is False
    shown = job.inv("status").ends(0).out
    for pod in pods:
        assert re.search(rf"{pod['metadata']['name']} +{pod['spec']['nodeName']} +Running +0", shown)
    job.inv("stop").ends(0)
    command.wait().ends(143)


@pytest.mark.engines
def test_status_states_that_an_output_waits_and_keeps_resources(job: KubeSite) -> None:
    job.inv(*run("--env", "WRITES=1", "--detach")).ends(0)
    until(lambda: job.inv("status", "--json").json["holds_output"] is True, 60)
    shown = job.inv("status").ends(0).out
    assert "its resources, GPUs too, stay reserved: inv fetch --job" in shown
    name = id_of(job)
    job.inv("fetch").ends(0)
    assert (job.folder / f"JOB{name}/model.txt").read_text() == "rank 0"
    until(lambda: not job.living_pods, 30, lambda: f"{job.living_pods} to end")
    assert job.inv("status", "--json").ends(0).json["holds_output"] is False


@pytest.mark.engines
def test_an_image_that_is_never_pulled_ends_the_job(job: KubeSite) -> None:
    job.conf(JOIN_TIMEOUT=5)
    job.server.controllers.bad_images.add(IMAGE)
    done = job.inv(*run()).ends(69)
    assert "has not started for 5 s: pod ct-" in done.last and "ImagePullBackOff" in done.last
    job.is_empty(5)


@pytest.mark.engines
def test_the_verdict_of_a_job_whose_nodes_do_not_join_names_the_image(job: KubeSite) -> None:
    hold_third_pod(job)
    command = job.start(*run())
    job.pods(2)
    command.says("running")
    job.server.controllers.bad_images.add(IMAGE)
    job.server.store.update("Node", "", "worker-2", lambda node: node["status"]["allocatable"].update(cpu="8"))
    done = command.wait(60).ends(69)
    assert "ImagePullBackOff" in done.last and "2 of 3 nodes have joined" in done.last
    (listed,) = job.inv("jobs", "--json").ends(0).json["jobs"]
    assert listed["state"] == "lost" and "2 of 3 nodes have joined" in listed["reason"]
    assert "2 of 3 nodes have joined" in job.inv("status").ends(66).err
    job.inv("clean", "--job", listed["id"]).ends(0)
    job.is_empty()


@pytest.mark.engines
def test_the_workspace_of_an_image_needs_no_folder(job: KubeSite, tmp_path: Path) -> None:
    """Also one that is named by --job-workspace. Of a folder here only job.toml is read."""
    app = Path(f"/opt/clustertool-test-{time.time_ns()}")
    app.mkdir()
    try:
        (app / "train.py").write_text("print('of the image', flush=True)\n")
        job.runtime.image = (str(app),)
        assert "of the image" in job.inv("run", "--job-workspace", str(app)).ends(0).out
        job.conf(KUBERNETES={"workspace": f"image:{app}"})
        assert "of the image" in job.inv("run").ends(0).out
        done = job.inv("run", "--workspace", "job").ends(0)
        assert "of the image" in done.out and "of job only job.toml is read" in done.err
    finally:
        (app / "train.py").unlink()
        app.rmdir()


@pytest.mark.engines
def test_a_job_and_its_secret_are_exported_to_two_files(job: KubeSite, kubectl_here: None) -> None:
    job.inv("export", "--workspace", "job", "--to", "job.yaml", "--secrets-to", "secret.yaml").ends(0)
    assert "kind: Secret" not in (job.folder / "job.yaml").read_text()
    assert (job.folder / "secret.yaml").stat().st_mode & 0o777 == 0o600
    for name in ("job.yaml", "secret.yaml"):
        job.kubectl("apply", "--validate=false", "-f", str(job.folder / name))
    assert "rank 2 of 3" in job.inv("attach", "--all-ranks").ends(0).out
    refused = job.inv("export", "--workspace", "job", "--with-secrets", "--secrets-to", "other.yaml").ends(64)
    assert "--secrets-to" in refused.err

    # Their owner is not known to Kubernetes, so they stay when the job is deleted.
    job.kubectl("delete", "jobs", "--all")
    until(lambda: not job.objects("Pod"), 30)
    job.inv("clean", "--older-than", "1d").ends(0)
    left = job.left()
    assert [one.split()[0] for one in left] == ["Secret", "Service"]
    for one in left:
        kind, name = one.split()
        job.server.store.update(kind, "default", name, make_old)
    assert "its job is gone" in job.inv("clean", "--older-than", "1d").ends(0).err
    job.is_empty(5)


def make_old(obj: dict[str, Any]) -> None:
    obj["metadata"]["creationTimestamp"] = "2026-01-01T00:00:00Z"


@pytest.mark.engines
def test_a_short_job_is_not_reported_as_lost(job: KubeSite) -> None:
    """Its pods end while their agents start or send."""
    for _ in range(3):
        assert "connection lost" not in job.inv(*run()).ends(0).err


def role() -> Any:
    import yaml

    (text,) = re.findall(r"```yaml\n(.*?)```", (REPO / "docs/kubernetes.md").read_text(), re.S)
    return yaml.safe_load(text)["rules"]


def of_role() -> set[tuple[str, str]]:
    return {(verb, name) for rule in role() for name in rule["resources"] for verb in rule["verbs"]}


def test_check_tests_the_rights_of_the_role_and_no_other() -> None:
    needed = {
        (right.verb, f"{right.resource}/{right.subresource}" if right.subresource else right.resource)
        for right in rights("Job")
        if right.resource != "nodes"  # of a ClusterRole
    }
    assert of_role() == needed


@pytest.mark.engines
def test_no_verb_needs_more_than_the_role(job: KubeSite, another_user: Callable[[str], KubeSite]) -> None:
    ann = another_user("ann")
    ann.server.add_user("ann", role())
    ann.workspace(train_py=TRAIN)
    ann.inv(*run("--env", "STEPS=400", "--detach")).ends(0)
    ann.pods()
    until(lambda: ann.inv("status", "--json").json["state"] == "running", 60)
    ann.inv("logs", "--rank", "1", "--tail", "1").ends(0)
    ann.clustertool("exec", "--in-job", "python3", "-V").ends(0)
    assert "train.py:" in ann.clustertool("stacks").ends(0).out
    ann.inv("stop", "--force").ends(0)
    ann.is_empty(5)
    ann.inv(*run("--env", "WRITES=1", "--detach")).ends(0)
    until(lambda: ann.inv("status", "--json").json["holds_output"] is True, 60)
    for verb in ("fetch", "jobs", "report"):
        ann.inv(verb).ends(0)
    ann.inv("clean", "--older-than", "0s")
    optional = {
        ("list", "jobsets"),
        ("list", "paddlejobs"),
        ("list", "workloads"),
        ("get", "namespaces"),
        ("list", "nodes"),
        ("create", "selfsubjectreviews"),  # Kubernetes gives it to all users (system:basic-user)
    }
    used = {("create" if verb == "validate" else verb, resource) for verb, resource, _ in ann.server.requests}
    assert used - optional <= of_role()
