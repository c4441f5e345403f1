"""Joining processes as PID 1 of containers of podman, with the limits that a restricted pod has."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import containers
from tests.kubernetes.lab_pods import LabPods, PodmanPod, workspace
from tests.lab.lab import Lab, why_not


@pytest.fixture
def pair(tmp_path: Path) -> Iterator[LabPods]:
    """Two nodes on which podman runs containers."""
    containers.demand()
    if why_not():
        pytest.skip(why_not())
    with Lab(2, tmp_path / "lab") as lab:
        made = LabPods(lab, tmp_path)
        try:
            yield made
        finally:
            made.close()


def test_a_job_in_containers(pair: LabPods, tmp_path: Path) -> None:
    """No capability, no new privileges, a uid without an entry in /etc/passwd."""
    text = (
        "import json, os\n"
        "status = open('/proc/self/status').read().split('\\n')\n"
        "caps = [line.split()[1] for line in status if line.startswith(('CapEff', 'NoNewPrivs'))]\n"
        "print(json.dumps([os.getuid(), os.environ['IMAGE_WORD'], os.environ['RANK'], *caps]))\n"
    )
    bundle = pair.bundle(pair.join(), workspace(tmp_path / "work", train_py=text))
    started = pair.start(bundle, uid=1234, kind=PodmanPod)
    assert [pod.wait() for pod in started] == [0, 0], [pod.shown for pod in started]
    for rank, pod in enumerate(started):
        line = json.loads(pod.logs()["trainer", rank, 0])
        assert line == [1234, "image", str(rank), "0000000000000000", "1"]
        assert pod.message == pod.record.end and pod.record.end.state == "succeeded"


@pytest.mark.engines
def test_the_runtime_ends_a_container(pair: LabPods, tmp_path: Path) -> None:
    text = "import time\nprint('ready', flush=True)\ntime.sleep(600)\n"
    started = pair.start(
        pair.bundle(pair.join(), workspace(tmp_path / "work", train_py=text)), uid=1234, kind=PodmanPod
    )
    for pod in started:
        pod.says("ready")
    started[1].term()
    assert [pod.wait() for pod in started] == [75, 75], [pod.shown for pod in started]
    assert "Kubernetes has ended its pod" in started[0].message.reason


@pytest.mark.engines
def test_a_rank_that_exceeds_the_memory_of_its_container(pair: LabPods, tmp_path: Path) -> None:
    """The kernel kills the rank. The verdict names the cgroup of the container, and its limit."""
    text = "import os, time\nx = bytearray(600 << 20) if os.environ['RANK'] == '1' else b''\ntime.sleep(600)\n"

    class Small(PodmanPod):
        memory = "256m"

    started = pair.start(pair.bundle(pair.join(), workspace(tmp_path / "work", train_py=text)), uid=1234, kind=Small)
    assert [pod.wait() for pod in started] == [137, 137], [pod.shown for pod in started]
    for pod in started:
        assert pod.message.failed == ("trainer 1",)
        assert "out of memory: the kernel killed it" in pod.message.reason and "limit 256 MiB" in pod.message.reason
