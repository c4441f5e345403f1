"""The program in a native PaddleJob that ends pservers with the workers: real processes on the loopback."""

from __future__ import annotations

import contextlib
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from clustertool.engines.kubernetes import native_pod
from tests.cli import until
from tests.free_ports import free_port

TEXT = Path(native_pod.__file__).read_text()
SERVE = "import time; print('serves', flush=True); time.sleep(600)"


class Pods:
    """The pods of a job as the operator starts them: two workers and one pserver, or heter trainer."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._port = free_port() - native_pod.LAST_PORT  # the last port of a pod is free
        self.running: list[subprocess.Popen[bytes]] = []

    def start(self, role: str, number: int, *command: str, endpoints: str = "PADDLE_PSERVERS_IP_PORT_LIST") -> int:
        env = {
            "PADDLE_TRAINER_ID": str(number),
            "PADDLE_TRAINERS_NUM": "2",
            "PADDLE_PORT": str(self._port),
            endpoints: f"127.0.0.1:{self._port}",
        }
        log = (self._folder / f"{role}-{number}").open("wb")
        argv = [sys.executable, "-c", TEXT, role, *command]
        self.running.append(subprocess.Popen(argv, env=env, stdout=log, stderr=subprocess.STDOUT))
        log.close()
        return len(self.running) - 1

    def serve(self, role: str = "ps") -> int:
        found = self.start(role, 0, sys.executable, "-c", SERVE)
        until(lambda: "serves" in self.log(role, 0), 20)
        return found

    def worker(self, number: int, code: int, **more: str) -> int:
        return self.start("worker", number, sys.executable, "-c", f"raise SystemExit({code})", **more)

    def log(self, role: str, number: int) -> str:
        return (self._folder / f"{role}-{number}").read_text()

    def code(self, index: int, seconds: float = 20) -> int:
        return self.running[index].wait(seconds)


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Pods]:
    made = Pods(tmp_path)
    yield made
    for one in made.running:
        with contextlib.suppress(ProcessLookupError):
            one.terminate()
        one.wait(20)


def test_a_pserver_ends_with_success_when_all_workers_are_done(pods: Pods) -> None:
    server = pods.serve()
    assert pods.code(pods.worker(0, 0)) == 0
    assert pods.code(pods.worker(0, 0)) == 0, "a worker that comes twice counts once"
    assert pods.running[server].poll() is None
    assert pods.code(pods.worker(1, 0)) == 0
    assert pods.code(server) == 0
    assert "all workers are done" in pods.log("ps", 0)


def test_a_heter_trainer_ends_with_the_workers(pods: Pods) -> None:
    server = pods.serve("heter")
    for number in range(2):
        assert pods.code(pods.worker(number, 0, endpoints="PADDLE_HETER_ENDPOINTS")) == 0
    assert pods.code(server) == 0


def test_a_pserver_ends_when_a_worker_has_failed(pods: Pods) -> None:
    server = pods.serve()
    assert pods.code(pods.worker(1, 7)) == 7, "the exit code of the command is that of the pod"
    assert pods.code(server) == 1
    assert "a worker has failed" in pods.log("ps", 0)


def test_what_is_no_worker_ends_nothing(pods: Pods) -> None:
    server = pods.serve()
    for data in (b"\n", b"x y\n", b"GET / HTTP/1.1\r\n\r\n", b"1 2 3\n"):
        with socket.create_connection(("127.0.0.1", pods._port + native_pod.LAST_PORT), 5) as connection:
            connection.sendall(data)
            connection.settimeout(10)
            with contextlib.suppress(ConnectionResetError):
                assert connection.recv(1) == b""
    assert pods.running[server].poll() is None


def test_the_signal_of_the_kubelet_reaches_the_command(pods: Pods) -> None:
    server = pods.serve()
    pods.running[server].send_signal(signal.SIGTERM)
    assert pods.code(server) == 143


def test_a_pserver_that_ends_by_itself_has_its_own_exit_code(pods: Pods) -> None:
    assert pods.code(pods.start("ps", 0, sys.executable, "-c", "raise SystemExit(3)")) == 3
