"""A job on Kubernetes starts by manifests, and by a bundle with the job and its workspace in a Secret."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from clustertool.engines import earlier_work
from clustertool.engines.base import Engine, Exported, ExportWish, Starter, Submission, Submitted
from clustertool.engines.job_request import RunRequest
from clustertool.engines.kubernetes.api.cluster_api import ClusterApi
from clustertool.engines.kubernetes.api.object_kinds import Manifest
from clustertool.engines.kubernetes.first_pod import send_to_first_pod
from clustertool.engines.kubernetes.job_manifests import JobManifests, as_yaml, job_manifests, settings_of
from clustertool.engines.kubernetes.kubernetes_engine import KubernetesEngine
from clustertool.engines.kubernetes.submitted_objects import SubmittedObjects, documents
from clustertool.engines.queued_request import expected_plan, refuse_lease, refuse_options, with_usual_command
from clustertool.errors import ClustertoolError, PreflightError, UsageError
from clustertool.fleet import job_places
from clustertool.fleet.identity import identity, job_id
from clustertool.model.config.job import read_job
from clustertool.model.container.container_settings import NO_CONTAINER
from clustertool.model.job.earlier_jobs import read_earlier, rows_of
from clustertool.model.kubernetes.pod_places import PADDLEJOB
from clustertool.model.kubernetes.workload import MOST_SECRET, secret
from clustertool.model.planning.plan import Plan
from clustertool.model.quantities import count

_STANDS = "addresses and ports are known when the pods have joined; their host names stand for them"
_PRIVATE = "no other user may read it"


class KubernetesStart(Starter):
    """prepare() asks the API server for the user's name, and lets it check the workload."""

    def __init__(self, engine: Engine, request: RunRequest) -> None:
        super().__init__(engine, request)
        assert isinstance(engine, KubernetesEngine)
        self._pods = engine
        self._uploaded = False  # the workspace does not fit into the Secret
        self._api = cast(ClusterApi, engine.api)

    def prepare(self) -> Submission:
        """Make the objects of the job. A workspace that does not fit into the Secret is sent by submit()."""
        request, caller = self._request, self._engine.caller
        self._api.validate(self._made(request.wish.job_id).objects.workload)
        if request.wish.job_id:
            recorded, known = self._pods.earlier(request.wish.job_id)
            records = read_earlier({node: rows_of(answer["jobs"]) for node, answer in recorded.items()})
            earlier_work.take_id(caller, request, earlier_work.known_by(records, known))
        if request.resumes:
            caller.warn("job.toml: resume has no effect with this engine; the job starts anew")
        made = self._made(request.job_id)
        self._identity = made.identity
        self._order = replace(made.order, owner=self._api.user(), namespace=self._api.namespace)
        made = replace(made, order=self._order)
        objects = made.objects
        bundle, self._uploaded = made.bundle()
        secrets = secret(self._order, bundle)
        self._others: Sequence[Manifest] = (secrets, *([objects.service] if objects.service else []))
        self._workload = objects.workload
        shown = documents([objects.workload, *self._others])
        if not request.wish.dry:
            return Submission(made.identity.job_id, None, shown)
        return Submission(made.identity.job_id, self._expected(made), shown, _STANDS)

    def _expected(self, made: JobManifests) -> Plan:
        """Plan the job as the nodes will: in a pod a rank needs no further container."""
        request = self._request
        assert request.spec is not None
        cluster, spec = (
            replace(request.cluster, container=NO_CONTAINER),
            replace(request.spec, container=NO_CONTAINER),
        )
        return expected_plan(replace(request, cluster=cluster, spec=spec), made.nodes, made.identity)

    def _made(self, job: str) -> JobManifests:
        """Make the objects of the request. job: its id, "" for a new one. Their owner is not known so far.

        Raises UsageError, ConfigError, DataError.
        """
        request, wish = self._request, self._request.wish
        refuse_options(request)
        self._settings = settings_of(request)
        if self._settings.workspace and wish.folder:
            self._engine.caller.remark(
                f"the workspace is {self._settings.workspace}: of {wish.folder} only job.toml is read"
            )
        if request.spec is None:  # --job-workspace: a job.toml in the pods cannot be read from here
            request.spec = with_usual_command(read_job(request.cluster, {}, request.options))
        refuse_lease(request.spec, "give --timeout")
        made = identity(job or job_id(), wish.job_id, wish.name or wish.job_id, request.origin)
        sent = None if self._settings.workspace else request.workspace
        return job_manifests(replace(request, workspace=sent), made)

    def export(self, place: Path | None, wish: ExportWish) -> Exported:
        """Write the objects as YAML. The API server is asked only for the user's name, and its answer is not needed."""
        made = self._made(self._request.wish.job_id)
        apply = f"kubectl apply -f {place.name if place is not None else '-'}"
        if wish.native:
            if made.settings.dialect != PADDLEJOB:
                raise UsageError("--native is a form of the dialect paddlejob", "add --dialect paddlejob")
            if wish.secrets or wish.secrets_place is not None:
                raise UsageError("--native has no Secret", "leave --with-secrets and --secrets-to out")
            text = as_yaml(made.native())
            if self._settings.workspace or self._request.options.job_workspace:
                return Exported((apply,), text)
            what = (
                'the files of the job must be in the image, or name them: workspace = "image:/path" or "pvc:CLAIM/path"'
            )
            return Exported((apply,), f"# No workspace is sent: {what}\n{text}", what)
        made = replace(made, order=replace(made.order, owner=self._owner(made.order.owner)))
        objects = made.objects
        service = [objects.service] if objects.service else []
        if wish.secrets:
            text = as_yaml(objects.workload, secret(made.order, _bundle(made)), *service)
            return Exported((apply,), text, f"it has the key and the secrets of the job: {_PRIVATE}")
        head = (
            f"# The pods wait for the Secret {objects.secret_name}, which has the job and its key. It is not in this file:\n"
            "# `export --secrets-to FILE` writes it to a second file, `export --with-secrets` into the same one.\n"
        )
        text = head + as_yaml(objects.workload, *service)
        if wish.secrets_place is None:
            return Exported(
                (apply,), text, f"its pods wait for the Secret {objects.secret_name}: see the head of the file"
            )
        note = f"{wish.secrets_place} has the key and the secrets of the job: {_PRIVATE}"
        both = (apply, f"kubectl apply -f {wish.secrets_place.name}")
        return Exported(both, text, note, as_yaml(secret(made.order, _bundle(made))))

    def _owner(self, user: str) -> str:
        """Ask for the name by which later commands find the job. user: of this machine, where no API server answers."""
        try:
            return self._api.user()
        except ClustertoolError as error:
            what = f"the user's name in the cluster is not known ({error.what})"
            self._engine.caller.warn(f"{what}: status, logs and stop will not find this job")
            return user

    def submit(self, submission: Submission) -> Submitted:
        caller, job = self._engine.caller, submission.job_id
        settings = self._settings
        where = f"{self._api.where}, namespace {self._api.namespace}"
        caller.note(f"job {job}: {count(settings.node_count, 'pod')} of Kubernetes, {where}")
        caller.starting(job)
        objects = SubmittedObjects(self._api, caller.warn, caller.check)
        objects.create(self._workload, self._others)
        caller.note(f"job {job} is {self._workload['kind']} {self._order.name}")
        if self._uploaded and self._request.workspace is not None:
            try:
                send_to_first_pod(self._pods, job, self._request.workspace)
            except BaseException:
                caller.note(f"job {job}: removing its objects")
                objects.undo()
                raise
        problem = job_places.remember(self._identity, self._request.cluster)
        if problem:
            caller.warn(problem)
        return Submitted(job)


def _bundle(made: JobManifests) -> bytes:
    """Build the content of the Secret. Raises PreflightError if the workspace does not fit."""
    data, uploaded = made.bundle()
    if uploaded:
        what = f"the bundle with the workspace is too large for a Secret, which has at most {MOST_SECRET} bytes"
        raise PreflightError(what, 'put the workspace into an image or on a volume: workspace = "pvc:CLAIM/path"')
    return data
