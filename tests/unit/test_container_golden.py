"""Command lines of containers against files in tests/golden/containers. docs/containers.md names the page for each option.

After a change that is meant, read the difference after `UPDATE_GOLDEN=1 pytest tests/unit/test_container_golden.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest

from clustertool.model.container.container_command import Surroundings, command, passed
from clustertool.model.planning import requests
from clustertool.model.wire.spec_types import ContainerSpec
from tests.unit.cases import cluster_of, facts_of, plan_of

GOLDEN = Path(__file__).resolve().parents[1] / "golden/containers"
SECRET = "s3cr3t-value"
# name: the container of the node, its devices, the files of them that the node has
CASES: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "docker_gpu": ({"runtime": "docker", "options": ["--memory=8g"], "groups": [1000, 44, 109]}, "gpu", ()),
    "docker_rootless": ({"runtime": "docker", "rootless": True}, "cpu", ()),
    "docker_dcu": ({"runtime": "docker", "groups": [1000, 44]}, "dcu", ("/dev/dri", "/dev/kfd", "/opt/hyhal")),
    "podman_gpu": ({"runtime": "podman"}, "gpu", ()),
    "podman_rootless_xpu": (
        {"runtime": "podman", "rootless": True, "groups": [1000, 44]},
        "xpu",
        ("/dev/xpu0", "/dev/xpuctrl"),
    ),
    "apptainer_gpu": (
        {"runtime": "apptainer", "image": "/images/train.sif", "options": ["--writable-tmpfs"]},
        "gpu",
        (),
    ),
    "apptainer_npu": (
        {"runtime": "apptainer", "image": "/images/train.sif"},
        "npu",
        ("/dev/davinci0", "/etc/hccn.conf"),
    ),
}


def of_case(name: str) -> tuple[list[str], dict[str, str]]:
    """The command line of rank 0 of two nodes, and the variables in the environment of the client."""
    changes, kind, present = CASES[name]
    container: dict[str, Any] = {
        "program": f"/usr/bin/{changes['runtime']}",
        "rootless": False,
        "image": "sha256:0123",
        "reference": "train:1",
        "digest": "sha256:0123",
        "options": [],
        "volumes": ["/data:/data:ro"],
        "uid": 1000,
        "groups": [1000],
        **changes,
    }
    cluster = cluster_of(
        ["node[1-2]"], START_PORT=6170, LEAD_PORT=6160, SECRETS=["API_KEY"], ENV={"HOME": "/data/home"}
    )
    facts = facts_of(cluster, devices=(0, 1), device_kind=kind) if kind != "cpu" else facts_of(cluster)
    plan = plan_of(cluster, facts=facts, passed=[("API_KEY", SECRET)])
    spec = requests.spec(plan, plan.nodes[0], [], [])
    process = spec["processes"][0]
    around = Surroundings(0, 0o022, {"nofile": (1024, 4096)}, present)
    found = passed(changes["runtime"], spec, process, {**spec["common"], **process["env"], "API_KEY": SECRET}, around)
    return command(cast(ContainerSpec, container), spec, process, found.names, around), found.env


@pytest.mark.parametrize("name", CASES)
def test_the_command_line_is_the_golden_one(name: str) -> None:
    argv, _ = of_case(name)
    variables = [argument for argument in argv if argument.startswith("--env=")]
    text = "\n".join(argument for argument in argv if argument not in variables) + "\n"
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.is_file(), f"{path} is missing: run with UPDATE_GOLDEN=1, look at it and add it"
    assert text == path.read_text()
    assert all("=" not in variable[len("--env=") :] for variable in variables), "names only"


@pytest.mark.parametrize("name", CASES)
def test_values_are_in_the_environment_of_the_client_only(name: str) -> None:
    argv, env = of_case(name)
    assert SECRET not in " ".join(argv)
    prefix = "APPTAINERENV_" if CASES[name][0]["runtime"] == "apptainer" else ""
    assert env[f"{prefix}API_KEY"] == SECRET
    assert env[f"{prefix}CLUSTERTOOL_ENV_HOME"] == "/data/home", "the client has its own HOME"
    assert "HOME" not in env and f"{prefix}HOME" not in env


def test_each_golden_file_has_its_case() -> None:
    assert sorted(path.stem for path in GOLDEN.iterdir()) == sorted(CASES)
