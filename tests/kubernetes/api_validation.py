"""What the API server of the tests finds wrong in a manifest, in the form of the answers of a real one (Kubernetes 1.37).

Unknown fields and types come from the schemas of Kubernetes; of the rules for values there are those that the tests need. A
real server applies these rules to pods of a Job only: it knows of other workloads what their definitions state.
"""

from __future__ import annotations

import copy
import functools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import kubernetes_validate
from kubernetes_validate import utils

utils.schema_contents = functools.cache(utils.schema_contents)  # it reads 1 MB for each object, in 10 ms
VERSION = "1.37"
CHOICES = {
    "dnsPolicy": ("ClusterFirst", "ClusterFirstWithHostNet", "Default", "None"),
    "effect": ("NoExecute", "NoSchedule", "PreferNoSchedule"),
    "imagePullPolicy": ("Always", "IfNotPresent", "Never"),
}
Obj = Mapping[str, Any]


class Refusal(NamedTuple):
    """code: of the answer. causes: the wrong fields, as a Status lists them."""

    code: int
    message: str
    causes: tuple[Mapping[str, str], ...] = ()


def refusal(kind: str, obj: Obj, strict: bool) -> Refusal | None:
    """strict: an unknown field is an error, and not left out."""
    for prefix, part in parts(obj):
        try:
            if part["kind"] in ("JobSet", "PaddleJob"):
                schema = json.loads((Path(__file__).parent / f"schemas/{part['kind'].lower()}.json").read_text())
                jsonschema.Draft202012Validator(schema).validate(part)
            else:
                kubernetes_validate.validate(copy.deepcopy(dict(part)), VERSION, strict=True)
        except jsonschema.ValidationError as error:
            found = _of_schema(kind, prefix, error)
            if strict or error.validator != "additionalProperties":
                return found
    if kind in ("Job", "Pod"):
        causes = [
            cause for prefix, part in parts(obj) if part["kind"] == "Pod" for cause in _of_pod(prefix, part["spec"])
        ]
        return _invalid(kind, causes) if causes else None
    return None


def parts(obj: Obj) -> Iterator[tuple[str, Obj]]:
    """The object, and the pods of a workload, with the paths that they have in it."""
    yield "", obj
    for prefix, template in templates(obj):
        yield prefix, {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "a"}, **template}
    if obj["kind"] == "Pod":
        yield "", obj


def templates(obj: Obj) -> Iterator[tuple[str, Obj]]:
    if obj["kind"] == "Job":
        yield "spec.template.", obj["spec"]["template"]
    for number, job in enumerate(obj.get("spec", {}).get("replicatedJobs", ())):
        yield f"spec.replicatedJobs[{number}].template.spec.template.", job["template"]["spec"]["template"]
    if obj["kind"] == "PaddleJob":
        for role in {"worker", "ps", "heter"} & set(obj["spec"]):
            yield f"spec.{role}.template.", obj["spec"][role]["template"]


def _of_schema(kind: str, prefix: str, error: jsonschema.ValidationError) -> Refusal:
    path = prefix + "".join(f"[{one}]" if isinstance(one, int) else f".{one}" for one in error.absolute_path).lstrip(
        "."
    )
    unusable = f'{kind} in version "v1" cannot be handled as a {kind}: '
    if error.validator == "additionalProperties":
        (*_, name) = sorted(set(error.instance) - set(error.schema["properties"]))
        return Refusal(400, f'{unusable}strict decoding error: unknown field "{path}.{name}"')
    if error.validator == "required":
        name = next(one for one in error.validator_value if one not in error.instance)
        return _invalid(kind, [_cause(f"{path}.{name}", "Required value")])
    if error.validator == "type":
        plain = re.sub(r"\[\d+\]", "", path)  # it names no entry of a list
        is_ = type(error.instance).__name__.replace("str", "string").replace("int", "number")
        wanted = error.validator_value if isinstance(error.validator_value, str) else error.validator_value[0]
        return Refusal(
            400, f"{unusable}json: cannot unmarshal {is_} into Go struct field PodSpec.{plain} of type {wanted}"
        )
    return _invalid(kind, [_cause(path, error.message)])


def _of_pod(prefix: str, spec: Obj) -> Iterator[Mapping[str, str]]:
    top = f"{prefix}spec"
    yield from _choice(top, spec, "dnsPolicy")
    for number, toleration in enumerate(spec.get("tolerations") or ()):
        yield from _choice(f"{top}.tolerations[{number}]", toleration, "effect")
    volumes = {volume["name"] for volume in spec.get("volumes") or ()}
    for index, container in enumerate(spec["containers"]):
        at = f"{top}.containers[{index}]"
        yield from _choice(at, container, "imagePullPolicy")
        for number, port in enumerate(container.get("ports") or ()):
            if not 0 < port["containerPort"] < 65536:
                wrong = f"Invalid value: {port['containerPort']}: must be between 1 and 65535, inclusive"
                yield _cause(f"{at}.ports[{number}].containerPort", wrong)
        for number, mount in enumerate(container.get("volumeMounts") or ()):
            if mount["name"] not in volumes:
                yield _cause(f"{at}.volumeMounts[{number}].name", f'Not found: "{mount["name"]}"')


def _choice(at: str, owner: Obj, name: str) -> Iterator[Mapping[str, str]]:
    if owner.get(name) and owner[name] not in CHOICES[name]:
        known = ", ".join(f'"{one}"' for one in CHOICES[name])
        yield _cause(f"{at}.{name}", f'Unsupported value: "{owner[name]}": supported values: {known}')


def _cause(field: str, message: str) -> Mapping[str, str]:
    return {"reason": "FieldValueInvalid", "field": field, "message": message}


def _invalid(kind: str, causes: list[Mapping[str, str]]) -> Refusal:
    listed = ", ".join(f"{one['field']}: {one['message']}" for one in causes)
    return Refusal(422, f'{kind} "a" is invalid: {f"[{listed}]" if len(causes) > 1 else listed}', tuple(causes))
