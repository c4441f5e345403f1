"""A node that claims other nodes' places, ranks, or thousands of jobs: the other nodes' answers stand, and their jobs stop."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from clustertool.actions.find_jobs import locate_nodes, summaries_by_job
from clustertool.model.config.hosts import read_hosts
from tests.cli import LoopSite, until
from tests.security.hostile import site_with_hostile

Sites = Callable[..., LoopSite]
HOSTS = read_hosts(["n0", "n1", "n2"])
NAMES = ["n0", "n1", "n2"]
TRAIN = """
import os, time
open(os.environ["CLUSTERTOOL_OUTPUT"] + "/model", "w").write("honest")
print("ready", flush=True)
time.sleep(600)
"""

CLAIMS = """
    def answer(request):
        if request["type"] == "jobs":
            reply(request, jobs=[job(ID), job(ID, node=1 - NODE)])
        elif request["type"] == "status":
            claimed = [dict(role="trainer", rank=rank, local_rank=rank, endpoint="", log="") for rank in range(100)]
            first = [dict(type="odd", t=1.0, processes=5)] * FIRST
            event = dict(type="job", t=1.0, id=ID, node=NODE, nodes=NODES, processes=claimed)
            reply(request, node=NODE, dir=DIR, heartbeat=None, events=[*first, event], output=[], metrics=[],
                  supervised=False, unknown="", usage={})
        elif request["type"] == "spans":
            reply(request, spans=[])
        else:
            reply(request, jobs={ID: {"state": "clean", "survivors": []}})
"""
FLOOD = """
    def answer(request):
        if request["type"] == "jobs":
            reply(request, jobs=[job("flood%d" % n, created=4e9) for n in range(3000)])
        elif request["type"] != "stop":
            reply(request, jobs={})
"""


def reported(*summaries: tuple[int, int, list[str]]) -> dict[int, Any]:
    """Agents' answers about one job, from (agent, node that it claims, names of the nodes)."""
    found: dict[int, Any] = {}
    for agent, node, names in summaries:
        found.setdefault(agent, {"jobs": []})["jobs"].append({"id": "j", "node": node, "nodes": names})
    return found


NOTHING: dict[str, Any] = {"jobs": []}


@pytest.mark.parametrize(
    ("answers", "places"),
    [
        (reported((0, 0, NAMES), (1, 1, NAMES), (2, 2, NAMES)), {0: 0, 1: 1, 2: 2}),
        (reported((0, 0, NAMES), (0, 1, NAMES), (1, 1, NAMES), (2, 2, NAMES)), {0: 0, 1: 1, 2: 2}),  # a second claim
        (reported((0, 1, NAMES), (1, 1, NAMES), (2, 2, NAMES)), {0: 0, 1: 1, 2: 2}),  # another node's number
        (reported((0, 0, NAMES), (0, 1, NAMES)), {0: 0}),  # of nodes that did not answer
        (reported((0, 1, NAMES), (2, 2, NAMES)), {0: 0, 2: 2}),
        (reported((0, 0, ["n2", "n1", "n0"]), (1, 1, NAMES), (2, 2, NAMES)), {0: 0, 1: 1, 2: 2}),  # names of its own
        (reported((0, 0, ["a", "n1"]), (1, 1, ["a", "n1"])), {0: 0, 1: 1}),  # the first host has another name now
        (reported((0, 1, ["a", "b"]), (1, 0, ["a", "b"])), {1: 0, 0: 1}),  # both have, and their order is another one
        ({**reported((2, 0, ["n0"])), 0: NOTHING}, {0: 2}),  # the name n0 leads to another machine now
    ],
)
def test_a_node_has_no_place_but_its_own(answers: dict[int, Any], places: dict[int, int]) -> None:
    assert locate_nodes(summaries_by_job(answers)["j"], answers, HOSTS)[0] == places


def started(site: LoopSite) -> str:
    """A job that runs on all nodes."""
    site.workspace(train_py=TRAIN)
    job = site.inv("run", "-w", "job", "--detach").ends(0).job
    until(lambda: len(trainers(site, range(site.count))) == site.count)
    return job


def trainers(site: LoopSite, nodes: Any) -> list[Any]:
    return [process for node in nodes for process in site.processes(node) if "train.py" in process.argv]


def test_a_claim_of_another_node_s_place_hides_nothing(site: Sites) -> None:
    pair = site(2)
    job = started(pair)
    site_with_hostile(pair, 0, f"ID, DIR, FIRST = {job!r}, '/tmp', 0\n" + _dedented(CLAIMS))
    shown = {one["rank"]: one for one in pair.inv("status", "--json").json["processes"]}
    assert sorted(shown) == [0, 1]
    assert (shown[1]["node"], shown[1]["state"]) == (1, "running") and shown[1]["pid"]
    assert "ready" in pair.inv("logs", "--rank", 1).ends(0).out
    pair.inv("stop", "--job", job, "--grace", "0.2")
    until(lambda: not trainers(pair, [1]))
    pair.conf()
    pair.inv("stop", "--job", job, "--force").ends(0)


def test_ranks_of_others_and_of_no_plan_are_not_fetched(site: Sites) -> None:
    pair = site(2)
    job = started(pair)
    (pair.folder / "evil/output").mkdir(parents=True)
    (pair.folder / "evil/output/model").write_text("evil")
    for first in (0, 1):  # an event of an unknown kind in front
        site_with_hostile(
            pair, 1, f"ID, DIR, FIRST = {job!r}, {str(pair.folder / 'evil')!r}, {first}\n" + _dedented(CLAIMS)
        )
        done = pair.inv("fetch", "--rank", "all", "--to", f"all{first}", "--json").ends(0)
        assert list(done.json["ranks"]) == ["0", "1"]
        assert sorted(path.name for path in (pair.folder / f"all{first}").iterdir()) == ["rank0", "rank1"]
        assert (pair.folder / f"all{first}/rank0/model").read_text() == "honest"
    done = pair.inv("fetch", "--rank", 0, "--to", "zero", "--json").ends(0)
    assert list(done.json["ranks"]) == ["0"] and (pair.folder / "zero/model").read_text() == "honest"
    pair.conf()
    pair.inv("stop", "--job", job, "--force").ends(0)


def test_an_output_outside_of_its_job_is_not_fetched(site: Sites) -> None:
    """A rank can write its records. `fetch` takes no other folder of the node for the output."""
    one = site(1)
    one.workspace(train_py=TRAIN.rpartition("time.sleep")[0])
    one.inv("run", "-w", "job").ends(0)
    (one.home(0) / "mine").mkdir()
    (one.home(0) / "mine/secret").write_text("secret")
    events = one.jobs(0)[0] / ".clustertool/events.jsonl"
    text = events.read_text()
    for number, place in enumerate(("../../mine", "/" + str(one.home(0) / "mine").strip("/"), "output/../../../mine")):
        found = re.sub(r'"output": ?"output"', f'"output": "{place}"', text)
        assert found != text
        events.write_text(found)
        one.inv("fetch", "--to", f"got{number}").ends(0)
        assert [path.name for path in (one.folder / f"got{number}").iterdir()] == ["model"]


def test_a_flood_of_jobs_does_not_delay_the_stop_of_others(site: Sites) -> None:
    """Node 1 lists 3000 jobs on all nodes and answers no stop."""
    pair = site(2)
    pair.workspace(train_py=TRAIN)
    pair.inv("run", "-w", "job", "--detach", "--only", pair.name(0)).ends(0)
    until(lambda: trainers(pair, [0]))
    site_with_hostile(pair, 1, FLOOD)
    stop = pair.start("stop", "--all", "--grace", "0.2")
    until(lambda: not trainers(pair, [0]))
    stop.signal()
    stop.wait()


def _dedented(text: str) -> str:
    import textwrap

    return textwrap.dedent(text)
