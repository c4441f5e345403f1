"""Data on nodes of their own: disks that hold a part of it only."""

from __future__ import annotations

import os
import re

from tests.lab.lab import HOME, Node


def test_data_that_fits_on_no_node_fits_on_all_of_them_together(site):
    pair = site(2, nodes={0: Node(disk="4m"), 1: Node(disk="4m")})
    folder = pair.workspace(train_py="")
    for number in range(6):
        (folder / f"x-{number}").write_bytes(os.urandom(500_000))
    run = ["run", "-w", "job", "--shards", "x-*"]
    done = pair.inv(*run).ends(69)
    assert re.search(rf"node\[0-1\]: 4\.\d MB free, 6\.\d MB needed below {HOME}/clustertool", done.err), done.err
    done = pair.inv(*run, "--only-where-read").ends(0)
    for node in (0, 1):
        there = pair.lab.exec(node, ["sh", "-c", "cd clustertool/JOB* && ls -d x-*"]).stdout.split()
        assert there == [f"x-{number}" for number in range(6)[node::2]]
    # the same with one node less does not fit, and says so before anything is sent
    done = pair.inv(*run, "--only-where-read", "--only", "node1").ends(69)
    assert "node1: " in done.err
    assert "needed below" in done.err
    assert "dispatch:" not in done.out + done.err
