"""A disk that fills up under a running job: the job's fate is reported truthfully, and nothing waits for the disk."""

from __future__ import annotations

import time

import pytest

from tests.cli import until
from tests.lab.lab import Node

# One rank fills the disk to the last byte and says so in its home, which is on another one. Then it fails, or counts.
FILLS = """
    import itertools, os, time
    from pathlib import Path
    print("started", flush=True)
    home = Path.home()
    if os.environ["RANK"] == os.environ["FILLER"]:
        while not (home / "fill").exists():
            time.sleep(0.05)
        with open("output/model", "wb", buffering=0) as file:
            for size in (1 << 16, 1 << 8, 1):
                try:
                    while file.write(b"x" * size):
                        pass
                except OSError:
                    pass
        (home / "full").touch()
        if os.environ["FAIL"]:
            raise OSError("no room for the model")
    for number in itertools.count():
        try:
            print("line", number, flush=True)
            if (home / "go").exists():
                print("the end", flush=True)
                break
        except OSError:
            pass
        time.sleep(0.1)
"""


def filling(site, filler, fail="", nproc=1):
    """A job of two nodes, rank `filler` on node1 or node0 has a disk of 4 MB and fills it."""
    node = filler // nproc
    pair = site(2, nodes={node: Node(disk="4m")})
    pair.conf(LOSS_TIMEOUT=4, GRACE=2)
    pair.workspace(train_py=FILLS)
    args = ["--env", f"FILLER={filler}", "--env", f"FAIL={fail}", "--all-ranks", "--nproc-per-node", nproc]
    running = pair.start("run", "-w", "job", *args)
    for rank in range(2 * nproc):
        running.says(rf"trainer {rank} node\d\] started")
    (pair.home(node) / "fill").touch()
    until((pair.home(node) / "full").exists)
    running.says(f"warning: node{node}: the disk of \\S+ is full: what is printed now is lost")
    return pair, running


@pytest.mark.parametrize("filler", [pytest.param(0, marks=pytest.mark.chaos), 1])
def test_the_job_goes_on_and_ends_when_there_is_room_again(site, filler):
    """For longer than the loss timeout nothing can be written there; heartbeats do not care."""
    pair, running = filling(site, filler)
    other = 1 - filler
    before = running.out.count(f"[trainer {other} ")
    at = time.monotonic()
    until(lambda: time.monotonic() - at > 6 and running.out.count(f"[trainer {other} ") > before + 40, 60)
    status = pair.inv("status", "--json").ends(0).json
    assert status["state"] == "running"
    assert [process["state"] for process in status["processes"]] == ["running"] * 2
    assert all(node["heartbeat"] < 4 for node in status["nodes"]), status["nodes"]
    assert "is full" in status["nodes"][filler]["why"]
    assert "is full" in pair.inv("status").ends(0).out
    pair.inv("logs", "-r", filler).ends(0)
    pair.lab.exec(filler, ["sh", "-c", "rm clustertool/JOB*/output/model"])
    running.says(f"warning: node{filler}: the disk of \\S+ has room again")
    for node in (0, 1):
        (pair.home(node) / "go").touch()
    done = running.wait().ends(0)
    assert done.out.count("the end") == 2
    assert pair.inv("status", "--json").ends(0).json["state"] == "succeeded"


@pytest.mark.parametrize("filler", [0, pytest.param(1, marks=pytest.mark.chaos)])
def test_a_stop_works_and_is_recorded(site, filler):
    pair, running = filling(site, filler)
    done = pair.inv("stop").ends(0)
    assert "node[0-1]: clean" in done.out
    running.wait().ends(143)
    assert not pair.living()
    status = pair.inv("status", "--json").ends(0).json
    assert (status["state"], status["outcome"]["reason"]) == ("stopped", "inv stop")
    assert [(p["state"], p["signal"]) for p in status["processes"]] == [("stopped", 15)] * 2
    assert [node["state"] for node in status["nodes"]] == ["ended"] * 2
    pair.inv("clean", "--job", status["job"]).ends(0)


@pytest.mark.parametrize("filler", [pytest.param(0, marks=pytest.mark.chaos), 12])
def test_each_failure_of_it_is_reported(site, filler):
    """Twelve ranks a node: the last words are more than the last block of the events file would hold."""
    pair, running = filling(site, filler, fail="yes", nproc=12)
    node = filler // 12
    done = running.wait().ends(1)
    assert f"trainer {filler} on node{node} ended with exit code 1: the disk of " in done.err
    pair.gone()
    status = pair.inv("status", "--json").ends(0).json
    assert (status["state"], status["outcome"]["culprits"]) == ("failed", [["trainer", filler]])
    assert [n["state"] for n in status["nodes"]] == ["ended"] * 2
    states = {process["rank"]: process["state"] for process in status["processes"]}
    assert states == {rank: "failed" if rank == filler else "stopped" for rank in range(24)}
    (job,) = pair.inv("jobs", "--json").ends(0).json["jobs"]
    assert (job["state"], job["code"]) == ("failed", 1)
