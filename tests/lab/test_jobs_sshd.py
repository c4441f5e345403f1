"""A node whose sshd dies under a running job: the job does not need it, the laptop says what it lacks, and the end is right."""

from __future__ import annotations

import os
import re
import signal
import time

import pytest

from tests.cli import until
from tests.lab.lab import Node
from tests.lab.test_jobs_faults import COUNTS, go, whole


@pytest.fixture
def pair(site):
    """Two nodes, either of which may lose its sshd, and a job that counts; `pair.stream` is what `run` shows of both ranks."""
    two = site(2, nodes={0: Node(init=True), 1: Node(init=True)})
    two.conf(LOSS_TIMEOUT=3, CONNECT_TIMEOUT=2)
    two.workspace(train_py=COUNTS)
    two.stream = two.start("run", "-w", "job", "--all-ranks")
    for rank in (0, 1):
        two.stream.says(rf"^\[trainer {rank} node{rank}\] line 2$")
    return two


def lines(site, rank):
    """One rank's part of what `run` has shown."""
    return "".join(line + "\n" for line in site.stream.out.splitlines() if line.startswith(f"[trainer {rank} "))


def goes_on(site, rank, seconds=5.0):
    """For longer than the loss timeout, the other rank's lines come in and `run` is there."""
    before, at = lines(site, rank).count("line"), time.monotonic()
    until(lambda: time.monotonic() - at > seconds and lines(site, rank).count("line") > before + 20, 60)
    assert site.stream.process.poll() is None


EITHER = pytest.mark.parametrize("dead", [pytest.param(0, marks=pytest.mark.chaos), 1])  # node 0 coordinates


@EITHER
def test_it_comes_back(pair, dead):
    pair.lab.kill_sshd(dead)
    pair.stream.says(f"warning: node{dead}: connection lost .*, trying again")
    goes_on(pair, 1 - dead)
    known = pair.inv("status", "--json").ends(69)
    assert known.json["state"] == "running"
    assert f"node{dead}" in known.err
    before = lines(pair, dead).count("line")
    pair.lab.start_sshd(dead)
    until(lambda: lines(pair, dead).count("line") > before + 30)
    status = pair.inv("status", "--json").ends(0).json
    assert [process["state"] for process in status["processes"]] == ["running"] * 2
    assert all(node["heartbeat"] < 3 for node in status["nodes"])
    go(pair)
    pair.stream.wait().ends(0)
    for rank in (0, 1):
        assert whole(lines(pair, rank)), "no line is missing or there twice"
    assert pair.stream.err.count("connection lost") == 1
    pair.gone()


@EITHER
def test_it_stays_dead_to_the_end(pair, dead):
    """The verdict comes by the other node; what the dead one's ranks printed last is read when its sshd is back."""
    pair.lab.kill_sshd(dead)
    pair.stream.says(f"warning: node{dead}: connection lost .*, trying again")
    goes_on(pair, 1 - dead)
    go(pair)
    done = pair.stream.wait().ends(0)
    assert done.last == "clustertool: exit 0 (job): all trainers are done"
    assert whole(lines(pair, 1 - dead))
    assert f"warning: node{dead} did not come back" in done.err, done.err
    pair.gone()
    known = pair.inv("status", "--json").ends(69).json
    assert (known["state"], known["outcome"]["code"]) == ("succeeded", 0)
    pair.lab.start_sshd(dead)
    status = pair.inv("status", "--json").ends(0).json
    assert (status["state"], [process["code"] for process in status["processes"]]) == ("succeeded", [0, 0])
    for rank in (0, 1):
        assert whole(pair.inv("logs", "-r", rank).ends(0).out)


@EITHER
def test_a_rank_fails_meanwhile(pair, dead):
    """On the node that cannot be reached: everybody ends, and the culprit is known."""
    pair.lab.kill_sshd(dead)
    pair.stream.says(f"warning: node{dead}: connection lost")
    (rank,) = [process.pid for process in pair.processes(dead) if "train.py" in process.argv]
    os.kill(rank, signal.SIGSEGV)
    done = pair.stream.wait().ends(128 + 11)
    assert f"trainer {dead} on node{dead} ended with signal 11 (segmentation fault)" in done.err
    assert "Traceback" not in done.err
    pair.gone()
    pair.lab.start_sshd(dead)
    status = pair.inv("status", "--json").ends(0).json
    assert status["outcome"]["culprits"] == [["trainer", dead]]


@EITHER
def test_a_stop_reaches_it_by_the_coordinator(pair, dead):
    pair.lab.kill_sshd(dead)
    pair.stream.says(f"warning: node{dead}: connection lost")
    done = pair.inv("stop").ends(69)
    assert re.search(f"node{1 - dead}: clean", done.out), done.out
    assert f"node{dead}" in done.err
    pair.gone()
    assert pair.stream.wait().ends(143)
    pair.lab.start_sshd(dead)
    assert pair.inv("stop").ends(0)
    status = pair.inv("status", "--json").ends(0).json
    assert (status["state"], [node["state"] for node in status["nodes"]]) == ("stopped", ["ended"] * 2)


@pytest.mark.chaos  # test_jobs_faults.py has it with a connection that breaks
@pytest.mark.parametrize("dead", [0, 1])
def test_ctrl_c_ends_it_too(pair, dead):
    pair.lab.kill_sshd(dead)
    pair.stream.says(f"warning: node{dead}: connection lost")
    at = pair.stream.signal()
    done = pair.stream.wait().ends(130)
    assert time.monotonic() - at < 20
    assert f"node{1 - dead}: clean" in done.err or "node[0-1]: clean" in done.err
    pair.gone()
