"""Whether machines answer is asked of the system's ping; without that command it is not known, and that is no error."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from clustertool.fleet import ping
from tests.cli import HELLO


def _works() -> bool:
    argv = ["ping", "-c", "1", "127.0.0.1"]
    try:
        return subprocess.run(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode == 0
    except OSError:
        return False


needs_ping = pytest.mark.skipif(not _works(), reason="needs the command ping, and the right to use it")


@needs_ping
def test_many_addresses_are_pinged_at_once() -> None:
    start = time.monotonic()
    got = ping.ping_all({number: f"127.0.{number // 200}.{1 + number % 200}" for number in range(250)}, 20.0)
    assert len(got) == 250 and all(got.values())
    assert time.monotonic() - start < 20


SILENCE = """
set -e
trap '[ $? = 0 ] || exit 9' EXIT
ip link set lo up
ip link add quiet0 type veth peer name quiet1
ip addr add 192.0.2.254/24 dev quiet0
ip link set quiet0 up
ip link set quiet1 up
exec "$0" -c "
import time
from clustertool.fleet.ping import ping_all
addresses = {number: f'192.0.2.{number}' for number in range(1, 62)}
start = time.monotonic()
got = ping_all({**addresses, 0: '127.0.0.1', 62: 'nowhere.invalid', 63: ''}, 10.0)
assert got.pop(0) and got.pop(62) is None and set(got.values()) <= {False, None}, got
assert 2 <= time.monotonic() - start < 9, time.monotonic() - start
"
"""


@needs_ping
def test_silent_machines_take_one_time_limit_together() -> None:
    """In a network namespace with a cable to an interface that has no address."""
    argv = ["unshare", "--net", "sh", "-c", SILENCE, sys.executable]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    if done.returncode == 9 or "unshare" in done.stderr:
        pytest.skip("needs a network namespace with an interface of its own")
    assert done.returncode == 0, done.stderr


@needs_ping
def test_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        pytest.skip("needs IPv6 on the loopback")
    assert ping.ping_all({0: "::1", 1: "127.0.0.1"}, 5.0) == {0: True, 1: True}


def test_no_address_needs_no_process() -> None:
    assert ping.ping_all({}, 1.0) == {}


def _forbidden(folder: Path) -> str:
    """A PATH whose ping ends as iputils does without the right to open a socket."""
    folder.mkdir()
    (folder / "ping").write_text("#!/bin/sh\necho 'ping: socket: Operation not permitted' >&2\nexit 2\n")
    (folder / "ping").chmod(0o755)
    return str(folder)


@pytest.mark.parametrize("why", ["missing", "forbidden"])
def test_without_the_command_nothing_is_measured(why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path) if why == "missing" else _forbidden(tmp_path / "bin"))
    assert ping.ping_all({1: "127.0.0.1", 2: "192.0.2.1"}, 5.0) == {1: None, 2: None}


def test_check_shows_not_measured_and_run_is_not_refused(site, tmp_path):
    one = site(1)
    path = {"PATH": f"{_forbidden(tmp_path / 'bin')}:{os.environ['PATH']}"}
    rows = one.clustertool("check", "--json", env=path).ends(0).json["nodes"]
    assert [row["findings"]["ping"] for row in rows] == [{"level": "skip", "text": "not measured", "fix": ""}]
    assert "not measured" in one.clustertool("check", env=path).ends(0).out
    done = one.clustertool("run", "-w", HELLO, env=path).ends(0)
    assert "ping" not in done.err
    one.servers[0].stop()
    down = one.clustertool("check", "--json", env=path).ends(69).json["nodes"][0]["findings"]
    assert (down["ssh"]["level"], down["ping"]["level"]) == ("bad", "skip")
