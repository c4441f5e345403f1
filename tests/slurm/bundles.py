"""A job as its bundle and its script alone, submitted by hand on the login host: what `export --engine slurm` gives a user."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from clustertool import __version__
from clustertool.fleet import identity
from clustertool.fleet.dispatch.workspace import read_workspace
from clustertool.fleet.joining import join_bundle, join_process
from clustertool.model.config.cluster import read_cluster
from clustertool.model.config.job import Options, read_job
from clustertool.model.facts import Identity
from clustertool.model.joining.join_file import EngineSettings, JoinFile, MeetingPoint
from clustertool.model.paths import STEP_OUTPUT
from clustertool.model.slurm.slurm_settings import SlurmSettings
from clustertool.model.slurm.submit_script import SubmitOrder, script
from tests.lab.lab import HOME
from tests.node_code import add_compiled
from tests.sent_workspace import with_workspace
from tests.slurm.slurm_site import SlurmSite


def submit(
    site: SlurmSite,
    workspace: Path,
    job: str,
    options: Options,
    settings: SlurmSettings,
    shell: Mapping[str, str] | None = None,
) -> str:
    """Write bundle and script of a job into the shared home, and submit it; its number in Slurm.

    shell: variables of the shell that submits.
    """
    cluster = replace(read_cluster({"HOSTS": ["none"]}), hosts=())
    owner = Identity(job, time.time(), "root", identity.token(), *identity.certificate(), asked=job, name=job)
    join = JoinFile(
        version=__version__,
        code=join_process.digest(),
        identity=owner,
        cluster=cluster,
        job=read_job(cluster, {}, options),
        nnodes=settings.node_count,
        coordinator=MeetingPoint("none"),
        engine="slurm",
        of_engine=EngineSettings(settings.goes_back, requeue_on=settings.requeue_on),
    )
    sent = read_workspace(workspace)
    folder = site.shared / job
    folder.mkdir()
    bundle = folder / "bundle.pyz"
    join_bundle.write(bundle, with_workspace(join, sent), sent)
    bundle.write_bytes(add_compiled(bundle.read_bytes()))
    order = SubmitOrder(job, f"{HOME}/{job}", f"{HOME}/{job}/bundle.pyz", sys.executable)
    (folder / "job.sh").write_text(script(settings, order))
    return site.lab.slurm("sbatch", "--parsable", f"{job}/job.sh", env=shell)


def output(site: SlurmSite, job: str) -> str:
    """What srun and the joining processes have printed."""
    return (site.shared / job / STEP_OUTPUT).read_text()


def ready(site: SlurmSite, job: str) -> list[int]:
    """Ranks that have printed `ready RANK`."""
    logs = [log.read_text() for folder in site.jobs_of_nodes(job) for log in (folder / "log").glob("*log.*")]
    return sorted(int(rank) for text in logs for rank in re.findall(r"^ready (\d+)$", text, re.M))
