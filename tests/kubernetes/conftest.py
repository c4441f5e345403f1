"""Clusters of Kubernetes for tests: a test API server whose pods are on the nodes of a lab."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kubernetes.kube_site import KubeSite, lab_server
from tests.lab.lab import Lab, why_not

_DEMANDED = os.environ.get("DEMAND_ENGINES") == "1"
_NODES = 7  # two jobs of three pods, and one that comes back


@pytest.fixture(scope="module")
def machines(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The machines of a cluster, for all tests of a module. Skip where no lab can run. DEMAND_ENGINES=1: fail."""
    if reason := why_not():
        pytest.fail(f"DEMAND_ENGINES=1, but {reason}") if _DEMANDED else pytest.skip(reason)
    with Lab(_NODES, tmp_path_factory.mktemp("kube") / "lab") as lab:
        yield lab


@pytest.fixture
def site(machines: Lab, tmp_path: Path) -> Iterator[KubeSite]:
    """A folder of a user of a new cluster. At the end no process of a pod is left."""
    with contextlib.ExitStack() as ends:
        server = lab_server(machines, tmp_path / "cluster")
        made = KubeSite(tmp_path / "site", server)
        ends.callback(made.runtime.close)  # the last: controllers read the files of pods
        ends.enter_context(server)
        ends.callback(made.close)
        yield made


@pytest.fixture
def kubectl_here() -> None:
    if shutil.which("kubectl") is None:
        why = "there is no kubectl: scripts/engine-packages.sh installs it"
        pytest.fail(why) if _DEMANDED else pytest.skip(why)


@pytest.fixture
def another_user(site: KubeSite, tmp_path: Path) -> Iterator[Callable[[str], KubeSite]]:
    """another_user("bob") -> the folder of that user, of the same cluster and namespace."""
    with contextlib.ExitStack() as ends:

        def make(name: str) -> KubeSite:
            site.server.add_user(name, None)
            return ends.enter_context(contextlib.closing(KubeSite(tmp_path / name, site.server, name)))

        yield make
