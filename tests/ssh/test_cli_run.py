"""`inv run` on sshds of this machine, which share one process table and one network."""

from __future__ import annotations

import re
import sys

import pytest

from tests import cases
from tests.cli import USER, until
from tests.node_code import CACHE

PSERVER = """
    import os, socket, time
    host, port = os.environ["POD_IP"], int(os.environ["PADDLE_PORT"])
    server = socket.create_server((host, port))
    time.sleep(1000)
"""


def hosts(site):
    return [f"{server.address}:{server.port}" for server in site.servers]


def test_ranks_are_in_node_order(site):
    four = site(4)
    cases.ranks_in_node_order(four, [server.address for server in four.servers])


def test_ranks_of_nodes_of_different_sizes(site):
    three = site(3)
    cases.ranks_of_uneven_nodes(three, hosts(three))


def test_ctrl_c_ends_stubborn_ranks_and_no_other_jobs(site):
    """All nodes are in one process table here, and so is another job: each node ends its own."""
    pair = site(2)
    pair.workspace(train_py=cases.STUBBORN)
    other = pair.clustertool("run", "-w", "job", "--detach", "--grace", 1).ends(0).job
    running = pair.start("run", "-w", "job", "--all-ranks", "--grace", 1)
    for rank in (0, 1):
        running.says(f"ready {rank}$")
    until(lambda: len([p for p in pair.living() if p.name.startswith("python")]) == 16)
    running.signal()
    done = running.wait().ends(130)
    assert "127.0.0.[2-3]: clean" in done.err
    assert len([p for p in pair.living() if p.name.startswith("python")]) == 8
    assert pair.clustertool("status", "--job", other, "--json").ends(0).json["state"] == "running"
    assert pair.clustertool("stop", "--force").ends(0).lines() == [f"job {other}: 127.0.0.[2-3]: clean"]
    assert not pair.living()


@pytest.mark.chaos  # README.md's commands and tests/lab/test_jobs_detached.py train it, too
def test_word2vec(site):
    cases.trains_word2vec(cases.with_numpy(site(2)), 2)


@pytest.mark.chaos
def test_word2vec_on_the_embedded_cluster(embedded):
    cases.trains_word2vec(embedded, 3)
    up = embedded.clustertool("cluster.up").ends(0)
    assert up.out.count("sshd on 127.0.0.") == 3
    down = embedded.clustertool("cluster.down").ends(0)
    assert down.out.count("ended node") == 3
    assert "no conf.py" in embedded.clustertool("status").ends(78).err


def test_jobs_that_start_in_the_same_moment_share_the_ports(site):
    """All see the default port free, one gets it, and the others plan again."""
    one = site(1)
    one.workspace(train_py="print('trained')\n", pserver_py=PSERVER)
    for _ in range(8):  # on a slow machine one may be done before the next one checks
        running = [one.start("run", "-w", "job", "--mode", "ps") for _ in range(4)]
        done = [command.wait().ends(0) for command in running]
        assert len({command.job for command in done}) == 4
        if "planning again" in "".join(command.err for command in done):
            return
    raise AssertionError("nobody met another")


def test_what_users_type_without_options(site):
    """The program and the command stand where other tools have them. Invoke's parser has no words of that kind."""
    pair = site(2)
    job = pair.workspace(train_py="import os, sys; print(sys.argv[1:], os.getcwd())")
    done = pair.clustertool(
        "run", "--all-ranks", "train.py", "--lr", "0.1", "{rank}", "two words", "--nnodes=2", cwd=job
    ).ends(0)
    assert done.out.count("['--lr', '0.1', '{rank}', 'two words', '--nnodes=2'] ") == 2
    assert "note: --nnodes is passed to train.py; options of run stand before the program\n" in done.err
    assert "there is no nope.py" in pair.clustertool("run", "nope.py", cwd=job).ends(65).err
    for folder in ("job", "./job"):  # without --workspace
        assert f"fix: clustertool run --workspace {folder}" in pair.clustertool("run", folder).ends(64).err
    hosts = pair.clustertool("exec", "echo", "$((20", "+", "3))").ends(0)
    assert hosts.out == "--- 127.0.0.[2-3]\n23\n"
    assert pair.clustertool("exec", "--only", "127.0.0.3", "ls -a; exit 7").ends(7).out.startswith("--- 127.0.0.3")
    assert "exec has two commands" in pair.clustertool("exec", "-c", "true", "false").ends(64).err
    assert pair.inv("exec", "hostname").code == 1


def test_a_first_start_installs_the_code_and_later_ones_use_it(site, node_code):
    """Nodes of tests have it already (tests/node_code.py): in the same place with the same name, or it is installed again."""

    def installed(one):
        one.clustertool("jobs").ends(0)
        return [(place.name, place.stat().st_ino) for place in (one.home(0) / CACHE).iterdir()]

    new, known = site(1, installed=False), site(1)
    found = installed(new)
    assert [name for name, _ in found] == [node_code.name]
    assert installed(new) == found
    before = (known.home(0) / CACHE / node_code.name).stat().st_ino
    assert installed(known) == [(node_code.name, before)]


def test_a_module_that_a_node_lacks_and_another_python3_on_one_node(site, tmp_path):
    pair = site(2)
    other = tmp_path / "python3"
    other.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    other.chmod(0o755)
    first, second = (f"{USER}@{server.entry}" for server in pair.servers)
    pair.conf(HOSTS=[first, {"host": second, "env": {"PATH": f"{tmp_path}:/usr/bin:/bin"}}])
    pair.workspace(train_py="import no_such_module")
    done = pair.clustertool("run", "-w", "job").ends(1)
    usual = re.search(
        rf"warning: {pair.name(1)}: python: python3 of jobs is {other} [\d.]+, others (\S+) [\d.]+ \(", done.err
    )
    assert usual and usual[1] != str(other), done.err
    where = r"on 127\.0\.0\.[23], or have PRELUDE in conf.py activate the environment that has it"
    assert re.search(
        f"  fix: install no_such_module for python3 {where}; clustertool check compares the nodes", done.err
    ), done.err
