"""The examples learn in three pods what they learn by ssh on the machines of these pods."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases import small_word2vec
from tests.cli import LabSite, Site
from tests.frameworks.examples import TIMEOUT, digits_job, find_venv, prepare
from tests.kubernetes.kube_site import KubeSite
from tests.lab.lab import Lab

NODES = 3


@pytest.fixture
def by_ssh(machines: Lab, tmp_path: Path) -> Iterator[LabSite]:
    """The first machines of the lab, without Kubernetes."""
    site = LabSite(tmp_path / "ssh", machines)
    yield site
    site.close()


def losses(site: Site, pattern: str, folder: Path, *options: object) -> dict[str, list[str]]:
    """Of each trainer, in the order of the steps."""
    done = site.inv("run", "--workspace", folder, "--all-ranks", *options, timeout=TIMEOUT).ends(0)
    found: dict[str, list[str]] = {}
    for line in done.out.splitlines():
        of = re.match(r"\[(trainer \d+) [^]]*\] (.*)", line)
        loss = re.search(pattern, of[2]) if of else None
        if of and loss:
            found.setdefault(of[1], []).append(loss[1])
    return found


def same(site: KubeSite, by_ssh: LabSite, venv: Path, pattern: str, folder: Path, *options: object) -> None:
    """In pods whose image has this environment of Python, and by ssh."""
    path = {"PATH": f"{venv}/bin:/usr/bin:/bin"}
    site.runtime.image = (str(venv),)
    site.conf(ENV=path)
    by_ssh.conf(HOSTS=[by_ssh.lab.name(node) for node in range(NODES)], ENV=path)
    learned = losses(site, pattern, folder, *options)
    assert learned and all(learned.values())
    assert learned == losses(by_ssh, pattern, folder, *options)


@pytest.mark.engines
def test_word2vec(site: KubeSite, by_ssh: LabSite) -> None:
    """In sync mode pservers sum what trainers send in the order of the trainers, so all losses are equal."""
    site.workspace()
    whole = r"^trained steps=\d+ loss=([0-9.]+)"  # the other lines come by the clock
    same(site, by_ssh, Path(sys.prefix), whole, small_word2vec(site.folder), "--server-num", 1, "--worker-num", 1)


@pytest.mark.engines
def test_digits_torch(site: KubeSite, by_ssh: LabSite, tmp_path: Path) -> None:
    folder = digits_job(site.folder, prepare(tmp_path / "digits", "--shards", "6"))
    same(site, by_ssh, find_venv("digits-torch"), r"\bloss=([0-9.]+)", folder, "--nproc-per-node", 1)
