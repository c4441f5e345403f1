"""A manifest's digest names a release: the same content, the same name; anything else, another."""

from __future__ import annotations

import hashlib
import io
import itertools

import pytest

from clustertool.plan.manifest import Entry, digest, file_digest

EMPTY = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"
ENTRIES = [
    Entry("train.py", "file", 0o644, 0, EMPTY),
    Entry("data", "dir", 0o755, 0, ""),
    Entry("data/\udcff\n", "file", 0o600, 1, "a" * 64),
    Entry("link", "link", 0o777, 0, "data/x"),
]


def test_the_order_does_not_matter() -> None:
    assert len({digest(entries) for entries in itertools.permutations(ENTRIES)}) == 1


@pytest.mark.parametrize("change", [{"path": "other"}, {"kind": "file"}, {"mode": 0o700}, {"size": 7}, {"content": "b"}])
@pytest.mark.parametrize("index", range(len(ENTRIES)))
def test_every_field_of_every_entry_matters(index: int, change: dict[str, object]) -> None:
    changed = [entry._replace(**change) if at == index else entry for at, entry in enumerate(ENTRIES)]  # type: ignore[arg-type]
    assert (digest(changed) == digest(ENTRIES)) == (changed == ENTRIES)


def test_a_missing_or_an_added_entry_matters() -> None:
    others = [digest(ENTRIES[:at] + ENTRIES[at + 1 :]) for at in range(len(ENTRIES))]
    assert len({digest(ENTRIES), digest([]), *others}) == len(ENTRIES) + 2


def test_entries_do_not_run_into_each_other() -> None:
    assert digest([Entry("a", "link", 0, 0, "b\nc")]) != digest([Entry("a", "link", 0, 0, "b"), Entry("c", "link", 0, 0, "")])
    assert digest([Entry("a", "b", 0, 1, "c")]) != digest([Entry("a b", "", 0, 1, "c")])


def test_the_name_is_fixed() -> None:
    """Nodes keep releases under this name: to change how it is made is to send everything again."""
    assert digest(ENTRIES[:1]) == "65b2e8c022fe3de7498e31167650e381"
    assert len(digest([])) == 32


@pytest.mark.parametrize("content", [b"", b"x", b"x" * (1 << 20), b"y" * ((1 << 20) + 1)])
def test_the_digest_of_a_file_is_its_sha256(content: bytes) -> None:
    assert file_digest(io.BytesIO(content)) == hashlib.sha256(content).hexdigest()
