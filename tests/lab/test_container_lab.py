"""The nodes on which tests run containers: podman works there as root and as a user, and leaves nothing on this machine."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import containers
from tests.cli import LabSite

RUN = ("run", "--rm", "--net=host", "--ipc=host", "--pid=host", "--log-driver", "none", "--ulimit", "nproc=512:512")
RUN = (*RUN, "--ulimit", "nofile=512:512")
PROGRAM = "import os; print(os.getuid(), os.environ['IMAGE_WORD'], os.environ['HOME'])"


@pytest.fixture
def ids() -> Iterator[list[str]]:
    """Of containers whose cgroups must be gone when the lab has been closed."""
    mine: list[str] = []
    yield mine
    left = [path for path, _, _ in os.walk("/sys/fs/cgroup") if any(one in path for one in mine)]
    assert not left


@pytest.mark.parametrize("user", [pytest.param("root", marks=pytest.mark.chaos), "ann"])
def test_podman_on_a_node(
    ids: list[str], site: Callable[..., LabSite], tmp_path: Path, container_image: Path, user: str
) -> None:
    nodes = {node: containers.container_node(tmp_path / f"etc{node}", users=("ann",)) for node in (0, 1)}
    two = site(2, nodes=nodes)
    containers.put_image(two, container_image, users=(user,), nodes=[0])
    containers.copy_image(two, users=(user,))
    images = [containers.podman(two, node, "images", "-q", "--no-trunc", user=user) for node in (0, 1)]
    assert images[0] == images[1] != ""
    more = ["--userns=keep-id"] if user != "root" else []
    more += [token for volume in containers.python_volumes() for token in ("--volume", volume)]
    out = containers.podman(two, 1, *RUN, *more, containers.IMAGE, sys.executable, "-c", PROGRAM, user=user)
    assert out.split() == ["0" if user == "root" else "4001", "image", "/opt/image/home"]
    containers.no_containers(two, users=(user,))
    label = ("--detach", "--label", f"{containers.LABEL}=j", "--name", "ct-1")
    ids.append(containers.podman(two, 0, *RUN, *more, *label, containers.IMAGE, "sleep", "100", user=user).strip())
    assert containers.containers(two, 0, user) == ["ct-1"]
    assert containers.conmons(two, 0)
    with pytest.raises(AssertionError, match="(?s)these to end: .*conmon.*ct-1"):
        containers.no_containers(two, users=(user,), seconds=0.1)
    two.lab.crash(0)
