"""The laptop's side reads nothing in /proc, which macOS does not have: here an empty folder hides it."""

from __future__ import annotations

import subprocess

import pytest

from tests.cli import HELLO, INV

HIDE = ("unshare", "--mount", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh")


@pytest.fixture
def hidden():
    """The program inv, in a mount namespace whose /proc is empty."""
    if subprocess.run([*HIDE, "test", "!", "-e", "/proc/self"], stderr=subprocess.DEVNULL).returncode:
        pytest.skip("needs root, for a mount namespace")
    return (*HIDE, *INV)


@pytest.mark.chaos
def test_verbs_work_without_proc(site, hidden):
    pair = site(2)
    for verb in (["check"], ["exec", "--command", "true"], ["dispatch", "-w", HELLO]):
        pair.inv(*verb, program=hidden).ends(0)
    job = pair.inv("run", "-w", HELLO, program=hidden).ends(0).job
    for verb in (
        ["jobs"],
        ["status"],
        ["logs"],
        ["report"],
        ["gpus"],
        ["top", "--json"],
        ["fetch"],
        ["stop", "--job", job],
        ["clean", "--job", job],
    ):
        done = pair.inv(*verb, program=hidden).ends(0)
        assert "Traceback" not in done.err


def test_a_gateway_and_a_config_file_without_proc(site, hidden):
    """The gateway is a ProxyCommand in a child process."""
    alone = site(1)
    server = alone.servers[0]
    (alone.laptop / ".ssh/config").write_text(f"Host node\n  HostName {server.address}\n  Port {server.port}\n")
    alone.conf(HOSTS=[f"{server.entry.split('@')[0]}@node"] if "@" in server.entry else ["node"])
    alone.inv("exec", "--command", "true", program=hidden).ends(0)
