"""A job that cannot start says within seconds what it waits for, and names no node that is not at fault."""

from __future__ import annotations

import pytest

# What listens on the node cannot answer; what it opens itself has a higher port.
FIREWALL = ["ip", "rule", "add", "pref", "9", "ipproto", "tcp", "sport", "1024-32767", "blackhole"]


@pytest.mark.chaos
def test_a_firewall_on_the_first_node(site):
    four = site(4)
    four.conf(LOSS_TIMEOUT=3)
    assert four.lab.exec(0, FIREWALL).returncode == 0
    four.workspace(train_py="print('never')")
    running = four.start("run", "-w", "job", "--timeout", "15")
    away = r"node1, node2 and node3 cannot connect to the coordinator on node0 \(10\.77\.0\.1:\d+\): timed out \(ETIMEDOUT\)"
    running.says(f"warning: {away}; tried for [4-6] s")
    (wait,) = four.inv("status", "--json").ends(0).json["waits"]
    assert "cannot connect to the coordinator on node0 (10.77.0.1:" in wait
    done = running.wait().ends(124)
    assert (
        "(--timeout 15 s); it waited for a connection from node1, node2 and node3 to the coordinator on node0"
        in done.err
    )
    assert done.last == "clustertool: exit 124 (tool): the job exceeded its time limit (--timeout 15 s)"
    assert "fix: a firewall on node0 may block incoming connections, or " in done.err
    assert "is lost" not in done.err
    after = four.inv("status", "--json").ends(0).json
    assert after["advice"].startswith("a firewall on node0 may block") and "ETIMEDOUT" in after["waits"][0]
    first, *others = [process["state"] for process in after["processes"]]
    # The ranks of a node are lost until its supervisor has recorded its own end.
    assert first == "not started" and set(others) <= {"lost", "not started"}
    assert "fix: a firewall on node0 may block" in four.inv("status").ends(0).out
    four.gone(10.0)


def test_a_pserver_that_does_not_listen(site):
    pair = site(2)
    server = """
        import os, socket, time
        while not os.path.exists("/tmp/go"):
            time.sleep(0.05)
        server = socket.create_server((os.environ["POD_IP"], int(os.environ["PADDLE_PORT"])))
        time.sleep(600)
    """
    pair.workspace(train_py="print('served')", pserver_py=server)
    running = pair.start("run", "-w", "job", "--mode", "ps")
    (pair.lab.tmp(0) / "go").touch()
    wait = r"the trainers wait until a port is open: pserver 1 on node1 at 10\.77\.0\.2:\d+; 1\d s so far"
    running.says(f"warning: {wait}")
    assert "pserver 1 on node1 at 10.77.0.2:" in pair.inv("status").ends(0).out
    (pair.lab.tmp(1) / "go").touch()
    assert "served" in running.wait().ends(0).out
