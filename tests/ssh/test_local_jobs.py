"""One job of each kind on the embedded local cluster: what `make quick` runs next to the unit tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests import forked_agents
from tests.cli import HELLO, EmbeddedSite, until
from tests.node_code import NodeCode
from tests.ssh.conftest import ForkingSite

LOGS = {"workerlog": "trainer", "serverlog": "pserver", "heterlog": "heter"}  # of each process one, workerlog.0

# Of an elastic job: the processes of the first attempt run until they are stopped, those of the second end at once.
WAIT = """
    import os, time
    env = os.environ
    print("rank", env["RANK"], "of", env["WORLD_SIZE"], "attempt", env["CLUSTERTOOL_ATTEMPT"], flush=True)
    while env["CLUSTERTOOL_ATTEMPT"] == "0":
        time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, node_code: NodeCode) -> Iterator[EmbeddedSite]:
    """Start two nodes once for all jobs, and end them."""
    folder = tmp_path_factory.mktemp("local")
    site = ForkingSite(folder / "site", folder / "state", 2, python=forked_agents.interpreter(node_code.place))
    for node in range(site.count):
        node_code.put_into(site.home(node))
        node_code.put_joining_into(site.home(node))
    site.clustertool("cluster.up", "--nodes", site.count).ends(0)
    yield site
    site.close()


@pytest.mark.parametrize(
    "options, summary, roles",
    [
        (("--nproc-per-node", "2"), "collective, 4 trainers on 2 nodes", {"trainer": 4}),
        (("--mode", "ps"), "ps, 2 pservers, 2 trainers on 2 nodes", {"pserver": 2, "trainer": 2}),
        (
            ("--heter-devices", "cpu", "--heter-worker-num", "2"),
            "ps-heter, 2 pservers, 2 trainers, 4 heter trainers on 2 nodes",
            {"pserver": 2, "trainer": 2, "heter": 4},
        ),
        (("--mode", "rpc"), "rpc, 2 trainers on 2 nodes", {"trainer": 2}),
    ],
    ids=["collective", "ps", "ps-heter", "rpc"],
)
def test_a_job(local: EmbeddedSite, options: tuple[str, ...], summary: str, roles: dict[str, int]) -> None:
    done = local.clustertool("run", "-w", HELLO, *options, "--all-ranks", "--job-id", summary.split(",")[0]).ends(0)
    assert summary in done.err
    assert len(done.lines("[trainer")) == roles["trainer"]
    logs = [log for node in range(local.count) for log in (local.job_dir(node, done.job) / "log").glob("*log.*")]
    assert Counter(LOGS[log.stem] for log in logs) == roles
    local.gone()


def test_an_elastic_job(local: EmbeddedSite) -> None:
    """One of two nodes is released: the second attempt has one rank, and the job ends with it."""
    local.workspace(train_py=WAIT)
    run = local.start("run", "-w", "job", "--nnodes", "1:2", "--all-ranks", "--job-id", "elastic")
    for rank in range(2):
        run.says(rf"rank {rank} of 2 attempt 0")
    local.clustertool("shrink", "--host", local.name(1), "--job", "elastic").ends(0)
    run.says("rank 0 of 1 attempt 1")
    run.wait(60).ends(0)
    until(lambda: not local.living(), what=lambda: "the end of all processes")
