"""The listener of `check` between nodes: a stranger cannot find the token piece by piece."""

from __future__ import annotations

import socket
from collections.abc import Iterator

import pytest

from clustertool.node.probe.link_test import _NAME, _TOKEN, _Listener

TOKEN = b"0123456789abcdef" * 2
SILENCE = 0.3  # seconds without an answer and without an end


@pytest.fixture
def address() -> Iterator[tuple[str, int]]:
    door = socket.create_server(("127.0.0.1", 0))
    door.setblocking(False)
    listener = _Listener([door], TOKEN, 7)
    yield door.getsockname()
    listener.end()


def _says(address: tuple[str, int], data: bytes, seconds: float = SILENCE) -> bytes | None:
    """What the listener answers: b"" for an end, None for nothing."""
    with socket.create_connection(address, timeout=seconds) as sock:
        sock.sendall(data)
        try:
            return sock.recv(100)
        except TimeoutError:
            return None


def test_a_part_of_the_token_gets_no_answer(address: tuple[str, int]) -> None:
    """The check of a wrong first character and of a right one takes the same time."""
    assert len(TOKEN) == _TOKEN
    for part in (b"0", b"x", TOKEN[:-1], b"x" + TOKEN[1:-1], TOKEN):
        assert _says(address, part) is None


def test_only_the_whole_token_is_answered(address: tuple[str, int]) -> None:
    assert _says(address, TOKEN + _NAME, 30.0) == b"00000007"
    for wrong in (
        b"x" + TOKEN[1:] + _NAME,
        TOKEN[:-1] + b"x" + _NAME,
        bytes(_TOKEN) + _NAME,
        TOKEN + b"?",
        TOKEN + _NAME + b"x",
    ):
        assert _says(address, wrong) in (b"", None)
