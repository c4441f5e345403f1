"""Rows of Paddle's documents about two nodes, typed as the page has them. Private sshds stand for the documents' nodes."""

from __future__ import annotations

import os
import re

import pytest

from tests.document_rows import ROWS, Row, parts
from tests.here.test_typed_rows import PROGRAM

FEW = (7,)  # of `make test`: other cards on each node
# Ids of devices count trainers where the nodes have none; the cards of a shell and "all cards" are those of the nodes.
TYPED = [
    pytest.param(row, id=str(number), marks=() if number in FEW else pytest.mark.chaos)
    for number, row in enumerate(ROWS, 1)
    if "each" in row.plans
    and not parts(row.now)[0]
    and any(text in row.now for text in ("--gpus", "--only", "--servers"))
]


@pytest.mark.parametrize("row", TYPED)
def test_a_row_on_two_nodes(site, row: Row) -> None:
    pair = site(2).conf(DEVICE_KIND="cpu")
    pair.workspace(".", train_py=PROGRAM)
    now = row.now
    for node, server in enumerate(pair.servers):
        now = now.replace(f"192.168.0.{node + 1}", server.address)
    worker = int(os.environ.get("PYTEST_XDIST_WORKER", "gw0")[2:])  # all workers of one user share the claims of ports
    now = re.sub(r":61(?=\d\d\b)", f":{61 + worker}", now)
    _, (program, *argv) = parts(now)
    assert program == "clusterrun"
    pair.clusterrun(*argv).ends(0)
    logs = [[path for job in pair.jobs(node) for path in job.glob("log/workerlog.*")] for node in (0, 1)]
    assert tuple(map(len, logs)) == row.plans["each"]
    assert sum(len(list(job.glob("log/serverlog.*"))) for node in (0, 1) for job in pair.jobs(node)) == (
        row.plans.get("pservers", 0)
    )
    world = sum(row.plans["each"])
    texts = {path.name: path.read_text() for node in logs for path in node}
    assert texts == {f"workerlog.{rank}": f"rank {rank} of {world}\n" for rank in range(world)}
    pair.gone()
