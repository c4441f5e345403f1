"""A command of the tool on the embedded cluster whose agents are forks (see tests/forked_agents.py).

Its arguments: the path of the program that is the nodes' Python, and the command line. Nodes of the embedded cluster have the
Python of the command, so that each of their agents would be a new process of it.
"""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from clustertool.fleet.embedded_cluster import LocalCluster, Server
from clustertool.model.config.cluster import Cluster


def use(python: str) -> None:
    """Have the nodes of the embedded cluster start their agents by this program."""
    made = LocalCluster._to_cluster

    def to_cluster(self: LocalCluster, servers: Iterable[Server]) -> Cluster:
        return replace(made(self, servers), python=python)

    LocalCluster._to_cluster = to_cluster  # type: ignore[method-assign]


def main() -> None:
    python, program, *rest = sys.argv[1:]
    use(python)
    sys.path[0] = str(Path(program).parent)
    sys.argv[:] = [program, *rest]
    if program == sys.executable:
        sys.path[0] = str(Path.cwd())
        sys.argv[:] = ["-m", *rest[2:]]
        runpy.run_module(rest[1], run_name="__main__", alter_sys=True)
    else:
        runpy.run_path(program, run_name="__main__")


if __name__ == "__main__":
    main()
