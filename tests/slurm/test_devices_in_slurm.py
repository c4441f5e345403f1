"""Devices that Slurm allocates: Slurm is real, and a library in the place of NVIDIA's shows the devices."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import pytest

from tests import nvml
from tests.cli import until
from tests.slurm.queue_jobs import is_over
from tests.slurm.slurm_site import SlurmSite

SHOW = """
    import os, time
    names = ("RANK", "LOCAL_RANK", "CUDA_VISIBLE_DEVICES", "FLAGS_selected_gpus")
    print("sees", *(os.environ.get(name, "none") for name in names), flush=True)
    while os.path.exists(os.path.expanduser("~/wait")):
        time.sleep(0.05)
"""


def seen(site: SlurmSite, job: str) -> list[str]:
    return sorted(re.findall(r"sees (.*)", site.clustertool("logs", "--job", job, "--all-ranks").out))


@pytest.mark.engines
def test_devices_are_those_that_slurm_has_allocated(slurm: Callable[..., SlurmSite]) -> None:
    """By their numbers on the node, without a lock. Options count within the allocation."""
    site = slurm(2, gpus=3)
    nvml.make(site.shared / "driver")
    python = site.shared / "python"
    python.write_text(f'#!/bin/sh\nexport LD_LIBRARY_PATH="$HOME/driver"\nexec {sys.executable} "$@"\n')
    python.chmod(0o755)
    site.conf(PYTHON="~/python")
    site.workspace(train_py=SHOW)
    (site.shared / "wait").touch()
    run = ("run", "--workspace", "job", "--detach", "--nnodes")
    first = site.clustertool(*run, 2, "--gpus-per-node", 2).ends(0).job
    ranks = ["0 0 0,1 0", "1 1 0,1 1", "2 0 0,1 0", "3 1 0,1 1"]
    until(lambda: seen(site, first) == ranks, what=lambda: str(seen(site, first)))
    second = site.clustertool(*run, 1, "--gpus-per-node", 1, "--devices", "0").ends(0).job
    until(
        lambda: seen(site, second) == ["0 0 2 0"], what=lambda: str(seen(site, second))
    )  # device 2 of the node is number 0 of the allocation
    node = site.clustertool("gpus", "--json").ends(0).json["nodes"]["node0"]
    assert [(one["total"], one["used"]) for one in node["gpus"]] == [(3, 3)], node
    bare = site.clustertool(*run, 1).ends(0).job
    until(lambda: seen(site, bare) == ["0 0 none none"])
    (site.shared / "wait").unlink()
    for job in (first, second, bare):
        site.clustertool("attach", "--job", job).ends(0)
        is_over(site, job)
    done = site.clustertool("run", "--workspace", "job", "--nnodes", 1, "--gpus-per-node", 1, "--devices", "0,1").ends(
        69
    )
    assert "there is no device 1 (--devices)" in (site.root(0) / f".clustertool/queue/{done.job}/slurm.out").read_text()
