"""A node of the cluster states in its object in the API what of it pods can get, in quantities: `500m`, `32Gi`, `1e3`."""

from __future__ import annotations

import re
from decimal import Decimal
from typing import Mapping

from clustertool.model.engine_views import EngineNode
from clustertool.model.kubernetes.api_objects import condition, fields, is_true, items, text, with_message

UNITS = {
    unit: Decimal(1000) ** power for power, unit in enumerate(("n", "u", "m", "", "k", "M", "G", "T", "P", "E"), -3)
}
UNITS.update({f"{unit}i": Decimal(1024) ** power for power, unit in enumerate("KMGTPE", 1)})
# The numbers of digits are bounded: a server may send any text.
_QUANTITY = re.compile(
    r"([0-9]{1,18}(?:\.[0-9]{0,18})?|\.[0-9]{1,18})(?:([eE][+-]?[0-9]{1,2})|([numkMGTPE]|[KMGTPE]i)?)"
)


def quantity(written: str) -> Decimal:
    """Parse a quantity of Kubernetes. Raises ValueError for another text."""
    found = _QUANTITY.fullmatch(written)
    if found is None:
        raise ValueError(f"{written!r:.60} is no quantity of Kubernetes")
    return Decimal(found[1] + (found[2] or "")) * UNITS[found[3] or ""]


def node_view(node: Mapping[str, object]) -> EngineNode:
    """Describe a node of the cluster by its object: state, taints (as reason), and the amounts that pods can get.

    What pods use counts as 0: it is in their objects, which may be in other namespaces.
    """
    status, spec = fields(node, "status"), fields(node, "spec")
    allocatable = fields(status, "allocatable")
    state = "Ready" if is_ready(node) else with_message("NotReady", text(condition(status, "Ready"), "reason"))
    if is_cordoned(node):
        state += ", cordoned"
    taints = [text(one, "key") + ":" + text(one, "effect") for one in items(spec, "taints")]
    cards = [(name, int(_amount(allocatable, name))) for name in sorted(allocatable) if _is_device(name)]
    return EngineNode(
        name=text(fields(node, "metadata"), "name"),
        state=state,
        cpus=int(_amount(allocatable, "cpu")),
        used_cpus=0,
        memory=int(_amount(allocatable, "memory") / 10**6),
        gpus=tuple((name, number, 0) for name, number in cards if number),
        reason=", ".join(taints),
    )


def is_ready(node: Mapping[str, object]) -> bool:
    """Return whether the node's condition Ready is true."""
    return is_true(condition(fields(node, "status"), "Ready"))


def is_cordoned(node: Mapping[str, object]) -> bool:
    """Return whether the node takes no new pods, because an administrator has cordoned it."""
    return fields(node, "spec").get("unschedulable") is True


def _is_device(name: str) -> bool:
    """Return whether a resource is a device: its name has a domain other than kubernetes.io."""
    return "/" in name and not name.partition("/")[0].endswith("kubernetes.io") and name.isprintable()


def _amount(resources: Mapping[str, object], name: str) -> Decimal:
    """Return the amount of a resource; 0 if it is absent or no quantity."""
    try:
        return quantity(text(resources, name))
    except ValueError:
        return Decimal()
