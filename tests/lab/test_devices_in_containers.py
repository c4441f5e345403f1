"""Options for devices, given to real podman and docker: with a CDI file, a hook and device files that are made up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from clustertool.model.container.container_command import device_options
from tests import containers, docker_daemon
from tests.cli import LabSite

CDI = """\
cdiVersion: "0.3.0"
kind: nvidia.com/gpu
devices:
- name: "all"
  containerEdits:
    env: ["GPUS=all"]
    deviceNodes: [{path: /dev/fuse}]
"""
# What docker's daemon runs for --gpus, in front of a container's program.
HOOK = "#!/bin/sh\nexec cat >/dev/null\n"
# A folder with a device file, as /dev/dri is one, and a device file.
FILES = [
    "mkdir -p /run/dri /run/hooks /run/cdi",
    "mknod -m 666 /run/dri/renderD128 c 1 5",
    "mknod -m 666 /run/xpu0 c 1 3",
    f"printf '%s' '{HOOK}' >/run/hooks/nvidia-container-runtime-hook",
    "chmod 755 /run/hooks/nvidia-container-runtime-hook",
    f"printf '%s' '{CDI}' >/run/cdi/nvidia.yaml",
    "export PATH=/run/hooks:$PATH",
]
RUN = ("run", "--rm", "--net=host", "--log-driver=none", "--ulimit=nproc=512:512", "--ulimit=nofile=512:512")


@pytest.fixture(params=["podman", "docker"])
def in_container(
    request: pytest.FixtureRequest, site: Callable[..., LabSite], tmp_path: Path, container_image: Path
) -> Callable[..., str]:
    """in_container(kind, present, program ...) -> its output, in a container with the options of this kind of devices."""
    runtime = request.param
    if runtime == "docker":
        one = site(1, nodes={0: docker_daemon.docker_node(before=FILES)})
        docker_daemon.wait_for(one)
        docker_daemon.put_image(one, container_image)
    else:
        node = containers.container_node(tmp_path / "etc")
        one = site(1, nodes={0: replace(node, commands=(*node.commands, *FILES))})
        containers.put_image(one, container_image)

    def run(kind: str, present: list[str], *program: str) -> str:
        options = device_options(runtime, kind, present)
        command = [*RUN, *options, containers.IMAGE, *program]
        if runtime == "docker":
            return docker_daemon.docker(one, 0, *command)
        return containers.podman(one, 0, *command)

    return run


def test_options_for_devices(in_container: Callable[..., str]) -> None:
    gpus = in_container("gpu", [], "env").splitlines()
    assert {"GPUS=all", "NVIDIA_VISIBLE_DEVICES=all"} & set(gpus), "the CDI file, or docker's device request"
    present = ["/run/dri", "/run/xpu0"]
    found = in_container("xpu", present, "stat", "-c", "%n %F %t:%T", "/run/dri/renderD128", "/run/xpu0")
    assert found.splitlines() == [
        "/run/dri/renderD128 character special file 1:5",
        "/run/xpu0 character special file 1:3",
    ]
    assert in_container("xpu", present, "dd", "if=/run/dri/renderD128", "of=/run/xpu0", "bs=1k", "count=1") == ""
