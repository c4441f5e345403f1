"""A folder is copied on its node: files, folders, links, modes and times; blocks are shared where this is possible."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from clustertool.node.storage import files, tree_copy


@pytest.fixture
def output(tmp_path: Path) -> Path:
    top = tmp_path / "old"
    (top / "deep/er").mkdir(parents=True)
    (top / "deep/er/model.pt").write_bytes(os.urandom(3 << 20))
    (top / "run.sh").write_text("#!/bin/sh")
    (top / "run.sh").chmod(0o755)
    (top / "last").symlink_to("deep/er/model.pt")
    (top / "best").symlink_to(top / "deep")
    (top / "data").symlink_to("/srv/data")
    os.mkfifo(top / "pipe")
    (top / "deep/er").chmod(0o500)
    os.utime(top / "deep/er/model.pt", ns=(1, 1_700_000_000_123_456_789))
    return top


def _copy(output: Path, tmp_path: Path) -> Path:
    target = tmp_path / "new"
    target.mkdir()
    tree_copy.copy_tree(str(output), str(target))
    return target


def _require_copy(new: Path, old: Path) -> None:
    assert sorted(os.listdir(new)) == ["best", "data", "deep", "last", "run.sh"], "a pipe is no output"
    model = new / "deep/er/model.pt"
    assert model.read_bytes() == (old / "deep/er/model.pt").read_bytes()
    assert model.stat().st_mtime_ns == 1_700_000_000_123_456_789
    assert model.stat().st_ino != (old / "deep/er/model.pt").stat().st_ino
    assert (new / "run.sh").stat().st_mode & 0o777 == 0o755
    assert (new / "deep/er").stat().st_mode & 0o777 == 0o500
    links = {name: os.readlink(new / name) for name in ("last", "best", "data")}
    assert links == {"last": "deep/er/model.pt", "best": str(new / "deep"), "data": "/srv/data"}


def test_all_is_copied(output: Path, tmp_path: Path) -> None:
    _require_copy(_copy(output, tmp_path), output)


def test_where_the_kernel_cannot_copy_in_one_call(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    really = os.copy_file_range

    def once(old: int, new: int, size: int) -> int:
        calls.append(size)
        if len(calls) > 1:
            raise OSError(errno.EXDEV, "no")
        return really(old, new, 1 << 20)  # a part, then no more

    monkeypatch.setattr(files, "share", lambda *_: False)
    monkeypatch.setattr(os, "copy_file_range", once)
    _require_copy(_copy(output, tmp_path), output)
    assert len(calls) > 1


def test_blocks_are_shared_where_the_file_system_can(
    output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = []

    def share(old: int, new: int, at: int) -> bool:
        shared.append(at)
        os.write(new, b"blocks of the other file")
        return True

    monkeypatch.setattr(files, "share", share)
    new = _copy(output, tmp_path)
    assert shared == [0, 0]
    assert (new / "run.sh").read_text() == "blocks of the other file"


def test_an_error_of_the_disk_is_raised(output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(files, "share", lambda *_: False)
    monkeypatch.setattr(os, "copy_file_range", full)
    with pytest.raises(OSError, match="No space left"):
        _copy(output, tmp_path)


def test_files_that_came_with_the_workspace_are_replaced(output: Path, tmp_path: Path) -> None:
    (tmp_path / "new/deep").mkdir(parents=True)
    (tmp_path / "new/run.sh").write_text("of the workspace")
    (tmp_path / "new/deep/kept").write_text("of the workspace")
    victim = tmp_path / "victim"
    victim.write_text("not ours")
    (tmp_path / "new/last").symlink_to(victim)
    tree_copy.copy_tree(str(output), str(tmp_path / "new"))
    assert (tmp_path / "new/run.sh").read_text() == "#!/bin/sh"
    assert (tmp_path / "new/deep/kept").exists()
    assert victim.read_text() == "not ours"


def test_what_counts_as_an_output(tmp_path: Path) -> None:
    assert not tree_copy.has_files(str(tmp_path / "nothing"))
    assert not tree_copy.has_files(str(tmp_path))
    (tmp_path / "file").touch()
    assert tree_copy.has_files(str(tmp_path))
    assert not tree_copy.has_files(str(tmp_path / "file"))


def test_a_folder_is_not_copied_into_itself(output: Path, tmp_path: Path) -> None:
    """Where [outputs] path is a link of the workspace to a shared folder, both outputs are this folder."""
    before = sorted(path.name for path in output.rglob("*"))
    (tmp_path / "new").symlink_to(output)
    tree_copy.copy_tree(str(output), str(tmp_path / "new"))
    assert sorted(path.name for path in output.rglob("*")) == before
    assert (output / "run.sh").read_text() == "#!/bin/sh"


def test_a_folder_is_copied_into_one_of_its_own(output: Path) -> None:
    (output / "run2").mkdir()
    tree_copy.copy_tree(str(output), str(output / "run2"))
    assert sorted(os.listdir(output / "run2")) == ["best", "data", "deep", "last", "run.sh"]


def test_a_link_in_the_place_of_a_folder_is_replaced(output: Path, tmp_path: Path) -> None:
    (tmp_path / "shared/er").mkdir(parents=True)
    (tmp_path / "shared/er/model.pt").write_text("not ours")
    (tmp_path / "new").mkdir()
    (tmp_path / "new/deep").symlink_to(tmp_path / "shared")
    tree_copy.copy_tree(str(output), str(tmp_path / "new"))
    assert (tmp_path / "shared/er/model.pt").read_text() == "not ours"
    assert not (tmp_path / "new/deep").is_symlink()
    assert (tmp_path / "new/deep/er/model.pt").stat().st_size == 3 << 20


def test_links_with_either_path_of_a_source_that_is_reached_through_a_link(output: Path, tmp_path: Path) -> None:
    (tmp_path / "home").symlink_to(tmp_path)
    (output / "alias").symlink_to(tmp_path / "home/old/deep")
    (output / "near").symlink_to(tmp_path / "older")
    (tmp_path / "new").mkdir()
    tree_copy.copy_tree(str(tmp_path / "home/old"), str(tmp_path / "home/new"))
    links = {name: os.readlink(tmp_path / "new" / name) for name in ("best", "alias", "near")}
    deep = str(tmp_path / "new/deep")
    assert links == {"best": deep, "alias": deep, "near": str(tmp_path / "older")}
