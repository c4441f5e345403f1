"""Pods as plain processes of this machine: enough for tests of the API server, of logs and of exec."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

from tests.kubernetes.api_store import Obj


class PlainContainer:
    """A process with its log; its files are those of this machine, its working directory is its own."""

    def __init__(self, folder: Path, pod: Obj) -> None:
        folder.mkdir(parents=True)
        self.folder, self.log = folder, folder / "log"
        one = pod["spec"]["containers"][0]
        self.env = {**os.environ, "TERMINATION_LOG": str(folder / "termination"), "POD_IP": pod["status"]["podIP"]}
        for variable in one.get("env") or ():
            path = (variable.get("valueFrom") or {}).get("fieldRef", {}).get("fieldPath", "")
            if "'" in path:
                self.env[variable["name"]] = pod["metadata"]["annotations"].get(path.split("'")[1], "")
            elif not path:
                self.env[variable["name"]] = variable.get("value", "")
        argv = [*one.get("command", ()), *one.get("args", ())]
        options = {"cwd": folder, "env": self.env, "start_new_session": True, "stdin": subprocess.DEVNULL}
        out = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = subprocess.Popen(argv, **options, **out)  # type: ignore[call-overload]
        self.log.touch()
        self.copier = threading.Thread(target=self._copy, daemon=True)
        self.copier.start()
        self.termed = False

    def _copy(self) -> None:
        """Put the time in front of each line, as a container runtime does."""
        with self.log.open("ab", buffering=0) as log:
            for line in self.process.stdout:
                stamp = time.strftime("%Y-%m-%dT%H:%M:%S.000000000Z", time.gmtime()).encode()
                log.write(stamp + b" " + line.rstrip(b"\n") + b"\n")

    def poll(self) -> int | None:
        if self.process.poll() is None:
            return None
        self.copier.join(5)
        code = self.process.returncode
        return code if code >= 0 else 128 - code

    def signal(self, kill: bool) -> None:
        if self.process.poll() is None and (kill or not self.termed):
            self.termed = True
            os.killpg(self.process.pid, signal.SIGKILL if kill else signal.SIGTERM)
        if kill:
            self.process.wait(30)

    def message(self) -> str:
        file = self.folder / "termination"
        return file.read_text()[:4096] if file.exists() else ""

    def exec(self, argv: list[str]) -> subprocess.Popen[bytes]:
        pipe = subprocess.PIPE
        return subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe, cwd=self.folder, env=self.env)


class PlainPods:
    """The runtime of all nodes. published: the names that Services give to pods."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.published: list[tuple[str, list[str]]] = []

    def address(self, pod: Obj) -> str:
        return "127.0.0.1"

    def names(self, published: list[tuple[str, list[str]]]) -> None:
        self.published = published

    def start(self, pod: Obj, secrets: dict[str, Obj]) -> PlainContainer:
        return PlainContainer(self.folder / pod["metadata"]["name"], pod)
