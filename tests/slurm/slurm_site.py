"""A folder on the laptop whose conf.py names a cluster of Slurm, and what lives and lies on that cluster."""

from __future__ import annotations

from pathlib import Path

from tests.cli import LabSite, Process
from tests.slurm.slurm_lab import DAEMONS, LOGIN, SlurmLab


class SlurmSite(LabSite):
    """Nodes are the compute nodes of a SlurmLab; the login host is counted as the last one."""

    lab: SlurmLab

    def __init__(self, folder: Path, lab: SlurmLab) -> None:
        super().__init__(folder, lab)

    @property
    def settings(self) -> dict[str, object]:
        """SLURM of its conf.py."""
        return {"login": f"root@{LOGIN}", "nodes": self.lab.nodes, "cpus_per_node": 2}

    def conf_text(self, **keys: object) -> str:
        return self.lab.conf(**{"HOSTS": None, "USER": None, "ENGINE": "slurm", "SLURM": self.settings, **keys})

    def conf_of_ssh(self, **keys: object) -> SlurmSite:
        """Write a conf.py that names the same machines for the ssh engine."""
        hosts = [self.lab.name(i) for i in range(self.lab.nodes)]
        (self.folder / "conf.py").write_text(self.lab.conf(HOSTS=hosts, **keys))
        return self

    def processes(self, node: int) -> list[Process]:
        return [process for process in super().processes(node) if process.name not in DAEMONS]

    @property
    def shared(self) -> Path:
        """The home that all hosts of the cluster share, as this machine sees it."""
        return self.lab.home(0)

    def jobs_of_nodes(self, name: str = "") -> list[Path]:
        """The directories of a job on the shared file system, by node."""
        root = self.root(0)
        return sorted([*root.glob(f"JOB{name}*"), *root.glob(f"node*/JOB{name}*")])
