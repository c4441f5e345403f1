"""Laptops that go away, nodes that crash, cables that are cut: the job does what the contract says, and nothing is left."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from pathlib import Path

import pytest

from tests.cli import SOON, until

SLACK = 25.0

# Numbered lines, ten a second, until ~/go is there.
COUNTS = """
    import os, time
    from pathlib import Path
    go, number = Path.home() / "go", 0
    while not go.exists():
        print("line", number, flush=True)
        number += 1
        time.sleep(0.1)
    print("the end after", number, flush=True)
"""


def counting(site, *args, **options):
    site.workspace(train_py=COUNTS)
    running = site.start("run", "-w", "job", *args, **options)
    running.says("line 2$")
    return running


def go(site):
    for node in range(site.count):
        (site.home(node) / "go").touch()


def whole(text: str) -> bool:
    """Every line once and in order, from 0 to the end."""
    lines = re.findall(r"\] (line \d+|the end after \d+)$", text, re.M)
    total = int(lines[-1].split()[-1])
    return lines == [*(f"line {n}" for n in range(total)), f"the end after {total}"]


def test_a_run_that_was_suspended_calls_no_node_silent(site):
    """Ctrl+Z and fg, for longer than the loss timeout: what the nodes have sent meanwhile is still to be read."""
    pair = site(2)
    pair.conf(LOSS_TIMEOUT=3)
    running = counting(pair, "--all-ranks")
    running.signal(signal.SIGSTOP)
    time.sleep(4.0)  # not a wait: how long it is suspended
    running.signal(signal.SIGCONT)
    running.says("line 50$")
    go(pair)
    done = running.wait().ends(0)
    assert "connection lost" not in done.err


def test_terminals_that_are_closed_and_a_laptop_that_dies_end_nothing(site):
    """A run and an attach are detached, the next attach is killed with its laptop, and the job goes on to its end."""
    pair = site(2)
    running = counting(pair)
    running.signal(signal.SIGHUP)
    done = running.wait()
    assert "the job goes on: inv attach --job" in done.err
    attached = pair.start("attach", terminal=True)
    attached.says("line 4$")
    os.close(attached._streams.pop("out"))  # the window is closed
    attached.wait()
    attached = pair.start("attach")
    attached.says("line 6$")
    attached.signal(signal.SIGKILL)
    attached.wait()
    until(lambda: not [p for node in (0, 1) for p in pair.processes(node) if p.name == "ct-agent"])
    assert pair.inv("status", "--json").ends(0).json["state"] == "running"
    go(pair)
    pair.gone()
    status = pair.inv("status", "--json").ends(0).json
    assert (status["state"], status["outcome"]["code"]) == ("succeeded", 0)
    out = pair.inv("logs", "--all-ranks").ends(0).out
    for rank in (0, 1):
        assert whole("\n".join(line for line in out.splitlines() if line.startswith(f"[trainer {rank} ")))


STEPS = """
    import time
    for number in range(10**6):
        print("step", number, flush=True)
        time.sleep(0.1)
"""


def test_a_node_that_crashes(site):
    pair = site(2)
    pair.conf(LOSS_TIMEOUT=2, CONNECT_TIMEOUT=4)
    pair.workspace(train_py=STEPS)
    running = pair.start("run", "-w", "job")
    running.says("step 60$")  # a supervisor reports the steps of its ranks every few seconds
    at = time.monotonic()
    pair.lab.crash(1)
    done = running.wait().ends(75)
    assert time.monotonic() - at < 2 + 3 + SLACK
    rest = f"trainer 1 on node1 may still run: inv stop --job {done.job}"
    assert done.last == f"clustertool: exit 75 (tool): node node1 is lost; {rest}"
    assert done.err.count("node1 is lost: ") == 1, "the cause is printed once"
    assert "fix: " in done.err
    pair.gone()
    away = pair.inv("status", "--json").ends(69).json
    assert (away["state"], away["outcome"]["code"]) == ("lost", 75)
    assert [p["state"] for p in away["processes"]] == ["stopped", "lost"]
    assert away["processes"][1]["step"] >= 1, "what the coordinator knew of it"
    logs = pair.inv("logs", "--rank", 1).ends(69)
    assert re.search(r"no log of trainer 1 \(lost, last step \d+, last output \d+.* ago\): .*node1 port 22", logs.err)
    assert re.search(r"when node1 answers again: ~/clustertool/JOB\S+/log/workerlog.1 on node1", logs.err)
    every = pair.inv("logs", "--all-ranks", "--tail", 1).ends(69)
    assert len(every.lines("[trainer")) == 1 and "no log of trainer 1" in every.err
    assert "node1" in pair.inv("stop").ends(69).err
    pair.lab.start(1)  # it comes back: its rank is on its disk as one that runs
    back = pair.inv("status", "--json").ends(0).json["processes"][1]
    assert (back["state"], back["since"]) == ("lost", away["processes"][1]["since"])
    assert back["output"] < back["since"] and back["step"] >= away["processes"][1]["step"]
    assert "[trainer 1 node1] step" in pair.inv("logs", "--rank", 1).ends(0).out


def test_the_coordinators_node_crashes(site):
    pair = site(2)
    pair.conf(LOSS_TIMEOUT=2)
    running = counting(pair, "--rank", 1)
    at, at_clock = time.monotonic(), time.time()
    pair.lab.crash(0)
    done = running.wait().ends(75)
    assert time.monotonic() - at < 2 + 3 + SLACK
    assert "node0" in done.last
    pair.gone(2 + SLACK)
    pair.lab.start(0)
    assert not pair.living()
    # what node0 recorded before is read again, and it is reported as it was
    status = pair.inv("status", "--json").ends(0).json
    assert (status["state"], status["outcome"]["code"]) == ("lost", 75)
    assert [p["state"] for p in status["processes"]] == ["lost", "stopped"]
    assert status["processes"][0]["since"] < at_clock + 1, "since its last sign"


def test_a_connection_that_breaks_or_is_silent_for_a_while_is_resumed_where_it_was(site):
    """Its agent is killed, twice; then the cable is cut for less than the loss timeout."""
    pair = site(2)
    pair.conf(LOSS_TIMEOUT=12)
    running = counting(pair, "--rank", 1)
    for times in (1, 2):
        (agent,) = [p.pid for p in pair.processes(1) if p.name == "ct-agent"]
        os.kill(agent, signal.SIGKILL)
        before = running.out.count("line")
        until(lambda: running.out.count("line") > before + 5)  # noqa: B023 - it is over when the loop goes on
        assert running.err.count("node1: connection lost") == times
    pair.lab.cut(1)
    before = running.out.count("line")
    at = time.monotonic()
    until(lambda: time.monotonic() - at > 2.5)
    assert running.process.poll() is None
    pair.lab.heal(1)
    until(lambda: running.out.count("line") > before + 25)
    go(pair)
    assert whole(running.wait().ends(0).out)


@pytest.mark.chaos
def test_a_connection_that_wakes_up_again_doubles_nothing(site):
    """It was silent for so long that a new one was opened; then the old one says all it had kept."""
    pair = site(2)
    pair.conf(LOSS_TIMEOUT=3)
    running = counting(pair, "--rank", 1)
    (agent,) = [p.pid for p in pair.processes(1) if p.name == "ct-agent"]
    session = int(Path(f"/proc/{agent}/stat").read_text().rpartition(")")[2].split()[1])
    os.kill(session, signal.SIGSTOP)
    running.says("node1: connection lost .silent for 3 s")
    before = running.out.count("line")
    until(lambda: running.out.count("line") > before + 10)
    os.kill(session, signal.SIGCONT)
    until(lambda: running.out.count("line") > before + 25)
    go(pair)
    assert whole(running.wait().ends(0).out)
    assert running.err.count("connection lost") == 1


def test_logs_that_are_followed_are_resumed_too(site):
    pair = site(2)
    running = counting(pair)
    old = {p.pid for p in pair.processes(1) if p.name == "ct-agent"}
    lines, raw = pair.start("logs", "-f", "-r", 1), pair.start("logs", "-f", "-r", 1, "--raw")
    for follow in (lines, raw):
        follow.says("line 5$")
    for pid in [p.pid for p in pair.processes(1) if p.name == "ct-agent" and p.pid not in old]:
        os.kill(pid, signal.SIGKILL)
    for follow in (lines, raw):
        before = follow.out.count("line")
        until(lambda: follow.out.count("line") > before + 5)  # noqa: B023 - it is over when the loop goes on
    go(pair)
    assert whole(lines.wait().ends(0).out)
    assert whole(re.sub("^", "] ", raw.wait().ends(0).out, flags=re.M))
    running.wait().ends(0)


def test_a_connection_that_breaks_while_it_stops(site):
    """The stop reaches the node by its coordinator, and the end is reported."""
    pair = site(2)
    running = counting(pair)
    (agent,) = [p.pid for p in pair.processes(1) if p.name == "ct-agent"]
    os.kill(agent, signal.SIGKILL)
    running.signal(signal.SIGINT)
    done = running.wait().ends(130)
    assert "node[0-1]: clean" in done.err
    pair.gone(SOON)


@pytest.mark.chaos
def test_a_node_that_hangs_while_it_stops(site):
    """It is distinguished from those that are clean, and nothing waits for it longer than for a lost one."""
    three = site(3)
    three.conf(LOSS_TIMEOUT=2)
    running = counting(three)
    three.lab.freeze(2)
    at = running.signal(signal.SIGINT)
    done = running.wait().ends(130)
    assert time.monotonic() - at < 2 + 5 + SLACK
    assert "node[0-1]: clean" in done.err
    assert re.search("^node2: did not answer", done.err, re.M)
    three.lab.thaw(2)
    three.gone(2 + SLACK)


def test_a_cable_that_stays_cut(site):
    """Both sides end their part: the coordinator gives the node up, and the node gives the coordinator up.

    The status of the job does not wait for a node that it has lost.
    """
    pair = site(2, acquainted=True)
    pair.conf(LOSS_TIMEOUT=2, CONNECT_TIMEOUT=100)
    running = counting(pair)
    pair.lab.cut(1)
    at = time.monotonic()
    done = running.wait().ends(75)
    assert time.monotonic() - at < 2 + 3 + SLACK
    assert "node1" in done.last
    pair.gone(2 + SLACK)
    status = pair.inv("status", "--json").ends(69)
    assert status.seconds < 50
    assert [(node["name"], node["state"]) for node in status.json["nodes"]][1] == ("node1", "lost")
    assert "node1: still logging in" in status.err
    pair.lab.heal(1)
    assert pair.inv("status", "--json").ends(0).json["state"] == "lost"
    assert pair.inv("stop").ends(0)


def lines_of(command) -> list[str]:
    """The whole lines that it has printed on stdout so far."""
    return command.out.split("\n")[:-1]


def test_what_other_nodes_answer_is_shown_while_one_logs_in(site):
    pair = site(2, acquainted=True)  # so that a cut node is silent: no address is missing
    pair.conf(LOSS_TIMEOUT=100, CONNECT_TIMEOUT=100)  # on a busy machine it is cut for longer than by default
    running = counting(pair)
    ranks = r"^trainer +(\d) +node\d +\S+ +(running|unknown)"
    again = 90.0  # seconds: a connection is tried again 1, 3, 7, 15, 31 and 63 s after the first time
    pair.lab.cut(1)
    status = pair.start("status")
    status.says("^node1: still logging in")
    until(lambda: re.findall(ranks, status.out, re.M) == [("0", "running"), ("1", "unknown")])
    pair.lab.heal(1)
    second = re.findall(ranks, status.wait().ends(0).out, re.M)[2:]
    assert second == [("0", "running"), ("1", "running")]
    pair.lab.cut(1)
    jobs = pair.start("jobs")
    follow = pair.start("logs", "--all-ranks", "--follow", "--json")
    jobs.says("^node1: still logging in")
    until(lambda: " running " in jobs.out)
    follow.says("^node1: still logging in")
    until(lambda: {json.loads(line)["rank"] for line in lines_of(follow)} == {0})
    pair.lab.heal(1)
    jobs.wait().ends(0)
    until(lambda: {json.loads(line)["rank"] for line in lines_of(follow)} == {0, 1}, again)
    follow.signal(signal.SIGINT)
    follow.wait()
    pair.lab.cut(1)
    one = pair.inv("logs", "-r", "0", "--tail", "1").ends(0)
    assert "still logging in" not in one.err, "it waits only for the nodes of these ranks"
    logs = pair.start("logs", "--all-ranks", "--tail", "1")
    logs.says("^node1: still logging in")
    until(lambda: [line.split()[1] for line in lines_of(logs)] == ["0"])
    pair.lab.heal(1)
    assert sorted(line.split()[1] for line in logs.wait().ends(0).out.splitlines()) == ["0", "1"]
    go(pair)
    assert running.wait().code == 0


@pytest.mark.chaos
def test_a_stop_shows_the_clean_nodes_while_the_coordinator_waits_for_a_lost_one(site):
    three = site(3, acquainted=True)
    three.conf(LOSS_TIMEOUT=100)
    running = counting(three)
    three.lab.cut(2)
    stop = three.start("stop", "--grace", "1")
    stop.says("node1: clean$")
    assert "node2: " not in stop.out
    assert stop.process.poll() is None
    three.lab.heal(2)
    assert len(re.findall("node1: clean", stop.wait().out)) == 1
    running.wait()
    three.inv("stop")
    three.gone()


def test_a_node_that_crashes_while_the_workspace_is_sent(site):
    pair = site(2)
    pair.conf(LOSS_TIMEOUT=2, CONNECT_TIMEOUT=2)
    (pair.workspace(train_py=COUNTS) / "big").write_bytes(os.urandom(60 << 20))
    pair.lab.shape("uplink", "20mbit")
    running = pair.start("run", "-w", "job")
    until(lambda: list(pair.root(1).glob(".clustertool/pieces/*")))
    pair.lab.crash(1)
    running.signal(signal.SIGINT)  # a silent node is given up later; nothing has to wait for it
    at = time.monotonic()
    running.wait().ends(130)
    assert time.monotonic() - at < 2 + SLACK
    assert not pair.jobs(0)
