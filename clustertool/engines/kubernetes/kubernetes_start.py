"""A job on Kubernetes starts by manifests, and by a bundle with the job and its workspace in a Secret.

The workload is created first, then what its pods wait for. On an error all of them are removed. A workspace that does not
fit into the Secret is sent once, to the first pod, and the others get it from there: a usual dispatch to an agent in that
pod, whose store has what an earlier attempt has brought. The joining process of the pod waits for the release
(node/join/pods/workspace_upload.py).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from clustertool.engines import earlier_work
from clustertool.engines.base import Document, Engine, EngineState, Exported, ExportWish, Starter, Submission, Submitted
from clustertool.engines.caller import pause
from clustertool.engines.job_request import RunRequest
from clustertool.engines.kubernetes.cluster_api import ClusterApi
from clustertool.engines.kubernetes.job_manifests import JobManifests, as_yaml, job_manifests, settings_of
from clustertool.engines.kubernetes.kubernetes_engine import KubernetesEngine
from clustertool.engines.preflight import probe
from clustertool.engines.queued_request import expected_plan, refuse_lease, refuse_options, with_usual_command
from clustertool.engines.send_workspace import send_whole
from clustertool.errors import ClustertoolError, InternalError, PreflightError, UsageError, raise_all
from clustertool.fleet import job_places
from clustertool.fleet.dispatch.workspace import Workspace
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.identity import identity, job_id
from clustertool.model.config.hosts import Host
from clustertool.model.config.job import read_job
from clustertool.model.container.container_settings import NO_CONTAINER
from clustertool.model.facts import read_facts
from clustertool.model.hints import PROGRAM
from clustertool.model.kubernetes.api_objects import Manifest, Object, fields, text
from clustertool.model.kubernetes.object_names import JOB_LABEL, job_label
from clustertool.model.kubernetes.pod_places import PADDLEJOB
from clustertool.model.kubernetes.workload import MOST_SECRET, secret, with_owner
from clustertool.model.masking import HIDDEN
from clustertool.model.planning.plan import Plan
from clustertool.model.quantities import count

_STANDS = "addresses and ports are known when the pods have joined; their host names stand for them"
_PRIVATE = "no other user may read it"
_LEAVING = 60.0  # seconds that objects may take to be gone
_REMOVAL_POLL = 0.3
_POD_POLL = 1.0  # seconds between two questions about the first pod
_ATTEMPTS = 5  # connections that may break
_PAUSE = 2.0


class KubernetesStart(Starter):
    """The start of a job on Kubernetes. prepare() asks the API server for the user's name, and lets it check the workload."""

    def __init__(self, engine: Engine, request: RunRequest) -> None:
        super().__init__(engine, request)
        assert isinstance(engine, KubernetesEngine)
        self._pods = engine
        self._uploaded = False  # the workspace does not fit into the Secret
        self._api = engine.api

    def prepare(self) -> Submission:
        """Build the objects of the job, have the API server check the workload, and set the job's id. Creates no object.

        With --dry the submission has a plan with placeholders, else none. A workspace that does not fit into the Secret is sent
        by submit(). Raises UsageError for options that do not fit, the errors of the settings, and ConfigError for a field that
        the server refuses.
        """
        request, caller = self._request, self._engine.caller
        workload = self._make_manifests(request.wish.job_id).objects.workload
        self._api.user()  # raises what keeps the server from answering
        self._api.validate(workload)
        if request.wish.job_id:
            earlier_work.take_id_of_engine(request, caller, *self._pods.earlier(request.wish.job_id))
        if request.resumes:
            caller.warn("job.toml: resume has no effect with this engine; the job starts anew")
        made = self._make_manifests(request.job_id)
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
        return Submission(made.identity.job_id, self._plan_expected(made), shown, _STANDS)

    def _plan_expected(self, made: JobManifests) -> Plan:
        """Plan the job for the pods that will be created, without containers: in a pod a rank needs no further one."""
        request = self._request
        assert request.spec is not None
        cluster = replace(request.cluster, container=NO_CONTAINER)
        spec = replace(request.spec, container=NO_CONTAINER)
        return expected_plan(replace(request, cluster=cluster, spec=spec), made.nodes, made.identity)

    def _make_manifests(self, job: str) -> JobManifests:
        """Check the options, read the settings, and collect what the objects are made of, with the local user as the owner.

        Sets the request's spec, if it has none, since a job.toml in the pods cannot be read. job: the id, "" for a new one.
        Raises UsageError for options that do not fit, and the errors of read_job() and job_manifests().
        """
        request, wish = self._request, self._request.wish
        refuse_options(request)
        self._settings = settings_of(request)
        if self._settings.workspace and wish.folder:
            remark = f"the workspace is {self._settings.workspace}: of {wish.folder} only job.toml is read"
            self._engine.caller.remark(remark)
        if request.spec is None:  # --job-workspace: a job.toml in the pods cannot be read from here
            request.spec = with_usual_command(read_job(request.cluster, {}, request.options))
        refuse_lease(request.spec, "give --timeout")
        made = identity(job or job_id(), wish.job_id, wish.name or wish.job_id, request.origin)
        sent = None if self._settings.workspace else request.workspace
        return job_manifests(replace(request, workspace=sent), made)

    def export(self, place: Path | None, wish: ExportWish) -> Exported:
        """Return the objects as YAML, with commands and a note. Writes no file.

        The Secret is in it with wish.secrets, a text of its own with wish.secrets_place, else left out. With wish.native, it is
        the manifest of a PaddleJob without clustertool. The API server is asked only for the user's name; if it does not
        answer, that of this machine is used, with a warning. Raises UsageError for wishes that exclude each other,
        PreflightError for a workspace that does not fit into the Secret.
        """
        made = self._make_manifests(self._request.wish.job_id)
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
        made = replace(made, order=replace(made.order, owner=self._user_in_cluster(made.order.owner)))
        objects = made.objects
        service = [objects.service] if objects.service else []
        if wish.secrets:
            text = as_yaml(objects.workload, secret(made.order, _bundle_in_secret(made)), *service)
            return Exported((apply,), text, f"it has the key and the secrets of the job: {_PRIVATE}")
        head = (
            f"# The pods wait for the Secret {objects.secret_name}, which has the job and its key. It is not in this file:\n"
            "# `export --secrets-to FILE` writes it to a second file, `export --with-secrets` into the same one.\n"
        )
        text = head + as_yaml(objects.workload, *service)
        if wish.secrets_place is None:
            note = f"its pods wait for the Secret {objects.secret_name}: see the head of the file"
            return Exported((apply,), text, note)
        note = f"{wish.secrets_place} has the key and the secrets of the job: {_PRIVATE}"
        both = (apply, f"kubectl apply -f {wish.secrets_place.name}")
        return Exported(both, text, note, as_yaml(secret(made.order, _bundle_in_secret(made))))

    def _user_in_cluster(self, user: str) -> str:
        """Return the user's name in the cluster, by which later commands find the job.

        If no server answers: print a warning, and return `user`, the name on this machine.
        """
        try:
            return self._api.user()
        except ClustertoolError as error:
            what = f"the user's name in the cluster is not known ({error.what})"
            self._engine.caller.warn(f"{what}: status, logs and stop will not find this job")
            return user

    def submit(self, submission: Submission) -> Submitted:
        """Create the objects, send a large workspace to the first pod when that runs, and record the job on this machine.

        Returns the job's id. After an error all objects are removed, and the error is raised.
        """
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
        job_places.remember(self._identity, self._request.cluster, caller.warn)
        return Submitted(job)


def _bundle_in_secret(made: JobManifests) -> bytes:
    """Return the content of the Secret with the workspace. Raises PreflightError if the workspace does not fit."""
    data, uploaded = made.bundle()
    if uploaded:
        what = f"the bundle with the workspace is too large for a Secret, which has at most {MOST_SECRET} bytes"
        raise PreflightError(what, 'put the workspace into an image or on a volume: workspace = "pvc:CLAIM/path"')
    return data


def documents(manifests: Sequence[Object]) -> tuple[Document, ...]:
    """Build a document of each manifest, NAME-KIND.yaml, in which the values of a Secret are ***."""
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
    """The objects of one job, as far as they were created: call create(), and undo() if a later step fails."""

    def __init__(self, api: ClusterApi, warn: Callable[[str], None], check: Callable[[], None]) -> None:
        """Prepare the creation. warn: gets a message for each object that cannot be removed.

        check: raises what ends the command; it is called between two requests.
        """
        self._api, self._warn, self._check = api, warn, check
        self._begun: list[Manifest] = []

    def create(self, workload: Manifest, others: Sequence[Manifest]) -> Manifest:
        """Create the workload, then the Secret and the Service (`others`), which it owns. Return it as the API server has it.

        Each request is waited for, or an object could be created after its removal. Raises the server's refusal after undo().
        """
        try:
            created = self._create(workload)
            for one in others:
                self._create(with_owner(one, {**workload, **created}))
            self._check()
        except BaseException:
            self.undo()
            raise
        return created

    def undo(self) -> None:
        """Remove the objects of create(), and wait up to 60 s until they are gone; warn about those that are not.

        No Ctrl+C ends it.
        """
        with self._api.patiently():
            left = [one for one in reversed(self._begun) if not self._remove(one)]
            end = time.monotonic() + _LEAVING
            while left and time.monotonic() < end:
                time.sleep(_REMOVAL_POLL)
                left = [one for one in left if not self._remove(one)]
        for one in left:
            name = f"{one['kind'].lower()} {one['metadata']['name']}"
            self._warn(f"{name} is still there; remove it: kubectl delete {name} --namespace {self._api.namespace}")
        self._begun = []

    def _create(self, manifest: Manifest) -> Manifest:
        """Create an object, and record it for undo().

        Raises the server's refusal; then only an object of this job stays recorded.
        """
        self._check()
        if not job_label(manifest):
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
        """Return whether the object of this name is of this job; True also if the server cannot be asked."""
        try:
            return bool(self._uid(manifest))
        except ClustertoolError:
            return True

    def _uid(self, manifest: Manifest) -> str:
        """Return the uid of the object with this name; "" if there is none, or it is of another job."""
        present = self._api.get(manifest["kind"], manifest["metadata"]["name"]) or {}
        mine = job_label(present) == job_label(manifest)
        return text(fields(present, "metadata"), "uid") if mine else ""

    def _remove(self, manifest: Manifest) -> bool:
        """Start the deletion of this job's object, and return whether it is gone. Errors of the server count as not gone."""
        try:
            uid = self._uid(manifest)
            return not uid or not self._api.delete(manifest["kind"], manifest["metadata"]["name"], uid=uid)
        except ClustertoolError:
            return False


def send_to_first_pod(engine: KubernetesEngine, job: str, workspace: Workspace) -> None:
    """Wait until the first pod runs, then send the workspace to it; after a PreflightError try again, up to 5 times in all.

    Before each further time it warns and waits 2 s. Raises what the caller's check raises, PreflightError if the job ends
    before or the fifth time fails, and other errors of the dispatch at once.
    """
    caller = engine.caller
    for attempt in range(_ATTEMPTS):
        host = _await_first_pod(engine, job)
        try:
            _send_to_pod(engine, host, workspace)
            return
        except PreflightError as error:
            if attempt + 1 == _ATTEMPTS:
                raise
            caller.warn(f"{host.name}: {error.what}; the workspace is sent again, without what has arrived")
            pause(caller, _PAUSE)


def _await_first_pod(engine: KubernetesEngine, job: str) -> Host:
    """Poll the job every second until its first pod runs, print each new reason why it waits, and return the pod as a host.

    Raises PreflightError if the job has ended or is gone, and what the caller's check raises.
    """
    shown = ""
    while True:
        found = engine.store.describe().get(job)
        host = engine.first_pod(job)
        if host is not None:
            return host
        if found is None or found.state is EngineState.ENDED:
            why = found.why if found is not None else "its objects were deleted"
            what = f"job {job} has ended before its workspace was sent: {why}"
            raise PreflightError(what, f"{PROGRAM} run starts it again")
        if found.reason != shown:
            shown = found.reason
            why = f": {shown}" if shown else ""
            engine.caller.note(f"job {job}: {found.state}{why}; its workspace is sent when its first pod runs")
        pause(engine.caller, _POD_POLL)


def _send_to_pod(engine: KubernetesEngine, host: Host, workspace: Workspace) -> None:
    """Connect to the pod, and dispatch the workspace to its store. Raises the errors."""
    cluster = replace(engine.fleet.cluster, hosts=(host,), dispatch="swarm")
    with Fleet(cluster, engine.caller.check, None, None, engine.reach) as fleet:
        gathered = probe(fleet.open(), {})
        raise_all([*fleet.failed.values(), *gathered.failed.values()])
        facts = {node: read_facts(node, answer) for node, answer in gathered.ok.items()}
        send_whole(engine.caller, fleet, workspace, facts)
