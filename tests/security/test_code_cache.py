"""The laptop keeps the code for nodes in its cache folder: what another user can have written there is never sent to a node."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from clustertool.fleet import node_bundle


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The file of the cache, as this user has written it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    node_bundle._shipped.cache_clear()
    node_bundle.shipped()
    (path,) = (tmp_path / "clustertool/code").iterdir()
    node_bundle._shipped.cache_clear()
    yield path
    node_bundle._shipped.cache_clear()


EVIL = node_bundle.Shipped(b"evil", node_bundle._part(b"evil"), node_bundle._part(b"evil"))


def test_what_this_user_has_kept_is_used(kept: Path) -> None:
    kept.write_bytes(node_bundle._written(EVIL))
    assert node_bundle.shipped() == EVIL


def _of_another_user(path: Path) -> None:
    if os.getuid():
        pytest.skip("needs root, to make a file of another user")
    os.chown(path, 4002, 4002)


def _link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to("elsewhere")


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


CHANGES = {
    "another user's": _of_another_user,
    "writable for all": lambda path: path.chmod(0o666),
    "a link": _link,
    "a fifo": _fifo,
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_another_user_can_have_written_is_made_anew(kept: Path, change: str) -> None:
    kept.write_bytes(node_bundle._written(EVIL))
    CHANGES[change](kept)
    assert node_bundle.shipped() == node_bundle.make(node_bundle.sources())
    info = kept.lstat()
    assert info.st_uid == os.getuid() and info.st_mode == 0o100600 and kept.read_bytes() != node_bundle._written(EVIL)
