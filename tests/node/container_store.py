"""Stores of images and containers of one test module: podman's own, or those of a docker daemon. Each has one image."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests import containers
from tests.node.harness import until

_STORAGE = '[storage]\ndriver = "overlay"\ngraphroot = "{top}/graph"\nrunroot = "{run}"\n'
_IMAGE_ENV = "FROM_IMAGE=image SLURM_PROCID=7 RANK=77 PATH=/opt/image/bin:/usr/bin:/bin HOME=/opt/image/home".split()


@dataclass
class Store:
    """env: variables by which the program uses it. image: the id of its image."""

    env: dict[str, str]
    program: str
    image: str = ""

    @property
    def runtime(self) -> str:
        return Path(self.program).name

    def run(self, *args: str, **more: Any) -> str:
        env = {**os.environ, **self.env}
        done = subprocess.run([self.program, *args], env=env, text=True, capture_output=True, check=True, **more)
        return done.stdout

    def left(self) -> list[str]:
        """Its containers, running or not."""
        return self.run("ps", "--all", "--format", "{{.Names}} {{.Status}}").splitlines()

    def fill(self, top: Path) -> None:
        """Import the image."""
        asked = [token for change in _IMAGE_ENV for token in ("--change", f"ENV {change}")]
        with containers.make_image(top).open("rb") as file:
            self.image = self.run("import", *asked, "-", "ct-test:1", stdin=file).strip()


def _program(name: str) -> str:
    found = shutil.which(name)
    if os.getuid() or found is None:
        why = f"needs root and {name}"
        pytest.fail(why) if os.environ.get("DEMAND_ENGINES") == "1" else pytest.skip(why)
    return found


@contextlib.contextmanager
def open_podman(top: Path) -> Iterator[Store]:
    containers.demand()
    run = tempfile.mkdtemp(prefix="ct-", dir="/tmp")  # "container cleanup" refuses a path of more than 50 characters
    (top / "storage.conf").write_text(_STORAGE.format(top=top, run=run))
    # Locks and state of its own: `system reset` would remove those of the tests next to it.
    private = f'lock_type = "file"\ntmp_dir = "{top}/tmp"\n'
    (top / "containers.conf").write_text(containers.SETTINGS.replace("[engine]\n", f"[engine]\n{private}"))
    env = {"CONTAINERS_STORAGE_CONF": f"{top}/storage.conf", "CONTAINERS_CONF": f"{top}/containers.conf"}
    made = Store(env, _program("podman"))
    made.fill(top)
    yield made
    made.run("system", "reset", "--force")
    shutil.rmtree(run, ignore_errors=True)


class Docker(Store):
    """Its daemon has no network of its own."""

    def __init__(self, top: Path) -> None:
        super().__init__({"DOCKER_HOST": f"unix://{top}/sock", "DOCKER_CONFIG": str(top)}, _program("docker"))
        self._argv = [_program("dockerd"), "--iptables=false", "--ip6tables=false", "--bridge=none"]
        self._argv += ["--storage-driver=vfs", f"--data-root={top}/data", f"--exec-root={top}/run"]
        self._argv += [f"--pidfile={top}/pid", f"--host=unix://{top}/sock"]
        self._top = top
        self.start()

    def start(self) -> None:
        for name in ("pid", "run/containerd/containerd.pid"):  # of a daemon that was killed
            (self._top / name).unlink(missing_ok=True)
        with (self._top / "log").open("ab") as log:
            self.daemon = subprocess.Popen(self._argv, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        until(self._answers, f"the daemon answers: {(self._top / 'log').read_text()[-1000:]}")

    def _answers(self) -> bool:
        try:
            return bool(self.run("version"))
        except subprocess.CalledProcessError:
            return False

    def kill(self) -> None:
        """The daemon, and containerd, which it has started."""
        for pid in [self.daemon.pid, *below(self.daemon.pid)]:
            with contextlib.suppress(ProcessLookupError):  # containerd ends with the daemon
                os.kill(pid, signal.SIGKILL)
        self.daemon.wait()

    def end(self) -> None:
        self.daemon.terminate()
        self.daemon.wait(60)
        for line in Path("/proc/mounts").read_text().splitlines():
            mounted = line.split()[1]
            if mounted.startswith(f"{self._top}/"):
                subprocess.run(["umount", "--lazy", mounted], check=True)


@contextlib.contextmanager
def open_docker(top: Path) -> Iterator[Store]:
    made = Docker(top)
    try:
        made.fill(top)
        yield made
    finally:
        made.end()


def below(pid: int) -> list[int]:
    """The descendants of a process, without those that end meanwhile."""
    children = []
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                children += [int(text) for text in (task / "children").read_text().split()]
    return [one for child in children for one in (child, *below(child))]
