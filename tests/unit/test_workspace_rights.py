"""What a job.toml may set of [container] and of the tables of engines. Rights come from conf.py and the command line."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, Dict

import pytest

from clustertool.actions.load_config import _read_keys
from clustertool.actions.read_request import read_request
from clustertool.engines import known_engines
from clustertool.engines.job_request import RunRequest, RunWish, engine_table, settings_note
from clustertool.errors import ConfigError, DataError
from clustertool.model.config import container_keys
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.container_keys import merge_container
from clustertool.model.config.elastic_keys import read_elastic
from clustertool.model.config.job import Options
from clustertool.model.container.container_settings import ContainerSettings
from clustertool.model.kubernetes import kubernetes_settings
from clustertool.model.slurm import slurm_settings
from tests.unit.cases import cluster_of

RIGHTS = [
    *[
        ("container", f"options = [{option!r}]", f"container.options.{option.partition('=')[0]}")
        for option in """--mount=type=bind,source=/,target=/host --volumes-from=x --rootfs --runtime=x --hooks-dir=/x
        --privileged --group-add=0 --cap-add=ALL --device=/dev/sda --security-opt=seccomp=unconfined --cgroup-parent=/
        --ulimit=rtprio=99 --annotation=run.oci.handler=x --secret=x -m4g --mem=1g""".split()
    ],
    ("container", "options = ['--memory', '4g', '--mount', 'type=bind']", "container.options.--mount"),
    ("container", "volumes = ['/:/host']", "container.volumes./"),
    ("container", "runtime = 'docker'", "container.runtime"),
    ("slurm", "login = 'other'", "slurm.login"),
    *[
        ("slurm", f"options = [{option!r}]", f"slurm.options.{option.partition('=')[0]}")
        for option in "--uid=0 --propagate=ALL --bbf=/x --mail-user=x@y --mail-t=END --reboot --network=x --exp=ALL".split()
    ],
    *[
        ("kubernetes", text, f"kubernetes.{name}")
        for text, name in {
            "context = 'prod'": "context",
            "namespace = 'kube-system'": "namespace",
            "service_account = 'admin'": "service_account",
            "pod_template = 'pod.yaml'": "pod_template",
            "image_pull_secrets = ['a']": "image_pull_secrets.a",
            "priority_class = 'system-node-critical'": "priority_class",
            "labels = {a = 'b'}": "labels.a",
            "annotations = {a = 'b'}": "annotations.a",
            "volumes = {'/host' = 'hostpath:/'}": "volumes.hostpath",
            "volumes = {'/data' = 'pvc:data', '/s' = 'secret:x'}": "volumes.secret",
            "volumes = {'/host' = {hostPath = {path = '/'}, readOnly = true}}": "volumes.hostPath",
            "volumes = {'/t' = {projected = {}}}": "volumes.projected",
            "paddlejob = {intranet = 'Host'}": "paddlejob.intranet",
        }.items()
    ],
]
USUAL = [
    (
        "container",
        "image = 'a:1'\npull = 'always'\noptions = ['--shm-size=8g', '--memory', '4g', '--read-only']\nvolumes = []",
    ),
    (
        "slurm",
        "partition = 'a'\nnodes = 4\ntime = '2h'\nmem = '64G'\noptions = ['--gres=license:1', '--exclusive=user']",
    ),
    (
        "kubernetes",
        "nodes = 2\nresources = {cpu = 8}\nvolumes = {'/d' = 'pvc:data/a:ro', '/s' = 'emptydir', "
        "'/e' = {emptyDir = {}, subPath = 'x'}}\nnode_selector = {zone = 'a'}\noutput = 'pvc:out/a'\nqueue = 'q'",
    ),
]


class Caller:
    """It keeps the notes."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    warn = remark = note


def cluster(table: str, may_set: tuple[str, ...]) -> Cluster:
    if table == "container":
        return Cluster(cluster_of(["10.0.0.1"]).hosts, workspace_may_set=may_set)
    return Cluster((), engine=table, workspace_may_set=may_set)


def request(folder: Path, table: str, text: str, may_set: tuple[str, ...] = ()) -> tuple[RunRequest, Caller]:
    """What `run` reads of a workspace with this table in its job.toml."""
    (folder / "train.py").touch()
    (folder / "job.toml").write_text(f"[{table}]\n{text}\n")
    caller = Caller()
    made = read_request(caller, Options(), RunWish(str(folder)), lambda: cluster(table, may_set))  # type: ignore[arg-type]
    return made, caller


@pytest.mark.parametrize(("table", "text", "name"), RIGHTS)
def test_a_workspace_may_not_choose_rights(tmp_path: Path, table: str, text: str, name: str) -> None:
    with pytest.raises(DataError) as caught:
        request(tmp_path, table, text)
    assert caught.value.code == 65
    assert caught.value.what.startswith(f"job.toml: [{table}] ")
    assert caught.value.what.endswith(f": a workspace may not set {name}")
    assert f"WORKSPACE_MAY_SET = [{name!r}]" in caught.value.fix


@pytest.mark.parametrize(("table", "text", "name"), RIGHTS)
def test_conf_py_allows_it(tmp_path: Path, table: str, text: str, name: str) -> None:
    """By its name, or by the whole key. What the tool itself must control stays refused."""
    for allowed in (name, ".".join(name.split(".")[:2])):
        try:
            request(tmp_path, table, text, (allowed,))
        except DataError as error:
            assert "a workspace may not set" not in error.what


@pytest.mark.parametrize(("table", "text"), USUAL)
def test_what_a_job_needs_is_taken_and_printed_in_one_line(tmp_path: Path, table: str, text: str) -> None:
    made, caller = request(tmp_path, table, text)
    (line,) = [note for note in caller.notes if note.startswith("job.toml sets ")]
    assert line.startswith(f"job.toml sets [{table}] ") and "\n" not in line
    for key in (one.partition(" = ")[0] for one in text.splitlines()):
        assert f"{key} = " in line
    if table == "container":
        assert made.spec is not None and made.spec.container.options[0] == "--shm-size=8g"
    else:
        assert list(made.table) == [one.partition(" = ")[0] for one in text.splitlines()]


def test_no_line_without_such_a_table(tmp_path: Path) -> None:
    assert settings_note({"mode": "ps"}, {}, Cluster(())) == ""
    assert (
        settings_note({"container": {"image": "a\x1b[2J"}}, {}, Cluster(()))
        == "job.toml sets [container] image = 'a\\x1b[2J'"
    )


def test_a_name_that_was_meant_is_proposed() -> None:
    with pytest.raises(DataError) as caught:
        engine_table("[slurm]\npartitions = 'a'\n", Cluster((), engine="slurm"))
    assert caught.value.fix.startswith("did you mean partition? ")


def test_a_part_is_not_its_neighbour() -> None:
    """The name of a source allows no other source, and that of an option no longer one."""
    for name, table in {
        "container.volumes./data": {"volumes": ["/data/../etc:/x"]},
        "container.options.--mount": {"options": ["--mount-x=y"]},
        "container.options": {"volumes": ["/:/x"]},
    }.items():
        with pytest.raises(DataError, match="a workspace may not set"):
            merge_container(ContainerSettings(), {"image": "a", **table}, None, (name,))
    assert merge_container(
        ContainerSettings(), {"volumes": ["/data:/x:ro"]}, None, ("container.volumes./data",)
    ).volumes


def test_a_workspace_does_not_leave_the_container_of_conf_py() -> None:
    with pytest.raises(DataError, match="may not set container.image"):
        merge_container(ContainerSettings("a:1"), {"image": ""}, None)
    assert not merge_container(ContainerSettings(), {"image": ""}, None)
    assert not merge_container(ContainerSettings("a:1"), {}, "")


def test_the_password_of_etcd_goes_to_no_server_of_a_workspace() -> None:
    table: Dict[str, Any] = {"min": 1, "max": 2, "server": "https://ann@h"}
    known = Cluster(cluster_of(["a", "b"]).hosts, secrets=("ETCD_PASSWORD",))
    with pytest.raises(DataError, match="may not choose where ETCD_PASSWORD is sent"):
        read_elastic(known, table, "collective")
    allowed = Cluster(known.hosts, secrets=known.secrets, workspace_may_set=("elastic.server",))
    assert read_elastic(allowed, table, "collective").server.user == "ann"
    assert read_elastic(known, table, "collective", "1:2", ("https://ann@h",)).server.user == "ann"


def test_conf_py_names_tables_that_exist() -> None:
    with pytest.raises(ConfigError, match="WORKSPACE_MAY_SET has 'kube.context'"):
        _read_keys({"HOSTS": ["a"], "WORKSPACE_MAY_SET": ["kube.context"]}, "conf.py")
    assert _read_keys({"HOSTS": ["a"], "WORKSPACE_MAY_SET": ["kubernetes.context"]}, "conf.py").workspace_may_set


def test_the_reference_names_what_a_workspace_may_set() -> None:
    """All keys, all options of [container], and of [slurm] only options that are allowed."""
    text = (Path(__file__).parents[2] / "docs/reference.md").read_text("utf-8")
    rows = {table: re.search(rf"^\| `\[{table}\]` \|.*$", text, re.M) for table in ("container", "slurm", "kubernetes")}
    named = {table: set(re.findall(r"--[a-z-]+|[a-z_]+", row[0])) for table, row in rows.items() if row}
    options = {table: {one for one in names if one.startswith("--")} for table, names in named.items()}
    assert options["container"] == {one[len("options.") :] for one in container_keys._OF_WORKSPACE if "--" in one}
    assert {f"options.{one}" for one in options["slurm"]} <= set(known_engines.entry_of("slurm").of_workspace)
    parts = (
        one.replace("volumes.", "").replace("paddlejob.", "")
        for one in known_engines.entry_of("kubernetes").of_workspace
    )
    assert {one for one in parts if one.islower()} <= named["kubernetes"]


def test_conf_py_sets_all_of_that() -> None:
    """Nothing of it is refused there: only what breaks the control of the tool is, which the settings of each table test."""
    assert (
        kubernetes_settings.read_settings({"namespace": "a", "pod_template": "p", "service_account": "s"}).namespace
        == "a"
    )
    assert slurm_settings.read_settings({"options": ["--propagate=ALL", "--reboot"]}).options
    options = ["--privileged", "--mount=type=bind,source=/,target=/host", "--group-add=0"]
    assert Cluster((), container=ContainerSettings("a", options=tuple(options))).container.options
