"""The picture of `inv top`: what samples become, how it folds, and that no line and no page is ever too big."""

from __future__ import annotations

import functools
import io
from typing import Any

import pytest

from clustertool.model.job.progress import find_metrics
from clustertool.model.masking import mask
from clustertool.model.shape import to_plain
from clustertool.show.terminal import Terminal
from clustertool.show.top_view import Page, Screen, View, choose, draw
from clustertool.watch.top_model import Row, TopModel, TopRank

GIB = 1 << 30


def card(index: int, load: int = 0, used: int = 0, **more: Any) -> dict[str, Any]:
    return {
        "index": index,
        "model": "H100",
        "utilisation": load,
        "memory_used": used * GIB,
        "memory_total": 80 * GIB,
        "temperature": 50,
        "held": None,
        "problem": "",
        "throttle": [],
        "users": [],
        **more,
    }


def rank(number: int, seconds: float = 0.0, line: str = "", **more: Any) -> dict[str, Any]:
    return {
        "role": "trainer",
        "rank": number,
        "state": "running",
        "pid": 100 + number,
        "log": f"log/workerlog.{number}",
        "seconds": seconds,
        "memory": 10**9,
        "line": line,
        "metrics": to_plain(find_metrics(f"{line}\n")),
        **more,
    }


def sample(t: float, devices: list[dict[str, Any]], *ranks: dict[str, Any], **more: Any) -> dict[str, Any]:
    jobs = (
        [{"job": "20260102-030405-abcd", "node": 0, "heartbeat": 0.3, "command": "", "ranks": list(ranks)}]
        if ranks
        else []
    )
    return {
        "t": t,
        "cpu": [int(100 * t), int(400 * t)],
        "cpus": 4,
        "memory": [GIB, 4 * GIB],
        "kind": "gpu" if devices else "cpu",
        "devices": devices,
        "problem": "",
        "jobs": jobs,
        **more,
    }


def cluster(nodes: int, cards: int = 8, loads: tuple[int, ...] = (50,), t: float = 1.0) -> TopModel:
    picture = TopModel()
    for node in range(nodes):
        load = loads[node % len(loads)]
        devices = [card(index, load, used=load // 2) for index in range(cards)]
        picture.feed(node, f"node{node + 1}", sample(t, devices, rank(node)), t)
    return picture


shared_cluster = functools.cache(cluster)  # for tests that only draw it


def texts(page: Page) -> list[str]:
    return ["".join(text for text, _ in line) for line in page.lines]


def screen(secrets: tuple[str, ...] = ()) -> Screen:
    return Screen(Terminal(out=io.TextIOWrapper(io.BytesIO(), "utf-8"), environ={}), mask(secrets))


def page_of(picture: TopModel, width: int = 120, height: int = 30, now: float = 1.0, **view: Any) -> Page:
    return screen().page(picture, View(**view), width, height, {}, now)


# -- samples


def test_cpu_and_rate_come_from_two_samples() -> None:
    picture = TopModel()
    picture.feed(0, "a", sample(10.0, [], rank(0, 5.0, "step 10")), 0.0)
    assert [(one.cpu, one.speed) for one in picture.processes("rank", "")] == [(None, None)]
    picture.feed(0, "a", sample(12.0, [], rank(0, 6.0, "step 30")), 2.0)
    [one] = picture.processes("rank", "")
    assert (one.cpu, one.speed, one.memory, one.heartbeat) == (50.0, 10.0, 10**9, 0.3)


def test_a_restarted_rank_is_another_process() -> None:
    picture = TopModel()
    picture.feed(0, "a", sample(10.0, [], rank(0, 500.0)), 0.0)
    picture.feed(0, "a", sample(11.0, [], rank(0, 1.0, pid=7)), 1.0)
    assert picture.processes("rank", "")[0].cpu is None


def test_ranks_that_are_gone_are_gone() -> None:
    picture = TopModel()
    picture.feed(0, "a", sample(1.0, [], rank(0)), 0.0)
    picture.feed(1, "b", sample(1.0, [], rank(1)), 0.0)
    picture.feed(0, "a", sample(2.0, []), 1.0)
    assert [one.rank for one in picture.processes("rank", "")] == [1]


def test_a_node_without_devices_shows_its_processors() -> None:
    picture = TopModel()
    picture.feed(0, "a", sample(1.0, []), 0.0)
    picture.feed(0, "a", sample(2.0, []), 1.0)
    [row] = picture.rows(10, "rank", "")
    assert (row.what, row.load, row.used, row.total) == ("4 cpus", 25.0, GIB, 4 * GIB)


def test_history() -> None:
    picture = TopModel()
    for t in range(100):
        picture.feed(0, "a", sample(float(t), [card(0, t)]), float(t))
    history = picture.rows(10, "rank", "")[0].history
    assert history[-3:] == (97.0, 98.0, 99.0) and len(history) == 60


# -- folding


def test_cards_then_nodes_then_nodes_that_are_alike() -> None:
    picture = cluster(4)
    assert len(picture.rows(32, "rank", "")) == 32
    rows = picture.rows(31, "rank", "")
    assert [(row.nodes, row.what, len(row.loads)) for row in rows] == [
        ((f"node{n}",), "8 x H100", 8) for n in (1, 2, 3, 4)
    ]
    [row] = picture.rows(3, "rank", "")
    assert (row.nodes, row.what, row.load) == (("node1", "node2", "node3", "node4"), "4 x (8 x H100)", 50.0)


def test_64_nodes_of_all_loads_fit_a_small_window() -> None:
    picture = cluster(64, loads=tuple(range(0, 100, 3)))
    for room in (64, 20, 10, 4, 2, 1):
        rows = picture.rows(room, "rank", "")
        assert len(rows) <= room
        assert sorted(name for row in rows for name in row.nodes) == sorted(f"node{n + 1}" for n in range(64))


def test_what_is_sick_is_never_folded_into_what_is_well() -> None:
    picture = cluster(64)
    hurt = [card(index, 50, 25, throttle=["hardware thermal"] if index == 3 else []) for index in range(8)]
    picture.feed(30, "node31", sample(2.0, hurt), 2.0)
    rows = picture.rows(5, "rank", "")
    assert [(row.nodes, row.wrong) for row in rows if row.wrong] == [(("node31",), ("hardware thermal",))]


def test_nodes_stand_in_the_order_of_conf_py() -> None:
    picture = TopModel()
    for node in (2, 0, 1):
        picture.feed(node, f"n{node}", sample(1.0, [card(0)]), 1.0)
    assert [row.nodes for row in picture.rows(9, "rank", "")] == [("n0",), ("n1",), ("n2",)]


# -- sorting and filtering


def test_sorts() -> None:
    picture = TopModel()
    for t in (1.0, 2.0):
        ranks = [
            rank(n, t * cpu, f"step {int(t * step)}", memory=memory)
            for n, cpu, step, memory in ((0, 0.1, 50, 7), (1, 0.9, 10, 9), (2, 0.5, 30, 8))
        ]
        picture.feed(0, "a", sample(t, [card(0, 10), card(1, 90, 70), card(2, 50, 75)], *ranks), t)

    def order(sort: str) -> list[int]:
        return [one.rank for one in picture.processes(sort, "")]

    assert [order(sort) for sort in ("rank", "cpu", "memory", "rate")] == [[0, 1, 2], [1, 2, 0], [1, 2, 0], [1, 2, 0]]
    assert [row.what[0] for row in picture.rows(9, "cpu", "")] == ["1", "2", "0"]
    assert [row.what[0] for row in picture.rows(9, "memory", "")] == ["2", "1", "0"]


def test_sorted_by_speed_the_ranks_that_make_no_progress_are_first() -> None:
    """Trainer 11 hangs at step 8 since before the first sample, trainer 2 has printed no step at all, and node c was cut."""
    picture = TopModel()
    for t in (1.0, 2.0, 3.0):
        lines = {0: f"step {10 + 5 * int(t)}", 1: f"step {int(t)}", 2: "loading", 11: "step 8"}
        ranks = [rank(number, line=line) for number, line in lines.items()]
        server = rank(0, role="pserver", line="serving")
        frozen, ended = rank(12, state="frozen", line="step 9"), rank(13, state="done", line="step 99")
        picture.feed(0, "a", with_plan(sample(t, [], *ranks, server, frozen, ended)), t)
    order = [(one.role, one.rank) for one in picture.processes("rate", "", ["c"]) if one.state != "waiting"]
    none = [("trainer", number) for number in (2, 11, 12, 14)]
    assert order == [*none, ("trainer", 1), ("trainer", 0), ("pserver", 0), ("trainer", 13)]


PLAN = {
    "nodes": ["a", "b", "c"],
    "places": [["pserver", 0, 0, 1, 1], ["trainer", 0, 0, 14, 1], ["trainer", 14, 2, 1, 1]],
}


def with_plan(given: dict[str, Any], lost: tuple[int, ...] = ()) -> dict[str, Any]:
    for job in given["jobs"]:
        job.update(plan=PLAN, lost=list(lost))
    return given


def states(picture: TopModel, *away: str) -> dict[int, str]:
    return {one.rank: one.state for one in picture.processes("rank", "trainer", away)}


def test_every_rank_of_the_plan_is_listed_and_none_of_a_silent_node_as_running() -> None:
    picture = TopModel()
    picture.feed(0, "a", with_plan(sample(1.0, [], rank(0))), 1.0)
    picture.feed(2, "c", with_plan(sample(1.0, [], rank(14, line="step 5"))), 1.0)
    assert states(picture) == {0: "running", **dict.fromkeys(range(1, 14), "waiting"), 14: "running"}
    assert states(picture, "c")[14] == "unknown", "its node does not answer"
    picture.feed(0, "a", with_plan(sample(2.0, [], rank(0)), lost=(2,)), 2.0)
    assert states(picture, "c")[14] == "lost", "the coordinator gave it up"
    picture.feed(0, "a", sample(3.0, []), 3.0)
    assert states(picture, "c") == {}, "the job has ended"


def test_a_rank_of_a_node_that_never_answered_is_listed() -> None:
    picture = TopModel()
    picture.feed(0, "a", with_plan(sample(1.0, [], rank(0))), 1.0)
    [one] = [one for one in picture.processes("rank", "", ["c"]) if one.rank == 14]
    assert (one.state, one.node, one.log) == ("unknown", "c", "")
    shown = texts(screen().page(picture, View(sort="rate"), 120, 40, {"c": "no answer"}, 1.0))
    assert [line.split()[:5] for line in shown if "unknown" in line] == [[">", "trainer", "14", "c", "unknown"]]


def test_the_cursor_stays_on_its_rank() -> None:
    """Sorted by CPU, ranks change their rows all the time."""
    picture, view, on = TopModel(), View(sort="cpu"), screen()

    def probe(t: float, *seconds: float) -> list[str]:
        picture.feed(0, "a", sample(t, [], *(rank(number, each) for number, each in enumerate(seconds))), t)
        page = on.page(picture, view, 100, 24, {}, t)
        ranks[:] = page.ranks
        return [line.split()[2] for line in texts(page) if line.startswith("> ")]

    ranks: list[TopRank] = []
    probe(1.0, 0.0, 0.0, 0.0)
    assert probe(2.0, 0.9, 0.5, 0.1) == ["0"]
    choose(view, ranks, 1)
    assert probe(3.0, 1.0, 1.4, 0.2) == ["1"]
    assert probe(4.0, 1.1, 1.5, 1.1) == ["1"] and view.at == 2
    choose(view, ranks, -2)
    assert probe(5.0, 1.1, 1.5, 2.0) == ["2"]
    choose(view, ranks, 99)
    chosen = view.chosen
    picture.feed(
        0, "a", sample(6.0, [], *(rank(number, 3.0) for number in range(3) if ("trainer", number) != chosen[1:])), 6.0
    )
    assert len(on.page(picture, view, 100, 24, {}, 6.0).ranks) == 2 and view.chosen != chosen and view.at == 1


def test_a_rank_without_output_shows_since_when() -> None:
    picture = TopModel()
    picture.feed(0, "a", sample(1.0, [], rank(0, line="step 8", quiet=24.0), rank(1, quiet=0.4)), 1.0)
    rows = [line.split("  ") for line in texts(page_of(picture)) if "trainer" in line]
    assert ["24 s" in row or " 24 s" in row for row in rows] == [True, False]
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    Screen(Terminal(out=out, environ={}), mask(())).plain(picture, View(), {}, 1.0)
    out.seek(0)
    assert "no output" in (text := out.read()) and "24 s" in text


def test_filter() -> None:
    picture = cluster(12)
    assert {row.nodes for row in picture.rows(99, "rank", "node12")} == {("node12",)}
    assert [one.rank for one in picture.processes("rank", "node12")] == [11]
    assert [one.rank for one in picture.processes("rank", "trainer 3")] == [3]
    assert [one.rank for one in picture.processes("rank", "rank 3")] == [3]
    for text in ("rank 1", "trainer 1", "r 1"):
        assert [one.rank for one in picture.processes("rank", text)] == [1], "and not 10 and 11"
    assert {row.nodes for row in picture.rows(99, "rank", "rank 3")} == {("node4",)}, "the nodes of these ranks"
    assert picture.processes("rank", "nothing") == [] and picture.rows(9, "rank", "nothing") == []


# -- pages


@pytest.mark.parametrize("width", [20, 60, 80, 200])
@pytest.mark.parametrize("height", [2, 3, 5, 10, 24, 60])
@pytest.mark.parametrize("nodes", [0, 1, 3, 64, 400])
def test_a_page_is_as_big_as_the_window(width: int, height: int, nodes: int) -> None:
    page = page_of(shared_cluster(nodes, loads=(0, 40, 99)), width, height)
    assert len(page.lines) == height
    lines = draw(page, width).plain.split("\n")
    assert len(lines) == height and max(map(len, lines)) <= width


def test_a_page() -> None:
    picture = cluster(2, 2, loads=(90, 10))
    reserved = {"job": "20260102-030405-abcd", "user": "ann"}
    picture.feed(
        1,
        "node2",
        sample(2.0, [card(0, 10, held=reserved), card(1, 0, ecc_uncorrected=3)], rank(1, line="step 5")),
        2.0,
    )
    shown = texts(page_of(picture, now=2.0))
    assert shown[0].startswith("2 nodes, 4 devices 48 % busy, 1 job, by rank")
    assert shown[1].split() == ["NODES", "DEVICE", "UTIL", "MEMORY", "TEMP", "USED", "BY"]
    assert shown[2].split()[:3] == ["node1", "0", "H100"] and "  90 % " in shown[2] and "45.0/80 GiB" in shown[2]
    assert shown[4].rstrip().endswith("ann 20260102-030405-abcd") and shown[5].endswith("ECC  ")
    assert shown[7].split() == "RANK NODE STATE CPU MEMORY STEPS/S LOSS TREND NO OUTPUT BEAT LAST LINE".split()
    assert shown[8].split()[:5] == [">", "trainer", "0", "node1", "running"]
    assert shown[-1] == "q quit  s sort  / filter  up/down choose  enter log  t stacks  x stop"


def test_trends_of_speed_and_loss() -> None:
    picture = cluster(1)
    for t in range(1, 11):
        loss = "nan" if t == 10 else f"{10.0 - t}"
        picture.feed(0, "node1", sample(float(t), [], rank(0, line=f"step={t * t} loss={loss}")), float(t))
    head, row = [line for line in texts(page_of(picture, 160, now=10.0)) if "LAST LINE" in line or "step=100" in line]
    at = {name: head.index(name) for name in ("SPEED", "LOSS", "TREND")}
    assert row[at["SPEED"] :].startswith("▄▄▅▅▆▇▇█ "), row
    assert row[at["LOSS"] :].startswith("nan ")
    assert row[at["TREND"] :].startswith("█▇▆▅▃▂▁ "), row


def test_the_last_line_has_room_on_a_narrow_terminal() -> None:
    shown = texts(page_of(cluster(2), 80))
    head = next(line for line in shown if "LAST LINE" in line)
    assert head.index("LAST LINE") <= 80 - 28 and "STEPS/S" in head and "BEAT" not in head


def test_the_chosen_rank_is_always_on_the_page() -> None:
    picture = cluster(64)
    for at in (0, 5, 40, 63, 1000, -3):
        view = View(at=at)
        shown = [line for line in texts(screen().page(picture, view, 100, 24, {}, 1.0)) if line.startswith("> ")]
        assert view.at == max(0, min(at, 63)) and shown[0].split()[2] == str(view.at)


def test_nodes_that_do_not_answer_are_folded() -> None:
    picture = cluster(4)
    failed = {"node5": "no route to host", "node6": "no route to host"}
    shown = texts(screen().page(picture, View(), 100, 24, failed, 1.0))
    assert shown[1] == "node[5-6]: no route to host"
    assert "silent: node[1-4]" in texts(screen().page(picture, View(), 100, 24, {}, 60.0))[0]


def test_what_a_program_prints_is_masked_and_steers_nothing() -> None:
    picture = TopModel()
    picture.feed(0, "a", sample(1.0, [], rank(0, line="key s3cr3t \x1b[2J\x07 end")), 1.0)
    shown = "\n".join(texts(screen(("s3cr3t",)).page(picture, View(), 200, 24, {}, 1.0)))
    assert "s3cr3t" not in shown and "key ***" in shown and "\x1b" not in shown and "\\x1b[2J" in shown
    log = screen(("s3cr3t",)).log_page(
        View(log=TopRank("j", 0, "a", "trainer", 0)), "one s3cr3t\n\x1b]0;x\x07two\n", 10
    )
    assert texts(log)[1:3] == ["one ***", "\\x1b]0;x\\x07two"] and len(log.lines) == 10


def test_stacks_are_shown_from_their_first_line() -> None:
    view = View(log=TopRank("j", 0, "a", "trainer", 0), stacks=True)
    page = screen().log_page(view, "\n".join(f"frame {number}" for number in range(99)), 10)
    assert texts(page)[:3] == ["trainer 0 on a, job j: stacks", "frame 0", "frame 1"] and len(page.lines) == 10


def test_a_terminal_without_blocks_gets_plain_bars() -> None:
    terminal = Terminal(out=io.TextIOWrapper(io.BytesIO(), "ascii"), environ={})
    page = Screen(terminal, mask(())).page(cluster(1, 2), View(), 120, 20, {}, 1.0)
    assert all(line.isascii() for line in texts(page)) and "######......" in texts(page)[2]


def test_plain() -> None:
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    Screen(Terminal(out=out, environ={}), mask(())).plain(cluster(2, 1), View(), {"node3": "down"}, 1.0)
    out.seek(0)
    lines = out.read().splitlines()
    assert lines[1] == "node3: down" and lines[2].split()[:3] == ["nodes", "device", "util"]
    assert lines[3].split() == ["node1", "0", "H100", "50", "%", "25.0/80", "GiB", "50", "C", "-", "-"]
    assert lines[6].split()[:5] == ["20260102-030405-abcd", "trainer", "0", "node1", "running"] and lines[-1] == ""


def test_row_of_nothing() -> None:
    assert Row((), "", (), 0, 0, None, "", (), ()).load is None


# -- elastic jobs


def epoch(number: int, *nodes: str, coordinates: bool = False, **more: Any) -> dict[str, Any]:
    known = {"standby": [], "began": 0.0, "left": [], "joined": [], "cause": "", **more}
    return {"epoch": number, "minimum": 2, "maximum": 4, "nodes": list(nodes), "coordinates": coordinates, **known}


def in_epoch(
    t: float, membership: dict[str, Any], places: list[list[object]], *ranks: dict[str, Any]
) -> dict[str, Any]:
    """places: of the ranks of the epoch, packed."""
    given = sample(t, [])
    job = {"job": "20260102-030405-abcd", "node": 0, "heartbeat": 0.3, "command": "", "ranks": list(ranks)}
    plan = {"nodes": ["a", "b", "c"], "places": places}
    return {**given, "jobs": [{**job, "membership": membership, "plan": plan}]}


def test_the_ranks_of_the_newest_epoch_are_shown() -> None:
    """Node b is lost. Node c, which had rank 2, has rank 1 then; the sample of b is older."""
    picture, first, second = TopModel(), [["trainer", 0, 0, 1, 3]], [["trainer", 0, 0, 1, 1], ["trainer", 1, 2, 1, 1]]
    for number, name in enumerate("abc"):
        picture.feed(number, name, in_epoch(1.0, epoch(0, *"abc"), first, rank(number)), 1.0)
    picture.feed(2, "c", in_epoch(2.0, epoch(1, *"ac"), second, rank(1)), 2.0)
    picture.feed(1, "b", in_epoch(2.0, epoch(0, *"abc"), first, rank(1, state="stopped")), 2.0)
    picture.feed(0, "a", in_epoch(2.0, epoch(1, *"ac"), second, rank(0)), 2.0)
    for away in ((), ("b",)):
        found = [(one.rank, one.node, one.state) for one in picture.processes("rank", "", away)]
        assert found == [(0, "a", "running"), (1, "c", "running")], away


def test_the_membership_is_that_of_the_coordinator_of_the_newest_epoch() -> None:
    picture, none = TopModel(), [["trainer", 0, 0, 1, 3]]
    change = {"left": [("b", "lost")], "joined": ["d"], "cause": "node b is lost: no heartbeat for 3 s", "began": 5.0}
    known = epoch(2, *"acd", coordinates=True, standby=["e", "f"], **change)
    picture.feed(0, "a", in_epoch(1.0, known, none), 1.0)
    picture.feed(1, "b", in_epoch(1.0, epoch(1, *"abc", coordinates=True), none), 1.0)
    picture.feed(2, "c", in_epoch(1.0, epoch(2), none), 1.0)
    shown = texts(page_of(picture))[1]
    assert shown.startswith("job 20260102-030405-abcd: epoch 2, 3 of 2:4 nodes, on standby: e,f, since ")
    assert shown.endswith(": b left (lost), d joined: node b is lost: no heartbeat for 3 s")
    out = io.TextIOWrapper(io.BytesIO(), "utf-8")
    Screen(Terminal(out=out, environ={}), mask(())).plain(picture, View(), {}, 1.0)
    out.seek(0)
    assert shown in out.read().splitlines()
    (answer,) = screen().as_dict(picture, {}, 1.0)["memberships"]  # type: ignore[misc]
    assert answer == {"job": "20260102-030405-abcd", **known, "left": [["b", "lost"]]}
    (other,) = screen().as_dict(picture, {"a": "no answer"}, 1.0)["memberships"]  # type: ignore[misc]
    assert (other["epoch"], other["nodes"], other["coordinates"]) == (2, list("abc"), False), "those of the plan"


def test_a_job_that_is_not_elastic_has_no_membership() -> None:
    assert cluster(2).memberships() == {} and screen().as_dict(cluster(2), {}, 1.0)["memberships"] == []
