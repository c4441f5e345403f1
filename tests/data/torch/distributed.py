"""Ranks meet at MASTER_ADDR:MASTER_PORT, and then connect to each other at ports that the kernel chose, as gloo does."""

from __future__ import annotations

import json
import os
import socket
import time
from datetime import timedelta

import torch

_peers: dict[int, socket.socket] = {}


def get_rank() -> int:
    return int(os.environ["RANK"])


def get_world_size() -> int:
    return int(os.environ["WORLD_SIZE"])


def init_process_group(backend: str, timeout: timedelta) -> None:
    assert backend == ("nccl" if torch.cuda.is_available() else "gloo")
    if torch.fault() == "away":
        time.sleep(1000)
    end = time.monotonic() + timeout.total_seconds()
    door = socket.create_server((os.environ["POD_IP"], 0))
    for peer, where in enumerate(_addresses(door.getsockname(), end)):
        if peer < get_rank():
            _peers[peer] = _connect(where, end)
            _peers[peer].sendall(b"%08d" % get_rank())
        elif peer > get_rank():
            door.settimeout(max(0.1, end - time.monotonic()))
            sock, _ = door.accept()
            _peers[int(sock.recv(8, socket.MSG_WAITALL))] = sock


def all_reduce(tensor: torch.Changing) -> None:
    if torch.fault() == "wrong":
        tensor.value += 1
    for peer in _peers.values():
        peer.sendall(b"%08d" % tensor.value)
    tensor.value += sum(int(peer.recv(8, socket.MSG_WAITALL)) for peer in _peers.values())


def _addresses(own: tuple[str, int], end: float) -> list[tuple[str, int]]:
    """Of all ranks; rank 0 knows them first."""
    master = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    if get_rank():
        with _connect(master, end) as sock:
            sock.sendall(json.dumps([get_rank(), own]).encode() + b"\n")
            return [tuple(where) for where in json.loads(sock.makefile().readline())]
    found = {0: own}
    with socket.create_server(master) as store:
        socks = []
        while len(found) < get_world_size():
            store.settimeout(max(0.1, end - time.monotonic()))
            socks.append(store.accept()[0])
            rank, where = json.loads(socks[-1].makefile().readline())
            found[rank] = where
        for sock in socks:
            sock.sendall(json.dumps([found[rank] for rank in sorted(found)]).encode() + b"\n")
    return [found[rank] for rank in sorted(found)]


def _connect(where: tuple[str, int], end: float) -> socket.socket:
    while True:
        try:
            sock = socket.create_connection(where, timeout=max(0.1, end - time.monotonic()))
        except ConnectionRefusedError:  # not there yet
            time.sleep(0.05)
        except OSError as error:
            raise RuntimeError(f"connect to {where[0]}:{where[1]}: {error}") from None
        else:
            sock.settimeout(None)
            return sock
