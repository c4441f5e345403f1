"""This module cuts a file of lines into shards. It streams, keeps every byte, and creates all shards or none.

A line ends with a newline; a carriage return before it belongs to the line, and the rest after the last newline is a line too.
Shards are written in a separate folder and renamed when all are complete, the first one last: an incomplete set has a gap.
"""

from __future__ import annotations

import contextlib
import fcntl
import glob
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random
from typing import BinaryIO

from clustertool.errors import DataError, UsageError
from clustertool.model.planning.shards import shard_name, shares
from clustertool.node.storage import files

BLOCK = 1 << 20
MEMORY = 64 << 20  # bytes in memory of a shuffle; larger files use buckets on the disk
_PER_LINE = 90  # additional bytes of a line in memory
_BUCKETS = 128  # open files at a time
_BUFFER = 1 << 16
_PACKED = {b"\x1f\x8b": "gzip", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"\x28\xb5\x2f\xfd": "zstd", b"PK\3\4": "zip"}
Progress = Callable[[str, int, int], None]  # what is done, bytes done, bytes in all
Check = Callable[[], None]


@dataclass(frozen=True)
class LineOrder:
    """The parameters of a split. seed: of a random order; None: the order of the file. replace: older shards may go."""

    data: Path
    folder: Path
    shards: int
    seed: int | None = None
    replace: bool = False


@dataclass(frozen=True)
class Shard:
    """One shard that was written, with its numbers of lines and bytes."""

    path: Path
    lines: int
    bytes: int


@dataclass(frozen=True)
class Result:
    """The result of a split."""

    shards: tuple[Shard, ...]
    replaced: int  # shards of an older set that were removed


def cut(order: LineOrder, progress: Progress, check: Check) -> Result:
    """Split a file into shards whose numbers of lines differ by one at most; they replace older shards (order.replace).

    Raises DataError for data that cannot be cut so or changes meanwhile, and for folders that cannot be written; UsageError for
    older shards that may not be replaced; what `check` raises.
    """
    try:
        with _open_data(order.data) as file:
            _refuse_existing(order)
            data = _measure(file, order, progress, check)
            with _stage(order.folder, order.data.name) as stage:
                counts = _fill(stage, data, order, progress, check)
                _require_unchanged(file, data, order)
                old = _refuse_existing(order)
                return Result(_publish(stage, order, counts, old), len(old))
    except OSError as error:
        where = error.filename or order.folder
        fix = "make room or rights there, or give another folder with --to"
        raise DataError(f"{where}: {error.strerror}", fix) from None


def existing_shards(folder: Path, name: str) -> list[str]:
    """List the names of a file's shards in a folder, sorted; none without the folder.

    Numbers have five digits, or more where the folder has number 0 with as many.
    """
    pattern = re.compile(re.escape(name) + r"-([0-9]{5,})")
    try:
        found = {entry: match.group(1) for entry in os.listdir(folder) if (match := pattern.fullmatch(entry))}
    except FileNotFoundError:
        return []
    widths = {5, *(len(digits) for digits in found.values() if not digits.strip("0"))}
    return sorted(entry for entry, digits in found.items() if len(digits) in widths)


def _refuse_existing(order: LineOrder) -> list[str]:
    """Return the names of the shards that are there. Raises UsageError if there are some and order.replace is not set."""
    old = existing_shards(order.folder, order.data.name)
    if old and not order.replace:
        fix = "add --force to replace them, or give another folder with --to"
        names = old[0] if len(old) == 1 else f"{old[0]} to {old[-1]}"
        raise UsageError(f"{order.folder} has shards of {order.data.name} already: {names}", fix)
    return old


# -- the file ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Data:
    """The file to cut, as it was measured. `body`: bytes up to and with the last newline. `lines`: number of newlines."""

    info: os.stat_result
    file: BinaryIO
    body: int
    lines: int

    @property
    def tail(self) -> int:
        """The number of bytes behind the last newline."""
        return self.info.st_size - self.body


@contextlib.contextmanager
def _open_data(path: Path) -> Iterator[BinaryIO]:
    """Return a context manager that opens the data, and closes it.

    Raises DataError for what cannot be read, no regular file, and packed data (gzip and others).
    """
    try:
        file = open(path, "rb", buffering=0)  # noqa: SIM115 - closed below
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", "give a file of lines: --data train.txt") from None
    with file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise DataError(f"{path} is no file", "it is read twice: put it on a disk first")
        start = os.pread(file.fileno(), 8, 0)
        for magic, kind in _PACKED.items():
            if start.startswith(magic):
                raise DataError(f"{path} is packed ({kind}), it has no lines", "unpack it first")
        yield file


def _blocks(file: BinaryIO, start: int, end: int, check: Check) -> Iterator[bytes]:
    """Yield the bytes from start to end in blocks of 1 MiB; fewer, if the file has shrunk. Calls `check` before each block."""
    while start < end:
        check()
        block = os.pread(file.fileno(), min(BLOCK, end - start), start)
        if not block:
            return
        start += len(block)
        yield block


def _measure(file: BinaryIO, order: LineOrder, progress: Progress, check: Check) -> _Data:
    """Count the newlines of the data, find the last one, and report progress; return the data with these numbers.

    Raises DataError if there are fewer lines than shards.
    """
    info = os.fstat(file.fileno())
    at = body = lines = 0
    for block in _blocks(file, 0, info.st_size, check):
        lines += block.count(b"\n")
        last = block.rfind(b"\n") + 1
        body = at + last if last else body
        at += len(block)
        progress("counting lines", at, info.st_size)
    data = _Data(info, file, body, lines)
    total = lines + bool(data.tail)
    if total < order.shards:
        have = "is empty" if not total else "has 1 line" if total == 1 else f"has {total} lines"
        fix = f"at most --shards {total}" if total else "give a file of lines"
        raise DataError(f"{order.data} {have}, too few for {order.shards} shards", fix)
    return data


def _require_unchanged(file: BinaryIO, data: _Data, order: LineOrder) -> None:
    """Raise DataError if size or time of the data has changed since it was measured."""
    now = os.fstat(file.fileno())
    if (now.st_size, now.st_mtime_ns) != (data.info.st_size, data.info.st_mtime_ns):
        raise DataError(f"{order.data} changed while it was cut", "wait until it is complete, then split it again")


# -- shards -----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _stage(folder: Path, name: str) -> Iterator[Path]:
    """Return a context manager that creates a separate folder in `folder`, locks it, and removes it at its end.

    name: of the file that is split, for the folder's. First it removes those that killed splits of this file have left.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for left in folder.glob(f".{glob.escape(name)}-????????.split"):
        with contextlib.suppress(OSError), _lock(left):
            shutil.rmtree(left)
    stage = Path(tempfile.mkdtemp(prefix=f".{name}-", suffix=".split", dir=folder))
    try:
        with _lock(stage):
            yield stage
    finally:
        shutil.rmtree(stage, ignore_errors=True)


@contextlib.contextmanager
def _lock(folder: Path) -> Iterator[None]:
    """Return a context manager that locks a folder. Raises BlockingIOError if another split has the lock."""
    with files.closing(os.open(folder, os.O_RDONLY)) as fd:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield


def _fill(stage: Path, data: _Data, order: LineOrder, progress: Progress, check: Check) -> Sequence[int]:
    """Write all shards into the stage, and return the number of lines in each.

    The tail, which no newline ends, is the last line of one shard: the last one, or with a shuffle one at random. Raises
    DataError if the data is shorter than it was.
    """
    counts = shares(data.lines + bool(data.tail), order.shards)
    last = order.shards - 1
    if order.seed is None:
        blocks = _blocks(data.file, 0, data.body, check)
    else:
        random = Random(order.seed)
        last = int(random.random() * order.shards)
        blocks = _Shuffle(stage, random, progress, check).blocks(data.file, data.body, data.lines)
    block, at, done = b"", 0, 0
    for index, count in enumerate(counts):
        ended = bool(data.tail) and index == last
        left = count - ended
        with open(stage / str(index), "wb") as file:
            while left:
                if at == len(block):
                    block, at = next(blocks, b""), 0
                if not block:
                    raise DataError(f"{order.data} changed while it was cut", "split it again")
                end, found = _find_end(block, at, left)
                file.write(memoryview(block)[at:end])
                done += end - at
                at, left = end, left - found
                progress("writing", done, data.info.st_size)
            for tail in _blocks(data.file, data.body, data.info.st_size, check) if ended else ():
                file.write(tail)
    return counts


def _find_end(block: bytes, at: int, count: int) -> tuple[int, int]:
    """Return the offset behind the `count`-th line from `at`, and `count`.

    If fewer lines end in the block: its length, and how many do.
    """
    found = block.count(b"\n", at)
    if found < count:
        return len(block), found
    return len(block) - len(block[at:].split(b"\n", count)[-1]), count


def _publish(stage: Path, order: LineOrder, counts: Sequence[int], old: Sequence[str]) -> tuple[Shard, ...]:
    """Remove the older shards, rename the new ones from the stage to their names, and return them in order.

    The first shard is renamed last: two sets are never taken for one.
    """
    for name in old:
        (order.folder / name).unlink()
    shards = []
    for index in reversed(range(order.shards)):
        path = order.folder / shard_name(order.data.name, index, order.shards)
        os.rename(stage / str(index), path)
        shards.append(Shard(path, counts[index], path.stat().st_size))
    return tuple(reversed(shards))


# -- shuffling --------------------------------------------------------------------------------------------------------


class _Shuffle:
    """The lines of a file in random order: each goes into a bucket at random, then each bucket's into memory.

    The order depends only on the seed and the file: only Random.random() is used, which is the same in every Python.
    A bucket that is too big for the memory is split again; a line that is too big by itself is copied unchanged.
    """

    def __init__(self, folder: Path, random: Random, progress: Progress, check: Check) -> None:
        self._folder = folder
        self._random = random.random
        self._progress = progress
        self._check = check
        self._names = iter(range(1 << 62))

    def blocks(self, file: BinaryIO, size: int, lines: int, reported: bool = True) -> Iterator[bytes]:
        """Yield the first `size` bytes of a file, which are `lines` lines, in random order. reported: call `progress`."""
        taken = size + lines * _PER_LINE
        if lines == 1 and size > BLOCK:
            yield from _blocks(file, 0, size, self._check)
        elif taken <= MEMORY:
            yield from self._in_memory(file, size)
        else:
            count = min(_BUCKETS, 2 + taken * 5 // (4 * MEMORY))
            for path, its_size, its_lines in self._scatter(file, size, count, reported):
                with open(path, "rb", buffering=0) as bucket:
                    path.unlink()
                    yield from self.blocks(bucket, its_size, its_lines, reported=False)

    def _in_memory(self, file: BinaryIO, size: int) -> Iterator[bytes]:
        """Yield the lines of the first `size` bytes in random order, a thousand at a time."""
        self._check()
        lines = b"".join(_blocks(file, 0, size, self._check)).split(b"\n")[:-1]
        random = self._random
        lines.sort(key=lambda _: random())
        for start in range(0, len(lines), 1000):
            yield b"\n".join(lines[start : start + 1000]) + b"\n"

    def _scatter(self, file: BinaryIO, size: int, count: int, reported: bool) -> Iterator[tuple[Path, int, int]]:
        """Write each line into one of `count` files at random, then yield (path, bytes, lines) of those that are not empty.

        All of them are complete before the first one is yielded. reported: call `progress`.
        """
        paths = [self._folder / f"bucket{next(self._names)}" for _ in range(count)]
        sizes, lines = [0] * count, [0] * count
        with contextlib.ExitStack() as stack:
            writers = [stack.enter_context(open(path, "wb", buffering=_BUFFER)) for path in paths]
            chosen, inside = 0, False
            for piece in self._pieces(file, size, reported):
                if not inside:
                    chosen = int(self._random() * count)
                    lines[chosen] += 1
                writers[chosen].write(piece)
                sizes[chosen] += len(piece)
                inside = piece[-1] != 10
        for path, its_size, its_lines in zip(paths, sizes, lines):
            if its_lines:
                yield path, its_size, its_lines

    def _pieces(self, file: BinaryIO, size: int, reported: bool) -> Iterator[bytes]:
        """Yield the lines of the first `size` bytes; one that is longer than a block comes in several pieces.

        reported: call `progress`.
        """
        done = checked = 0
        with open(os.dup(file.fileno()), "rb", buffering=BLOCK) as reader:
            reader.seek(0)
            while done < size:
                piece = reader.readline(min(BLOCK, size - done))
                if not piece:  # the file has shrunk, which is reported when lines are missing
                    return
                done += len(piece)
                if done - checked >= BLOCK:
                    checked = done
                    self._check()
                    if reported:
                        self._progress("shuffling", done, size)
                yield piece
