"""Front ends (LLaMA-Factory, ms-swift, scripts of Megatron) start torchrun on each node, by variables of the ranks."""

from __future__ import annotations

import re

# What they do with torchrun: NPROC_PER_NODE processes on each of NNODES, which meet at MASTER_ADDR:MASTER_PORT.
FRONT_END = """
    import os, socket, subprocess, sys, time
    e = {name: os.environ.get(name) for name in ("NNODES", "NODE_RANK", "NPROC_PER_NODE", "MASTER_ADDR", "MASTER_PORT")}
    if "--rank" not in sys.argv:
        nodes, each, node = int(e["NNODES"]), int(e["NPROC_PER_NODE"]), int(e["NODE_RANK"])
        ranks = [[sys.executable, __file__, "--rank", str(node * each + one), str(nodes * each)] for one in range(each)]
        sys.exit(max(one.wait() for one in [subprocess.Popen(rank) for rank in ranks]))
    rank, world = map(int, sys.argv[2:])
    place = e["MASTER_ADDR"], int(e["MASTER_PORT"])
    if rank == 0:
        server = socket.create_server(place)
        there = sorted(server.accept()[0].recv(9).decode() for _ in range(world - 1))
        print("all of", world, there, flush=True)
    else:
        for _ in range(600):
            try:
                socket.create_connection(place).sendall(str(rank).encode())
                break
            except OSError:
                time.sleep(0.05)
"""
SCRIPT = """
    #!/bin/bash
    exec torchrun --nproc_per_node ${NPROC_PER_NODE:-1} train.py
"""


def test_all_nodes_are_one_world(site):
    pair = site(2)
    pair.workspace(train_sh="set -e\nexec python3 front_end.py\n", front_end_py=FRONT_END)
    done = pair.clustertool(
        "run", "-w", "job", "--nested", "--env", "NPROC_PER_NODE=2", "--script", "bash train.sh"
    ).ends(0)
    assert "all of 4 ['1', '2', '3']" in done.out
    done = pair.clustertool("run", "-w", "job", "--nested", "--script", "bash train.sh").ends(0)
    assert "all of 2 ['1']" in done.out, "without devices each node has one process"


def test_a_launcher_in_a_script_of_the_workspace(site):
    pair = site(2)
    pair.workspace(train_sh=SCRIPT)
    run = ("run", "-w", "job", "--script", "bash train.sh", "--dry")
    done = pair.clustertool(*run).ends(0)
    assert "warning: each of 2 trainers starts torchrun in train.sh: 2 separate trainings begin, not one" in done.err
    assert re.search(r"fix: start the program without torchrun.*--nested, one on each node", done.err)
    assert "separate trainings" not in pair.clustertool(*run, "--nested").ends(0).err
