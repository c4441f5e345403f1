"""inv gpus prints the devices of the cluster, by node, with their users."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict

from clustertool.fleet.fleet import devices_of
from clustertool.model.engine_node import EngineNode
from clustertool.show.device_table import devices_tables, engine_nodes_table
from clustertool.verbs.jobs import engine_of
from clustertool.verbs.verb import Call


def gpus(call: Call) -> None:
    with engine_of(call) as engine:
        fleet = engine.fleet
        if not engine.capabilities.live_channels:
            _of_engine(call, [] if fleet.failed else engine.nodes())
            return
        gathered = devices_of(fleet)
        nodes = {fleet.name(node): answer for node, answer in sorted(gathered.ok.items())}
        fleet.failed.update(gathered.failed)
        if call.json:
            answers = {name: {k: v for k, v in answer.items() if k != "re"} for name, answer in nodes.items()}
            away = {fleet.name(node): e.what for node, e in sorted(fleet.failed.items())}
            call.answer({"nodes": answers, "unreachable": away})
        else:
            devices_tables(nodes, call.terminal)


def _of_engine(call: Call, nodes: Sequence[EngineNode]) -> None:
    """Print what the engine knows: what its users have asked for, and not what runs on the devices."""
    if call.json:
        found = {node.name: {k: v for k, v in asdict(node).items() if k not in ("name", "gpus")} for node in nodes}
        for node in nodes:
            found[node.name]["gpus"] = [dict(zip(("type", "total", "used"), gpu)) for gpu in node.gpus]
        call.answer({"nodes": found, "unreachable": {}})
    else:
        engine_nodes_table(nodes, call.terminal)
