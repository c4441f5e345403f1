"""How jobs run and end when nothing is done to them from outside."""

from __future__ import annotations

from tests.node.harness import Bench


def test_success(bench: Bench) -> None:
    job = bench.run(bench.nodes(2), "echo hello $CLUSTERTOOL_RANK", per_node=2)
    for node in range(2):
        assert job.ended(node)["state"] == "succeeded"
    job.gone()
    assert [job.log(rank) for rank in range(4)] == [b"hello %d\n" % rank for rank in range(4)]
