"""One job of each kind on the embedded local cluster: what `make quick` runs beside the unit tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cli import HELLO, EmbeddedSite, until

# It ends when the file of its name is in the folder of its job. In an elastic job a process of the first attempt waits for that,
# one of the second does not.
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
        (("--nproc-per-node", "2"), "collective, 6 trainers on 3 nodes", {"TRAINER": 6}),
        (("--mode", "ps"), "ps, 3 pservers, 3 trainers on 3 nodes", {"PSERVER": 3, "TRAINER": 3}),
        (
            ("--heter-devices", "cpu", "--heter-worker-num", "2"),
            "ps-heter, 3 pservers, 3 trainers, 6 heter trainers on 3 nodes",
            {"PSERVER": 3, "TRAINER": 3, "HETER_TRAINER": 6},
        ),
        (("--mode", "rpc"), "rpc, 3 trainers on 3 nodes", {"TRAINER": 3}),
    ],
    ids=["collective", "ps", "ps-heter", "rpc"],
)
def test_a_job(local: EmbeddedSite, options: tuple[str, ...], summary: str, roles: dict[str, int]) -> None:
    done = local.clustertool("run", "-w", HELLO, *options, "--all-ranks", "--job-id", summary.split(",")[0]).ends(0)
    assert summary in done.err
    text = local.clustertool("logs", "--all-ranks", "--job", done.job).ends(0).out
    assert {role: text.count(f"role={role} ") for role in roles} == roles
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
