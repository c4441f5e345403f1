"""inv cluster.up and cluster.down start and stop the embedded local cluster, a few ssh nodes on this machine."""

from __future__ import annotations

from clustertool.actions.find_jobs import ask_jobs
from clustertool.actions.stop_jobs import stop_how, stop_jobs, unfinished_jobs
from clustertool.fleet.embedded_cluster import LocalCluster
from clustertool.fleet.fleet import Fleet
from clustertool.model.config.cluster import Cluster
from clustertool.model.job.stop_result import read_result
from clustertool.show.job_text import stop_text
from clustertool.show.program_name import commanded
from clustertool.verbs import signals
from clustertool.verbs.verb import Call, read_whole_number


def up(call: Call) -> None:
    """Start the servers of the embedded cluster that do not run, and print all of its servers.

    --nodes: their number, also of a cluster that runs: servers beyond it are ended. Without it, there are as many as before, or
    three. Raises UsageError for a number that is not valid, and the errors of LocalCluster.up().
    """
    local = LocalCluster()
    cluster = local.up(read_whole_number(call.given.nodes, "--nodes"))
    for server in local.status():
        call.terminal.line(str(server))
    keys = ("name", "host", "port", "root_dir")
    call.answer({"nodes": [{key: getattr(host, key) for key in keys} for host in cluster.hosts]})


def down(call: Call) -> None:
    """Stop the jobs and the servers of the embedded cluster, and print what was ended."""
    local = LocalCluster()
    cluster = local.cluster()
    if cluster is not None:
        _stop_jobs(call, cluster)
    ended = local.down()
    for line in ended:
        call.terminal.line(f"ended {line}")
    if not ended:
        call.terminal.line("nothing to end")
    call.answer({"ended": ended})


def _stop_jobs(call: Call, cluster: Cluster) -> None:
    """Stop all unfinished jobs of the embedded cluster, whose supervisors would outlive sshd, and print the results.

    Processes that may be left, and nodes without an answer, are only warnings.
    """
    with Fleet(cluster, signals.check).open() as fleet:
        known = ask_jobs(fleet, "")
        how = stop_how(f"{commanded()} stop", cluster.grace)
        for job, answers in stop_jobs(fleet, unfinished_jobs(known), how, known).items():
            results = {name: read_result(answer, job) for name, answer in answers.items()}
            left = {name: result for name, result in results.items() if not result.over}
            for name, result in left.items():
                call.terminal.warn(f"job {job}: {name}: {stop_text(result)}")
            if not left:
                call.terminal.line(f"stopped job {job}")
        for node, error in fleet.failed.items():
            call.terminal.warn(f"{fleet.name(node)} did not list its jobs: {error.what}")
