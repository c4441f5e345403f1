"""A node of the cluster by its object in the API: what of it pods can get."""

from __future__ import annotations

import re
from typing import Mapping

from clustertool.model.engine_node import EngineNode
from clustertool.model.kubernetes.pod_reasons import condition, fields, is_true, items, text, with_message

_UNITS = {
    "": 1.0,
    "n": 1e-9,
    "u": 1e-6,
    "m": 1e-3,
    "k": 1e3,
    "M": 1e6,
    "G": 1e9,
    "T": 1e12,
    "P": 1e15,
    "E": 1e18,
    **{unit + "i": 1024.0 ** (power + 1) for power, unit in enumerate("KMGTPE")},
}
_QUANTITY = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?)(?:([numkMGTPE]|[KMGTPE]i)|[eE]([+-]?[0-9]{1,2}))?")


def quantity(written: str) -> float:
    """A resource quantity (`500m`, `32Gi`, `1e3`) as a number. Raises ValueError."""
    found = _QUANTITY.fullmatch(written.strip())
    if found is None:
        raise ValueError(f"{written!r} is no quantity like 2, 500m or 32Gi")
    return float(found[1]) * _UNITS[found[2] or ""] * 10.0 ** int(found[3] or 0)


def node_view(node: Mapping[str, object]) -> EngineNode:
    """What the node has for pods. What pods use of it is in their own objects, which may be in other namespaces: it counts as
    0. reason: the taints, which keep pods away that do not tolerate them."""
    status, spec = fields(node, "status"), fields(node, "spec")
    allocatable, ready = fields(status, "allocatable"), condition(status, "Ready")
    state = "Ready" if is_true(ready) else with_message("NotReady", text(ready, "reason"))
    if spec.get("unschedulable") is True:
        state += ", cordoned"
    taints = [text(one, "key") + ":" + text(one, "effect") for one in items(spec, "taints")]
    cards = [(name, int(_amount(allocatable, name))) for name in sorted(allocatable) if _is_device(name)]
    return EngineNode(
        name=text(fields(node, "metadata"), "name"),
        state=state,
        cpus=int(_amount(allocatable, "cpu")),
        used_cpus=0,
        memory=int(_amount(allocatable, "memory") / 1e6),
        gpus=tuple((name, number, 0) for name, number in cards if number),
        reason=", ".join(taints),
    )


def _is_device(name: str) -> bool:
    """Extended resources have a domain; those of kubernetes.io are no devices."""
    return "/" in name and not name.partition("/")[0].endswith("kubernetes.io") and name.isprintable()


def _amount(resources: Mapping[str, object], name: str) -> float:
    try:
        return quantity(text(resources, name))
    except ValueError:
        return 0.0
