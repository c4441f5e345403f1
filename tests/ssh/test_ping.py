"""Pings: one process, all addresses at once, silence is no error."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import time

import pytest

from clustertool.fleet import ping

CODE = """
import json, socket, sys, time
from clustertool.fleet import ping
FORBID = sys.argv[1]
if FORBID:
    real = socket.socket
    def only(family=-1, type=-1, proto=-1, fileno=None):
        if type == socket.SOCK_RAW or (FORBID == "icmp" and type == socket.SOCK_DGRAM and proto == socket.IPPROTO_ICMP):
            raise PermissionError
        return real(family, type, proto, fileno)
    socket.socket = only
start = time.monotonic()
got = ping.ping_all({1: "127.0.0.1", 2: "240.0.0.1", 3: "nowhere.invalid", 4: "127.0.0.1"}, 1.0)
print(json.dumps([got[1] is not None, got[2], got[3], got[4] == got[1], time.monotonic() - start < 4]))
"""


def _may_ping() -> bool:
    return os.getuid() == 0 or any(_opens(kind) for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW))


def _opens(kind: int) -> bool:
    try:
        socket.socket(socket.AF_INET, kind, socket.IPPROTO_ICMP).close()
    except OSError:
        return False
    return True


needs_icmp = pytest.mark.skipif(not _may_ping(), reason="needs root or net.ipv4.ping_group_range")


@needs_icmp
def test_many_addresses_answer_at_once() -> None:
    start = time.monotonic()
    got = ping.ping_all({number: f"127.0.{number // 200}.{1 + number % 200}" for number in range(400)}, 5.0)
    assert len(got) == 400 and all(seconds is not None and 0 <= seconds < 1 for seconds in got.values())
    assert time.monotonic() - start < 2


@needs_icmp
def test_silence_is_none_and_takes_the_timeout() -> None:
    start = time.monotonic()
    got = ping.ping_all({7: "127.0.0.1", 8: "240.0.0.1", 9: "nowhere.invalid", 10: ""}, 0.5)
    assert got[7] is not None and got[8] is None and got[9] is None
    assert set(got) == {7, 8, 9, 10} and time.monotonic() - start < 2


@needs_icmp
def test_ipv6() -> None:
    try:
        with socket.socket(socket.AF_INET6, socket.SOCK_STREAM) as sock:
            sock.bind(("::1", 0))
    except OSError:
        pytest.skip("needs IPv6 on the loopback")
    assert ping.ping_all({0: "::1", 1: "127.0.0.1"}, 2.0)[0] is not None


def test_nobody_to_ping() -> None:
    assert ping.ping_all({}, 1.0) == {}


@pytest.mark.parametrize("forbidden", ["", "icmp"])
def test_any_way_that_is_left(forbidden: str) -> None:
    if forbidden and not shutil.which("ping"):
        pytest.skip("needs the command ping")
    if not forbidden and not _may_ping():
        pytest.skip("needs root or net.ipv4.ping_group_range")
    done = subprocess.run([sys.executable, "-c", CODE, forbidden], capture_output=True, timeout=60, check=True)
    assert done.stdout.decode().strip() == "[true, null, null, true, true]"


def test_the_checksum_of_the_standard() -> None:
    packet = bytes.fromhex("0800000012340001") + b"abcdefgh"
    check = ping._checksum(packet)
    assert ping._checksum(packet[:2] + check.to_bytes(2, "big") + packet[4:]) == 0
