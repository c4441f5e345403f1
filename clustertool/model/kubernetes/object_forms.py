"""This module has the forms of the objects that are submitted. A field that is not here is an error before anything is sent.

They follow batch/v1, core/v1, jobset.x-k8s.io/v1alpha2 and batch.paddlepaddle.org/v1. The rare parts of a pod
(probes, DNS, sources of volumes) are left to the API server.
"""

from __future__ import annotations

from typing import Dict, Iterator, List, Mapping

from clustertool.model.kubernetes.field_checks import (
    Check,
    Wrong,
    absolute,
    anything,
    filled,
    flag,
    form,
    items,
    key,
    label,
    label_value,
    mapping,
    number,
    one_of,
    quantity,
    several,
    subdomain,
    text,
)
from clustertool.model.kubernetes.pod_reasons import fields

LABELS = mapping(key, label_value)
ANNOTATIONS = mapping(key, text)
QUANTITIES = mapping(key, quantity)
RESOURCES = form({"requests": QUANTITIES, "limits": QUANTITIES, "claims": several})
TOLERATION = form(
    {
        "key": key,
        "operator": one_of("Exists", "Equal"),
        "value": label_value,
        "effect": one_of("NoSchedule", "PreferNoSchedule", "NoExecute"),
        "tolerationSeconds": number(0),
    }
)
_EXPRESSION = form(
    {
        "key": key,
        "operator": one_of("In", "NotIn", "Exists", "DoesNotExist", "Gt", "Lt"),
        "values": items(label_value),
    },
    "key",
    "operator",
)
_SELECTOR = form({"matchLabels": LABELS, "matchExpressions": items(_EXPRESSION)})
_TERM = form({"matchExpressions": items(_EXPRESSION), "matchFields": items(_EXPRESSION)})
_REQUIRED, _PREFERRED = (f"{how}DuringSchedulingIgnoredDuringExecution" for how in ("required", "preferred"))
_NODE_AFFINITY = form(
    {
        _REQUIRED: form({"nodeSelectorTerms": items(_TERM)}, "nodeSelectorTerms"),
        _PREFERRED: items(form({"weight": number(1, 100), "preference": _TERM}, "weight", "preference")),
    }
)
_POD_TERM = form(
    {
        "topologyKey": key,
        "labelSelector": _SELECTOR,
        "namespaces": items(label),
        "namespaceSelector": _SELECTOR,
        "matchLabelKeys": items(key),
        "mismatchLabelKeys": items(key),
    },
    "topologyKey",
)
_POD_AFFINITY = form(
    {
        _REQUIRED: items(_POD_TERM),
        _PREFERRED: items(form({"weight": number(1, 100), "podAffinityTerm": _POD_TERM}, "weight", "podAffinityTerm")),
    }
)
AFFINITY = form({"nodeAffinity": _NODE_AFFINITY, "podAffinity": _POD_AFFINITY, "podAntiAffinity": _POD_AFFINITY})
SOURCES: Dict[str, Check] = {
    "persistentVolumeClaim": form({"claimName": subdomain, "readOnly": flag}, "claimName"),
    "emptyDir": form({"medium": one_of("", "Memory"), "sizeLimit": quantity}),
    "hostPath": form({"path": absolute, "type": text}, "path"),
    "secret": form(
        {"secretName": subdomain, "defaultMode": number(0, 0o777), "items": several, "optional": flag}, "secretName"
    ),
    "configMap": form({"name": subdomain, "defaultMode": number(0, 0o777), "items": several, "optional": flag}, "name"),
    "nfs": form({"server": filled, "path": absolute, "readOnly": flag}, "server", "path"),
    "image": form({"reference": filled, "pullPolicy": one_of("Always", "IfNotPresent", "Never")}, "reference"),
    **dict.fromkeys(("csi", "ephemeral", "projected", "downwardAPI", "iscsi", "fc"), anything),
}
_MOUNT = form(
    {
        "name": label,
        "mountPath": absolute,
        "subPath": text,
        "subPathExpr": text,
        "readOnly": flag,
        "recursiveReadOnly": text,
        "mountPropagation": one_of("None", "HostToContainer", "Bidirectional"),
    },
    "name",
    "mountPath",
)
_CONTAINER: Dict[str, Check] = {
    "name": label,
    "image": filled,
    "imagePullPolicy": one_of("Always", "IfNotPresent", "Never"),
    "command": items(text),
    "args": items(text),
    "workingDir": absolute,
    "env": items(form({"name": filled, "value": text, "valueFrom": anything}, "name")),
    "envFrom": items(form({"prefix": text, "configMapRef": anything, "secretRef": anything})),
    "ports": items(
        form(
            {
                "name": label,
                "containerPort": number(1, 65535),
                "hostPort": number(1, 65535),
                "hostIP": text,
                "protocol": one_of("TCP", "UDP", "SCTP"),
            },
            "containerPort",
        )
    ),
    "resources": RESOURCES,
    "volumeMounts": items(_MOUNT),
    "volumeDevices": several,
    "securityContext": form(
        {
            "allowPrivilegeEscalation": flag,
            "appArmorProfile": anything,
            "capabilities": form({"add": items(filled), "drop": items(filled)}),
            "privileged": flag,
            "procMount": text,
            "readOnlyRootFilesystem": flag,
            "runAsGroup": number(0),
            "runAsNonRoot": flag,
            "runAsUser": number(0),
            "seLinuxOptions": anything,
            "seccompProfile": anything,
        }
    ),
    "terminationMessagePath": absolute,
    "terminationMessagePolicy": one_of("File", "FallbackToLogsOnError"),
    "restartPolicy": one_of("Always", "OnFailure", "Never"),
    "stdin": flag,
    "stdinOnce": flag,
    "tty": flag,
    **dict.fromkeys(("livenessProbe", "readinessProbe", "startupProbe", "lifecycle"), anything),
    "resizePolicy": several,
}
_POD_SECURITY = form(
    {
        "appArmorProfile": anything,
        "fsGroup": number(0),
        "fsGroupChangePolicy": one_of("Always", "OnRootMismatch"),
        "runAsGroup": number(0),
        "runAsNonRoot": flag,
        "runAsUser": number(0),
        "seLinuxOptions": anything,
        "seccompProfile": form({"type": filled, "localhostProfile": text}, "type"),
        "supplementalGroups": items(number(0)),
        "supplementalGroupsPolicy": one_of("Merge", "Strict"),
        "sysctls": items(form({"name": filled, "value": text}, "name", "value")),
    }
)
POD_SPEC = form(
    {
        "containers": items(form(_CONTAINER, "name")),
        "initContainers": items(form(_CONTAINER, "name", "image")),
        "volumes": items(form({"name": label, **SOURCES}, "name")),
        "activeDeadlineSeconds": number(1),
        "affinity": AFFINITY,
        "nodeSelector": LABELS,
        "nodeName": subdomain,
        "tolerations": items(TOLERATION),
        "imagePullSecrets": items(form({"name": subdomain}, "name")),
        "serviceAccountName": subdomain,
        "priorityClassName": subdomain,
        "priority": number(-(2**31)),
        "runtimeClassName": subdomain,
        "schedulerName": subdomain,
        "hostname": label,
        "subdomain": label,
        "dnsPolicy": one_of("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
        "dnsConfig": anything,
        "restartPolicy": one_of("Always", "OnFailure", "Never"),
        "preemptionPolicy": one_of("Never", "PreemptLowerPriority"),
        "securityContext": _POD_SECURITY,
        "terminationGracePeriodSeconds": number(0),
        **dict.fromkeys(("os", "overhead", "resources"), anything),
        **dict.fromkeys(
            ("hostAliases", "readinessGates", "resourceClaims", "schedulingGates", "topologySpreadConstraints"), several
        ),
        **dict.fromkeys(
            (
                "automountServiceAccountToken",
                "enableServiceLinks",
                "hostIPC",
                "hostNetwork",
                "hostPID",
                "hostUsers",
                "setHostnameAsFQDN",
                "shareProcessNamespace",
            ),
            flag,
        ),
    }
)
_METADATA = form({"name": label, "namespace": label, "labels": LABELS, "annotations": ANNOTATIONS})
_OBJECT: Dict[str, Check] = {"apiVersion": filled, "kind": filled, "metadata": _METADATA}
POD_TEMPLATE = form({"metadata": _METADATA, "spec": POD_SPEC}, "spec")
_JOB_SPEC = form(
    {
        "template": POD_TEMPLATE,
        "completions": number(1),
        "parallelism": number(1),
        "completionMode": one_of("Indexed"),
        "backoffLimit": number(0, 0),
        "ttlSecondsAfterFinished": number(0),
        "activeDeadlineSeconds": number(1),
    },
    "template",
    "completions",
    "parallelism",
    "completionMode",
    "backoffLimit",
)
_JOBSET_SPEC = form(
    {
        "replicatedJobs": items(
            form(
                {
                    "name": label,
                    "replicas": number(1, 1),
                    "template": form({"metadata": _METADATA, "spec": _JOB_SPEC}, "spec"),
                },
                "name",
                "template",
            )
        ),
        "network": form({"enableDNSHostnames": flag, "publishNotReadyAddresses": flag, "subdomain": label}),
        "failurePolicy": form({"maxRestarts": number(0, 0)}),
        "successPolicy": form({"operator": one_of("All", "Any"), "targetReplicatedJobs": items(label)}, "operator"),
        "ttlSecondsAfterFinished": number(0),
    },
    "replicatedJobs",
)
CLEAN_POD_POLICIES, INTRANETS = (
    ("Never", "Always", "OnFailure", "OnCompletion"),
    ("PodIP", "Service", "Host"),
)
_PADDLE_ROLE = form({"replicas": number(1), "template": POD_TEMPLATE}, "replicas", "template")
_PADDLE_SPEC = form(
    {
        "cleanPodPolicy": one_of(*CLEAN_POD_POLICIES),
        "intranet": one_of(*INTRANETS),
        "withGloo": number(0, 2),
        "schedulingPolicy": form({"queue": filled, "priorityClass": subdomain, "minAvailable": number(1)}),
        "worker": _PADDLE_ROLE,
        "ps": _PADDLE_ROLE,
        "heter": _PADDLE_ROLE,
    }
)
_SPECS = {"Job": _JOB_SPEC, "JobSet": _JOBSET_SPEC, "PaddleJob": _PADDLE_SPEC}


def field_errors(workload: Mapping[str, object]) -> List[Wrong]:
    """List what is wrong in a Job, JobSet or PaddleJob, with the paths of the fields."""
    kind = str(workload.get("kind"))
    if kind not in _SPECS:
        return [Wrong("kind", f"one of {', '.join(_SPECS)}")]
    check = form({**_OBJECT, "spec": _SPECS[kind]}, "apiVersion", "kind", "metadata", "spec")
    return [*check(workload, ""), *_doubtful(workload, "")]


def _doubtful(value: object, path: str) -> Iterator[Wrong]:
    """Yield names in pod specs that two entries of a list have, and mounts without a volume."""
    if isinstance(value, list):
        for index, one in enumerate(value):
            yield from _doubtful(one, f"{path}[{index}]")
    if not isinstance(value, dict):
        return
    if isinstance(value.get("containers"), list):
        yield from _of_pod(value, path)
        return
    for name, one in value.items():
        if isinstance(name, str):
            yield from _doubtful(one, f"{path}.{name}" if path else name)


def _of_pod(spec: Mapping[str, object], path: str) -> Iterator[Wrong]:
    if not spec["containers"]:
        yield Wrong(f"{path}.containers", "a list with an entry")
    for name in ("containers", "volumes"):
        yield from _twice(spec, name, "name", path)
    volumes = {fields({"each": each}, "each").get("name") for each in _listed(spec, "volumes")}
    for kind in ("containers", "initContainers"):
        for index, container in enumerate(_listed(spec, kind)):
            place, known = f"{path}.{kind}[{index}]", fields({"each": container}, "each")
            yield from _twice(known, "volumeMounts", "mountPath", place)
            yield from _twice(known, "env", "name", place)
            for number_, mount in enumerate(_listed(known, "volumeMounts")):
                name_of = fields({"each": mount}, "each").get("name")
                if name_of not in volumes:
                    yield Wrong(f"{place}.volumeMounts[{number_}].name", "the name of a volume of the pod")


def _twice(owner: Mapping[str, object], name: str, by: str, path: str) -> Iterator[Wrong]:
    seen = set()
    for index, one in enumerate(_listed(owner, name)):
        value = fields({"each": one}, "each").get(by)
        if isinstance(value, str) and value in seen:
            yield Wrong(f"{path}.{name}[{index}].{by}", f"a value that no other entry has, and not {value!r} again")
        if isinstance(value, str):
            seen.add(value)


def _listed(owner: Mapping[str, object], name: str) -> List[object]:
    found = owner.get(name)
    return found if isinstance(found, list) else []
