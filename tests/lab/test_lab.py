"""The lab keeps what it promises: nodes are machines of their own, faults are real, and nothing is left."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.lab.lab import HOME, LAPTOP, REPO, Lab, Node, Process

PING = ["ping", "-c1", "-W1", "-q"]


@pytest.fixture(scope="module")
def trio(module_lab) -> Lab:
    return module_lab(3, mutual_ssh=True)


def until(true, seconds: float = 30.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it does not come true"
        time.sleep(0.01)


def say(lab: Lab, i: int, script: str) -> str:
    """What a shell on node i says; without ssh, whose clients are slow."""
    done = lab.exec(i, ["sh", "-c", script])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def log_in(lab: Lab, i: int, script: str) -> str:
    """The same over ssh from the laptop, which knows every node's key."""
    done = lab.run(["ssh", "-o", "BatchMode=yes", "-o", "StrictHostKeyChecking=yes", lab.name(i), script])
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def sleeping(lab: Lab, i: int, seconds: str) -> list[int]:
    return [process.pid for process in lab.processes(i) if process.argv == ("sleep", seconds)]


def test_every_node_is_a_machine_of_its_own(trio):
    script = "hostname; cat /proc/sys/kernel/random/boot_id /etc/machine-id; echo $HOME; pwd; ls /sys/class/net | tr '\\n' ' '"
    output = [log_in(trio, i, script).splitlines() for i in range(3)]
    assert [lines[0] for lines in output] == ["node0", "node1", "node2"]
    assert len({lines[1] for lines in output}) == len({lines[2] for lines in output}) == 3
    assert [lines[3:] for lines in output] == [[str(HOME), str(HOME), "eth0 lo"]] * 3


def test_nodes_and_laptop_reach_each_other_by_name(trio):
    for i in range(3):
        assert trio.exec(i, [*PING, trio.name((i + 1) % 3)]).returncode == 0
        assert trio.exec(i, [*PING, LAPTOP]).returncode == 0
    assert log_in(trio, 0, "ssh -o BatchMode=yes node2 hostname") == "node2"
    assert trio.run(["ip", "-brief", "address", "show", "eth0"]).stdout.split()[2] == f"{LAPTOP}/16"


@pytest.mark.parametrize("place", ["$HOME", "/tmp", "/var/tmp", "/run", "/dev/shm"])
def test_nodes_share_no_place_where_files_are_left(trio, place):
    say(trio, 0, f"echo mine > {place}/file")
    assert say(trio, 1, f"ls {place}/file 2>/dev/null || echo none") == "none"


def test_what_runs_the_tests_runs_on_nodes_too(trio):
    script = f"{sys.executable} -c 'import sys, rich; print(sys.prefix)' && ls {REPO}/clustertool/errors.py"
    assert say(trio, 1, script).split() == [sys.prefix, f"{REPO}/clustertool/errors.py"]


def test_processes_are_seen_from_outside(trio):
    say(trio, 1, "MARK='a b' setsid sleep 1234 >/dev/null 2>&1 & echo")
    until(lambda: sleeping(trio, 1, "1234"))
    (pid,) = sleeping(trio, 1, "1234")
    (process,) = [process for process in trio.processes(1) if process.pid == pid]
    assert process.environ["MARK"] == "a b"
    assert process.environ["HOME"] == str(HOME)
    assert not sleeping(trio, 0, "1234")
    assert trio.exec(0, ["sh", "-c", "ps ax | grep -c '[s]leep 1234'"]).stdout.strip() == "0"
    os.kill(pid, signal.SIGKILL)
    until(lambda: not sleeping(trio, 1, "1234"))


FORK = """\
import gc, os, sys
spaces = [[os.readlink(f"/proc/{one}/ns/{kind}") for kind in sorted(os.listdir("/proc/1/ns"))] for one in ("1", "self")]
print(gc.get_freeze_count() > 0, spaces[0] == spaces[1], os.getpid() == os.getsid(0), sorted(os.listdir("/proc/self/fd")))
sys.stdout.flush()
sys.stdin.read()"""


def agents(lab: Lab, i: int) -> list[Process]:
    """Processes of the node with the command line of an agent, but for its shell."""
    return [process for process in lab.processes(i) if process.argv[:1] == (lab.python,)]


def test_an_agent_that_is_a_fork_is_a_process_of_its_node(lab):
    """It can be killed as a new process can, and the crash of the node ends it."""
    one = lab(1)
    if one.python == sys.executable or signal.getsignal(signal.SIGHUP) == signal.SIG_IGN:  # nohup make test
        pytest.skip("agents are new processes here")
    argv = [one.python, "-ESs", "-c", FORK, "clustertool-agent", "its", "arguments"]
    for crash in (False, True):
        with one.laptop(["ssh", "node0", shlex.join(argv)], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as client:
            shown = client.stdout.readline().decode()
            assert shown.startswith("True True True ['0', '1', '2', "), shown
            (agent,) = agents(one, 0)
            assert agent.argv == tuple(argv) and agent.environ["SSH_CONNECTION"].startswith(LAPTOP)
            if crash:
                one.crash(0)
                client.kill()
            else:
                os.kill(agent.pid, signal.SIGKILL)
                assert client.wait(30) == 255
                until(lambda: "clustertool-agent" not in say(one, 0, "ps ax"))
            assert not alive(agent.pid)


def test_a_cut_cable_and_a_healed_one(trio):
    say(trio, 2, "setsid sleep 2345 >/dev/null 2>&1 & echo")
    until(lambda: sleeping(trio, 2, "2345"))
    trio.cut(2)
    assert trio.exec(0, [*PING, "node2"]).returncode != 0
    assert trio.exec(0, [*PING, "node1"]).returncode == 0
    assert sleeping(trio, 2, "2345")
    trio.heal(2)
    until(lambda: trio.exec(0, [*PING, "node2"]).returncode == 0)
    os.kill(*sleeping(trio, 2, "2345"), signal.SIGKILL)


def test_one_direction_is_lost(trio):
    trio.drop([0], [1, "laptop"])
    before = echoes(trio, 0), echoes(trio, 1)
    assert trio.exec(1, [*PING, "node0"]).returncode != 0, "the answer is lost"
    assert trio.exec(0, [*PING, "node1"]).returncode != 0, "the question is lost"
    assert (echoes(trio, 0) - before[0], echoes(trio, 1) - before[1]) == (1, 0)
    assert trio.run([*PING, "node0"]).returncode != 0
    assert trio.exec(0, [*PING, "node2"]).returncode == 0
    trio.deliver([0], [1, "laptop"])
    for there in ("node1", "laptop"):
        until(lambda there=there: trio.exec(0, [*PING, there]).returncode == 0)


def echoes(lab: Lab, i: int) -> int:
    """How many requests of ping have come to node i."""
    names, values = (row.split() for row in say(lab, i, "grep ^Icmp: /proc/net/snmp").splitlines())
    return int(values[names.index("InEchos")])


def test_a_crash_is_silent_and_the_node_comes_back_another(lab):
    pair = lab(2)
    before = say(pair, 1, "echo kept > ~/file; echo lost > /run/file; cat /proc/sys/kernel/random/boot_id")
    with pair.laptop(["ssh", "node1", "echo here; sleep 3456"], stdout=subprocess.PIPE) as client:
        assert client.stdout.readline() == b"here\n"
        pair.crash(1)
        assert pair.processes(1) == []
        assert pair.exec(0, [*PING, "node1"]).returncode != 0
        assert client.poll() is None, "nobody told it"
        pair.start(1)
        assert say(pair, 1, "cat ~/file; ls /run/file 2>/dev/null || echo none").split() == ["kept", "none"]
        assert say(pair, 1, "cat /proc/sys/kernel/random/boot_id") != before
        client.kill()


def test_a_frozen_node_answers_pings_and_nothing_else(trio):
    trio.freeze(0)
    assert trio.exec(1, [*PING, "node0"]).returncode == 0
    assert trio.run(["ssh", "-o", "ConnectTimeout=1", "node0", "true"]).returncode == 255
    trio.thaw(0)
    assert log_in(trio, 0, "hostname") == "node0"


def test_a_shaped_cable_is_slow_in_both_directions(trio):
    def seconds(script: str) -> float:
        start = time.monotonic()
        assert trio.run(["sh", "-c", script]).returncode == 0
        return time.monotonic() - start

    both = "head -c 1000000 /dev/zero | ssh node1 'cat >/dev/null; head -c 1000000 /dev/zero' >/dev/null"
    for end in ("uplink", 1):
        trio.shape(end, "40mbit")  # 2 MB are 16 Mbit, 1 Mbit in each direction passes in the first burst
        assert seconds(both) > 14 / 40
        trio.shape(end, None)


def test_nodes_can_be_special(lab):
    special = lab(2, nodes={0: Node(hide=("rsync", "python3"), hosts=("127.0.1.1 node0",)), 1: Node(disk="2m")})
    gone = "command -v rsync || echo none; python3 2>/dev/null; echo $?; getent hosts node0"
    assert say(special, 0, gone).split()[:4] == ["none", "127", "127.0.1.1", "node0"]
    assert say(special, 1, "command -v rsync; getent hosts node0").split()[1:] == ["10.77.0.1", "node0"]
    assert "No space" in say(special, 1, "head -c 3000000 /dev/zero 2>&1 >~/clustertool/file; true")


def test_nodes_can_share_one_home(lab):
    pair = lab(2, shared_home=True)
    say(pair, 0, "echo ours > ~/file")
    assert say(pair, 1, "cat ~/file") == "ours"
    assert (pair.home(0) / "file").read_text() == "ours\n"
    say(pair, 0, "echo mine > /tmp/file")
    assert not (pair.tmp(1) / "file").exists()


def test_two_labs_know_nothing_of_each_other(lab):
    one, two = lab(1), lab(1)
    assert one.address(0) == two.address(0)
    say(one, 0, "touch /tmp/one")
    assert say(two, 0, "ls /tmp/one 2>/dev/null || echo none") == "none"


def test_the_text_of_a_conf_can_be_read(trio):
    from clustertool.model.config.cluster import read_cluster

    names: dict[str, object] = {}
    exec(trio.conf(LOSS_TIMEOUT=3, USER=None), names)
    cluster = read_cluster({key: value for key, value in names.items() if key.isupper()})
    assert [host.host for host in cluster.hosts] == ["node0", "node1", "node2"]
    assert (cluster.python, cluster.loss_timeout, cluster.user) == (trio.python, 3.0, "")


def test_the_laptop_has_a_home_and_the_tests_files(trio, tmp_path):
    script = "pwd; echo $HOME $GREETING; touch ~/file; ls ~/.ssh"
    done = trio.run(["sh", "-c", script], cwd=tmp_path, env={"GREETING": "hi there"})
    assert done.stdout.split() == [
        str(tmp_path),
        str(HOME),
        "hi",
        "there",
        "id_ed25519",
        "id_ed25519.pub",
        "known_hosts",
    ]
    assert (trio.laptop_home / "file").exists()


def mounts_here(own: Path) -> list[str]:
    """What is mounted, but for what other tests mount at the same time: in their folders, and namespaces of networks."""
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    return [line for line in lines if str(own) in line or not ("/pytest-of-" in line or " - nsfs " in line)]


def test_close_leaves_nothing(lab, tmp_path):
    mounts = mounts_here(tmp_path)
    pair = lab(2, nodes={1: Node(hide=("rsync",), disk="1m")})
    say(pair, 0, "setsid nohup sleep 4567 >/dev/null 2>&1 & echo")
    client = pair.laptop(["sh", "-c", "setsid sleep 4567 & sleep 4567"], start_new_session=True)
    until(lambda: len([p for p in pair.laptop_processes() if p.argv == ("sleep", "4567")]) == 2)
    inside = [process.pid for i in range(2) for process in pair.processes(i)] + [p.pid for p in pair.laptop_processes()]
    pair.close()
    assert client.wait(60) == -signal.SIGKILL
    assert not [pid for pid in inside if alive(pid)]
    assert not pair.dir.exists()
    assert mounts_here(tmp_path) == mounts
    assert REPO.joinpath("clustertool/errors.py").exists(), "what was bound into nodes is still here"


def test_a_killed_pytest_leaves_no_process(lab, tmp_path):
    script = textwrap.dedent("""
        import sys, time
        from pathlib import Path
        from tests.lab.lab import Lab
        lab = Lab(2, Path(sys.argv[1]))
        lab.laptop(["sleep", "5678"])
        pids = []
        while len(pids) < 3:
            pids = [p.pid for p in [*lab.processes(0), *lab.processes(1), *lab.laptop_processes()]]
        print(*pids, flush=True)
        time.sleep(600)
    """)
    with subprocess.Popen(
        [sys.executable, "-c", script, tmp_path / "killed"], cwd=REPO, stdout=subprocess.PIPE
    ) as process:
        pids = [int(pid) for pid in process.stdout.readline().split()]
        process.kill()
    assert len(pids) >= 3
    until(lambda: not [pid for pid in pids if alive(pid)])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
