"""The preflight of the engine slurm checks the login host, what Slurm answers to the settings, and what a compute node sees."""

from __future__ import annotations

import posixpath
import secrets
from collections.abc import Iterator
from dataclasses import replace

from clustertool.engines import preflight
from clustertool.engines.preflight import Examined
from clustertool.engines.slurm.slurm_host import SlurmHost, advice, is_silent, message
from clustertool.errors import PreflightError, UsageError
from clustertool.fleet.fleet import Fleet
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.facts import Facts
from clustertool.model.finding import Finding
from clustertool.model.paths import JobPaths
from clustertool.model.quantities import count
from clustertool.model.slurm.partitions import limits_exceeded
from clustertool.model.slurm.shell_allocation import ShellAllocation
from clustertool.model.slurm.slurm_settings import SlurmSettings
from clustertool.model.slurm.slurm_times import grace_warning, kill_wait
from clustertool.model.slurm.submit_script import SubmitOrder, cpus_warning, sbatch_options
from clustertool.model.wire.agent_requests import ProbeWanted
from clustertool.model.wire.messages import SUBMIT

_COLUMNS = ("ssh", "python", "root", "disk", "rsync")  # of the checks: ranks do not run on the login host
_PATIENCE = 30  # seconds that nodes may take to become free for the check
# Its arguments are ROOT_DIR and the name of a file there. Python 3.8 or newer, as of the program that joins.
_PROBE = """\
import os, sys
found = "shared" if os.path.isfile(sys.argv[1]) else "other"
print(sys.version_info >= (3, 8), sys.version.split()[0], found, os.uname().nodename)
"""


def check_login_host(fleet: Fleet, wanted: ProbeWanted) -> Examined:
    """Probe the login host, and return its facts, with the findings about ssh, python, root, disk and rsync only.

    fleet: of the login host alone. An error of the connection is in the result, and not raised.
    """
    examined = preflight.examine(fleet, wanted, ports=False, ping=False)
    return replace(examined, findings=tuple(one for one in examined.findings if one.column in _COLUMNS))


def check_queue(slurm: SlurmHost, settings: SlurmSettings, folder: str) -> Iterator[Finding]:
    """Test a submission with these settings (sbatch --test-only) and the limits of partitions, and yield one finding.

    It is an error if sbatch refuses it or a limit is exceeded, a warning for one CPU on each node, else "ok". folder: any one
    on the login host. Raises PreflightError if there is no sbatch, or the partitions cannot be listed.
    """
    options = sbatch_options(settings, SubmitOrder("check", folder, ""))
    correct = "correct SLURM in conf.py, or the options; sinfo lists partitions"
    answer = slurm.run("sbatch", "--test-only", *options, "--wrap=true", env={})
    reasons = [] if is_silent(answer) else limits_exceeded(settings, slurm.partitions())
    if answer["code"]:
        yield Finding(0, "queue", "error", "; ".join([message(answer), *reasons]), advice(answer, correct))
        return
    if reasons:
        yield Finding(0, "queue", "error", f"the job would not start: {'; '.join(reasons)}", correct)
        return
    warning = cpus_warning(settings)
    if warning:
        yield Finding(0, "queue", "warn", "1 CPU on each node", warning)
    else:
        yield Finding(0, "queue", "ok", "ok")


def check_grace(slurm: SlurmHost, cluster: Cluster) -> Iterator[Finding]:
    """Yield a warning if the grace that conf.py sets is not shorter than Slurm's KillWait; nothing if it sets none."""
    warning = grace_warning(cluster.grace, kill_wait(slurm.config())) if cluster.grace_given else ""
    if warning:
        yield Finding(0, "queue", "warn", "KillWait", warning)


def check_allocation(allocation: ShellAllocation, settings: SlurmSettings) -> Iterator[Finding]:
    """Yield one finding about the allocation of this shell, for a job with these settings.

    It is an error if the allocation is too small, a warning if ranks share processors there, else "ok".
    """
    try:
        warning = allocation.cpus_warning(allocation.step(settings), 0)
    except UsageError as error:
        yield Finding(0, "queue", "error", error.what, error.fix)
        return
    text = f"allocation {allocation.job}: {count(allocation.nodes, 'node')}"
    yield Finding(0, "queue", "warn" if warning else "ok", text, warning)


def check_compute_nodes(
    fleet: Fleet, slurm: SlurmHost, settings: SlurmSettings, facts: Facts, allocation: ShellAllocation | None
) -> Examined:
    """Run a probe on nodes by srun, and return two findings for each: whether it shares ROOT_DIR, and about its Python.

    The nodes become hosts after the login host, whose facts are the only ones in the result. allocation: that of this shell, in
    which srun then runs; None: on nodes of its own. Makes a folder of a submission, and removes it. Raises PreflightError if no
    node answers within 30 s.
    """
    token = f"check-{secrets.token_hex(8)}"
    texts = dict.fromkeys(("name", "asked", "command", "mode", "owner", "release", "slurm_id"), "")
    fleet.ask_one(0, SUBMIT({"about": {"job": token, "nodes": 0, "created": 1.0, **texts}, "files": {"seen": ""}}))  # type: ignore[typeddict-item]
    try:
        folder = JobPaths(facts.root, token).queue
        options = _options_in_allocation(allocation, settings) if allocation else _options_of_own_nodes(settings)
        lines = _run_probe(slurm, options, fleet.cluster.python, posixpath.join(folder, "seen"))
    finally:
        slurm.withdraw(token)
    hosts, findings = [*fleet.cluster.hosts], []
    for right, version, found, name in sorted(lines, key=lambda line: line[-1]):
        node = len(hosts)
        hosts.append(Host(node, name, name=name))
        old = Finding(node, "python", "error", f"{version}, too old", "set PYTHON in conf.py to Python 3.8 or newer")
        findings.append(Finding(node, "python", "ok", version) if right == "True" else old)
        other = Finding(node, "root", "error", f"{facts.root} is not that of {slurm.name}", "choose a shared ROOT_DIR")
        findings.append(Finding(node, "root", "ok", "ok") if found == "shared" else other)
    return Examined(replace(fleet.cluster, hosts=tuple(hosts)), {0: facts}, tuple(findings), {})


def _options_of_own_nodes(settings: SlurmSettings) -> list[str]:
    """Build the options of a srun that gets nodes of its own, for one minute, with the settings of a job."""
    of_sbatch = ("--job-name", "--comment", "--chdir", "--output", "--open-mode", "--requeue", "--no-requeue", "--time")
    options = sbatch_options(settings, SubmitOrder("check", "/", ""))
    return ["--time=1", *(one for one in options if one.partition("=")[0] not in of_sbatch)]


def _options_in_allocation(allocation: ShellAllocation, settings: SlurmSettings) -> list[str]:
    """Build the options of a srun in an allocation, which share its nodes with a job that runs there (--overlap)."""
    nodes = allocation.step(settings).node_count
    return [f"--jobid={allocation.job}", "--overlap", f"--nodes={nodes}", f"--ntasks={nodes}", "--ntasks-per-node=1"]


def _run_probe(slurm: SlurmHost, options: list[str], python: str, path: str) -> list[list[str]]:
    """Run the probe on the nodes by srun, and return the four fields of each line that they print.

    Fields: "True" if Python is new enough, else "False", its version, "shared" if the file `path` is there, else "other", and
    the name of the node. Raises PreflightError if srun fails, as after 30 s without free nodes, or no such line is printed.
    """
    argv = ["srun", *options, f"--immediate={_PATIENCE}", "--chdir=/", "--cpu-bind=none", "--mpi=none", python]
    answer = slurm.run(*argv, "-ESs", "-c", _PROBE, path, env={})
    lines = [line.split() for line in answer["stdout"].splitlines()]
    found = [line for line in lines if len(line) == 4 and line[0] in ("True", "False")]
    if answer["code"] or not found:
        what = f"no node answers within {_PATIENCE} s: {message(answer)}"
        raise PreflightError(what, "leave --deep out while the nodes are busy", slurm.name)
    return found
