"""Round-trip times of many machines from one process; who does not answer has None, and nothing is raised for it.

An unprivileged ICMP socket where the system allows it, a raw one for root, else one `ping` process for each machine.
"""

from __future__ import annotations

import os
import select
import shutil
import socket
import struct
import subprocess
import time
from collections.abc import Iterable, Mapping

from clustertool.ssh.parallel import each

_ROUNDS = 3  # a lost packet is no lost machine
_Target = tuple[int, str]  # family and numeric address
_KINDS = {  # family -> protocol, type of a request, type of a reply
    socket.AF_INET: (socket.IPPROTO_ICMP, 8, 0),
    socket.AF_INET6: (socket.IPPROTO_ICMPV6, 128, 129),
}


def ping_all(addresses: Mapping[int, str], timeout: float) -> dict[int, float | None]:
    """Seconds to each address (or name) and back, None without an answer; takes at most about `timeout` seconds."""
    end = time.monotonic() + timeout
    names = sorted(set(addresses.values()))
    found = each(names, _resolve, timeout=timeout / 2).ok
    targets = {names[key]: target for key, target in found.items() if target}
    times: dict[_Target, float] = {}
    for family in _KINDS:
        wanted = {target for target in targets.values() if target[0] == family}
        if wanted:
            times.update(_ping_family(family, wanted, end))
    return {key: times.get(targets[name]) if name in targets else None for key, name in addresses.items()}


def _resolve(name: str) -> _Target | None:
    try:
        family, _, _, _, address = socket.getaddrinfo(name, None, socket.AF_UNSPEC, socket.SOCK_DGRAM)[0]
    except (OSError, UnicodeError):
        return None
    return int(family), str(address[0])


def _ping_family(family: int, wanted: Iterable[_Target], end: float) -> dict[_Target, float]:
    sock = _open(family)
    if sock is None:
        return _by_command(list(wanted), end)
    with sock:
        sock.setblocking(False)
        return _Echoes(sock, family, list(wanted)).gather(end)


def _open(family: int) -> socket.socket | None:
    for kind in (socket.SOCK_DGRAM, socket.SOCK_RAW):
        try:
            return socket.socket(family, kind, _KINDS[socket.AddressFamily(family)][0])
        except OSError:  # not allowed to this user
            continue
    return None


class _Echoes:
    """Requests out, replies in. A reply is ours by the random bytes it carries: identifiers are the kernel's business."""

    def __init__(self, sock: socket.socket, family: int, targets: list[_Target]) -> None:
        self._sock = sock
        self._family = family
        self._targets = targets
        self._token = os.urandom(12)
        self._sent: dict[tuple[int, int], float] = {}
        self._times: dict[_Target, float] = {}

    def gather(self, end: float) -> dict[_Target, float]:
        start = time.monotonic()
        for number in range(_ROUNDS):
            self._send(number)
            self._listen(start + (end - start) * (number + 1) / _ROUNDS)
            if len(self._times) == len(self._targets):
                break
        return self._times

    def _send(self, number: int) -> None:
        for index, target in enumerate(self._targets):
            if target in self._times:
                continue
            body = self._token + struct.pack(">II", number, index)
            self._sent[number, index] = time.monotonic()
            try:
                self._sock.sendto(_packet(self._family, index, body), (target[1], 0))
            except OSError:  # no route, a full buffer: as good as no answer
                continue
            if index % 32 == 31:
                self._take()

    def _listen(self, end: float) -> None:
        poll = select.poll()
        poll.register(self._sock, select.POLLIN)
        while len(self._times) < len(self._targets):
            left = end - time.monotonic()
            if left <= 0 or not poll.poll(left * 1000):
                return
            self._take()

    def _take(self) -> None:
        """Read all replies that have come."""
        while True:
            try:
                data, _ = self._sock.recvfrom(2048)
            except OSError:  # nothing more, or an error some router sent us
                return
            now = time.monotonic()
            at = data.find(self._token)
            if at < 8 or len(data) < at + 20 or data[at - 8] != _KINDS[socket.AddressFamily(self._family)][2]:
                continue  # our own request on the loopback, or somebody else's
            number, index = struct.unpack(">II", data[at + 12 : at + 20])
            sent = self._sent.get((number, index))
            if sent is not None:
                self._times.setdefault(self._targets[index], now - sent)


def _packet(family: int, index: int, body: bytes) -> bytes:
    kind = _KINDS[socket.AddressFamily(family)][1]
    head = struct.pack(">BBHHH", kind, 0, 0, os.getpid() & 0xFFFF, index & 0xFFFF)
    check = _checksum(head + body) if family == socket.AF_INET else 0  # the kernel does it for IPv6
    return head[:2] + struct.pack(">H", check) + head[4:] + body


def _checksum(data: bytes) -> int:
    total: int = sum(struct.unpack(f">{len(data) // 2}H", data))
    while total >> 16:
        total = (total & 0xFFFF) + (total >> 16)
    return ~total & 0xFFFF


def _by_command(targets: list[_Target], end: float) -> dict[_Target, float]:
    """The slow way: the system's ping, which is allowed to do what we are not."""
    ping = shutil.which("ping")
    left = end - time.monotonic()
    if not ping or left <= 0:
        return {}

    def one(target: _Target) -> float:
        start = time.monotonic()
        argv = [
            str(ping),
            "-6" if target[0] == socket.AF_INET6 else "-4",
            "-c",
            "1",
            "-W",
            str(max(1, round(left))),
            target[1],
        ]
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                timeout=left,
                start_new_session=True,
            )
        except (subprocess.TimeoutExpired, OSError):
            return -1.0
        return time.monotonic() - start if done.returncode == 0 else -1.0

    got = each(targets, one, timeout=left + 1).ok
    return {targets[key]: seconds for key, seconds in got.items() if seconds >= 0}
