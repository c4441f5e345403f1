"""The preflight of the engine kubernetes checks what a job needs of the API server, the namespace and the nodes.

All findings are returned together. Where a right is missing that only this check needs, the finding is a warning.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import NamedTuple

from clustertool.engines.kubernetes.cluster_api import ClusterApi
from clustertool.errors import AuthError, NotFound, PreflightError
from clustertool.model.finding import Finding
from clustertool.model.kubernetes import node_view
from clustertool.model.kubernetes.api_objects import KINDS, Object
from clustertool.model.kubernetes.kubernetes_settings import KubernetesSettings
from clustertool.model.kubernetes.node_view import is_cordoned, is_ready
from clustertool.model.kubernetes.pod_places import WORKLOADS
from clustertool.ssh.parallel import each

_COLUMN = "queue"
_ROLE = "docs/kubernetes.md has a Role with all of them"
_WIDTH = 8  # reviews of rights at a time
_CHANGES = ("create", "get", "list", "delete")  # verbs on what a job has


class Right(NamedTuple):
    """A verb on a resource of a group. needed: without it no job runs."""

    verb: str
    group: str
    resource: str
    subresource: str = ""
    needed: bool = True

    @property
    def text(self) -> str:
        resource = f"{self.resource}/{self.subresource}" if self.subresource else self.resource
        return f"{self.verb} {resource}{f'.{self.group}' if self.group else ''}"


class PodGroup(NamedTuple):
    """A number of pods that ask for the same: requests and limits of one pod, as quantities by their names."""

    pods: int
    requests: Mapping[str, str]
    limits: Mapping[str, str]

    @property
    def each(self) -> dict[str, str]:
        """What one pod requests: its requests, and its limits for resources without a request."""
        return {**self.limits, **self.requests}


def rights(kind: str, queue: bool = False) -> tuple[Right, ...]:
    """List the rights that a user of the engine needs for a workload of this kind. queue: with those for Kueue.

    Exec by a websocket is a GET: older API servers want `get`, newer ones `create`.
    """
    workload = KINDS[kind]
    found = [Right(verb, workload.group, workload.plural) for verb in _CHANGES]
    found += [Right(verb, "", "pods") for verb in ("get", "list", "watch", "delete")]
    found += [Right("get", "", "pods", "log"), Right("get", "", "pods", "exec"), Right("create", "", "pods", "exec")]
    found += [Right(verb, "", name) for name in ("secrets", "services") for verb in _CHANGES]
    found += [Right("list", "", name, needed=False) for name in ("events", "resourcequotas", "nodes")]
    if queue and kind != "PaddleJob":
        found.append(Right("list", KINDS["Workload"].group, KINDS["Workload"].plural, needed=False))
    return tuple(found)


def check_cluster(api: ClusterApi, job: KubernetesSettings) -> Iterator[Finding]:
    """Yield the findings of all checks, for node 0, which stands for the cluster. A check without the right to it is a warning.

    Raises ClustertoolError if the server does not answer.
    """
    user = api.user()
    yield from check_rights(api, job, user)
    for part in (check_namespace, check_kind, check_pull_secrets, check_quotas, check_devices):
        try:
            yield from part(api, job)
        except AuthError as error:
            yield Finding(0, _COLUMN, "warn", f"not checked: {error.what}", error.fix)


def pod_groups(job: KubernetesSettings) -> list[PodGroup]:
    """Build a group for each role: the number of its pods, and the requests and limits of each."""
    resources = [(count, job.resources_of(role)) for role, count in job.nodes]
    return [PodGroup(count, found.get("requests", {}), found.get("limits", {})) for count, found in resources]


def check_rights(api: ClusterApi, job: KubernetesSettings, user: str) -> Iterator[Finding]:
    """Ask the server for each right that the job needs, 8 at a time; yield an error or a warning about missing ones, or "ok".

    The error lists those without which no job runs, the warning the others.
    """
    wanted = rights(WORKLOADS[job.dialect], bool(job.queue))
    gathered = each(wanted, lambda one: api.allowed(one.verb, one.group, one.resource, one.subresource), width=_WIDTH)
    allowed = gathered.all()
    missing = [right for number, right in enumerate(wanted) if not allowed[number]]
    for level, needed in (("error", True), ("warn", False)):
        texts = [right.text for right in missing if right.needed is needed]
        if texts:
            what = f"{user} may not in the namespace {api.namespace}: {', '.join(texts)}"
            yield Finding(0, _COLUMN, level, what, _ROLE)
    if not missing:
        yield Finding(0, _COLUMN, "ok", "ok")


def check_namespace(api: ClusterApi, job: KubernetesSettings) -> Iterator[Finding]:
    """Yield an error if the namespace is missing or being deleted; nothing if the user may not read namespaces."""
    try:
        found = api.get("Namespace", api.namespace)
    except AuthError:
        return
    phase = (found or {}).get("status", {}).get("phase", "Active")
    if found is None or phase == "Terminating":
        state = "is being deleted" if found else "is not there"
        fix = 'set KUBERNETES["namespace"] in conf.py, or give --namespace'
        yield Finding(0, _COLUMN, "error", f"the namespace {api.namespace} {state}", fix)


def check_kind(api: ClusterApi, job: KubernetesSettings) -> Iterator[Finding]:
    """Yield an error if the resource definition of the dialect is not installed in the version that is used.

    Yields nothing for kinds that are part of Kubernetes.
    """
    kind = KINDS[WORKLOADS[job.dialect]]
    if kind.group in ("", "batch"):
        return
    try:
        api.resource_names(kind.name)
    except NotFound:
        what = f"the cluster has no {kind.name} ({kind.version})"
        yield Finding(0, _COLUMN, "error", what, 'install its controller, or choose KUBERNETES["dialect"] = "job"')


def check_pull_secrets(api: ClusterApi, job: KubernetesSettings) -> Iterator[Finding]:
    """Yield an error for each pull secret that is missing, or has no credentials of a registry."""
    for name in job.image_pull_secrets:
        found = api.get("Secret", name)
        if found is None:
            what = f"the pull secret {name} is not in the namespace {api.namespace}"
            fix = f"kubectl create secret docker-registry {name} --docker-server=..."
            yield Finding(0, _COLUMN, "error", what, fix)
        elif found.get("type") not in ("kubernetes.io/dockerconfigjson", "kubernetes.io/dockercfg"):
            what = f"the secret {name} has no credentials of a registry"
            yield Finding(0, _COLUMN, "error", what, "its type is kubernetes.io/dockerconfigjson")


def check_quotas(api: ClusterApi, job: KubernetesSettings) -> Iterator[Finding]:
    """Yield an error for each amount in a quota that is smaller than the job's need, and a warning if only its unused part is.

    Amounts that no quota limits yield nothing. Raises AuthError without the right to list quotas.
    """
    for quota in api.list_objects("ResourceQuota"):
        name, status = quota["metadata"]["name"], quota.get("status") or {}
        hard, used = status.get("hard") or {}, status.get("used") or {}
        for key, wanted in _quota_needs(job).items():
            if key not in hard:
                continue
            most, taken = quantity(str(hard[key])), quantity(str(used.get(key, "0")))
            if wanted > most:
                what = f"the job needs {amount_text(wanted)} {key}, and the quota {name} has {amount_text(most)}"
                yield Finding(0, _COLUMN, "error", what, "ask for less in KUBERNETES")
            elif wanted > most - taken:
                what = f"the job needs {amount_text(wanted)} {key}, and the quota {name} has {amount_text(most - taken)} left"
                yield Finding(0, _COLUMN, "warn", what, "its pods are created when other jobs have ended")


def check_devices(api: ClusterApi, job: KubernetesSettings) -> Iterator[Finding]:
    """Yield an error for each resource of which the nodes have too little, and "ok" with the sum for each other kind of device.

    Too little: no node has enough for one pod, or all nodes together not for all pods of a role. An error, too, if no node
    counts. Nodes that are cordoned, not ready or without the labels of node_selector do not count.
    """
    nodes = [node for node in api.list_objects("Node", job.node_selector) if is_ready(node) and not is_cordoned(node)]
    if not nodes:
        what = "no node is ready" + (" that has these labels" if job.node_selector else "")
        yield Finding(0, _COLUMN, "error", what, 'correct KUBERNETES["node_selector"]' if job.node_selector else "")
        return
    for group in pod_groups(job):
        for name, text in group.each.items():
            wanted, column = quantity(text), "devices" if "/" in name else _COLUMN
            having = [_allocatable(node, name) for node in nodes]
            fit = sum(int(amount // wanted) for amount in having) if wanted else group.pods
            if not fit:
                what = f"a pod needs {amount_text(wanted)} {name}, and no node has more than {amount_text(max(having))}"
                yield Finding(0, column, "error", what, 'correct KUBERNETES["resources"]; gpus shows what nodes have')
            elif fit < group.pods:
                what = f"the nodes have room for {fit} pods with {amount_text(wanted)} {name}, and the job has {group.pods}"
                yield Finding(0, column, "error", what, "use fewer pods, or smaller ones")
            elif "/" in name:
                yield Finding(0, column, "ok", f"{amount_text(sum(having, Decimal()))} {name}")


def quantity(text: str) -> Decimal:
    """Parse a quantity of Kubernetes. Raises PreflightError with examples."""
    try:
        return node_view.quantity(text)
    except ValueError as error:
        raise PreflightError(str(error), 'examples: "4", "500m", "16Gi"') from None


def amount_text(amount: Decimal) -> str:
    """Format a quantity for a message, from 1 Mi on with a binary unit."""
    for unit in ("Ti", "Gi", "Mi"):
        if amount >= node_view.UNITS[unit]:
            return f"{float(amount / node_view.UNITS[unit]):.4g}{unit}"
    return f"{float(amount):.6g}"


def _allocatable(node: Object, name: str) -> Decimal:
    """Return the amount of a resource that pods on a node can get."""
    found = ((node.get("status") or {}).get("allocatable") or {}).get(name, "0")
    return quantity(str(found))


def _quota_needs(job: KubernetesSettings) -> dict[str, Decimal]:
    """Return {name in quotas: the need of all pods}: pods, count/pods, requests.X and limits.X of each X, cpu and memory."""
    found = {"pods": Decimal(job.node_count), "count/pods": Decimal(job.node_count)}

    def add(name: str, amount: Decimal) -> None:
        found[name] = found.get(name, Decimal()) + amount

    for group in pod_groups(job):
        for name, text in group.each.items():
            add(f"requests.{name}", quantity(text) * group.pods)
            if name in ("cpu", "memory"):
                add(name, quantity(text) * group.pods)
        for name, text in group.limits.items():
            add(f"limits.{name}", quantity(text) * group.pods)
    return found
