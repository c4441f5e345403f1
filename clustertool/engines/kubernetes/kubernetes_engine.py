"""The engine kubernetes: jobs are pods, and the API server knows what is queued, what runs, and why a pod has ended.

A pod that runs has an agent, at the end of an exec channel. The records of pods that have ended are restored from their logs in
a private folder here, and one agent on it answers for all of them (Fleet.open_shared). It reads files only.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from clustertool.engines.base import Answers, Description, Engine, EngineState, by_records
from clustertool.engines.caller import Caller
from clustertool.engines.kubernetes.cluster_api import ClusterApi
from clustertool.engines.kubernetes.ended_pods import EndedPods, PodWatch
from clustertool.engines.kubernetes.job_objects import JobObjects, JobStore
from clustertool.engines.kubernetes.kubernetes_check import check_cluster
from clustertool.engines.kubernetes.pod_channel import PodChannel
from clustertool.engines.preflight import Examined
from clustertool.errors import AuthError, ClustertoolError, NotFound, PreflightError, Unreachable, raise_all
from clustertool.fleet import this_machine
from clustertool.fleet.agent_client import AgentClient, Sink
from clustertool.fleet.fleet import STOPPING, Fleet
from clustertool.fleet.this_machine import Link
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.engine_views import EngineNode, JobPod
from clustertool.model.hints import PROGRAM
from clustertool.model.job.job_names import can_mean
from clustertool.model.job.state_names import OUTCOMES, StopState
from clustertool.model.job.stop_result import read_result
from clustertool.model.kubernetes.api_objects import fields, text
from clustertool.model.kubernetes.kubernetes_settings import read_settings
from clustertool.model.kubernetes.node_view import node_view
from clustertool.model.kubernetes.object_names import about_of
from clustertool.model.kubernetes.pod_places import node_of_pod
from clustertool.model.kubernetes.pod_reasons import view
from clustertool.model.kubernetes.workload import GRACE_MORE, pod_root, root_of
from clustertool.model.paths import IN_POD, base
from clustertool.model.wire.agent_answers import JobsAnswer, JobStop, StopAnswer
from clustertool.model.wire.agent_requests import StopHow
from clustertool.model.wire.messages import LIST_JOBS, RELEASE, stop_request
from clustertool.ssh.parallel import each

_LEAVING = 60.0  # seconds that the objects of a job may take beyond the grace of its pods
_FORCED = 1  # seconds between TERM and KILL of a pod whose ranks get KILL at once; 0 would not wait for the kubelet
_ENDING = 10.0  # seconds in which a pod ends whose ranks have ended
_NOTICED = 3.0  # seconds after which the API server shows that a process has ended
_JOIN_LINES, _JOIN_BYTES = 20, 64 << 10  # of the log of a pod that has not joined
_CHANNELS = 64  # that are opened at a time
_POLL = 0.2
_NO_SHELL = "use an image with a shell, or run a program: exec --in-job PROGRAM ..."
_CLEAN: JobStop = {"state": StopState.CLEAN, "survivors": []}


class KubernetesEngine(Engine):
    """The engine of jobs as pods. Only jobs of the user of the kubeconfig are found."""

    def __init__(
        self, cluster: Cluster, caller: Caller, sink: Sink | None = None, api: ClusterApi | None = None
    ) -> None:
        """Build the engine. api: the API server, by default that of the settings."""
        settings = read_settings(cluster.settings, where=cluster.where)
        super().__init__(cluster, caller, sink)
        self.api = api or ClusterApi(settings, caller.note, caller.check)
        self.store = JobStore(self.api)
        self._ended = EndedPods(self.api)
        self._followed = sink is not None
        self._output = settings.output
        self._watch = PodWatch(self.api)
        self.fleet.records_of, self.fleet.needed = self._records_of, self._ended.restore_needed_logs
        self.fleet.no_records = _no_records

    def __exit__(self, *details: object) -> None:
        """Close watch and connections, and remove the restored records."""
        try:
            self._watch.close()
            super().__exit__(*details)
        finally:
            self._ended.records.close()

    # -- agents

    def open(self, lag: float | None = None, job: str = "", newest: bool = False) -> Fleet:
        """Connect to the agents in running pods, restore the records of ended ones, and return the fleet.

        A pod is the host of its name. job, newest: see Engine.open. If a pod ends while its agent starts, all is done again. If
        a job is followed, it first starts the watch of its pods.
        """
        if self._followed:
            self._watch.start(self.store.owner)
        while True:
            fleet = self._open_once(lag, job, newest)
            bad = {node for node, error in fleet.failed.items() if isinstance(error, PreflightError)}
            failed = [host.host for host in fleet.cluster.hosts if host.index in bad]
            if not self._wait_for_an_end([pod for pod in failed if pod not in self._ended.failed], _NOTICED):
                return fleet

    def _wait_for_an_end(self, pods: Sequence[str], patience: float) -> bool:
        """Poll these pods for up to `patience` seconds, once at least; return whether one of them has ended or is gone."""
        end = time.monotonic() + patience
        while pods:
            found = [self.api.get("Pod", pod) for pod in pods[:_CHANNELS]]
            if any(pod is None or view(pod).ended for pod in found):
                return True
            if time.monotonic() >= end:
                break
            self.caller.check()
            time.sleep(_POLL)
        return False

    def _open_once(self, lag: float | None, job: str, newest: bool) -> Fleet:
        """Restore the records of ended pods, connect to the running pods that are not connected yet, and return the fleet.

        Pods whose records cannot be restored are hosts with an error. lag: see Fleet.open. job, newest: see Engine.open.
        """
        running: dict[str, Host] = {}
        for name, objects in self._select_jobs(job, newest).items():
            running.update(self._sort_pods(name, objects))
        self._ended.restore_all(self.caller.check)
        running.update(self._ended.unreadable())
        self.fleet.open_shared(this_machine.host(str(self._ended.records.root)))
        kept = {agent.host.host for agent in self.fleet.agents.values() if agent.dead is None} & running.keys()
        new = [host for pod, host in running.items() if pod not in kept]
        return self.fleet.open_more(new, lambda host: not host.here and host.host not in kept, lag)

    def _select_jobs(self, job: str, newest: bool) -> dict[str, JobObjects]:
        """Read the jobs with pods that `job` can mean, all for "", by their ids.

        newest: of all jobs, leave out those that have ended, except the newest job.
        """
        found: dict[str, JobObjects] = {}
        created: dict[str, float] = {}
        for name, objects in self.store.read_all().items():
            about = about_of(objects.workload)
            if objects.pods and (not job or can_mean(job, name, about.asked, about.name)):
                found[name], created[name] = objects, about.created
        if newest and not job:
            last = max(created, key=lambda name: (created[name], name), default="")
            ended = [name for name, objects in found.items() if all(view(pod).ended for pod in objects.pods)]
            for name in set(ended) - {last}:
                del found[name]
        return found

    def _sort_pods(self, job: str, objects: JobObjects | None, first: bool = False) -> dict[str, Host]:
        """Map the running pods of a job to hosts, and add the ended ones to those to restore; pods that wait are left out.

        first: only the pod of node 0. Records which node of the job each pod is.
        """
        running: dict[str, Host] = {}
        for pod in objects.pods if objects is not None else ():
            node, seen = node_of_pod(pod), view(pod)
            if objects is None or node is None or (first and node):
                continue
            self._ended.places[seen.name] = job, node
            if seen.ended:
                self._ended.add(seen, about_of(objects.workload))
            elif seen.phase == "Running":
                root = root_of(pod) or pod_root(self.fleet.cluster.root_dir)
                name = text(fields(pod, "spec"), "hostname") or seen.name
                running[seen.name] = Host(0, seen.name, name=name, root_dir=root)
        return running

    def first_pod(self, job: str) -> Host | None:
        """Return the pod of node 0 as a host; None if it does not run."""
        running = self._sort_pods(job, self.store.read_one(job), first=True)
        return next(iter(running.values()), None)

    def reach(self, host: Host) -> Link | None:
        """Return the link to a pod; None for this machine. Raises the error of restoring the pod's records, if it has ended."""
        if host.here:
            return None
        error = self._ended.failed.get(host.host)
        if error is not None:
            raise error
        return PodLink(self.api, host.host, host.name)

    def _records_of(self, host: Host, patience: float) -> str | None:
        """Restore the records of a pod whose agent was lost, and return their base directory; None if the pod runs.

        None, too, for this machine. patience: seconds in which the pod may end. Called in a thread of the fleet. Raises
        NotFound for a pod that is gone.
        """
        if host.here:
            return None
        if self._ended.has(host.host) or self._wait_for_an_end([host.host], patience):
            return base("", self._ended.restore(host.host), shared=True)
        return None

    def fleet_of_job(self, job: str) -> Fleet:
        """Return a fleet with the same hosts, not open yet, that connects to running pods only.

        Raises NotFound if no pod runs.
        """
        hosts = self.fleet.cluster.hosts
        if all(host.here for host in hosts):
            raise NotFound(f"no pod of job {job} runs", f"{PROGRAM} status --job {job}")

        def reach(host: Host) -> Link | None:
            if host.here:  # its records are here, and it is not
                raise Unreachable("its pod has ended", f"{PROGRAM} status --job {job}", host.name)
            return self.reach(host)

        self._job_fleet = Fleet(self.fleet.cluster, self.caller.check, None, None, reach)
        return self._job_fleet

    # -- jobs

    def describe(self, known: Mapping[int, JobsAnswer]) -> dict[str, Description]:
        """Describe the user's jobs by their objects, and the jobs of `known` without objects by their records.

        The latter are ENDED if their records have an outcome, else UNKNOWN. Returns {job id: description}.
        """
        found = self.store.describe()
        for job, part in by_records(known).items():
            if job not in found:
                ended = part.state in OUTCOMES
                reason = part.reason or "the API server does not have it any more"
                found[job] = Description(EngineState.ENDED if ended else EngineState.UNKNOWN, reason, part.ended)
        return found

    def earlier(self, asked: str) -> tuple[dict[int, JobsAnswer], dict[str, Description]]:
        """Return {node: answer} of the agents about jobs that the id `asked` can mean, and {job: description} of these jobs.

        Raises errors that keep the records of a pod from being read.
        """
        fleet = self.open(job=asked)
        gathered = fleet.ask(dict.fromkeys(fleet.agents, LIST_JOBS({"job": asked})))
        raise_all([error for error in gathered.failed.values() if not isinstance(error, NotFound)])
        recorded = by_records(gathered.ok)
        found = self.describe(gathered.ok).items()
        return gathered.ok, {job: one for job, one in found if job in recorded or can_mean(asked, job, one.asked, "")}

    def cause(self, job: str) -> tuple[str, int] | None:
        """Read the pods of a job once more, and return why the cluster has ended or not started them, None if it has not.

        With the exit code for that: see PodWatch.cause.
        """
        found = self.store.read_one(job)
        for pod in found.pods if found is not None else ():
            self._watch.take(pod)
        return self._watch.cause(job)

    def _why_ended(self, job: str) -> str | None:
        """Return why a job has ended, for a user; None if it has not, or if the API server does not answer.

        A job without objects has ended, too.
        """
        with contextlib.suppress(ClustertoolError):
            found = self.store.describe().get(job)
            if found is None:
                return "its objects were deleted"
            if found.state is EngineState.ENDED:
                return found.why
        return None

    def cancel(self, job: str, how: StopHow) -> Answers:
        """Have the agents in the job's pods end the ranks, then delete the workload, and wait until all objects are gone.

        No interrupt ends it. Pods without an agent get TERM by their deletion. No object left proves that no process is. With a
        sink the last records of the pods are read before. Returns {name of a node: its answer} of running pods. Raises
        Survivors if objects are left after the grace and more than a minute, and the error of a request.
        """
        with self.api.patiently():
            running = self._sort_pods(job, self.store.read_one(job))
            answers = self._stop(job, running, how)
            if self._followed:  # those that were placed leave their last records before they are deleted
                results = {pod: read_result(answers[host.name], job).state for pod, host in running.items()}
                self._await_ends([pod for pod, state in results.items() if state is not StopState.NEVER_STARTED])
            grace = _FORCED if how["force"] else None
            self.store.remove(job, how["grace"] + GRACE_MORE + _LEAVING, grace=grace)
        return answers

    def _stop(self, job: str, running: Mapping[str, Host], how: StopHow) -> dict[str, StopAnswer | ClustertoolError]:
        """Ask the agents in these pods to stop the job, 64 at a time, and return {name of the node: its answer}.

        Opens an agent in a pod that has none. running: {pod: host}. A node that cannot be asked gets a clean answer: the
        deletion of its pod proves that.
        """
        open_ = {agent.host.host: agent for agent in list(self.fleet.agents.values()) if agent.dead is None}

        def one(pod: str) -> StopAnswer:
            host, agent = running[pod], open_.get(pod)
            with contextlib.ExitStack() as opened:
                if agent is None:
                    link = opened.enter_context(contextlib.closing(PodLink(self.api, pod, host.name)))
                    agent = AgentClient.open(link, host, self.fleet.cluster)
                return agent.ask(stop_request(job, how), how["grace"] + STOPPING)

        pods = list(running)
        asked = each(pods, one, width=_CHANNELS, timeout=how["grace"] + STOPPING)
        clean: StopAnswer = {"jobs": {job: _CLEAN}}
        return {running[pod].name: asked.ok.get(number, clean) for number, pod in enumerate(pods)}

    def _await_ends(self, running: Collection[str]) -> None:
        """Wait up to 10 s for these pods to end, and restore the records of each that has ended. Errors of that are ignored."""
        end, left = time.monotonic() + _ENDING, set(running)
        while left and time.monotonic() < end:
            for pod in list(left):
                found = self.api.get("Pod", pod)
                if found is None or view(found).ended:
                    left.discard(pod)
                    with contextlib.suppress(ClustertoolError):
                        self._ended.restore(pod)
            time.sleep(_POLL)

    def release(self, job: str) -> None:
        """Have the agent of the job's node 0 release the node, which waits for the fetch of the output."""
        for agent in list(self.fleet.agents.values()):
            if not agent.host.here and self._ended.places.get(agent.host.host) == (job, 0):
                agent.ask(RELEASE({"job": job, "exact": True}))

    def pods(self, job: str) -> Sequence[JobPod]:
        """List the pods of a job, in the order of the nodes; those that are none of its nodes last."""
        found = [
            JobPod(seen.name, node_of_pod(pod), seen.host, seen.phase, seen.reason, seen.restarts, seen.sidecars)
            for pod in self.store.pods(job)
            for seen in [view(pod)]
        ]
        return sorted(found, key=lambda pod: (pod.node is None, pod.node or 0, pod.pod))

    def join_log(self, job: str) -> tuple[str, Sequence[str]]:
        """Return the name of the first failed pod's log, and a list of its last 20 lines without those of ranks and the record.

        Returns "" and () if no pod has failed. At most 64 KiB are read.
        """
        failed = (pod.name for pod in map(view, self.store.pods(job)) if pod.code > 0)
        pod = next(failed, "")
        if not pod:
            return "", ()
        lines = b"".join(self.api.log(pod, tail=_JOIN_LINES, limit=_JOIN_BYTES)).decode("utf-8", "replace").splitlines()
        return f"the log of pod {pod}", [line for line in lines if not line.startswith(("[", "{"))]

    def holds_output(self, job: str) -> bool:
        """Return whether the pod of the job's node 0 has not ended."""
        pods = [pod for pod, place in self._ended.places.items() if place == (job, 0)]
        found = [self.api.get("Pod", pod) for pod in pods]
        return any(pod is not None and not view(pod).ended for pod in found)

    def without_files(self, job: str, error: NotFound) -> NotFound:
        """Return `error` if a pod of the job runs; else an error that its files are gone, or on a volume."""
        if any(pod.phase == "Running" and not pod.ended for pod in map(view, self.store.pods(job))):
            return error
        fix = f"{PROGRAM} run has fetched the output if it was attached; KUBERNETES['output'] puts it on a volume"
        if self._output:
            fix = f"the output of its nodes is on {self._output}, in folders whose names begin with JOB{job}"
        return NotFound("its pod has ended, and its files with it", fix, error.node)

    def forget(self, jobs: Collection[str]) -> None:
        """Delete the objects of these jobs, and the user's orphaned Secrets and Services, with a message for each orphan."""
        for job in jobs:
            self.store.remove(job, GRACE_MORE + _LEAVING, self.caller.check)
        for one in self.store.orphans():
            kind, about = str(one["kind"]), fields(one, "metadata")
            if self.api.delete(kind, text(about, "name"), uid=text(about, "uid")):
                self.caller.note(f"removed {kind.lower()} {text(about, 'name')}: its job is gone")

    def check(self, settings: Mapping[str, object], deep: bool) -> Examined:
        """Check the API server, and what a job with these settings needs there; the cluster counts as one node.

        deep has no effect. Raises UsageError for wrong settings, ClustertoolError if the server does not answer.
        """
        cluster = self.fleet.cluster
        read = read_settings(cluster.settings, None, settings, cluster.where)
        where = Host(0, self.api.where, name=self.api.where)
        findings = tuple(check_cluster(self.api, read))
        return Examined(replace(cluster, hosts=(where,)), {}, findings, {})

    def nodes(self) -> Sequence[EngineNode]:
        """List the nodes of the cluster. Raises AuthError without the right to list them."""
        try:
            return [node_view(node) for node in self.api.list_objects("Node")]
        except AuthError as error:
            fix = "ask for the right to list nodes: docs/kubernetes.md has a ClusterRole for it"
            raise AuthError(error.what, fix, error.node) from None


class PodLink:
    """The link to a pod, whose channels run programs there. pod: its name in the API server. node: what messages call it.

    api: may be used by several threads.
    """

    noise = b""
    no_shell = ("/bin/sh did not start in the container", _NO_SHELL)
    root_group = IN_POD

    def __init__(self, api: ClusterApi, pod: str, node: str = "") -> None:
        self.pod, self.node = pod, node or pod
        self.times: Mapping[str, float] = {}
        self._api, self._lock = api, threading.Lock()
        self._channels: list[PodChannel] = []
        self._closed = False

    @property
    def alive(self) -> bool:
        """Whether close() was not called: each channel is a connection of its own."""
        return not self._closed

    @property
    def waiting(self) -> int:
        """Bytes that wait to be sent on all channels."""
        return sum(channel.waiting for channel in list(self._channels))

    def channel(self, *, window: int = 0, timeout: float = 10.0) -> PodChannel:
        """Open a channel to a POSIX shell in the pod.

        In an image without /bin/sh the channel ends with 126 or 127, and its stderr has the reason.
        """
        return self.program(this_machine.SHELL, timeout=timeout)

    def program(self, argv: Sequence[str], *, window: int = 0, timeout: float = 10.0) -> PodChannel:
        """Run a program in the pod, and return the channel to it, which is closed if the link is. See ClusterApi.channel.

        timeout: of the channel, in seconds.
        """
        channel = self._api.channel(self.pod, argv)
        channel.settimeout(timeout)
        with self._lock:
            self._channels = [one for one in self._channels if not one.closed]
            self._channels.append(channel)
            if self._closed:  # meanwhile
                channel.close()
        return channel

    def lost(self, why: str) -> Unreachable:
        """Create the error for a lost channel to the pod."""
        return Unreachable(why, f"is the pod {self.pod} still running?", self.node)

    def close(self) -> None:
        """Close all channels, also those that are opened later."""
        with self._lock:
            self._closed = True
            channels = list(self._channels)
        for channel in channels:
            channel.close()


def _no_records(node: str) -> NotFound:
    """Create the error for a pod that was deleted, and its records with it."""
    why = "Kubernetes deletes the pods that still run when another one has failed"
    fix = f"{why}: {PROGRAM} run --log-dir DIR keeps the logs"
    return NotFound("its pod was deleted, and its records with it", fix, node)
