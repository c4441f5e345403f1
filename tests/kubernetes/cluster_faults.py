"""What happens to pods in a cluster: the memory limit, eviction, preemption, the loss of a machine."""

from __future__ import annotations

from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.api_store import Obj
from tests.kubernetes.controllers import condition

_LOW = "The node was low on resource: memory. Threshold quantity: 100Mi, available: 50Mi."


def kill_for_memory(server: ApiServer, pod: Obj) -> None:
    server.controllers.killed[pod["metadata"]["uid"]] = "OOMKilled"
    _container(server, pod).signal(kill=True)


def evict(server: ApiServer, pod: Obj) -> None:
    """As the kubelet does for want of memory."""
    gone = condition("DisruptionTarget", "TerminationByKubelet", _LOW)
    status = {"reason": "Evicted", "message": _LOW, "conditions": [*pod["status"]["conditions"], gone]}
    server.store.change(pod, lambda o: o["status"].update(status))
    server.store.event(pod, "Evicted", _LOW)
    _container(server, pod).signal(kill=True)


def preempt(server: ApiServer, pod: Obj) -> None:
    why = "default-scheduler: preempting to accommodate a higher priority pod"
    server.store.event(pod, "Preempted", "Preempted by pod 3f0e on node worker-1", "Normal")
    _disrupt(server, pod, "PreemptionByScheduler", why)


def lose_node(server: ApiServer, pod: Obj) -> None:
    """The kubelet of the pod's node answers no more. The taint deletes its pods at once, but nothing proves their end."""
    node = pod["spec"]["nodeName"]
    server.controllers.lost.add(node)
    for one in server.store.list("Pod", fields=f"spec.nodeName={node}"):
        _container(server, one).signal(kill=True)
        server.store.event(one, "TaintManagerEviction", f"Marking for deletion Pod {one['metadata']['name']}", "Normal")
        _disrupt(server, one, "DeletionByTaintManager", "Taint manager: deleting due to NoExecute taint")


def _container(server: ApiServer, pod: Obj):
    return server.controllers.containers[pod["metadata"]["uid"]]


def _disrupt(server: ApiServer, pod: Obj, reason: str, message: str) -> None:
    conditions = [*pod["status"]["conditions"], condition("DisruptionTarget", reason, message)]
    server.store.change(pod, lambda o: o["status"].update(conditions=conditions))
    server.store.delete("Pod", pod["metadata"]["namespace"], pod["metadata"]["name"])
