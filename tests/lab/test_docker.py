"""Ranks in containers of docker: a real daemon on each node, whose children the containers are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from tests import docker_daemon
from tests.cli import LabSite
from tests.containers import IMAGE, LABEL


def test_docker_on_a_node(site: Callable[..., LabSite], container_image: Path) -> None:
    one = site(2, nodes={node: docker_daemon.docker_node() for node in range(2)})
    docker_daemon.wait_for(one)
    docker_daemon.put_image(one, container_image)
    run = ["run", "--rm", "--net=host", "--ipc=host", "--pid=host", "--log-driver=none", "--user=4001:4001"]
    out = docker_daemon.docker(one, 1, *run, "--group-add=44", IMAGE, "id")
    assert out == "uid=4001 gid=4001 groups=4001,44\n"
    docker_daemon.docker(one, 1, *run, "--detach", f"--label={LABEL}=j", "--name=ct-1", IMAGE, "sleep", "100")
    assert docker_daemon.containers(one, 1) == ["ct-1"]
    assert [process.name for process in one.living()] == ["containerd-shim", "sleep"]
    docker_daemon.docker(one, 1, "rm", "--force", "ct-1")
    docker_daemon.no_containers(one)
