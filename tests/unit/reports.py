"""What nodes answer to `report`, made up: any number of nodes and ranks, of which one is slow and one has failed."""

from __future__ import annotations

from typing import Any

from clustertool.watch.report_model import ReportModel, build_report_model

BEGAN = 1_795_000_000.0
CULPRIT, SLOW = 1, 2
SPEED = 3.0  # steps a second
Event = dict[str, Any]


def events(node: int, nodes: int, each: int, length: float, crash: bool = True) -> list[Event]:
    """One node of a collective job: all start, rank 1 fails at the end, the others are stopped."""
    ranks = range(node * each, (node + 1) * each)
    processes = [
        {
            "role": "trainer",
            "rank": r,
            "local_rank": r - node * each,
            "endpoint": f"10.0.0.{node}:{7000 + r}",
            "log": f"log/workerlog.{r}",
        }
        for r in ranks
    ]
    found: list[Event] = [
        {
            "t": BEGAN,
            "type": "job",
            "id": "20261121-000000-test",
            "node": node,
            "name": f"node{node}",
            "mode": "collective",
            "nodes": [f"node{n}" for n in range(nodes)],
            "created": BEGAN,
            "owner": "ann",
            "command": "python3 train.py",
            "processes": processes,
        },
        {"t": BEGAN + 0.1, "type": "supervisor", "pid": 100, "start": 1, "boot": "b"},
        *(
            {
                "t": BEGAN + 0.2 + r / 1000,
                "type": "started",
                "role": "trainer",
                "rank": r,
                "pid": 1000 + r,
                "start": 5,
                "attempt": 0,
                "log": f"log/workerlog.{r}",
            }
            for r in ranks
        ),
    ]
    if not crash:
        return found
    for r in ranks:
        guilty = r == CULPRIT
        found.append(
            {
                "t": BEGAN + length + (not guilty) * 0.3,
                "type": "exited",
                "role": "trainer",
                "rank": r,
                "code": 7 if guilty else 0,
                "signal": 0 if guilty else 15,
                "stopped": not guilty,
                "note": "",
                "attempt": 0,
                "cpu": length / 2,
                "memory": 1 << 30,
            }
        )
    victims = [["trainer", r] for r in range(nodes * each) if r != CULPRIT]
    outcome = {
        "state": "failed",
        "code": 7,
        "source": "job",
        "reason": "trainer 1 on node0 ended with exit code 7",
        "culprits": [["trainer", CULPRIT]],
        "victims": victims,
        "node": 0,
    }
    return [*found, {"t": BEGAN + length + 0.5, "type": "ended", **outcome}]


def answer(node: int, nodes: int, each: int, length: float, points: int = 80, crash: bool = True) -> dict[str, Any]:
    """The node's whole answer; rank 2 goes at half the pace."""
    times = [BEGAN + 1 + (length - 1) * n / points for n in range(points + 1)]
    ranks = range(node * each, (node + 1) * each)
    return {
        "node": node,
        "dir": "/home/ann/clustertool/JOB",
        "heartbeat": 0.2,
        "supervised": not crash,
        "usage": {},
        "now": BEGAN + length + 60,
        "events": events(node, nodes, each, length, crash),
        "machine": {"cores": 8, "total": 64 << 30, "rows": [(t, 4 * (t - BEGAN), 8 << 30) for t in times]},
        "cards": [],
        "output": [["trainer", r, None, 9.0, BEGAN + length] for r in ranks],
        "ranks": [
            {
                "role": "trainer",
                "rank": r,
                "log_size": 5000,
                "rows": [(t, (t - BEGAN) / 2, 1 << 29, 3) for t in times],
                "progress": [(t, None, int((t - BEGAN) * SPEED * (0.5 if r == SLOW else 1))) for t in times],
            }
            for r in ranks
        ],
        "tails": [["trainer", r, f"step={r}\nlast words of {r}\n"] for r in ranks],
        "stacks": [0.0, []],
        "plan": {
            "policy": {"grace": 10.0},
            "work_dir": "/home/ann",
            "processes": [
                {"role": "trainer", "rank": r, "devices": [], "shards": 0, "command": "python3 train.py"} for r in ranks
            ],
        },
    }


def answers(
    nodes: int, each: int, length: float = 600.0, points: int = 80, crash: bool = True
) -> dict[int, dict[str, Any]]:
    return {node: answer(node, nodes, each, length, points, crash) for node in range(nodes)}


def story_of(given: dict[int, dict[str, Any]], secrets: tuple[str, ...] = (), places: Any = ()) -> ReportModel:
    """places: those that the header of each node names."""
    from clustertool.actions.read_status import read
    from clustertool.model.masking import mask

    for node in given.values():
        node["events"][0]["places"] = places
    return build_report_model(read(given), given, mask(secrets))
