"""`inv run` on sshds of this machine, which share one process table and one network."""

from __future__ import annotations

from tests import cases


def hosts(site):
    return [f"{server.address}:{server.port}" for server in site.servers]


def test_ranks_are_in_node_order(site):
    four = site(4)
    cases.ranks_in_node_order(four, [server.address for server in four.servers])


def test_ranks_of_nodes_of_different_sizes(site):
    three = site(3)
    cases.ranks_of_uneven_nodes(three, hosts(three))


def test_word2vec(site):
    cases.trains_word2vec(cases.with_numpy(site(2)), 2)


def test_word2vec_on_the_embedded_cluster(embedded):
    cases.trains_word2vec(embedded, 3)
    up = embedded.inv("cluster.up").ends(0)
    assert up.out.count("sshd on 127.0.0.") == 3
    down = embedded.inv("cluster.down").ends(0)
    assert down.out.count("ended node") == 3
    assert "no conf.py" in embedded.inv("status").ends(78).err
