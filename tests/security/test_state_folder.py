"""The embedded cluster's folder says which processes to end and where to log in: another user must not have written it."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from clustertool.errors import PreflightError
from clustertool.fleet.embedded import local_processes
from clustertool.fleet.embedded.embedded_cluster import LocalCluster, Server

STRANGER = 4002
pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of another user")


@pytest.fixture
def victim() -> Iterator[Server]:
    """A process of ours as a server of the embedded cluster."""
    process = subprocess.Popen(["sleep", "60"])
    found = local_processes.find(process.pid)
    assert found
    yield Server(0, "127.0.0.1", 22, process.pid, found[1], local_processes.boot_id())
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
    (cluster.run / "servers.json").write_text(json.dumps([asdict(victim)]))
    assert cluster.status() == (victim,)
    change(cluster)
    for act in (cluster.down, cluster.cluster, cluster.status, lambda: cluster.up(1)):
        with pytest.raises(PreflightError, match="embedded cluster is not safe|not a directory of this user"):
            act()
