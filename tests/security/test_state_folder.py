"""The state folder says which processes to end and where to log in: another user must not have written it."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clustertool.errors import ConfigError, PreflightError
from clustertool.fleet.embedded_cluster import LocalCluster, Server
from clustertool.fleet.job_places import JobPlaces
from clustertool.node.system import processes
from tests.node.harness import until
from tests.unit.cases import IDENTITY, cluster_of

STRANGER = 4002
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of another user")


@pytest.fixture
def victim(tmp_path: Path) -> Iterator[Server]:
    """A process of ours as a server of the embedded cluster, whose configuration it names."""
    config = tmp_path / "state" / "local" / "run" / "0.conf"
    process = subprocess.Popen(["sh", "-c", "read _", str(config)], stdin=subprocess.PIPE)
    # The kernel sets the command line of a process a moment after it has closed the pipe on which Popen waits.
    until(lambda: str(config) in Path(f"/proc/{process.pid}/cmdline").read_text(), "the process has its command line")
    found = processes.identify(process.pid)
    assert found
    yield Server(0, "127.0.0.1", 22, *found)
    assert process.poll() is None, "it was ended"
    process.kill()
    process.wait(10)


def _by_a_stranger(cluster: LocalCluster) -> None:
    os.chown(cluster.dir, STRANGER, STRANGER)
    os.chown(cluster.run, STRANGER, STRANGER)


def _parent_of_a_stranger(cluster: LocalCluster) -> None:
    os.chown(cluster.dir.parent, STRANGER, STRANGER)


def _open_to_all(cluster: LocalCluster) -> None:
    cluster.run.chmod(0o777)


@pytest.mark.parametrize("change", [_by_a_stranger, _parent_of_a_stranger, _open_to_all])
def test_it_is_not_believed(tmp_path: Path, victim: Server, change: Callable[[LocalCluster], None]) -> None:
    cluster = LocalCluster(tmp_path / "state" / "local")
    cluster.run.mkdir(parents=True)
    (cluster.run / "0.conf").write_text("ListenAddress 127.0.0.1:22\n")
    (cluster.run / "0.pid").write_text(f"{victim.pid}\n")
    assert cluster.status() == (victim,)
    change(cluster)
    for act in (cluster.down, cluster.cluster, cluster.status, lambda: cluster.up(1)):
        with pytest.raises(PreflightError, match="embedded cluster is not safe|not a directory of this user"):
            act()


def _file_of_a_stranger(folder: Path) -> None:
    os.chown(folder / "J.json", STRANGER, STRANGER)


def _folder_of_a_stranger(folder: Path) -> None:
    os.chown(folder, STRANGER, STRANGER)


def _link_of_a_stranger(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))
    os.symlink(folder.with_name("moved"), folder)
    os.chown(folder, STRANGER, STRANGER, follow_symlinks=False)


@pytest.mark.parametrize("change", [_file_of_a_stranger, _folder_of_a_stranger, _link_of_a_stranger])
def test_stored_hosts_of_a_stranger_are_not_used(tmp_path: Path, change: Callable[[Path], None]) -> None:
    """They name the hosts to log in to, and a gateway that may be a command."""
    folder = tmp_path / "jobs"
    places = JobPlaces(folder)
    places.store(replace(IDENTITY, job_id="J"), cluster_of(["10.0.0.1"]))
    assert places.find("J") is not None
    change(folder)
    with pytest.raises(ConfigError, match="belongs to "):
        places.find("J")
    with pytest.raises(ConfigError, match="belongs to "):
        places.newest()
