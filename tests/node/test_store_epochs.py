"""Elastic jobs with a store: a real etcd decides which member coordinates."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from clustertool.model.config.elastic_settings import ElasticServer, ElasticSettings
from tests.etcd import client_argv, server_argv
from tests.node.harness import until
from tests.node.joining import JoinBench, Machine, codes, free_port
from tests.node.test_epochs import WAIT, end, recorded, running, says


class Etcd:
    """A server on loopback, with its own folder."""

    def __init__(self, folder: Path) -> None:
        self._folder, self.port, self._peers = folder, free_port(), free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        peers = f"http://127.0.0.1:{self._peers}"
        argv = server_argv(self._folder, self.url, peers)
        self.popen = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self.answers, "etcd answers")

    def answers(self) -> bool:
        return "epoch" in self.keys() or self._ask("endpoint", "health").returncode == 0

    def keys(self) -> str:
        return self._ask("get", "--prefix", "clustertool/", "--keys-only").stdout

    def _ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = client_argv(self.url, *arguments)
        env = {**os.environ, "ETCDCTL_API": "3"}
        return subprocess.run(argv, env=env, capture_output=True, text=True, check=False)

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()


class Relay:
    """A port that leads to another one of this machine, until it is closed."""

    def __init__(self, to: int) -> None:
        self._to = to
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._sockets: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                ours, _ = self._listener.accept()
                theirs = socket.create_connection(("127.0.0.1", self._to))
                self._sockets += [ours, theirs]
                for source, target in ((ours, theirs), (theirs, ours)):
                    threading.Thread(target=self._copy, args=(source, target), daemon=True).start()

    def _copy(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)

    def close(self) -> None:
        for sock in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()


def use_relay(machine: Machine, relay: Relay) -> None:
    """This machine alone has another address of the server."""
    job = machine.join.job
    server = replace(job.elastic.server, urls=(f"http://127.0.0.1:{relay.port}",))
    machine.join = replace(machine.join, job=replace(job, elastic=replace(job.elastic, server=server)))


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    if not shutil.which("etcd"):
        if os.environ.get("DEMAND_ENGINES"):
            pytest.fail("etcd is missing: scripts/engine-packages.sh installs it")
        pytest.skip("needs etcd (package etcd-server)")
    server = Etcd(tmp_path / "etcd")
    yield server
    server.kill()


def with_store(machines: list[Machine], least: int, most: int, etcd: Etcd, **more: object) -> list[Machine]:
    server = ElasticServer((etcd.url,))
    settings = ElasticSettings(least, most, server=server, **{"timeout": 30.0, **more})  # type: ignore[arg-type]
    for machine in machines:
        machine.join = replace(machine.join, job=replace(machine.join.job, elastic=settings))
    return machines


def test_a_job_leaves_its_record_only(join_bench: JoinBench, etcd: Etcd) -> None:
    machines = with_store(join_bench.job(2, "echo done"), 2, 2, etcd)
    for machine in machines:
        machine.start()
    assert codes(machines) == [0, 0], [one.lines for one in machines]
    job = machines[0].join.identity.job_id
    assert etcd.keys().split() == [f"clustertool/{job}/epoch"]


def test_the_coordinator_is_lost(join_bench: JoinBench, etcd: Etcd) -> None:
    """Another member takes over. The lost one joins again, as any other node."""
    machines = running(with_store(join_bench.job(3, WAIT), 2, 3, etcd, grow="restart"))
    machines[0].signal(signal.SIGKILL)
    assert machines[0].wait() == -signal.SIGKILL
    says(machines[1], 1, 0, 2)
    says(machines[2], 1, 1, 2)
    machines[0].start()
    says(machines[0], 2, 1, 3)  # the coordinator has the first rank
    stopped = [machines[1], machines[2], machines[0]]
    end(stopped)


def test_a_node_is_lost(join_bench: JoinBench, etcd: Etcd) -> None:
    machines = running(with_store(join_bench.job(3, WAIT), 2, 3, etcd))
    machines[2].signal(signal.SIGKILL)
    says(machines[0], 1, 0, 2)
    says(machines[1], 1, 1, 2)
    end(machines[:2])


def test_a_short_outage_of_the_store_has_no_effect(join_bench: JoinBench, etcd: Etcd) -> None:
    machines = running(with_store(join_bench.job(2, WAIT), 2, 2, etcd))
    etcd.popen.send_signal(signal.SIGSTOP)
    with pytest.raises(subprocess.TimeoutExpired):
        etcd.popen.wait(3.0)  # LOSS_TIMEOUT is 5
    etcd.popen.send_signal(signal.SIGCONT)
    with pytest.raises(subprocess.TimeoutExpired):
        etcd.popen.wait(4.0)
    assert not any(machine.events("epoch-ended") or machine.events("lease-lost") for machine in machines)
    end(machines)


def test_a_long_outage_of_the_store_ends_the_ranks_until_it_is_back(join_bench: JoinBench, etcd: Etcd) -> None:
    machines = running(with_store(join_bench.job(2, WAIT), 2, 2, etcd, timeout=60.0))
    etcd.kill()
    for machine in machines:
        until(lambda one=machine: one.events("epoch-ended"), "its ranks have ended", 30.0)  # type: ignore[misc]
    etcd.start()
    attempts = until(
        lambda: [
            one["attempt"] for one in machines[0].events("started") + machines[1].events("started") if one["attempt"]
        ],
        "another epoch begins",
        60.0,
    )
    assert min(attempts) >= 1
    end(machines)


def test_a_node_that_does_not_reach_the_store_ends_its_ranks(join_bench: JoinBench, etcd: Etcd) -> None:
    """Although it reaches the coordinator. Only this node has another address of the server, which does not answer later."""
    machines = with_store(join_bench.job(3, WAIT), 2, 3, etcd)
    relay = Relay(etcd.port)
    use_relay(machines[2], relay)
    running(machines)
    relay.close()
    until(lambda: machines[2].events("lease-lost"), "its ranks have ended", 30.0)
    says(machines[0], 1, 0, 2)
    says(machines[1], 1, 1, 2)
    for machine in machines[:2]:
        assert not machine.events("lease-lost")
    machines[2].signal(signal.SIGKILL)
    machines[2].wait()
    end(machines[:2])


@pytest.mark.chaos
def test_a_coordinator_that_gathers_and_loses_the_store_leaves_the_epoch_to_another_node(
    join_bench: JoinBench, etcd: Etcd
) -> None:
    """Node 0 waits for the lease of node 2 when it does not reach the store any more. Node 1 goes on without it."""
    machines = with_store(join_bench.job(3, WAIT), 1, 3, etcd)
    relay = Relay(etcd.port)
    use_relay(machines[0], relay)
    running(machines)
    machines[2].signal(signal.SIGKILL)
    machines[2].wait()
    until(lambda: len(machines[1].reports("joined")) > 1, "node 0 has the next epoch, and gathers")
    relay.close()
    attempts = until(
        lambda: [one["attempt"] for one in machines[1].events("started") if one["attempt"]], "another one begins", 60.0
    )
    says(machines[1], attempts[-1], 0, 1)
    assert machines[0].wait() == 75 and "the store of the job is not reached" in machines[0].error
    end(machines[1:2])


@pytest.mark.chaos
def test_a_node_that_comes_back_after_a_stop_records_that_the_job_was_stopped(
    join_bench: JoinBench, etcd: Etcd
) -> None:
    machines = with_store(join_bench.job(3, WAIT), 1, 3, etcd, timeout=3.0)
    recorded(machines)
    for machine in machines[:2]:
        machine.start()
    says(machines[0], 0, 0, 2)
    end(machines[:2])
    assert codes([machines[2].start()]) == [143]
    (ended,) = machines[2].events("ended")
    assert (ended["state"], ended["code"]) == ("stopped", 143)
