"""The Python API runs jobs from notebooks and pipelines, with the same code as the command line.

    from clustertool.api import Cluster

    cluster = Cluster.from_conf()
    job = cluster.run("./job", script="train.py --lr 0.1")
    job.wait()
    job.fetch("results")

It prints nothing, installs no signal handler and never ends the program. What goes wrong is raised as ClustertoolError, with
`what`, `fix` and `node`. Progress and warnings go to the logger "clustertool". docs/api.md describes it.
"""

# `X as X` says to type checkers that X is a name of the API.
from clustertool.api.cluster_object import Cluster as Cluster
from clustertool.api.job_object import Job as Job
from clustertool.api.job_object import StillRunning as StillRunning
from clustertool.api.results import HostStatus as HostStatus
from clustertool.api.results import LogLine as LogLine
from clustertool.api.results import RankStatus as RankStatus
from clustertool.api.results import Status as Status
from clustertool.api.silent_caller import Progress as Progress
from clustertool.errors import AuthError as AuthError
from clustertool.errors import ClustertoolError as ClustertoolError
from clustertool.errors import ConfigError as ConfigError
from clustertool.errors import DataError as DataError
from clustertool.errors import DeviceInUse as DeviceInUse
from clustertool.errors import DispatchError as DispatchError
from clustertool.errors import Interrupted as Interrupted
from clustertool.errors import JobFailed as JobFailed
from clustertool.errors import NodeLost as NodeLost
from clustertool.errors import NotFound as NotFound
from clustertool.errors import PreflightError as PreflightError
from clustertool.errors import Several as Several
from clustertool.errors import Survivors as Survivors
from clustertool.errors import Terminated as Terminated
from clustertool.errors import TimedOut as TimedOut
from clustertool.errors import Unreachable as Unreachable
from clustertool.errors import UsageError as UsageError
from clustertool.model.container.job_container import JobContainer as JobContainer
from clustertool.model.job.outcome import Outcome as Outcome
from clustertool.model.job.state_names import JobState as JobState
from clustertool.model.job.state_names import RankState as RankState
