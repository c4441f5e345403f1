"""What only the nodes of a running job can answer: commands there, through steps of srun."""

from __future__ import annotations

import re

import pytest

from clustertool.engines.slurm.srun_link import LoginLinks, SrunLink
from tests.cli import CLUSTERTOOL, REPO, until
from tests.slurm.queue_jobs import STEPS, blocker, is_over
from tests.slurm.slurm_site import SlurmSite


def running(site: SlurmSite, nodes: int) -> str:
    """A job that prints steps until it is stopped."""
    site.workspace(train_py=STEPS)
    job = site.clustertool("run", "--workspace", "job", "--nnodes", nodes, "--detach").ends(0).job
    until(lambda: site.clustertool("status").out.startswith(f"job {job}: running"))
    return job


@pytest.mark.engines
def test_a_command_runs_on_the_nodes_of_a_job(queue: SlurmSite):
    site = queue
    refused = site.clustertool("exec", "hostname").ends(64)
    assert "exec --job J COMMAND runs it on the nodes of job J" in refused.err
    job = running(site, 2)
    text = 'echo "it\'s $PWD"; pgrep -f train.py >/dev/null && echo ranks; cat; test $SLURMD_NODENAME = node0 || exit 5'
    done = site.clustertool("exec", "--job", job, "--command", text).ends(5)
    home = site.lab.slurm("pwd")
    assert done.lines() == [
        "--- node0",
        f"it's {home}",
        "ranks",
        "--- node1 (exit code 5)",
        f"it's {home}",
        "ranks",
    ]
    stacks = site.clustertool("stacks", "--job", job).ends(0).out
    assert stacks.startswith("trainer 0") and "train.py:" in stacks
    done = site.clustertool("exec", "--job", job, "--timeout", 2, "--command", "trap '' TERM; sleep 777; true").ends(
        124
    )
    assert "did not end within 2 s and was ended" in done.err
    until(lambda: not [process for node in range(3) for process in site.processes(node) if "777" in process.argv])
    (site.shared / "conf.py").write_text(
        site.conf_text(SLURM={"nodes": 2})
    )  # for the login host itself: srun is a child
    here = ["env", f"PYTHONPATH={REPO}", *CLUSTERTOOL, "exec", "--conf", f"{home}/conf.py"]
    done = site.lab.exec(site.lab.login, [*here, "--job", job, "--command", "pwd; echo odd >&2; exit 3"])
    assert (done.returncode, done.stdout.splitlines()) == (3, ["--- node[0-1] (exit code 3)", home, "odd"]), done.stderr
    assert site.clustertool("status").ends(0).out.startswith(f"job {job}: running")
    site.clustertool("stop").ends(0)
    is_over(site, job)
    assert f"job {job} does not run" in site.clustertool("exec", "--job", job, "hostname").ends(66).err
    other = blocker(site)
    later = site.clustertool("run", "--workspace", "job", "--detach").ends(0).job
    assert "no node has a record of it" in site.clustertool("exec", "--job", later, "hostname").ends(66).err
    site.clustertool("stop", "--job", later).ends(0)
    site.lab.slurm("scancel", other)


@pytest.mark.engines
def test_top_stops_a_job_in_slurm_too(queue: SlurmSite):
    site = queue
    job = running(site, 2)
    watched = site.start("top", "--job", job, program=CLUSTERTOOL, terminal=True)
    watched.says("trainer 1")
    watched.type("x")
    watched.says(f"stop job {job} on all nodes")
    watched.type("y")
    watched.says(rf"job {job}: node\[0-1\]: clean")
    watched.type("q")
    watched.wait()
    is_over(site, job)
    assert "stopped" in site.clustertool("status", "--job", job).ends(0).out


@pytest.mark.engines
def test_a_job_of_more_nodes_than_a_connection_has_room_for(slurm):
    """Each connection to the login host has the steps of 4 nodes."""
    site: SlurmSite = slurm(6, cpus=2)
    job = running(site, 6)
    done = site.clustertool("exec", "--job", job, "--command", "hostname | sed s/[0-9]//; exit 4").ends(4)
    assert done.lines() == ["--- node[0-5] (exit code 4)", "node"]
    found = site.clustertool("top", "--job", job, "--json").ends(0).json
    assert sorted(found["nodes"]) == [f"node{node}" for node in range(6)]
    assert sorted((rank["node"], rank["state"]) for rank in found["ranks"]) == [
        (f"node{i}", "running") for i in range(6)
    ]
    assert f"job {job}: node[0-5]: clean" in site.clustertool("stop").ends(0).out
    is_over(site, job)


def test_steps_of_many_nodes_share_connections():
    made = [Connection()]

    def more() -> Connection:
        made.append(Connection())
        return made[-1]

    links = LoginLinks(made[0], more)  # type: ignore[arg-type]
    assert [made.index(links.for_node(node)) for node in (0, 3, 4, 7, 8, 5)] == [0, 0, 1, 1, 2, 1]
    made[0].alive = False
    assert [made.index(links.for_node(node)) for node in (1, 2, 4)] == [3, 3, 1]


@pytest.mark.parametrize("end", ["Exited with exit code 5", "Terminated", "Killed"])
def test_what_srun_adds_to_the_output_of_a_command(end: str):
    """Only if its stderr is still open then: it closes that when the command has."""
    text = f"srun: error: node1: task 1: mine\nsrun: error: node1: task 0: {end}\n".encode()
    assert re.sub(SrunLink.noise + rb"\Z", b"", text) == b"srun: error: node1: task 1: mine\n"


class Connection:
    alive = True
