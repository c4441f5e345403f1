"""Servers for a test: `cluster_of(n)` gives a Cluster and its private sshds, which are gone when the test is over."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from clustertool.model.config.cluster import Cluster, read_cluster
from tests import forked, forked_agents
from tests.cli import Done, EmbeddedSite, LoopSite
from tests.node_code import NodeCode
from tests.ssh import sshd

ClusterOf = Callable[..., "tuple[Cluster, list[sshd.Sshd]]"]
EMBEDDED_COMMAND = Path(__file__).with_name("embedded_command.py")
FIRST = 2  # 127.0.0.1 is for those who want to be alone there


@pytest.fixture(scope="session")
def ssh_keys(tmp_path_factory: pytest.TempPathFactory) -> sshd.Keys:
    if not sshd.SSHD:
        pytest.skip("needs sshd (package openssh-server)")
    return sshd.make_keys(tmp_path_factory.mktemp("keys"))


@pytest.fixture
def start(ssh_keys: sshd.Keys, node_code: NodeCode, tmp_path: Path) -> Iterator[Callable[..., sshd.Sshd]]:
    """start(number, address=..., keys=..., authorized=..., extra=[...]): one server, on 127.0.0.<number> without an `address`.

    installed=False: the node's code has not been sent there before. joining=True: an elastic job has been there before.
    """
    servers: list[sshd.Sshd] = []

    def one(number: int, **given: Any) -> sshd.Sshd:
        keys = given.get("keys") or [ssh_keys.ed25519[number % len(ssh_keys.ed25519)]]
        authorized = given.get("authorized") or [ssh_keys.user_public]
        address = given.get("address") or f"127.0.0.{number}"
        more = (given.get("extra", ()), given.get("around", ()))
        server = sshd.start(address, tmp_path / f"sshd{len(servers)}", keys, authorized, *more)
        servers.append(server)
        if given.get("installed", True):
            node_code.put_into(server.home)
        if given.get("joining"):
            node_code.put_joining_into(server.home)
        return server

    yield one
    sshd.stop_all(servers)


@pytest.fixture
def laptop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty home for our side: no ssh configuration, no agent, no keys."""
    home = tmp_path / "laptop"
    (home / ".ssh").mkdir(parents=True, mode=0o700)
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.delenv("SSH_AUTH_SOCK", raising=False)
    return home


@pytest.fixture
def agent(laptop: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The socket of an ssh-agent without keys, which SSH_AUTH_SOCK names."""
    if not shutil.which("ssh-agent"):
        pytest.skip("needs ssh-agent")
    path = str(laptop / "agent")
    process = subprocess.Popen(["ssh-agent", "-D", "-a", path], stdout=subprocess.DEVNULL)
    monkeypatch.setenv("SSH_AUTH_SOCK", path)
    sshd.until(
        lambda: subprocess.run(["ssh-add", "-l"], capture_output=True).returncode != 2
    )  # 2: it does not listen yet
    yield path
    process.terminate()
    process.wait(10)


@pytest.fixture
def cluster_of(start: Callable[..., sshd.Sshd], ssh_keys: sshd.Keys, laptop: Path) -> ClusterOf:
    """cluster_of(n, extra=[sshd_config lines], KEY=value): n nodes; the user's key is set, known_hosts is empty."""

    def make(count: int, extra: Any = (), **values: object) -> tuple[Cluster, list[sshd.Sshd]]:
        servers = [start(FIRST + number, extra=extra) for number in range(count)]
        return cluster_for(servers, {"IDENTITY_FILE": str(ssh_keys.user), **values}), servers

    return make


def cluster_for(servers: list[sshd.Sshd], values: dict[str, object]) -> Cluster:
    hosts = [f"{sshd.USER}@{server.address}:{server.port}" for server in servers]
    return read_cluster({"HOSTS": hosts, "CONNECT_TIMEOUT": 20, **values})


@pytest.fixture
def site(
    start: Callable[..., sshd.Sshd], ssh_keys: sshd.Keys, node_code: NodeCode, laptop: Path, tmp_path: Path
) -> Iterator[Callable[..., LoopSite]]:
    """site(4) -> a folder with conf.py and tasks.py whose cluster is 4 private sshds, each made by start(..., **given).

    The agents of nodes are forks.
    """
    sites: list[LoopSite] = []
    python = forked_agents.interpreter(node_code.place)

    def make(count: int = 3, **given: Any) -> LoopSite:
        servers = [start(FIRST + number, **given) for number in range(count)]
        sites.append(LoopSite(tmp_path / f"site{len(sites)}", servers, ssh_keys, laptop, python))
        return sites[-1]

    yield make
    for one in sites:
        one.close()


class ForkingSite(EmbeddedSite):
    """An embedded cluster whose agents are forks, if the command that starts them is one, too. python: see forked_agents."""

    def __init__(self, *args: Any, python: str) -> None:
        super().__init__(*args)
        self._python = python

    def fork(self, argv: Sequence[str], env: Mapping[str, str], **options: Any) -> forked.Forked:
        return super().fork([str(EMBEDDED_COMMAND), self._python, *argv], env, **options)

    def script(self, path: Path, env: Mapping[str, str]) -> Done:
        """Run a program that uses the Python API to its end, as a fork, too."""
        self.running.append(self._on_pipes(self._fork, [str(path)], self.folder, dict(env), None))
        return self.running[-1].wait()


@pytest.fixture
def embedded(ssh_keys: sshd.Keys, node_code: NodeCode, laptop: Path, tmp_path: Path) -> Iterator[ForkingSite]:
    """A folder without conf.py, and an embedded cluster of its own, whose nodes have the node's code. Agents are forks."""
    one = ForkingSite(tmp_path / "embedded", tmp_path / "state", python=forked_agents.interpreter(node_code.place))
    for node in range(one.count):
        node_code.put_into(one.home(node))
    yield one
    one.close()
