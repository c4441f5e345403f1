"""What Paddle's own launcher gives each process, recorded, against what ours gives in the same place, field by field.

tests/data/paddle_environments.json is the environment of every process of a few launches of paddlepaddle 3.3.1. The differences
are those that a table in docs/frameworks.md lists for the mode, and no other. tests/frameworks has real launchers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from cases import cluster_of, facts_of, plan_of

from clustertool.model.planning.plan import Plan
from tests.differences import PADDLE, listed

RUNS: Mapping[str, Any] = json.loads((Path(__file__).parents[1] / "data" / "paddle_environments.json").read_text())[
    "runs"
]

LISTS: dict[str, Any] = {
    "servers": ("127.0.0.2:6170,127.0.0.3:6170",),
    "workers": ("127.0.0.2:6171,127.0.0.2:6172,127.0.0.3:6171,127.0.0.3:6172",),
    "http_port": "6767",
}
PAIR = ["127.0.0.2", "127.0.0.3"]


def launched(hosts: list[str], keys: Mapping[str, Any] | None = None, cards: int = 0, **options: Any) -> Plan:
    cluster = cluster_of(hosts, **{"PADDLE_PORTS_NUM_FOR_SPARSE": 0, **(keys or {})})
    found = {"devices": tuple(range(cards)), "device_kind": "gpu"} if cards else {}
    return plan_of(cluster, facts=facts_of(cluster, **found), **options)


def by_args() -> Plan:
    return launched(PAIR, {"START_PORT": 6070}, nproc_per_node="2")


def by_lists() -> Plan:
    return launched(PAIR, **LISTS)


# run -> (the same launch with ours, on which node). Ports that Paddle chose by itself are asked for.
SAME: dict[str, tuple[Callable[[], Plan], int]] = {
    "c1": (lambda: launched(["127.0.0.1"], {"START_PORT": 49928}, workers=("127.0.0.1:49929,127.0.0.1:49930",)), 0),
    "dev1": (
        lambda: launched(
            ["127.0.0.1"], {"START_PORT": 59929}, cards=8, devices="4,6", workers=("127.0.0.1:59930,127.0.0.1:59931",)
        ),
        0,
    ),
    "ipsA": (by_args, 0),
    "ipsB": (by_args, 1),
    "psA": (by_lists, 0),
    "psB": (by_lists, 1),
    "ps1": (
        lambda: launched(
            ["127.0.0.1"],
            servers=("127.0.0.1:62372,127.0.0.1:62373",),
            workers=("127.0.0.1:62374,127.0.0.1:62375",),
            http_port="62376",
        ),
        0,
    ),
    "lheter": (
        lambda: launched(
            ["127.0.0.2"],
            servers=("127.0.0.2:6170",),
            workers=("127.0.0.2:6171",),
            heter_workers=("127.0.0.2:6172;127.0.0.2:6173",),
            heter_devices="cpu;cpu",
            http_port="42707",
        ),
        0,
    ),
}


def pairs(run: str) -> list[tuple[str, dict[str, str], dict[str, str]]]:
    """(log, what Paddle gave, what we give) of each process of a node. Paddle counts logs on the node, we in the job."""
    make, node = SAME[run]
    ours: dict[str, list[dict[str, str]]] = {}
    for process in make().nodes[node].processes:
        ours.setdefault(process.log.split("/")[-1].split(".")[0], []).append(dict(process.env))
    found = []
    for log, theirs in RUNS[run]["processes"].items():
        kind, number = log.split(".")
        found.append((log, theirs, ours[kind][int(number)]))
    assert len(found) == sum(map(len, ours.values()))
    return found


def mode(run: str) -> str:
    logs = " ".join(RUNS[run]["processes"])
    return "ps-heter" if "heterlog." in logs else "ps" if "serverlog." in logs else "collective"


def differing(run: str) -> set[str]:
    return {name for _, theirs, ours in pairs(run) for name in theirs if ours.get(name) != theirs[name]}


def test_every_recorded_run_is_compared() -> None:
    assert set(SAME) == set(RUNS)


@pytest.mark.parametrize("run", SAME)
def test_what_paddle_gives_we_give(run: str) -> None:
    found = differing(run)
    assert found <= listed(PADDLE, mode(run))
    assert all(len(theirs.keys() - found) >= 9 for _, theirs, _ in pairs(run))


@pytest.mark.parametrize("its", ["collective", "ps", "ps-heter"])
def test_a_difference_is_one(its: str) -> None:
    """What the table lists, and was recorded, differs somewhere."""
    runs = [run for run in SAME if mode(run) == its]
    recorded = {name for run in runs for _, theirs, _ in pairs(run) for name in theirs}
    assert listed(PADDLE, its) & recorded == {name for run in runs for name in differing(run)}


def test_where_we_differ_our_value_is_this() -> None:
    first, second = (ours for _, _, ours in pairs("dev1"))
    assert [env["CUDA_VISIBLE_DEVICES"] for env in (first, second)] == ["4,6", "4,6"]
    assert [env["FLAGS_selected_gpus"] for env in (first, second)] == ["0", "1"]
    assert {ours["PADDLE_MASTER"] for run in ("ipsA", "ipsB") for _, _, ours in pairs(run)} == {"127.0.0.2:6072"}
    assert {ours["PADDLE_WITH_GLOO"] for _, _, ours in pairs("lheter")} == {"1"}


def test_the_same_logs() -> None:
    """workerlog.N, serverlog.N and heterlog.N are where Paddle's users search for them."""
    for run in ("c1", "ps1", "psA", "lheter"):
        make, node = SAME[run]
        ours = {process.log for process in make().nodes[node].processes}
        theirs = {f"log/{name}" for name in RUNS[run]["log_dir_files"]}
        assert ours == {
            name for name in theirs if name.startswith(("log/workerlog.", "log/serverlog.", "log/heterlog."))
        }
