"""`inv run` on nodes that are machines of their own."""

from __future__ import annotations

from tests import cases


def test_ranks_are_in_node_order(site):
    four = site(4)
    cases.ranks_in_node_order(four, [four.lab.address(node) for node in range(4)])


def test_ranks_of_nodes_of_different_sizes(site):
    three = site(3)
    cases.ranks_of_uneven_nodes(three, [three.name(node) for node in range(3)])


def test_word2vec(site):
    cases.trains_word2vec(cases.with_numpy(site(2)), 2)


def test_word2vec_on_nodes_that_share_one_home(site):
    pair = cases.with_numpy(site(2, shared_home=True))
    cases.trains_word2vec(pair, 2)
    assert [path.parent.name for node in (0, 1) for path in pair.jobs(node)] == ["node0", "node1"]
    assert not list(pair.root(0).glob("JOB*"))
