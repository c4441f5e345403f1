"""Command lines of containers against files in tests/golden/containers. docs/containers.md names the page for each option.

After a change that is meant, read the difference after `UPDATE_GOLDEN=1 pytest tests/unit/test_container_golden.py`.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from clustertool.model.container import container_runtimes
from clustertool.model.container.container_command import Surroundings, command, passed_variables, removal, session
from clustertool.model.container.container_runtimes import RUNTIMES
from clustertool.model.planning import requests
from clustertool.model.wire.spec_types import ContainerSpec, Spec, SpecProcess
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

SESSIONS = ("docker_gpu", "podman_gpu", "podman_rootless_xpu", "apptainer_gpu")


class Case(NamedTuple):
    container: ContainerSpec
    spec: Spec
    process: SpecProcess
    variables: dict[str, str]
    around: Surroundings


def of_case(name: str) -> Case:
    """Rank 0 of two nodes."""
    changes, kind, present = CASES[name]
    container: dict[str, Any] = {
        "program": f"/usr/bin/{changes['runtime']}",
        "rootless": False,
        "image": "sha256:0123",
        "reference": "train:1",
        "digest": "sha256:0123",
        "options": [],
        "volumes": ["/data:/data:ro"],
        "process_limit": changes["runtime"] == "podman" and not changes.get("rootless"),
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
    variables = {**spec["common"], **process["env"], "API_KEY": SECRET}
    return Case(cast(ContainerSpec, container), spec, process, variables, around)


def of_rank(name: str) -> tuple[list[str], dict[str, str]]:
    """The command line of a rank, and the variables in the environment of the client."""
    case = of_case(name)
    found = passed_variables(case.container["runtime"], case.spec, case.process, case.variables, case.around)
    return command(case.container, case.spec, case.process, found.names, case.around), found.env


def of_session(name: str) -> tuple[list[str], dict[str, str]]:
    """The same of `exec --in-job -- id`."""
    case = of_case(name)
    argv, env = session(case.container, case.spec, case.process, case.variables, case.around)
    return [*argv, "id"], env


def of_images(runtime: str) -> list[list[str]]:
    """What is done with images: pulling, saving, loading, naming, and the removal of containers."""
    program, image, folder, mark = f"/usr/bin/{runtime}", "docker://train:1", "/root/images/1", "same/0/token"
    if runtime == "apptainer":
        return [container_runtimes.pull_file(program, image, f"{folder}/{container_runtimes.SIF}")]
    kind = container_runtimes.kind_of_copy([runtime])
    return [
        container_runtimes.pull(program, "train:1"),
        container_runtimes.save(program, kind, runtime, "train:1", folder),
        container_runtimes.load(program, kind, folder),
        container_runtimes.tag(program, "sha256:0123", "train:1"),
        container_runtimes.storage(program, runtime),
        [*removal(runtime, program, mark)[-2:]],
    ]


@pytest.mark.parametrize("name", CASES)
def test_the_command_line_is_the_golden_one(name: str) -> None:
    argv, _ = of_rank(name)
    _compare(name, argv)


@pytest.mark.parametrize("name", SESSIONS)
def test_the_command_line_of_a_session_is_the_golden_one(name: str) -> None:
    argv, env = of_session(name)
    _compare(f"session_{name}", argv)
    assert SECRET not in " ".join(argv)
    assert ("APPTAINERENV_API_KEY" in env) == name.startswith("apptainer"), "others have entered the container"


@pytest.mark.parametrize("runtime", RUNTIMES[1:])
def test_the_command_lines_for_images_are_the_golden_ones(runtime: str) -> None:
    _compare_text(f"images_{runtime}", "".join(" ".join(argv) + "\n" for argv in of_images(runtime)))


def _compare(name: str, argv: list[str]) -> None:
    variables = [argument for argument in argv if argument.startswith("--env=")]
    _compare_text(name, "\n".join(argument for argument in argv if argument not in variables) + "\n")
    assert all("=" not in variable[len("--env=") :] for variable in variables), "names only"


def _compare_text(name: str, text: str) -> None:
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        path.write_text(text)
    assert path.is_file(), f"{path} is missing: run with UPDATE_GOLDEN=1, look at it and add it"
    assert text == path.read_text()


@pytest.mark.parametrize("name", CASES)
def test_values_are_in_the_environment_of_the_client_only(name: str) -> None:
    argv, env = of_rank(name)
    assert SECRET not in " ".join(argv)
    prefix = "APPTAINERENV_" if CASES[name][0]["runtime"] == "apptainer" else ""
    assert env[f"{prefix}API_KEY"] == SECRET
    assert env[f"{prefix}CLUSTERTOOL_ENV_HOME"] == "/data/home", "the client has its own HOME"
    assert "HOME" not in env and f"{prefix}HOME" not in env


def test_each_golden_file_has_its_case() -> None:
    made = [*CASES, *(f"session_{name}" for name in SESSIONS), *(f"images_{runtime}" for runtime in RUNTIMES[1:])]
    assert sorted(path.stem for path in GOLDEN.iterdir()) == sorted(made)
