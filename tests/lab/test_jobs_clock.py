"""Nodes whose clock is off by an hour: no node is lost by it, and what concerns time is reported in the laptop's."""

from __future__ import annotations

import re
import sys
import time
from datetime import datetime

import pytest

from tests.cli import until
from tests.lab.lab import Node, compiler

HOUR = 3600
TICKS = """
    import os, time
    from pathlib import Path
    print("ready", flush=True)
    while not (Path.home() / "go").exists():
        print("tick", time.time(), flush=True)
        time.sleep(0.1)
"""
CLOCK = 'import os, time; os.utime("."); print(int(time.time()), int(os.stat(".").st_mtime))'


@pytest.fixture
def skewed(site):
    """skewed({1: 3600}) -> two nodes, the clocks of some wrong by so many seconds."""
    if not compiler():
        pytest.skip("a wrong clock needs a C compiler")

    def make(**offsets):
        pair = site(2, nodes={int(name[1:]): Node(clock=offset) for name, offset in offsets.items()})
        pair.conf(LOSS_TIMEOUT=3)
        command = f"{sys.executable} -c '{CLOCK}'"
        found = pair.inv("exec", "--command", command, "--json").ends(0).json["nodes"]
        for name, offset in offsets.items():
            now, stamp = map(int, found[f"node{name[1:]}"]["stdout"].split())
            assert abs(now - time.time() - offset) < 600, "its clock is wrong indeed"
            assert abs(now - stamp) < 600, "and so are its files' times"
        pair.workspace(train_py=TICKS)
        return pair

    return make


def started(site, *args):
    running = site.start("run", "-w", "job", "--all-ranks", *args)
    for rank in range(2):
        running.says(rf"trainer {rank} node\d\] ready")
    return running


def go(site):
    for node in range(site.count):
        (site.home(node) / "go").touch()


@pytest.mark.parametrize("skews", [pytest.param({"n1": HOUR}, marks=pytest.mark.chaos), {"n0": HOUR, "n1": -HOUR}])
def test_a_job_runs_and_is_shown_in_the_laptops_time(skewed, skews):
    pair = skewed(**skews)
    done = pair.inv("check").ends(0)
    for name, offset in skews.items():
        output = int(re.search(rf"^node{name[1:]} .* warn ([+-]\d+) s", done.out, re.M).group(1))
        assert abs(output - offset) < 600
    running = started(pair)
    begun = time.time()
    until(lambda: time.time() - begun > 5)  # longer than the loss timeout
    assert running.process.poll() is None
    status = pair.inv("status", "--json").ends(0).json
    assert status["state"] == "running"
    for process in status["processes"]:
        assert abs(process["since"] - begun) < 600, process
        assert 0 <= process["cpu"] <= 200, process
    assert all(0 <= node["heartbeat"] < 5 for node in status["nodes"]), status["nodes"]
    assert " h " not in pair.inv("status").ends(0).out
    (job,) = pair.inv("jobs", "--json").ends(0).json["jobs"]
    assert abs(job["created"] - begun) < 600 and abs(job["started"] - begun) < 600
    go(pair)
    running.wait().ends(0)
    out = pair.inv("logs", "--all-ranks", "--since", "30m", "--timestamps").ends(0).out
    lines = out.splitlines()
    times = [datetime.fromisoformat(line.split(" ")[3]).timestamp() for line in lines]
    assert len(times) > 60 and all(abs(t - begun) < 600 for t in times)
    assert len(pair.inv("logs", "--rank", "all", "--since", "1s").ends(0).lines()) < len(lines)
    # several ranks merged by time: what was printed earlier comes earlier
    found = re.findall(r"^\[trainer (\d) .*tick ([\d.]+)$", out, re.M)
    ticks = [float(tick) - skews.get(f"n{rank}", 0) for rank, tick in found]
    assert len(ticks) > 60
    late = max(early - tick for early, tick in zip(ticks, ticks[1:]))
    assert late < 2, f"a line came {late} s too late"
    # jobs go by age, and this one is young
    assert pair.inv("clean", "--older-than", "30m", "--json").ends(0).json["removed"] == []
    assert pair.jobs(0) and pair.jobs(1)


@pytest.mark.parametrize(
    ("skews", "lost"), [({"n0": -HOUR}, 1), pytest.param({"n1": HOUR}, 0, marks=pytest.mark.chaos)]
)
def test_a_lost_node_is_noticed_as_ever(skewed, skews, lost):
    pair = skewed(**skews)
    running = started(pair)
    at = time.monotonic()
    pair.lab.crash(lost)
    done = running.wait().ends(75)
    assert time.monotonic() - at < 3 + 30
    assert f"node{lost}" in done.last
    pair.gone()


@pytest.mark.chaos
def test_a_restart_and_a_timeout_take_as_long_as_ever(skewed):
    pair = skewed(n0=HOUR, n1=-HOUR)
    pair.workspace(
        train_py="""
        import os, time
        if os.environ["CLUSTERTOOL_ATTEMPT"] == "0":
            raise SystemExit(3 if os.environ["RANK"] == "1" else time.sleep(600))
        time.sleep(600)
    """
    )
    at = time.monotonic()
    done = pair.inv("run", "-w", "job", "--max-restarts", 1, "--timeout", 8).ends(124)
    assert "attempt 1 begins in 1 s" in done.err
    assert 8 < time.monotonic() - at < 600
