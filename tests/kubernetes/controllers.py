"""The controllers of the test API server: Indexed Job, JobSet, garbage collection, and the kubelets of all nodes."""

from __future__ import annotations

import copy
import threading
import time
import uuid
from calendar import timegm
from typing import Any, Protocol

from tests.kubernetes.api_store import FOREGROUND, ApiError, Obj, Store, now, quantity, requested

JOB = "batch.kubernetes.io"
TRACKING = f"{JOB}/job-tracking"
SETS = "jobset.sigs.k8s.io"
OVER = ("Succeeded", "Failed")


class Container(Protocol):
    """A process that is the first one of a pod."""

    def poll(self) -> int | None: ...
    def signal(self, kill: bool) -> None: ...
    def message(self) -> str: ...


class Runtime(Protocol):
    def start(self, pod: Obj, secrets: dict[str, Obj]) -> Container: ...
    def address(self, pod: Obj) -> str: ...
    def names(self, published: list[tuple[str, list[str]]]) -> None: ...


def seconds(stamp: str) -> float:
    return timegm(time.strptime(stamp, "%Y-%m-%dT%H:%M:%SZ"))


def condition(kind: str, reason: str = "", message: str = "", status: str = "True") -> Obj:
    return {"type": kind, "status": status, "reason": reason, "message": message, "lastTransitionTime": now()}


def has(obj: Obj, *kinds: str) -> bool:
    return any(c["type"] in kinds and c["status"] == "True" for c in obj["status"].get("conditions", ()))


class Controllers:
    """One thread compares the objects with what they ask for, after each change. Switches of failures are plain fields."""

    def __init__(self, store: Store, runtime: Runtime, nodes: int = 3, gpus: int = 0) -> None:
        self.store, self.runtime = store, runtime
        self.containers: dict[str, Container] = {}
        self.killed: dict[str, str] = {}  # uid: the reason of a kill by the kubelet
        self.bad_images: set[str] = set()
        self.lost: set[str] = set()
        self.errors: list[str] = []
        self.ended = False
        for number in range(nodes):
            have = {"cpu": "8", "memory": "16Gi", "pods": "110", **({"nvidia.com/gpu": str(gpus)} if gpus else {})}
            status = {"allocatable": have, "capacity": have, "conditions": [condition("Ready", "KubeletReady")]}
            name = f"worker-{number}"
            meta = {"name": name, "labels": {"kubernetes.io/hostname": name}}
            store.create("Node", "", {"metadata": meta, "spec": {}, "status": status})
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def close(self) -> None:
        self.ended = True
        self.thread.join(30)
        for container in self.containers.values():
            container.signal(kill=True)

    # -- failures

    def kill(self, pod: Obj, reason: str) -> None:
        """OOMKilled."""
        self.killed[pod["metadata"]["uid"]] = reason
        self.containers[pod["metadata"]["uid"]].signal(kill=True)

    def evict(self, pod: Obj) -> None:
        why = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi."
        gone = condition("DisruptionTarget", "TerminationByKubelet", why)
        self._status(pod, reason="Evicted", message=why, conditions=[*pod["status"]["conditions"], gone])
        self.containers[pod["metadata"]["uid"]].signal(kill=True)

    def preempt(self, pod: Obj) -> None:
        self._disrupt(
            pod, "PreemptionByScheduler", "default-scheduler: preempting to accommodate a higher priority pod"
        )

    def lose(self, node: str) -> None:
        """The node's kubelet answers no more; its pods are deleted by the taint at once, but nothing proves their end."""
        self.lost.add(node)
        down = condition("Ready", "NodeStatusUnknown", "Kubelet stopped posting node status.", "Unknown")
        self.store.update("Node", "", node, lambda o: o["status"].update(conditions=[down]))
        for pod in self.store.list("Pod", fields=f"spec.nodeName={node}"):
            if (container := self.containers.get(pod["metadata"]["uid"])) is not None:
                container.signal(kill=True)
                self._disrupt(pod, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")

    def _disrupt(self, pod: Obj, reason: str, message: str) -> None:
        self._status(pod, conditions=[*pod["status"]["conditions"], condition("DisruptionTarget", reason, message)])
        self.store.delete("Pod", pod["metadata"]["namespace"], pod["metadata"]["name"])

    # -- the loop

    def _run(self) -> None:
        version = 0
        while not self.ended:
            with self.store.changed:
                if version == self.store.version:
                    self.store.changed.wait(0.05)
                version = self.store.version
            for kind, work in (("JobSet", self._jobset), ("Job", self._job), ("Pod", self._pod)):
                for obj in self.store.list(kind):
                    try:
                        work(obj)
                    except Exception as error:  # noqa: BLE001 - shown by the test that ends
                        self.errors.append(f"{kind} {obj['metadata']['name']}: {error!r}")
            self._collect()
            self._publish()

    def _status(self, obj: Obj, **fields: Any) -> None:
        self.store.status(obj, **fields)

    def _collect(self) -> None:
        """Delete what has no owner any more; end deletions in the foreground."""
        every = list(self.store.objects.values())
        uids = {obj["metadata"]["uid"]: obj for obj in every}
        for obj in every:
            meta = obj["metadata"]
            owners = meta.get("ownerReferences", ())
            dying = [FOREGROUND in uids[o["uid"]]["metadata"].get("finalizers", ()) for o in owners if o["uid"] in uids]
            if owners and all(dying) and "deletionTimestamp" not in meta:
                policy = {"propagationPolicy": "Foreground"} if dying else {"propagationPolicy": "Background"}
                self._delete(obj, **policy)
            if TRACKING in meta.get("finalizers", ()) and not any(o["uid"] in uids for o in owners):
                self._update(obj, lambda o: o["metadata"]["finalizers"].remove(TRACKING))
            if FOREGROUND in meta.get("finalizers", ()):
                blocked = [
                    o
                    for o in every
                    for r in o["metadata"].get("ownerReferences", ())
                    if r["uid"] == meta["uid"] and r.get("blockOwnerDeletion") and self._there(o)
                ]
                if not blocked:
                    self._update(obj, lambda o: o["metadata"]["finalizers"].remove(FOREGROUND))

    def _there(self, obj: Obj) -> bool:
        meta = obj["metadata"]
        return self.store.find(obj["kind"], meta.get("namespace", ""), meta["name"]) is not None

    def _update(self, obj: Obj, change: Any) -> None:
        self.store.update(obj["kind"], obj["metadata"].get("namespace", ""), obj["metadata"]["name"], change)

    def _delete(self, obj: Obj, **options: Any) -> None:
        try:
            self.store.delete(obj["kind"], obj["metadata"].get("namespace", ""), obj["metadata"]["name"], options)
        except ApiError:
            return  # another request was first

    # -- Indexed Job

    def _job(self, job: Obj) -> None:
        spec, status, meta = job["spec"], dict(job["status"]), job["metadata"]
        pods = self.store.owned("Pod", job)
        count = {"failed": status.get("failed", 0), "done": set(_indexes(status.get("completedIndexes", "")))}
        for pod in pods:
            gone = pod["metadata"].get("deletionTimestamp")
            phase = pod["status"]["phase"]
            if TRACKING in pod["metadata"].get("finalizers", ()) and (phase in OVER or gone):
                if phase == "Succeeded":
                    count["done"].add(_index(pod))
                else:
                    count["failed"] += 1
                self._update(pod, lambda o: o["metadata"]["finalizers"].remove(TRACKING))
        if has(job, "Complete", "Failed"):
            self._expire(job)
            return
        active = [p for p in pods if p["status"]["phase"] not in OVER and not p["metadata"].get("deletionTimestamp")]
        ending = [p for p in pods if p["status"]["phase"] not in OVER and p["metadata"].get("deletionTimestamp")]
        conditions = [c for c in status.get("conditions", ()) if c["type"] != "Suspended"]
        kinds = {c["type"] for c in conditions}
        wanted = spec.get("completions", spec.get("parallelism", 1))
        ended: tuple[str, str, str] | None = None
        if "FailureTarget" in kinds or count["failed"] > spec.get("backoffLimit", 6):
            ended = ("Failed", "BackoffLimitExceeded", "Job has reached the specified backoff limit")
        elif len(count["done"]) >= wanted:
            ended = ("Complete", "CompletionsReached", "Reached expected number of succeeded pods")
        elif time.time() > seconds(status.get("startTime", now())) + spec.get("activeDeadlineSeconds", 1 << 30):
            ended = ("Failed", "DeadlineExceeded", "Job was active longer than specified deadline")
        if ended and not meta.get("deletionTimestamp"):
            first = "FailureTarget" if ended[0] == "Failed" else "SuccessCriteriaMet"
            if first not in kinds:
                conditions.append(condition(first, *ended[1:]))
            for pod in active:
                self._delete(pod)
            if not active and not ending:
                conditions.append(condition(*ended))
                if ended[0] == "Complete":
                    status["completionTime"] = now()
                self.store.event(job, "Completed" if ended[0] == "Complete" else ended[1], ended[2], "Normal")
        elif spec.get("suspend"):
            for pod in active:
                self._delete(pod)
            conditions.append(condition("Suspended", "JobSuspended", "Job suspended"))
        elif not meta.get("deletionTimestamp"):
            status.setdefault("startTime", now())
            have = {_index(pod) for pod in active} | count["done"]
            for index in [i for i in range(wanted) if i not in have][: spec.get("parallelism", 1) - len(active)]:
                try:
                    self.store.create("Pod", meta["namespace"], _pod_of(job, index))
                except ApiError as error:
                    self.store.event(job, "FailedCreate", f"Error creating: {error}")
                    break
        ready = len([p for p in active if p["status"]["phase"] == "Running"])
        status.update(active=len(active), ready=ready, terminating=len(ending), failed=count["failed"])
        status.update(succeeded=len(count["done"]), conditions=conditions)
        if count["done"]:
            status["completedIndexes"] = ",".join(map(str, sorted(count["done"])))
        if [c["type"] for c in conditions] == [c["type"] for c in job["status"].get("conditions", ())]:
            status["conditions"] = job["status"].get("conditions", [])
        self._update(job, lambda o: o.update(status=status))

    def _expire(self, obj: Obj) -> None:
        keep = obj["spec"].get("ttlSecondsAfterFinished")
        ended = max(seconds(c["lastTransitionTime"]) for c in obj["status"]["conditions"])
        if keep is not None and time.time() > ended + keep and "deletionTimestamp" not in obj["metadata"]:
            self._delete(obj, propagationPolicy="Foreground")

    # -- JobSet

    def _jobset(self, jobset: Obj) -> None:
        meta, spec = jobset["metadata"], jobset["spec"]
        jobs = {job["metadata"]["name"]: job for job in self.store.owned("Job", jobset)}
        if meta.get("deletionTimestamp"):
            return
        if has(jobset, "Completed", "Failed"):
            self._expire(jobset)
            return
        network = spec.get("network") or {}
        subdomain = network.get("subdomain") or meta["name"]
        if network.get("enableDNSHostnames", True) and not self.store.find("Service", meta["namespace"], subdomain):
            service = {"clusterIP": "None", "selector": {f"{SETS}/jobset-name": meta["name"]}}
            service["publishNotReadyAddresses"] = network.get("publishNotReadyAddresses", True)
            named = {"name": subdomain, "ownerReferences": [_owner(jobset)]}
            self.store.create("Service", meta["namespace"], {"metadata": named, "spec": service})
        rows, failed, pending = [], [], []
        policy = spec.get("successPolicy") or {}
        for replicated in spec["replicatedJobs"]:
            ours = []
            for number in range(replicated.get("replicas", 1)):
                name = f"{meta['name']}-{replicated['name']}-{number}"
                if name not in jobs:
                    jobs[name] = self._part(jobset, replicated, number, name, subdomain)
                ours.append(jobs[name])
            ready = [j for j in ours if j["status"].get("ready", 0) >= j["spec"].get("parallelism", 1)]
            row = {"name": replicated["name"], "ready": len(ready), "active": len(ours), "suspended": 0}
            done = [job for job in ours if has(job, "Complete")]
            bad = [job for job in ours if has(job, "Failed")]
            rows.append({**row, "succeeded": len(done), "failed": len(bad)})
            failed += bad
            if replicated["name"] in (policy.get("targetReplicatedJobs") or [replicated["name"]]):
                pending += [job for job in ours if job not in done]
        conditions: list[Obj] = []
        if failed:
            why = f"jobset failed due to one or more job failures (first failed job: {failed[0]['metadata']['name']})"
            conditions = [condition("Failed", "FailedJobs", why)]
        elif not pending or (policy.get("operator") == "Any" and any(row["succeeded"] for row in rows)):
            conditions = [condition("Completed", "AllJobsCompleted", "jobset completed successfully")]
        if conditions:
            for job in jobs.values():
                if not has(job, "Complete", "Failed"):
                    self._delete(job, propagationPolicy="Foreground")
            self._status(jobset, conditions=conditions, terminalState=conditions[0]["type"])
        self._status(jobset, replicatedJobsStatus=rows)

    def _part(self, jobset: Obj, replicated: Obj, number: int, name: str, subdomain: str) -> Obj:
        template = copy.deepcopy(replicated["template"])
        labels = {f"{SETS}/jobset-name": jobset["metadata"]["name"]}
        labels |= {f"{SETS}/replicatedjob-name": replicated["name"], f"{SETS}/job-index": str(number)}
        meta = template.setdefault("metadata", {})
        job = {**template["spec"], "suspend": bool(jobset["spec"].get("suspend"))}
        for one in (meta, job["template"].setdefault("metadata", {})):
            one["labels"] = {**(one.get("labels") or {}), **labels}
        job["template"]["spec"]["subdomain"] = subdomain
        meta.update(name=name, ownerReferences=[_owner(jobset)])
        return self.store.create("Job", jobset["metadata"]["namespace"], {"metadata": meta, "spec": job})

    # -- scheduler and kubelet

    def _pod(self, pod: Obj) -> None:
        meta, spec, status = pod["metadata"], pod["spec"], pod["status"]
        uid, container = meta["uid"], self.containers.get(meta["uid"])
        if not spec.get("nodeName"):
            if meta.get("deletionTimestamp"):
                self._delete(pod, gracePeriodSeconds=0)
            else:
                self._schedule(pod)
        elif spec["nodeName"] in self.lost:
            return
        elif status["phase"] in OVER:
            if meta.get("deletionGracePeriodSeconds"):
                self._delete(pod, gracePeriodSeconds=0)
        elif container is None:
            if meta.get("deletionTimestamp"):
                self._status(pod, phase="Failed")
            else:
                self._start(pod)
        elif (code := container.poll()) is not None:
            reason = self.killed.get(uid) or ("Completed" if code == 0 else "Error")
            message = container.message()
            ended = {
                "exitCode": code,
                "reason": reason,
                "finishedAt": now(),
                **({"message": message} if message else {}),
            }
            ended["startedAt"] = status["startTime"]
            conditions = [{**c, "status": "False"} if "Ready" in c["type"] else c for c in status["conditions"]]
            shown = self._container(pod, False, terminated=ended)
            self._status(pod, phase="Failed" if code else "Succeeded", containerStatuses=shown, conditions=conditions)
        elif meta.get("deletionTimestamp"):
            container.signal(kill=time.time() > seconds(meta["deletionTimestamp"]))

    def _schedule(self, pod: Obj) -> None:
        pods = [p for p in self.store.list("Pod") if p["status"]["phase"] not in OVER]
        selector, wants = pod["spec"].get("nodeSelector") or {}, ("cpu", "memory", "nvidia.com/gpu")
        fits, why = [], []
        for node in self.store.list("Node"):
            name, have = node["metadata"]["name"], node["status"]["allocatable"]
            there = [p for p in pods if p["spec"].get("nodeName") == name]
            short = [
                w
                for w in wants
                if requested(pod, w) + sum(requested(p, w) for p in there) > quantity(have.get(w, 0))
                and requested(pod, w)
            ]
            if not selector.items() <= node["metadata"]["labels"].items():
                why.append("node(s) didn't match Pod's node affinity/selector")
            elif short:
                why.append(f"Insufficient {short[0]}")
            elif name not in self.lost:
                fits.append((len(there), name))
        if fits:
            bound = [condition("PodScheduled")]
            node_name = min(fits)[1]
            self._update(pod, lambda o: (o["spec"].update(nodeName=node_name), o["status"].update(conditions=bound)))
            return
        text = ", ".join(f"{why.count(one)} {one}" for one in dict.fromkeys(why))
        message = f"0/{len(self.store.list('Node'))} nodes are available: {text}."
        if not has(
            {"status": {"conditions": [{**c, "status": "True"} for c in pod["status"].get("conditions", ())]}},
            "PodScheduled",
        ):
            self._status(pod, conditions=[condition("PodScheduled", "Unschedulable", message, "False")])
            self.store.event(pod, "FailedScheduling", message)

    def _start(self, pod: Obj) -> None:
        meta, secrets = pod["metadata"], {}
        waiting = {"reason": "ContainerCreating"}
        image = pod["spec"]["containers"][0].get("image", "")
        for volume in pod["spec"].get("volumes") or ():
            if "secret" in volume:
                name = volume["secret"]["secretName"]
                if (found := self.store.find("Secret", meta["namespace"], name)) is not None:
                    secrets[name] = found
                else:
                    text = f'MountVolume.SetUp failed for volume "{volume["name"]}" : secret "{name}" not found'
                    self.store.event(pod, "FailedMount", text)
                    self._status(pod, containerStatuses=self._container(pod, False, waiting=waiting))
                    return
        if image in self.bad_images:
            waiting = {"reason": "ImagePullBackOff", "message": f'Back-off pulling image "{image}"'}
            self.store.event(pod, "Failed", f'Failed to pull image "{image}": not found')
            self._status(pod, containerStatuses=self._container(pod, False, waiting=waiting))
            return
        address = self.runtime.address(pod)
        pod = copy.deepcopy(pod)
        pod["status"]["podIP"] = address
        self.containers[meta["uid"]] = self.runtime.start(pod, secrets)
        kinds = ("PodScheduled", "Initialized", "ContainersReady", "Ready")
        shown = self._container(pod, True, running={"startedAt": now()})
        more = {"podIP": address, "podIPs": [{"ip": address}], "hostIP": "10.0.0.1", "startTime": now()}
        self._status(pod, phase="Running", conditions=[condition(k) for k in kinds], containerStatuses=shown, **more)

    def _container(self, pod: Obj, ready: bool, **state: Any) -> list[Obj]:
        one = pod["spec"]["containers"][0]
        same = {"name": one["name"], "image": one.get("image", ""), "imageID": "", "restartCount": 0}
        return [{**same, "ready": ready, "started": ready, "state": state, "lastState": {}}]

    def _publish(self) -> None:
        """The names that headless Services give to pods."""
        found = []
        for service in self.store.list("Service"):
            namespace, name = service["metadata"]["namespace"], service["metadata"]["name"]
            selector = ",".join(f"{k}={v}" for k, v in (service["spec"].get("selector") or {}).items())
            for pod in self.store.list("Pod", namespace, selector):
                spec, address = pod["spec"], pod["status"].get("podIP")
                if address and spec.get("subdomain") == name and spec.get("hostname"):
                    short = f"{spec['hostname']}.{name}"
                    ends = ("", f".{namespace}", f".{namespace}.svc", f".{namespace}.svc.cluster.local")
                    found.append((address, [f"{short}{end}" for end in ends]))
        self.runtime.names(found)


def _owner(obj: Obj) -> Obj:
    meta = obj["metadata"]
    same = {"apiVersion": obj["apiVersion"], "kind": obj["kind"], "name": meta["name"], "uid": meta["uid"]}
    return {**same, "controller": True, "blockOwnerDeletion": True}


def _pod_of(job: Obj, index: int) -> Obj:
    meta, pod = job["metadata"], copy.deepcopy(job["spec"]["template"])
    mine, key = pod.setdefault("metadata", {}), f"{JOB}/job-completion-index"
    labels = {f"{JOB}/controller-uid": meta["uid"], f"{JOB}/job-name": meta["name"], "job-name": meta["name"]}
    mine["labels"] = {**(mine.get("labels") or {}), **labels, "controller-uid": meta["uid"], key: str(index)}
    mine["annotations"] = {**(mine.get("annotations") or {}), key: str(index)}
    name = f"{meta['name']}-{index}"
    mine.update(name=f"{name}-{uuid.uuid4().hex[:5]}", finalizers=[TRACKING], ownerReferences=[_owner(job)])
    pod["spec"].setdefault("hostname", name)
    field = {"fieldRef": {"fieldPath": f"metadata.annotations['{key}']"}}
    for container in pod["spec"]["containers"]:
        container["env"] = [*(container.get("env") or []), {"name": "JOB_COMPLETION_INDEX", "valueFrom": field}]
    return pod


def _index(pod: Obj) -> int:
    return int(pod["metadata"]["annotations"][f"{JOB}/job-completion-index"])


def _indexes(text: str) -> list[int]:
    return [int(one) for one in text.split(",") if one]
