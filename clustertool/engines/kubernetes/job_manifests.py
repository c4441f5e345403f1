"""This module makes the objects of a job from its request: what `run` submits, and `export` writes."""

from __future__ import annotations

import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from clustertool.engines.common_join_file import common_join_file
from clustertool.engines.job_request import RunRequest
from clustertool.engines.kubernetes import native_pod
from clustertool.engines.queued_request import USUAL, ExpectedNodes, shown_command, typed_settings
from clustertool.errors import ConfigError, UsageError
from clustertool.fleet import this_user
from clustertool.fleet.joining import join_bundle
from clustertool.model.container.container_runtimes import ALWAYS, NEVER
from clustertool.model.container.container_settings import NO_CONTAINER
from clustertool.model.facts import Identity
from clustertool.model.joining.engine_place import join_timeout_of
from clustertool.model.joining.join_file import EngineSettings, JoinFile, MeetingPoint, OwnSettings
from clustertool.model.kubernetes import kubernetes_settings, workload
from clustertool.model.kubernetes.api_objects import Manifest, fields, items
from clustertool.model.kubernetes.node_view import quantity
from clustertool.model.kubernetes.object_names import LONGEST_NAME, JobAbout
from clustertool.model.kubernetes.pod_places import PADDLE_ROLES, PADDLEJOB, coordinator_host, node_roles, pod_hosts
from clustertool.model.kubernetes.pod_variables import KUBERNETES
from clustertool.model.kubernetes.workload import WorkloadOrder, output_folder, pod_root, workspace_folder

try:
    import yaml
except ImportError:  # the extra is not installed, see kube_credentials.py
    yaml = None

_KEEP = 300.0  # seconds that node 0 waits for a fetch where the output is on no volume
_MOST_TEMPLATE = 1 << 20  # characters: the API server takes no larger object
_PULLS = {ALWAYS: "Always", NEVER: "Never"}  # else the default of the cluster, by the tag of the image


@dataclass(frozen=True)
class JobManifests:
    """What the objects of a job are made of. settings, order: see workload.py. request: with the spec of the job."""

    request: RunRequest
    settings: kubernetes_settings.KubernetesSettings
    identity: Identity
    order: WorkloadOrder

    @property
    def objects(self) -> workload.Objects:
        """The manifests of the job without its Secret. Raises ConfigError for settings that do not fit."""
        return workload.manifests(self.settings, self.order)

    @property
    def nodes(self) -> ExpectedNodes:
        """Placeholders for the nodes of the job: one for each pod, with its host name, roles, processors and GPUs."""
        settings, order = self.settings, self.order
        resources = settings.resources_of("trainer")
        limits = {**resources.get("requests", {}), **resources.get("limits", {})}
        gpus = sum(int(quantity(amount)) for name, amount in limits.items() if name.endswith("/gpu"))
        return ExpectedNodes(
            names=pod_hosts(settings.dialect, order.name, settings.nodes),
            root=pod_root(order.root_dir),
            cpus=max(1, int(quantity(limits.get("cpu", "1")))),
            gpus=gpus,
            roles=node_roles(settings.nodes, settings.split),
            shared=False,
        )

    def native(self) -> Manifest:
        """Build the manifest of a PaddleJob whose containers run the commands themselves, without clustertool.

        If a role does not end by itself (pserver, heter), a small program runs its command and ends it with the workers; not
        for the image's own commands, which are not known. The PaddleJob has the job's name, if there is one. Raises UsageError
        if that cannot be the name of an object, ConfigError for settings that do not fit.
        """
        spec, name = self.request.spec, self.identity.name
        assert spec is not None
        if len(name) > LONGEST_NAME or not kubernetes_settings.is_label(name or "a"):
            fix = f"at most {LONGEST_NAME} small letters, digits and -"
            raise UsageError(f"the name {name!r} cannot be that of an object of Kubernetes", fix)
        own = {"pserver": spec.pserver.command, "heter": spec.heter[0].command if spec.heter else ()}
        trainers = spec.trainer.command or USUAL
        commands = {role: tuple(own.get(role) or trainers) for role, _ in self.settings.nodes}
        if self.settings.paddlejob.get("image_command"):
            commands = dict.fromkeys(commands, ())
        elif set(commands) & set(own):
            program = Path(native_pod.__file__).read_text("utf-8")
            start = self.request.cluster.python, "-c", program
            commands = {role: (*start, PADDLE_ROLES[role], *command) for role, command in commands.items()}
        there = self.request.options.job_workspace
        place = self.settings.workspace or (f"image:{there}" if there else "")
        settings = replace(self.settings, dialect=PADDLEJOB, workspace=place)
        env = (*self.request.cluster.env, *spec.env, *self.request.passed)
        order = replace(self.order, env=tuple(dict(env).items()), given_name=name)
        return workload.native(settings, order, commands)

    def bundle(self) -> tuple[bytes, bool]:
        """Build the content of the Secret: the join file, and the workspace if that fits.

        Returns it, and whether the workspace has to be sent to node 0 because it does not fit.
        """
        sent = self.request.workspace
        if sent is not None and sent.size <= join_bundle.LARGEST_WORKSPACE:
            with tempfile.TemporaryDirectory(prefix="clustertool-") as folder:
                path = Path(folder) / "bundle.pyz"
                join_bundle.write(path, self.join_file(), sent)
                data = path.read_bytes()
            if len(data) <= workload.MOST_SECRET:
                return data, False
        return join_bundle.content(self.join_file(uploaded=sent is not None)), sent is not None

    def join_file(self, uploaded: bool = False) -> JoinFile:
        """Build the join file that all pods get. uploaded: the workspace is sent to node 0, and is not in the bundle."""
        request, settings, order = self.request, self.settings, self.order
        root, sent = pod_root(order.root_dir), request.workspace
        output = output_folder(settings, order)
        keep = settings.keep if settings.keep is not None else 0.0 if output else _KEEP
        host = coordinator_host(settings.dialect, order.name, settings.nodes)
        meeting_point = MeetingPoint(host, request.cluster.lead_port)
        common = common_join_file(request, self.identity, settings.node_count, meeting_point)
        return replace(
            common,
            cluster=replace(common.cluster, root_dir=root, container=NO_CONTAINER),
            job=replace(common.job, container=NO_CONTAINER),
            join_timeout=join_timeout_of(request.cluster.join_timeout, KUBERNETES),
            names=pod_hosts(settings.dialect, order.name, settings.nodes),
            listing=sent.files if sent is not None else (),
            release=sent.release if sent is not None else "",
            own=OwnSettings(root_dir=root, folder=workspace_folder(settings, order) or request.options.job_workspace),
            engine=KUBERNETES,
            of_engine=EngineSettings(
                keep_bundle=True,
                roles=node_roles(settings.nodes, settings.split),
                uploaded=uploaded,
                keep=keep,
                output=output,
            ),
        )


def job_manifests(request: RunRequest, identity: Identity) -> JobManifests:
    """Read the settings and the template of pods, and collect what the objects of a job are made of. request: with its spec.

    Raises the errors of settings_of(), and ConfigError for the template.
    """
    spec, cluster = request.spec, request.cluster
    assert spec is not None
    settings = settings_of(request)
    about = JobAbout(
        name=identity.name,
        asked=identity.asked,
        command=shown_command(spec),
        mode=spec.mode,
        nodes=settings.node_count,
        created=identity.created,
        dialect=settings.dialect,
    )
    order = WorkloadOrder(
        job_id=identity.job_id,
        owner=identity.owner,
        image=spec.container.image,
        python=cluster.python,
        root_dir=cluster.root_dir,
        grace=request.grace,
        about=about,
        template=_read_template(settings, cluster.where),
        pull=_PULLS.get(spec.container.pull, ""),
        namespace=settings.namespace,
    )
    return JobManifests(request, settings, identity, order)


def settings_of(request: RunRequest) -> kubernetes_settings.KubernetesSettings:
    """Read the settings from conf.py, job.toml and the command line, of which later ones have priority.

    Raises ConfigError for conf.py, DataError for job.toml, UsageError for the command line.
    """
    cluster, typed = request.cluster, typed_settings(request)
    return kubernetes_settings.read_settings(cluster.settings, request.table, typed, cluster.where)


def _read_template(settings: kubernetes_settings.KubernetesSettings, where: str) -> Manifest:
    """Read the YAML file of pod_template, a path relative to the folder of conf.py, and return the object; {} without one.

    where: the path of conf.py. Raises ConfigError if the file cannot be read, has more than 1 Mi characters, is no object in
    YAML, or an amount of a container's resources is wrong.
    """
    if not settings.pod_template:
        return {}
    path = Path(where).parent / this_user.expand_home(settings.pod_template)
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read(_MOST_TEMPLATE + 1)
        if len(text) > _MOST_TEMPLATE:
            raise ConfigError(f"pod_template {path} has more than {_MOST_TEMPLATE} characters", "a Pod as YAML")
        found = kubernetes_settings.plain_json(yaml.safe_load(text))
        for number, container in enumerate(items(fields(fields({"": found}, ""), "spec"), "containers")):
            for kind in ("requests", "limits"):  # the API server does not name the field of a wrong amount
                amounts = fields(fields(container, "resources"), kind)
                kubernetes_settings.read_amounts(amounts, f"spec.containers[{number}].resources.{kind}")
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise ConfigError(f"pod_template {path} cannot be read: {error}", "a Pod as YAML") from None
    except kubernetes_settings.NotRight as wrong:
        raise ConfigError(f"pod_template {path}: {wrong.path} is not right", f"it is {wrong.right}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"pod_template {path} is no object", "a Pod as YAML, with metadata and spec")
    return found


def as_yaml(*manifests: Manifest) -> str:
    """Return manifests as the text of one YAML file, with a document for each."""
    return "---\n".join(yaml.dump(one, Dumper=_dumper(), sort_keys=False, allow_unicode=True) for one in manifests)


def _dumper() -> type:
    """Create a YAML dumper class that writes a text of several lines as a block."""

    class Dumper(yaml.SafeDumper):  # type: ignore[misc]
        pass

    def text(dumper: yaml.SafeDumper, data: str) -> yaml.Node:
        style = "|" if "\n" in data else None
        return dumper.represent_scalar("tag:yaml.org,2002:str", data, style=style)

    Dumper.add_representer(str, text)
    return Dumper
