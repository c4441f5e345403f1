"""Clusters of Kubernetes for tests: a test API server whose pods are on the nodes of a lab."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.kubernetes.kube_site import KubeSite, lab_server
from tests.lab.lab import Lab, why_not

_NODES = 7  # two jobs of three pods, and one that comes back
_NEEDED = ("kubernetes", "kubernetes_validate", "wsproto", "yaml")


def why_no_kubernetes() -> str:
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    return f"missing: {', '.join(missing)}" if missing else why_not()


@pytest.fixture(scope="session")
def kubernetes_here() -> None:
    """Skip where the packages are not installed. DEMAND_ENGINES=1: fail."""
    reason = why_no_kubernetes()
    if reason and os.environ.get("DEMAND_ENGINES") == "1":
        pytest.fail(f"DEMAND_ENGINES=1, but {reason}")
    if reason:
        pytest.skip(reason)


@pytest.fixture(scope="module")
def machines(kubernetes_here: None, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Lab]:
    """The machines of a cluster, for all tests of a module."""
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
        if os.environ.get("DEMAND_ENGINES") == "1":
            pytest.fail("DEMAND_ENGINES=1, but there is no kubectl")
        pytest.skip("there is no kubectl")


@pytest.fixture
def another_user(site: KubeSite, tmp_path: Path) -> Iterator[Callable[[str], KubeSite]]:
    """another_user("bob") -> the folder of that user, of the same cluster and namespace."""
    with contextlib.ExitStack() as ends:

        def make(name: str) -> KubeSite:
            site.server.add_user(name, None)
            return ends.enter_context(contextlib.closing(KubeSite(tmp_path / name, site.server, name)))

        yield make
