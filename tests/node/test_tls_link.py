"""A connection of which the other side has gone: what it has sent before is not lost."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from clustertool.fleet.identity import certificate
from clustertool.node.system.tls_link import TlsLink, context

MOST = 8 << 20
LARGE = {"type": "large", "text": "x" * (4 << 20)}  # more than the kernel takes at once


@dataclass
class Pair:
    member: TlsLink
    coordinator: TlsLink


@pytest.fixture
def pair() -> Iterator[Pair]:
    """Both ends of a connection, on this machine, after the handshake."""
    identity = certificate()
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        client = socket.create_connection(listener.getsockname())
        made = Pair(
            TlsLink(client, context(*identity, server=False), server=False, max_header=MOST),
            TlsLink(listener.accept()[0], context(*identity, server=True), server=True, max_header=MOST),
        )
    deadline = time.monotonic() + 30
    while not (made.member.secure and made.coordinator.secure):
        assert time.monotonic() < deadline
        made.member.turn()
        made.coordinator.turn()
    yield made
    made.member.close()
    made.coordinator.close()


def types(link: TlsLink, seconds: float = 10.0) -> list[str]:
    """Of all messages until the other side closes the connection."""
    found, deadline = [], time.monotonic() + seconds
    while time.monotonic() < deadline:
        try:
            found += [message["type"] for message in link.turn()]
        except ConnectionError:
            return found
        time.sleep(0.001)
    raise AssertionError(f"it is not closed: {found}")


def test_what_came_before_a_reset_is_read_also_if_nothing_can_be_sent_any_more(pair: Pair) -> None:
    """The member closes with unread data, which resets the connection. The coordinator has something to send, which fails."""
    pair.coordinator.send({"type": "stop"})
    pair.coordinator.flush()
    for kind in ("clean", "beat"):
        pair.member.send({"type": kind})
    pair.member.flush()
    pair.member.close()
    pair.coordinator.send({"type": "beat"})
    pair.coordinator.send(LARGE)
    assert types(pair.coordinator) == ["clean", "beat"]


def test_the_last_message_arrives_although_the_answers_are_not_read(pair: Pair) -> None:
    """It is larger than what the kernel takes at once; data that is not read would reset the connection, and drop the rest."""
    pair.coordinator.send({"type": "stop"})
    pair.coordinator.flush()
    pair.member.send(LARGE)
    pair.member.send({"type": "bye"})
    leaves = threading.Thread(target=pair.member.finish, args=(10.0,))
    leaves.start()
    try:
        assert types(pair.coordinator) == ["large", "bye"]
    finally:
        pair.coordinator.close()
        leaves.join(20)
    assert not leaves.is_alive()


def test_a_side_that_never_closes_is_waited_for_no_longer_than_allowed(pair: Pair) -> None:
    pair.member.send({"type": "bye"})
    began = time.monotonic()
    pair.member.finish(0.2)
    assert 0.2 <= time.monotonic() - began < 5.0
    assert types(pair.coordinator) == ["bye"]
