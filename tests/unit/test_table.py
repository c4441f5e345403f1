"""Folded names read back as the same names; tables show what nodes said and obey none of it."""

from __future__ import annotations

import io
import itertools
import random
import re

import pytest

from clustertool.model.config.hosts import expand
from clustertool.show.plan_view import plan_tables
from clustertool.show.status_view import check_matrix, jobs_table, status_tables
from clustertool.show.table import Cell, fold, gather, table
from clustertool.show.terminal import Terminal
from tests.unit.terminals import far_end


def unfold(text: str) -> list[str]:
    """The names of a folded list, by the parser of HOSTS."""
    parts = re.findall(r"(?:\[[^\]]*\]|[^,\[])+", text)
    return [name for part in parts for name in expand(part)]


def plainly() -> tuple[Terminal, io.StringIO]:
    out = io.StringIO()
    return Terminal(out, io.StringIO(), {}), out


def drawn(title: str, columns: list[str], rows: list[list[object]], encoding: str = "utf-8", **environ: str) -> str:
    """What a terminal of 80 columns is sent."""
    with far_end(encoding) as (out, data):
        table(title, columns, rows, terminal=Terminal(out, io.StringIO(), {"TERM": "xterm", **environ}))
    return data.decode(encoding)


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        ([], ""),
        (["node1"], "node1"),
        (["node1", "node1"], "node1"),
        (["node1", "node2", "node3", "node7"], "node[1-3,7]"),
        (["node3", "node1", "node2"], "node[1-3]"),
        ([f"10.0.0.{i}" for i in range(1, 17)], "10.0.0.[1-16]"),
        (["n08", "n09", "n10", "n9"], "n[08-10,9]"),
        (["n99", "n100"], "n[99-100]"),
        (["login", "node1", "gpu2", "node2"], "login,node[1-2],gpu2"),
        ([f"r{r}n{n}" for r in (1, 2) for n in range(4)], "r[1-2]n[0-3]"),
        (["r1n1", "r1n2", "r2n1"], "r1n[1-2],r2n1"),
        (["127.0.0.1:2201", "127.0.0.1:2202"], "127.0.0.1:[2201-2202]"),
        (["fe80::1", "fe80::2"], "fe80::[1-2]"),
        (["a[1-2]", "a3"], "a[1-2],a3"),
    ],
)
def test_fold(names: list[str], folded: str) -> None:
    assert fold(names) == folded


@pytest.mark.parametrize("size", range(1, 6))
def test_every_small_set_of_names_unfolds_to_itself(size: int) -> None:
    pool = ["n0", "n1", "n2", "n10", "n00", "n01", "n02", "n09", "n9", "x1-1", "x1-2", "x2-1", "x2-2", "m"]
    for names in itertools.combinations(pool, size):
        assert sorted(unfold(fold(names))) == sorted(names), fold(names)


@pytest.mark.parametrize("seed", range(30))
def test_random_names_unfold_to_themselves(seed: int) -> None:
    chance = random.Random(seed)
    form = chance.choice(["n{:02}", "10.0.{1}.{0}", "rack{1}-node{0:03}", "n{0}.x{0}"])
    names = [form.format(chance.randint(0, 120), chance.randint(0, 3)) for _ in range(chance.randint(1, 150))]
    assert sorted(unfold(fold(names))) == sorted(set(names))


def test_gather_shows_the_biggest_group_first() -> None:
    outputs = {"node1": b"a", "node2": b"b", "node3": b"b", "node4": b"c"}
    assert gather(outputs) == [("node[2-3]", b"b"), ("node1", b"a"), ("node4", b"c")]
    assert gather({"node1": "text"}) == [("node1", "text")]
    assert gather({}) == []


def test_a_plain_table_is_aligned_and_has_no_empty_cells() -> None:
    terminal, out = plainly()
    table("a title", ["name", "n"], [["漢", 1], [None, Cell("22", "red")], ["long name", ""]], terminal=terminal)
    assert out.getvalue() == "a title\nname       n\n漢         1\n-          22\nlong name  -\n"


def test_a_table_on_a_terminal_is_drawn() -> None:
    shown = drawn("a title", ["name", "n"], [["x", Cell("bad", "red")]])
    assert "─" in shown
    assert "\x1b[31mbad\x1b[0m" in shown


def test_a_drawn_table_without_colours_has_no_escape_sequence_at_all() -> None:
    shown = drawn("a title", ["name"], [[Cell("bad", "red")]], NO_COLOR="1")
    assert "─" in shown
    assert "\x1b" not in shown


def test_a_terminal_without_unicode_gets_ascii() -> None:
    assert drawn("title", ["name"], [["é"]], encoding="ascii").isascii()


@pytest.mark.parametrize(
    "hostile", ["[bold]x[/bold]", "[/]", "[link=http://x]y", ":smile:", "\x1b[2Jx", "a\nb", "\\[x]"]
)
def test_what_a_node_says_is_neither_markup_nor_control(hostile: str) -> None:
    visible = hostile.replace("\x1b", "\\x1b").replace("\n", "\\n")
    terminal, out = plainly()
    table(hostile, ["c"], [[hostile]], terminal=terminal)
    assert out.getvalue().splitlines() == [visible, "c", visible]
    shown = drawn(hostile, ["c"], [[hostile]], NO_COLOR="1")
    assert shown.count(visible) == 2
    assert "\x1b" not in shown


def test_a_narrow_terminal_loses_no_text() -> None:
    long = "".join(chr(ord("A") + at % 26) for at in range(300))
    shown = drawn("", ["name", "text"], [["x", long]], NO_COLOR="1")
    assert "".join(re.findall(r"[A-Z]+", shown)) == long
    assert max(map(len, shown.splitlines())) <= 80


def test_a_title_may_be_wider_than_its_table() -> None:
    assert drawn("a title " * 6, ["n"], [["x"]], NO_COLOR="1").startswith("a title " * 6)


def test_narrow_columns_stay_whole_and_empty_ones_go_when_there_is_no_room() -> None:
    rows: list[list[object]] = [["10.0.0.1:20000", "", "word " * 30]] * 2
    shown = drawn("", ["endpoint", "devices", "command"], rows, NO_COLOR="1")
    assert shown.count("10.0.0.1:20000") == 2
    assert "devices" not in shown
    assert "devices" in drawn("", ["endpoint", "devices"], [["x", ""]], NO_COLOR="1")


def process(role: str, rank: int, **env: str) -> dict[str, object]:
    return {
        "role": role,
        "rank": rank,
        "local_rank": 0,
        "endpoint": f"10.0.0.{rank + 1}:20000",
        "devices": [0, 1],
        "shards": ["a-0", "a-1"],
        "command": ["python3", "train.py", "a b"],
        "log": f"log/workerlog.{rank}",
        "env": env,
    }


def test_a_plan_shows_a_table_a_node_and_what_environments_share() -> None:
    terminal, out = plainly()
    nodes = [
        {
            "node": i,
            "name": f"node{i}",
            "address": f"10.0.0.{i}",
            "dir": "/d",
            "processes": [process("trainer", i, RANK=str(i), X="1")],
        }
        for i in range(2)
    ]
    plan_tables({"job": "J", "mode": "collective", "phases": ["trainer"], "nodes": nodes}, terminal)
    assert [" ".join(line.split()) for line in out.getvalue().splitlines() if line] == [
        "job J, mode collective, phases: trainer",
        "node 0: node0 (10.0.0.0), /d",
        "role rank local endpoint devices shards log command",
        "trainer 0 0 10.0.0.1:20000 0,1 a-[0-1] log/workerlog.0 python3 train.py 'a b'",
        "node 1: node1 (10.0.0.1), /d",
        "role rank local endpoint devices shards log command",
        "trainer 1 0 10.0.0.2:20000 0,1 a-[0-1] log/workerlog.1 python3 train.py 'a b'",
        "environment of all 2 processes",
        "name value",
        "X 1",
        "environment of each",
        "process name value",
        "trainer 0 RANK 0",
        "trainer 1 RANK 1",
    ]


def test_a_plan_of_no_process_is_shown_too() -> None:
    terminal, out = plainly()
    plan_tables({"job": "J", "mode": "collective", "nodes": []}, terminal)
    assert out.getvalue() == "job J, mode collective, phases: \n"


def test_status_tells_states_ends_and_the_outcome() -> None:
    terminal, out = plainly()
    status_tables(
        {
            "job": "J",
            "mode": "ps",
            "state": "failed",
            "now": 1000.0,
            "processes": [
                {
                    "role": "trainer",
                    "rank": 0,
                    "node": 0,
                    "pid": 7,
                    "state": "running",
                    "since": 925.0,
                    "cpu": 99.4,
                    "memory": 1.5e9,
                    "step": 54.0,
                    "output": 976.0,
                },
                {
                    "role": "trainer",
                    "rank": 1,
                    "node": 1,
                    "pid": 8,
                    "state": "failed",
                    "since": 998.0,
                    "code": 137,
                    "signal": 9,
                },
                {"role": "trainer", "rank": 2, "node": 1, "state": "done", "code": 0, "epoch": 2.5, "output": 990.0},
                {"role": "trainer", "rank": 3, "node": 1, "state": "lost", "since": 996.0},
            ],
            "nodes": [
                {"index": 0, "name": "node1", "state": "running", "supervisor": 5, "heartbeat": 0.3},
                {"index": 1, "name": "node2", "state": "lost", "survivors": ["8 python3"]},
            ],
            "outcome": {"state": "failed", "code": 137, "source": "job", "reason": "trainer 1: killed"},
        },
        terminal,
    )
    shown = [re.split(r" {2,}", line) for line in out.getvalue().splitlines()]
    assert ["trainer", "0", "node1", "7", "running", "1 min 15 s", "-", "99 %", "1.5 GB", "54", "24 s"] in shown
    assert ["trainer", "1", "node2", "8", "failed", "2.0 s", "signal 9 (killed)", "-", "-", "-", "-"] in shown
    assert ["trainer", "2", "node2", "-", "done", "-", "0", "-", "-", "epoch 2.5", "-"] in shown
    assert ["trainer", "3", "node2", "-", "lost", "4.0 s", "-", "-", "-", "unknown", "unknown"] in shown
    assert ["node1", "running", "5", "0.3 s ago", "-"] in shown
    assert ["node2", "lost", "-", "-", "still alive: 8 python3"] in shown
    assert shown[-1] == ["failed (exit 137, job): trainer 1: killed"]


def test_a_status_of_which_nothing_is_known_is_shown_too() -> None:
    terminal, out = plainly()
    status_tables({}, terminal)
    jobs_table([{}], terminal)
    assert "unknown" in out.getvalue()


def test_jobs_are_rows() -> None:
    terminal, out = plainly()
    jobs_table(
        [{"id": "J", "state": "succeeded", "nodes": ["n1", "n2"], "exit": 0, "command": "python3 a.py"}], terminal
    )
    assert re.split(" {2,}", out.getvalue().splitlines()[1]) == ["J", "succeeded", "-", "n[1-2]", "0", "python3 a.py"]


def test_a_check_folds_equal_nodes_and_tells_a_fix_once() -> None:
    terminal, out = plainly()
    good = {"level": "ok", "text": "ok"}
    bad = {"level": "bad", "text": "refused", "fix": "start sshd"}
    rows = [{"node": f"node{i}", "findings": {"ping": good, "ssh": bad if i in (2, 3) else good}} for i in range(1, 6)]
    check_matrix([*rows, {"node": "login", "findings": {"disk": {"level": "warn", "text": "low"}}}], terminal)
    assert [re.split(" {2,}", line) for line in out.getvalue().splitlines()] == [
        ["node", "ping", "ssh", "disk"],
        ["node[1,4-5]", "ok", "ok", "-"],
        ["node[2-3]", "ok", "FAIL refused", "-"],
        ["login", "-", "-", "warn low"],
        [""],
        ["fix ssh on node[2-3]: start sshd"],
    ]
