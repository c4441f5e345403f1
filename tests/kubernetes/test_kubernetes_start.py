"""A start on Kubernetes: what is submitted, what --dry shows, and what is refused before anything is sent."""

import base64
import datetime
import io
import json
import os
import zipfile
from pathlib import Path

import pytest
import yaml

from clustertool.engines.base import ExportWish
from clustertool.engines.job_request import RunRequest, RunWish
from clustertool.engines.kubernetes.cluster_api import ClusterApi
from clustertool.engines.kubernetes.kubernetes_engine import KubernetesEngine
from clustertool.engines.kubernetes.kubernetes_start import KubernetesStart
from clustertool.errors import AuthError, ConfigError, Interrupted, PreflightError, UsageError
from clustertool.fleet.dispatch.workspace import read_workspace
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job import Options, read_job
from clustertool.model.kubernetes.kubernetes_settings import KubernetesSettings
from clustertool.model.kubernetes.object_names import object_name
from tests.kubernetes.api_server import ApiServer
from tests.kubernetes.plain_pods import PlainPods
from tests.kubernetes.prepared_objects import Objects
from tests.kubernetes.test_workload_manifests import WRONG_SETTINGS


def load_all(text):
    """Read the documents of a YAML file: by libyaml where PyYAML has it, which needs a sixtieth of the time for a bundle."""
    return yaml.load_all(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))


class Silent:
    """A caller. at: the number of the check at which Ctrl+C comes, 0 for none."""

    def __init__(self, at=0):
        self.at, self.checks, self.notes, self.warnings, self.started = at, 0, [], [], []
        self.note, self.warn, self.starting = self.notes.append, self.warnings.append, self.started.append

    def check(self):
        self.checks += 1
        if self.checks == self.at:
            raise Interrupted("Ctrl+C")

    def person(self):
        return None


@pytest.fixture
def start(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    job = tmp_path / "job"
    job.mkdir()
    (job / "train.py").write_text("print('here')\n")

    def made(api=None, caller=None, settings=None, wish=None, **given):
        api, caller = api or Objects(), caller or Silent()
        known = {"nodes": 3, "resources": {"cpu": 1}, **(settings or {})}
        cluster = Cluster((), where="conf.py", engine="kubernetes", settings=known, secrets=("TOKEN",))
        given = Options(image="example.org/train:1", script="train.py", **given)
        spec = read_job(cluster, {}, given)
        secrets = {"TOKEN": "v3rysecret"}
        request = RunRequest(cluster, given, wish or RunWish(), spec, read_workspace(job), "", secrets, ())
        return KubernetesStart(KubernetesEngine(cluster, caller, api=api), request)

    made.job = job
    return made


def test_the_objects_of_a_job_have_its_workspace_and_its_secrets_in_one_secret(start):
    api, caller = Objects(), Silent()
    starter = start(api, caller)
    submission = starter.prepare()
    assert api.created == []
    submitted = starter.submit(submission)
    assert api.created == ["Job", "Secret", "Service"]
    assert caller.started == [submitted.job_id]
    bundle = base64.b64decode(api.objects["Secret"]["data"]["bundle.pyz"])
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        join = json.loads(archive.read("join.json"))
        assert "workspace/manifest" in archive.namelist()
    assert (join["nnodes"], len(join["names"]), join["engine"]) == (3, 3, "kubernetes")
    assert "v3rysecret" in json.dumps(join)
    name = api.objects["Job"]["metadata"]["name"]
    assert join["coordinator"]["host"] == f"{name}-0.{name}"
    pod = api.objects["Job"]["spec"]["template"]["spec"]
    assert pod["containers"][0]["image"] == "example.org/train:1"
    assert list(api.objects["Job"]["metadata"]["labels"]) == list(api.objects["Secret"]["metadata"]["labels"])


def test_dry_shows_all_objects_and_no_secret(start):
    shown = start().prepare().documents
    assert [yaml.safe_load(one.text)["kind"] for one in shown] == ["Job", "Secret", "Service"]
    text = "".join(one.text for one in shown)
    assert yaml.safe_load(shown[1].text)["data"] == {"bundle.pyz": "***"}
    assert "v3rysecret" not in text
    assert base64.b64encode(b"v3rysecret").decode()[:10] not in text


def test_dry_shows_the_plan_for_pods_that_have_no_address(start):
    settings = {"nodes": {"pserver": 1, "trainer": 2}, "resources": {"cpu": 1, "nvidia.com/gpu": 2}}
    submission = start(settings=settings, wish=RunWish(dry=True), mode="ps").prepare()
    name = object_name(submission.job_id)
    assert submission.plan is not None and "stand for them" in submission.stands
    assert [node.host.name for node in submission.plan.nodes] == [f"{name}-{node}" for node in range(3)]
    ranks = [(one.role, one.rank, one.node) for one in submission.plan.processes]
    assert sorted(ranks) == [("pserver", 0, 2), ("trainer", 0, 0), ("trainer", 1, 1)]
    assert {node.job_dir for node in submission.plan.nodes} == {f"/clustertool/JOB{submission.job_id}"}
    assert start().prepare().plan is None


def test_a_secret_is_in_no_object_but_the_secret(start):
    api, caller = Objects(), Silent()
    starter = start(api, caller)
    starter.submit(starter.prepare())
    rest = json.dumps([api.objects["Job"], api.objects["Service"]]) + "".join(caller.notes + caller.warnings)
    assert "v3rysecret" not in rest
    assert "PRIVATE KEY" not in rest


@pytest.mark.parametrize("dialect", ["jobset", "paddlejob"])
def test_other_dialects_are_submitted(start, dialect):
    api = Objects()
    starter = start(api, settings={"dialect": dialect, "nodes": 2})
    starter.submit(starter.prepare())
    kinds = {"jobset": ["JobSet", "Secret"], "paddlejob": ["PaddleJob", "Secret", "Service"]}
    assert api.created == kinds[dialect]


def test_nnodes_counts_pods(start):
    (job, *_) = start(nnodes="5").prepare().documents
    assert yaml.safe_load(job.text)["spec"]["completions"] == 5


@pytest.mark.parametrize("at", [1, 2, 3, 4])
def test_ctrl_c_while_objects_are_created_leaves_nothing(start, at):
    api = Objects()
    starter = start(api, Silent(at))
    submission = starter.prepare()
    with pytest.raises(Interrupted):
        starter.submit(submission)
    assert api.objects == {}


@pytest.mark.parametrize(
    ("error", "code"), [(AuthError("ann may not create secrets"), 77), (PreflightError("exceeded quota: gpus"), 69)]
)
def test_a_refusal_leaves_nothing(start, error, code):
    api = Objects({"Secret": error})
    starter = start(api)
    submission = starter.prepare()
    with pytest.raises(type(error)) as caught:
        starter.submit(submission)
    assert caught.value.code == code
    assert api.objects == {}


def test_what_cannot_be_submitted_is_refused_before_anything_is_sent(start):
    api = Objects()
    with pytest.raises(UsageError, match="--wait is not possible"):
        start(api, wish=RunWish(wait=True)).prepare()
    with pytest.raises(ConfigError, match="dialect"):
        start(api, settings={"dialect": "none"}).prepare()
    (start.job / "large.bin").write_bytes(os.urandom(2_000_000))
    with pytest.raises(PreflightError, match="at most 1000000") as caught:
        start(api).export(None, ExportWish(secrets=True))
    assert "pvc:CLAIM" in caught.value.fix
    assert api.created == []


POD, CONTAINER = "spec.template.spec", "spec.template.spec.containers[0]"
WRONG_PODS = [  # the user's template, and the path in the answer of the API server
    ({"nodeselector": {}}, f"{POD}.nodeselector"),
    ({"sysctls": []}, f"{POD}.sysctls"),
    ({"hostNetwork": "yes"}, f"{POD}.hostNetwork"),
    ({"priority": "high"}, f"{POD}.priority"),
    ({"dnsPolicy": "Some"}, f"{POD}.dnsPolicy"),
    ({"runtimeClassName": 5}, f"{POD}.runtimeClassName"),
    ({"schedulerName": ["volcano"]}, f"{POD}.schedulerName"),
    ({"tolerations": [{"effect": "NoRun"}]}, f"{POD}.tolerations[0].effect"),
    ({"tolerations": [{"efect": "NoSchedule"}]}, f"{POD}.tolerations[0].efect"),
    ({"securityContext": {"runAsUser": "1000"}}, f"{POD}.securityContext.runAsUser"),
    ({"imagePullSecrets": ["registry"]}, f"{POD}.imagePullSecrets "),
    ({"initContainers": [{"image": "x"}]}, f"{POD}.initContainers[0].name"),
    ({"affinity": {"nodeAfinity": {}}}, f"{POD}.affinity.nodeAfinity"),
    ({"volumes": [{"name": "a", "emptyDir": {"medium": 3}}]}, f"{POD}.volumes.emptyDir.medium"),
    ({"volumes": [{"name": "a", "configMap": {"nam": "c"}}]}, f"{POD}.volumes[2].configMap.nam"),
    ({"containers": [{"imagePullPolicy": "Maybe"}]}, f"{CONTAINER}.imagePullPolicy"),
    ({"containers": [{"env": [{"name": "A", "value": 1}]}]}, f"{POD}.containers.env.value"),
    ({"containers": [{"ports": [{"containerPort": 70000}]}]}, f"{CONTAINER}.ports[0].containerPort"),
    ({"containers": [{"volumeMounts": [{"name": "a", "mountPath": "/x"}]}]}, f"{CONTAINER}.volumeMounts[2].name"),
]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    with ApiServer(PlainPods(folder / "pods")) as made, pytest.MonkeyPatch.context() as patch:
        patch.setenv("KUBECONFIG", str(made.kubeconfig(folder / "kubeconfig")))
        yield made


@pytest.fixture
def template(tmp_path):
    """Write a pod template, and return the settings that name it."""

    def written(spec):
        containers = [{"name": "clustertool", **one} for one in spec.get("containers", [])]
        path = Path(tmp_path / "pod.yaml")
        path.write_text(yaml.safe_dump({"spec": {**spec, **({"containers": containers} if containers else {})}}))
        return {"pod_template": str(path)}

    return written


def test_a_wrong_manifest_is_refused_before_anything_is_created(start, server, template):
    """One test, since each process of tests reads the schemas of Kubernetes for a second."""
    api = ClusterApi(KubernetesSettings())
    for spec, path in WRONG_PODS:
        for dry in (True, False):
            with pytest.raises(ConfigError) as caught:
                start(api, settings=template(spec), wish=RunWish(dry=dry)).prepare()
            assert caught.value.what.startswith("the manifest is not right: ") and path in caught.value.what, spec
            assert "\n" not in caught.value.what and "pod_template" in caught.value.fix, spec
            assert not server.store.list("Job"), spec
    for dialect in ("jobset", "paddlejob"):  # is checked by its definition
        for spec, field in (({"nodeselector": {}}, "nodeselector"), ({"priority": "high"}, "priority")):
            with pytest.raises(ConfigError, match=f"template.spec.{field}"):
                start(api, settings={"dialect": dialect, **template(spec)}).prepare()


def test_a_name_that_is_taken_and_a_quota_do_not_keep_dry_from_showing_the_job(start, server):
    api = ClusterApi(KubernetesSettings())
    server.store.create(
        "ResourceQuota", "default", {"metadata": {"name": "q"}, "spec": {"hard": {"count/jobs.batch": "0"}}}
    )
    assert start(api, wish=RunWish(dry=True)).prepare().plan is not None
    server.store.delete("ResourceQuota", "default", "q")
    workload = start(api)._make_manifests("words").objects.workload
    api.create(workload)
    api.validate(workload)
    server.store.delete("Job", "default", "ct-words")


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"containers": [{"resources": {"limits": {"memory": "8GB "}}}]}, "spec.containers[0].resources.limits.memory"),
        ({"tolerations": [{"key": datetime.date(2026, 1, 1)}]}, "spec.tolerations[0].key"),
        ({"nodeSelector": {5: "a"}}, "spec.nodeSelector.5"),
    ],
)
def test_values_of_a_template_that_no_server_reads_are_refused_without_one(start, template, spec, path):
    api = Objects()
    with pytest.raises(ConfigError) as caught:
        start(api, settings=template(spec)).export(None, ExportWish())
    assert path in caught.value.what and not api.asked


def test_an_export_checks_names_and_types_only(start, template):
    exported = start(settings=template({"nodeselector": {}})).export(None, ExportWish())
    assert "nodeselector: {}" in exported.text


@pytest.mark.parametrize(("settings", "path"), WRONG_SETTINGS)
def test_a_wrong_setting_is_refused_before_anything_is_sent(start, settings, path):
    api = Objects()
    with pytest.raises(ConfigError) as caught:
        start(api, settings=settings).prepare()
    assert path in f"{caught.value.what} {caught.value.fix}"
    assert not api.asked and api.created == []


def test_a_pod_template_is_read_from_its_file(start, tmp_path):
    template = Path(tmp_path / "pod.yaml")
    template.write_text("metadata:\n  annotations:\n    team: words\n")
    (job, *_) = start(settings={"pod_template": str(template)}).prepare().documents
    assert yaml.safe_load(job.text)["spec"]["template"]["metadata"]["annotations"]["team"] == "words"


def test_an_export_is_what_run_submits(start):
    api = Objects()
    wish = RunWish(job_id="words")
    exported = start(api, wish=wish).export(None, ExportWish(secrets=True))
    assert api.created == []
    starter = start(api)
    starter._request.job_id = "words"
    starter.submit(starter.prepare())
    texts = list(load_all(exported.text))
    assert [one["kind"] for one in texts] == ["Job", "Secret", "Service"]
    for one in texts:
        submitted = api.objects[one["kind"]]
        assert one["metadata"].pop("namespace", "team") == submitted["metadata"].pop("namespace", "team")
        for varies in ("uid", "ownerReferences", "annotations"):  # made by the server, by SubmittedObjects, and a time
            one["metadata"].pop(varies, None), submitted["metadata"].pop(varies, None)
        if one["kind"] != "Secret":  # the key of the job is a new one each time
            assert one == submitted
        else:
            assert one.keys() == submitted.keys() and one["data"].keys() == submitted["data"].keys()


def test_without_the_option_an_export_names_the_secret_and_has_nothing_of_it(start):
    exported = start(wish=RunWish(job_id="words")).export(Path("job.yaml"), ExportWish())
    assert "# The pods wait for the Secret ct-words, which has the job and its key." in exported.text
    assert [one["kind"] for one in load_all(exported.text)] == ["Job", "Service"]
    assert "v3rysecret" not in exported.text and base64.b64encode(b"v3rysecret").decode()[:10] not in exported.text
    assert exported.commands == ("kubectl apply -f job.yaml",)


def test_the_secret_of_an_export_can_be_in_a_second_file(start, tmp_path):
    wish, place = RunWish(job_id="words"), tmp_path / "secret.yaml"
    exported = start(wish=wish).export(Path("job.yaml"), ExportWish(secrets_place=place))
    assert [one["kind"] for one in load_all(exported.text)] == ["Job", "Service"]
    (secret,) = load_all(exported.secrets)
    (job, _) = load_all(exported.text)
    (name,) = (one["secret"]["secretName"] for one in job["spec"]["template"]["spec"]["volumes"] if "secret" in one)
    assert secret["metadata"]["name"] == name == "ct-words" and list(secret["data"]) == ["bundle.pyz"]
    assert secret["metadata"]["labels"] == job["metadata"]["labels"]
    assert exported.commands == ("kubectl apply -f job.yaml", "kubectl apply -f secret.yaml")


def test_files_that_pods_have_by_themselves_are_not_sent(start):
    """By a key, or by --job-workspace."""
    for starter in (start(settings={"workspace": "image:/app"}), start(job_workspace="/app")):
        starter._request.spec = starter._request.workspace = None
        starter.prepare()
        bundle = base64.b64decode(starter._others[0]["data"]["bundle.pyz"])
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
            assert json.loads(archive.read("join.json"))["own"]["folder"] == "/app"
            assert "workspace/manifest" not in archive.namelist()


def test_the_native_form_is_of_one_dialect_and_has_no_secret(start):
    with pytest.raises(UsageError, match="dialect paddlejob"):
        start().export(None, ExportWish(native=True))
    (native,) = load_all(start(settings={"dialect": "paddlejob"}).export(None, ExportWish(native=True)).text)
    assert native["spec"]["worker"]["template"]["spec"]["containers"][0]["command"][-1] == "train.py"
    with pytest.raises(UsageError, match="no Secret"):
        start(settings={"dialect": "paddlejob"}).export(None, ExportWish(native=True, secrets=True))


def test_the_native_form_keeps_the_name_of_the_job_and_the_command_of_the_image(start):
    """As `kubectl create -f` of the operator's examples, whose images have a command."""
    settings = {"dialect": "paddlejob", "nodes": {"trainer": 2, "pserver": 2}, "paddlejob": {"image_command": True}}

    def native(**wish):
        return yaml.safe_load(start(settings=settings, wish=RunWish(**wish)).export(None, ExportWish(native=True)).text)

    found = native(name="wide-and-deep")
    assert found["metadata"]["name"] == "wide-and-deep"
    for role in ("worker", "ps"):
        (container,) = found["spec"][role]["template"]["spec"]["containers"]
        assert "command" not in container and "args" not in container
    assert native(job_id="words")["metadata"]["name"] == "words"
    assert native()["metadata"]["name"].startswith("ct-")
    with pytest.raises(UsageError, match="'Wide_Deep' cannot be that of an object"):
        native(name="Wide_Deep")
    with pytest.raises(ConfigError, match="image_command: only the containers of export --native"):
        start(settings=settings).export(None, ExportWish())


def test_an_export_needs_no_server(start):
    class Away(Objects):
        def user(self):
            raise PreflightError("the API server does not answer")

    caller = Silent()
    exported = start(Away(), caller).export(None, ExportWish())
    assert "kind: Job" in exported.text
    (warning,) = caller.warnings
    assert "status, logs and stop will not find this job" in warning
