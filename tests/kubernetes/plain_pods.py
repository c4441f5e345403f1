"""Pods as plain processes of this machine: enough for tests of the API server, of logs and of exec."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(argv, stdout=log, stderr=subprocess.STDOUT, **options)
        self.termed = False

    def poll(self) -> int | None:
        code = self.process.poll()
        return code if code is None or code >= 0 else 128 - code

    def signal(self, kill: bool) -> None:
        if self.process.poll() is None and (kill or not self.termed):
            self.termed = True
            os.killpg(self.process.pid, signal.SIGKILL if kill else signal.SIGTERM)
        if kill:
            self.process.wait(30)

    def message(self) -> str:
        file = self.folder / "termination"
        return file.read_text()[:4096] if file.exists() else ""

    def exec(self, argv: Sequence[str]) -> tuple[list[str], dict[str, Any]]:
        return [*argv], {"cwd": self.folder, "env": self.env}


class PlainPods:
    """The runtime of all nodes, without names of pods."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def address(self, pod: Obj) -> str:
        return "127.0.0.1"

    def publish(self, services: Sequence[Obj], pods: Sequence[Obj]) -> None:
        return

    def start(self, pod: Obj, secrets: dict[str, Obj]) -> PlainContainer:
        return PlainContainer(self.folder / pod["metadata"]["name"], pod)
