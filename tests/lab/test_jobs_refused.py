"""Nodes that are not fit for a job: named with the fix, the right code, and nothing left on any of them."""

from __future__ import annotations

import json
import os

from tests import forked_agents
from tests.cases import HELLO
from tests.cli import until
from tests.lab.lab import Node
from tests.node.harness import read


def refused(site, code, *args, reported, **options):
    done = site.inv(*args, **options).ends(code)
    for text in reported:
        assert text in done.err, done.err
    assert "Traceback" not in done.err
    assert done.last.startswith(f"clustertool: exit {code} (tool): ")
    assert not site.living()
    return done


def nothing(site):
    for node in range(site.count):
        assert not site.jobs(node)


RUN = ["run", "--workspace", HELLO]
WRITES = """
    import os
    with open(os.environ["CLUSTERTOOL_OUTPUT"] + "/it", "w") as file:
        file.write("is here")
    print("here", os.environ["WORLD_SIZE"])
"""


def test_programs_that_a_node_does_not_have(site, node_code):
    python = f"mount --bind {forked_agents.interpreter(node_code.place)} /usr/bin/python3"  # or both compile the code
    nodes = {0: Node(commands=(python,)), 1: Node(hide=("rsync",), commands=(python,)), 2: Node(hide=("python3",))}
    three = site(3, nodes=nodes)
    three.conf(PYTHON="python3", DISPATCH="rsync")
    reported = ["node1: no rsync", "install the package rsync", "node2: there is no python3", "PYTHON"]
    done = refused(three, 69, *RUN, reported=reported)
    assert "node0" not in done.err.replace("conf.py", "")
    nothing(three)


def test_a_node_needs_rsync_only_where_it_was_asked_for(site):
    """--skip-bad --nnodes N takes the first N that are fit; if there are fewer, nothing starts and all reasons are reported."""
    three = site(3, nodes={0: Node(hide=("rsync",))})
    three.workspace(train_py=WRITES)
    given = ("run", "-w", "job", "--dispatch", "rsync")
    reported = ["2 of 3 nodes are ready, --nnodes needs 3", "node0: no rsync", "install the package rsync"]
    refused(three, 69, *given, "--skip-bad", "--nnodes", 3, reported=reported)
    assert "64" in three.inv(*given, "--skip-bad", "--nnodes", 4).ends(64).last
    nothing(three)
    done = three.inv(*given, "--skip-bad", "--nnodes", 1).ends(0)
    assert done.lines("[trainer") == ["[trainer 0 node1] here 1"]
    assert "node0 is left out: rsync: no rsync (install the package rsync on the node)" in done.err
    assert not three.jobs(0) + three.jobs(2)
    three.conf(HOSTS=["node1", "node0"])
    rows = {row["node"]: row["findings"] for row in three.inv("check", "--json").ends(0).json["nodes"]}
    assert [rows[name]["rsync"]["level"] for name in ("node0", "node1")] == ["ok", "ok"]
    assert rows["node0"]["rsync"]["text"] == "no"
    three.inv("run", "-w", "job").ends(0)
    three.inv("fetch", "--rank", "all", "--to", "got").ends(0)
    assert [(three.folder / f"got/rank{rank}/it").read_text() for rank in (0, 1)] == ["is here"] * 2


def test_a_python_that_is_too_old(site):
    pair = site(2)
    old = pair.home(1) / "old-python"
    old.write_text("#!/bin/sh\nexec python3 - <<'EOF'\nimport sys\nprint('old 2.7.18')\nEOF\n")
    old.chmod(0o755)
    pair.home(0).joinpath("old-python").symlink_to(pair.lab.python)
    pair.conf(PYTHON="~/old-python")
    refused(pair, 69, *RUN, reported=["node1: ~/old-python is Python 2.7.18, too old", "3.8"])
    nothing(pair)


def test_hosts_that_cannot_be_reached_are_all_reported_at_once(site):
    three = site(3)
    three.lab.cut(0)
    three.lab.crash(1)
    three.conf(CONNECT_TIMEOUT=1.5)
    done = refused(three, 69, *RUN, reported=["node[0-1]: ", "fix: "])
    assert "node2:" not in done.err
    nothing(three)
    assert three.inv("jobs").ends(69)
    # --skip-bad goes on without them, ranks numbered anew
    done = three.inv(*RUN, "--skip-bad").ends(0)
    assert "node0 is left out" in done.err
    assert "[trainer 0 node2] hello" in done.out


def test_a_key_that_is_refused(site):
    pair = site(2)
    (pair.lab.dir / "node1/etc/authorized_keys").write_text("")
    refused(pair, 77, *RUN, reported=["node1", "fix: "])
    nothing(pair)
    pair.lab.crash(0)
    pair.conf(CONNECT_TIMEOUT=1.5)
    refused(pair, 69, *RUN, reported=["node0", "node1"])


def test_a_host_key_that_has_changed(site):
    pair = site(2)
    known = pair.lab.laptop_home / ".ssh/known_hosts"
    lines = known.read_text().splitlines()
    (one,) = [line for line in lines if line.startswith("node1,")]
    (other,) = [line for line in lines if line.startswith("node0,")]
    known.write_text("\n".join([other, one.rpartition(" ")[0] + " " + other.rpartition(" ")[2]]) + "\n")
    refused(pair, 77, *RUN, reported=["node1", "host key", "known_hosts"])
    nothing(pair)
    pair.conf(HOST_KEYS="off")
    pair.inv("jobs").ends(0)


def test_a_port_that_is_taken_names_its_holder(site):
    pair = site(2)
    script = "import socket, time; s = socket.create_server(('', 7777)); print('on', flush=True); time.sleep(600)"
    holder = pair.lab.exec(0, ["sh", "-c", f'setsid python3 -c "{script}" greedy >/tmp/out 2>&1 & echo $!'])
    until(lambda: read(str(pair.lab.tmp(0) / "out")) == b"on\n")
    found = {}
    for key in ("PADDLE_PORT", "LEAD_PORT"):
        pair.conf(**{key: 7777})
        found[key] = pair.inv("run", "-w", HELLO, "--mode", "ps")
    for process in pair.lab.processes(0):
        if "greedy" in process.argv:
            os.kill(process.pid, 9)
    for key, done in found.items():
        done.ends(69)
        for text in ("node0", "7777", key, "python3", holder.stdout.strip()):
            assert text in done.err
        errors = [line for line in done.err.splitlines() if not line.startswith("warning: ")]  # of a busy machine
        assert not any("node1" in line for line in errors)
    nothing(pair)


def test_a_default_port_that_is_taken_is_avoided(site):
    one = site(1)
    script = "import socket, time; s = socket.create_server(('', 7164)); print('on', flush=True); time.sleep(600)"
    one.lab.exec(0, ["sh", "-c", f'setsid python3 -c "{script}" greedy >/tmp/out 2>&1 & echo $!'])
    until(lambda: read(str(one.lab.tmp(0) / "out")) == b"on\n")
    done = one.inv("run", "-w", HELLO, "--mode", "ps")
    for process in one.lab.processes(0):
        if "greedy" in process.argv:
            os.kill(process.pid, 9)
    assert "7164" in done.ends(0).err


def test_root_dirs_that_cannot_be_written(site):
    pair = site(2)
    pair.root(1).write_text("in the way")
    refused(pair, 69, *RUN, reported=["node1", "ROOT_DIR", "fix: "])
    nothing(pair)
    pair.conf(ROOT_DIR="/proc/jobs")
    refused(pair, 69, *RUN, reported=["node[0-1]", "ROOT_DIR", "/proc"])


def test_a_full_disk(site):
    pair = site(2, nodes={1: Node(disk="4m")})
    (pair.workspace(train_py="") / "data").write_bytes(os.urandom(3 << 20))
    refused(pair, 69, "run", "-w", "job", reported=["node1", "disk", "fix: "])
    nothing(pair)


def test_a_disk_that_fills_up_while_the_workspace_is_sent(site):
    one = site(1, nodes={0: Node(disk="4m")})
    one.conf(CHECKS_OFF=["disk"])
    (one.workspace(train_py="") / "data").write_bytes(os.urandom(5 << 20))
    refused(one, 74, "run", "-w", "job", reported=["node0", "disk", "fix: "])
    nothing(one)


def test_a_disk_that_is_too_small_for_the_jobs_copy(site):
    one = site(1, nodes={0: Node(disk="4m")})
    one.conf(CHECKS_OFF=["disk"])
    (one.workspace(train_py="") / "data").write_bytes(os.urandom(3 << 20))
    refused(one, 69, "run", "-w", "job", reported=["node0", "No space left", "fix: "])
    nothing(one)


def test_a_disk_that_is_too_small_for_the_output_that_is_resumed(site):
    pair = site(2, nodes={1: Node(disk="4m")})
    pair.conf(CHECKS_OFF=["disk"])
    pair.workspace(train_py="import os; open('output/big', 'wb').write(os.urandom(2_500_000))")
    first = pair.inv("run", "-w", "job").ends(0).job
    refused(pair, 69, "run", "-w", "job", "--resume", reported=["node1", "No space left", "fix: "])
    (left,) = pair.inv("jobs", "--json").ends(0).json["jobs"]
    assert (left["id"], left["seen_on"]) == (first, [0, 1]), "the new job is taken back on both nodes"
    assert [path.name for path in pair.jobs(0)] == [f"JOB{first}"]


def test_a_job_id_that_exists_keeps_the_old_job(site):
    """Also where one node alone has it."""
    pair = site(2)
    pair.inv(*RUN, "--job-id", "mine", "--only", "node1").ends(0)
    (old,) = pair.jobs(1)
    before = {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    assert pair.inv(*RUN, "--job-id", "mine").ends(0).job == "mine-2"
    assert before == {path: path.read_bytes() for path in old.rglob("*") if path.is_file()}
    assert (old / "log/workerlog.0") in before


def test_a_folder_of_the_user_in_the_place_of_a_job_stays(site):
    pair = site(2)
    (pair.root(1) / "JOBmine").mkdir(parents=True)
    pair.root(1).chmod(0o700)
    refused(pair, 64, *RUN, "--job-id", "mine", reported=["node1", "JOBmine", "--job-id"])
    assert not pair.jobs(0)
    assert os.listdir(pair.root(1) / "JOBmine") == []


def test_odd_paths_and_values_arrive_exactly_and_nothing_is_left_on_the_laptop(site):
    pair = site(2)
    odd = 'it\'s "my" $HOME `job` {x}; \\n & *'
    folder = pair.workspace(
        odd,
        train_py="""
        import json, os, sys
        print(json.dumps([os.environ["ODD"], os.environ["TOML"], os.environ["CONF"], sys.argv[1:], sorted(os.listdir("."))]))
    """,
    )
    value = "a\"b'c$HOME`id`\\n\n second line\t{rank} %s"
    (folder / "job.toml").write_text('[env]\nTOML = """q"\'$x\nline"""\n')
    (folder / "ünï 'x").write_text("")
    pair.conf(ENV={"CONF": value})
    args = ["run", "-w", odd, "--env", f"ODD={value}", "--script", "train.py 'a b' \"$HOME\" '*' ''"]
    done = pair.inv(*args).ends(0)
    output = json.loads(done.lines("[trainer 0")[0].partition("] ")[2])
    assert output[0] == value
    assert output[1] == "q\"'$x\nline"
    assert output[2] == value
    assert output[3] == ["a b", "$HOME", "*", ""]
    assert "ünï 'x" in output[4]
    left = sorted(path.name for path in pair.folder.iterdir() if path.name != "__pycache__")
    assert left == sorted(["conf.py", "tasks.py", odd]), "nothing is left behind on the laptop"
    assert not pair.lab.laptop_processes()
