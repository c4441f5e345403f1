"""`inv run` on sshds of this machine, which share one process table and one network."""

from __future__ import annotations

from tests import cases

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
    other = pair.inv("run", "-w", "job", "--detach", "--grace", 1).ends(0).job
    running = pair.start("run", "-w", "job", "--all-ranks", "--grace", 1)
    for rank in (0, 1):
        running.says(f"ready {rank}$")
    assert len([p for p in pair.living() if p.name.startswith("python")]) == 16
    running.signal()
    done = running.wait().ends(130)
    assert "127.0.0.[2-3]: clean" in done.err
    assert len([p for p in pair.living() if p.name.startswith("python")]) == 8
    assert pair.inv("status", "--job", other, "--json").ends(0).json["state"] == "running"
    assert pair.inv("stop", "--force").ends(0).lines() == [f"job {other}: 127.0.0.[2-3]: clean"]
    assert not pair.living()


def test_word2vec(site):
    cases.trains_word2vec(cases.with_numpy(site(2)), 2)


def test_word2vec_on_the_embedded_cluster(embedded):
    cases.trains_word2vec(embedded, 3)
    up = embedded.inv("cluster.up").ends(0)
    assert up.out.count("sshd on 127.0.0.") == 3
    down = embedded.inv("cluster.down").ends(0)
    assert down.out.count("ended node") == 3
    assert "no conf.py" in embedded.inv("status").ends(78).err


def test_jobs_that_start_in_the_same_moment_share_the_ports(site):
    """All see the default port free, one gets it, and the others plan again."""
    pair = site(2)
    pair.workspace(train_py="print('trained')\n", pserver_py=PSERVER)
    for _ in range(4):  # on a slow machine one may be done before the next one looks
        running = [pair.start("run", "-w", "job", "--mode", "ps") for _ in range(4)]
        done = [one.wait().ends(0) for one in running]
        assert len({one.job for one in done}) == 4
        if "planning again" in "".join(one.err for one in done):
            return
    raise AssertionError("nobody met another")
