"""The start of a job on Kubernetes: manifests, and a bundle with the job and its workspace in a Secret."""

from __future__ import annotations

import shlex
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from clustertool import __version__
from clustertool.engines.base import Engine, Starter, Submission, Submitted
from clustertool.engines.job_request import RunRequest
from clustertool.engines.kubernetes.cluster_api import ClusterApi
from clustertool.engines.kubernetes.kubernetes_engine import KubernetesEngine
from clustertool.engines.kubernetes.object_kinds import Manifest
from clustertool.engines.kubernetes.submitted_objects import SubmittedObjects, documents
from clustertool.errors import ConfigError, DataError, UsageError
from clustertool.fleet import stored_hosts
from clustertool.fleet.identity import identity, job_id
from clustertool.fleet.joining import join_bundle, join_process
from clustertool.model.container.container_settings import NO_CONTAINER
from clustertool.model.facts import Identity
from clustertool.model.job.job_names import FRESH
from clustertool.model.joining.join_file import EngineSettings, JoinFile, MeetingPoint, OwnSettings, patience
from clustertool.model.kubernetes.kubernetes_settings import KubernetesSettings, read_settings
from clustertool.model.kubernetes.object_names import JobAbout
from clustertool.model.kubernetes.pod_manifest import WorkloadOrder, output_folder, pod_root, workspace_folder
from clustertool.model.kubernetes.pod_places import coordinator_host, node_roles, pod_hosts
from clustertool.model.kubernetes.workload import manifests, secret
from clustertool.model.quantities import count

try:
    import yaml
except ImportError:  # the extra is not installed, see kube_credentials.py
    yaml = None

_USUAL = ("python3", "-u", "train.py")  # what trainers run where no command is given
_COMMAND = 200  # characters of a command that are shown
_KEEP = 300.0  # seconds that node 0 waits for a fetch where there is no volume for the output


class KubernetesStart(Starter):
    """prepare() asks the API server only for the user's name."""

    def __init__(self, engine: Engine, request: RunRequest) -> None:
        super().__init__(engine, request)
        assert isinstance(engine, KubernetesEngine)
        self._api = cast(ClusterApi, engine.api)

    def prepare(self) -> Submission:
        """The workspace must fit into the Secret, or lie in an image or on a volume."""
        request = self._request
        self._refuse()
        spec = request.spec
        if spec is None or (request.workspace is None and not self._settings.workspace):
            fix = 'give --workspace DIR, or set KUBERNETES["workspace"] to image:/path or pvc:CLAIM/path'
            raise UsageError("the job has no files", fix)
        if spec.policy.lease:
            what = "--lease needs a command that follows the job, and a queued job starts without one"
            raise UsageError(what, "give --timeout")
        wish = request.wish
        made = identity(request.job_id or job_id(), wish.job_id, wish.name or wish.job_id, request.origin)
        self._identity = made
        image = spec.container.image
        about = JobAbout(
            name=made.name,
            asked=made.asked,
            command=shlex.join(spec.trainer.command or _USUAL)[:_COMMAND],
            mode=spec.mode,
            nodes=self._settings.node_count,
            created=made.created,
            dialect=self._settings.dialect,
        )
        self._order = WorkloadOrder(
            job_id=made.job_id,
            owner=self._api.user(),
            image=image,
            python=request.cluster.python,
            root_dir=request.cluster.root_dir,
            grace=request.grace,
            about=about,
            template=self._template(),
            namespace=self._api.namespace,
        )
        objects = manifests(self._settings, self._order)
        secrets = secret(self._order, self._bundle(made))
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

    def _refuse(self) -> None:
        """Read the settings. Raises UsageError for options that have no meaning here, ConfigError, DataError."""
        request, wish = self._request, self._request.wish
        options = (("--resume", wish.resume not in ("", FRESH)), ("--wait", wish.wait), ("--skip-bad", wish.skip_bad))
        for option, given in options:
            if given:
                raise UsageError(f"{option} is not possible with the engine kubernetes", "leave it out")
        typed = dict(wish.settings)
        if request.options.nnodes:
            typed["nodes"] = request.options.nnodes
        cluster = request.cluster
        self._settings: KubernetesSettings = read_settings(cluster.settings, request.table, typed, cluster.where)

    def _template(self) -> Manifest:
        """The user's pod template, {} if there is none."""
        path = self._settings.pod_template
        if not path:
            return {}
        if yaml is None:
            raise ConfigError("pod_template needs a parser of YAML", "pip install 'clustertool[kubernetes]'")
        try:
            found = yaml.safe_load(Path(path).expanduser().read_text("utf-8"))
        except (OSError, ValueError, yaml.YAMLError) as error:
            raise DataError(
                f"pod_template {path}: {error}", "it is a file with a Pod or a PodTemplate in YAML"
            ) from None
        if not isinstance(found, dict):
            raise DataError(f"pod_template {path} has no object", "it is a file with a Pod or a PodTemplate in YAML")
        return found

    def _bundle(self, made: Identity) -> bytes:
        """Raises DispatchError for a workspace that changes meanwhile."""
        workspace = None if self._settings.workspace else self._request.workspace
        join = self._join_file(made)
        if workspace is None:
            return join_bundle.content(join)
        with tempfile.TemporaryDirectory(prefix="clustertool-") as folder:  # of mode 0700
            path = Path(folder) / "bundle.pyz"
            join_bundle.write(path, join_bundle.with_workspace(join, workspace), workspace)
            return path.read_bytes()

    def _join_file(self, made: Identity) -> JoinFile:
        request, settings, order = self._request, self._settings, self._order
        assert request.spec is not None
        keep = settings.keep if settings.keep is not None else 0.0 if settings.output else _KEEP
        workspace = request.workspace
        # The pod is the container: its ranks run in no other one.
        cluster = replace(request.cluster, hosts=(), settings={}, container=NO_CONTAINER)
        return JoinFile(
            version=__version__,
            code=join_process.digest(),
            identity=made,
            cluster=cluster,
            job=replace(request.spec, container=NO_CONTAINER),
            nnodes=settings.node_count,
            coordinator=MeetingPoint(
                coordinator_host(settings.dialect, order.name, settings.nodes), request.cluster.lead_port
            ),
            join_timeout=patience(request.cluster.join_timeout, "kubernetes"),
            names=pod_hosts(settings.dialect, order.name, settings.nodes),
            listing=workspace.files if workspace is not None else (),
            passed=request.passed,
            secrets=tuple(request.secrets.items()),
            own=OwnSettings(root_dir=pod_root(order.root_dir), folder=workspace_folder(settings, order)),
            engine="kubernetes",
            of_engine=EngineSettings(
                keep_bundle=True,
                roles=node_roles(settings.nodes, settings.split),
                keep=keep,
                output=output_folder(settings, order),
            ),
        )
