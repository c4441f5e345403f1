"""conf.py goes before ssh's configuration, which is read as ssh reads it, by one call for all hosts where it can."""

from __future__ import annotations

import os
import shutil
import time
from pathlib import Path

import pytest

from clustertool.errors import ConfigError
from clustertool.model.config.cluster import Cluster, read_cluster
from clustertool.node.system import users
from clustertool.ssh import settings as sshconfig
from clustertool.ssh.settings import SshSettings, settings

CONFIG = """
Include {home}/.ssh/extra/*.conf
Host gpu* !gpu9
    User trainer
    Port 2222
    IdentityFile ~/.ssh/gpu_%h_%r
    IdentitiesOnly yes
    UserKnownHostsFile {home}/.ssh/gpu_hosts
Host gpu1
    HostName 10.0.0.1
    HostKeyAlias first
Host behind
    ProxyJump jump@bastion:2200,inner
Host bastion
    IdentityFile ~/.ssh/bastion
Host numeric
    ProxyJump jump@127.0.0.1:2200,127.0.0.2
Host command
    ProxyCommand nc -X 5 %h %p
    IdentityAgent {home}/agent.sock
Host careful
    StrictHostKeyChecking yes
Host loop
    ProxyJump loop
Host round
    ProxyJump trip
Host trip
    ProxyJump round
"""


def forget() -> None:
    sshconfig._for_all_hosts.cache_clear()
    sshconfig._for_host.cache_clear()


@pytest.fixture(params=["ssh", "paramiko"])
def reader(request: pytest.FixtureRequest, laptop: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both readers; the second one is what machines without an ssh client get."""
    if request.param == "paramiko":
        monkeypatch.setenv("PATH", "/nonexistent")
    forget()
    return str(request.param)


@pytest.fixture
def config(laptop: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sshconfig, "SYSTEM_CONFIG", str(laptop / "ssh_config"))
    (laptop / ".ssh" / "config").write_text(CONFIG.replace("{home}", str(laptop)))
    return laptop


def include(laptop: Path) -> None:
    (laptop / ".ssh" / "extra").mkdir()
    (laptop / ".ssh" / "extra" / "a.conf").write_text("Host included\n  Port 77\nMatch host matched\n  User someone\n")


def get(host: str, **values: object) -> SshSettings:
    cluster = read_cluster({"HOSTS": [host], **values})
    return settings(cluster.hosts[0], cluster)


def test_everything_of_a_host(config: Path, reader: str) -> None:
    got = get("gpu1")
    assert (got.name, got.hostname, got.user, got.port) == ("gpu1", "10.0.0.1", "trainer", 2222)
    assert got.identity_files == (f"{config}/.ssh/gpu_10.0.0.1_trainer",)
    assert got.identities_given and got.identities_only
    assert got.known_hosts == (f"{config}/.ssh/gpu_hosts",)
    assert got.host_key_name == "first" and not got.gateways


def test_negated_pattern_and_defaults(config: Path, reader: str) -> None:
    got = get("gpu9")
    assert (got.hostname, got.user, got.port) == ("gpu9", users.own_name(), 22)
    assert got.identity_files[0] == f"{config}/.ssh/id_ed25519" and not got.identities_given
    assert got.known_hosts == (f"{config}/.ssh/known_hosts", f"{config}/.ssh/known_hosts2")
    assert got.host_key_name == "gpu9" and get("gpu9:44").host_key_name == "[gpu9]:44"


def test_paths_of_files(config: Path, reader: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """`~`, %-tokens, ${NAME}, quotes, blanks, and a path that is relative to the current folder."""
    monkeypatch.setenv("CERTIFICATES", "/certificates")
    lines = [
        'CertificateFile "~/my certs/%n-%h-%r-%p-%%.pub"',
        "CertificateFile ${CERTIFICATES}/%u.pub",
        "CertificateFile a.pub",
    ]
    (config / ".ssh" / "config").write_text(
        "\n".join(["Host *", *lines, "IdentityFile none", "RevokedHostKeys ~/revoked"]) + "\n"
    )
    got = get("me@n1:7")
    expected = (f"{config}/my certs/n1-n1-me-7-%.pub", f"/certificates/{users.own_name()}.pub", "a.pub")
    assert got.certificate_files == (expected if reader == "ssh" else expected[:1])  # paramiko keeps the first one
    assert got.identity_files == () and got.identities_given and got.revoked_host_keys == f"{config}/revoked"


def test_conf_goes_first(config: Path, reader: str) -> None:
    got = get("gpu1", USER="u", PORT=5, IDENTITY_FILE="~/k", KNOWN_HOSTS="~/kh", GATEWAY="none")
    assert (got.user, got.port, got.identity_files, got.known_hosts) == ("u", 5, (f"{config}/k",), (f"{config}/kh",))
    own = read_cluster({"HOSTS": [{"host": "gpu1", "identity_file": "~/own"}], "IDENTITY_FILE": "~/k"})
    assert settings(own.hosts[0], own).identity_files == (f"{config}/own",)
    got = get("host@gpu1:6", USER="u", PORT=5)
    assert (got.user, got.port, got.hostname) == ("host", 6, "10.0.0.1")


def test_include_and_match(config: Path, reader: str) -> None:
    include(config)
    if reader == "paramiko":
        with pytest.raises(ConfigError, match="Include") as caught:
            get("included")
        assert "OpenSSH client" in caught.value.fix
        return
    assert get("included").port == 77
    assert get("matched").user == "someone"
    assert get("gpu2").user == "trainer"  # what comes after an Include is no part of it


def test_proxy_jump_chain(config: Path, reader: str) -> None:
    first, second = get("behind").gateways
    assert (first.hostname, first.user, first.port) == ("bastion", "jump", 2200)
    assert first.identity_files == (f"{config}/.ssh/bastion",)
    assert (second.hostname, second.user, second.port) == ("inner", users.own_name(), 22)


def test_proxy_jump_over_addresses(config: Path, reader: str) -> None:
    """`ssh -G` prints a numeric host in brackets."""
    first, second = get("numeric").gateways
    assert (first.hostname, first.user, first.port) == ("127.0.0.1", "jump", 2200)
    assert (second.hostname, second.port) == ("127.0.0.2", 22)


def test_gateway_of_conf(config: Path, reader: str) -> None:
    got = get("behind", GATEWAY="me@bastion", USER="node-user", IDENTITY_FILE="/k")
    (gateway,) = got.gateways
    assert (gateway.user, gateway.port) == ("me", 22)
    assert gateway.identity_files == (f"{config}/.ssh/bastion", "/k")
    assert get("plain", GATEWAY="bastion", USER="u").gateways[0].user == "u"
    assert get("plain", GATEWAY="gpu1", USER="u").gateways[0].user == "trainer"
    assert get("bastion", GATEWAY="bastion").gateways == ()
    assert get("plain", GATEWAY="ssh -W %h:%p bastion").proxy_command == "ssh -W %h:%p bastion"
    assert (
        get("x", GATEWAY="behind").gateways[-1].hostname == "behind" and len(get("x", GATEWAY="behind").gateways) == 3
    )


def test_proxy_command_and_agent(config: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forget()
    monkeypatch.setenv("SSH_AUTH_SOCK", "/run/agent")
    got = get("command")
    assert (got.proxy_command, got.agent) == ("nc -X 5 %h %p", f"{config}/agent.sock")
    assert get("plain").agent == "/run/agent"


def test_strict_for_one_host(config: Path, reader: str) -> None:
    assert get("careful").host_keys == "strict"
    assert get("careful", HOST_KEYS="off").host_keys == "off"
    assert get("plain").host_keys == "accept-new"


def test_loops_end(config: Path, reader: str) -> None:
    if reader == "paramiko":
        assert get("loop").gateways == ()
    else:
        with pytest.raises(ConfigError, match="loop"):
            get("loop")
    with pytest.raises(ConfigError, match="form a loop"):
        get("round")


def test_mistakes_are_reported(config: Path) -> None:
    with pytest.raises(ConfigError, match="gateway"):
        get("plain", GATEWAY="a:b:c")
    (config / ".ssh" / "config").write_text("Host x\n  Port many\n")
    with pytest.raises(ConfigError, match="Port|port|number") as caught:
        get("x")
    assert "ssh -G localhost" in caught.value.fix


@pytest.fixture
def calls(config: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A file with a line for each call of ssh, which is the real one."""
    forget()
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(f'#!/bin/sh\necho >> {tmp_path}/calls\nexec {shutil.which("ssh")} "$@"\n')
    (folder / "ssh").chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return tmp_path / "calls"


SAME = ["SendEnv LANG", "  Host *\n # %h\n  User ann", "Host *\n Port=2222", "Host *\nProxyJump bastion"]
UNLIKE = ["Host a*\n Port 9", "host  =  b", "Match host b\n User x", "ProxyCommand nc %h %p", "HostName %h.example"]


@pytest.mark.parametrize("text", SAME)
def test_one_call_serves_all_hosts_that_are_alike(text: str, config: Path, calls: Path) -> None:
    (config / ".ssh" / "config").write_text(text + "\n")
    (config / "ssh_config").write_text("# Host old\nHost *\n  HashKnownHosts yes\n")
    one_by_one = [sshconfig._for_host(sshconfig._files(), f"node{number}", "", 0) for number in range(2)]
    calls.unlink()
    for number in range(200):
        got = get(f"node{number}")
        assert got.name == got.hostname == f"node{number}"
    expected = [(get("node0").user, get("node0").port)] * 2
    assert [(answers["user"][0], int(answers["port"][0])) for answers in one_by_one] == expected
    assert calls.read_text() == "\n"


@pytest.mark.parametrize("text", UNLIKE)
def test_hosts_that_can_differ_have_a_call_each(text: str, config: Path, calls: Path) -> None:
    (config / "included").write_text(text + "\n")
    (config / ".ssh" / "config").write_text(f"Include {config}/included\n")
    for name in ("a1", "a2", "a1", "a2"):
        get(name)
    assert calls.read_text() == "\n" * 3  # with that for all hosts


def test_nothing_is_read_for_the_embedded_cluster(config: Path) -> None:
    cluster = read_cluster({"HOSTS": ["gpu1"]})
    cluster = Cluster(**{**vars(cluster), "ssh_config": "none"})
    got = settings(cluster.hosts[0], cluster)
    assert (got.hostname, got.port, got.user) == ("gpu1", 22, users.own_name())


def test_1000_plain_hosts_are_quick(laptop: Path) -> None:
    """With the system's own configuration, as every machine with an ssh client has one."""
    cluster = read_cluster({"HOSTS": ["node[1-1000]"]})
    start = time.process_time()
    for host in cluster.hosts:
        settings(host, cluster)
    assert time.process_time() - start < 0.5
    assert os.environ["HOME"] == str(laptop)
