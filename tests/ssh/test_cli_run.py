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
    cases.trains_word2vec(site(2), 2)
