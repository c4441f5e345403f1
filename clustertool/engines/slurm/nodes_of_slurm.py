"""This module describes the nodes that Slurm will choose, for --dry."""

from __future__ import annotations

import re

from clustertool.engines.queued_request import ExpectedNodes
from clustertool.model.facts import Facts
from clustertool.model.slurm.slurm_settings import SlurmSettings

STANDS = (
    "names, addresses and ports of nodes are known when Slurm has started the job; node0, node1, ... stand for them"
)


def nodes_of_slurm(settings: SlurmSettings, login: Facts) -> ExpectedNodes:
    """Describe the nodes that Slurm will give to a job: each has the processors and GPUs that the settings ask for.

    login: facts of the login host, whose ROOT_DIR the nodes share.
    """
    return ExpectedNodes(
        names=tuple(f"node{number}" for number in range(settings.node_count)),
        root=login.root,
        home=login.home,
        listing=login.listing,
        cpus=settings.cpus_per_node or 1,
        gpus=_gpus(settings.gpus_per_node),
    )


def _gpus(text: str) -> int:
    """Count the GPUs of a node: "4", "a100:4", "a100:2,v100:1"."""
    return sum(map(int, re.findall(r"(?:^|[:,])([0-9]+)(?=,|$)", text)))
