"""Promises of time on many nodes. They hold on a quiet machine, so they are asserted only by `make test-chaos`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

pytestmark = pytest.mark.chaos
NODES = int(os.environ.get("NODES", "400"))

FAIL = """
    import os, time
    while os.environ["RANK"] != "15" or not os.path.exists("/tmp/now"):
        time.sleep(0.01)
    print("exit at", time.time(), flush=True)
    raise SystemExit(7)
"""


def test_a_failure_on_16_nodes_is_at_the_prompt_in_2_seconds(site) -> None:
    many = site(16)
    running = many.start("run", "-w", many.workspace(train_py=FAIL), "--rank", 15)
    running.says("starting the trainers")
    time.sleep(1.0)
    (many.lab.tmp(15) / "now").touch()
    exited = float(running.says(r"exit at (\S+)"))
    running.wait().ends(7)
    assert time.time() - exited < 2.0


def test_64_nodes_of_obedient_ranks_stop_in_2_seconds(site) -> None:
    many = site(64)
    workspace = many.workspace(train_py="import time\nprint('here', flush=True)\ntime.sleep(1000)\n")
    running = many.start("run", "-w", workspace, timeout=120)
    running.says("here")
    time.sleep(2.0)
    asked = running.signal(signal.SIGINT)
    running.wait().ends(130)
    assert time.monotonic() - asked < 2.0
    many.gone(1.0)


def test_400_nodes_on_one_loaded_machine_lose_none(site) -> None:
    """All share two cores or so with programs that compute: everything is slow, and nothing is lost."""
    many = site(NODES, acquainted=True)
    many.conf(CONNECT_TIMEOUT=120, CHECKS_OFF=["mesh", "load"])
    workspace = many.workspace(train_py="import time\nprint('here', flush=True)\ntime.sleep(15)\n")
    burners = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(2 * (os.cpu_count() or 1))]
    try:
        done = many.start("run", "-w", workspace, timeout=600).wait(600)
    finally:
        for burner in burners:
            burner.kill()
            burner.wait()
    done.ends(0)
    assert "lost" not in done.err
    many.gone(60.0)
