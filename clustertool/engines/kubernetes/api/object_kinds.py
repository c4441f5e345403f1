"""This table names the kinds of objects that are read and written, and where the API server has them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from clustertool.model.kubernetes.merged_template import Json as Json  # of the objects

Object = Mapping[str, Json]
Manifest = dict[str, Json]


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
        """As rights and custom resource definitions name it."""
        return f"{self.plural}.{self.group}" if self.group else self.plural

    def path(self, namespace: str, name: str = "") -> str:
        """Return the path of one object, or of all."""
        top = f"/apis/{self.version}" if self.group else f"/api/{self.version}"
        inside = f"/namespaces/{namespace}" if self.namespaced else ""
        return f"{top}{inside}/{self.plural}{'/' if name else ''}{name}"


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
