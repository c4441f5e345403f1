"""fleetrun's documents have one command line with --ips, typed on every node. Here it starts one job: the second one ends."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from tests import forked_agents
from tests.lab.lab import Node
from tests.lab.typed import TypedSite

WAITS = """
    import os, time
    print("ready", os.environ["RANK"], flush=True)
    time.sleep(600)
"""


@pytest.fixture(scope="module")
def machines(module_lab, node_code):
    """Two nodes, each of which can log in to both."""
    # Without a conf.py the nodes' Python is python3. Another version than this one's would compile the node's code.
    binds = ((Path(forked_agents.interpreter(node_code.place)), Path("/usr/bin/python3").resolve()),)
    lab = module_lab(2, nodes={node: Node(binds=binds) for node in range(2)})
    for node in range(2):
        shutil.copytree(lab.laptop_home / ".ssh", lab.home(node) / ".ssh", dirs_exist_ok=True)
    return lab


@pytest.fixture
def sites(machines):
    found = [TypedSite(machines, node, CLUSTERTOOL_SECRET="") for node in range(2)]
    yield found
    found[0].start("stop", "--all", "--force").wait()


def test_the_second_command_ends(machines, sites):
    for site in sites:
        site.workspace(".", train_py=WAITS)
    line = ("--ips", f"{machines.address(0)},{machines.address(1)}", "--detach", "train.py", "--lr", "0.1")
    job = sites[1].types(*line).wait().ends(0).job
    second = sites[0].types(*line).wait().ends(64)
    assert f"the same command was typed on {machines.address(1)}, and its job {job} runs" in second.err
    each = re.search(r"type on all of them: (.*?); another --job-id or --name starts a second job", second.err, re.S)
    assert each
    meets = f"--master {machines.address(0)}:8090 --nnodes 2"
    assert " ".join(each[1].split()) == f"clusterrun {meets} --detach train.py --lr 0.1"
    meant = sites[0].types("--name", "other", *line).wait().ends(0)
    assert "2 trainers on 2 nodes" in meant.err
    sites[1].start("stop", "--job", job, "--force").wait().ends(0)
    sites[0].start("stop", "--job", meant.job, "--force").wait().ends(0)
    sites[0].types(*line).wait().ends(0)


def test_of_two_commands_at_once_one_goes_on(machines, sites):
    for site in sites:
        site.workspace(".", train_py=WAITS)
    line = ("--ips", f"{machines.address(0)},{machines.address(1)}", "--detach", "train.py")
    running = [site.types(*line) for site in sites]
    done = [one.wait() for one in running]
    assert sorted(one.code for one in done) == [0, 64], [one.err for one in done]
    assert "one command starts all nodes" in next(one.err for one in done if one.code)
