"""The Python API runs jobs from notebooks and pipelines, with the same code as the command line.

    from clustertool.api import Cluster

    cluster = Cluster.from_conf()
    job = cluster.run("./job", script="train.py --lr 0.1")
    job.wait()
    job.fetch("results")

It prints nothing, installs no signal handler and never ends the program. What goes wrong is raised as ClustertoolError, with
`what`, `fix` and `node`. Progress and warnings go to the logger "clustertool". docs/api.md describes it.
"""

from clustertool.api.cluster_object import Cluster
from clustertool.api.job_object import Job, StillRunning
from clustertool.api.results import HostStatus, LogLine, RankStatus, Status
from clustertool.api.silent_caller import Progress
from clustertool.errors import (
    AuthError,
    ClustertoolError,
    ConfigError,
    DataError,
    DeviceInUse,
    DispatchError,
    Interrupted,
    JobFailed,
    NodeLost,
    NotFound,
    PreflightError,
    Several,
    Survivors,
    Terminated,
    TimedOut,
    Unreachable,
    UsageError,
)
from clustertool.model.container.job_container import JobContainer
from clustertool.model.job.outcome import Outcome
from clustertool.model.job.state_names import JobState, RankState

__all__ = [
    "AuthError",
    "Cluster",
    "ClustertoolError",
    "ConfigError",
    "DataError",
    "DeviceInUse",
    "DispatchError",
    "HostStatus",
    "Interrupted",
    "Job",
    "JobContainer",
    "JobFailed",
    "JobState",
    "LogLine",
    "NodeLost",
    "NotFound",
    "Outcome",
    "PreflightError",
    "Progress",
    "RankState",
    "RankStatus",
    "Several",
    "Status",
    "StillRunning",
    "Survivors",
    "Terminated",
    "TimedOut",
    "Unreachable",
    "UsageError",
]
