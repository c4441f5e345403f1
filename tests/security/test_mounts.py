"""A removal never enters what is mounted in a job's directory: a bind mount, another file system, a deep one."""

from __future__ import annotations

import contextlib
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from clustertool.errors import PreflightError
from clustertool.node.storage import files
from clustertool.node.system import mounts
from tests.node.harness import Bench, Job

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="needs root, to mount")


@contextlib.contextmanager
def mounted(source: str, target: Path, *options: str) -> Iterator[None]:
    target.mkdir(parents=True, exist_ok=True)
    if subprocess.run(["mount", *options, source, str(target)], check=False).returncode:
        pytest.skip("this machine allows no mount")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(target)], check=True)


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """A data set of somebody, on the file system of the jobs."""
    made = tmp_path / "data set"
    (made / "deep").mkdir(parents=True)
    (made / "deep/file").write_text("precious")
    made.chmod(0o755)
    return made


def ended(bench: Bench) -> Job:
    job = bench.run(None, "mkdir -p kept; echo x > kept/file; echo x > a-file")
    job.ended()
    job.gone()
    return job


def clean(job: Job, **fields: object) -> dict[str, object]:
    return job.nodes[0].ask("clean", job=job.id, exact=True, now=2e9, older_than=0, **fields)


@pytest.mark.parametrize("where", ["data", "kept/deep down/data"])
def test_clean_refuses_a_bind_mount(bench: Bench, data: Path, where: str) -> None:
    """The mount has the device number of the job's directory. Nothing of either is touched, in a dry run neither."""
    job = ended(bench)
    with mounted(str(data), job.dir() / where, "--bind"):
        before = sorted(str(path) for path in job.dir().rglob("*"))
        for dry in (True, False):
            answer = clean(job, dry=dry)
            what, fix = answer["kept"][job.id]  # type: ignore[index]
            assert answer["removed"] == [] and str(job.dir() / where) in what and "unmount" in fix
        assert sorted(str(path) for path in job.dir().rglob("*")) == before
        assert (data / "deep/file").read_text() == "precious"
        assert stat.S_IMODE(data.stat().st_mode) == 0o755
    assert clean(job)["removed"] == [job.id]
    assert not job.dir().exists() and (data / "deep/file").exists()


def test_one_mount_keeps_no_other_job(bench: Bench, data: Path) -> None:
    nodes = bench.nodes(1)
    jobs = [bench.run(nodes, "true", id=f"job{number}") for number in range(3)]
    for job in jobs:
        job.ended()
        job.gone()
    with mounted(str(data), jobs[1].dir() / "data", "--bind"):
        answer = nodes[0].ask("clean", job="", now=2e9, older_than=0)
        assert sorted(answer["removed"]) == ["job0", "job2"] and list(answer["kept"]) == ["job1"]


def test_undo_refuses_a_mount(bench: Bench, data: Path) -> None:
    """What takes back a job that never started removes directories, too."""
    job = bench.job(None, "true").place()
    with mounted(str(data), job.dir() / "data", "--bind"):
        with pytest.raises(PreflightError, match="is mounted there"):
            job.nodes[0].ask("unplace", job_dir=str(job.dir()), token=job.token)
        assert (data / "deep/file").exists()
    job.nodes[0].ask("unplace", job_dir=str(job.dir()), token=job.token)
    assert not job.dir().exists()


def test_other_file_system_is_not_entered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was mounted after the check of the list: seen by its device number, before its mode is changed."""
    root, precious = tmp_path / "root", tmp_path / "root/JOBx/locked/other"
    files.make_root(str(root))
    os.close(files.make_job_dir(str(root / "JOBx")))
    with mounted("none", precious, "-t", "tmpfs", "-o", "mode=0500"):
        (precious / "file").write_text("precious")
        monkeypatch.setattr(mounts, "mount_points_below", lambda path: [])  # the moment before the mount
        with pytest.raises(PreflightError, match="locked/other"):
            files.remove_tree(str(root / "JOBx"))
        assert (precious / "file").read_text() == "precious"
        assert stat.S_IMODE(precious.stat().st_mode) == 0o500


def test_names_are_read_as_the_kernel_writes_them(tmp_path: Path, data: Path) -> None:
    target = tmp_path / "a b\tc\\d"
    assert mounts.mount_points_below(str(tmp_path)) == []
    with mounted(str(data), target, "--bind"):
        assert mounts.mount_points_below(str(tmp_path)) == [str(target)]
        assert mounts.mount_points_below(str(target)) == [str(target)]
        assert mounts.mount_points_below(str(tmp_path / "a")) == []
