"""Jump hosts and proxy commands: one connection to the bastion for all nodes, and one place that says what is wrong there."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from paramiko.common import cMSG_CHANNEL_DATA

from clustertool.errors import AuthError, Unreachable
from clustertool.model.config.cluster import Cluster, read_cluster
from clustertool.ssh import connection
from clustertool.ssh.connection import SshLink
from clustertool.ssh.parallel import each
from tests import proc_files
from tests.ssh import sshd
from tests.ssh.conftest import cluster_for
from tests.ssh.links import Delayed, close_all, forgotten, open_all, run_user_command, script
from tests.ssh.sshd import until

Start = Callable[..., sshd.Sshd]


def _behind(start: Start, keys: sshd.Keys, count: int, **values: object) -> tuple[Cluster, sshd.Sshd, list[sshd.Sshd]]:
    bastion = start(100)
    nodes = [start(2 + number) for number in range(count)]
    gateway = f"{sshd.USER}@{bastion.address}:{bastion.port}"
    return cluster_for(nodes, {"IDENTITY_FILE": str(keys.user), "GATEWAY": gateway, **values}), bastion, nodes


def _logins(server: sshd.Sshd) -> int:
    return server.log().count("Accepted publickey")


def test_all_nodes_share_one_connection_to_the_bastion(start: Start, ssh_keys: sshd.Keys, laptop: Path) -> None:
    cluster, bastion, nodes = _behind(start, ssh_keys, 5)
    links = open_all(cluster.hosts, cluster).all()
    done = each(links, lambda link: run_user_command(link, "echo $HOME; echo $SSH_CONNECTION", 20)).all()
    for number, node in enumerate(nodes):
        home, from_to = done[number].stdout.decode().split("\n")[:2]
        assert home == str(node.home) and from_to.split()[2] == node.address
    assert _logins(bastion) == 1
    known = (laptop / ".ssh" / "known_hosts").read_text()
    assert len(known.splitlines()) == 6 and f"[{bastion.address}]:{bastion.port}" in known
    some = list(links.values())
    close_all(some[:4])
    assert run_user_command(some[4], "echo up", 10).stdout == b"up\n"
    close_all(some)
    assert not connection.Bastion._all
    until(lambda: len(bastion.alive()) == 1)


def test_a_link_that_closes_while_it_sends_leaves_the_bastion_to_the_others(
    start: Start, ssh_keys: sshd.Keys, laptop: Path
) -> None:
    cluster, _, _ = _behind(start, ssh_keys, 2)
    one, other = open_all(cluster.hosts, cluster).all().values()
    tunnel = one.transport.sock
    delayed = Delayed(tunnel.transport, cMSG_CHANNEL_DATA)
    talker = threading.Thread(target=one.transport.send_ignore)
    talker.start()
    assert delayed.here.wait(10)
    one.close()
    script(other, b"echo\n", 10)
    delayed.go.set()
    talker.join(10)
    until(forgotten(tunnel))
    assert script(other, b"echo up\n", 10).stdout == b"up\n"
    other.close()


def test_much_data_through_a_gateway(start: Start, ssh_keys: sshd.Keys, laptop: Path) -> None:
    cluster, _, _ = _behind(start, ssh_keys, 1)
    with SshLink(cluster.hosts[0], cluster) as link:
        assert len(script(link, b"head -c 8000000 /dev/urandom\n", 30).stdout) == 8000000


def test_proxy_jump_of_the_ssh_configuration_in_a_chain(start: Start, ssh_keys: sshd.Keys, laptop: Path) -> None:
    first, second, node = start(100), start(101), start(2)
    (laptop / ".ssh" / "config").write_text(
        f"Host target\n  HostName {node.address}\n  Port {node.port}\n  ProxyJump first,second\n"
        f"Host first\n  HostName {first.address}\n  Port {first.port}\n"
        f"Host second\n  HostName {second.address}\n  Port {second.port}\n"
    )
    cluster = read_cluster({"HOSTS": ["target"], "IDENTITY_FILE": str(ssh_keys.user), "CONNECT_TIMEOUT": 20})
    with SshLink(cluster.hosts[0], cluster) as link:
        assert script(link, b"echo $HOME\n", 10).stdout.decode().strip() == str(node.home)
        assert (_logins(first), _logins(second), _logins(node)) == (1, 1, 1)


def test_bastion_that_refuses_is_named_once_per_node_and_tried_once(
    start: Start, ssh_keys: sshd.Keys, laptop: Path
) -> None:
    cluster, bastion, _ = _behind(start, ssh_keys, 4)
    (bastion.dir / "authorized_keys").write_text("")
    got = open_all(cluster.hosts, cluster)
    assert len(got.failed) == 4
    for number, error in got.failed.items():
        assert isinstance(error, AuthError) and error.node == cluster.hosts[number].name
        assert f"the gateway {bastion.address}" in error.what
    assert bastion.log().count("Connection from") == 1
    connection.Bastion._all.clear()


def test_bastion_that_is_away_costs_one_timeout(start: Start, ssh_keys: sshd.Keys, laptop: Path) -> None:
    node = start(2)
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        silent.listen(8)
        values = {"HOSTS": [f"{node.address}:{node.port}"] * 12, "GATEWAY": f"127.0.0.1:{silent.getsockname()[1]}"}
        cluster = read_cluster({**values, "CONNECT_TIMEOUT": 1})
        begin = time.monotonic()
        got = open_all(cluster.hosts, cluster)
        assert time.monotonic() - begin < 11, "one after another they would need 12 s"
    assert len(got.failed) == 12 and all("the gateway 127.0.0.1" in error.what for error in got.failed.values())
    connection.Bastion._all.clear()


def test_changed_key_of_the_bastion(start: Start, ssh_keys: sshd.Keys, laptop: Path) -> None:
    cluster, bastion, _ = _behind(start, ssh_keys, 1)
    (laptop / ".ssh" / "known_hosts").write_text(
        f"[{bastion.address}]:{bastion.port} {sshd.public(ssh_keys.ed25519[0])}\n"
    )
    with pytest.raises(AuthError, match="the gateway.*host key has changed"):
        SshLink(cluster.hosts[0], cluster)
    connection.Bastion._all.clear()


def test_node_that_the_bastion_cannot_reach(start: Start, ssh_keys: sshd.Keys, laptop: Path) -> None:
    cluster, bastion, (node,) = _behind(start, ssh_keys, 1)
    node.stop()
    with pytest.raises(Unreachable, match="cannot reach 127.0.0.2"):
        SshLink(cluster.hosts[0], cluster)
    assert not connection.Bastion._all


def test_bastion_that_forbids_forwarding(start: Start, ssh_keys: sshd.Keys, laptop: Path) -> None:
    bastion, node = start(100, extra=["AllowTcpForwarding no"]), start(2)
    cluster = cluster_for([node], {"IDENTITY_FILE": str(ssh_keys.user), "GATEWAY": f"{bastion.address}:{bastion.port}"})
    with pytest.raises(Unreachable) as caught:
        SshLink(cluster.hosts[0], cluster)
    assert "AllowTcpForwarding" in caught.value.fix


def test_frozen_bastion(start: Start, ssh_keys: sshd.Keys, laptop: Path) -> None:
    cluster, bastion, _ = _behind(start, ssh_keys, 2)
    links = list(open_all(cluster.hosts, cluster).all().values())
    bastion.cut()
    begin = time.monotonic()
    with pytest.raises(Unreachable):
        script(links[0], b"echo\n", 0.5)
    close_all(links)
    assert time.monotonic() - begin < 15, "a frozen bastion never answers"


def _proxy(laptop: Path, node: sshd.Sshd, command: str) -> None:
    (laptop / ".ssh" / "config").write_text(
        f"Host target\n  HostName {node.address}\n  Port {node.port}\n  ProxyCommand {command}\n"
    )


RELAY = """
import os, select, socket, sys
other = socket.create_connection((sys.argv[1], int(sys.argv[2])))
print(os.getpid(), os.getsid(0), file=open(sys.argv[3], "w"))
while True:
    for ready in select.select([0, other], [], [])[0]:
        data = os.read(0, 65536) if ready == 0 else other.recv(65536)
        if not data:
            sys.exit()
        os.write(1, data) if ready is other else other.sendall(data)
"""


def test_proxy_command_has_its_own_session_and_ends_with_the_link(
    start: Start, ssh_keys: sshd.Keys, laptop: Path
) -> None:
    node = start(2)
    relay, reported = laptop / "relay.py", laptop / "told"
    relay.write_text(RELAY)
    _proxy(laptop, node, f"{sys.executable} {relay} %h %p {reported}")
    cluster = read_cluster(
        {"HOSTS": [f"{sshd.USER}@target"], "IDENTITY_FILE": str(ssh_keys.user), "CONNECT_TIMEOUT": 20}
    )
    with SshLink(cluster.hosts[0], cluster) as link:
        pid, session = (int(token) for token in reported.read_text().split())
        assert session == pid != os.getsid(0)
        assert len(script(link, b"head -c 3000000 /dev/zero\n", 20).stdout) == 3000000
    until(lambda: not proc_files.living(pid))


def test_proxy_command_that_fails_is_quoted(start: Start, ssh_keys: sshd.Keys, laptop: Path) -> None:
    node = start(2)
    _proxy(laptop, node, "sh -c 'echo no such tunnel >&2; exit 1'")
    cluster = read_cluster({"HOSTS": [f"{sshd.USER}@target"], "IDENTITY_FILE": str(ssh_keys.user)})
    with pytest.raises(Unreachable, match="no such tunnel"):
        SshLink(cluster.hosts[0], cluster)


def test_proxy_command_that_ignores_its_end_is_killed(start: Start, ssh_keys: sshd.Keys, laptop: Path) -> None:
    node = start(2)
    reported = laptop / "told"
    _proxy(laptop, node, f"""sh -c 'trap "" HUP TERM; echo $$ > {reported}; while :; do sleep 0.1; done'""")
    cluster = read_cluster(
        {"HOSTS": [f"{sshd.USER}@target"], "IDENTITY_FILE": str(ssh_keys.user), "CONNECT_TIMEOUT": 3}
    )
    begin = time.monotonic()
    with pytest.raises(Unreachable):
        SshLink(cluster.hosts[0], cluster)
    assert time.monotonic() - begin < 30, "its command never ends by itself"
    pid = int(reported.read_text())
    until(lambda: not proc_files.living(pid))
