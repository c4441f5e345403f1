"""The scripts that mpirun calls: they run the code of the node, or a copy of it where that may be removed."""

from __future__ import annotations

import io
import os
import subprocess
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

import clustertool
from clustertool.fleet.joining import join_process
from clustertool.node.mpi import launcher_scripts


def spec(job_dir: Path, **more: str) -> Any:
    return {"job_dir": str(job_dir), "mark": "j:0:t", **more}


def written(tmp_path: Path, bundle: bytes = b"", **more: str) -> tuple[Path, Mapping[str, str]]:
    """The job's directory, with a quote and a space in its name, and the variables of mpirun."""
    job, folder = tmp_path / "it's a job", tmp_path / "private"
    (job / ".clustertool").mkdir(parents=True)
    folder.mkdir()
    fd = os.open(job, os.O_RDONLY)
    launcher_scripts.write(spec(job, **more), fd, str(folder), bundle)
    os.close(fd)
    return job, launcher_scripts.variables(spec(job), str(folder))


def refused(script: str, *arguments: str) -> str:
    """What a script prints without launcher and supervisor. All of its modules were imported then."""
    env = {"PATH": os.environ["PATH"]}
    done = subprocess.run(
        ["/bin/sh", script, *arguments], env=env, cwd="/", capture_output=True, text=True, check=False
    )
    assert done.returncode in (78, 255), done.stderr
    return done.stderr


def test_each_node_has_the_script_of_ranks(tmp_path: Path) -> None:
    job, variables = written(tmp_path)
    assert "no mpirun has started this process" in refused(variables["CLUSTERTOOL_MPI_RANK"])
    assert not (job / ".clustertool/mpi-agent").exists()


def test_node_0_has_the_agent_and_the_hosts(tmp_path: Path) -> None:
    job, _ = written(tmp_path, hostfile="240.0.0.1:2\n")
    assert (job / ".clustertool/mpi-hosts").read_text() == "240.0.0.1:2\n"
    text = refused(str(job / ".clustertool/mpi-agent"), "-x", "240.0.0.1", "orted", "-mca")
    assert "the MPI daemon on 240.0.0.1 cannot be started" in text


def test_code_of_a_bundle_that_was_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the code is written: a bundle has the job's key."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in join_process.code().items():
            archive.writestr(name, text)
        archive.writestr("join.json", "secret")
    monkeypatch.setattr(clustertool, "__file__", str(tmp_path / "bundle.pyz/clustertool/__init__.py"))
    _, variables = written(tmp_path, file.getvalue())
    assert [path.name for path in (tmp_path / "private/code").iterdir()] == ["clustertool"]
    assert "no mpirun has started this process" in refused(variables["CLUSTERTOOL_MPI_RANK"])


def test_code_in_a_folder_that_will_be_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "clustertool-code-x"
    for name, text in join_process.code().items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text(text)
    monkeypatch.setattr(clustertool, "__file__", str(place / "clustertool/__init__.py"))
    _, variables = written(tmp_path)
    place.rename(tmp_path / "removed")
    assert "no mpirun has started this process" in refused(variables["CLUSTERTOOL_MPI_RANK"])
