"""Lines gives the same lines however its bytes were split, loses none, and stays small and fast."""

from __future__ import annotations

import itertools
import random
import time
import tracemalloc

import pytest

from clustertool.watch.lines import Lines

STREAMS = [
    b"one\ntwo\n",
    b"no newline",
    b"\n\n\na\n\n",
    b"dos\r\nunix\nend\r\n",
    b"a\r\r\nb\r",
    "é…😀\n😀".encode(),
    b"bad \xff\xe2\n\xe2\x82\nx\xf0\x9f\n",
    b"10%\r20%\r30%\ndone",
    b"\r10%\r20%\n\r\r\n",
    b"bar\r   \rtext\n\rlast",
    b"0123456789\nab\n01234567",
    "ééééééé\n".encode(),
]


def lines_of(*chunks: bytes, limit: int = 1 << 20) -> list[str]:
    lines = Lines(limit=limit)
    return [line for chunk in chunks for line in lines.feed(chunk)] + lines.end()


def expected(data: bytes) -> list[str]:
    """The law in slow motion: split at newlines, take the last segment that is not empty."""
    whole = data.split(b"\n")
    ended, rest = whole[:-1], whole[-1]
    if rest.strip(b"\r"):
        ended.append(rest)
    segments = [[part for part in line.split(b"\r") if part] for line in ended]
    return [parts[-1].decode("utf-8", "backslashreplace") if parts else "" for parts in segments]


@pytest.mark.parametrize("data", STREAMS)
def test_every_split_in_three_gives_the_same_lines(data: bytes) -> None:
    for one, two in itertools.combinations_with_replacement(range(len(data) + 1), 2):
        assert lines_of(data[:one], data[one:two], data[two:]) == expected(data)


@pytest.mark.parametrize("data", [stream[:11] for stream in STREAMS])
def test_every_split_whatsoever_gives_the_same_lines(data: bytes) -> None:
    for cuts in itertools.product((False, True), repeat=len(data) - 1):
        places = [0, *(at + 1 for at, cut in enumerate(cuts) if cut), len(data)]
        assert lines_of(*(data[a:b] for a, b in itertools.pairwise(places))) == expected(data)


@pytest.mark.parametrize("data", STREAMS)
@pytest.mark.parametrize("limit", [1, 3, 8])
def test_a_cut_line_does_not_depend_on_the_split_either(data: bytes, limit: int) -> None:
    whole = lines_of(data, limit=limit)
    for cut in range(len(data) + 1):
        assert lines_of(data[:cut], data[cut:], limit=limit) == whole
    assert lines_of(*(bytes([byte]) for byte in data), limit=limit) == whole


@pytest.mark.parametrize("seed", range(20))
def test_random_bytes_in_random_pieces(seed: int) -> None:
    chance = random.Random(seed)
    data = bytes(chance.choices(b"ab\n\r\xc3\xa9\xff ", k=2000))
    lines, found, at = Lines(), [], 0
    while at < len(data):
        size = chance.randint(1, 40)
        found += lines.feed(data[at : at + size])
        at += size
    assert found + lines.end() == expected(data)


def test_bytes_that_are_no_utf8_stay_visible() -> None:
    assert lines_of(b"caf\xe9\n") == ["caf\\xe9"]


def test_a_line_over_the_limit_is_cut_between_characters_and_says_so() -> None:
    assert lines_of("éééé\nnext\n".encode(), limit=5) == ["éé [cut: this line has 8 bytes]", "next"]


def test_a_bar_is_shown_about_once_a_second_and_not_again_by_its_newline() -> None:
    lines = Lines()
    seen: list[tuple[float, str]] = []
    for tenth in range(35):
        now = 100 + tenth / 10
        assert lines.feed(b"\r%d%%" % tenth) == []
        seen += [(now, line) for line in lines.take_bar(now)]
    # The segment that is still open may be half a bar, so the one before is shown; the very first has none before.
    assert seen == [(100.1, "0%"), (101.1, "10%"), (102.1, "20%"), (103.1, "30%")]
    assert lines.take_bar(104.5) == ["34%"]  # silence: it is all there is
    assert lines.take_bar(110) == []
    assert lines.feed(b"\nnext\n") == ["next"]


def test_a_bar_never_splits_a_line_that_has_no_bar() -> None:
    lines = Lines()
    lines.feed(b"half a li")
    assert lines.take_bar(1) == lines.take_bar(100) == []
    assert lines.feed(b"ne\n") == ["half a line"]


def test_a_carriage_return_before_its_newline_is_not_shown_twice() -> None:
    lines = Lines()
    assert lines.feed(b"text\r") == []
    assert lines.take_bar(5) == ["text"]
    assert lines.feed(b"\ntext\n") == ["text"]


def test_a_blanked_bar_is_not_shown() -> None:
    lines = Lines()
    lines.feed(b"\r10%\r     \r")
    assert lines.take_bar(5) == []


def test_what_a_bar_showed_is_given_by_end_only_if_it_moved() -> None:
    lines = Lines()
    lines.feed(b"90%\r")
    assert lines.take_bar(5) == ["90%"]
    assert lines.end() == []
    lines.feed(b"90%\r")
    assert lines.take_bar(10) == ["90%"]
    lines.feed(b"100%\r")
    assert lines.end() == ["100%"]


def test_ten_megabytes_without_a_newline_take_linear_time() -> None:
    lines, start = Lines(), time.perf_counter()
    for _ in range(10_000):
        assert lines.feed(b"x" * 1000) == []
    (line,) = lines.feed(b"\n")
    assert len(line) == 10_000_000
    assert time.perf_counter() - start < 5  # quadratic would be minutes


def test_memory_is_bounded_by_the_limit_however_long_a_line_is() -> None:
    lines = Lines(limit=10_000)
    tracemalloc.start()
    try:
        for _ in range(20_000):
            lines.feed(b"x" * 1000)
            lines.feed(b"bar\r" * 10 + b"x" * 500)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200_000
