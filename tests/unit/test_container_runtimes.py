"""What docker, podman and apptainer print about themselves and about images, and which of them a node tries."""

from __future__ import annotations

import json
from typing import Any, Dict

import pytest

from clustertool.model.container.container_runtimes import candidates, info_arguments, read_image, read_info, sif_digest

ROOTLESS_MAP = [{"container_id": 0, "host_id": 1000, "size": 1}, {"container_id": 1, "host_id": 100000, "size": 65536}]
ID = "00af73cbffc592f7c0ea1421e7e9dd3f22277cbb6ab313f1316e057336268721"
DIGEST = "sha256:" + "4" * 64
OTHER = "sha256:" + "5" * 64


def podman(rootless: bool = True, **host: Any) -> str:
    about: Dict[str, Any] = {
        "cgroupVersion": "v2",
        "security": {"rootless": rootless},
        "idMappings": {"uidmap": ROOTLESS_MAP if rootless else None},
        **host,
    }
    store = {"graphRoot": "/home/ann/.local/share/containers/storage"}
    return json.dumps({"host": about, "store": store, "version": {"Version": "4.3.1"}})


def docker(**more: object) -> str:
    known = {
        "ServerVersion": "27.3.1",
        "SecurityOptions": ["name=apparmor", "name=cgroupns"],
        "CgroupVersion": "2",
        "DockerRootDir": "/var/lib/docker",
        "Runtimes": {"runc": {}, "nvidia": {}},
    }
    return json.dumps({**known, **more})


@pytest.mark.parametrize(
    ("runtime", "image", "options", "expected"),
    [
        ("auto", "a:1", False, ("docker", "podman", "apptainer")),
        ("auto", "a:1", True, ("docker", "podman")),
        ("auto", "/srv/a.sif", True, ("apptainer",)),
        ("auto", "docker://a", False, ("apptainer",)),
        ("podman", "a:1", True, ("podman",)),
    ],
)
def test_the_runtimes_that_a_node_tries(runtime: str, image: str, options: bool, expected: Any) -> None:
    assert candidates(runtime, image, options) == expected


def test_podman_as_root_and_as_a_user() -> None:
    assert info_arguments("podman") == ["info", "--format", "{{json .}}"]
    found = read_info("podman", 0, podman(), "", "ann")
    assert (found.version, found.rootless, found.cgroup) == ("4.3.1", True, "v2")
    assert found.store == "/home/ann/.local/share/containers/storage"
    found = read_info("podman", 0, podman(False, cgroupVersion="v1"), "", "root")
    assert (found.version, found.rootless, found.cgroup, found.problem) == ("4.3.1", False, "v1", "")
    assert found.process_limit


@pytest.mark.parametrize(
    ("cgroup", "manager", "controllers", "limit"),
    [
        ("v2", "systemd", ["memory", "pids"], True),
        ("v2", "systemd", ["memory"], False),
        ("v2", "cgroupfs", ["memory", "pids"], False),
        ("v1", "systemd", ["memory", "pids"], False),
    ],
)
def test_whether_podman_without_root_limits_processes(cgroup: str, manager: str, controllers: Any, limit: bool) -> None:
    """Where it cannot, it prints a warning about the option, which the log of the rank would have."""
    out = podman(True, cgroupVersion=cgroup, cgroupManager=manager, cgroupControllers=controllers)
    assert read_info("podman", 0, out, "", "ann").process_limit is limit


def test_podman_without_a_range_of_uids() -> None:
    found = read_info("podman", 0, podman(idMappings={"uidmap": ROOTLESS_MAP[:1]}), "", "ann")
    assert not found.version
    assert "/etc/subuid" in found.problem
    assert "usermod --add-subuids" in found.fix and " ann;" in found.fix


def test_docker_with_its_daemon() -> None:
    found = read_info("docker", 0, docker(), "", "ann")
    assert (found.version, found.rootless, found.cgroup, found.nvidia) == ("27.3.1", False, "v2", True)
    found = read_info("docker", 0, docker(SecurityOptions=["name=rootless"], Runtimes={"runc": {}}), "", "ann")
    assert (found.rootless, found.nvidia) == (True, False)


@pytest.mark.parametrize(
    ("code", "out", "err", "problem", "fix"),
    [
        (
            0,
            docker(ServerVersion=""),
            "Cannot connect to the Docker daemon at unix:///x.",
            "Cannot connect",
            "systemctl",
        ),
        (
            1,
            docker(ServerVersion="", ServerErrors=["permission denied on the socket"]),
            "",
            "permission",
            "-aG docker ann",
        ),
        (
            1,
            "",
            "permission denied while trying to connect to the Docker daemon socket",
            "permission",
            "-aG docker ann",
        ),
        (0, podman(), "", "docker is podman here", 'runtime = "podman"'),
        (-1, "", "", "does not answer", "docker info"),
        (0, "[" * 100_000, "", "cannot be used", "docker info"),
        (0, "[]", "", "it gave no version", "docker info"),
    ],
)
def test_docker_that_cannot_be_used(code: int, out: str, err: str, problem: str, fix: str) -> None:
    found = read_info("docker", code, out, err, "ann")
    assert not found.version
    assert problem in found.problem
    assert fix in found.fix


def test_podman_that_fails() -> None:
    found = read_info("podman", 125, "", "Error: a\nError: runtime is broken\n", "ann")
    assert (found.version, found.problem) == ("", "podman cannot be used: Error: runtime is broken")


@pytest.mark.parametrize(
    ("out", "version"),
    [
        ("1.3.6\n", "1.3.6"),
        ("apptainer version 1.3.6-1.el9\n", "1.3.6-1.el9"),
        ("singularity-ce version 4.1.0", "4.1.0"),
    ],
)
def test_apptainer(out: str, version: str) -> None:
    assert info_arguments("apptainer") == ["version"]
    assert read_info("apptainer", 0, out, "", "ann").version == version
    assert read_info("apptainer", 1, out, "FATAL: no", "ann").problem == "apptainer cannot be used: FATAL: no"


def test_an_image_of_podman_and_of_docker() -> None:
    of_podman = [{"Id": ID, "Digest": DIGEST, "RepoDigests": [f"localhost/a@{DIGEST}"], "Size": 7158870}]
    assert read_image(json.dumps(of_podman), "a:1") == (ID, DIGEST, 7158870)
    of_docker: Dict[str, Any] = {"Id": f"sha256:{ID}", "RepoDigests": [f"r/b@{OTHER}", f"r/a@{DIGEST}"], "Size": 9}
    assert read_image(json.dumps([of_docker]), f"r/a@{DIGEST}") == (ID, DIGEST, 9)
    assert read_image(json.dumps([of_docker]), "r/b:1") == (ID, OTHER, 9)
    of_docker["RepoDigests"] = []
    assert read_image(json.dumps([of_docker]), "r/a:1") == (ID, f"sha256:{ID}", 9)


@pytest.mark.parametrize("out", ["", "[]", "{}", "[[]]", "[" * 100_000, '[{"Size": "x"}]', "null"])
def test_no_image(out: str) -> None:
    assert read_image(out, "a:1") == ("", "", -1)


def test_the_identity_of_a_sif_file() -> None:
    header = (
        b"#!/usr/bin/env run-singularity\n".ljust(32, b"\0") + b"SIF_MAGIC\0" + b"01\0" + b"02\0" + bytes(range(16))
    )
    assert sif_digest(header.ljust(128, b"\0")) == "sif:000102030405060708090a0b0c0d0e0f"
    assert sif_digest(header) == ""  # a file that is not complete
    assert sif_digest(b"x" * 128) == ""
