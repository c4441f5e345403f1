"""The hosts of jobs that were started from this machine take the place of HOSTS where no conf.py has them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from clustertool.errors import ConfigError
from clustertool.fleet import this_machine
from clustertool.fleet.job_places import JobPlaces, StoredJob
from clustertool.fleet.this_user import NoHome
from clustertool.model.config.cluster import Cluster

if TYPE_CHECKING:  # of all commands only those that start a job have one
    from clustertool.model.facts import Identity


def remember(identity: Identity, cluster: Cluster) -> str:
    """Store the hosts of a job that has been started or queued. Returns a warning if this fails, else ""."""
    try:
        JobPlaces().store(identity, cluster)
    except (OSError, ConfigError) as error:
        why = error.what if isinstance(error, ConfigError) else f"{error.filename}: {error.strerror}"
        return f"the hosts of this job are not stored ({why}): later commands need a conf.py or --hostfile"
    return ""


def forget(jobs: Iterable[str]) -> None:
    """Remove what is stored of jobs that were removed from all their nodes."""
    with contextlib.suppress(NoHome):
        JobPlaces().forget(jobs)


def other_than(job: str, conf: Cluster) -> StoredJob | None:
    """Find the job with this id, if it ran with another engine or on hosts that a conf.py which was found does not have.

    Only a complete id that the tool has made can mean a job of other hosts. Other ids and names may exist on both, and conf.py
    goes first.
    """
    found = None
    with contextlib.suppress(ConfigError):  # conf.py is enough
        found = JobPlaces().find(job)
    if found is None or found.cluster is None or found.id != job or found.asked or not _needed(found, True):
        return None
    entries = {host.entry for host in conf.hosts}
    if conf.engine != found.cluster.engine:
        return found
    return None if entries.issuperset(host.entry for host in found.cluster.hosts) else found


def without_conf(job: str) -> StoredJob | None:
    """Find the job that is called so, for "" the one that was started last. Raises ConfigError, UsageError.

    None if nothing stored is needed: for jobs of the embedded local cluster, and of this folder or one above.
    """
    found = None
    with contextlib.suppress(NoHome):
        found = JobPlaces().find(job) if job else JobPlaces().newest()
    return found if found is not None and _needed(found, bool(job)) else None


def _needed(job: StoredJob, named: bool) -> bool:
    """Check whether its hosts are others than those that a command without a conf.py uses here.

    named: the user named the job.
    """
    if job.cluster is None:
        return False
    top = this_machine.found(Path.cwd()) if job.here else None
    return top is None or (named and job.cluster.root_dir != this_machine.node(top).root_dir)
