"""Folded names read back as the same names; tables show what nodes sent and obey none of it."""

from __future__ import annotations

import fcntl
import io
import itertools
import random
import re
import struct
import termios

import pytest

from clustertool.model.config.folded_names import fold, gather
from clustertool.model.config.hosts import expand
from clustertool.show.plan_view import plan_tables
from clustertool.show.status_view import check_matrix, duration, jobs_table, status_tables
from clustertool.show.table import Cell, table
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


def ran(rank: int, node: int, state: str, **more: object) -> dict[str, object]:
    """A process of `inv status --json`."""
    nothing = dict.fromkeys(("code", "cpu", "memory", "epoch", "step"))
    zero = dict.fromkeys(("pid", "signal", "attempt", "since", "output"), 0)
    return {"role": "trainer", "rank": rank, "node": node, "state": state, "note": "", **nothing, **zero, **more}


def on_node(index: int, state: str, **more: object) -> dict[str, object]:
    """A node of `inv status --json`."""
    rest = {"supervisor": 0, "heartbeat": None, "survivors": [], "why": "", "skew": 0.0, "unconnected": False}
    return {"index": index, "name": f"node{index + 1}", "state": state, **rest, **more}


def test_status_tells_the_outcome_first_then_states_and_ends() -> None:
    terminal, out = plainly()
    status_tables(
        {
            "job": "J",
            "mode": "ps",
            "state": "failed",
            "owner": "ann",
            "command": "",
            "created": 800.0,
            "started": 900.0,
            "ended": 999.0,
            "processes": [
                ran(0, 0, "running", pid=7, since=925.0, cpu=99.4, memory=1.5e9, step=54.0, output=976.0),
                ran(1, 1, "failed", pid=8, since=998.0, code=137, signal=9, attempt=1),
                ran(2, 1, "done", code=0, epoch=2.5, output=990.0),
                ran(3, 1, "lost", since=996.0),
            ],
            "nodes": [
                on_node(0, "running", supervisor=5, heartbeat=0.3, unconnected=True, skew=3.0),
                on_node(1, "lost", survivors=["8 python3"]),
            ],
            "waits": ["trainer 3 waits"],
            "advice": "start it",
            "reason": "",
            "outcome": {"state": "failed", "code": 137, "source": "job", "reason": "trainer 1: killed"},
        },
        terminal,
        1000.0,
    )
    shown = [re.split(r" {2,}", line) for line in out.getvalue().splitlines()]
    assert shown[:4] == [
        ["job J: failed (exit 137, job): trainer 1: killed"],
        ["", "trainer 3 waits"],
        ["", "fix: start it"],
        ["ranks:", "1 running, 1 failed, 1 done, 1 lost"],
    ]
    assert shown[4] == ["progress: step 54"]
    assert shown[5][0].startswith("started:") and shown[6:9] == [
        ["duration: 1 min 39 s"],
        ["user:", "ann"],
        ["mode:", "ps"],
    ]
    assert shown[9] == [""]
    assert ["trainer", "0", "node1", "7", "running", "1 min 15 s", "-", "99 %", "1.5 GB", "54", "24 s"] in shown
    failed = ["trainer", "1", "node2", "8", "failed (attempt 1)", "2.0 s", "signal 9 (killed)", "-", "-", "-", "-"]
    assert failed in shown
    assert ["trainer", "2", "node2", "-", "done", "-", "0", "-", "-", "epoch 2.5", "-"] in shown
    assert ["trainer", "3", "node2", "-", "lost", "4.0 s", "-", "-", "-", "unknown", "unknown"] in shown
    assert ["node1", "running", "5", "0.3 s ago", "no connection to the coordinator; clock +3 s"] in shown
    assert shown[-1] == ["node2", "lost", "-", "-", "still alive: 8 python3"]


def about(state: str, **more: object) -> dict[str, object]:
    """A job without processes, as `inv status --json` has it."""
    nothing = {"waits": [], "advice": "", "outcome": None, "reason": "", "processes": [], "nodes": []}
    return {"job": "J", "mode": "", "owner": "", "command": "", **times(state), **nothing, **more}


def times(
    state: str, created: float = 50.0, started: float | None = None, ended: float | None = None
) -> dict[str, object]:
    return {"state": state, "created": created, "started": started, "ended": ended}


@pytest.mark.parametrize(
    ("job", "lasted"),
    [
        (times("running", started=60.0), "40 s"),
        (times("starting", started=99.0), "1.0 s"),
        (times("starting"), ""),  # no supervisor has started
        (times("failed", started=60.0, ended=70.5), "10 s"),
        (times("lost", started=60.0), ""),  # no node has recorded the end
        (times("unknown", started=60.0), ""),
        (times("running", started=101.0), "0.00 s"),  # by a clock that is ahead
    ],
)
def test_a_duration_is_shown_where_start_and_end_are_known(job: dict[str, object], lasted: str) -> None:
    assert duration(job, 100.0) == lasted


def test_an_outcome_of_a_job_that_still_has_processes() -> None:
    terminal, out = plainly()
    outcome = {"state": "succeeded", "code": 0, "source": "job", "reason": ""}
    status_tables(about("running", outcome=outcome), terminal, 100.0)
    assert out.getvalue().splitlines()[0] == "job J: running, its outcome: succeeded (exit 0, job)"


def test_the_progress_is_the_range_of_steps() -> None:
    terminal, out = plainly()
    processes = [ran(rank, 0, "running", step=float(step)) for rank, step in enumerate((12, 15, 13))]
    status_tables(about("running", processes=processes, nodes=[on_node(0, "running")]), terminal, 100.0)
    assert "progress: step 12 to 15" in out.getvalue().splitlines()


def listed(**more: object) -> dict[str, object]:
    """A job of `inv jobs --json`."""
    rest = {"id": "J", "owner": "ann", "total": 2, "code": 0, "command": "python3 a.py"}
    return {**rest, **times("succeeded", started=60.0, ended=75.0), **more}


def test_jobs_are_rows() -> None:
    terminal, out = plainly()
    jobs_table([listed(created=None, started=None)], terminal, 100.0)
    row = ["J", "succeeded", "ann", "-", "-", "2", "0", "python3 a.py"]
    assert re.split(" {2,}", out.getvalue().splitlines()[1]) == row


def test_names_of_jobs_are_a_column_where_a_job_has_one() -> None:
    terminal, out = plainly()
    jobs_table([listed(name="bert"), listed(name="")], terminal, 100.0)
    assert [re.split(" {2,}", line)[:3] for line in out.getvalue().splitlines()] == [
        ["id", "name", "state"],
        ["J", "bert", "succeeded"],
        ["J", "-", "succeeded"],
    ]
    terminal, out = plainly()
    jobs_table([listed(name="J")], terminal, 100.0)
    assert "name" not in out.getvalue()
    status_tables({**about("running"), "name": "bert"}, terminal, 100.0)
    assert "name:     bert" in out.getvalue().splitlines()


def test_numbers_are_at_the_right_and_addresses_are_no_numbers() -> None:
    with far_end() as (out, data):
        shown = Terminal(out, io.StringIO(), {"TERM": "xterm", "NO_COLOR": "1"})
        table("", ("a", "b", "c"), [("10.0.0.1", "1,234.5", "2 s"), ("10.0.0.10", "7", "10 s")], terminal=shown)
    assert [line.rstrip() for line in data.decode().splitlines()][2:] == [
        "10.0.0.1   1,234.5   2 s",
        "10.0.0.10        7  10 s",
    ]


def jobs_drawn(width: int) -> list[list[str]]:
    """The table of one job on a terminal of that width."""
    job = listed(id="20260102-030405-abcd", command="python3 -u train.py --lr 0.1 --epochs 20")
    with far_end() as (out, data):
        fcntl.ioctl(out, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
        jobs_table([job], Terminal(out, io.StringIO(), {"TERM": "xterm", "NO_COLOR": "1"}), 100.0)
    lines = data.decode().splitlines()
    assert all(len(line) <= width for line in lines) and len(lines) == 3, "a cell goes on in a further line"
    return [re.split(" {2,}", line.strip()) for line in (lines[0], lines[2])]


def test_a_narrow_terminal_cuts_the_command_then_leaves_out_columns() -> None:
    names, row = jobs_drawn(140)
    assert names == ["id", "state", "user", "started", "duration", "nodes", "exit", "command"]
    assert row[-1] == "python3 -u train.py --lr 0.1 --epochs 20"
    names, row = jobs_drawn(100)
    assert names[-1] == "command" and row[-1].endswith("…") and row[-1].startswith("python3 -u")
    names, row = jobs_drawn(84)
    assert names == ["id", "state", "user", "started", "duration", "nodes", "exit"]
    names, row = jobs_drawn(60)
    assert names == ["id", "state", "user", "duration", "exit"] and row[0] == "20260102-030405-abcd"


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
