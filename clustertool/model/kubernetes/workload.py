"""This module makes the manifests of a job: the workload in one of three dialects, its headless Service, and the Secret."""

from __future__ import annotations

import base64
from dataclasses import replace
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

from clustertool.errors import ConfigError, PreflightError
from clustertool.model.kubernetes.kubernetes_settings import KubernetesSettings
from clustertool.model.kubernetes.merged_template import Manifest
from clustertool.model.kubernetes.object_names import JOB_ID, JOB_LABEL, QUEUE_LABEL, job_hash, notes
from clustertool.model.kubernetes.pod_manifest import SECRET_KEY, WorkloadOrder, native_template, pod_template
from clustertool.model.kubernetes.pod_places import JOB, JOBSET, PADDLE_ROLES, PADDLEJOB, RolePods, groups

KEPT = 86400  # seconds that ended objects are kept
MOST_SECRET = 1_000_000  # bytes of a bundle; the API server takes 1 MiB of a Secret (core/v1, Secret)
# The operator's variables. Those of a manifest would have priority over its ConfigMap.
_OPERATORS = frozenset(
    "TRAINER_PORTS_NUM PADDLE_PORT PADDLE_PSERVERS_IP_PORT_LIST PADDLE_TRAINER_ENDPOINTS PADDLE_TRAINERS PADDLE_TRAINERS_NUM "
    "PADDLE_HETER_ENDPOINTS PADDLE_WITH_GLOO PADDLE_GLOO_RENDEZVOUS PADDLE_GLOO_HTTP_ENDPOINT POD_IP PADDLE_TRAINER_ID "
    "TRAINING_ROLE PADDLE_TRAINING_ROLE".split()
)


class Objects(NamedTuple):
    """service: None where the workload's controller makes one."""

    workload: Manifest
    service: Optional[Manifest]
    secret_name: str


def manifests(settings: KubernetesSettings, order: WorkloadOrder) -> Objects:
    """Make the objects without secrets, in the order of their creation. The API server checks them.

    Raises ConfigError for a template of pods that is none, or a job without an image.
    """
    made: Dict[str, Callable[[KubernetesSettings, WorkloadOrder], Manifest]]
    made = {JOB: _job, JOBSET: _jobset, PADDLEJOB: _paddlejob}
    workload = made[settings.dialect](settings, order)
    service = None if settings.dialect == JOBSET else _service(order)  # spec.network of a JobSet is one
    return Objects(workload, service, order.name)


def secret(order: WorkloadOrder, bundle: bytes) -> Manifest:
    """Make the Secret with the bundle. Raises PreflightError for a bundle that is too large."""
    if len(bundle) > MOST_SECRET:
        what = f"the bundle has {len(bundle)} bytes, and a Secret at most {MOST_SECRET}"
        raise PreflightError(what, 'send less, or take the workspace from a volume: workspace = "pvc:CLAIM/path"')
    data = {SECRET_KEY: base64.b64encode(bundle).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": _metadata(order), "type": "Opaque", "data": data}


def owned(manifest: Manifest, workload: Manifest) -> Manifest:
    """Make the manifest of an object that is deleted with the workload. workload: as the API server has created it."""
    owner = {
        "apiVersion": workload["apiVersion"],
        "kind": workload["kind"],
        "name": workload["metadata"]["name"],
        "uid": workload["metadata"]["uid"],
    }
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [owner]}}


def native(settings: KubernetesSettings, order: WorkloadOrder, commands: Mapping[str, Sequence[str]]) -> Manifest:
    """Make a PaddleJob whose containers run the user's commands with the environment of the operator. commands: by the roles.

    Variables of order.env that the operator sets are left out. Raises ConfigError.
    """
    env = tuple((name, value) for name, value in order.env if name not in _OPERATORS)
    given = replace(order, env=env)

    def template(group: RolePods) -> Manifest:
        return native_template(settings, given, group.role, list(commands[group.role]))

    return _paddlejob_of(settings, given, template)


def _metadata(order: WorkloadOrder) -> Manifest:
    made: Manifest = {"name": order.name, "labels": order.labels, "annotations": {JOB_ID: order.job_id}}
    return {**made, "namespace": order.namespace} if order.namespace else made


def _head(settings: KubernetesSettings, order: WorkloadOrder, version: str, kind: str) -> Manifest:
    """Make what each workload begins with."""
    made = _metadata(order)
    queue = {QUEUE_LABEL: settings.queue} if settings.queue and settings.dialect != PADDLEJOB else {}
    made["labels"] = {**settings.labels, **queue, **order.labels}
    made["annotations"] = {**settings.annotations, **notes(order.job_id, order.owner, order.about)}
    return {"apiVersion": version, "kind": kind, "metadata": made}


def _indexed(settings: KubernetesSettings, order: WorkloadOrder, group: RolePods) -> Manifest:
    return {
        "completions": group.size,
        "parallelism": group.size,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": pod_template(settings, order, group),
    }


def _job(settings: KubernetesSettings, order: WorkloadOrder) -> Manifest:
    (group,) = groups(JOB, settings.nodes)
    spec = {"ttlSecondsAfterFinished": KEPT, **_indexed(settings, order, group)}
    return {**_head(settings, order, "batch/v1", "Job"), "spec": spec}


def _jobset(settings: KubernetesSettings, order: WorkloadOrder) -> Manifest:
    """Make a JobSet in which all roles must succeed: the coordinator ends pservers when trainers are done.

    With the trainers alone as its aim the controller would delete pservers' pods, and their logs.
    """
    jobs: List[Manifest] = [
        {"name": group.role, "replicas": 1, "template": {"spec": _indexed(settings, order, group)}}
        for group in groups(JOBSET, settings.nodes)
    ]
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": order.name},
        "successPolicy": {"operator": "All"},
        "failurePolicy": {"maxRestarts": 0},
        "ttlSecondsAfterFinished": KEPT,
        "replicatedJobs": jobs,
    }
    return {**_head(settings, order, "jobset.x-k8s.io/v1alpha2", "JobSet"), "spec": spec}


def _paddlejob(settings: KubernetesSettings, order: WorkloadOrder) -> Manifest:
    if settings.paddlejob.get("image_command"):
        what = (
            "KUBERNETES: paddlejob.image_command: only the containers of export --native run the command of the image"
        )
        raise ConfigError(what, "leave it out, or export the job with --native")
    return _paddlejob_of(settings, order, lambda group: pod_template(settings, order, group))


def _paddlejob_of(
    settings: KubernetesSettings, order: WorkloadOrder, template: Callable[[RolePods], Manifest]
) -> Manifest:
    """Make a PaddleJob. Pods stay when the job is over, unless the settings have it otherwise: their logs have its records."""
    own = settings.paddlejob
    spec: Manifest = {
        "cleanPodPolicy": own.get("clean_pod_policy", "Never"),
        "intranet": own.get("intranet", "PodIP"),
    }
    if "with_gloo" in own:
        spec["withGloo"] = own["with_gloo"]
    policy = {"queue": settings.queue, "priorityClass": settings.priority_class if settings.queue else ""}
    if settings.queue:  # of Volcano: Kueue does not know this kind
        spec["schedulingPolicy"] = {name: value for name, value in policy.items() if value}
    for group in groups(PADDLEJOB, settings.nodes):
        spec[PADDLE_ROLES[group.role]] = {"replicas": group.size, "template": template(group)}
    return {**_head(settings, order, "batch.paddlepaddle.org/v1", "PaddleJob"), "spec": spec}


def _service(order: WorkloadOrder) -> Manifest:
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # pods meet before they are ready
        "selector": {JOB_LABEL: job_hash(order.job_id)},
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(order), "spec": spec}
