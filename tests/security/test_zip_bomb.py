"""A source in a dispatch that sends a small manifest which unpacks to a quarter of a gigabyte."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
import time
import zlib
from collections.abc import Iterator
from typing import Any

import pytest

from clustertool.model.dispatch import manifest, topology
from clustertool.node.system import tls_link
from tests.node.harness import Bench, until
from tests.node.test_relay import COUNT, Relays, Shipment, _peak


@pytest.fixture(scope="module")
def bomb() -> bytes:
    return zlib.compress(bytes(1 << 28), 9)


@pytest.fixture
def relays(bench: Bench) -> Iterator[Relays]:
    made = Relays(bench.nodes(2), Shipment())
    yield made
    for node in made.nodes:
        for client in node.clients:
            client.close()


class Bomber:
    """A source with the right certificate. It offers what `offers` says, and sends a bomb when it is asked."""

    def __init__(self, relays: Relays, bomb: bytes, *offers: dict[str, Any]) -> None:
        self._bomb, self._offers = bomb, offers
        self._context = tls_link.context(relays.certificate, relays.key, server=True)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self.sent = 0
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                sock, _ = self._listener.accept()
                threading.Thread(target=self._serve, args=(sock,), daemon=True).start()

    def _serve(self, sock: socket.socket) -> None:
        with sock, contextlib.suppress(OSError):
            peer = tls_link.TlsLink(sock, self._context, True, 1 << 20)
            offered = False
            while True:
                select.select([peer], [peer] if peer.wants_write else [], [], 0.05)
                for _ in peer.turn():
                    peer.send({"type": "piece", "piece": 0}, self._bomb)
                    self.sent += 1
                if peer.secure and not offered:
                    offered = True
                    for offer in self._offers:
                        peer.send(offer)

    def close(self) -> None:
        self._listener.close()


@pytest.mark.parametrize(
    "offer",
    [
        {"type": "have", "have": topology.bits({0})},
        {"type": "new", "new": [0, *range(1 << 16)]},
        {"type": "have", "have": "f" * (1 << 18)},
    ],
    ids=["the manifest", "numbers of no piece", "more pieces than there are"],
)
def test_a_bomb_is_not_unpacked(relays: Relays, bomb: bytes, offer: dict[str, Any]) -> None:
    """The relay drops the source, and takes the manifest from another one. The honest node is not blamed."""
    bomber = Bomber(relays, bomb, offer)
    relays.start(0)
    relays.meet([("127.0.0.1", bomber.port)] * 2)
    start = time.monotonic()
    message = until(lambda: (message := relays.says(0, "idle"))["why"] and message)
    assert all(why.startswith("127.0.0.1: ") for why in message["why"])
    assert bomber.sent == (len(offer.get("have", "")) < 1 << 18)
    relays.send(0, *range(COUNT + 2))
    relays.says(0, "done")
    assert time.monotonic() - start < 60
    assert relays.whole(0)
    assert _peak(relays.pid(0)) < 100_000
    bomber.close()


def test_a_manifest_is_unpacked_up_to_its_size_only(bomb: bytes) -> None:
    text = b"manifest" * 1000
    packed = zlib.compress(text)
    assert manifest.unzip(packed, len(text)) == text
    for size in (0, len(text) - 1, len(text) + 1):
        assert manifest.unzip(packed, size) == b""
    assert manifest.unzip(bomb, len(text)) == b""
    assert manifest.unzip(packed[:-3], len(text)) == b""
    assert manifest.unzip(b"no zlib", 7) == b""


@pytest.mark.parametrize("level", [0, 1, 9])
def test_a_zipped_manifest_fits_its_bound(level: int) -> None:
    import random

    for size in (0, 1, 1000, 100_000, 1_000_000):
        assert len(zlib.compress(random.Random(size).randbytes(size), level)) <= manifest.zipped(size)


def test_a_wrong_manifest_of_the_laptop_is_reported(relays: Relays, bomb: bytes) -> None:
    relays.start(0)
    relays.send(0, 0, data=bomb)
    assert relays.says(0, "wrong")["piece"] == 0
