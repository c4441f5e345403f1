"""The start of a job on Kubernetes: manifests, and a bundle with the job and its workspace in a Secret."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast

from clustertool.engines.base import Engine, Starter, Submission, Submitted
from clustertool.engines.job_request import RunRequest
from clustertool.engines.kubernetes.api.cluster_api import ClusterApi
from clustertool.engines.kubernetes.api.object_kinds import Manifest
from clustertool.engines.kubernetes.job_manifests import job_manifests, settings_of
from clustertool.engines.kubernetes.kubernetes_engine import KubernetesEngine
from clustertool.engines.kubernetes.submitted_objects import SubmittedObjects, documents
from clustertool.engines.queued_request import refuse_lease, refuse_options
from clustertool.errors import PreflightError, UsageError
from clustertool.fleet import stored_hosts
from clustertool.fleet.identity import identity, job_id
from clustertool.model.kubernetes.workload import MOST_SECRET, secret
from clustertool.model.quantities import count


class KubernetesStart(Starter):
    """prepare() asks the API server only for the user's name."""

    def __init__(self, engine: Engine, request: RunRequest) -> None:
        super().__init__(engine, request)
        assert isinstance(engine, KubernetesEngine)
        self._api = cast(ClusterApi, engine.api)

    def prepare(self) -> Submission:
        """The workspace must fit into the Secret, or lie in an image or on a volume."""
        request = self._request
        refuse_options(request)
        self._settings = settings_of(request)
        spec = request.spec
        if spec is None or (request.workspace is None and not self._settings.workspace):
            fix = 'give --workspace DIR, or set KUBERNETES["workspace"] to image:/path or pvc:CLAIM/path'
            raise UsageError("the job has no files", fix)
        refuse_lease(spec, "give --timeout")
        wish = request.wish
        made = identity(request.job_id or job_id(), wish.job_id, wish.name or wish.job_id, request.origin)
        self._identity = made
        sent = None if self._settings.workspace else request.workspace
        found = job_manifests(replace(request, workspace=sent), made)
        self._order = replace(found.order, owner=self._api.user(), namespace=self._api.namespace)
        found = replace(found, order=self._order)
        objects = found.objects
        bundle, uploaded = found.bundle()
        if uploaded:
            what = f"the bundle with the workspace is too large for a Secret, which has at most {MOST_SECRET} bytes"
            raise PreflightError(what, 'put the workspace into an image or on a volume: workspace = "pvc:CLAIM/path"')
        secrets = secret(self._order, bundle)
        self._others: Sequence[Manifest] = (secrets, *([objects.service] if objects.service else []))
        self._workload = objects.workload
        return Submission(made.job_id, None, documents([objects.workload, *self._others]))

    def submit(self, submission: Submission) -> Submitted:
        caller, job = self._engine.caller, submission.job_id
        settings = self._settings
        where = f"{self._api.where}, namespace {self._api.namespace}"
        caller.note(f"job {job}: {count(settings.node_count, 'pod')} of Kubernetes, {where}")
        caller.starting(job)
        objects = SubmittedObjects(self._api, caller.warn, caller.check)
        objects.create(self._workload, self._others)
        caller.note(f"job {job} is {self._workload['kind']} {self._order.name}")
        problem = stored_hosts.remember(self._identity, self._request.cluster)
        if problem:
            caller.warn(problem)
        return Submitted(job)
