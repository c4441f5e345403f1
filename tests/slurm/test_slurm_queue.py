"""Jobs that wait in the queue while no machine of the user runs, and clusters on which a job cannot start."""

from __future__ import annotations

import signal

import pytest

from tests.cases import POLITE
from tests.cli import until
from tests.slurm.engine_runs import SLURM, STARTS, number_of, use
from tests.slurm.slurm_site import SlurmSite

FIRST = """
    import os, time
    print("ready", flush=True)
    while not os.path.exists(os.path.expanduser("~/go-on")):
        time.sleep(0.05)
"""
SECOND = """
    import os
    with open(os.path.join(os.environ["CLUSTERTOOL_OUTPUT"], "result-" + os.environ["RANK"]), "w") as file:
        file.write("42")
"""


@pytest.mark.engines
def test_two_jobs_on_two_nodes_and_the_laptop_is_closed(queue: SlurmSite) -> None:
    """The second one is queued behind the first. The command that follows it dies, as with a laptop whose power is cut."""
    use(queue, SLURM, nodes=2, nodelist="node[0-1]", exclusive=True)
    queue.workspace("first", train_py=FIRST)
    queue.workspace("second", train_py=SECOND)
    first = queue.inv("run", "-w", "first", "--detach").ends(0).job
    queue.lab.runs(number_of(queue, first))
    follower = queue.start("run", "-w", "second")
    second = follower.says(r"^job (\S+): queued since", STARTS)
    follower.signal(signal.SIGKILL)
    follower.wait()
    queued = queue.inv("status", "--job", second, "--json").ends(0).json
    assert (queued["state"], queued["queue"]["reason"].split(" ")[0]) == ("queued", "Resources")
    (queue.shared / "go-on").touch()
    assert queue.lab.over(number_of(queue, first), STARTS) == "COMPLETED"
    assert queue.lab.over(number_of(queue, second), STARTS) == "COMPLETED"
    assert [path.name for job in queue.jobs_of_nodes(second) for path in job.glob("output/*")] == [
        "result-0",
        "result-1",
    ]
    queue.inv("fetch", "--job", second, "--rank", "all", "--to", "here").ends(0)
    assert sorted(path.name for path in (queue.folder / "here").rglob("result-*")) == ["result-0", "result-1"]
    jobs = {job["id"]: job["state"] for job in queue.inv("jobs", "--json").ends(0).json["jobs"]}
    assert jobs == {first: "succeeded", second: "succeeded"}
    queue.gone()


@pytest.mark.engines
def test_a_root_dir_that_nodes_do_not_share(queue: SlurmSite) -> None:
    """/var/tmp is each host's own: the job ends, and `check` names the cause before."""
    queue.workspace(train_py=POLITE)
    queue.conf(ROOT_DIR="/var/tmp/clustertool")
    assert "fix root on node[0-2]: choose a shared ROOT_DIR" in queue.inv("check", "--deep").ends(69).out
    done = queue.start("run", "-w", "job").wait(STARTS).ends(69)
    assert "has ended before a node had a record of it: Slurm: FAILED" in done.last
    until(lambda: not queue.lab.slurm("squeue", "--noheader"))
    queue.gone()
