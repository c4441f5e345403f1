"""Elastic jobs with a store: a real etcd decides which member coordinates."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from clustertool.model.config.elastic_keys import ElasticServer, ElasticSettings
from clustertool.model.paths import JobPaths
from clustertool.node.jobs import supervisor_client
from tests.etcd import client_argv, make_certificate, server_argv
from tests.free_ports import free_port
from tests.node.harness import until
from tests.node.joining import JoinBench, Machine, codes
from tests.node.test_epochs import WAIT, end, recorded, running, says

if TYPE_CHECKING:
    from clustertool.model.wire.supervisor_messages import LeaveCommand


class Etcd:
    """A server on loopback, with its own folder. server, client: options of both."""

    def __init__(
        self, folder: Path, scheme: str = "http", server: Sequence[str] = (), client: Sequence[str] = ()
    ) -> None:
        self._folder, self.port, self._peers = folder, free_port(), free_port()
        self._server, self.client = server, [*client]
        self.url = f"{scheme}://127.0.0.1:{self.port}"
        self.start()

    def start(self) -> None:
        peers = f"http://127.0.0.1:{self._peers}"
        argv = [*server_argv(self._folder, self.url, peers), *self._server]
        self.popen = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        until(self.answers, "etcd answers")

    def answers(self) -> bool:
        return "epoch" in self.keys() or self.ask("endpoint", "health").returncode == 0

    def keys(self) -> str:
        return self.ask("get", "--prefix", "clustertool/", "--keys-only").stdout

    def ask(self, *arguments: str) -> subprocess.CompletedProcess[str]:
        argv = client_argv(self.url, *self.client, *arguments)
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


def etcd_or_skip() -> None:
    if not shutil.which("etcd"):
        if os.environ.get("DEMAND_ENGINES"):
            pytest.fail("etcd is missing: scripts/engine-packages.sh installs it")
        pytest.skip("needs etcd (package etcd-server)")


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[Etcd]:
    etcd_or_skip()
    server = Etcd(tmp_path / "etcd")
    yield server
    server.kill()


@pytest.fixture
def closed_etcd(tmp_path: Path) -> Iterator[Etcd]:
    """With TLS. The user `train` has the rights that docs/elastic.md names; others have none."""
    etcd_or_skip()
    certificate, key = (str(path) for path in make_certificate(tmp_path))
    server = Etcd(
        tmp_path / "etcd", "https", ["--cert-file", certificate, "--key-file", key], ["--cacert", certificate]
    )
    for command in (
        "user add root:secret",
        "user add train:s3:cret",
        "role add trainer",
        "role grant-permission trainer readwrite clustertool/ --prefix=true",
        "user grant-role train trainer",
        "auth enable",
    ):
        assert server.ask(*command.split()).returncode == 0, command
    server.client += ["--user", "train:s3:cret"]
    yield server
    server.kill()


def with_store(machines: list[Machine], least: int, most: int, etcd: Etcd, **more: object) -> list[Machine]:
    return with_server(machines, least, most, ElasticServer((etcd.url,)), **more)


def with_server(machines: list[Machine], least: int, most: int, server: ElasticServer, **more: object) -> list[Machine]:
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


def test_a_server_with_tls_and_a_password(join_bench: JoinBench, closed_etcd: Etcd, tmp_path: Path) -> None:
    """The first one of the servers does not answer. No rank gets what is only for the nodes."""
    secrets = {"ETCD_PASSWORD": "s3:cret", "ETCD_CA": (tmp_path / "etcd.crt").read_text(), "TOKEN": "of the program"}
    shown = "echo token $TOKEN, password $ETCD_PASSWORD, $(env | grep -c ETCD); " + WAIT
    machines = join_bench.job(3, shown, cluster={"secrets": tuple(secrets)}, secrets=tuple(secrets.items()))
    dead = f"https://127.0.0.1:{free_port()}"
    server = ElasticServer((dead, closed_etcd.url), "train", "ETCD_PASSWORD", "ETCD_CA")
    running(with_server(machines, 2, 3, server))
    assert "token of the program, password , 0\n" in machines[1].log(1)
    assert closed_etcd.keys().split() == [
        f"clustertool/{machines[0].join.identity.job_id}/{name}" for name in ("coordinator", "epoch")
    ]
    machines[0].signal(signal.SIGKILL)
    machines[0].wait()
    says(machines[1], 1, 0, 2)
    end(machines[1:])


@pytest.mark.parametrize(
    ("user", "password", "ca", "why"),
    [
        ("train", "wrong", True, "authentication failed"),
        ("", "", True, "user name is empty"),
        ("train", "s3:cret", False, "its certificate is not accepted"),
    ],
)
def test_a_server_that_refuses(
    join_bench: JoinBench, closed_etcd: Etcd, tmp_path: Path, user: str, password: str, ca: bool, why: str
) -> None:
    authority = (tmp_path / "etcd.crt").read_text() if ca else ""
    secrets = tuple({"ETCD_PASSWORD": password, "ETCD_CA": authority}.items())
    (machine,) = join_bench.job(1, secrets=secrets, cluster={"loss_timeout": 2.0})
    server = ElasticServer((closed_etcd.url,), user, "ETCD_PASSWORD" if user else "", "ETCD_CA" if ca else "")
    with_server([machine], 1, 1, server)
    assert codes([machine.start()]) == [75]
    assert "the store of --elastic-server does not answer" in machine.error and why in machine.error
    assert "s3:cret" not in machine.error and "wrong" not in machine.error


@pytest.mark.chaos
def test_a_command_that_is_typed_on_each_machine(join_bench: JoinBench, etcd: Etcd) -> None:
    """Only the coordinator's identity is that of the job. The others learn it when the job is placed there."""
    machines = with_store(join_bench.job(3, WAIT), 2, 3, etcd)
    own = machines[0].join.identity
    for number, machine in enumerate(machines):
        if number:
            machine.join = replace(
                machine.join, identity=replace(own, job_id=f"typed-{number}", token=str(number) * 32)
            )
        machine.start()
        machine.join = replace(machine.join, identity=own)
    for rank, machine in enumerate(machines):
        says(machine, 0, rank, 3)
    assert etcd.keys().split() == [f"clustertool/{own.job_id}/{name}" for name in ("coordinator", "epoch")]
    machines[0].signal(signal.SIGKILL)
    machines[0].wait()
    says(machines[1], 1, 0, 2)
    says(machines[2], 1, 1, 2)
    end(machines[1:])


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


def test_the_coordinator_is_released(join_bench: JoinBench, etcd: Etcd) -> None:
    """Another member takes over before its lease in the store would have ended."""
    machines = running(with_store(join_bench.job(3, WAIT), 2, 3, etcd, backoff=(0.1, 1.0)))
    how: LeaveCommand = {"type": "leave", "by": "the test"}
    assert supervisor_client.ask(JobPaths.at(str(machines[0].job_dir)), how, 5.0) is not None
    assert machines[0].wait() == 0
    began = time.monotonic()
    says(machines[1], 1, 0, 2)
    says(machines[2], 1, 1, 2)
    assert time.monotonic() - began < 5.0  # LOSS_TIMEOUT
    end(machines[1:])


def test_a_coordinator_that_is_shut_down_hands_the_job_over(join_bench: JoinBench, etcd: Etcd) -> None:
    """Ctrl+C in its terminal still ends the job."""
    machines = running(with_store(join_bench.job(3, WAIT), 2, 3, etcd, backoff=(0.1, 1.0)))
    machines[0].signal(signal.SIGTERM)
    assert machines[0].wait() == 143
    began = time.monotonic()
    says(machines[1], 1, 0, 2)
    says(machines[2], 1, 1, 2)
    assert time.monotonic() - began < 5.0  # LOSS_TIMEOUT
    coordinates = next(
        machine for machine in machines[1:] if [one for one in machine.events("epoch") if one["attempt"] == 1]
    )
    coordinates.signal(signal.SIGINT)
    assert codes(machines[1:]) == [130, 130]


@pytest.mark.chaos
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


@pytest.mark.chaos
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
