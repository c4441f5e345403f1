"""A docker daemon on the nodes of a lab: containers of root and of a user in the group docker.

    three = site(3, nodes={node: docker_node() for node in range(3)})
    wait_for(three)
    put_image(three, image)                       # image: the fixture container_image
    three.conf(CONTAINER=containers.settings(runtime="docker"))

Each node has a daemon and an image store of its own. The daemon makes no network: ranks have that of their node.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterable, Sequence
from pathlib import Path

import pytest

from tests.cli import LabSite, Process, until
from tests.containers import IMAGE, IMAGE_ENV, LABEL
from tests.lab.lab import HOME, PATH, Node

PROGRAMS = ("dockerd", "docker", "containerd", "runc")
STORE = HOME / ".docker-store"
LOG = "/run/dockerd.log"
DAEMON = (
    f"setsid dockerd --iptables=false --ip6tables=false --bridge=none --storage-driver=vfs --data-root={STORE} "
    f"--exec-root=/run/docker </dev/null >>{LOG} 2>&1 &"
)
NAMES = ("dockerd", "containerd")
WAIT = 60.0


def demand() -> None:
    """Skip without docker's daemon; with DEMAND_ENGINES=1, fail."""
    path = f"{os.environ.get('PATH', '')}:{PATH}"
    absent = [program for program in PROGRAMS if not shutil.which(program, path=path)]
    if absent:
        why = f"docker needs {', '.join(absent)}: scripts/engine-packages.sh installs them"
        pytest.fail(why) if os.environ.get("DEMAND_ENGINES") == "1" else pytest.skip(why)


def docker_node(before: Sequence[str] = (), **more: object) -> Node:
    """A node that runs a docker daemon. before: commands in front of its start. more: as in Node."""
    demand()
    commands = ("mkdir -p /dev/mqueue", "mount -t mqueue mqueue /dev/mqueue", *before, DAEMON)
    return Node(cgroups=True, commands=commands, **more)  # type: ignore[arg-type]


def wait_for(site: LabSite, nodes: Iterable[int] | None = None) -> None:
    """Wait until the daemons answer."""
    for node in range(site.count) if nodes is None else nodes:
        until(
            lambda node=node: _docker(site, node, ["version"]).returncode == 0, WAIT, lambda node=node: log(site, node)
        )


def start_daemon(site: LabSite, node: int) -> None:
    """Start it again, as systemd does after a failure."""
    site.lab.exec(node, ["sh", "-c", f"rm -f /var/run/docker.pid; {DAEMON}"])
    wait_for(site, [node])


def daemons(site: LabSite, node: int) -> list[Process]:
    """dockerd and containerd. The container's own parents (containerd-shim) are none."""
    return [process for process in site.all_processes() if process.node == node and process.name in NAMES]


def put_image(site: LabSite, tar: Path, name: str = IMAGE) -> None:
    """Import the image on node 0, and load this one on all others."""
    changes = [token for key, value in IMAGE_ENV.items() for token in ("--change", f"ENV {key}={value}")]
    with tar.open("rb") as file:
        docker(site, 0, "import", *changes, "-", name, stdin=file)
    saved = site.lab.dir / "saved.tar"
    with saved.open("wb") as file:
        assert _docker(site, 0, ["save", name], stdout=file).returncode == 0
    for node in range(1, site.count):
        with saved.open("rb") as file:
            docker(site, node, "load", "--quiet", stdin=file)
    saved.unlink()


def docker(site: LabSite, node: int, *args: str, **options: object) -> str:
    """The output of a docker command of root on a node."""
    done = _docker(site, node, args, **options)
    assert done.returncode == 0, f"docker {' '.join(args)} on node {node}: {done.stderr}\n{log(site, node)}"
    return str(done.stdout)


def _docker(site: LabSite, node: int, args: Sequence[str], **options: object) -> subprocess.CompletedProcess[str]:
    enter = ["nsenter", "-t", str(site.lab.boots[node].init), "-m", "-u", "-i", "-n", "-p"]
    shell = ["env", "-i", f"PATH={PATH}", f"HOME={HOME}", "docker"]
    streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run([*enter, *shell, *args], text=True, timeout=WAIT, **streams)  # type: ignore[call-overload,no-any-return]


def log(site: LabSite, node: int) -> str:
    """The last lines of the daemon's log."""
    return site.lab.exec(node, ["tail", "-n", "20", LOG]).stdout


def containers(site: LabSite, node: int) -> list[str]:
    """Names of the tool's containers on a node, running or not."""
    return docker(site, node, "ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}").split()


def no_containers(site: LabSite, nodes: Iterable[int] | None = None, seconds: float = 30.0) -> None:
    """Wait until nodes have no container of the tool, no process of a job, and none of docker but its daemons."""
    nodes = list(range(site.count) if nodes is None else nodes)

    def left() -> list[object]:
        living = [process for process in site.living() if process.node in nodes]
        return [*living, *(name for node in nodes for name in containers(site, node))]

    until(lambda: not left(), seconds, lambda: f"these to end: {left()}")
