"""PaddleJob manifests have the fields of the operator's published examples, and each other field has a reason.

The fields are those of the files in deploy/examples of github.com/PaddleFlow/paddle-operator and of its predecessor
github.com/PaddlePaddle/PaddleCloud, both Apache-2.0. Neither has an example of the role heter.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from clustertool.model.kubernetes.kubernetes_settings import read_settings
from clustertool.model.kubernetes.workload import WorkloadOrder, manifests, native
from tests.kubernetes.api_validation import refusal

IMAGES = "registry.baidubce.com"
WIDE = f"{IMAGES}/paddle-operator/demo-wide-and-deep:v1"
OLD_WIDE = f"{IMAGES}/kuizhiqing/demo-wide-and-deep:v1"
LAUNCH = ["-m", "paddle.distributed.launch"]
SHM = {
    "volumeMounts": [{"mountPath": "/dev/shm", "name": "dshm"}],
    "resources": {"limits": {"nvidia.com/gpu": 1}},
}


class Example(NamedTuple):
    """One file. spec: the fields next to the roles. wanted: the settings that ask for the same. container, pod: the fields of
    each role. worker: of the pods of that role only. pull: the policy of CONTAINER."""

    file: str
    image: str
    spec: dict[str, Any]
    wanted: dict[str, Any]
    roles: tuple[str, ...] = ("worker", "ps")
    container: dict[str, Any] = {}
    pod: dict[str, Any] = {}
    worker: dict[str, Any] = {}
    pull: str = ""

    @property
    def manifest(self) -> dict[str, Any]:
        container = {"name": "paddle", "image": self.image, **self.container}
        pod = {**self.pod, "containers": [container]}
        roles = {role: {"replicas": 2, "template": {"spec": dict(pod)}} for role in self.roles}
        roles["worker"]["template"]["spec"].update(self.worker)
        head = {"apiVersion": "batch.paddlepaddle.org/v1", "kind": "PaddleJob", "metadata": {"name": self.file}}
        return {**head, "spec": {**self.spec, **roles}}

    def made(self, is_native: bool) -> dict[str, Any]:
        nodes = {"trainer": 2, "pserver": 2} if "ps" in self.roles else 2
        settings = read_settings({"dialect": "paddlejob", "nodes": nodes, **self.wanted})
        template = {"spec": self.worker} if self.worker else {}
        order = WorkloadOrder(self.file, "ann", self.image, template=template, pull=self.pull, given_name=self.file)
        command = [*self.container.get("command", ()), *self.container.get("args", ())]
        commands = dict.fromkeys(("trainer", "pserver"), command)
        return native(settings, order, commands) if is_native else manifests(settings, order).workload


EXAMPLES = [
    Example(
        "simple",
        f"{IMAGES}/paddlepaddle/paddle:2.4.0rc0-cpu",
        {"cleanPodPolicy": "Never"},
        {},
        roles=("worker",),
        container={"command": ["python"], "args": [*LAUNCH, "run_check"]},
    ),
    Example(
        "resnet",
        f"{IMAGES}/paddle-operator/demo-resnet:v1",
        {"cleanPodPolicy": "Never"},
        {"resources": {"nvidia.com/gpu": 1}, "shared_memory": True},
        roles=("worker",),
        container={"command": ["python"], "args": [*LAUNCH, "train_fleet.py"], **SHM},
        pod={"volumes": [{"name": "dshm", "emptyDir": {"medium": "Memory"}}]},
    ),
    Example(
        "wide-and-deep-podip",
        OLD_WIDE,
        {"cleanPodPolicy": "Never", "intranet": "PodIP"},
        {"paddlejob": {"intranet": "PodIP"}},
        pod={"restartPolicy": "Never"},
    ),
    Example(
        "wide-and-deep-service",
        WIDE,
        {"cleanPodPolicy": "Never", "intranet": "Service", "withGloo": 1},
        {"paddlejob": {"intranet": "Service", "with_gloo": 1}},
    ),
    Example(
        "wide-and-deep-volcano",
        WIDE,
        {"cleanPodPolicy": "Never", "withGloo": 1},
        {"paddlejob": {"with_gloo": 1}},
        worker={"schedulerName": "volcano"},
    ),
    Example(
        "deepfm",
        f"{IMAGES}/paddle-operator/demo-deepfm:v1",
        {"cleanPodPolicy": "OnFailed", "withGloo": 1},
        {"paddlejob": {"clean_pod_policy": "OnFailure", "with_gloo": 1}},
        container={"imagePullPolicy": "Always", "command": ["python3"], "args": ["train.py"]},
        pull="Always",
    ),
]
POD, CONTAINER = "spec.ROLE.template.spec", "spec.ROLE.template.spec.containers[0]"
DIFFERENT = {
    f"{CONTAINER}.name": "clustertool finds the container by its name",
    f"{CONTAINER}.command": "one list: the command and its arguments; without --native it is the joining process",
    f"{CONTAINER}.args": "in the command",
    f"{CONTAINER}.volumeMounts[0].name": "any name",
    f"{POD}.volumes[0].name": "any name",
}
MORE = {
    "metadata.labels": "commands find the job by them",
    "metadata.annotations": "the id of the job, and what `jobs` shows",
    "spec.intranet": "the operator's default, PodIP",
    "spec.ROLE.template.metadata": "the labels and the id of the job",
    f"{POD}.restartPolicy": "a lost pod ends the job",
    f"{POD}.automountServiceAccountToken": "no pod needs the API server",
    f"{POD}.enableServiceLinks": "variables of all Services are no part of a job",
    f"{POD}.terminationGracePeriodSeconds": "GRACE and 20 s",
    f"{POD}.securityContext": "of the profile restricted",
    f"{POD}.schedulerName": "a template is that of all roles",
    f"{CONTAINER}.securityContext": "of the profile restricted",
    f"{CONTAINER}.terminationMessagePolicy": "the last lines of a program that leaves no message",
    f"{CONTAINER}.resources.requests": "Kubernetes sets them to the limits, too",
}


def leaves(value: Any, path: str = "") -> dict[str, Any]:
    """The values by their paths. A quantity is text, and an empty list is no field."""
    if isinstance(value, dict):
        rows = [(f"{path}.{key}" if path else key, one) for key, one in value.items()]
    elif isinstance(value, list) and any(isinstance(one, dict) for one in value):
        rows = [(f"{path}[{number}]", one) for number, one in enumerate(value)]
    else:
        return {} if value == [] else {path: str(value) if "resources" in path else value}
    return {name: leaf for at, one in rows for name, leaf in leaves(one, at).items()}


def of_role(path: str) -> str:
    for role in ("worker", "ps"):
        path = path.replace(f"spec.{role}.", "spec.ROLE.")
    return path


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.file)
def test_the_native_form_has_each_field_of_the_example(example: Example) -> None:
    theirs, ours = leaves(example.manifest), leaves(example.made(is_native=True))
    named = {path for path in theirs if of_role(path) in DIFFERENT}
    policy = {"spec.cleanPodPolicy"} if theirs["spec.cleanPodPolicy"] == "OnFailed" else set()  # no documented value
    wrong = {path: (value, ours.get(path)) for path, value in theirs.items() if ours.get(path) != value}
    assert wrong.keys() - named - policy == set()
    for role in example.roles if "command" in example.container else ():
        at = f"spec.{role}.template.spec.containers[0]"
        assert ours[f"{at}.command"] == theirs[f"{at}.command"] + theirs[f"{at}.args"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.file)
def test_each_further_field_has_a_reason(example: Example) -> None:
    further = leaves(example.made(is_native=True)).keys() - leaves(example.manifest).keys()
    unknown = [path for path in further if not any(_below(of_role(path), known) for known in MORE)]
    assert unknown == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.file)
def test_pods_that_join_differ_in_what_they_run_only(example: Example) -> None:
    theirs, ours = leaves(example.made(is_native=True)), leaves(example.made(is_native=False))
    parts = (".command", ".env", ".volumeMounts", ".volumes", ".clustertool/first-node")
    assert [path for path in theirs if ours.get(path) != theirs[path] and not any(one in path for one in parts)] == []
    assert [path for path in ours.keys() - theirs.keys() if not any(one in path for one in parts)] == []


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.file)
def test_the_example_has_no_unknown_field(example: Example) -> None:
    assert refusal("PaddleJob", example.manifest, strict=True) is None


def test_no_reason_is_left_over() -> None:
    """Each difference in the tables above is one of an example."""
    further, named = set(), set()
    for example in EXAMPLES:
        theirs, ours = leaves(example.manifest), leaves(example.made(is_native=True))
        further |= {known for path in ours.keys() - theirs.keys() for known in MORE if _below(of_role(path), known)}
        named |= {of_role(path) for path, value in theirs.items() if ours.get(path) != value}
    assert further == MORE.keys()
    assert DIFFERENT.keys() <= named


def _below(path: str, top: str) -> bool:
    return path == top or path.startswith((f"{top}.", f"{top}["))
