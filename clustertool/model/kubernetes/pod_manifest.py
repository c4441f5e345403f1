"""The pods of a job have a template with one container, in which the joining process is PID 1."""

from __future__ import annotations

import posixpath
import re
from dataclasses import dataclass, field
from typing import Dict, List, Mapping, Tuple

from clustertool.errors import ConfigError
from clustertool.model.kubernetes.kubernetes_settings import UNLIMITED, KubernetesSettings
from clustertool.model.kubernetes.merged_template import Manifest, merge
from clustertool.model.kubernetes.object_names import JOB_ID, JobAbout, labels, object_name
from clustertool.model.kubernetes.pod_places import FIRST_LABEL, PADDLEJOB, RolePods
from clustertool.model.kubernetes.pod_reasons import CONTAINER, fields, items, text
from clustertool.model.kubernetes.pod_variables import FIRST_NODE, POD_IP

SECRET_FOLDER, SECRET_KEY = "/etc/clustertool", "bundle.pyz"
ROOT = "/clustertool"  # ROOT_DIR in a pod, where conf.py has one in the home of a user
GRACE_MORE = 20  # seconds that a pod has beyond GRACE of its ranks
_ROOT_VOLUME = "clustertool-root"


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
    about: JobAbout = JobAbout()
    template: Manifest = field(default_factory=dict, hash=False)
    env: Tuple[Tuple[str, str], ...] = ()
    pull: str = ""
    namespace: str = ""
    given_name: str = ""

    @property
    def name(self) -> str:
        return self.given_name or object_name(self.job_id)

    @property
    def labels(self) -> Dict[str, str]:
        return labels(self.job_id, self.owner)


def pod_root(root_dir: str) -> str:
    """Return ROOT_DIR as pods have it: an absolute path."""
    return posixpath.normpath(root_dir) if root_dir.startswith("/") else ROOT


def root_of(pod: Mapping[str, object]) -> str:
    """Read ROOT_DIR in a pod, as its object states it; "" if it does not."""
    for container in items(fields(pod, "spec"), "containers"):
        for mount in items(container, "volumeMounts"):
            if (container.get("name"), mount.get("name")) == (CONTAINER, _ROOT_VOLUME):
                return text(mount, "mountPath")
    return ""


def output_folder(settings: KubernetesSettings, order: WorkloadOrder) -> str:
    """Return where the volume of the output is in a pod, "" without one."""
    return f"{pod_root(order.root_dir)}-output" if settings.output else ""


def workspace_folder(settings: KubernetesSettings, order: WorkloadOrder) -> str:
    """Return the folder of a workspace that is not sent, "" if it is."""
    kind, _, place = settings.workspace.partition(":")
    return place if kind == "image" else f"{pod_root(order.root_dir)}-workspace" if kind == "pvc" else ""


def pod_template(settings: KubernetesSettings, order: WorkloadOrder, group: RolePods) -> Manifest:
    """Make the template of the pods of a role, for a joining process. Raises ConfigError."""
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
    spec = {"subdomain": order.name, **_spec(settings, order)}
    if settings.dialect == PADDLEJOB:
        spec.pop("subdomain")  # its operator gives pods no host name
    return _merged(
        settings, order, {FIRST_LABEL: str(group.first)}, {**spec, "containers": [container], "volumes": volumes}
    )


def native_template(settings: KubernetesSettings, order: WorkloadOrder, role: str, command: List[str]) -> Manifest:
    """Make the template of the pods of a role that run a user's command themselves, or the image's own, for [].

    Raises ConfigError.
    """
    container, volumes = container_and_volumes(settings, order, role)
    if command:
        container["command"] = [_literal(part) for part in command]
    container["env"] = [{"name": name, "value": _literal(value)} for name, value in order.env]
    folder = workspace_folder(settings, order)
    if folder:
        container["workingDir"] = folder
    return _merged(settings, order, {}, {**_spec(settings, order), "containers": [container], "volumes": volumes})


def _literal(text: str) -> str:
    """Escape a text so that Kubernetes expands nothing of it: it replaces $(NAME), and $$ by $."""
    return text.replace("$", "$$") if "$(" in text or "$$" in text else text


def _spec(settings: KubernetesSettings, order: WorkloadOrder) -> Manifest:
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


def _merged(settings: KubernetesSettings, order: WorkloadOrder, marks: Mapping[str, str], spec: Manifest) -> Manifest:
    ours = {
        "metadata": {
            "labels": {**settings.labels, **order.labels, **marks},
            "annotations": {**settings.annotations, JOB_ID: order.job_id},
        },
        "spec": spec,
    }
    users: Manifest = {name: order.template[name] for name in ("metadata", "spec") if name in order.template}
    strange = set(order.template) - {"metadata", "spec", "apiVersion", "kind"}
    if strange:
        fix = "it is a Pod or a PodTemplateSpec, with metadata and spec"
        raise ConfigError(f"{settings.pod_template}: {min(strange)} is not known", fix)
    made = merge(users, ours)
    if not made["spec"]["containers"][0].get("image"):
        raise ConfigError("the job has no image", "set CONTAINER in conf.py, or give --image IMAGE")
    return made


def container_and_volumes(
    settings: KubernetesSettings, order: WorkloadOrder, role: str
) -> Tuple[Manifest, List[Manifest]]:
    """Make the container without its command, and the volumes of the settings. role: "" for that of all pods."""
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
        volume, how = _volume(source)
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


def _volume(source: object) -> Tuple[Manifest, Manifest]:
    """Convert the source of a volume to its manifest, and the fields of its mount."""
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
