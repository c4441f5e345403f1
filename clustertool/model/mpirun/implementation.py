"""This module reads which implementation of MPI an mpirun belongs to, from what `mpirun --version` prints."""

from __future__ import annotations

import re
from typing import NamedTuple, Optional

OPEN_MPI, MPICH = "Open MPI", "MPICH"
_OLDEST = 4  # version of Open MPI, and of MPICH, with which the options were tried
_OPEN_MPI = re.compile(r"\((?:Open MPI|OpenRTE)\)\s+v?(\d+(?:\.\w+)*)")
_HYDRA = re.compile(r"HYDRA build details:\s+Version:\s+v?(\d+(?:\.\w+)*)", re.IGNORECASE)
_OTHERS = {"Intel(R) MPI": "Intel MPI", "MVAPICH": "MVAPICH", "Platform MPI": "Platform MPI", "PRRTE": "PRRTE"}


class Implementation(NamedTuple):
    """version: as it is printed, "4.1.4"."""

    name: str
    version: str

    @property
    def major(self) -> int:
        """The first number of the version."""
        return int(self.version.partition(".")[0])

    @property
    def supported(self) -> bool:
        """Whether the tool knows its options."""
        return self.name in (OPEN_MPI, MPICH) and self.major >= _OLDEST

    @property
    def hydra(self) -> bool:
        return self.name == MPICH

    @property
    def daemon(self) -> str:
        """The program that starts the ranks of a node."""
        return "hydra_pmi_proxy" if self.hydra else "orted" if self.major < 5 else "prted"

    @property
    def text(self) -> str:
        """Open MPI 4.1.4."""
        return f"{self.name} {self.version}"


SUPPORTED = f"Open MPI {_OLDEST} and 5, MPICH {_OLDEST} and 5"
NO_MPI_FIX = "install Open MPI or MPICH on every node, or activate it by PRELUDE (module load openmpi) or PATH in ENV"
DAEMONS = ("orted", "prted", "hydra_pmi_proxy")


def read_implementation(text: str) -> Optional[Implementation]:
    """Read the implementation of an mpirun whose --version printed this text; None if the text names none that is known."""
    for sign, name in _OTHERS.items():
        if sign in text:
            version = re.search(r"\d+(?:\.\w+)*", text[text.index(sign) + len(sign) :])
            return Implementation(name, version.group() if version else "0")
    for name, pattern in ((OPEN_MPI, _OPEN_MPI), (MPICH, _HYDRA)):
        found = pattern.search(text)
        if found:
            return Implementation(name, found.group(1))
    return None
