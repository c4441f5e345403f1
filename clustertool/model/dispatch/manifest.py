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
    """A file, folder or link of a workspace. `kind`: file, dir or link. `content`: a file's digest in hex, a link's target.

    Paths are relative, surrogate-escaped.
    """

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
        """Map the content of each file to its offset in the pack."""
        found, at = {}, 0
        for content, size in self.files:
            found[content] = at
            at += size
        return found


def digest(entries: Iterable[Entry]) -> str:
    """Compute the name of a release, 32 hex digits, from its entries in any order."""
    return name(line(entry) for entry in sorted(entries, key=lambda entry: entry.path))


def line(entry: Entry) -> bytes:
    """Encode an entry as a line, from which the release's name is computed."""
    return _as_json(entry, ", ").encode() + b"\n"


def _as_json(values: Iterable[object], separator: str) -> str:
    """Encode strings and whole numbers as a list of JSON, twice as fast as json.dumps(), which makes an encoder each time."""
    quote = json.encoder.encode_basestring_ascii
    return f"[{separator.join([quote(value) if isinstance(value, str) else str(value) for value in values])}]"


def name(lines: Iterable[bytes]) -> str:
    """Compute the name of a release, 32 hex digits, from the lines of its entries in the order of their paths."""
    state = hashlib.sha256()
    for text in lines:
        state.update(text)
    return state.hexdigest()[:32]


def name_of(data: bytes) -> str:
    """Compute the name of a piece: its SHA-256 in hex."""
    return hashlib.sha256(data).hexdigest()


def unzip(packed: bytes, size: int) -> bytes:
    """Decompress a manifest of `size` bytes; b"" if it is damaged or has another size. Never makes more than `size` bytes."""
    made = zlib.decompressobj()
    try:
        text = made.decompress(packed, size + 1)
    except zlib.error:
        return b""
    return text if len(text) == size and made.eof else b""


def zipped(size: int) -> int:
    """Compute how many bytes a compressed manifest of `size` bytes has at most."""
    return size + size // 1000 + 1024


def cut(size: int) -> List[int]:
    """Return the sizes of the pieces into which a file is cut: up to 1 MiB one, up to 64 MiB of 1 MiB each, then of 4 MiB."""
    if size <= PACK:
        return [size]
    step = PACK if size <= _LARGE else PIECE
    return [min(step, size - at) for at in range(0, size, step)]


def content_of(pieces: Sequence[str]) -> str:
    """Compute a file's digest from the names of its pieces: the only name, else the digest of all."""
    return pieces[0] if len(pieces) == 1 else name_of("".join(pieces).encode())


# -- packing: which small files lie together --------------------------------------------------------------------------


def pack(files: Iterable[Entry], group: Mapping[str, str], known: Sequence[Pack]) -> Dict[str, List[Pack]]:
    """Map each group to packs with all its small files: known packs that are used by half or more, and new ones.

    group: of a file, by its path. known: packs of the last dispatch; if more than 64 are smaller than 128 KiB, these are left
    out. Empty files are in no pack.
    """
    wanted: Dict[str, Dict[str, Entry]] = {}
    for entry in sorted(files, key=lambda entry: entry.path):
        if entry.size:
            wanted.setdefault(group.get(entry.path, ""), {}).setdefault(entry.content, entry)
    if sum(old.size < PACK // 8 for old in known) > _FEW:
        known = [old for old in known if old.size >= PACK // 8]
    return {name: _pack_group(entries, known) for name, entries in wanted.items()}


def _pack_group(wanted: Dict[str, Entry], known: Sequence[Pack]) -> List[Pack]:
    """Choose the known packs of which at least half is wanted, and put the other files into new packs. Changes `wanted`."""
    packs: List[Pack] = []
    for old in known:
        live = {content: size for content, size in old.files if content in wanted}
        if live and 2 * sum(live.values()) >= old.size:
            packs.append(old)
            for content in live:
                del wanted[content]
    return packs + [Pack("", tuple((e.content, e.size) for e in some)) for some in _fill_packs(wanted.values())]


def _fill_packs(entries: Iterable[Entry]) -> Iterator[List[Entry]]:
    """Yield lists of files, each of half a PACK to one PACK, the last one of any size up to that.

    Their borders depend on paths: a new file moves few of them.
    """
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
    """Yield the rows of a manifest (see above): folders, links and large files by path, then packs with their small files.

    times: mtime in ns. chunks: the pieces of large files.
    """
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
    """Write rows as the text of a manifest."""
    return b"[\n" + ",\n".join([_as_json(row, ",") for row in found]).encode() + MANIFEST_END


def read_rows(text: bytes) -> List[Row]:
    """Parse the text of a manifest. Raises ValueError if it is none."""
    found = json.loads(text)
    if not isinstance(found, list) or not all(isinstance(row, list) and row for row in found):
        raise ValueError("no manifest")
    return found


def piece_rows(text: bytes) -> List[Row]:
    """Parse only the rows of a manifest that name pieces. The other rows of many small files take 500 bytes of memory each."""
    starts = sorted(at + 1 for mark in (b'\n["p",', b'\n["c",') for at in _find_all(text, mark))
    lines = [text[at : text.index(b"\n", at)].rstrip(b",") for at in starts]
    return read_rows(b"[" + b",".join(lines) + b"]")


def _find_all(text: bytes, mark: bytes) -> Iterator[int]:
    """Yield the offset of each `mark` in a text."""
    at = text.find(mark)
    while at >= 0:
        yield at
        at = text.find(mark, at + 1)


def take(found: Iterable[Row], groups: Optional[Container[str]]) -> List[Row]:
    """Select the rows that a node of these groups needs: folders, links, and files without a group or of these groups.

    None: of all groups.
    """
    kept, inside = [], True
    for row in found:
        if row[0] in ("p", "f"):
            inside = groups is None or not row[-1] or row[-1] in groups
        if inside or row[0] in ("d", "l"):
            kept.append(row)
    return kept


def sizes(found: Iterable[Row]) -> Dict[str, int]:
    """Map the pieces that rows name to their sizes in bytes, each once, in their order."""
    return {row[1]: int(row[2]) for row in found if row[0] in ("p", "c") and row[1]}


def pieces(found: Iterable[Row]) -> List[Piece]:
    """List the pieces that rows name, each once, in their order."""
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
    """Yield the files of rows, with the pieces that have their bytes."""
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
    """Compute the steps by which apply() makes `new` of `old`: [first line, number of lines] of the old text, or a new line."""
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
    """Build a text from an old one and the steps of delta(). Raises ValueError or IndexError for steps that do not fit."""
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
