"""The objects that are made of a job's request: its bundle, and YAML that has the same objects."""

from __future__ import annotations

import io
import json
import os
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml

from clustertool.engines.job_request import RunRequest, RunWish
from clustertool.engines.kubernetes.job_manifests import JobManifests, as_yaml, job_manifests
from clustertool.errors import ConfigError
from clustertool.fleet.dispatch.workspace import read_workspace
from clustertool.fleet.identity import identity
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job import Options, read_job
from clustertool.model.container.container_settings import ContainerSettings


def made(folder: Path, size: int = 0, **settings: Any) -> JobManifests:
    work = folder / "work"
    work.mkdir()
    (work / "train.py").write_text("print(1)\n")
    (work / "blob").write_bytes(os.urandom(size))
    cluster = Cluster(
        (),
        where=str(folder / "conf.py"),
        engine="kubernetes",
        container=ContainerSettings("train:1"),
        settings=settings,
        env=(("WORD", "x"),),
    )
    options = Options()
    spec = read_job(cluster, {}, options)
    request = RunRequest(
        cluster, options, RunWish(), spec, read_workspace(work), "", {"TOKEN": "very-secret-value"}, ()
    )
    return job_manifests(request, identity("Job.1", name="n"))


def joined(bundle: bytes) -> dict[str, Any]:
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        found: dict[str, Any] = json.loads(archive.read("join.json"))
        return found


def test_a_small_workspace_is_in_the_bundle_and_a_large_one_is_sent(tmp_path: Path) -> None:
    small, large = tmp_path / "a", tmp_path / "b"
    small.mkdir(), large.mkdir()
    data, send = made(small).bundle()
    assert not send and len(data) <= 1_000_000
    assert joined(data)["of_engine"]["uploaded"] is False
    data, send = made(large, 1_200_000).bundle()
    assert send and len(data) <= 1_000_000
    assert joined(data)["of_engine"]["uploaded"] is True


def test_the_join_file_fits_the_pods(tmp_path: Path) -> None:
    job = made(tmp_path, nodes={"trainer": 2, "pserver": 1}, dialect="jobset", output="pvc:out")
    join = joined(job.bundle()[0])
    name = job.order.name
    assert join["nnodes"] == 3 and join["of_engine"]["roles"] == ["trainer", "trainer", "pserver"]
    assert join["coordinator"]["host"] == f"{name}-trainer-0-0.{name}"
    assert join["names"] == [f"{name}-trainer-0-0", f"{name}-trainer-0-1", f"{name}-pserver-0-0"]
    assert join["own"]["root_dir"] == "/clustertool"
    assert join["of_engine"]["output"] == "/clustertool-output" and join["of_engine"]["keep"] == 0.0
    assert join["job"]["container"]["image"] == join["cluster"]["container"]["image"] == ""


def test_yaml_has_the_objects_and_no_secret(tmp_path: Path) -> None:
    job = made(tmp_path)
    objects = job.objects
    assert objects.service is not None
    text = as_yaml(objects.workload, objects.service)
    assert list(yaml.safe_load_all(text)) == [objects.workload, objects.service]
    assert "very-secret-value" not in text and job.identity.key not in text
    assert "very-secret-value" not in as_yaml(job.native())


def test_pod_template_is_a_file_next_to_conf_py(tmp_path: Path) -> None:
    (tmp_path / "pod.yaml").write_text("spec:\n  runtimeClassName: nvidia\n")
    assert (
        made(tmp_path, pod_template="pod.yaml").objects.workload["spec"]["template"]["spec"]["runtimeClassName"]
        == "nvidia"
    )


@pytest.mark.parametrize("text", ["- a\n", "{", ""])
def test_a_pod_template_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "pod.yaml").write_text(text)
    with pytest.raises(ConfigError, match="pod_template"):
        made(tmp_path, pod_template="pod.yaml")
