"""One file of a node is fetched by its path: by rsync or in frames, through links that stay inside, and never elsewhere."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clustertool.errors import BadAnswer, DispatchError, NotFound
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.transfer import rsync_session
from clustertool.fleet.transfer.receive import NodeFolder
from clustertool.fleet.transfer.rsync_session import Copied
from clustertool.model.wire.messages import FIND_FILE
from tests.ssh.test_rsync import fleet_of


@pytest.fixture(params=["rsync", "frames"])
def fleet(cluster_of: Any, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    if request.param == "frames":
        monkeypatch.setattr(rsync_session, "shutil", SimpleNamespace(which=lambda _: None))
    with fleet_of(cluster_of) as opened:
        yield opened


@pytest.fixture
def job(tmp_path: Path) -> Path:
    folder = tmp_path / "JOBx"
    (folder / "output/deep").mkdir(parents=True)
    (folder / "output/deep/model 1.pt").write_bytes(os.urandom(1_300_000))
    (folder / "output/deep/model 1.pt").chmod(0o755)
    (folder / "output/last").symlink_to("deep/model 1.pt")
    (folder / "output/[a]*").write_text("odd")
    (folder / "output/a").write_text("not odd")
    (folder / "output/escape").symlink_to(tmp_path / "outside")
    (tmp_path / "outside").write_text("outside")
    os.mkfifo(folder / "output/fifo")
    return folder


def fetched(fleet: Fleet, job: Path, path: str, to: Path) -> Copied:
    folder = NodeFolder(fleet, 0, str(job))
    return folder.receive_file(path, folder.find(path), to, lambda: None)


def test_a_file_is_fetched_by_its_path(fleet: Fleet, job: Path, tmp_path: Path) -> None:
    to, model = tmp_path / "to", job / "output/deep/model 1.pt"

    def get(path: str) -> tuple[int, int]:
        got = fetched(fleet, job, path, to)
        return got.files, got.bytes

    assert get("output/deep/model 1.pt") == (1, model.stat().st_size)
    assert (to / "model 1.pt").read_bytes() == model.read_bytes()
    assert (to / "model 1.pt").stat().st_mtime_ns == model.stat().st_mtime_ns
    assert os.access(to / "model 1.pt", os.X_OK)
    assert get("output/deep/model 1.pt") == (1, 0), "it is here already"
    model.write_bytes(b"new")
    get("output/deep/model 1.pt")
    assert (to / "model 1.pt").read_bytes() == b"new"
    (to / "last").symlink_to(tmp_path / "outside")
    get("output/last")
    assert not (to / "last").is_symlink(), "a link is not written through"
    assert (to / "last").read_bytes() == b"new"
    assert (tmp_path / "outside").read_text() == "outside"
    get("output/[a]*")
    assert sorted(os.listdir(to)) == ["[a]*", "last", "model 1.pt"]
    assert (to / "[a]*").read_text() == "odd"


def test_what_is_no_file_of_the_folder(cluster_of: Any, job: Path, tmp_path: Path) -> None:
    with fleet_of(cluster_of) as fleet:
        for path in ("output/escape", "output/fifo", "output", "output/nothing", "../outside"):
            with pytest.raises(NotFound):
                fetched(fleet, job, path, tmp_path / "to")
    assert not (tmp_path / "to").exists()


def test_a_place_that_cannot_be_written(fleet: Fleet, job: Path, tmp_path: Path) -> None:
    (tmp_path / "to/a").mkdir(parents=True)
    for target in (tmp_path / "to", tmp_path / "outside"):
        with pytest.raises(DispatchError, match="cannot be written"):
            fetched(fleet, job, "output/a", target)
    assert os.listdir(tmp_path / "to") == ["a"]


def test_a_node_that_names_a_file_outside(
    cluster_of: Any, job: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ""
    with fleet_of(cluster_of) as fleet:
        really = fleet.ask_one

        def lie(node: int, request: Any, timeout: float = 60.0) -> Any:
            answer = really(node, request, timeout)
            return {**answer, "path": path} if request.kind is FIND_FILE else answer

        monkeypatch.setattr(fleet, "ask_one", lie)
        for path in ("../outside", "/etc/passwd", "a/../../b", ""):  # noqa: B007 - lie() reads it
            with pytest.raises(BadAnswer):
                fetched(fleet, job, "output/a", tmp_path / "to")
    assert not (tmp_path / "to").exists()
