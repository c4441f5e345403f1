"""A job that fails stops everywhere within seconds, and the message names the culprit, its node and its last lines."""

from __future__ import annotations

import json
import os
import re
import signal
import time

import pytest

from tests.cli import INV

SLACK = 20.0  # seconds that a loaded machine may add

WAITS = """
    import os, sys, time
    rank = os.environ["CLUSTERTOOL_RANK"]
    print("ready", rank, flush=True)
    if rank == os.environ["CULPRIT"]:
        print("the last words of", rank, "\\x1b[2J", flush=True)
        sys.exit(int(os.environ["CODE"]))
    time.sleep(600)
"""


def test_a_rank_that_exits_7_on_the_last_node(site):
    pair = site(2)
    pair.workspace(train_py=WAITS)
    done = pair.inv("run", "-w", "job", "--nproc-per-node", 2, "--env", "CULPRIT=3", "--env", "CODE=7").ends(7)
    lines = done.err.splitlines()
    assert (
        "ABORT!!! Out of all 4 trainers, the trainer process with rank=[3] was aborted. Please check its log." in lines
    )
    assert done.err.count("ABORT!!!") == 1
    assert done.err.count("trainer 3 on node1 ended with exit code 7") == 1, "the cause is printed once"
    cause = lines.index("warning: trainer 3 on node1 ended with exit code 7")
    assert cause < lines.index("ending the job on all nodes")
    assert lines.count("last lines of trainer 3 (node1, log/workerlog.3):") == 1
    assert "[trainer 3 node1] the last words of 3 \\x1b[2J" in lines, "control characters are spelled out"
    assert "stopped by clustertool because of it (victims): trainer 0-2" in lines
    assert done.last == "clustertool: exit 7 (job): trainer 3 on node1: exit code 7"
    pair.gone()
    status = pair.inv("status", "--json").ends(0).json
    exits = {p["rank"]: p for p in status["processes"]}
    assert (exits[3]["state"], exits[3]["code"]) == ("failed", 7)
    assert {p["state"] for rank, p in exits.items() if rank != 3} == {"stopped"}
    assert {p["signal"] for rank, p in exits.items() if rank != 3} == {int(signal.SIGTERM)}
    assert status["outcome"]["victims"] == [["trainer", rank] for rank in range(3)]
    assert pair.inv("jobs", "--json").ends(0).json["jobs"][0]["code"] == 7
    events = [
        line
        for node in range(2)
        for line in (pair.jobs(node)[0] / ".clustertool/events.jsonl").read_text().splitlines()
    ]
    times = [json.loads(line) for line in events]
    failed = next(event["t"] for event in times if event["type"] == "exited" and event["code"] == 7)
    assert max(event["t"] for event in times if event["type"] == "exited") - failed < 3 + SLACK


@pytest.mark.chaos  # test_jobs_sshd.py, test_mpi_failures.py and test_container_rootless.py have a rank that a signal ends
def test_a_rank_that_is_killed(site):
    pair = site(2)
    pair.workspace(train_py=WAITS)
    running = pair.start("run", "-w", "job", "--nproc-per-node", 2, "--all-ranks", "--env", "CULPRIT=none")
    for rank in range(4):
        running.says(f"ready {rank}$")
    two = [p.pid for p in pair.lab.processes(1) if p.environ.get("CLUSTERTOOL_RANK") == "2"]
    at = time.monotonic()
    os.kill(*two, signal.SIGKILL)
    done = running.wait().ends(137)
    assert time.monotonic() - at < 3 + SLACK
    assert "rank=[2] was aborted" in done.err
    assert done.err.count("trainer 2 on node1 ended with signal 9 (killed)") == 1
    assert done.last == "clustertool: exit 137 (job): trainer 2 on node1: killed (signal 9)"
    assert "(victims): trainer 0-1,3" in done.err


def test_a_pserver_that_fails(site):
    pair = site(2)
    pair.workspace(train_py=WAITS, pserver_py=WAITS)
    done = pair.inv("run", "-w", "job", "--mode", "ps", "--env", "CULPRIT=1", "--env", "CODE=3").ends(3)
    assert (
        "ABORT!!! Out of all 2 pservers, the pserver process with rank=[1] was aborted. Please check its log."
        in done.err
    )
    assert "the last words of 1" in done.err
    assert "(victims): pserver 0" in done.err


def test_a_pserver_that_exits_silently_before_it_listens(site):
    one = site(1)
    one.workspace(train_py=WAITS, pserver_py="")
    done = one.inv("run", "-w", "job", "--mode", "ps").ends(1)
    assert "pserver 0 on node0 ended with exit code 0 before it listened on its port" in done.err


def test_commands_that_cannot_start(site):
    one = site(1)
    plain = one.workspace()
    (plain / "data").write_text("no program")
    done = one.inv("run", "-w", "job", "--script", "no-such-program --lr 1").ends(127)
    assert re.search("warning: trainer 0 on node0 .*no-such-program.*No such file", done.err)
    done = one.inv("run", "-w", "job", "--script", "./data").ends(126)
    assert re.search("warning: trainer 0 on node0 .*Permission denied", done.err)
    assert one.inv("logs").ends(0).lines() == [
        "[trainer 0 node0] clustertool: cannot start './data': Permission denied"
    ]


def test_all_ranks_at_once_and_none_hides_another(site):
    pair = site(2)
    pair.workspace(train_py="import os, sys; sys.exit(20 + int(os.environ['RANK']))")
    done = pair.inv("run", "-w", "job", "--on-failure", "continue", "--json")
    assert done.code in (20, 21)
    assert "rank=[0,1] was aborted" in done.err
    assert "victims" not in done.err
    exit_ = done.json["exit"]
    assert (exit_["code"], exit_["source"]) == (done.code, "job")


FAILS_LATER = """
    import os, time
    print("ready", os.environ["RANK"], flush=True)
    while not os.path.exists(os.path.expanduser("~/go")):
        time.sleep(0.01)
    import broken
"""


def test_the_same_error_on_all_nodes_is_one_message(site):
    pair = site(2)
    # The failures come within half a second, also where each node starts its rank at another time.
    pair.workspace(train_py=FAILS_LATER, broken_py="print('no quote)")
    running = pair.start("run", "-w", "job", "--all-ranks")
    for rank in range(2):
        running.says(f"ready {rank}$")
    for node in range(2):
        (pair.home(node) / "go").touch()
    done = running.wait().ends(1)
    same = [line for line in done.err.splitlines() if "2 trainers failed with the same error, first trainer" in line]
    assert len(same) == 2 and same[1] == done.last, "the warning, and the line with the exit code"
    assert "rank=[0,1] was aborted" in done.err
    assert "victims" not in done.err
    assert done.err.count("last lines of trainer") == 1


def test_a_job_whose_time_is_over(site):
    pair = site(2)
    pair.workspace(train_py=WAITS)
    done = pair.inv("run", "-w", "job", "--timeout", 1, "--env", "CULPRIT=none").ends(124)
    assert "--timeout 1" in done.last
    pair.gone()


HEAD = '"$0" "$@" | head -1'
COUNTS = """
    import itertools, time
    for number in itertools.count():
        print(number, flush=True)
        time.sleep(0.2)
"""


def test_a_reader_that_leaves_does_not_end_the_job(site):
    """`inv run | head -1`"""
    one = site(1)
    one.workspace(train_py=COUNTS)
    done = one.start("run", "-w", "job", program=["sh", "-c", HEAD, *INV]).wait().ends(0)
    assert re.search(r"the job goes on: inv attach --job \S+", done.err)
    assert one.inv("status", "--json").ends(0).json["state"] == "running"
    assert "clean" in one.inv("stop").ends(0).out


RESTARTS = """
    import os, sys
    attempt = os.environ["CLUSTERTOOL_ATTEMPT"]
    print("attempt", attempt, flush=True)
    sys.exit(9 if attempt != "2" and os.environ["RANK"] == "1" else 0)
"""


def test_restarts(site):
    pair = site(2)
    pair.workspace(train_py=RESTARTS)
    done = pair.inv("run", "-w", "job", "--max-restarts", 3, "--all-ranks", "--rank", 1).ends(0)
    assert {f"[trainer 1 node1] attempt {k}" for k in range(3)} <= set(done.lines())
    assert (pair.jobs(1)[0] / "log/attempt2/workerlog.1").read_text() == "attempt 2\n"
    assert pair.inv("logs", "-r", 1, "--attempt", 1).ends(0).lines() == ["[trainer 1 node1] attempt 1"]
    assert pair.inv("logs", "-r", 1, "--raw").ends(0).out == "attempt 2\n", "one log, the newest"
    done = pair.inv("run", "-w", "job", "--max-restarts", 1).ends(9)
    assert "rank=[1] was aborted" in done.err
    reported = [line for line in done.err.splitlines() if "attempt 1" in line]
    assert reported[:2] == ["warning: attempt 1 begins in 1 s", "starting the trainers (attempt 1)"], reported
