"""The objects of the API server: the kinds that are read and written, where the server has them, and how their fields are read.

Objects come as JSON. They are read as input of others: a field of another type counts as absent.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Any, Dict, List, Mapping

Json = Any  # a value of an object, as the API server sends it
Object = Mapping[str, Json]
Manifest = Dict[str, Json]
_LONGEST = 300  # characters of a message


@dataclass(frozen=True)
class ObjectKind:
    """A kind of objects.

    version: apiVersion of its objects. plural: its name in paths and in rights. foreground: an object is deleted after
    everything that it owns, else before.
    """

    name: str
    version: str
    plural: str
    namespaced: bool = True
    foreground: bool = True

    @property
    def group(self) -> str:
        """The API group, "" for the core."""
        return self.version.rpartition("/")[0]

    @property
    def resource(self) -> str:
        """Its name in rights and resource definitions: PLURAL.GROUP."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    @property
    def top(self) -> str:
        """The path of its API version."""
        return f"/apis/{self.version}" if self.group else f"/api/{self.version}"

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of the object with this name in the API, or of all objects of the kind ("")."""
        inside = f"/namespaces/{namespace}" if self.namespaced else ""
        return f"{self.top}{inside}/{self.plural}{'/' if name else ''}{name}"


_ALL = (
    ObjectKind("Pod", "v1", "pods"),
    ObjectKind("Secret", "v1", "secrets"),
    ObjectKind("Service", "v1", "services"),
    ObjectKind("Event", "v1", "events"),
    ObjectKind("ResourceQuota", "v1", "resourcequotas"),
    ObjectKind("Node", "v1", "nodes", namespaced=False),
    ObjectKind("Namespace", "v1", "namespaces", namespaced=False),
    ObjectKind("Job", "batch/v1", "jobs"),
    ObjectKind("JobSet", "jobset.x-k8s.io/v1alpha2", "jobsets"),
    # The operator makes the pods of a PaddleJob again as long as its object is there, also while that is being deleted.
    ObjectKind("PaddleJob", "batch.paddlepaddle.org/v1", "paddlejobs", foreground=False),
    ObjectKind("Workload", "kueue.x-k8s.io/v1beta1", "workloads"),
    ObjectKind("CustomResourceDefinition", "apiextensions.k8s.io/v1", "customresourcedefinitions", namespaced=False),
)
KINDS = {kind.name: kind for kind in _ALL}


def condition(status: Object, kind: str) -> Dict[str, object]:
    """Return the condition of this type in a status; {} if there is none."""
    return next((one for one in items(status, "conditions") if one.get("type") == kind), {})


def is_true(found: Object) -> bool:
    """Return whether a condition has the status "True"."""
    return found.get("status") == "True"


def with_message(reason: str, message: str) -> str:
    """Return "reason: message"; only the reason without another message."""
    return f"{reason}: {message}" if message and message != reason else reason


def fields(of: Object, name: str) -> Dict[str, object]:
    """Return the field if it is an object, else {}."""
    found = of.get(name)
    return found if isinstance(found, dict) else {}


def items(of: Object, name: str) -> List[Dict[str, object]]:
    """Return the objects in the field if it is a list, else []."""
    found = of.get(name)
    return [one for one in found if isinstance(one, dict)] if isinstance(found, list) else []


def text(of: Object, name: str) -> str:
    """Return the field as one line of at most 300 characters; "" if it is no string. Control characters become spaces."""
    found = of.get(name)
    if not isinstance(found, str):
        return ""
    return " ".join("".join(c if c.isprintable() else " " for c in found).split())[:_LONGEST]


def seconds(written: str) -> float:
    """Convert a time of the API server to seconds since the epoch; 0.0 if it is no time."""
    try:
        return datetime.fromisoformat(written.replace("Z", "+00:00")).timestamp()
    except (ValueError, OverflowError):
        return 0.0
