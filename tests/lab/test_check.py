"""`inv check` on nodes with everything wrong that a lab can make: each thing named, with the fix, in one run."""

from __future__ import annotations

import os
import statistics

import pytest

from tests.cli import until
from tests.lab.lab import Node, compiler
from tests.node.harness import read

HOLD = "import socket, time; s = socket.create_server(('', 7777)); print('on', flush=True); time.sleep(600)"
PORT, CUT, CLOCK, NAME, DISK, RSYNC, OLD, SSHD, MTU = 1, 2, 4, 5, 6, 7, 8, 9, 10
SPECIAL = {
    NAME: Node(hosts=(f"127.0.1.1 node{NAME}",)),
    DISK: Node(disk="4m"),
    RSYNC: Node(hide=("rsync",)),
    SSHD: Node(init=True),
    **({CLOCK: Node(clock=300)} if compiler() else {}),
}


@pytest.fixture
def sick(site):
    """12 nodes, nine of them each with something wrong, node2 and node3 cut from each other."""
    many = site(12, nodes=SPECIAL)
    lab = many.lab
    for node in range(12):
        python = many.home(node) / "python"
        if node == OLD:
            python.write_text("#!/bin/sh\nexec python3 - <<'EOF'\nprint('old 3.6.9')\nEOF\n")
            python.chmod(0o755)
        else:
            python.symlink_to(lab.python)
    lab.exec(PORT, ["sh", "-c", f'setsid python3 -c "{HOLD}" greedy >/tmp/out 2>&1 &'])
    until(lambda: read(str(lab.tmp(PORT) / "out")) == b"on\n")
    assert lab.exec(CUT, ["ip", "route", "add", "blackhole", lab.address(CUT + 1)]).returncode == 0
    lab.exec(DISK, ["sh", "-c", "cat /dev/zero > ~/clustertool/full 2>/dev/null"])
    assert lab.exec(MTU, ["ip", "link", "set", "eth0", "mtu", "1400"]).returncode == 0
    lab.kill_sshd(SSHD)
    many.conf(PYTHON="~/python", START_PORT=7777, CHECKS_OFF=["load"], DISPATCH="rsync")
    yield many
    for process in lab.processes(PORT):
        if "greedy" in process.argv:
            os.kill(process.pid, 9)


def test_everything_that_is_wrong_is_named_with_the_fix_in_one_run(sick):
    done = sick.inv("check").ends(69)
    rows = {line.split()[0]: line for line in done.lines("node") if not line.startswith("node ")}
    wrong = {
        PORT: "FAIL 7777 (START_PORT) is in use by python3 (pid ",
        CUT: "FAIL node2 -> node3: no route, node3 -> node2: no answer",
        NAME: f"warn node{NAME} is 127.0.1.1",
        DISK: "FAIL 0 B free, 1.0 MB needed below",
        RSYNC: "FAIL no rsync",
        OLD: "FAIL ~/python is Python 3.6.9, too old",
        SSHD: "FAIL node9 port 22 refuses connections",
        MTU: "warn 1400, others 1500",
    }
    if compiler():
        wrong[CLOCK] = "warn +300 s"
    for node, text in wrong.items():
        assert text in rows[f"node{node}"], (node, done.out)
        assert ("FAIL" in rows[f"node{node}"]) == text.startswith("FAIL")
    (good,) = (row for name, row in rows.items() if name.startswith("node[0,3"))
    assert "FAIL" not in good and "warn" not in good
    assert "user root" in rows["node1"]
    fixes = [
        "fix ports on node1: end that program",
        "fix mesh on node2: ",
        "fix host on node5: in its /etc/hosts, write 10.77.0.6",
        "fix disk on node6: make room",
        "fix rsync on node7: install",
        "fix ssh on node9: start sshd",
        "fix mtu on node10: ip link set eth0 mtu 1500",
        "fix python on node8: install Python 3.8",
    ]
    for fix in fixes:
        assert done.lines(fix), (fix, done.out)
    assert not any("[" in line and "mesh" in line for line in done.lines("fix")), "the pair is told once"
    assert "Traceback" not in done.err
    assert all("greedy" in process.argv for process in sick.living())
    done = sick.inv("check", "--json").ends(69)
    by_node = {row["node"]: row["findings"] for row in done.json["nodes"]}
    assert by_node["node7"]["rsync"] == {
        "level": "bad",
        "text": "no rsync",
        "fix": "install the package rsync on the node",
    }
    links = {(link["from"], link["to"]): link for link in done.json["mesh"]["links"]}
    assert len(links) == 10 * 9  # all that have an agent
    broken = {pair: link["answer"] for pair, link in links.items() if link["answer"] != "ok"}
    assert broken == {("node2", "node3"): "no route", ("node3", "node2"): "no answer"}
    assert all(0 < link["seconds"] < 1.5 for pair, link in links.items() if pair not in broken)
    assert done.json["exit"]["code"] == 69


@pytest.mark.chaos
def test_a_run_goes_on_without_them(sick):
    """What --skip-bad leaves out is reported with its reason; a check of what is left finds no error."""
    sick.workspace(train_py="import os\nprint('here', os.environ['WORLD_SIZE'])\n")
    done = sick.inv("run", "-w", "job", "--skip-bad", "--skip", f"node{PORT}").ends(0)
    assert "[trainer 0 node0] here 7" in done.out
    for node in (DISK, RSYNC, OLD, SSHD):
        assert f"node{node} is left out: " in done.err
    left = sick.inv("check", "--skip", "node[1-2,6-9]").ends(0)
    assert "all 6 nodes are ready" in left.err


def test_one_direction_through_a_firewall_is_reported_as_such(site):
    """One node accepts no new connections: no node reaches it, it reaches all."""
    three = site(3)
    # what listens there cannot answer; what it opens itself has a higher port
    rule = ["ip", "rule", "add", "pref", "9", "ipproto", "tcp", "sport", "1024-32767", "blackhole"]
    assert three.lab.exec(2, rule).returncode == 0
    done = three.inv("check").ends(69)
    assert "FAIL node2 -> node[0-1]: ok, node[0-1] -> node2: no answer (firewall?)" in done.out


def test_bandwidth_of_each_link(site):
    three = site(3)
    three.lab.shape(2, "50mbit")
    done = three.inv("check", "--bandwidth", "--json").ends(0)
    speeds = {(link["from"], link["to"]): 8 * link["bytes_per_second"] for link in done.json["mesh"]["links"]}
    assert len(speeds) == 6
    assert all(speed < 120e6 for pair, speed in speeds.items() if "node2" in pair)
    assert all(speed > 200e6 for pair, speed in speeds.items() if "node2" not in pair)


@pytest.mark.chaos
def test_16_nodes_are_checked_in_3_seconds(sick):
    seconds = statistics.median(sick.inv("check").ends(69).seconds for _ in range(3))
    print(f"\ncheck of 16 nodes, nine of them sick: {seconds:.2f} s")
    assert seconds < 3.0


@pytest.mark.chaos
def test_64_nodes_are_checked_in_3_times_what_a_command_takes(site):
    many = site(64, acquainted=True)
    many.conf(PYTHON=None)  # as on machines that have no set-up
    many.inv("check").ends(0)  # the tool's code is there from now on
    pairs = [
        (many.inv("exec", "--command", "true").ends(0).seconds, many.inv("check").ends(0).seconds) for _ in range(5)
    ]
    command, check = (statistics.median(column) for column in zip(*pairs))
    print(f"\n64 nodes: exec {command:.2f} s, check {check:.2f} s ({check / command:.2f} x)")
    assert check < 3 * command
