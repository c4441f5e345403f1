"""The objects of one job are created: the workload first, then what its pods wait for. On an error all of them are removed."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence

from clustertool.engines.base import Document
from clustertool.engines.kubernetes.api.cluster_api import ClusterApi
from clustertool.engines.kubernetes.api.object_kinds import Manifest, Object
from clustertool.engines.kubernetes.job_manifests import as_yaml
from clustertool.errors import ClustertoolError, InternalError
from clustertool.model.kubernetes.object_names import JOB_LABEL
from clustertool.model.kubernetes.workload import owned
from clustertool.model.masking import HIDDEN

_LEAVING = 60.0  # seconds that objects may take to be gone
_POLL = 0.3


def documents(manifests: Sequence[Object]) -> tuple[Document, ...]:
    """Write the manifests as YAML, one document of each. The values of a Secret are ***."""
    found = []
    for manifest in manifests:
        shown = copy.deepcopy(dict(manifest))
        for part in ("data", "stringData"):
            if shown["kind"] == "Secret" and part in shown:
                shown[part] = dict.fromkeys(shown[part], HIDDEN)
        name = f"{shown['metadata']['name']}-{shown['kind'].lower()}.yaml"
        found.append(Document(name, as_yaml(shown)))
    return tuple(found)


class SubmittedObjects:
    """Use for one job: create(), and undo() if a later step fails."""

    def __init__(self, api: ClusterApi, warn: Callable[[str], None], check: Callable[[], None]) -> None:
        """warn: gets what cannot be removed. check: raises what ends the command; it is called between two requests."""
        self._api, self._warn, self._check = api, warn, check
        self._begun: list[Manifest] = []

    def create(self, workload: Manifest, others: Sequence[Manifest]) -> Manifest:
        """Create the workload, then the Secret and the Service (`others`), which it owns. Returns it as the API server has it.

        No request is left alone: an object could be created after it was removed here. Raises what the server refuses,
        after everything is undone.
        """
        try:
            created = self._create(workload)
            for one in others:
                self._create(owned(one, {**workload, **created}))
            self._check()
        except BaseException:
            self.undo()
            raise
        return created

    def undo(self) -> None:
        """Remove what was begun, and wait until it is gone. No Ctrl+C ends it."""
        with self._api.patiently():
            left = [one for one in reversed(self._begun) if not self._removed(one)]
            end = time.monotonic() + _LEAVING
            while left and time.monotonic() < end:
                time.sleep(_POLL)
                left = [one for one in left if not self._removed(one)]
        for one in left:
            name = f"{one['kind'].lower()} {one['metadata']['name']}"
            self._warn(f"{name} is still there; remove it: kubectl delete {name} --namespace {self._api.namespace}")
        self._begun = []

    def _create(self, manifest: Manifest) -> Manifest:
        self._check()
        if not manifest["metadata"].get("labels", {}).get(JOB_LABEL):
            raise InternalError(f"the manifest of {manifest['kind']} has no label {JOB_LABEL}")
        with self._api.patiently():
            self._begun.append(manifest)
            try:
                return self._api.create(manifest)
            except ClustertoolError:
                if not self._is_ours(manifest):  # it is of another job, or was not created
                    self._begun.remove(manifest)
                raise

    def _is_ours(self, manifest: Manifest) -> bool:
        """Check whether the object of this name may be that of this manifest: also where the server cannot be asked."""
        try:
            return bool(self._uid(manifest))
        except ClustertoolError:
            return True

    def _uid(self, manifest: Manifest) -> str:
        """Read the uid of the object of the job; "" if there is none."""
        present = self._api.get(manifest["kind"], manifest["metadata"]["name"])
        about = (present or {}).get("metadata") or {}
        mine = manifest["metadata"]["labels"][JOB_LABEL]
        return str(about.get("uid") or "") if (about.get("labels") or {}).get(JOB_LABEL) == mine else ""

    def _removed(self, manifest: Manifest) -> bool:
        """Delete an object and return whether it is gone; else its deletion has begun, as far as the server answers."""
        try:
            uid = self._uid(manifest)
            return not uid or not self._api.delete(manifest["kind"], manifest["metadata"]["name"], uid=uid)
        except ClustertoolError:
            return False
