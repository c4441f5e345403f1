"""Tests of the probe's facts about MPI: programs that stand for mpirun, and a real one where it is installed."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from clustertool.model.mpi.launch_command import DAEMONS, read_implementation
from clustertool.node.probe.job_environment import read_mpi


def asked(first_path: Path | str = "", prelude: str = "", **env: str) -> dict[str, object]:
    return {
        "prelude": prelude,
        "first_path": str(first_path),
        "ld_library_path": "",
        "here": False,
        "env": env,
        "packages": list(DAEMONS),
    }


def program(path: Path, text: str = "") -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)


def test_in_the_environment_of_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """PRELUDE may print something and set PATH, and variables of a scheduler do not reach mpirun."""
    program(tmp_path / "bin/mpirun", 'echo "mpirun (Open MPI) $VERSION$SLURM_JOB_ID"; yes more | head -n 100000')
    program(tmp_path / "bin/orted")
    monkeypatch.setenv("SLURM_JOB_ID", "77")
    monkeypatch.setenv("PATH", "/usr/sbin:/sbin")
    wanted = asked(prelude=f"echo hello; PATH={tmp_path}/bin:/usr/bin:/bin", VERSION="4.9.9")
    found = read_mpi({**wanted, "engine": "slurm"})  # type: ignore[typeddict-item]
    known = read_implementation(found["mpirun"])
    assert known is not None and known.version == "4.9.9"
    assert "orted" in found["mpi_daemons"] and len(found["mpirun"]) <= 300


def test_no_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "bin").mkdir()
    for name in ("sh", "head"):
        (tmp_path / "bin" / name).symlink_to(str(shutil.which(name)))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    assert read_mpi(asked()) == {"mpirun": "", "mpi_daemons": []}  # type: ignore[arg-type]


def test_mpirun_that_does_not_end(tmp_path: Path) -> None:
    program(tmp_path / "bin/mpirun", "exec sleep 60")
    assert read_mpi(asked(tmp_path / "bin"), 0.3)["mpirun"] == ""  # type: ignore[arg-type]


@pytest.mark.parametrize(("name", "daemon"), [("openmpi", "orted"), ("mpich", "hydra_pmi_proxy")])
def test_real_mpirun(name: str, daemon: str, tmp_path: Path) -> None:
    real = shutil.which(f"mpirun.{name}")
    if real is None:
        pytest.skip(f"mpirun.{name} is not installed")
    (tmp_path / "mpirun").symlink_to(real)
    found = read_mpi(asked(tmp_path))  # type: ignore[arg-type]
    known = read_implementation(found["mpirun"])
    assert known is not None and known.supported and known.daemon == daemon and daemon in found["mpi_daemons"]
