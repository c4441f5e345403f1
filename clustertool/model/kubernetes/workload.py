"""This module makes the manifests of a job: the workload in one of three dialects, its headless Service, and the Secret."""

from __future__ import annotations

import base64
import posixpath
import re
from dataclasses import dataclass, field, replace
from typing import Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence, Tuple

from clustertool.errors import ConfigError, PreflightError
from clustertool.model.kubernetes import object_names
from clustertool.model.kubernetes.api_objects import Manifest, fields, items, text
from clustertool.model.kubernetes.kubernetes_settings import UNLIMITED, KubernetesSettings
from clustertool.model.kubernetes.pod_places import FIRST_LABEL, JOB, JOBSET, PADDLE_ROLES, PADDLEJOB, RolePods, groups
from clustertool.model.kubernetes.pod_reasons import CONTAINER
from clustertool.model.kubernetes.pod_variables import FIRST_NODE, POD_IP

# The key by which entries of two lists are the same. Entries of other lists are added to each other.
_KEYS = {**dict.fromkeys(("containers", "volumes", "env", "imagePullSecrets"), "name"), "volumeMounts": "mountPath"}
_WHOLE = ("command", "args")  # lists that are replaced
# Where the user's value has priority, and null removes ours: rules of a cluster, or the user of an image, need other ones.
_OF_USER = ("securityContext",)
SECRET_FOLDER, SECRET_KEY = "/etc/clustertool", "bundle.pyz"
ROOT = "/clustertool"  # ROOT_DIR in a pod, where conf.py has one in the home of a user
GRACE_MORE = 20  # seconds that a pod has beyond GRACE of its ranks
_ROOT_VOLUME = "clustertool-root"
KEPT = 86400  # seconds that ended objects are kept
MOST_SECRET = 1_000_000  # bytes of a bundle; the API server takes 1 MiB of a Secret (core/v1, Secret)
# The operator's variables. Those of a manifest would have priority over its ConfigMap.
_OPERATORS = """TRAINER_PORTS_NUM PADDLE_PORT PADDLE_PSERVERS_IP_PORT_LIST PADDLE_TRAINER_ENDPOINTS PADDLE_TRAINERS
    PADDLE_TRAINERS_NUM PADDLE_HETER_ENDPOINTS PADDLE_WITH_GLOO PADDLE_GLOO_RENDEZVOUS PADDLE_GLOO_HTTP_ENDPOINT POD_IP
    PADDLE_TRAINER_ID TRAINING_ROLE PADDLE_TRAINING_ROLE""".split()


@dataclass(frozen=True)
class WorkloadOrder:
    """What the objects of a job have besides the settings.

    image: of CONTAINER, "" for that of pod_template. python: the interpreter in it. root_dir: ROOT_DIR of conf.py. grace:
    seconds. template: the content of pod_template. env: of the container. pull: imagePullPolicy, "" for the default.
    given_name: of the workload, "" for one of the job's id.
    """

    job_id: str
    owner: str
    image: str = ""
    python: str = "python3"
    root_dir: str = ""
    grace: float = 10.0
    about: object_names.JobAbout = object_names.JobAbout()
    template: Manifest = field(default_factory=dict, hash=False)
    env: Tuple[Tuple[str, str], ...] = ()
    pull: str = ""
    namespace: str = ""
    given_name: str = ""

    @property
    def name(self) -> str:
        """The name of all objects of the job."""
        return self.given_name or object_names.object_name(self.job_id)

    @property
    def labels(self) -> Dict[str, str]:
        return object_names.labels(self.job_id, self.owner)


class Objects(NamedTuple):
    """The manifests of a job, and the name of its Secret. service: None where the workload's controller makes one."""

    workload: Manifest
    service: Optional[Manifest]
    secret_name: str


def manifests(settings: KubernetesSettings, order: WorkloadOrder) -> Objects:
    """Build the manifests of the workload and, if it needs one, its Service; without the Secret, whose name is returned.

    Raises ConfigError for a pod template that is not right, or a job without an image. Other fields are checked by the server.
    """
    made: Dict[str, Callable[[KubernetesSettings, WorkloadOrder], Manifest]]
    made = {JOB: _job, JOBSET: _jobset, PADDLEJOB: _paddlejob}
    workload = made[settings.dialect](settings, order)
    service = None if settings.dialect == JOBSET else _headless_service(order)  # spec.network of a JobSet is one
    return Objects(workload, service, order.name)


def _job(settings: KubernetesSettings, order: WorkloadOrder) -> Manifest:
    """Build an Indexed Job, whose pods are all alike."""
    (group,) = groups(JOB, settings.nodes)
    spec = {"ttlSecondsAfterFinished": KEPT, **_indexed_spec(settings, order, group)}
    return {**_workload_head(settings, order, "batch/v1", "Job"), "spec": spec}


def _jobset(settings: KubernetesSettings, order: WorkloadOrder) -> Manifest:
    """Build a JobSet that succeeds if all roles do: the coordinator ends pservers when trainers are done.

    With the trainers alone as its aim the controller would delete pservers' pods, and their logs.
    """
    jobs: List[Manifest] = [
        {"name": group.role, "replicas": 1, "template": {"spec": _indexed_spec(settings, order, group)}}
        for group in groups(JOBSET, settings.nodes)
    ]
    spec = {
        "network": {"enableDNSHostnames": True, "publishNotReadyAddresses": True, "subdomain": order.name},
        "successPolicy": {"operator": "All"},
        "failurePolicy": {"maxRestarts": 0},
        "ttlSecondsAfterFinished": KEPT,
        "replicatedJobs": jobs,
    }
    return {**_workload_head(settings, order, "jobset.x-k8s.io/v1alpha2", "JobSet"), "spec": spec}


def _indexed_spec(settings: KubernetesSettings, order: WorkloadOrder, group: RolePods) -> Manifest:
    """Build the spec of an Indexed Job with the pods of a group."""
    return {
        "completions": group.size,
        "parallelism": group.size,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": pod_template(settings, order, group),
    }


def _paddlejob(settings: KubernetesSettings, order: WorkloadOrder) -> Manifest:
    """Build a PaddleJob whose pods join the job.

    Raises ConfigError for image_command, which only a native one can have, and as _merged_template().
    """
    if settings.paddlejob.get("image_command"):
        what = (
            "KUBERNETES: paddlejob.image_command: only the containers of export --native run the command of the image"
        )
        raise ConfigError(what, "leave it out, or export the job with --native")
    return _paddlejob_of(settings, order, lambda group: pod_template(settings, order, group))


def _paddlejob_of(
    settings: KubernetesSettings, order: WorkloadOrder, template: Callable[[RolePods], Manifest]
) -> Manifest:
    """Build a PaddleJob. By default its pods stay when it is over: their logs have the records.

    template: returns the template of a role's pods.
    """
    own = settings.paddlejob
    policy, intranet = own.get("clean_pod_policy", "Never"), own.get("intranet", "PodIP")
    spec: Manifest = {"cleanPodPolicy": policy, "intranet": intranet}
    if "with_gloo" in own:
        spec["withGloo"] = own["with_gloo"]
    if settings.queue:  # of Volcano: Kueue does not know this kind
        priority = {"priorityClass": settings.priority_class} if settings.priority_class else {}
        spec["schedulingPolicy"] = {"queue": settings.queue, **priority}
    for group in groups(PADDLEJOB, settings.nodes):
        spec[PADDLE_ROLES[group.role]] = {"replicas": group.size, "template": template(group)}
    return {**_workload_head(settings, order, "batch.paddlepaddle.org/v1", "PaddleJob"), "spec": spec}


def _workload_head(settings: KubernetesSettings, order: WorkloadOrder, version: str, kind: str) -> Manifest:
    """Build apiVersion (`version`), kind and metadata of a workload, with the settings' labels, annotations and queue."""
    made = _metadata(order)
    queue = {object_names.QUEUE_LABEL: settings.queue} if settings.queue and settings.dialect != PADDLEJOB else {}
    made["labels"] = {**settings.labels, **queue, **order.labels}
    of_job = object_names.annotations_of_job(order.job_id, order.owner, order.about)
    made["annotations"] = {**settings.annotations, **of_job}
    return {"apiVersion": version, "kind": kind, "metadata": made}


def _metadata(order: WorkloadOrder) -> Manifest:
    """Build the metadata that each object of a job has."""
    made: Manifest = {"name": order.name, "labels": order.labels, "annotations": {object_names.JOB_ID: order.job_id}}
    return {**made, "namespace": order.namespace} if order.namespace else made


def _headless_service(order: WorkloadOrder) -> Manifest:
    """Build the headless Service by which the pods of a job get host names."""
    spec = {
        "clusterIP": "None",
        "publishNotReadyAddresses": True,  # pods meet before they are ready
        "selector": {object_names.JOB_LABEL: object_names.job_hash(order.job_id)},
    }
    return {"apiVersion": "v1", "kind": "Service", "metadata": _metadata(order), "spec": spec}


def secret(order: WorkloadOrder, bundle: bytes) -> Manifest:
    """Build the Secret with the bundle. Raises PreflightError if the bundle is too large."""
    if len(bundle) > MOST_SECRET:
        what = f"the bundle has {len(bundle)} bytes, and a Secret at most {MOST_SECRET}"
        raise PreflightError(what, 'send less, or take the workspace from a volume: workspace = "pvc:CLAIM/path"')
    data = {SECRET_KEY: base64.b64encode(bundle).decode()}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": _metadata(order), "type": "Opaque", "data": data}


def with_owner(manifest: Manifest, workload: Manifest) -> Manifest:
    """Return the manifest of an object with the workload as its owner, with which it is deleted.

    workload: as the API server has created it.
    """
    owner = {name: workload[name] for name in ("apiVersion", "kind")}
    owner.update({name: workload["metadata"][name] for name in ("name", "uid")})
    return {**manifest, "metadata": {**manifest["metadata"], "ownerReferences": [owner]}}


def native(settings: KubernetesSettings, order: WorkloadOrder, commands: Mapping[str, Sequence[str]]) -> Manifest:
    """Build a PaddleJob whose containers run the user's commands with the environment of the operator. commands: by the roles.

    Variables of order.env that the operator sets are left out. Raises ConfigError as _merged_template().
    """
    env = tuple((name, value) for name, value in order.env if name not in _OPERATORS)
    given = replace(order, env=env)

    def template(group: RolePods) -> Manifest:
        return native_template(settings, given, group.role, list(commands[group.role]))

    return _paddlejob_of(settings, given, template)


def pod_template(settings: KubernetesSettings, order: WorkloadOrder, group: RolePods) -> Manifest:
    """Build the template of a group's pods, whose container runs the bundle, which joins the job.

    Raises ConfigError as _merged_template().
    """
    container, volumes = container_and_volumes(settings, order, group.role)
    container["command"] = [order.python, f"{SECRET_FOLDER}/{SECRET_KEY}", "join"]
    container["env"] = [*container["env"], {"name": FIRST_NODE, "value": str(group.first)}]
    if settings.dialect != PADDLEJOB:  # its operator sets it
        container["env"].append({"name": POD_IP, "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}}})
    root = pod_root(order.root_dir)
    container["volumeMounts"] = [
        {"name": "clustertool-bundle", "mountPath": SECRET_FOLDER, "readOnly": True},
        {"name": _ROOT_VOLUME, "mountPath": root},
        *container["volumeMounts"],
    ]
    secret = {"secretName": order.name, "defaultMode": 0o444, "optional": False}
    volumes = [{"name": "clustertool-bundle", "secret": secret}, {"name": _ROOT_VOLUME, "emptyDir": {}}, *volumes]
    spec = {"subdomain": order.name, **_pod_spec(settings, order)}
    if settings.dialect == PADDLEJOB:
        spec.pop("subdomain")  # its operator gives pods no host name
    spec = {**spec, "containers": [container], "volumes": volumes}
    return _merged_template(settings, order, {FIRST_LABEL: str(group.first)}, spec)


def native_template(settings: KubernetesSettings, order: WorkloadOrder, role: str, command: List[str]) -> Manifest:
    """Build the template of a role's pods, whose container runs the user's command, or for [] that of the image.

    Raises ConfigError as _merged_template().
    """
    container, volumes = container_and_volumes(settings, order, role)
    if command:
        container["command"] = [_escape_expansion(part) for part in command]
    container["env"] = [{"name": name, "value": _escape_expansion(value)} for name, value in order.env]
    folder = workspace_folder(settings, order)
    if folder:
        container["workingDir"] = folder
    spec = {**_pod_spec(settings, order), "containers": [container], "volumes": volumes}
    return _merged_template(settings, order, {}, spec)


def container_and_volumes(
    settings: KubernetesSettings, order: WorkloadOrder, role: str
) -> Tuple[Manifest, List[Manifest]]:
    """Build the container without its command, with its mounts and variables, and the volumes of the settings.

    role: for the resources; "": of any role.
    """
    container: Manifest = {"name": CONTAINER}
    if order.image:
        container["image"] = order.image
    if order.pull:
        container["imagePullPolicy"] = order.pull
    resources = settings.resources_of(role or settings.nodes[0][0])
    if resources:
        container["resources"] = resources
    mounts: List[Manifest] = []
    volumes: List[Manifest] = []

    def add(name: str, mount: str, source: object) -> None:
        volume, how = _volume_and_mount(source)
        volumes.append({"name": name, **volume})
        mounts.append({"name": name, "mountPath": mount, **how})

    for number, (mount, source) in enumerate(sorted(settings.volumes.items())):
        add(f"volume-{number}", mount, source)
    if settings.workspace.startswith("pvc:"):
        add("clustertool-workspace", workspace_folder(settings, order), settings.workspace)
    if settings.output:
        add("clustertool-output", output_folder(settings, order), settings.output)
    if settings.shared_memory:
        size = {} if settings.shared_memory == UNLIMITED else {"sizeLimit": settings.shared_memory}
        volumes.append({"name": "shared-memory", "emptyDir": {"medium": "Memory", **size}})
        mounts.append({"name": "shared-memory", "mountPath": "/dev/shm"})
    container["env"] = [{"name": name, "value": value} for name, value in order.env]
    container["volumeMounts"] = mounts
    container["securityContext"] = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}}
    container["terminationMessagePolicy"] = "FallbackToLogsOnError"
    return container, volumes


def _volume_and_mount(source: object) -> Tuple[Manifest, Manifest]:
    """Convert the source of a volume to the fields of the volume, and those of its mount."""
    how: Manifest = {}
    if isinstance(source, Mapping):
        how = {name: source[name] for name in ("readOnly", "subPath") if name in source}
        return {name: value for name, value in source.items() if name not in how}, how
    kind, _, rest = str(source).partition(":")
    if rest.endswith(":ro"):
        rest, how = rest[:-3], {"readOnly": True}
    if kind == "emptydir":
        return {"emptyDir": {}}, how
    if kind == "hostpath":
        return {"hostPath": {"path": rest}}, how
    if kind == "image":
        return {"image": {"reference": rest}}, how
    name, _, path = rest.partition("/")
    folder = re.sub("/+", "/", path).strip("/")
    if folder:
        how = {**how, "subPath": folder}
    found = {
        "pvc": {"persistentVolumeClaim": {"claimName": name}},
        "configmap": {"configMap": {"name": name}},
        "secret": {"secret": {"secretName": name}},
    }
    return dict(found[kind]), how


def _pod_spec(settings: KubernetesSettings, order: WorkloadOrder) -> Manifest:
    """Build the fields of a pod's spec besides containers and volumes."""
    given = {
        "nodeSelector": settings.node_selector,
        "tolerations": list(settings.tolerations),
        "affinity": settings.affinity,
        "serviceAccountName": settings.service_account,
        "imagePullSecrets": [{"name": name} for name in settings.image_pull_secrets],
        "priorityClassName": settings.priority_class,
    }
    return {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": int(order.grace + 0.999) + GRACE_MORE,
        "securityContext": {
            "runAsNonRoot": True,
            **(dict.fromkeys(("runAsUser", "runAsGroup", "fsGroup"), settings.user) if settings.user else {}),
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        **{name: value for name, value in given.items() if value},
    }


def _escape_expansion(text: str) -> str:
    """Escape a text so that Kubernetes expands nothing of it: it replaces $(NAME), and $$ by $."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def _merged_template(
    settings: KubernetesSettings, order: WorkloadOrder, marks: Mapping[str, str], spec: Manifest
) -> Manifest:
    """Merge our spec and labels with the user's template (pod_template). marks: further labels.

    Raises ConfigError without an image, and for an unknown field of the user's template.
    """
    ours = {
        "metadata": {
            "labels": {**settings.labels, **order.labels, **marks},
            "annotations": {**settings.annotations, object_names.JOB_ID: order.job_id},
        },
        "spec": spec,
    }
    users: Manifest = {name: order.template[name] for name in ("metadata", "spec") if name in order.template}
    strange = set(order.template) - {"metadata", "spec", "apiVersion", "kind"}
    if strange:
        fix = "it is a Pod or a PodTemplateSpec, with metadata and spec"
        raise ConfigError(f"{settings.pod_template}: {min(strange)} is not known", fix)
    made = merge_templates(users, ours)
    if not made["spec"]["containers"][0].get("image"):
        raise ConfigError("the job has no image", "set CONTAINER in conf.py, or give --image IMAGE")
    return made


def merge_templates(users: Manifest, ours: Manifest) -> Manifest:
    """Merge two templates; if both have a field, ours has priority, but the user's in securityContext.

    Lists are merged by _merge_lists(), but ours replaces the user's command and args.
    """
    found = dict(users)
    for name, value in ours.items():
        theirs = users.get(name)
        if isinstance(theirs, dict) and isinstance(value, dict):
            found[name] = (
                _without_null(merge_templates(value, theirs)) if name in _OF_USER else merge_templates(theirs, value)
            )
        elif isinstance(theirs, list) and isinstance(value, list) and name not in _WHOLE:
            found[name] = _merge_lists(theirs, value, _KEYS.get(name, ""))
        else:
            found[name] = value
    return found


def _merge_lists(theirs: List[Manifest], ours: List[Manifest], key: str) -> List[Manifest]:
    """Merge two lists, ours first, and entries with the same `key` into one; equal entries are there once.

    The operator of PaddleJobs gives its variables to the first container.
    """

    def of(entry: object) -> object:
        return entry.get(key) if key and isinstance(entry, dict) else None

    known = {of(entry): entry for entry in theirs if of(entry) is not None}
    mine = [merge_templates(known.pop(of(entry)), entry) if of(entry) in known else entry for entry in ours]
    rest = [entry for entry in theirs if of(entry) is None or of(entry) in known]
    return [*mine, *(entry for entry in rest if entry not in mine)]


def _without_null(fields: Manifest) -> Manifest:
    """Leave out the fields that are None."""
    return {name: value for name, value in fields.items() if value is not None}


def pod_root(root_dir: str) -> str:
    """Return ROOT_DIR in pods: that of conf.py if it is an absolute path, else ROOT."""
    return posixpath.normpath(root_dir) if root_dir.startswith("/") else ROOT


def root_of(pod: Mapping[str, object]) -> str:
    """Return ROOT_DIR in a pod, by the mounts in its object; "" if there is none."""
    for container in items(fields(pod, "spec"), "containers"):
        for mount in items(container, "volumeMounts"):
            if (container.get("name"), mount.get("name")) == (CONTAINER, _ROOT_VOLUME):
                return text(mount, "mountPath")
    return ""


def output_folder(settings: KubernetesSettings, order: WorkloadOrder) -> str:
    """Return the folder in a pod in which the volume of the output is mounted; "" without one."""
    return f"{pod_root(order.root_dir)}-output" if settings.output else ""


def workspace_folder(settings: KubernetesSettings, order: WorkloadOrder) -> str:
    """Return the folder in a pod with the workspace of an image or a volume; "" if the workspace is sent."""
    kind, _, place = settings.workspace.partition(":")
    return place if kind == "image" else f"{pod_root(order.root_dir)}-workspace" if kind == "pvc" else ""
