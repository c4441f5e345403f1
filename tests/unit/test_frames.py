"""Frames are the same however their bytes are split; garbage ends in FrameError, without memory and without time."""

from __future__ import annotations

import itertools
import json
import struct

import pytest

from clustertool.model.wire.frames import MAX_HEADER, MAX_PAYLOAD, Decoder, FrameError, Header, MemorySink, encode

FRAMES: list[tuple[Header, bytes]] = [
    ({}, b""),
    ({"type": "beat", "t": 1.5}, b""),
    ({"type": "log", "ö": "é😀\n", "n": [1, {"a": None}]}, b"\x00\xff\n\x00"),
    ({"x": "\udc80"}, b"p"),
]
STREAM = b"".join(encode(*frame) for frame in FRAMES)


def fed(*chunks: bytes) -> list[tuple[Header, bytes]]:
    decoder = Decoder()
    return [frame for chunk in chunks for frame in decoder.feed(chunk)]


def test_every_split_in_three() -> None:
    for one, two in itertools.combinations_with_replacement(range(len(STREAM) + 1), 2):
        assert fed(STREAM[:one], STREAM[one:two], STREAM[two:]) == FRAMES


def test_byte_by_byte_a_frame_comes_with_its_last_byte() -> None:
    decoder = Decoder()
    ends = list(itertools.accumulate(len(encode(*frame)) for frame in FRAMES))
    for at in range(len(STREAM)):
        found = list(decoder.feed(STREAM[at : at + 1]))
        assert found == ([FRAMES[ends.index(at + 1)]] if at + 1 in ends else [])


def test_the_wire_is_what_the_docstring_says() -> None:
    assert encode({"a": 1}, b"xy") == struct.pack(">II", 7, 2) + b'{"a":1}' + b"xy"


def test_a_payload_is_bytes_of_its_own() -> None:
    """What was handed out does not change with what comes later."""
    decoder = Decoder()
    ((_, first),) = decoder.feed(encode({}, b"one"))
    list(decoder.feed(encode({}, b"two")))
    assert first == b"one"
    assert type(first) is bytes


SENT = [({"n": 1}, bytes(range(256)) * 260), ({"n": 2}, b"small"), ({"n": 3}, b""), ({"n": 4}, b"z" * (1 << 16))]


@pytest.mark.parametrize("step", [1, 7, 1 << 16, (1 << 16) + 1, 1 << 20])
@pytest.mark.parametrize("in_place", [True, False])
def test_a_payload_goes_through_its_sink_as_it_comes(step: int, in_place: bool) -> None:
    """In whichever portions, read in place or not: its frame follows, without it, and so do the frames behind."""
    stream, at, found, made = b"".join(encode(*frame) for frame in SENT), 0, [], []

    def sink(header: Header, size: int) -> MemorySink:
        made.append((header, size, MemorySink(size)))
        return made[-1][2]

    decoder = Decoder(sink=sink)
    while at < len(stream):
        room = decoder.room()
        if room is not None and in_place:
            assert 0 < len(room) <= 1 << 16
            size = min(step, len(room), len(stream) - at)
            room[:size] = stream[at : at + size]
            found += decoder.taken(size)
        else:
            size = min(step, len(stream) - at)
            found += decoder.feed(stream[at : at + size])
        at += size
    assert found == [(header, b"") for header, _ in SENT] and decoder.room() is None
    assert [(header, size, bytes(one.data)) for header, size, one in made] == [(h, len(p), p) for h, p in SENT if p]


def raw(header: bytes, payload: bytes = b"") -> bytes:
    return struct.pack(">II", len(header), len(payload)) + header + payload


GARBAGE = [
    b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    b"\xff" * 8,
    raw(b""),
    raw(b"{"),
    raw(b"[1]"),
    raw(b'"text"'),
    raw(b"null"),
    raw(b"\xff\xfe{}"),
    raw(b"[" * 100_000),
    raw(b'{"a":' * 100_000),
]


@pytest.mark.parametrize("data", GARBAGE)
def test_garbage(data: bytes) -> None:
    with pytest.raises(FrameError):
        fed(data)


@pytest.mark.parametrize("head, body", [(MAX_HEADER + 1, 0), (0, MAX_PAYLOAD + 1), (2**32 - 1, 2**32 - 1)])
def test_lengths_are_refused_before_anything_is_kept(head: int, body: int) -> None:
    with pytest.raises(FrameError, match="a frame of"):
        fed(struct.pack(">II", head, body))


def test_a_reader_has_limits_of_its_own() -> None:
    exact = json.dumps({"a": "x" * 92}).replace(" ", "").encode()
    assert len(exact) == 100
    assert list(Decoder(100, 0).feed(raw(exact))) == [({"a": "x" * 92}, b"")]
    for decoder, data in ((Decoder(99, 0), raw(exact)), (Decoder(100, 0), raw(exact, b"x"))):
        with pytest.raises(FrameError):
            decoder.feed(data)


def test_large_payloads_in_many_pieces_take_no_square_of_time() -> None:
    frame = encode({"type": "log"}, b"x" * MAX_PAYLOAD)
    decoder = Decoder()
    found = [got for at in range(0, len(frame), 1 << 14) for got in decoder.feed(frame[at : at + (1 << 14)])]
    assert [len(payload) for _, payload in found] == [MAX_PAYLOAD]
