"""A folder on the laptop whose conf.py names the API server of the tests, and what lives and lies in that cluster."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

from tests.cli import REPO, Site, until
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.api_store import Obj
from tests.kubernetes.pod_runtime import ApiPod, LabRuntime
from tests.lab.lab import Lab

IMAGE = "example.org/train:1"
KEPT = ("Node", "Namespace", "Event")  # kinds that are no part of a job


class KubeSite(Site):
    """user: of the kubeconfig. Sites of several users may share a server."""

    def __init__(self, folder: Path, server: ApiServer, user: str = "tester") -> None:
        assert isinstance(server.runtime, LabRuntime)
        self.server, self.runtime = server, server.runtime
        super().__init__(folder, self.runtime.lab.n)
        self._home = folder / "home"
        self._home.mkdir()
        self._kubeconfig = server.kubeconfig(folder / "kubeconfig", user)
        self.conf()

    def environ(self, env: Mapping[str, str]) -> dict[str, str]:
        kept = {name: os.environ[name] for name in ("PATH", "LANG") if name in os.environ}
        own = {"HOME": str(self._home), "PYTHONPATH": str(REPO), "KUBECONFIG": str(self._kubeconfig)}
        return {**kept, **own, **env}

    def conf_text(self, **keys: object) -> str:
        settings = {"nodes": 3, "resources": {"cpu": 1}, **keys.pop("KUBERNETES", {})}  # type: ignore[dict-item]
        image = {"image": IMAGE}
        usual = {"ENGINE": "kubernetes", "KUBERNETES": settings, "CONTAINER": image, "GRACE": 3, "LOSS_TIMEOUT": 5}
        return "".join(f"{key} = {value!r}\n" for key, value in {**usual, **keys}.items() if value is not None)

    def name(self, node: int) -> str:
        return f"pod {node}"

    def close(self) -> None:
        """End the commands. Pods end with their server."""
        for running in self.running:
            running.close()

    # -- the cluster

    @property
    def living_pods(self) -> list[ApiPod]:
        return [pod for pod in self.runtime.pods.values() if pod.popen.poll() is None]

    def objects(self, kind: str) -> list[Obj]:
        return self.server.store.list(kind)

    def pods(self, count: int = 3) -> list[Obj]:
        """The pods of the only job, in the order of their nodes, once they run."""

        def running() -> list[Obj]:
            return [pod for pod in self.objects("Pod") if pod["status"].get("phase") == "Running"]

        until(lambda: len(running()) == count, 60, lambda: f"{count} pods: {self.objects('Pod')}")
        return sorted(running(), key=lambda pod: pod["metadata"]["name"])

    def left(self) -> list[str]:
        """The objects of jobs."""
        with self.server.store.changed:
            return sorted(f"{kind} {name}" for kind, _, name in self.server.store.objects if kind not in KEPT)

    def kubectl(self, *argv: str) -> str:
        """Its output."""
        env = {"HOME": str(self._home), "KUBECONFIG": str(self._kubeconfig), "PATH": os.environ["PATH"]}
        done = subprocess.run(["kubectl", *argv], env=env, capture_output=True, text=True, timeout=60)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def is_empty(self, seconds: float = 60) -> None:
        """Wait until no object of a job is left, and no process of a pod."""
        until(lambda: not self.left() and not self.living_pods, seconds, lambda: f"{self.left()} {self.living_pods}")


def lab_server(lab: Lab, folder: Path, **nodes: int) -> ApiServer:
    """A server whose pods are on the nodes of a lab."""
    (folder / "pods").mkdir(parents=True)
    return ApiServer(LabRuntime(lab, folder / "pods"), **nodes)
