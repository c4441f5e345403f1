"""Records of jobs in Slurm, which the login host reads: of running and ended ones, and where nothing could record the end."""

from __future__ import annotations

import contextlib
import os
import signal
import time

import pytest

from tests.cli import CLUSTERTOOL
from tests.slurm.queue_jobs import STEPS
from tests.slurm.slurm_site import SlurmSite

pytestmark = pytest.mark.engines

RESULT = "import os\nopen('output/part' + os.environ['PADDLE_TRAINER_ID'], 'w').write('42')\nprint('done')\n"


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_verbs_about_an_ended_job(queue: SlurmSite, nodes: int):
    """A job of one node has its records in ROOT_DIR itself, one of two nodes in node0 and node1."""
    site = queue
    site.workspace(train_py=RESULT)
    job = site.clustertool("run", "--workspace", "job", "--nnodes", str(nodes)).ends(0).job
    folders = [path.parent.name for path in site.jobs_of_nodes(job)]
    assert folders == ([site.root(0).name] if nodes == 1 else ["node0", "node1"])
    fetched = site.clustertool("fetch", "--rank", "all", "--to", "got").ends(0).lines()
    assert len(fetched) == nodes and (site.folder / f"got/rank{nodes - 1}/part{nodes - 1}").read_text() == "42"
    site.clustertool("report", "--to", "report.html").ends(0)
    assert f"node{nodes - 1}" in (site.folder / "report.html").read_text()
    files = site.clustertool("logs", "--files").ends(0).out
    assert f"workerlog.{nodes - 1}" in files
    assert site.clustertool("logs", "--all-ranks").ends(0).out.count("done") == nodes
    assert site.clustertool("clean", "--job", job, "--json").ends(0).json["removed"] == [job]
    assert not site.jobs_of_nodes(job)


def test_a_connection_to_the_login_host_that_breaks(queue: SlurmSite):
    site = queue
    site.workspace(train_py=STEPS.replace("1000", "60"))
    running = site.start("run", "--workspace", "job", "--nnodes", "2", "--all-ranks", program=CLUSTERTOOL)
    running.says(r"step 3\b")
    login = site.lab.nodes
    agents = [one for one in site.processes(login) if one.name == "ct-agent"]
    os.kill(min(one.pid for one in agents), signal.SIGKILL)  # the others are about to be programs that it runs
    done = running.wait().ends(0)
    lines = done.lines()
    for rank, node in ((0, "node0"), (1, "node1")):
        assert [line for line in lines if line.startswith(f"[trainer {rank} {node}] step")] == [
            f"[trainer {rank} {node}] step {step}" for step in range(60)
        ]


def test_killed_with_all_that_could_record_it(queue: SlurmSite):
    site = queue
    site.workspace(train_py=STEPS)
    running = site.start("run", "--workspace", "job", "--nnodes", "2", program=CLUSTERTOOL)
    running.says(r"step 3\b")
    job = site.clustertool("jobs", "--json").ends(0).json["jobs"][0]["id"]
    assert f"job {job} runs" in site.clustertool("clean", "--job", job).ends(64).err
    began = time.monotonic()
    for victim in [*site.processes(0), *site.processes(1)]:
        if victim.name in ("ct-supervisor", "ct-guard") or "train.py" in victim.argv:
            with contextlib.suppress(ProcessLookupError):  # it has followed another one
                os.kill(victim.pid, signal.SIGKILL)
    done = running.wait().ends(75)
    assert time.monotonic() - began < 40
    assert "ended without a verdict: Slurm: " in done.err
    site.gone()
    assert f"job {job}: lost: Slurm: " in site.clustertool("status").ends(0).out
    assert [one["state"] for one in site.clustertool("jobs", "--json").ends(0).json["jobs"]] == ["lost"]
    assert "gave a sign of life" in site.clustertool("clean", "--job", job).ends(69).err
    for path in site.jobs_of_nodes(job):
        os.utime(path / ".clustertool/control", (began, began))
    assert site.clustertool("clean", "--job", job, "--json").ends(0).json["removed"] == [job]
    assert not site.jobs_of_nodes(job)
