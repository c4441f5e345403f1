"""A job whose machines join has the allocation of its engine, or none."""

from __future__ import annotations

from typing import Mapping, Optional, Sequence

from clustertool.errors import NodeLost
from clustertool.model.job.outcome import Outcome
from clustertool.model.job.state_names import JobState
from clustertool.model.kubernetes.pod_variables import KUBERNETES
from clustertool.node.join.engines.slurm_allocation import SlurmAllocation
from clustertool.node.supervisor.allocation import Allocation

_ENDED = "Kubernetes has ended its pod"
_WHY = "it was deleted, evicted or preempted, its machine shuts down, or another pod of the job has failed"


def allocation_of(engine: str, job: str, environ: Mapping[str, str], requeue_on: Sequence[str] = ()) -> Allocation:
    """Create the allocation in which this process runs.

    engine: "" if a user has started it. job: our id of the job. requeue_on: see EngineSettings.
    """
    if engine == "slurm" and environ.get("SLURM_JOB_ID"):
        return SlurmAllocation(job, environ, requeue_on)
    return PodAllocation() if engine == KUBERNETES else Allocation()


class PodAllocation(Allocation):
    """A pod, whose programs cannot ask Kubernetes: it has no token of a service account. The laptop finds the exact reason.

    Kubernetes ends a pod by SIGTERM and does not start it again, so its node is lost.
    """

    present = True

    def __init__(self) -> None:
        self._by = ""

    def ask(self, by: str, code: int) -> None:
        self._by = by

    def turn(self) -> Optional[Outcome]:
        if not self._by:
            return None
        by, self._by = self._by, ""
        return Outcome(JobState.LOST, NodeLost.code, "tool", f"{by}: {_ENDED}: {_WHY}", brief=f"{_ENDED}: {_WHY}")
