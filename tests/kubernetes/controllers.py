"""The controllers of the test API server: Indexed Job, JobSet, garbage collection, scheduler, and the kubelets of all nodes."""

from __future__ import annotations

import copy
import threading
import uuid
from typing import Any

from tests.kubernetes.api_store import FOREGROUND, OVER, ApiError, Obj, Store, now, owners, parse_quantity, requested
from tests.kubernetes.containers import Container, Runtime

JOB, SETS = "batch.kubernetes.io", "jobset.sigs.k8s.io"
INDEX = f"{JOB}/job-completion-index"
ENDS = {"FailureTarget": "Failed", "SuccessCriteriaMet": "Complete"}  # conditions of a Job


class Controllers:
    """One thread compares the objects with what they ask for, after each change. Switches of failures are plain fields."""

    def __init__(self, store: Store, runtime: Runtime, nodes: int = 3) -> None:
        self.store, self.runtime = store, runtime
        self.containers: dict[str, Container] = {}  # by the uids of pods
        self.killed: dict[str, str] = {}  # uid: the reason of a kill by the kubelet
        self.failed: dict[str, set[str]] = {}  # uid of a Job: those of its pods that have failed
        self.bad_images: set[str] = set()
        self.lost: set[str] = set()  # nodes
        self.sidecars: list[str] = []  # containers that an admission webhook adds to pods
        self.errors: list[str] = []
        self.ended = False
        for number in range(nodes):
            have = {"cpu": "8", "memory": "16Gi", "nvidia.com/gpu": "0"}
            status = {"allocatable": have, "conditions": [condition("Ready", "KubeletReady")]}
            store.create("Node", "", {"metadata": {"name": f"worker-{number}"}, "spec": {}, "status": status})
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.ended = True
        self.thread.join(30)
        for container in self.containers.values():
            container.signal(kill=True)

    # -- the loop

    def _run(self) -> None:
        version = 0
        while not self.ended:
            with self.store.changed:
                if version == self.store.version:
                    self.store.changed.wait(0.1)
                version = self.store.version
            for kind, work in (("JobSet", self._jobset), ("Job", self._job), ("Pod", self._pod)):
                for obj in self.store.list(kind):
                    try:
                        work(obj)
                    except Exception as error:  # noqa: BLE001 - shown by the test that ends
                        self.errors.append(f"{kind} {obj['metadata']['name']}: {error!r}")
            self._collect()
            self.runtime.publish(self.store.list("Service"), self.store.list("Pod"))

    def _status(self, obj: Obj, **fields: Any) -> None:
        self.store.change(obj, lambda o: o["status"].update(fields))

    def _delete(self, obj: Obj, **options: Any) -> None:
        try:
            self.store.delete(obj["kind"], obj["metadata"].get("namespace", ""), obj["metadata"]["name"], options)
        except ApiError:
            return  # another request was first

    def _collect(self) -> None:
        """Delete what has no owner any more, and end deletions in the foreground."""
        with self.store.changed:
            every = {obj["metadata"]["uid"]: obj for obj in self.store.objects.values()}
        foreground = {uid for uid, obj in every.items() if FOREGROUND in obj["metadata"].get("finalizers", ())}
        blocked = {one["uid"] for obj in every.values() for one in owners(obj) if one.get("blockOwnerDeletion")}
        for uid, obj in every.items():
            living = [one["uid"] for one in owners(obj) if one["uid"] in every]
            if owners(obj) and foreground.issuperset(living) and "deletionTimestamp" not in obj["metadata"]:
                self._delete(obj, propagationPolicy="Foreground" if living else "Background")
            if uid in foreground - blocked:
                self.store.change(obj, lambda o: o["metadata"].update(finalizers=[]))

    # -- Indexed Job

    def _job(self, job: Obj) -> None:
        spec, status, meta = job["spec"], job["status"], job["metadata"]
        if has(job, "Complete", "Failed") or "deletionTimestamp" in meta:
            return
        pods = self.store.owned("Pod", job)
        living = [pod for pod in pods if pod["status"]["phase"] not in OVER]
        active = [pod for pod in living if "deletionTimestamp" not in pod["metadata"]]
        done = {_index(pod) for pod in pods if pod["status"]["phase"] == "Succeeded"}
        failed = self.failed.setdefault(meta["uid"], set())
        end = next((one for one in status.get("conditions", ()) if one["type"] in ENDS), None)
        if end is None and not spec.get("suspend"):  # a pod that is deleted has failed, too
            others = [pod for pod in pods if pod not in active and pod["status"]["phase"] != "Succeeded"]
            failed.update(pod["metadata"]["uid"] for pod in others)
        if end is None and len(failed) > spec.get("backoffLimit", 6):
            end = condition("FailureTarget", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
        elif end is None and len(done) >= spec["completions"]:
            end = condition("SuccessCriteriaMet", "CompletionsReached", "Reached expected number of succeeded pods")
        conditions = [end] if end else []
        if end or spec.get("suspend"):
            for pod in active:
                self._delete(pod)
        else:
            self._create_pods(job, spec["completions"], {_index(pod) for pod in active} | done)
        if end and not living:
            conditions.append(condition(ENDS[end["type"]], end["reason"], end["message"]))
        elif spec.get("suspend") and not end:
            conditions = status.get("conditions") or [condition("Suspended", "JobSuspended", "Job suspended")]
        counts = {"active": len(active), "failed": len(failed), "succeeded": len(done)}
        self._status(job, conditions=conditions, startTime=status.get("startTime", now()), **counts)

    def _create_pods(self, job: Obj, wanted: int, have: set[int]) -> None:
        for index in range(wanted):
            if index not in have:
                pod = _pod_of(job, index)
                pod["spec"]["containers"] += [{"name": name, "image": "mesh:1"} for name in self.sidecars]
                try:
                    self.store.create("Pod", job["metadata"]["namespace"], pod)
                except ApiError as error:
                    self.store.event(job, "FailedCreate", f"Error creating: {error}")
                    return

    # -- JobSet

    def _jobset(self, jobset: Obj) -> None:
        """All replicated Jobs must succeed, and one that fails ends the others."""
        meta, spec = jobset["metadata"], jobset["spec"]
        if "deletionTimestamp" in meta or has(jobset, "Completed", "Failed"):
            return
        subdomain = spec["network"]["subdomain"]
        if self.store.find("Service", meta["namespace"], subdomain) is None:
            service = {"spec": {"clusterIP": "None", "selector": {f"{SETS}/jobset-name": meta["name"]}}}
            service["metadata"] = {"name": subdomain, "ownerReferences": [_owner(jobset)]}
            self.store.create("Service", meta["namespace"], service)
        have = {job["metadata"]["name"]: job for job in self.store.owned("Job", jobset)}
        jobs = []
        for replicated in spec["replicatedJobs"]:
            for number in range(replicated["replicas"]):
                name = f"{meta['name']}-{replicated['name']}-{number}"
                jobs.append(have.get(name) or self._create_job(jobset, replicated, number, name))
        failed = [job["metadata"]["name"] for job in jobs if has(job, "Failed")]
        if failed:
            why = f"jobset failed due to one or more job failures (first failed job: {failed[0]})"
            self._status(jobset, conditions=[condition("Failed", "FailedJobs", why)])
            for job in jobs:
                if not has(job, "Complete", "Failed"):
                    self._delete(job, propagationPolicy="Foreground")
        elif all(has(job, "Complete") for job in jobs):
            self._status(jobset, conditions=[condition("Completed", "AllJobsCompleted")])

    def _create_job(self, jobset: Obj, replicated: Obj, number: int, name: str) -> Obj:
        job = copy.deepcopy(replicated["template"])
        labels = {f"{SETS}/jobset-name": jobset["metadata"]["name"], f"{SETS}/replicatedjob-name": replicated["name"]}
        labels[f"{SETS}/job-index"] = str(number)
        for one in (job, job["spec"]["template"]):
            one.setdefault("metadata", {}).setdefault("labels", {}).update(labels)
        job["spec"]["template"]["spec"]["subdomain"] = jobset["spec"]["network"]["subdomain"]
        job["spec"]["suspend"] = bool(jobset["spec"].get("suspend"))
        job["metadata"].update(name=name, ownerReferences=[_owner(jobset)])
        return self.store.create("Job", jobset["metadata"]["namespace"], job)

    # -- scheduler and kubelets

    def _pod(self, pod: Obj) -> None:
        meta, spec, status = pod["metadata"], pod["spec"], pod["status"]
        container = self.containers.get(meta["uid"])
        if not spec.get("nodeName"):
            self._schedule(pod)
        elif spec["nodeName"] in self.lost:
            return
        elif status["phase"] in OVER:
            if meta.get("deletionGracePeriodSeconds"):
                self._delete(pod, gracePeriodSeconds=0)
        elif container is None:
            if "deletionTimestamp" in meta:
                self._status(pod, phase="Failed")
            else:
                self._start(pod)
        elif (code := container.poll()) is not None:
            runs_on = len(spec["containers"]) > 1 and "deletionTimestamp" not in meta
            if runs_on and "terminated" in status["containerStatuses"][0]["state"]:
                return
            reason = self.killed.get(meta["uid"]) or ("Error" if code else "Completed")
            ended = {"exitCode": code, "reason": reason, "startedAt": status["startTime"], "finishedAt": now()}
            shown = self._container(pod, terminated={**ended, "message": container.message()})
            conditions = [{**c, "status": "False"} if "Ready" in c["type"] else c for c in status["conditions"]]
            phase = "Running" if runs_on else "Failed" if code else "Succeeded"
            self._status(pod, phase=phase, containerStatuses=shown, conditions=conditions)
        elif "deletionTimestamp" in meta:
            container.signal(kill=now() > meta["deletionTimestamp"])

    def _schedule(self, pod: Obj) -> None:
        """Bind it to the node with the fewest pods of those that it fits on."""
        pods = [one for one in self.store.list("Pod") if one["status"]["phase"] not in OVER]
        fits, why = [], []
        for node in self.store.list("Node"):
            name, have = node["metadata"]["name"], node["status"]["allocatable"]
            there = [one for one in pods if one["spec"].get("nodeName") == name]
            used = {resource: sum(requested(one, resource) for one in (*there, pod)) for resource in have}
            short = [resource for resource, amount in have.items() if used[resource] > parse_quantity(amount)]
            if short:
                why.append(f"Insufficient {short[0]}")
            elif name not in self.lost:
                fits.append((len(there), name))
        if fits:
            self.store.change(pod, lambda o: o["spec"].update(nodeName=min(fits)[1]))
            self._status(pod, conditions=[condition("PodScheduled")])
        elif not pod["status"].get("conditions"):
            text = ", ".join(f"{why.count(one)} {one}" for one in dict.fromkeys(why))
            message = f"0/{len(self.store.list('Node'))} nodes are available: {text}."
            self._status(pod, conditions=[condition("PodScheduled", "Unschedulable", message, "False")])
            self.store.event(pod, "FailedScheduling", message)

    def _start(self, pod: Obj) -> None:
        """Start its container, unless a Secret or the image is not there."""
        namespace, image = pod["metadata"]["namespace"], pod["spec"]["containers"][0]["image"]
        volumes = {v["secret"]["secretName"]: v["name"] for v in pod["spec"].get("volumes") or () if "secret" in v}
        secrets = {name: self.store.find("Secret", namespace, name) for name in volumes}
        for name, secret in secrets.items():
            if secret is None:
                text = f'MountVolume.SetUp failed for volume "{volumes[name]}" : secret "{name}" not found'
                return self._wait(pod, "FailedMount", text, {"reason": "ContainerCreating"})
        if image in self.bad_images:
            waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}"'}
            return self._wait(pod, "Failed", f'Failed to pull image "{image}": not found', waiting)
        address = self.runtime.address(pod)
        placed = {**pod, "status": {**pod["status"], "podIP": address}}
        self.containers[pod["metadata"]["uid"]] = self.runtime.start(placed, secrets)
        conditions = [condition(kind) for kind in ("PodScheduled", "Initialized", "ContainersReady", "Ready")]
        shown = self._container(pod, running={"startedAt": now()})
        status = {"phase": "Running", "podIP": address, "startTime": now()}
        return self._status(pod, **status, conditions=conditions, containerStatuses=shown)

    def _wait(self, pod: Obj, reason: str, message: str, waiting: Obj) -> None:
        self.store.event(pod, reason, message)
        self._status(pod, containerStatuses=self._container(pod, waiting=waiting))

    def _container(self, pod: Obj, **state: Any) -> list[Obj]:
        """The state of its first container, and of sidecars, which run once it has started."""
        found = []
        for one in pod["spec"]["containers"]:
            same = {"name": one["name"], "image": one["image"], "imageID": "", "restartCount": 0}
            found.append({**same, "ready": "running" in state, "state": state, "lastState": {}})
            state = state if "waiting" in state else {"running": {"startedAt": now()}}
        return found


def condition(kind: str, reason: str = "", message: str = "", status: str = "True") -> Obj:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": now()}


def has(obj: Obj, *kinds: str) -> bool:
    return any(one["type"] in kinds and one["status"] == "True" for one in obj["status"].get("conditions", ()))


def _owner(obj: Obj) -> Obj:
    same = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "name": obj["metadata"]["name"]}
    return {**same, "uid": obj["metadata"]["uid"], "controller": True, "blockOwnerDeletion": True}


def _pod_of(job: Obj, index: int) -> Obj:
    meta, pod = job["metadata"], copy.deepcopy(job["spec"]["template"])
    mine, name = pod.setdefault("metadata", {}), f"{meta['name']}-{index}"
    labels = {f"{JOB}/controller-uid": meta["uid"], f"{JOB}/job-name": meta["name"], "job-name": meta["name"]}
    mine.setdefault("labels", {}).update(labels, **{INDEX: str(index)})
    mine.setdefault("annotations", {})[INDEX] = str(index)
    mine.update(name=f"{name}-{uuid.uuid4().hex[:5]}", ownerReferences=[_owner(job)])
    pod["spec"].setdefault("hostname", name)
    field = {"fieldRef": {"fieldPath": f"metadata.annotations['{INDEX}']"}}
    for container in pod["spec"]["containers"]:
        container.setdefault("env", []).append({"name": "JOB_COMPLETION_INDEX", "valueFrom": field})
    return pod


def _index(pod: Obj) -> int:
    return int(pod["metadata"]["annotations"][INDEX])
