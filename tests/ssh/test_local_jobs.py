"""One job of each kind on the embedded local cluster: what `make quick` runs next to the unit tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest

from tests.cli import HELLO, EmbeddedSite, until

# Of an elastic job: the processes of the first attempt run until they are stopped, those of the second end at once.
WAIT = """
    import os, time
    env = os.environ
    print("rank", env["RANK"], "of", env["WORLD_SIZE"], "attempt", env["CLUSTERTOOL_ATTEMPT"], flush=True)
    while env["CLUSTERTOOL_ATTEMPT"] == "0":
        time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EmbeddedSite]:
    """Start the three nodes once for all jobs, and end them."""
    folder = tmp_path_factory.mktemp("local")
    site = EmbeddedSite(folder / "site", folder / "state")
    yield site
    site.close()


@pytest.mark.parametrize(
    "options, summary, roles",
    [
        (("--nproc-per-node", "2"), "collective, 6 trainers on 3 nodes", {"trainer": 6}),
        (("--mode", "ps"), "ps, 3 pservers, 3 trainers on 3 nodes", {"pserver": 3, "trainer": 3}),
        (
            ("--heter-devices", "cpu", "--heter-worker-num", "2"),
            "ps-heter, 3 pservers, 3 trainers, 6 heter trainers on 3 nodes",
            {"pserver": 3, "trainer": 3, "heter": 6},
        ),
        (("--mode", "rpc"), "rpc, 3 trainers on 3 nodes", {"trainer": 3}),
    ],
    ids=["collective", "ps", "ps-heter", "rpc"],
)
def test_a_job(local: EmbeddedSite, options: tuple[str, ...], summary: str, roles: dict[str, int]) -> None:
    done = local.clustertool("run", "-w", HELLO, *options, "--all-ranks", "--job-id", summary.split(",")[0]).ends(0)
    assert summary in done.err
    assert len(done.lines("[trainer")) == roles["trainer"]
    processes = local.clustertool("status", "--json", "--job", done.job).ends(0).json["processes"]
    assert Counter(process["role"] for process in processes) == roles
    local.gone()


def test_an_elastic_job(local: EmbeddedSite) -> None:
    """One of three nodes is released: the second attempt has two ranks, and the job ends with it."""
    local.workspace(train_py=WAIT)
    run = local.start("run", "-w", "job", "--nnodes", "2:3", "--all-ranks", "--job-id", "elastic")
    for rank in range(3):
        run.says(rf"rank {rank} of 3 attempt 0")
    local.clustertool("shrink", "--host", local.name(2), "--job", "elastic").ends(0)
    for rank in range(2):
        run.says(rf"rank {rank} of 2 attempt 1")
    run.wait(60).ends(0)
    until(lambda: not local.living(), what=lambda: "the end of all processes")
