"""Cutting a file into shards: every byte is there once, lines are whole, shards are even, and no reader finds half a set."""

from __future__ import annotations

import itertools
import os
import random
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from clustertool.errors import DataError, Interrupted, UsageError
from clustertool.fleet.dispatch import split_data as module
from clustertool.fleet.dispatch.split_data import LineOrder, Result, cut
from clustertool.model.planning.shards import assign_shards, shard_name, shares


def quiet(*_: object) -> None:
    """Neither progress nor interrupts."""


def split(data: Path, shards: int, seed: int | None = None, **given: Any) -> Result:
    return cut(LineOrder(data, given.pop("folder", data.parent), shards, seed, **given), quiet, quiet)


def contents(result: Result) -> list[bytes]:
    return [shard.path.read_bytes() for shard in result.shards]


def lines_of(data: bytes) -> list[bytes]:
    return [line for line in re.split(rb"(?<=\n)", data) if line]


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks and memory so small that little files meet every limit."""
    monkeypatch.setattr(module, "BLOCK", 64)
    monkeypatch.setattr(module, "MEMORY", 1500)


TEXTS = {
    "plain": b"".join(b"line %d\n" % n for n in range(100)),
    "no newline at the end": b"a\nbb\nccc\n" * 9 + b"the end",
    "crlf": b"a\r\nb\r\n\r\nc\rd\r\n" * 9 + b"\r",
    "binary": bytes(range(256)) * 5 + b"\n" + bytes(range(256)) * 3,
    "empty lines": b"\n" * 300,
    "long lines": b"".join(bytes([65 + n]) * (n % 3 * 900 + 1) + b"\n" for n in range(26)),
    "one long line at the end": b"x\n" * 9 + b"y" * 5000,
    "blocks that end with lines": (b"z" * 63 + b"\n") * 20,
    "no newline at all": b"alone",
    "unicode separators": "a\x0bb\x0cc\x1cd\x85e\u2028f\n".encode() * 9,
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_shards_are_the_file_in_pieces(tmp_path: Path, small: None, text: bytes) -> None:
    data = tmp_path / "d.txt"
    data.write_bytes(text)
    total = len(lines_of(text))
    for n in {1, 2, 3, total // 2, total - 1, total} - {0}:
        if n > total:
            continue
        result = split(data, n, replace=True)
        found = contents(result)
        assert b"".join(found) == text
        assert [len(lines_of(piece)) for piece in found] == list(shares(total, n)) == [s.lines for s in result.shards]
        assert [len(piece) for piece in found] == [shard.bytes for shard in result.shards]
        assert names(tmp_path) == ["d.txt", *(shard_name("d.txt", index, n) for index in range(n))]


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS)
def test_shuffled_shards_have_the_same_lines(tmp_path: Path, small: None, text: bytes) -> None:
    data = tmp_path / "d.txt"
    data.write_bytes(text)
    total = len(lines_of(text))
    for n, seed in itertools.product({1, 3, total} - {0}, (1, 2)):
        if n > total:
            continue
        found = contents(split(data, n, seed, replace=True))
        pieces = [lines_of(piece) for piece in found]
        assert [len(piece) for piece in pieces] == list(shares(total, n))
        assert Counter(itertools.chain(*pieces)) == Counter(lines_of(text))
        assert found == contents(split(data, n, seed, replace=True))
        assert len(names(tmp_path)) == n + 1, "no bucket is left"


def test_the_order_depends_on_the_seed_alone_and_is_the_same_for_ever(tmp_path: Path) -> None:
    data = tmp_path / "d"
    data.write_bytes(b"".join(b"%d\n" % n for n in range(1, 11)))
    assert contents(split(data, 2, 7)) == [b"8\n6\n10\n3\n1\n", b"5\n9\n7\n4\n2\n"]
    whole = contents(split(data, 1, 7, replace=True))[0]
    assert whole == b"8\n6\n10\n3\n1\n5\n9\n7\n4\n2\n"
    assert contents(split(data, 1, 8, replace=True))[0] != whole


@pytest.mark.parametrize("memory", [1 << 20, 1])
def test_every_order_is_as_likely_as_any_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, memory: int) -> None:
    """In memory, and through buckets down to one line each."""
    monkeypatch.setattr(module, "MEMORY", max(memory, 200))
    monkeypatch.setattr(module, "BLOCK", 8)
    data = tmp_path / "d"
    data.write_bytes(b"a\nb\nc\n")
    found = Counter(contents(split(data, 1, seed, replace=True))[0] for seed in range(300))
    assert len(found) == 6
    assert min(found.values()) > 24, found  # 50 each; 24 is four standard deviations away


def test_the_line_that_no_newline_ends_ends_a_shard_at_random(tmp_path: Path) -> None:
    data = tmp_path / "d"
    data.write_bytes(b"a\nb\nc\nd\nlast")
    where = set()
    for seed in range(40):
        found = contents(split(data, 3, seed, replace=True))
        ends = [index for index, piece in enumerate(found) if piece.endswith(b"last")]
        assert len(ends) == 1
        assert sum(piece.count(b"last") for piece in found) == 1
        where.add(ends[0])
    assert where == {0, 1, 2}


def test_numbers_grow_with_their_number() -> None:
    assert [shard_name("a.txt", 3, n) for n in (4, 100_000, 100_001, 2_000_000)] == [
        "a.txt-00003",
        "a.txt-00003",
        "a.txt-000003",
        "a.txt-0000003",
    ]
    assert [shares(10, n) for n in (1, 3, 10)] == [(10,), (4, 3, 3), (1,) * 10]


def test_a_set_with_longer_numbers_is_known_by_its_first_one(tmp_path: Path) -> None:
    for name in ("d-000000", "d-000001", "d-100000", "d-2024001", "d-00007", "d-0008", "e-00001"):
        (tmp_path / name).touch()
    assert module.existing_shards(tmp_path, "d") == ["d-000000", "d-000001", "d-00007", "d-100000"]


# -- what cannot be cut -----------------------------------------------------------------------------------------------

WRONG = [
    (b"", 1, "is empty, too few for 1 shards"),
    (b"a", 2, "has 1 line, too few for 2 shards"),
    (b"a\nb\nc\n", 4, "has 3 lines, too few for 4 shards"),
    (b"\x1f\x8b\x08 and so on", 1, "is packed \\(gzip\\)"),
    (b"\x28\xb5\x2f\xfd and so on", 1, "is packed \\(zstd\\)"),
]


@pytest.mark.parametrize("text, shards, what", WRONG)
def test_data_that_cannot_be_cut(tmp_path: Path, text: bytes, shards: int, what: str) -> None:
    (tmp_path / "d").write_bytes(text)
    with pytest.raises(DataError, match=what) as caught:
        split(tmp_path / "d", shards)
    assert caught.value.fix
    assert names(tmp_path) == ["d"]


def test_files_that_are_none(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDWR | os.O_NONBLOCK)
    try:
        for name, what in (("missing", "No such file"), ("pipe", "is no file"), (".", "Is a directory")):
            with pytest.raises(DataError, match=what):
                split(tmp_path / name, 2)
    finally:
        os.close(reader)
    with pytest.raises(DataError, match="Not a directory"):
        (tmp_path / "d").write_bytes(b"a\n")
        split(tmp_path / "d", 1, folder=tmp_path / "d")


@pytest.mark.parametrize("seed", [None, 1])
@pytest.mark.parametrize("change", ["grow", "shrink", "rewrite"])
def test_a_file_that_changes_meanwhile(tmp_path: Path, small: None, seed: int | None, change: str) -> None:
    data = tmp_path / "d"
    data.write_bytes(TEXTS["plain"])
    os.utime(data, (1, 1))

    def meddle(phase: str, done: int, total: int) -> None:
        if phase == "writing":
            data.write_bytes({"grow": TEXTS["plain"] * 2, "shrink": b"a\n", "rewrite": TEXTS["plain"]}[change])

    with pytest.raises(DataError, match="changed while it was cut"):
        cut(LineOrder(data, tmp_path, 3, seed), meddle, quiet)
    assert names(tmp_path) == ["d"]


# -- what is there already --------------------------------------------------------------------------------------------


def test_shards_that_are_there_stay_or_go_as_a_whole(tmp_path: Path) -> None:
    data = tmp_path / "d.txt"
    data.write_bytes(TEXTS["plain"])
    (tmp_path / "d.txt-20240101").write_text("a file of a day, no shard")
    (tmp_path / "d.txt-1").write_text("another one's")
    before = contents(split(data, 5))
    with pytest.raises(UsageError, match="has shards of d.txt already: d.txt-00000 to d.txt-00004") as caught:
        split(data, 3)
    assert "--force" in caught.value.fix
    assert before == [(tmp_path / f"d.txt-0000{n}").read_bytes() for n in range(5)]
    result = split(data, 3, replace=True)
    assert result.replaced == 5
    assert names(tmp_path) == ["d.txt", "d.txt-00000", "d.txt-00001", "d.txt-00002", "d.txt-1", "d.txt-20240101"]
    assert split(data, 2, folder=tmp_path / "else" / "where").replaced == 0


def test_odd_names(tmp_path: Path) -> None:
    for name in ("[a]*?.txt", "-x", "a b\n", "\udcff", "a-00001"):
        data = tmp_path / name
        data.write_bytes(b"1\n2\n")
        assert [shard.path.name for shard in split(data, 2).shards] == [f"{name}-00000", f"{name}-00001"]
        with pytest.raises(UsageError):
            split(data, 2)
        assert split(data, 1, replace=True).replaced == 2
        assert data.read_bytes() == b"1\n2\n"


# -- interrupts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", [None, 1])
def test_an_interrupt_leaves_what_was_there(tmp_path: Path, small: None, seed: int | None) -> None:
    """At every moment at which one can be noticed."""
    data = tmp_path / "d"
    data.write_bytes(TEXTS["plain"] + b"tail")
    old = contents(split(data, 4))
    for moment in itertools.count():
        countdown = itertools.count(-moment)

        def check() -> None:
            if next(countdown) == 0:  # noqa: B023 - called in this round only
                raise Interrupted("Ctrl+C")

        try:
            cut(LineOrder(data, tmp_path, 3, seed, replace=True), quiet, check)
        except Interrupted:
            assert [(tmp_path / f"d-0000{n}").read_bytes() for n in range(4)] == old
            assert len(names(tmp_path)) == 5
        else:
            assert moment > 20
            assert len(names(tmp_path)) == 4
            return


def test_a_set_that_was_cut_short_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed between two renames: what is there has a hole, and the next split cleans up."""
    data = tmp_path / "d"
    data.write_bytes(TEXTS["plain"])
    split(data, 6)
    rename = os.rename
    for last in range(4):
        allowed = iter(range(last))

        def some(source: Path, target: Path) -> None:
            if next(allowed, None) is None:  # noqa: B023 - called in this round only
                raise OSError(5, "killed", str(target))
            rename(source, target)

        monkeypatch.setattr(os, "rename", some)
        with pytest.raises(DataError, match="killed"):
            split(data, 4, replace=True)
        with pytest.raises(DataError):
            assign_shards(names(tmp_path), ["d-*"], 1)
        monkeypatch.setattr(os, "rename", rename)
        assert len(split(data, 6, replace=True).shards) == 6
    assert len(names(tmp_path)) == 7


PROGRAM = """
import sys
from pathlib import Path
from clustertool.fleet.dispatch import split_data as cut
def progress(phase, done, total):
    if phase == "writing":
        print("writing", flush=True)
        sys.stdin.read()
cut.cut(cut.LineOrder(Path("d"), Path("."), 2), progress, lambda: None)
"""


def test_what_a_killed_split_has_left_goes_and_a_living_ones_stays(tmp_path: Path) -> None:
    (tmp_path / "d").write_bytes(b"a\nb\n")
    options: dict[str, Any] = {"cwd": tmp_path, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    with subprocess.Popen([sys.executable, "-c", PROGRAM], env=env, **options) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"writing\n"
        (left,) = [name for name in names(tmp_path) if name.endswith(".split")]
        split(tmp_path / "d", 2)
        assert left in names(tmp_path)
        process.kill()
        process.wait()
    assert left in names(tmp_path)
    split(tmp_path / "d", 2, replace=True)
    assert names(tmp_path) == ["d", "d-00000", "d-00001"]


# -- size -------------------------------------------------------------------------------------------------------------

MEASURED = """
import re, sys
from pathlib import Path
from clustertool.fleet.dispatch import split_data as cut
seed = int(sys.argv[1]) if sys.argv[1] else None
cut.MEMORY //= 8
cut.cut(cut.LineOrder(Path("d"), Path("."), 3, seed, True), lambda *_: None, lambda: None)
status = Path("/proc/self/status").read_text()  # ru_maxrss counts the parent's, too
print(int(re.search(r"VmHWM:\\s+([0-9]+) kB", status)[1]) // 1024)
"""


def one_line(path: Path) -> None:
    with open(path, "wb") as file:
        file.write(b"a\n")
        file.truncate(100 << 20)
        file.seek(0, os.SEEK_END)
        file.write(b"\nb\n")


def many_lines(path: Path) -> None:
    with open(path, "wb") as file:
        for start in range(0, 400_000, 1000):
            file.write(b"".join(b"%099d\n" % n for n in range(start, start + 1000)))


@pytest.mark.parametrize(
    ("make", "seed"),
    [
        pytest.param(one_line, "", marks=pytest.mark.chaos),
        (one_line, "1"),
        (many_lines, ""),
        (many_lines, "1"),
    ],
)
def test_memory_does_not_grow_with_the_file(tmp_path: Path, make: Callable[[Path], None], seed: str) -> None:
    """As one line and as many: far more than a shuffle may hold, which is an eighth of what it is for users."""
    assert module.MEMORY <= 64 << 20
    make(tmp_path / "d")
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run(
        [sys.executable, "-c", MEASURED, seed], cwd=tmp_path, env=env, capture_output=True, text=True, check=True
    )
    assert int(done.stdout) < 70, f"{done.stdout} MB"
    sizes = [(tmp_path / f"d-0000{n}").stat().st_size for n in range(3)]
    assert sum(sizes) == (tmp_path / "d").stat().st_size


def test_random_files(tmp_path: Path, small: None) -> None:
    data, generator = tmp_path / "d", random.Random(4)
    for _ in range(20):
        alphabet = generator.choice([b"\n", b"a\n", b"abc\r\n", bytes(range(256))])
        text = bytes(generator.choice(alphabet) for _ in range(generator.randrange(1, 700)))
        data.write_bytes(text)
        total = len(lines_of(text))
        n = generator.randrange(1, total + 1)
        assert b"".join(contents(split(data, n, replace=True))) == text
        found = contents(split(data, n, generator.randrange(99), replace=True))
        assert Counter(itertools.chain(*map(lines_of, found))) == Counter(lines_of(text))
