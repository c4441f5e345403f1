"""Container settings describe the container of a job's ranks: CONTAINER of conf.py, [container] of job.toml, and --image."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Tuple

from clustertool.model.container.container_runtimes import AUTO, PULLS


@dataclass(frozen=True)
class ContainerSettings:
    """The container of a job's ranks. image: as the runtime knows it, or the path of a .sif file; "": no container.

    options: of `docker run`, `podman run` or `apptainer exec`. volumes: "SOURCE:TARGET" or "SOURCE:TARGET:OPTIONS".
    """

    image: str = ""
    runtime: str = AUTO
    options: Tuple[str, ...] = ()
    volumes: Tuple[str, ...] = ()
    pull: str = PULLS[0]

    def __bool__(self) -> bool:
        """Return whether the ranks run in a container."""
        return bool(self.image)


NO_CONTAINER = ContainerSettings()
