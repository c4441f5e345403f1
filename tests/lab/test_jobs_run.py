"""`inv run` on nodes that are machines of their own."""

from __future__ import annotations

import pytest

from tests import cases


@pytest.mark.chaos  # tests/ssh/test_cli_run.py and test_jobs_hosts.py have it
def test_ranks_are_in_node_order(site):
    four = site(4)
    cases.ranks_in_node_order(four, [four.lab.address(node) for node in range(4)])


@pytest.mark.chaos  # test_jobs_hosts.py has them
def test_ranks_of_nodes_of_different_sizes(site):
    three = site(3)
    cases.ranks_of_uneven_nodes(three, [three.name(node) for node in range(3)])


@pytest.mark.chaos  # test_jobs_detached.py trains it, too
def test_word2vec(site):
    cases.trains_word2vec(cases.with_numpy(site(2)), 2)


@pytest.mark.chaos
def test_word2vec_on_nodes_that_share_one_home(site):
    pair = cases.with_numpy(site(2, shared_home=True))
    cases.trains_word2vec(pair, 2)
    assert [path.parent.name for node in (0, 1) for path in pair.jobs(node)] == ["node0", "node1"]
    assert not list(pair.root(0).glob("JOB*"))


def test_a_part_of_the_hosts(site):
    """A job numbers the nodes it has; later commands find its ranks where they are."""
    three = site(3)
    three.inv("run", "-w", cases.HELLO, "--skip", "node0").ends(0)
    status = three.inv("status", "--json").ends(0).json
    assert [node["name"] for node in status["nodes"]] == ["node1", "node2"]
    assert three.inv("logs", "-r", 1, "--raw").ends(0).out.startswith("hello role=TRAINER rank=1 ")
    assert three.inv("logs", "--host", "node2").ends(0).lines()[0].startswith("[trainer 1 node2] hello")
    attached = three.inv("attach", "--all-ranks").ends(0)
    assert sorted(cases.hello(attached)) == [0, 1]
    assert "warning" not in attached.err
    three.lab.crash(0)
    three.conf(CONNECT_TIMEOUT=1.5)
    assert three.inv("status").ends(0), "what is no part of the job need not answer"
    three.workspace(train_py="import time; time.sleep(600)")
    job = three.inv("run", "-w", "job", "--detach", "--skip", "node0").ends(0).job
    three.conf(HOSTS=["node2"])
    done = three.inv("stop").ends(69)
    assert done.lines() == [
        f"job {job}: node1: did not answer: is not among the hosts of this command",
        f"job {job}: node2: clean",
    ]
    three.gone()


def test_two_entries_of_one_machine_are_two_nodes(site):
    """The same account of the same machine twice: one port space, one home, two nodes."""
    one = site(1)
    one.conf(HOSTS=["node0", "node0"])
    done = one.inv("run", "-w", cases.HELLO, "--all-ranks").ends(0)
    assert {rank: its["prefix"] for rank, its in cases.hello(done).items()} == {0: "node0#0", 1: "node0#1"}
    assert len({its["endpoint"] for its in cases.hello(done).values()}) == 2
    status = one.inv("status", "--json").ends(0).json
    assert [(node["name"], node["state"]) for node in status["nodes"]] == [("node0#0", "ended"), ("node0#1", "ended")]
    assert one.inv("logs", "-r", 1, "--raw").ends(0).out.startswith("hello role=TRAINER rank=1 ")


def test_nodes_that_share_a_home_know_whose_job_is_whose(site):
    pair = site(2, shared_home=True)
    pair.workspace(train_py="import time; time.sleep(600)")
    both = pair.inv("run", "-w", "job", "--detach").ends(0)
    assert "2 nodes share ROOT_DIR" in both.err
    one = pair.inv("run", "-w", "job", "--detach", "--only", "node1").ends(0).job
    for job, nodes in ((both.job, ["node0", "node1"]), (one, ["node1"])):
        status = pair.inv("status", "--job", job, "--json").ends(0).json
        assert status["state"] == "running"
        assert [(node["name"], node["state"]) for node in status["nodes"]] == [(name, "running") for name in nodes]
    assert pair.inv("stop", "--job", one).ends(0).lines() == [f"job {one}: node1: clean"]
    assert pair.inv("stop").ends(0).lines() == [f"job {both.job}: node[0-1]: clean"]
    assert not pair.living()
    assert pair.inv("clean", "--older-than", "0s", "--json").ends(0).json["removed"] == sorted([both.job, one])
    assert not pair.jobs(0) + pair.jobs(1)


@pytest.mark.chaos  # tests/ssh/test_cli_clusterrun.py has it, test_jobs_hosts.py has PADDLE_NIC
def test_the_old_tools_sample_command(site):
    """With its conf.py as it was: PADDLE_NIC, and the same port on every node."""
    pair = site(2)
    cases.old_paddle(pair, PADDLE_NIC="eth0", PADDLE_PORT=7164)
    addresses = [pair.lab.address(node) for node in (0, 1)]
    cases.the_old_tools_sample(pair, addresses)
    for node in (0, 1):
        endpoints = (pair.jobs(node)[0] / "log/endpoints.log").read_text().splitlines()[1:]
        assert [endpoint.partition(":")[0] for endpoint in endpoints] == addresses
        assert "--port=7164" in (pair.jobs(node)[0] / "log/train.log").read_text()
