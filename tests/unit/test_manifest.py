"""A manifest's digest names a release: the same content, the same name; anything else, another."""

from __future__ import annotations

import hashlib
import itertools
import json
import random

import pytest

from clustertool.model.dispatch.manifest import (
    PACK,
    PIECE,
    SMALL,
    Entry,
    Pack,
    Piece,
    Row,
    apply,
    content_of,
    cut,
    delta,
    digest,
    line,
    name_of,
    pack,
    piece_rows,
    pieces,
    read_rows,
    rows,
    take,
    text_of,
)

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
ENTRIES = [
    Entry("train.py", "file", 0o644, 0, EMPTY),
    Entry("data", "dir", 0o755, 0, ""),
    Entry("data/\udcff\n", "file", 0o600, 1, "a" * 64),
    Entry("link", "link", 0o777, 0, "data/x"),
]


def test_the_order_does_not_matter() -> None:
    assert len({digest(entries) for entries in itertools.permutations(ENTRIES)}) == 1


@pytest.mark.parametrize(
    "change", [{"path": "other"}, {"kind": "file"}, {"mode": 0o700}, {"size": 7}, {"content": "b"}]
)
@pytest.mark.parametrize("index", range(len(ENTRIES)))
def test_every_field_of_every_entry_matters(index: int, change: dict[str, object]) -> None:
    changed = [entry._replace(**change) if at == index else entry for at, entry in enumerate(ENTRIES)]  # type: ignore[arg-type]
    assert (digest(changed) == digest(ENTRIES)) == (changed == ENTRIES)


def test_a_missing_or_an_added_entry_matters() -> None:
    others = [digest(ENTRIES[:at] + ENTRIES[at + 1 :]) for at in range(len(ENTRIES))]
    assert len({digest(ENTRIES), digest([]), *others}) == len(ENTRIES) + 2


def test_entries_do_not_run_into_each_other() -> None:
    assert digest([Entry("a", "link", 0, 0, "b\nc")]) != digest(
        [Entry("a", "link", 0, 0, "b"), Entry("c", "link", 0, 0, "")]
    )
    assert digest([Entry("a", "b", 0, 1, "c")]) != digest([Entry("a b", "", 0, 1, "c")])


def test_the_name_is_fixed() -> None:
    """Nodes keep releases under this name: to change how it is made is to send everything again."""
    assert digest(ENTRIES[:1]) == "65b2e8c022fe3de7498e31167650e381"
    assert len(digest([])) == 32


@pytest.mark.parametrize(
    "path", ["plain", 'a "b"', "a\nb", "back\\slash", "\u00fc\u4e2d\U0001f600", "b\udcffd", "\0\x7f"]
)
def test_texts_are_what_json_writes(path: str) -> None:
    entry, row = Entry(path, "file", 0o644, 5, path), ["s", path, 0o644, 10**18, 0, -5]
    assert line(entry) == json.dumps(entry).encode() + b"\n"
    assert digest([entry]) == hashlib.sha256(line(entry)).hexdigest()[:32]
    written = [json.dumps(one, separators=(",", ":")) for one in (row, ["l", path, path])]
    assert text_of([row, ["l", path, path]]) == "[\n{},\n{}\n]\n".format(*written).encode()


# -- pieces and packs -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, SMALL, PACK, PACK + 1, 64 << 20, (64 << 20) + 1, 10**9])
def test_a_file_is_cut_into_pieces_that_add_up(size: int) -> None:
    sizes = cut(size)
    assert sum(sizes) == size and len(sizes) >= 1
    assert max(sizes) <= PIECE and (size == 0 or min(sizes) > 0)


def test_a_small_file_is_named_by_its_content_and_a_large_one_by_its_pieces() -> None:
    assert content_of([name_of(b"x")]) == hashlib.sha256(b"x").hexdigest()
    assert content_of(["a", "b"]) != content_of(["b", "a"]) != content_of(["ba"])


def files(count: int, size: int = 50_000, seed: int = 1) -> list[Entry]:
    rng = random.Random(seed)
    return [Entry(f"d/f{i}", "file", 0o644, size, f"{rng.getrandbits(256):064x}") for i in range(count)]


def named(packs: list[Pack]) -> list[Pack]:
    return [one if one.name else Pack(name_of(json.dumps(one.files).encode()), one.files) for one in packs]


def reserved(packs: list[Pack]) -> set[str]:
    return {content for one in packs for content, _ in one.files}


def test_every_small_file_is_in_one_pack_and_none_is_too_large() -> None:
    entries = files(500)
    packs = pack(entries, {}, [])[""]
    assert sorted(content for one in packs for content, _ in one.files) == sorted(entry.content for entry in entries)
    assert max(one.size for one in packs) <= PACK
    assert len(packs) <= 2 * sum(entry.size for entry in entries) // PACK + 2
    assert pack([], {}, []) == {} and pack([Entry("e", "file", 0, 0, EMPTY)], {}, []) == {}


def test_one_small_file_that_changed_is_one_small_piece() -> None:
    entries = files(500)
    known = named(pack(entries, {}, [])[""])
    entries[77] = entries[77]._replace(content="f" * 64, size=9)
    packs = pack(entries, {}, known)[""]
    assert [one.files for one in packs if not one.name] == [(("f" * 64, 9),)]
    assert reserved(packs) >= {entry.content for entry in entries}


def test_packs_that_are_mostly_of_no_use_are_made_anew() -> None:
    known = named(pack(files(20), {}, [])[""])
    kept = files(20)[:3]
    packs = pack(kept, {}, known)[""]
    assert reserved(packs) == {entry.content for entry in kept}


def test_many_tiny_packs_are_put_together() -> None:
    entries = files(200, size=100)
    tiny = [Pack(f"{i}", ((entry.content, 100),)) for i, entry in enumerate(entries)]
    assert len(pack(entries, {}, tiny)[""]) == 1


def test_a_new_file_moves_few_borders() -> None:
    """Without any memory, two laptops make mostly the same packs."""
    entries = files(500)
    one = {p.files for p in pack(entries, {}, [])[""]}
    other = {p.files for p in pack([*entries, Entry("d/f100x", "file", 0, 7, "e" * 64)], {}, [])[""]}
    assert len(one - other) <= 3


def test_no_pack_holds_files_of_two_groups() -> None:
    entries = files(100)
    group = {entry.path: str(i % 3) for i, entry in enumerate(entries) if i % 4}
    packs = pack(entries, group, named(pack(entries, {}, [])[""]))
    assert set(packs) == {"", "0", "1", "2"}
    for name, some in packs.items():
        wanted = {entry.content for entry in entries if group.get(entry.path, "") == name}
        assert reserved([one for one in some if not one.name]) <= wanted <= reserved(some)


# -- the text -----------------------------------------------------------------------------------------------------------


def sample(group: dict[str, str]) -> tuple[list[Entry], bytes]:
    entries = [
        *files(30),
        Entry("d", "dir", 0o755, 0, ""),
        Entry("l\udcff\n", "link", 0, 0, "-rf"),
        Entry("big", "file", 0o600, PACK + 5, "b"),
        Entry("none", "file", 0o600, 0, EMPTY),
    ]
    times = {entry.path: 1_700_000_000_123_456_789 for entry in entries}
    small = [entry for entry in entries if entry.kind == "file" and entry.path != "big"]
    packs = {name: named(some) for name, some in pack(small, group, []).items()}
    return entries, text_of(rows(entries, times, {"big": ["c1", "c2"]}, group, packs))


def test_the_text_lists_every_entry_once_and_every_piece() -> None:
    entries, text = sample({})
    found = read_rows(text)
    assert sorted(row[1] for row in found if row[0] in "dlsf") == sorted(entry.path for entry in entries)
    assert [Piece("c1", PACK), Piece("c2", 5)] == pieces(found)[:2]
    assert all(row[4] + row[5] <= PACK for row in found if row[0] == "s")
    with pytest.raises(ValueError):
        read_rows(b"{}")
    with pytest.raises(ValueError):
        read_rows(b"[3]")


def test_the_rows_of_pieces_alone_tell_the_same_pieces() -> None:
    found: list[Row] = [
        ["d", '\n["c","no",1]', 0o700, 1],
        ["l", 'x\n["p"', '["p",'],
        ["f", '["c",', 0o600, 1, PACK + 5, ""],
        ["c", "c1", PACK],
        ["c", "c2", 5],
        ["p", "", 0, ""],
        ["s", '["p","no",1,""]', 0o600, 1, 0, 0],
        ["p", "p1", 9, ""],
        ["s", "a,", 0o600, 1, 0, 9],
        ["p", "p2", 7, "g"],
    ]
    text = text_of(found)
    assert pieces(piece_rows(text)) == pieces(found) == [("c1", PACK), ("c2", 5), ("p1", 9), ("p2", 7)]
    assert piece_rows(text_of([])) == []
    with pytest.raises(ValueError, match="Expect|delimiter"):
        piece_rows(b'[\n["p",torn],\n]\n')


def test_a_node_takes_what_is_for_all_and_its_groups() -> None:
    entries, text = sample({"big": "1", "d/f3": "0,2", "d/f4": "1"})
    found = read_rows(text)

    def paths(groups: tuple[str, ...] | None) -> set[str]:
        return {row[1] for row in take(found, groups) if row[0] in "dlsf"}

    every = {entry.path for entry in entries}
    assert paths(None) == every
    assert paths(()) == every - {"big", "d/f3", "d/f4"}
    assert paths(("1",)) == every - {"d/f3"}
    assert not {"c1", "c2"} & {piece.name for piece in pieces(take(found, ("0,2",)))}


def test_a_manifest_is_announced_by_the_one_before() -> None:
    _, old = sample({})
    lines = old.split(b"\n")
    for new in (
        old,
        b"",
        b"\n".join(lines[::-1]),
        b"\n".join([*lines[:4], b"new", *lines[6:]]),
        b"\n".join(lines[:1] * 3),
    ):
        assert apply(old, json.loads(json.dumps(delta(old, new)))) == new
    assert len(delta(old, b"\n".join([*lines[:4], b"new", *lines[6:]]))) == 3
    for wrong in ([[5, 9999]], [[-1, 2]], [[2, -1]]):
        with pytest.raises(ValueError):
            apply(old, wrong)
