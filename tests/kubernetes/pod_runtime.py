"""The kubelets of the API server of the tests: each pod is a node of a lab, with a root folder and a process namespace."""

from __future__ import annotations

import atexit
import base64
import contextlib
import functools
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.kubernetes.api_store import Obj, matches
from tests.kubernetes.lab_pods import LabPod, PodmanPod
from tests.lab.lab import PATH, Lab
from tests.node_code import CACHE, NodeCode, add_compiled

_PYTHON = f"{sys.base_prefix}/bin/python3"
_EXEC = "import os, sys\ntry: os.execvp(sys.argv[1], sys.argv[1:])\nexcept OSError as error: sys.exit(f'exec: {error}')"
Published = list[tuple[str, list[str]]]  # an address, and its names


@functools.cache
def _code_of(user: int) -> Path:
    """Install the node's code once for all pods of a user."""
    folder = Path(tempfile.mkdtemp(prefix="ct-code-"))
    atexit.register(shutil.rmtree, folder)
    NodeCode(folder)
    for path in folder.rglob("*"):
        os.chown(path, user, user)
    return folder / CACHE


class ApiPod(LabPod):
    """A pod whose container is that of an object."""

    def __init__(
        self, lab: Lab, node: int, folder: Path, pod: Obj, bundle: bytes, names: Published, image: tuple[str, ...]
    ) -> None:
        self.image = image
        self.uid_of_object, self._names = pod["metadata"]["uid"], names
        self._env = _variables(pod)
        user = (pod["spec"].get("securityContext") or {}).get("runAsUser", 0)
        self.code = _code_of(user)
        inlet, outlet = os.pipe()
        super().__init__(lab, node, folder, bundle, self._env, user, {}, outlet, ())
        os.close(outlet)
        self.log = folder / "log"
        self.log.touch()
        self._copier = threading.Thread(target=self._copy, args=(inlet,), daemon=True)
        self._copier.start()
        self._termed = False

    def _prepare(self, bundle: bytes) -> None:
        super()._prepare(bundle)
        self.publish(self._names)

    def publish(self, names: Published) -> None:
        """What the DNS of the cluster answers in this pod."""
        lines = ["127.0.0.1 localhost", *(f"{address} {' '.join(of)}" for address, of in names)]
        self.at("etc/hosts").write_text("\n".join(lines) + "\n")

    def _copy(self, inlet: int) -> None:
        """As a container runtime does, whose pipe can be full."""
        with os.fdopen(inlet, "rb", buffering=0) as source, self.log.open("ab", buffering=0) as log:
            while data := source.read(1 << 16):
                log.write(data)

    @property
    def shown(self) -> str:
        return f"{self.log.read_text(errors='replace')[-3000:]} {self.err.read_text(errors='replace')[-3000:]}"

    # -- what the controllers ask of a container

    def poll(self) -> int | None:
        if self.popen.poll() is None:
            return None
        self._copier.join(5)
        code = self.popen.returncode
        return code if code >= 0 else 128 - code

    def signal(self, kill: bool) -> None:
        if kill:
            self.end()
        elif not self._termed and self.popen.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                self._termed = self.term()

    def message(self) -> str:
        return self.termination.read_text()[:4096]

    def exec(self, argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        space = ["nsenter", "-t", str(self.first), "-m", "-p", "-u", "-n", "-i"]
        user = ["chroot", f"--userspec={self.uid}:{self.uid}", "--groups=", str(self.root)]
        env = {"PATH": f"{sys.base_prefix}/bin:{PATH}", "HOME": "/", **self._env}
        return [*space, *user, _PYTHON, "-c", _EXEC, *argv], {"env": env}


class PodmanApiPod(ApiPod, PodmanPod):
    """The same as a container of podman. It reads the hosts file that publish() writes."""

    def _hosts(self) -> list[str]:
        return ["--no-hosts"]

    def exec(self, argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        return self._podman("exec", "--interactive", self.name, *argv), {"env": {"PATH": PATH}}


class LabRuntime:
    """The runtime of all machines of the cluster. A pod has a node of the lab for itself while it lives. image: folders of this
    machine that images have besides Python. kind: of the pods."""

    image: tuple[str, ...] = ()
    kind: type[ApiPod] = ApiPod

    def __init__(self, lab: Lab, folder: Path) -> None:
        self.lab, self.folder = lab, folder
        self.pods: dict[str, ApiPod] = {}  # by the uid of their objects
        self._places: dict[str, int] = {}
        self._published: Published = []

    def address(self, pod: Obj) -> str:
        """Waits for a node that is free."""
        uid, end = pod["metadata"]["uid"], time.monotonic() + 60
        while uid not in self._places:
            taken = {
                place for one, place in self._places.items() if one not in self.pods or self.pods[one].poll() is None
            }
            free = [node for node in range(self.lab.n) if node not in taken]
            if free:
                self._places[uid] = free[0]
            elif time.monotonic() > end:
                raise AssertionError("the lab has too few nodes for the pods of this test")
            else:
                time.sleep(0.1)
        return self.lab.address(self._places[uid])

    def publish(self, services: Sequence[Obj], pods: Sequence[Obj]) -> None:
        found: Published = []
        for service in services:
            namespace, name = service["metadata"]["namespace"], service["metadata"]["name"]
            selector = ",".join(f"{key}={value}" for key, value in service["spec"]["selector"].items())
            for pod in pods:
                spec, address = pod["spec"], pod["status"].get("podIP")
                if (
                    address
                    and spec.get("subdomain") == name
                    and matches(pod, selector, f"metadata.namespace={namespace}")
                ):
                    ends = ("", f".{namespace}", f".{namespace}.svc", f".{namespace}.svc.cluster.local")
                    found.append((address, [f"{spec['hostname']}.{name}{end}" for end in ends]))
        if found != self._published:
            self._published = found
            for one in self.pods.values():
                one.publish(found)

    def start(self, pod: Obj, secrets: Mapping[str, Obj]) -> ApiPod:
        self.address(pod)
        (secret,) = secrets.values()
        bundle, meta = add_compiled(base64.b64decode(secret["data"]["bundle.pyz"])), pod["metadata"]
        node = self._places[meta["uid"]]
        made = self.kind(self.lab, node, self.folder / meta["name"], pod, bundle, self._published, self.image)
        self.pods[meta["uid"]] = made
        return made

    def close(self) -> None:
        for pod in self.pods.values():
            pod.end()
            shutil.rmtree(pod.folder)


def _variables(pod: Obj) -> dict[str, str]:
    found = {"KUBERNETES_SERVICE_HOST": "10.96.0.1"}
    for variable in pod["spec"]["containers"][0].get("env") or ():
        path = (variable.get("valueFrom") or {}).get("fieldRef", {}).get("fieldPath", "")
        if "'" in path:
            found[variable["name"]] = pod["metadata"]["annotations"].get(path.split("'")[1], "")
        elif path == "status.podIP":
            found[variable["name"]] = pod["status"]["podIP"]
        else:
            found[variable["name"]] = variable.get("value", "")
    return found
