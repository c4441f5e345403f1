"""This module computes the command lines by which a plan's containers start, for --dry."""

from __future__ import annotations

from typing import Dict, List

from clustertool.model.container import container_command
from clustertool.model.container.container_command import Surroundings
from clustertool.model.paths import rank_home
from clustertool.model.planning import requests
from clustertool.model.planning.plan import Plan


def container_lines(plan: Plan) -> Dict[int, List[str]]:
    """Build the command line of the first process of each node that has containers. No value of a variable is in it.

    A node adds its limits, its device files and an entry for the user when it starts the process.
    """
    found: Dict[int, List[str]] = {}
    for node in plan.nodes:
        if node.container is None or not node.processes:
            continue
        spec = requests.spec(plan, node, [], [])
        process, around = spec["processes"][0], Surroundings(home=rank_home(spec["root"]))
        variables = {**dict(node.processes[0].env), "CLUSTERTOOL_ATTEMPT": "0"}
        names = container_command.passed(node.container["runtime"], spec, process, variables, around).names
        found[node.host.index] = container_command.command(node.container, spec, process, names, around)
    return found
