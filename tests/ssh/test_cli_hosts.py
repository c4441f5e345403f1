"""Hosts that are hard to distinguish, or reached by IPv6: the ranks get the right addresses and meet each other."""

from __future__ import annotations

import contextlib
import socket
import sys

import pytest

from tests.meets import MEETS, met
from tests.ssh.sshd import USER


@pytest.fixture
def ipv6():
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET6) as probe:
        probe.bind(("::1", 0))
        return
    pytest.skip("this machine has no ::1")


def test_two_ports_on_one_host(site):
    """One address, one port space, two nodes with a ROOT_DIR each."""
    pair = site(2, address="127.0.0.9")
    pair.workspace(train_py=MEETS)
    found = met(pair.clustertool("run", "-w", "job", "--nproc-per-node", 2, "--all-ranks").ends(0))
    assert [reported["at"] for _, reported in sorted(found.items())] == [(0, 0), (0, 1), (1, 0), (1, 1)]
    assert {reported["own"] for reported in found.values()} == {"127.0.0.9"}
    assert len({reported["endpoint"] for reported in found.values()}) == 4
    assert found[0]["hosts"] == ["127.0.0.9", "127.0.0.9"]
    second = pair.servers[1].port
    found = met(pair.clustertool("run", "-w", "job", "--all-ranks", "--only", f"127.0.0.9:{second}").ends(0))
    assert [reported["at"] for reported in found.values()] == [(0, 0)]
    assert [len(pair.jobs(node)) for node in (0, 1)] == [1, 2]
    # by name, which is what hosts files make of it: one alias a port
    aliases = "".join(f"Host n{n}\n  HostName 127.0.0.9\n  Port {s.port}\n" for n, s in enumerate(pair.servers))
    (pair.laptop / ".ssh/config").write_text(aliases)
    (pair.folder / "hosts").write_text("n1 slots=1\nn0:2\n")
    done = pair.clustertool("run", "-w", "job", "--all-ranks", "--hostfile", "hosts").ends(0)
    found = met(done)
    assert [reported["at"] for _, reported in sorted(found.items())] == [(0, 0), (1, 0), (1, 1)]
    assert len(pair.jobs(1)) == 3
    assert (pair.job_dir(1, done.job) / "nodefile").read_text() == "0\n"


def test_ipv6_for_everything(site, ipv6):
    pair = site(2, address="::1")
    pair.workspace(train_py=MEETS)
    done = pair.clustertool("run", "-w", "job", "--all-ranks").ends(0)
    found = met(done)
    assert {(reported["own"], reported["master"]) for reported in found.values()} == {("::1", "::1")}
    assert all(reported["endpoint"].startswith("[::1]:") for reported in found.values())
    assert "a training address is IPv6; Paddle" in done.err
    assert pair.clustertool("status", "--json").ends(0).json["state"] == "succeeded"
    pair.clustertool("fetch", "--path", "log").ends(0)


def test_ipv6_for_ssh_and_ipv4_for_training(site, ipv6):
    pair = site(2, address="::1")
    pair.workspace(train_py=MEETS)
    hosts = [f"{USER}@{server.entry}" for server in pair.servers]
    pair.conf(HOSTS=[{"host": host, "address": f"127.0.0.{9 + n}"} for n, host in enumerate(hosts)])
    done = pair.clustertool("run", "-w", "job", "--all-ranks").ends(0)
    found = met(done)
    assert [reported["own"] for _, reported in sorted(found.items())] == ["127.0.0.9", "127.0.0.10"]
    assert "IPv6" not in done.err
    # or by the interface that carries it
    pair.conf(HOSTS=hosts, PADDLE_NIC="lo")
    found = met(pair.clustertool("run", "-w", "job", "--all-ranks").ends(0))
    assert {reported["own"] for reported in found.values()} == {"127.0.0.1"}
    running = pair.start("exec", "--command", "echo here")
    assert "here" in running.wait().ends(0).out


def test_a_host_has_its_own_python_prelude_interface_and_key(site, ssh_keys):
    """Later commands without a conf.py reach the node by them, too."""
    pair = site(2)
    own = pair.folder / "python"
    own.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    own.chmod(0o755)
    pair.workspace(train_py='import os; print(os.environ["P"], os.environ["NCCL_SOCKET_IFNAME"])')
    key = str(ssh_keys.user)
    entries = [f"{USER}@{server.entry}" for server in pair.servers]
    second = {
        "host": entries[1],
        "python": str(own),
        "prelude": "export P=own",
        "interface": "lo",
        "identity_file": key,
    }
    first = {"host": entries[0], "python": sys.executable, "identity_file": key}
    wrong = {"PYTHON": "/no/python", "IDENTITY_FILE": "/no/key", "PADDLE_NIC": "lo"}
    pair.conf(HOSTS=[first, second], PRELUDE="export P=all", **wrong)
    done = pair.clustertool("run", "-w", "job", "--all-ranks").ends(0)
    assert sorted(line.split("|")[-1].split()[-2:] for line in done.lines()) == [["all", "lo"], ["own", "lo"]], done.out
    (pair.folder / "conf.py").unlink()
    assert pair.clustertool("logs", "--job", done.job, "--rank", 1, "--raw").ends(0).out == "own lo\n"
