"""Host and user names from a hostfile, --ips or HOSTS: ssh's rule decides, and a shell never reads a part of them as code."""

from __future__ import annotations

import re
import string
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from clustertool.errors import AuthError, ConfigError, UsageError
from clustertool.model.config.cluster import read_cluster
from clustertool.model.config.hostfile import hosts_of, read_host_list, read_hostfile
from clustertool.model.config.hosts import Host, read_hosts, valid_host, valid_user
from clustertool.ssh import dial
from clustertool.ssh import settings as sshconfig
from clustertool.ssh.settings import SshSettings, expand_in_shell

COMMANDS = [
    "fe80::1%$(touch${IFS}{mark})",
    "[fe80::1%$(touch${IFS}{mark})]:22",
    "$(id>{mark})@host",
    "`touch${IFS}{mark}`@host",
    "a|touch${IFS}{mark}|@host",
    "host;touch${IFS}{mark}",
    "a&touch${IFS}{mark}&@host",
    "-oProxyCommand=touch${IFS}{mark}",
    "-oProxyCommand=touch${IFS}{mark}@host",
    "x\n-oProxyCommand=id@host",
    "host\\",
    "ann\\@host",
    "a -oX=y@host",
]


@pytest.mark.parametrize("entry", COMMANDS)
def test_a_name_with_a_command_in_it_is_refused_everywhere(entry: str, tmp_path: Path) -> None:
    entry = entry.replace("{mark}", str(tmp_path / "mark"))
    with pytest.raises(ConfigError):
        read_hosts([entry])
    with pytest.raises(ConfigError):
        read_hosts([{"host": entry}])
    with pytest.raises(ConfigError):
        read_hosts(read_hostfile(entry, "hostfile"))
    with pytest.raises(UsageError):
        hosts_of([entry], "--ips")
    with pytest.raises(UsageError):
        hosts_of(read_host_list(entry), "-H")


@pytest.mark.parametrize(
    "fields", [{"user": "$(id)"}, {"user": "-x"}, {"address": "$(id)"}, {"address": "10.0.0.1;id"}]
)
def test_the_keys_of_an_entry_are_checked_too(fields: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        read_hosts([{"host": "node", **fields}])
    if "user" in fields:
        with pytest.raises(ConfigError):
            read_cluster({"HOSTS": ["node"], "USER": fields["user"]})


@pytest.mark.parametrize("gateway", ["$(id)@bastion", "bastion;id", "[fe80::1%$(id)]:22"])
def test_a_gateway_is_checked_too(gateway: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(ConfigError):
        sshconfig.settings(Host(0, "node"), read_cluster({"HOSTS": ["node"], "GATEWAY": gateway}))


def _ssh_says(user: str, host: str) -> bool:
    """Whether the ssh that is installed here accepts these names."""
    argv = ["ssh", "-G", "-F", "none", "-l", user, "--", host]
    return subprocess.run(argv, capture_output=True, timeout=30).returncode == 0


OTHERS = [f"a{letter}b" for letter in string.punctuation]
OTHERS += ["aab", "aZb", "a0b", "-ab", "ab-", "\\ab", "ab\\", "a b", "a -b", "a\tb", "a\x01b"]
ALPHANUMERIC = [f"a{letter}b" for letter in string.ascii_letters + string.digits]  # ssh has one rule for all of them


@pytest.mark.parametrize(
    "texts", [OTHERS, pytest.param(ALPHANUMERIC, marks=pytest.mark.chaos)], ids=["others", "alphanumeric"]
)
def test_ssh_has_the_same_rule_for_every_character(texts: list[str]) -> None:
    """A host name with an @ has a user in it, for ssh as for us."""
    if not _ssh_says("ann", "node") or _ssh_says("a`b", "node"):
        pytest.skip("needs an ssh client of OpenSSH 9.6 or newer, or one of a distribution that has its checks")
    for text in texts:
        assert valid_user(text) == _ssh_says(text, "node"), text
        if "@" not in text:
            assert valid_host(text) == _ssh_says("ann", text), text


UNUSUAL = [
    ("CORP\\ann@node", "CORP\\ann", "node"),
    ("ann@corp.example@node", "ann@corp.example", "node"),
    ("a b@node", "a b", "node"),
    ("$USER@node", "$USER", "node"),
    ("node+1", "", "node+1"),
    ("node-", "", "node-"),
    ("_x~y", "", "_x~y"),
    ("7", "", "7"),
    ("ssh://ann@node:22/", "ann", "node"),
    ("ann:b/c@node", "ann:b/c", "node"),
    ("knoten-ä", "", "knoten-ä"),
]


@pytest.mark.parametrize("entry, user, host", UNUSUAL)
def test_what_ssh_allows_is_accepted(entry: str, user: str, host: str) -> None:
    (found,) = read_hosts([entry])
    assert (found.user, found.host) == (user, host)
    if " " not in entry:
        (again,) = read_hosts(read_hostfile(f"{entry} slots=2", "hostfile") if "://" not in entry else [entry])
        assert (again.user, again.host) == (user, host)


# -- what a shell makes of them ----------------------------------------------------------------------------------------

HOSTILE = {"r": "$HOME `id` $(id) \"x\" 'y' \\z *", "h": "a b$(touch mark)'\"`touch mark`", "p": "22"}


@pytest.mark.parametrize("shell", ["/bin/sh", "/bin/bash"])
@pytest.mark.parametrize(
    "command", ["printf '%%s\\n' %r %h", 'printf \'%%s\\n\' "%r" "%h"', "printf '%%s\\n' '%r' '%h'"]
)
def test_every_value_arrives_as_it_is(command: str, shell: str, tmp_path: Path) -> None:
    """Even what no name may have: bare, and inside both kinds of quotes."""
    made = expand_in_shell(command, {**HOSTILE, "%": "%"})
    done = subprocess.run([shell, "-c", made], capture_output=True, text=True, cwd=tmp_path, timeout=30)
    assert done.stdout == f"{HOSTILE['r']}\n{HOSTILE['h']}\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("command", ["nc %h %p", "ssh -W [%h]:%p gate", 'a %% b %x \\%h "%n:%p"', "proxy '%h' %p # %r"])
def test_usual_names_are_put_in_as_ssh_does(command: str) -> None:
    tokens = {"h": "node-1.example.org", "p": "22", "r": "ann", "n": "node", "%": "%"}
    plain = re.sub(r"(?<!\\)%(.)", lambda token: tokens.get(token[1], token[0]), command)
    assert expand_in_shell(command, tokens) == plain


def test_a_proxy_command_gets_no_part_of_a_name_unquoted(tmp_path: Path) -> None:
    """Names that did not come through HOSTS: ssh's own configuration may say anything."""
    hostile = f"x$(touch {tmp_path}/mark)`touch {tmp_path}/mark`;touch {tmp_path}/mark"
    settings = SshSettings("n", hostile, hostile, proxy_command=f"printf '%%s %%s' %h \"%r\" > {tmp_path}/got; exit 1")
    sock = dial.proxy(settings)
    try:
        assert sock.recv(1) == b""
    finally:
        sock.close()
    assert [path.name for path in tmp_path.iterdir()] == ["got"]
    assert (tmp_path / "got").read_text() == f"{hostile} {hostile}"


def test_without_an_ssh_client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """paramiko's reader runs the command of the user's Match, with names in it, and would expand a ProxyCommand unquoted."""
    text = f"""Host n*
 User a$(touch${{IFS}}{tmp_path}/mark)
Match exec "echo %n %r > {tmp_path}/got"
 Port 77
 ProxyCommand nc %h %p
"""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setattr("sys.stdin", open("/dev/null"))  # noqa: SIM115 - Invoke reads it, and pytest closes it
    found = sshconfig._lookup_paramiko(text, "node")
    assert (tmp_path / "got").read_text() == f"node a$(touch${{IFS}}{tmp_path}/mark)\n"
    assert not (tmp_path / "mark").exists()
    assert (found["port"], found["proxycommand"]) == (["77"], ["nc %h %p"])


def test_a_name_is_no_pattern_in_known_hosts(tmp_path: Path) -> None:
    """`*` is a name that ssh allows: as a line of known_hosts it would give every host this key."""
    from clustertool.ssh.host_keys import KnownHosts

    path = tmp_path / "known_hosts"
    for name in ("*", "no?e", "!x", "#y", "[*]:2222"):
        to = SshSettings(name, name, "ann", host_key_name=name, known_hosts=(str(path),))
        KnownHosts(to.known_hosts, ()).verify(to, "ssh-ed25519", "AAAA")
    lines = path.read_text().splitlines()
    assert len(lines) == 5 and all(line.startswith("|1|") for line in lines)
    again = KnownHosts((str(path),), ())
    again.verify(replace(to, host_key_name="*", host_keys="strict"), "ssh-ed25519", "AAAA")
    with pytest.raises(AuthError, match="is not known"):
        again.verify(replace(to, host_key_name="other", host_keys="strict"), "ssh-ed25519", "AAAA")
