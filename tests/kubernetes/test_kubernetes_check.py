"""The findings of the engine kubernetes, from prepared objects."""

from decimal import Decimal

import pytest

from clustertool.engines.kubernetes.kubernetes_check import amount_text, check_cluster, quantity, rights
from clustertool.errors import AuthError, ClustertoolError, NotFound
from clustertool.model.kubernetes.kubernetes_settings import read_settings

GPU = "nvidia.com/gpu"
READY = [{"type": "Ready", "status": "True"}]


def node(name, gpus, labels=(), ready=True, cordoned=False):
    conditions = READY if ready else [{"type": "Ready", "status": "Unknown"}]
    status = {"allocatable": {GPU: str(gpus), "cpu": "16", "memory": "64Gi"}, "conditions": conditions}
    return {"metadata": {"name": name, "labels": dict(labels)}, "spec": {"unschedulable": cordoned}, "status": status}


class Prepared:
    """Answers as a ClusterApi does."""

    namespace, where = "team", "one (example:6443)"

    def __init__(self, objects=(), refused=(), kinds=("Job",), unreadable=()):
        self.objects, self.refused, self.kinds, self.unreadable = dict(objects), refused, kinds, unreadable

    def user(self):
        return "ann"

    def allowed(self, verb, group, resource, subresource=""):
        return (verb, f"{resource}/{subresource}" if subresource else resource) not in self.refused

    def get(self, kind, name):
        if kind in self.unreadable:
            raise AuthError(f"ann may not get {kind}", "a Role")
        return next((one for one in self.objects.get(kind, []) if one["metadata"]["name"] == name), None)

    def list_objects(self, kind, labels=None, fields=""):
        if kind in self.unreadable:
            raise AuthError(f"ann may not list {kind}", "a Role")
        wanted = (labels or {}).items()
        return [one for one in self.objects.get(kind, []) if wanted <= one["metadata"].get("labels", {}).items()]

    def resource_names(self, kind):
        if kind not in self.kinds:
            raise NotFound(kind)


def prepared(*nodes, **more):
    namespace = {"metadata": {"name": "team"}, "status": {"phase": "Active"}}
    objects = {"Namespace": [namespace], "Node": nodes or [node("a", 8), node("b", 8)], **more.pop("objects", {})}
    return Prepared(objects, **more)


def found(api, **settings):
    """The findings of a job."""
    findings = list(check_cluster(api, read_settings(settings)))
    assert all(one.node == 0 for one in findings)
    return [(one.level, one.text) for one in findings]


def test_a_cluster_that_has_everything_has_no_error():
    assert found(prepared(), nodes=4, resources={"limits": {GPU: "4"}}) == [("ok", "ok"), ("ok", f"16 {GPU}")]


def test_all_missing_rights_are_in_one_finding():
    api = prepared(refused=[("create", "secrets"), ("create", "pods/exec"), ("list", "nodes")])
    levels = dict(found(api))
    assert levels["error"] == "ann may not in the namespace team: create pods/exec, create secrets"
    assert levels["warn"] == "ann may not in the namespace team: list nodes"
    assert {right.text for right in rights("JobSet")} >= {"create jobsets.jobset.x-k8s.io", "get pods/log"}


def test_a_namespace_a_definition_and_a_pull_secret_that_are_absent_are_found_together():
    api = prepared(objects={"Namespace": [], "Secret": [{"metadata": {"name": "other"}, "type": "Opaque"}]})
    errors = [
        text for level, text in found(api, dialect="jobset", image_pull_secrets=["mine", "other"]) if level == "error"
    ]
    assert errors == [
        "the namespace team is not there",
        "the cluster has no JobSet (jobset.x-k8s.io/v1alpha2)",
        "the pull secret mine is not in the namespace team",
        "the secret other has no credentials of a registry",
    ]


def test_a_quota_is_compared_with_what_all_pods_need():
    quota = {"hard": {f"requests.{GPU}": "8", "pods": "10", "limits.memory": "64Gi"}, "used": {f"requests.{GPU}": "6"}}
    api = prepared(objects={"ResourceQuota": [{"metadata": {"name": "q"}, "status": quota}]})
    texts = [text for level, text in found(api, nodes=4, resources={"limits": {GPU: "1"}}) if level == "warn"]
    assert texts == [f"the job needs 4 requests.{GPU}, and the quota q has 2 left"]
    texts = [
        text
        for level, text in found(api, nodes=4, resources={"limits": {GPU: "4", "memory": "32Gi"}})
        if level == "error"
    ]
    assert f"the job needs 16 requests.{GPU}, and the quota q has 8" in texts
    assert "the job needs 128Gi limits.memory, and the quota q has 64Gi" in texts


@pytest.mark.parametrize(
    ("job", "text"),
    [
        ({"resources": {"limits": {GPU: "16"}}}, f"a pod needs 16 {GPU}, and no node has more than 8"),
        (
            {"resources": {"limits": {GPU: "8"}}, "nodes": 3},
            f"the nodes have room for 2 pods with 8 {GPU}, and the job has 3",
        ),
        ({"resources": {"requests": {"memory": "65Gi"}}}, "a pod needs 65Gi memory, and no node has more than 64Gi"),
        ({"node_selector": {"zone": "x"}}, "no node is ready that has these labels"),
    ],
)
def test_what_no_node_can_give_is_an_error(job, text):
    assert ("error", text) in found(prepared(), **job)


def test_each_role_counts_with_its_own_resources():
    """Pservers need no GPU."""
    by_role = {"trainer": {"limits": {GPU: "8", "memory": "1Gi"}}, "pserver": {"limits": {"memory": "2Gi"}}}
    job = {"dialect": "jobset", "nodes": {"trainer": 2, "pserver": 4}, "resources": by_role}
    quota = {"metadata": {"name": "q"}, "status": {"hard": {"limits.memory": "9Gi", "pods": "5"}}}
    levels = found(prepared(objects={"ResourceQuota": [quota]}, kinds=("JobSet",)), **job)
    assert [text for level, text in levels if level == "error"] == [
        "the job needs 6 pods, and the quota q has 5",
        "the job needs 10Gi limits.memory, and the quota q has 9Gi",
    ]


def test_a_queue_of_kueue_needs_a_further_right():
    api = prepared(refused=[("list", "workloads")])
    assert found(api, queue="team")[0] == ("warn", "ann may not in the namespace team: list workloads.kueue.x-k8s.io")
    assert found(api)[0] == ("ok", "ok")


def test_nodes_that_take_no_pods_do_not_count():
    api = prepared(node("a", 8, ready=False), node("b", 8, cordoned=True), node("c", 2))
    assert ("error", f"a pod needs 8 {GPU}, and no node has more than 2") in found(
        api, resources={"limits": {GPU: "8"}}
    )


def test_what_may_not_be_read_is_a_warning():
    api = prepared(unreadable=("Node", "ResourceQuota", "Namespace"))
    assert found(api) == [
        ("ok", "ok"),
        ("warn", "not checked: ann may not list ResourceQuota"),
        ("warn", "not checked: ann may not list Node"),
    ]


def test_quantities_are_read_as_kubernetes_writes_them():
    values = {
        "4": 4,
        "500m": Decimal("0.5"),
        "16Gi": 16 << 30,
        "1e3": 1000,
        "2k": 2000,
        "1.5M": 1500000,
        "100n": Decimal("1e-7"),
    }
    assert {text: quantity(text) for text in values} == values
    assert [amount_text(quantity(text)) for text in ("4", "500m", "1536Mi", "2Ti")] == ["4", "0.5", "1.5Gi", "2Ti"]
    for wrong in ("", "four", "1 Gi", "-1", "1Xi"):
        with pytest.raises(ClustertoolError, match="no quantity"):
            quantity(wrong)
