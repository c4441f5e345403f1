"""A store of elastic jobs on the laptop of a lab."""

from __future__ import annotations

import signal
import subprocess
import time
from pathlib import Path
from typing import Any

from tests import etcd
from tests.cli import until
from tests.lab.lab import LAPTOP, Lab

STORE_PORT = 2379
PATIENCE = 30.0  # seconds


class LabStore:
    """A real etcd on the laptop's machine."""

    def __init__(self, lab: Lab, folder: Path) -> None:
        self._lab, self._folder = lab, folder
        self.url = f"http://{LAPTOP}:{STORE_PORT}"
        self.start()

    def start(self) -> None:
        peers = f"http://{LAPTOP}:{STORE_PORT + 1}"
        argv = etcd.server_argv(self._folder, self.url, peers)
        self.popen = self._lab.laptop(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(lambda: self._ask("endpoint", "health").returncode == 0, PATIENCE, lambda: "etcd to answer")

    def keys(self) -> list[str]:
        return str(self._ask("get", "--prefix", "clustertool/", "--keys-only").stdout).split()

    def _ask(self, *arguments: str) -> Any:
        return self._lab.run(etcd.client_argv(self.url, *arguments), {"ETCDCTL_API": "3"})

    def pause(self, seconds: float) -> None:
        """It does not answer for this time."""
        self.popen.send_signal(signal.SIGSTOP)
        time.sleep(seconds)
        self.popen.send_signal(signal.SIGCONT)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()
