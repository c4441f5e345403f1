"""The manifests of all dialects, and settings and manifests that are refused with the path of the field."""

from __future__ import annotations

import copy
import itertools
import json
from typing import Any

import pytest

from clustertool.errors import ConfigError, DataError, PreflightError, UsageError
from clustertool.model.kubernetes.kubernetes_settings import read_settings
from clustertool.model.kubernetes.pod_places import coordinator_host, node_of_pod, node_roles, pod_hosts
from clustertool.model.kubernetes.workload import (
    MOST_SECRET,
    WorkloadOrder,
    manifests,
    native,
    pod_root,
    secret,
    with_owner,
)
from tests.kubernetes.api_validation import refusal

DIALECTS = ("job", "jobset", "paddlejob")
MODES: dict[str, Any] = {
    "collective": 3,
    "ps": {"pserver": 2, "trainer": 3},
    "heter": {"trainer": 2, "pserver": 1, "heter": 2},
}
ORDER = WorkloadOrder("20261124-101500-abcd", "ann", "registry.example.org/train:1", root_dir="~/clustertool")
FULL = {
    "resources": {"cpu": 4, "memory": "8Gi", "nvidia.com/gpu": 2},
    "tolerations": [{"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}],
    "node_selector": {"pool": "gpu"},
    "volumes": {"/data": "pvc:corpus/words:ro", "/scratch": "emptydir", "/conf": {"configMap": {"name": "c"}}},
    "shared_memory": "8Gi",
    "image_pull_secrets": ["registry"],
    "service_account": "trainer",
    "queue": "team-a",
    "priority_class": "high",
    "labels": {"team": "a"},
    "annotations": {"note": "any text: here"},
    "output": "pvc:results/runs",
    "workspace": "pvc:code/word2vec",
    "affinity": {
        "podAntiAffinity": {
            "requiredDuringSchedulingIgnoredDuringExecution": [{"topologyKey": "kubernetes.io/hostname"}]
        }
    },
}


def made(dialect: str, nodes: Any = 2, **settings: Any) -> dict[str, Any]:
    return manifests(read_settings({"dialect": dialect, "nodes": nodes, **settings}), ORDER).workload


def pods(workload: dict[str, Any]) -> list[dict[str, Any]]:
    """The templates of pods in a workload."""
    spec = workload["spec"]
    if workload["kind"] == "Job":
        return [spec["template"]]
    if workload["kind"] == "JobSet":
        return [job["template"]["spec"]["template"] for job in spec["replicatedJobs"]]
    return [spec[role]["template"] for role in ("worker", "ps", "heter") if role in spec]


@pytest.mark.parametrize(("dialect", "mode", "full"), list(itertools.product(DIALECTS, MODES, (False, True))))
def test_each_pod_joins_as_a_restricted_one(dialect: str, mode: str, full: bool) -> None:
    workload = made(dialect, MODES[mode], **(FULL if full else {}))
    assert refusal(workload["kind"], workload, strict=True) is None
    for template in pods(workload):
        spec, (container,) = template["spec"], template["spec"]["containers"]
        assert spec["restartPolicy"] == "Never"
        assert spec["automountServiceAccountToken"] is spec["enableServiceLinks"] is False
        assert spec["terminationGracePeriodSeconds"] == 30
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert container["command"] == ["python3", "/etc/clustertool/bundle.pyz", "join"]
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        assert volumes[mounts["/clustertool"]]["emptyDir"] == {}
        assert volumes[mounts["/etc/clustertool"]]["secret"]["secretName"] == ORDER.name
        if full:
            assert container["resources"]["limits"]["nvidia.com/gpu"] == "2"
            assert volumes[mounts["/dev/shm"]]["emptyDir"] == {"medium": "Memory", "sizeLimit": "8Gi"}
            assert {"/data", "/clustertool-output", "/clustertool-workspace"} <= set(mounts)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_the_cluster_may_choose_the_user_and_shared_memory_needs_no_size(dialect: str) -> None:
    """OpenShift's restricted-v2 refuses each uid and gid that is not of the range of the namespace, fsGroup too."""
    numbers = ("runAsUser", "runAsGroup", "fsGroup")
    for user, expected in ((None, [1000] * 3), (1000660000, [1000660000] * 3), ("cluster", [None] * 3)):
        for template in pods(made(dialect, user=user, shared_memory=True)):
            context = template["spec"]["securityContext"]
            assert [context.get(name) for name in numbers] == expected and context["runAsNonRoot"] is True
            assert {"name": "shared-memory", "emptyDir": {"medium": "Memory"}} in template["spec"]["volumes"]


@pytest.mark.parametrize("dialect", DIALECTS)
def test_all_nodes_have_a_pod_and_a_host_name(dialect: str) -> None:
    settings = read_settings({"dialect": dialect, "nodes": MODES["heter"]})
    firsts = [
        int(template["metadata"]["labels"]["clustertool/first-node"])
        for template in pods(made(dialect, MODES["heter"]))
    ]
    assert firsts == ([0] if dialect == "job" else [0, 2, 3])
    hosts = pod_hosts(dialect, "ct-x", settings.nodes)
    assert len(set(hosts)) == settings.node_count == 5
    assert node_roles(settings.nodes, settings.split) == ("trainer", "trainer", "pserver", "heter", "heter")
    expected = {"job": "ct-x-0.ct-x", "jobset": "ct-x-trainer-0-0.ct-x", "paddlejob": ""}
    assert coordinator_host(dialect, "ct-x", settings.nodes) == expected[dialect]


def test_plain_nodes_play_all_roles() -> None:
    settings = read_settings({"nodes": 3})
    assert settings.node_count == 3 and node_roles(settings.nodes, settings.split) == ()


def test_the_number_of_a_pod() -> None:
    labels = {"clustertool/first-node": "4"}
    assert node_of_pod({"metadata": {"name": "x-ps-1", "labels": labels}}) == 5
    index = {"batch.kubernetes.io/job-completion-index": "2"}
    assert node_of_pod({"metadata": {"name": "x-abcde", "labels": labels, "annotations": index}}) == 6
    assert node_of_pod({"metadata": {"name": "x-1"}}) is None


def test_a_queue_is_that_of_kueue_or_of_volcano() -> None:
    for dialect in ("job", "jobset"):
        assert made(dialect, queue="team")["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == "team"
    paddle = made("paddlejob", queue="team", priority_class="high")
    assert paddle["spec"]["schedulingPolicy"] == {"queue": "team", "priorityClass": "high"}
    assert "kueue.x-k8s.io/queue-name" not in paddle["metadata"]["labels"]


def test_the_service_and_the_secret_belong_to_the_workload() -> None:
    objects = manifests(read_settings({}), ORDER)
    created = copy.deepcopy(objects.workload)
    created["metadata"]["uid"] = "1-2"
    assert objects.service is not None
    service = with_owner(objects.service, created)
    (owner,) = service["metadata"]["ownerReferences"]
    assert owner == {"apiVersion": "batch/v1", "kind": "Job", "name": ORDER.name, "uid": "1-2"}
    assert service["spec"]["clusterIP"] == "None" and service["spec"]["publishNotReadyAddresses"] is True
    (template,) = pods(objects.workload)
    assert service["spec"]["selector"].items() <= template["metadata"]["labels"].items()
    assert secret(ORDER, b"bytes")["data"] == {"bundle.pyz": "Ynl0ZXM="}
    assert "ownerReferences" not in objects.service["metadata"], "the manifest itself is unchanged"
    with pytest.raises(PreflightError, match="1000001 bytes"):
        secret(ORDER, bytes(MOST_SECRET + 1))
    assert manifests(read_settings({"dialect": "jobset"}), ORDER).service is None


def test_null_in_a_security_context_of_the_user_removes_ours() -> None:
    users = {"spec": {"securityContext": {"runAsUser": None, "runAsGroup": None, "fsGroup": 7}}}
    workload = manifests(read_settings({}), WorkloadOrder("a", "ann", "x:1", template=users)).workload
    (template,) = pods(workload)
    context = template["spec"]["securityContext"]
    assert context == {"runAsNonRoot": True, "fsGroup": 7, "seccompProfile": {"type": "RuntimeDefault"}}


def test_a_template_of_the_user_gets_ours_merged_into_it() -> None:
    users = {
        "metadata": {"labels": {"cost": "7"}, "annotations": {"x": "y"}},
        "spec": {
            "restartPolicy": "Always",
            "runtimeClassName": "nvidia",
            "securityContext": {"runAsUser": 4000},
            "containers": [
                {"name": "side", "image": "side:1"},
                {"name": "clustertool", "image": "theirs:2", "env": [{"name": "A", "value": "b"}], "command": ["sh"]},
            ],
            "volumes": [{"name": "own", "emptyDir": {}}],
        },
    }
    order = WorkloadOrder("a", "ann", template=users)
    (template,) = pods(manifests(read_settings({}), order).workload)
    spec = template["spec"]
    assert [one["name"] for one in spec["containers"]] == ["clustertool", "side"]
    mine = spec["containers"][0]
    assert mine["image"] == "theirs:2" and mine["command"][-1] == "join"
    assert {"name": "A", "value": "b"} in mine["env"] and {"name": "CLUSTERTOOL_FIRST_NODE", "value": "0"} in mine[
        "env"
    ]
    assert spec["restartPolicy"] == "Never" and spec["runtimeClassName"] == "nvidia"
    assert spec["securityContext"]["runAsUser"] == 4000 and spec["securityContext"]["runAsNonRoot"] is True
    assert template["metadata"]["labels"]["cost"] == "7"
    assert "own" in [volume["name"] for volume in spec["volumes"]]


def test_a_job_without_an_image_is_refused() -> None:
    with pytest.raises(ConfigError, match="no image"):
        manifests(read_settings({}), WorkloadOrder("a", "ann"))


@pytest.mark.parametrize(
    ("root", "there"), [("~/clustertool", "/clustertool"), ("~", "/clustertool"), ("/scratch/x/", "/scratch/x")]
)
def test_root_dir_in_a_pod(root: str, there: str) -> None:
    assert pod_root(root) == there


WRONG_SETTINGS: list[tuple[dict[str, Any], str]] = [
    ({"tolerations": {"key": "a"}}, "tolerations"),
    ({"tolerations": ["a"]}, "tolerations[0]"),
    ({"tolerations": [{"key": {1, 2}}]}, "tolerations[0].key"),
    ({"resources": {"requests": {"cpu": "4 cores"}}}, "resources.requests.cpu"),
    (
        {"resources": {"requests": {"nvidia.com/gpu": 2}, "limits": {"nvidia.com/gpu": 4}}},
        "resources.limits['nvidia.com/gpu']",
    ),
    ({"nodes": {"trainer": 0}}, "nodes.trainer"),
    ({"nodes": {"pserver": 2}}, "nodes.trainer"),
    ({"nodes": {"trainer": 2, "chief": 1}}, "nodes.chief"),
    ({"nodes": True}, "nodes"),
    ({"affinity": ["nodeAffinity"]}, "affinity"),
    ({"affinity": {"nodeAffinity": {2: "a"}}}, "affinity.nodeAffinity.2"),
    ({"node_selector": {"pool": 1}}, "node_selector.pool"),
    ({"volumes": {"data": "pvc:a"}}, "volumes.data"),
    ({"volumes": {"/data": "pvc:a/../b"}}, "volumes['/data']"),
    ({"volumes": {"/data": {"configMap": {"name": "a"}, "emptyDir": {}}}}, "volumes['/data']"),
    ({"dialect": "jobs"}, "dialect"),
    ({"labels": {"clustertool/job": "x"}}, "labels['clustertool/job']"),
    ({"labels": {"a": 2}}, "labels.a"),
    ({"image_pull_secrets": "registry"}, "image_pull_secrets"),
    ({"keep": "soon"}, "keep"),
    ({"shared_memory": "much"}, "shared_memory"),
    ({"shared_memory": False}, "shared_memory"),
    ({"user": 0}, "user"),
    ({"user": "root"}, "user"),
    ({"user": 1 << 31}, "user"),
    ({"workspace": "image:relative"}, "workspace"),
    ({"output": "/data"}, "output"),
    ({"paddlejob": {"intranet": "HostNetwork"}}, "paddlejob.intranet"),
    ({"paddlejob": {"with_gloo": True}}, "paddlejob.with_gloo"),
    ({"paddlejob": {"clean_pods": "Never"}}, "paddlejob.clean_pods"),
    ({"namespace": "Team A"}, "namespace"),
    ({"queues": "a"}, "did you mean queue?"),
]


@pytest.mark.parametrize(("settings", "path"), WRONG_SETTINGS)
def test_a_wrong_setting_is_refused_with_its_path(settings: dict[str, Any], path: str) -> None:
    with pytest.raises(ConfigError) as error:
        read_settings(settings)
    assert path in f"{error.value.what} {error.value.fix}"
    with pytest.raises(DataError):
        read_settings({}, settings)
    with pytest.raises(UsageError):
        read_settings({}, {}, settings)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(("place", "field"), [("spec", "x"), ("spec.volumes", "1.emptyDir.x"), ("metadata", "x")])
def test_the_api_server_knows_the_fields_of_pods_in_each_dialect(dialect: str, place: str, field: str) -> None:
    workload = made(dialect, MODES["ps"])
    owner: Any = pods(workload)[0]
    *above, last = f"{place}.{field}".split(".")
    for name in above:
        owner = owner[int(name)] if name.isdecimal() else owner[name]
    owner[last] = 1
    wrong = refusal(workload["kind"], workload, strict=True)
    assert wrong is not None and wrong.code == 400
    assert '.x"' in wrong.message and "unknown field" in wrong.message


def test_pods_of_one_job_cannot_differ() -> None:
    by_role = {"nodes": MODES["ps"], "resources": {"trainer": {"cpu": 4}, "pserver": {"cpu": 1}}}
    with pytest.raises(ConfigError, match="jobset"):
        read_settings(by_role)
    limits = [
        template["spec"]["containers"][0]["resources"]["limits"]
        for template in pods(manifests(read_settings({**by_role, "dialect": "jobset"}), ORDER).workload)
    ]
    assert limits == [{"cpu": "4"}, {"cpu": "1"}]


def test_the_native_form_leaves_the_operators_variables_to_it() -> None:
    settings = read_settings({"dialect": "paddlejob", "workspace": "image:/code", "nodes": 2})
    env = (("PADDLE_TRAINERS_NUM", "9"), ("FLAGS_x", "1"))
    made_ = native(settings, WorkloadOrder("a", "ann", "x:1", env=env), {"trainer": ["python", "a.py"]})
    (container,) = made_["spec"]["worker"]["template"]["spec"]["containers"]
    assert container["command"] == ["python", "a.py"] and container["workingDir"] == "/code"
    assert container["env"] == [{"name": "FLAGS_x", "value": "1"}]
    assert "clustertool-bundle" not in json.dumps(made_)
