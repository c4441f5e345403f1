"""A manifest lists a workspace and the pieces of its files. The digest of its entries names the release.

A piece is a sequence of bytes named by their SHA-256. A file of more than SMALL bytes is cut into pieces of its own; smaller
ones are put together into packs. Packs of the last dispatch are used again while most of their bytes are, so that one small
changed file is one small piece. Files that not every node takes have a group. A pack has files of one group only, and only
files of at most TINY bytes of a group are packed: another job may distribute them to other groups.
"""

from __future__ import annotations

import hashlib
import json
import zlib
from typing import Any, Container, Dict, Iterable, Iterator, List, Mapping, NamedTuple, Optional, Sequence, Tuple, Union

from clustertool.model.paths import MANIFEST_END

SMALL = 256 << 10
TINY = 16 << 10
PACK = 1 << 20
PIECE = 4 << 20
MOST = 64 << 20  # bytes of a manifest on its way, compressed: about a million files
_LARGE = 64 << 20  # files above are cut into pieces of PIECE bytes, files below into PACK
_FEW = 64  # packs of a few small files each that are kept before they are packed anew
Row = List[Any]  # strings and whole numbers
Step = Union[str, List[int]]  # of a delta: a line, or the first line and the number of lines of the old manifest


class Entry(NamedTuple):
    """kind: file, dir or link. `content`: a file's digest in hex, a link's target. Paths are relative, surrogate-escaped."""

    path: str
    kind: str
    mode: int
    size: int
    content: str


class Piece(NamedTuple):
    """Some bytes, named by their SHA-256 in hex."""

    name: str
    size: int


class Pack(NamedTuple):
    """Small files, one after the other. name "": new, its bytes are still to be read."""

    name: str
    files: Tuple[Tuple[str, int], ...]  # content and size of each, those that no entry has any more too

    @property
    def size(self) -> int:
        return sum(size for _, size in self.files)

    def offsets(self) -> Dict[str, int]:
        found, at = {}, 0
        for content, size in self.files:
            found[content] = at
            at += size
        return found


def digest(entries: Iterable[Entry]) -> str:
    """Compute the 32 hex digits that name the release. Order does not matter."""
    return name(line(entry) for entry in sorted(entries, key=lambda entry: entry.path))


def line(entry: Entry) -> bytes:
    return _as_json(entry, ", ").encode() + b"\n"


def _as_json(values: Iterable[object], separator: str) -> str:
    """Encode a list of strings and whole numbers as json.dumps() does.

    json.dumps() makes an encoder for each list and is half as fast.
    """
    quote = json.encoder.encode_basestring_ascii
    return f"[{separator.join([quote(value) if isinstance(value, str) else str(value) for value in values])}]"


def name(lines: Iterable[bytes]) -> str:
    """Compute the digest of entries whose lines are in the order of their paths."""
    state = hashlib.sha256()
    for text in lines:
        state.update(text)
    return state.hexdigest()[:32]


def name_of(data: bytes) -> str:
    """Compute the name of a piece."""
    return hashlib.sha256(data).hexdigest()


def unzip(packed: bytes, size: int) -> bytes:
    """Unpack the manifest of `size` bytes that travelled as `packed`; b"" if it is not that.

    Never makes more than `size` bytes.
    """
    made = zlib.decompressobj()
    try:
        text = made.decompress(packed, size + 1)
    except zlib.error:
        return b""
    return text if len(text) == size and made.eof else b""


def zipped(size: int) -> int:
    """Compute the most bytes that a manifest of `size` bytes has on its way: zlib adds little to what it cannot shrink."""
    return size + size // 1000 + 1024


def cut(size: int) -> List[int]:
    """Divide a file into pieces, and return their sizes; one, if it is small."""
    if size <= PACK:
        return [size]
    step = PACK if size <= _LARGE else PIECE
    return [min(step, size - at) for at in range(0, size, step)]


def content_of(pieces: Sequence[str]) -> str:
    """Compute a file's digest: the name of its only piece, else the digest of its pieces' names."""
    return pieces[0] if len(pieces) == 1 else name_of("".join(pieces).encode())


# -- packing: which small files lie together --------------------------------------------------------------------------


def pack(files: Iterable[Entry], group: Mapping[str, str], known: Sequence[Pack]) -> Dict[str, List[Pack]]:
    """group -> packs that contain all these small files: known ones that are mostly of use, and new ones."""
    wanted: Dict[str, Dict[str, Entry]] = {}
    for entry in sorted(files, key=lambda entry: entry.path):
        if entry.size:
            wanted.setdefault(group.get(entry.path, ""), {}).setdefault(entry.content, entry)
    few = sum(old.size < PACK // 8 for old in known) > _FEW
    return {
        name: _one_group(entries, [old for old in known if not (few and old.size < PACK // 8)])
        for name, entries in wanted.items()
    }


def _one_group(wanted: Dict[str, Entry], known: Sequence[Pack]) -> List[Pack]:
    packs: List[Pack] = []
    for old in known:
        live = {content: size for content, size in old.files if content in wanted}
        if live and 2 * sum(live.values()) >= old.size:
            packs.append(old)
            for content in live:
                del wanted[content]
    return packs + [Pack("", tuple((e.content, e.size) for e in some)) for some in _fill(wanted.values())]


def _fill(entries: Iterable[Entry]) -> Iterator[List[Entry]]:
    """Divide files into packs of half a PACK to one. Their borders depend on names, so a new file moves few of them."""
    some: List[Entry] = []
    size = 0
    for entry in entries:
        border = size >= PACK // 2 and zlib.crc32(entry.path.encode("utf-8", "surrogateescape")) % 8 == 0
        if some and (border or size + entry.size > PACK):
            yield some
            some, size = [], 0
        some.append(entry)
        size += entry.size
    if some:
        yield some


# -- the manifest as text: a JSON list, one row a line -----------------------------------------------------------------
#
#   ["d", path, mode, mtime]   ["l", path, target]
#   ["p", name, size, group]           a pack; the small files that follow lie in it
#   ["s", path, mode, mtime, offset, size]
#   ["f", path, mode, mtime, size, group]   a file of pieces of its own, which follow
#   ["c", name, size]


def rows(
    entries: Sequence[Entry],
    times: Mapping[str, int],
    chunks: Mapping[str, Sequence[str]],
    group: Mapping[str, str],
    packs: Mapping[str, Sequence[Pack]],
) -> Iterator[Row]:
    """Yield the rows of a manifest. times: mtime in ns; chunks: the pieces of files that are not small."""
    small: Dict[Tuple[str, str], List[Entry]] = {}
    for entry in sorted(entries, key=lambda entry: entry.path):
        if entry.kind == "dir":
            yield ["d", entry.path, entry.mode, times[entry.path]]
        elif entry.kind == "link":
            yield ["l", entry.path, entry.content]
        elif entry.path in chunks:
            yield ["f", entry.path, entry.mode, times[entry.path], entry.size, group.get(entry.path, "")]
            yield from (["c", name, size] for name, size in zip(chunks[entry.path], cut(entry.size)))
        else:
            small.setdefault((group.get(entry.path, ""), entry.content), []).append(entry)
    for name in sorted({name for name, _ in small}):
        empty = [entry for (of, _), some in small.items() if of == name for entry in some if not entry.size]
        for one in [Pack("", ()), *packs.get(name, ())]:
            yield ["p", one.name, one.size, name]
            at = one.offsets()
            inside = empty if not one.name else [e for content in at for e in small.pop((name, content), ())]
            for entry in inside:
                yield ["s", entry.path, entry.mode, times[entry.path], at.get(entry.content, 0), entry.size]


def text_of(found: Iterable[Row]) -> bytes:
    return b"[\n" + ",\n".join([_as_json(row, ",") for row in found]).encode() + MANIFEST_END


def read_rows(text: bytes) -> List[Row]:
    """Parse rows. Raises ValueError for what is no manifest."""
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(row, list) and row for row in found):
        raise ValueError("no manifest")
    return found


def piece_rows(text: bytes) -> List[Row]:
    """Parse the rows of a text_of() that pieces() reads.

    The other values of many small files take 500 bytes of memory each.
    """
    starts = sorted(at + 1 for mark in (b'\n["p",', b'\n["c",') for at in _finds(text, mark))
    lines = [text[at : text.index(b"\n", at)].rstrip(b",") for at in starts]
    return read_rows(b"[" + b",".join(lines) + b"]")


def _finds(text: bytes, mark: bytes) -> Iterator[int]:
    at = text.find(mark)
    while at >= 0:
        yield at
        at = text.find(mark, at + 1)


def take(found: Iterable[Row], groups: Optional[Container[str]]) -> List[Row]:
    """Select the rows of what everybody takes and of these groups. None: all."""
    kept, inside = [], True
    for row in found:
        if row[0] in ("p", "f"):
            inside = groups is None or not row[-1] or row[-1] in groups
        if inside or row[0] in ("d", "l"):
            kept.append(row)
    return kept


def sizes(found: Iterable[Row]) -> Dict[str, int]:
    """Map the pieces that rows name to their sizes, each once, in order."""
    return {row[1]: int(row[2]) for row in found if row[0] in ("p", "c") and row[1]}


def pieces(found: Iterable[Row]) -> List[Piece]:
    return [Piece(name, size) for name, size in sizes(found).items()]


class File(NamedTuple):
    """A file of a manifest. `parts`: the pieces that its bytes are in: name, offset there, bytes.

    `pack`: the only one of them, for a small file that is not empty.
    """

    path: str
    mode: int
    mtime: int
    size: int
    parts: List[Tuple[str, int, int]]
    pack: str = ""


def files(found: Iterable[Row]) -> Iterator[File]:
    pack = ""
    large: Optional[File] = None
    for kind, *row in found:
        if large and kind == "c":
            large.parts.append((row[0], 0, row[1]))
            continue
        if large:
            yield large
            large = None
        if kind == "p":
            pack = row[0]
        elif kind == "s":
            path, mode, mtime, offset, size = row
            yield File(path, mode, mtime, size, [(pack, offset, size)] if pack else [], pack)
        elif kind == "f":
            path, mode, mtime, size, _ = row
            large = File(path, mode, mtime, size, [])
    if large:
        yield large


# -- a manifest as the difference to an earlier one ---------------------------------------------------------------------


def delta(old: bytes, new: bytes) -> List[Step]:
    """Compute what apply() needs to make `new` of `old`: [first line, lines] of the old text, or text of its own."""
    place = {line: number for number, line in enumerate(old.split(b"\n"))}
    steps: List[Step] = []
    for line in new.split(b"\n"):
        at = place.get(line)
        last = steps[-1] if steps else None
        if at is None:
            steps.append(line.decode())
        elif isinstance(last, list) and sum(last) == at:
            last[1] += 1
        else:
            steps.append([at, 1])
    return steps


def apply(old: bytes, steps: Sequence[Step]) -> bytes:
    """Make a text of an old one and the steps of delta(). Raises ValueError or IndexError for steps that do not fit."""
    lines, made = old.split(b"\n"), []
    for step in steps:
        if isinstance(step, str):
            made.append(step.encode())
        else:
            first, count = int(step[0]), int(step[1])
            if not 0 <= first <= first + count <= len(lines):
                raise ValueError("no such lines")
            made += lines[first : first + count]
    return b"\n".join(made)
