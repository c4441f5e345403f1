"""The Python API in a program on the laptop of a lab: a node is lost, and later does not answer."""

from __future__ import annotations

import sys

import pytest

from tests.cli import until

PROGRAM = """
import time
from clustertool.api import Cluster, ClustertoolError, NodeLost, Unreachable

job = Cluster.from_conf().run("job")
lines = job.logs("all", follow=True)
print("line:", next(lines), flush=True)
try:
    job.wait()
except NodeLost as error:
    print("lost:", error.node, error.code, error.what, error.fix != "", flush=True)
print("rest:", sum(1 for _ in lines) >= 0)
status = job.status()
print("state:", status.state, sorted(status.unreachable), [(one.host, str(one.state)) for one in status.ranks])
began = time.monotonic()
try:
    print(job.stop())
except Unreachable as error:
    print("stop:", error.node, error.what)
try:
    list(job.logs(rank=1))
except Unreachable as error:
    print("log:", error.node, "workerlog.1" in error.fix)
"""


@pytest.mark.chaos
def test_a_lost_node_is_an_exception_that_names_it(site):
    pair = site(2)
    pair.conf(LOSS_TIMEOUT=3, CONNECT_TIMEOUT=3)
    pair.workspace(train_py="import time\nprint('here', flush=True)\ntime.sleep(100)\n")
    program = pair.start("-c", PROGRAM, program=[sys.executable])
    program.says("line: here")
    until(lambda: len(pair.living()) >= 6, 30.0, lambda: "both ranks")
    pair.lab.crash(1)
    done = program.wait(90).ends(0)
    assert done.err == ""
    lost, state, stop, log = (done.lines(name)[0] for name in ("lost:", "state:", "stop:", "log:"))
    assert lost.startswith("lost: node1 75 ") and "node1" in lost and lost.endswith("True")
    assert state.startswith("state: lost ['node1'] [('node0', 'stopped'), ('node1', 'lost')]")
    assert stop.startswith("stop: node1 ") and log == "log: node1 True"
    pair.gone()
