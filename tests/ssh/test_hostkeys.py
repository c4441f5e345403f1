"""Host keys: a new one is written down once, a changed one is refused, and odd files do not matter."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertool.errors import AuthError
from clustertool.model.config.cluster import Cluster
from clustertool.ssh import host_keys
from clustertool.ssh.connection import SshLink
from clustertool.ssh.settings import SshSettings
from tests.ssh import sshd
from tests.ssh.conftest import cluster_for
from tests.ssh.links import close_all, open_all

KEY = "AAAAC3NzaC1lZDI1NTE5AAAAIGJK8bRrYbrXqYbB5dXkFhkjFjYqEiUjzJ8wQm3f3rJ9"
OTHER = "AAAAC3NzaC1lZDI1NTE5AAAAIOJK8bRrYbrXqYbB5dXkFhkjFjYqEiUjzJ8wQm3f3rJ9"


def _login(cluster: Cluster) -> None:
    close_all(list(open_all(cluster.hosts, cluster).all().values()))


def _fresh() -> None:
    """As a new process: nothing remembered."""
    host_keys._known_in.cache_clear()


def test_new_keys_of_8_nodes_are_written_once_each(cluster_of: Any, laptop: Path) -> None:
    cluster, servers = cluster_of(8)
    _login(cluster)
    known = laptop / ".ssh" / "known_hosts"
    assert sorted(known.read_text().splitlines(True)) == sorted(_bare(server) for server in servers)
    assert known.stat().st_mode & 0o777 == 0o600
    _fresh()
    _login(Cluster(**{**vars(cluster), "host_keys": "strict"}))
    assert len(known.read_text().splitlines()) == 8
    for server in servers[:3]:  # ssh agrees
        found = subprocess.run(
            ["ssh-keygen", "-F", f"[{server.address}]:{server.port}", "-f", str(known)], capture_output=True, check=True
        )
        assert server.host_key.split()[1] in found.stdout.decode()


def _bare(server: sshd.Sshd) -> str:
    return " ".join(server.known_hosts.split()[:3]) + "\n"


def test_two_processes_with_threads_at_once(laptop: Path) -> None:
    """Every name once and no torn line, whoever is first."""
    known = laptop / "known_hosts"
    known.write_text(f"last line without its break ssh-ed25519 {KEY}"[20:])
    code = (
        "import sys, threading\n"
        "from clustertool.ssh import host_keys as hostkeys\n"
        "from clustertool.ssh.settings import SshSettings\n"
        "def one(number):\n"
        "    to = SshSettings(f'n{number}', f'n{number}', 'u', host_key_name=f'n{number}', known_hosts=(sys.argv[1],))\n"
        f"    hostkeys.known_hosts(to).verify(to, 'ssh-ed25519', {KEY!r})\n"
        "threads = [threading.Thread(target=one, args=(number,)) for number in range(40)]\n"
        "[thread.start() for thread in threads]; [thread.join() for thread in threads]\n"
    )
    children = [subprocess.Popen([sys.executable, "-c", code, str(known)]) for _ in range(2)]
    assert [child.wait(60) for child in children] == [0] * 2
    lines = known.read_text().splitlines()
    assert sorted(lines[1:]) == sorted(f"n{number} ssh-ed25519 {KEY}" for number in range(40))


def test_changed_key_is_refused_and_reported(cluster_of: Any, laptop: Path, ssh_keys: sshd.Keys) -> None:
    cluster, (server,) = cluster_of(1)
    known = laptop / ".ssh" / "known_hosts"
    wrong = sshd.public(ssh_keys.ed25519[0])
    known.write_text(f"# a comment\n\n[{server.address}]:{server.port} {wrong}\n")
    for policy in ("accept-new", "strict"):
        _fresh()
        with pytest.raises(AuthError) as caught:
            SshLink(cluster.hosts[0], Cluster(**{**vars(cluster), "host_keys": policy}))
        assert "has changed" in caught.value.what and f"{known} line 3" in caught.value.what
        assert f"ssh-keygen -R '[{server.address}]:{server.port}' -f {known}" in caught.value.fix
        assert caught.value.node == cluster.hosts[0].name and caught.value.code == 77
    SshLink(cluster.hosts[0], Cluster(**{**vars(cluster), "host_keys": "off"})).close()
    command = caught.value.fix[caught.value.fix.index("ssh-keygen") :].split(" (")[0]
    subprocess.run(command, shell=True, check=True, capture_output=True)
    SshLink(cluster.hosts[0], cluster).close()  # the fix helps, in the same process too
    assert server.host_key.split()[1] in known.read_text()


def test_strict_refuses_what_it_does_not_know(cluster_of: Any, laptop: Path) -> None:
    cluster, (server,) = cluster_of(1, HOST_KEYS="strict")
    with pytest.raises(AuthError, match="not known.*SHA256:") as caught:
        SshLink(cluster.hosts[0], cluster)
    assert f"ssh-keyscan -p {server.port} {server.address}" in caught.value.fix
    assert not (laptop / ".ssh" / "known_hosts").exists()
    subprocess.run(
        f"ssh-keyscan -p {server.port} {server.address} >> {laptop}/.ssh/known_hosts", shell=True, check=True
    )
    SshLink(cluster.hosts[0], cluster).close()


def test_hashed_names_are_understood_and_made(cluster_of: Any, laptop: Path) -> None:
    cluster, servers = cluster_of(2)
    known = laptop / ".ssh" / "known_hosts"
    known.write_text(servers[0].known_hosts)
    subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(known)], check=True, capture_output=True)
    assert servers[0].address not in known.read_text()
    _login(cluster)
    lines = known.read_text().splitlines()
    assert len(lines) == 2 and lines[1].startswith("|1|")
    name = f"[{servers[1].address}]:{servers[1].port}"
    subprocess.run(["ssh-keygen", "-F", name, "-f", str(known)], check=True, capture_output=True)
    _fresh()
    _login(Cluster(**{**vars(cluster), "host_keys": "strict"}))


def test_a_known_key_of_another_type_is_asked_for(
    start: Callable[..., sshd.Sshd], ssh_keys: sshd.Keys, laptop: Path
) -> None:
    server = start(3, keys=[ssh_keys.ed25519[0], ssh_keys.rsa])
    cluster = cluster_for([server], {"IDENTITY_FILE": str(ssh_keys.user), "HOST_KEYS": "strict"})
    known = laptop / ".ssh" / "known_hosts"
    known.write_text(f"[{server.address}]:{server.port} {sshd.public(ssh_keys.rsa)}\n")
    with SshLink(cluster.hosts[0], cluster) as link:
        assert link.transport.host_key_type.startswith("rsa-sha2")


def test_only_another_type_is_known_and_no_longer_there(cluster_of: Any, laptop: Path, ssh_keys: sshd.Keys) -> None:
    cluster, (server,) = cluster_of(1)
    (laptop / ".ssh" / "known_hosts").write_text(f"[{server.address}]:{server.port} {sshd.public(ssh_keys.rsa)}\n")
    with pytest.raises(AuthError, match="known is ssh-rsa, shown was ssh-ed25519"):
        SshLink(cluster.hosts[0], cluster)


def test_odd_lines(cluster_of: Any, laptop: Path) -> None:
    cluster, (server,) = cluster_of(1)
    (laptop / ".ssh" / "known_hosts").write_bytes(
        f"@cert-authority *.example.org,[127.0.0.*]:* ssh-ed25519 {KEY}\n"
        f"@revoked * ssh-ed25519 {OTHER}\n"
        "nonsense\n[half ssh-ed25519\n|1|bad|worse ssh-ed25519 AAAA\n|1|half ssh-ed25519 AAAA\n"
        "* sk-ssh-ed25519@openssh.com AAAA\n"
        f"!{server.address},x* ssh-ed25519 {KEY}\n".encode()
        + b"\xff\xfe ssh-rsa \xff\n"
    )
    _login(cluster)
    _fresh()
    _login(Cluster(**{**vars(cluster), "host_keys": "strict"}))


def test_revoked_key(cluster_of: Any, laptop: Path) -> None:
    cluster, (server,) = cluster_of(1)
    (laptop / ".ssh" / "known_hosts").write_text(f"{server.known_hosts}@revoked * {server.host_key}\n")
    with pytest.raises(AuthError, match="revoked"):
        SshLink(cluster.hosts[0], cluster)


def test_patterns_and_the_bare_name(cluster_of: Any, laptop: Path) -> None:
    cluster, (server,) = cluster_of(1, HOST_KEYS="strict")
    known = laptop / ".ssh" / "known_hosts"
    for name in (f"[127.0.0.*]:{server.port}", "127.0.0.?", server.address):
        known.write_text(f"{name} {server.host_key}\n")
        _fresh()
        _login(cluster)


@pytest.mark.parametrize("path", ["/dev/null", "/proc/no/such/known_hosts"])
def test_files_that_take_nothing(cluster_of: Any, path: str) -> None:
    cluster, _ = cluster_of(1, KNOWN_HOSTS=path)
    _login(cluster)
    _login(cluster)


def test_a_linked_file_stays_a_link(cluster_of: Any, laptop: Path) -> None:
    cluster, (server,) = cluster_of(1)
    (laptop / ".ssh" / "known_hosts").symlink_to(laptop / "dotfiles")
    _login(cluster)
    assert (laptop / ".ssh" / "known_hosts").is_symlink()
    assert (laptop / "dotfiles").read_text() == _bare(server)


def test_1000_hosts_cost_one_reading(laptop: Path) -> None:
    known = laptop / "known_hosts"
    known.write_text("".join(f"node{number} ssh-ed25519 {KEY}\n" for number in range(1000)))

    def one(number: int) -> None:
        to = SshSettings("n", f"node{number}", "u", host_key_name=f"node{number}", known_hosts=(str(known),))
        keys = host_keys.known_hosts(to)
        assert keys.algorithms(to)[0] == "ssh-ed25519"
        keys.verify(to, "ssh-ed25519", KEY)

    threads, start = threading.active_count(), time.process_time()
    for number in range(1000):
        one(number)
    assert time.process_time() - start < 1.5
    assert threading.active_count() <= threads
