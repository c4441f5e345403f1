"""The manifests of all dialects pass strict schemas: those of Kubernetes, and those of JobSet and PaddleJob in schemas/."""

from __future__ import annotations

import copy
import itertools
import json
import random
import string
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest

from clustertool.model.kubernetes.kubernetes_settings import read_settings
from clustertool.model.kubernetes.object_names import job_hash, object_name
from clustertool.model.kubernetes.workload import manifests, native, secret
from clustertool.model.paths import is_job_id
from tests.kubernetes.test_workload_manifests import DIALECTS, FULL, MODES, ORDER, pods

VERSIONS = ("1.30", "1.37")
TEMPLATE: dict[str, Any] = {
    "metadata": {"labels": {"of": "template"}},
    "spec": {"hostNetwork": True, "containers": [{"name": "clustertool", "env": [{"name": "A", "value": "1"}]}]},
}
KINDS = {"plain": {}, "gpus": {"resources": {"nvidia.com/gpu": 4}}, "full": FULL}


def check(one: dict[str, Any]) -> None:
    """Raises ValidationError."""
    for version in VERSIONS:
        kubernetes_validate.validate(one, version, strict=True)


def check_custom(one: dict[str, Any]) -> None:
    """The object itself, its pods, and the Jobs that it makes."""
    schema = json.loads((Path(__file__).parent / f"schemas/{one['kind'].lower()}.json").read_text())
    jsonschema.Draft202012Validator(schema).validate(one)
    for job in one["spec"].get("replicatedJobs", ()):
        check({"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "a"}, **copy.deepcopy(job["template"])})
    check_pods(one)


def check_pods(one: dict[str, Any]) -> None:
    for template in pods(one):
        metadata = {**template.get("metadata", {}), "name": "a"}
        check({"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": template["spec"]})


@pytest.mark.parametrize(("dialect", "mode", "kind"), list(itertools.product(DIALECTS, MODES, KINDS)))
@pytest.mark.parametrize("template", [{}, TEMPLATE], ids=["", "template"])
def test_all_objects_of_a_job_are_valid(dialect: str, mode: str, kind: str, template: dict[str, Any]) -> None:
    settings = read_settings({"dialect": dialect, "nodes": MODES[mode], **KINDS[kind]})
    order = ORDER.__class__(**{**vars(ORDER), "template": template})
    made = manifests(settings, order)
    if dialect == "job":
        check(made.workload)
    else:
        check_custom(made.workload)
    check(secret(order, b"bundle"))
    if made.service:
        check(made.service)


@pytest.mark.parametrize("mode", MODES)
def test_the_native_form_is_valid(mode: str) -> None:
    settings = read_settings({"dialect": "paddlejob", "nodes": MODES[mode], **FULL})
    check_custom(native(settings, ORDER, {role: ["python3", "train.py"] for role, _ in settings.nodes}))


@pytest.mark.parametrize("dialect", ["jobset", "paddlejob"])
@pytest.mark.parametrize("path", ["spec", "spec.role"])
def test_the_schemas_are_strict(dialect: str, path: str) -> None:
    workload = manifests(read_settings({"dialect": dialect, "nodes": MODES["ps"]}), ORDER).workload
    spec = workload["spec"]
    place = spec if path == "spec" else spec["replicatedJobs"][0] if dialect == "jobset" else spec["ps"]
    place["unknown"] = 1
    with pytest.raises(jsonschema.ValidationError, match="unknown"):
        check_custom(workload)


def test_all_job_ids_give_valid_names_which_differ() -> None:
    """Of each allowed form: any characters, lengths, and ids that differ in one character or in upper case only."""
    chance = random.Random(20261124)
    letters = string.ascii_letters + string.digits + "._-"
    ids = {"a", "A", "a" * 64, "A" * 64, "a." * 30, "0", "x-y", "x_y", "x.y", "x-Y", "X-y", "20261124-101500-abcd"}
    while len(ids) < 3000:
        ids.add("".join(chance.choice(letters) for _ in range(chance.randint(1, 64))))
    allowed = sorted(one for one in ids if is_job_id(one))
    assert len(allowed) > 2000
    names = {object_name(one) for one in allowed}
    assert len(names) == len({job_hash(one) for one in allowed}) == len(allowed)
    for name in names:
        assert name.startswith("ct-") and len(name) <= 40
        assert name[-1] in string.ascii_lowercase + string.digits
        assert set(name) <= set(string.ascii_lowercase + string.digits + "-")
