"""inv gpus prints the devices of the cluster, by node, with their users."""

from __future__ import annotations

from clustertool.fleet.device_check import devices_of
from clustertool.show.device_table import devices_tables
from clustertool.verbs import load_config
from clustertool.verbs.jobs import fleet_of
from clustertool.verbs.verb import Call


def gpus(call: Call) -> None:
    """Show the devices of all nodes (GPU, DCU, XPU, NPU), their load, and the jobs and processes on them."""
    cluster = load_config.cluster(call, start_local=False)
    with fleet_of(cluster) as fleet:
        gathered = devices_of(fleet)
        nodes = {fleet.name(node): answer for node, answer in sorted(gathered.ok.items())}
        fleet.failed.update(gathered.failed)
        if call.json:
            answers = {
                name: {key: value for key, value in answer.items() if key != "re"} for name, answer in nodes.items()
            }
            call.answer(
                {
                    "nodes": answers,
                    "unreachable": {fleet.name(node): e.what for node, e in sorted(fleet.failed.items())},
                }
            )
        else:
            devices_tables(nodes, call.terminal)
