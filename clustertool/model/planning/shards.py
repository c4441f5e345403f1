"""This module assigns shards: the trainer with the shard's number modulo the trainers reads it, every file exactly once."""

from __future__ import annotations

import fnmatch
import re
from typing import Dict, Iterable, List, Sequence, Tuple, TypeVar

from clustertool.errors import DataError
from clustertool.model.hints import PROGRAM

T = TypeVar("T")
# The last "-digits" that is followed by the end of the name or a dot: part-2024-00003.txt.gz -> 3
_NUMBER = re.compile(r"-([0-9]+)(?=\.|\Z)")


def split(items: Sequence[T], n: int) -> Tuple[Tuple[T, ...], ...]:
    """Divide items into n groups of neighbours whose lengths differ by one at most: 8 cards for 3 processes -> 3, 3, 2."""
    size, more = divmod(len(items), n)
    starts = [i * size + min(i, more) for i in range(n + 1)]
    return tuple(tuple(items[a:b]) for a, b in zip(starts, starts[1:]))


def shares(lines: int, n: int) -> Tuple[int, ...]:
    """Divide a number of lines into n shards: the same number each, the first ones one more where it does not come out even."""
    size, more = divmod(lines, n)
    return tuple(size + (i < more) for i in range(n))


def shard_name(file: str, shard: int, n: int) -> str:
    """Name a shard: train.txt -> train.txt-00003; more digits from shard 100000 on, the same number for all."""
    return f"{file}-{shard:0{max(5, len(str(n - 1)))}}"


def number(path: str) -> int:
    """Read the shard number in a file's name: the last -DIGITS before a dot or the end. Raises DataError if it has none."""
    found = _NUMBER.findall(path.rsplit("/", 1)[-1])
    if not found:
        fix = f"name shards like train.txt-00000 ({PROGRAM} split does), or write a pattern that leaves it out"
        raise DataError(f"{path!r} matches [shards] but has no shard number", fix)
    return int(found[-1])


def matches(path: str, pattern: str) -> bool:
    """Check whether a path matches a pattern as in a shell: `*` stays in one folder, and matches no dot at a name's start."""
    parts, wanted = path.split("/"), pattern.split("/")
    return len(parts) == len(wanted) and all(
        fnmatch.fnmatchcase(part, want) and (want.startswith(".") or not part.startswith("."))
        for part, want in zip(parts, wanted)
    )


def refuse_links(links: Iterable[str], patterns: Sequence[str]) -> None:
    """Raise DataError for a link that would be a shard: it is sent as a link, and what it points to is not there."""
    for path in links:
        if any(matches(path, pattern) for pattern in patterns):
            fix = "put the file itself there; links are sent as links"
            raise DataError(f"{path!r} matches [shards] but is a link", fix)


def assign_shards(files: Sequence[str], patterns: Sequence[str], trainers: int) -> Tuple[Tuple[str, ...], ...]:
    """List the files that each trainer reads, from relative paths, ordered by pattern and shard number.

    Each pattern is a set of its own: numbers count from its own 0. Raises DataError where a trainer would read nothing of a
    set, a number is missing or twice, a pattern matches no file, or a file matches two patterns.
    """
    lists: List[List[str]] = [[] for _ in range(trainers)]
    taken: Dict[str, str] = {}
    for pattern in patterns:
        found = sorted((number(path), path) for path in files if matches(path, pattern))
        _require_complete(found, pattern, trainers)
        for shard, path in found:
            if path in taken:
                what = f"{path!r} matches two patterns: {taken[path]!r} and {pattern!r}"
                raise DataError(what, "let each file match one pattern")
            taken[path] = pattern
            lists[shard % trainers].append(path)
    return tuple(tuple(files) for files in lists)


def _require_complete(found: Sequence[Tuple[int, str]], pattern: str, trainers: int) -> None:
    """Raise DataError if shards of a pattern are missing, or all are, two have one number, or there are fewer than trainers.

    Also for a line break in a name. found: number and path of each shard, sorted.
    """
    if not found:
        what = f"no file of the workspace matches [shards] {pattern!r}"
        raise DataError(what, "prepare the data first, or correct the pattern")
    for _, path in found:
        if "\n" in path:  # trainers read their list line by line
            raise DataError(f"{path!r} matches [shards] and has a line break in its name", "rename it")
    for (shard, path), (following, other) in zip(found, found[1:]):
        if shard == following:
            fix = "remove one of them, or give each set a pattern of its own"
            raise DataError(f"shard {shard} of {pattern!r} is there twice: {path!r} and {other!r}", fix)
    missing = next((wanted for wanted, (shard, _) in enumerate(found) if shard != wanted), None)
    if missing is not None:
        what = f"shards of {pattern!r} are not complete: number {missing} is missing, {found[missing][1]!r} is there"
        raise DataError(what, f"split the data again ({PROGRAM} split), or correct the pattern")
    if len(found) < trainers:
        have = "1 shard" if len(found) == 1 else f"{len(found)} shards"
        what = f"{have} of {pattern!r} for {trainers} trainers: {trainers - len(found)} would read nothing"
        raise DataError(what, f"split the data into at least {trainers} shards, or start fewer trainers")
