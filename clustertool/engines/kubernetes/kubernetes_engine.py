"""The engine kubernetes: jobs are pods, and the API server knows what is queued, what runs, and why a pod has ended.

The records of ended pods are restored from their logs in a private folder here, and one agent on it answers for all nodes
(Fleet.open_shared). It reads files only.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Protocol

from clustertool.engines.base import Answers, Capabilities, Description, Engine, EngineState
from clustertool.engines.caller import Caller
from clustertool.engines.job_states import by_records
from clustertool.engines.kubernetes.cluster_api import ClusterApi
from clustertool.engines.kubernetes.job_objects import JobStore, ObjectReader
from clustertool.engines.kubernetes.restored_records import RestoredRecords
from clustertool.errors import DataError, NotFound, raise_all
from clustertool.fleet import this_machine
from clustertool.fleet.agent_client import Sink
from clustertool.fleet.fleet import Fleet
from clustertool.model.config.cluster import Cluster
from clustertool.model.engine_node import EngineNode
from clustertool.model.hints import PROGRAM
from clustertool.model.job.state_names import OUTCOMES
from clustertool.model.kubernetes.kubernetes_settings import read_settings
from clustertool.model.kubernetes.node_view import node_view
from clustertool.model.kubernetes.pod_manifest import GRACE_MORE
from clustertool.model.kubernetes.pod_reasons import PodView, view
from clustertool.model.kubernetes.pod_record import read_message
from clustertool.model.wire.agent_answers import JobsAnswer
from clustertool.model.wire.agent_requests import StopHow
from clustertool.ssh.parallel import each

_LEAVING = 60.0  # seconds that the objects of a job may take beyond the grace of its pods
_LOGS = 8  # that are read at a time


class EngineApi(ObjectReader, Protocol):
    """Of ClusterApi, what is used here."""

    def log(self, pod: str) -> Iterator[bytes]: ...


class KubernetesEngine(Engine):
    """Only jobs of the user of the kubeconfig are found. Pods that run have no agent so far: see live()."""

    capabilities = Capabilities(needs_hosts=False, queues=True, sends_workspace=True, live_channels=False)

    def __init__(
        self, cluster: Cluster, caller: Caller, sink: Sink | None = None, api: EngineApi | None = None
    ) -> None:
        """api: the API server, by default that of the settings."""
        settings = read_settings(cluster.settings, where=cluster.where)
        super().__init__(cluster, caller, sink)
        self.api: EngineApi = api or ClusterApi(settings, caller.note, caller.check)
        self.store = JobStore(self.api)
        self._records = RestoredRecords()
        self._restored: set[tuple[str, int]] = set()  # job and node

    def __exit__(self, *details: object) -> None:
        try:
            super().__exit__(*details)
        finally:
            self._records.close()

    def open(self, lag: float | None = None) -> Fleet:
        """Restore the records of pods that have ended since the last time."""
        wanted: dict[tuple[str, int], str] = {}
        for job, found in self.store.all().items():
            for pod in map(view, found.pods):
                place = job, _node(pod)
                if pod.ended and place[1] >= 0 and place not in self._restored:
                    wanted[place] = pod.name
        read = each(
            list(wanted.items()),
            lambda one: self._records.restore(*one[0], self.api.log(one[1])),
            width=_LOGS,
            check=self.caller.check,
        )
        self._restored |= set(wanted)
        raise_all([error for error in read.failed.values() if not isinstance(error, NotFound)])
        return self.fleet.open_shared(this_machine.host(str(self._records.root)))

    def live(self, job: str) -> Fleet:
        raise NotFound(f"job {job}: agents in running pods are not built yet", f"{PROGRAM} status --job {job}")

    def describe(self, known: Mapping[int, JobsAnswer]) -> dict[str, Description]:
        found = self.store.describe()
        for job, part in by_records(known).items():
            if job not in found:
                ended = part.state in OUTCOMES
                reason = part.reason or "the API server does not have it any more"
                found[job] = Description(EngineState.ENDED if ended else EngineState.UNKNOWN, reason, part.ended)
        return found

    def cancel(self, job: str, how: StopHow) -> Answers:
        """Delete its workload in the foreground: the pods get TERM, and the first process of each ends the ranks. Returns when
        no object is left. Raises Survivors."""
        self.store.remove(job, how["grace"] + GRACE_MORE + _LEAVING)
        return {}

    def forget(self, jobs: Collection[str]) -> None:
        for job in jobs:
            self.store.remove(job, GRACE_MORE + _LEAVING, self.caller.check)

    def nodes(self) -> Sequence[EngineNode]:
        return [node_view(node) for node in self.api.listed("Node")]


def _node(pod: PodView) -> int:
    """The number of the node that an ended pod was, as its termination message has it; -1 where there is none."""
    try:
        return read_message(pod.message).node
    except DataError:
        return -1
