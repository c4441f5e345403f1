"""The settings of containers: three sources in their order. An error names the source, the value and what is right."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any, Dict, Optional

import pytest

from clustertool.errors import ClustertoolError, ConfigError, DataError, UsageError
from clustertool.model.config.cluster import Cluster, read_cluster
from clustertool.model.config.job import JobSpec, Options, read_job
from clustertool.model.container.container_options import describe_refused
from clustertool.model.container.container_settings import ContainerSettings

ROOT = Path(__file__).parents[2]
ALL: Dict[str, Any] = {
    "image": "registry.example.org:5000/a/train@sha256:" + "0" * 64,
    "runtime": "podman",
    "options": ["--shm-size=8g", "--cap-add", "SYS_PTRACE", "--privileged"],
    "volumes": ["/data:/data:ro", "cache:/cache"],
    "pull": "never",
}


def _cluster(**keys: object) -> Cluster:
    return read_cluster({"HOSTS": ["a"], **keys})


def _job(
    conf: object = None, toml: Optional[Dict[str, Any]] = None, typed: Optional[str] = None, may_set: Any = ()
) -> JobSpec:
    cluster = _cluster(**({} if conf is None else {"CONTAINER": conf}), WORKSPACE_MAY_SET=may_set)
    tables: Dict[str, Any] = {} if toml is None else {"container": toml}
    return read_job(cluster, tables, Options(script="train.py", image=typed))


def test_every_key_is_read_from_conf_and_from_job_toml() -> None:
    expected = ContainerSettings(**{k: tuple(v) if isinstance(v, list) else v for k, v in ALL.items()})
    assert tuple(ALL) == tuple(field.name for field in fields(ContainerSettings))
    assert _cluster(CONTAINER=ALL).container == expected
    every = tuple(f"container.{key}" for key in ALL)
    assert _job(ALL).container == _job(toml=ALL, may_set=every).container == expected


def test_without_settings_there_is_no_container() -> None:
    assert not _job().container
    assert not _job({"runtime": "docker"}).container
    assert _cluster().image_from == "registry"
    assert _cluster(IMAGE_FROM="laptop").image_from == "laptop"


def test_a_later_source_replaces_key_by_key() -> None:
    conf = {"image": "a", "runtime": "docker", "volumes": ["/x:/x"], "pull": "always"}
    found = _job(conf, {"image": "b", "volumes": ["/y:/y"]}, "c", ["container.volumes./y"]).container
    assert found == ContainerSettings("c", "docker", (), ("/y:/y",), "always")
    limited = {**conf, "options": ["--cap-drop=ALL"]}  # options are added: those of conf.py stay
    assert _job(limited, {"options": ["--memory=4g"]}).container.options == ("--cap-drop=ALL", "--memory=4g")
    assert _job(conf, {"image": "b"}).container.image == "b"
    assert _job(conf, None, "c").container.image == "c"
    assert not _job(conf, {"image": "b"}, "").container
    assert not _job(conf, {"image": ""}, may_set=["container.image"]).container


@pytest.mark.parametrize(
    ("values", "fix"),
    [
        ({"imgae": "a"}, "did you mean image?"),
        ({"volume": []}, "did you mean volumes?"),
        ({"zzzz": 1}, "known"),
        ({"image": "a b"}, "a name as the runtime knows it"),
        ({"image": "--privileged"}, "a name as the runtime knows it"),
        ({"image": "./a.sif"}, "an absolute path"),
        ({"image": "images/a.sif"}, "an absolute path"),
        ({"image": ["a"]}, "a name as the runtime knows it"),
        ({"runtime": "lxc"}, "one of auto, docker, podman, apptainer"),
        ({"pull": True}, "one of missing, always, never"),
        ({"options": "--shm-size=8g"}, "a list of strings"),
        ({"options": ["--a\n"]}, "a list of strings"),
        ({"volumes": ["~/data:/data"]}, "absolute paths"),
        ({"volumes": ["/data"]}, "absolute paths"),
        ({"volumes": ["/data:data"]}, "absolute paths"),
        ({"volumes": ["/data:/data:ro:x"]}, "absolute paths"),
        ({"image": "/srv/a.sif", "runtime": "docker"}, "apptainer"),
        ({"image": "docker://a", "runtime": "podman"}, "apptainer"),
        ({"options": ["--net=none"]}, "leave it out"),
    ],
)
def test_an_error_names_the_source_and_what_is_right(values: Dict[str, Any], fix: str) -> None:
    for run, kind, where in (
        (lambda: _job(values), ConfigError, "CONTAINER"),
        (lambda: _job(toml=values), DataError, "job.toml: [container]"),
    ):
        with pytest.raises(ClustertoolError) as caught:
            run()
        assert type(caught.value) is kind
        assert where in caught.value.what
        assert fix in caught.value.fix or fix in caught.value.what


def test_an_image_that_is_typed_wrongly_is_an_error_of_the_command_line() -> None:
    for typed in ("a b", "-x", "x.sif"):
        with pytest.raises(UsageError, match="--image"):
            _job(typed=typed)
    with pytest.raises(UsageError, match="docker cannot run"):
        _job({"runtime": "docker"}, None, "/srv/a.sif")


def test_a_container_is_no_dict() -> None:
    with pytest.raises(ConfigError, match="CONTAINER = 'a' is not right"):
        _cluster(CONTAINER="a")


def test_mode_mpi_has_no_containers() -> None:
    cluster = _cluster(CONTAINER={"image": "a"})
    with pytest.raises(ConfigError, match="mode mpi") as caught:
        read_job(cluster, {"mode": "mpi"}, Options(script="train.py"))
    assert caught.value.code == 78
    assert not read_job(cluster, {"mode": "mpi"}, Options(script="train.py", image="")).container


@pytest.mark.parametrize(
    "option",
    """--net --net=host --network --ipc=private --pid --name=x --rm --env=A=1 --env -e --env-file=f -eA=1
    --label=a=b -l --detach -d -it -dit --user=0 -u0 --userns=host --workdir=/ -v/a:/a --volume
    --log-driver=none --entrypoint=sh --pull=always -- -Pd""".split(),
)
def test_options_that_the_tool_sets_are_refused(option: str) -> None:
    assert describe_refused(["--shm-size=1g", option], "auto").startswith(option if option != "--" else "'--'")


def test_other_options_are_taken() -> None:
    options = [
        "--shm-size",
        "8g",
        "-m4g",
        "-m",
        "4g",
        "--device=/dev/a",
        "--privileged",
        "--security-opt",
        "seccomp=unconfined",
    ]
    assert describe_refused(options, "docker") == ""
    assert describe_refused(["--nv", "--writable-tmpfs", "--overlay", "/a.img", "-e"], "apptainer") == ""


def test_an_argument_that_would_be_the_image_is_refused() -> None:
    assert "alpine" in describe_refused(["alpine"], "auto")
    assert "alpine" in describe_refused(["--privileged", "alpine"], "auto")
    assert "alpine" in describe_refused(["--shm-size=8g", "alpine"], "auto")
    assert "alpine" in describe_refused(["--shm-size", "8g", "alpine"], "auto")


@pytest.mark.parametrize(
    "option", "--pwd=/ --bind=/a -B/a --env=A=1 --containall -C -eC --net -n --home=/x --pid".split()
)
def test_options_of_apptainer_that_the_tool_sets_are_refused(option: str) -> None:
    assert describe_refused([option], "apptainer").startswith(option)


def test_the_documentation_has_each_key() -> None:
    text = (ROOT / "docs/reference.md").read_text()
    section = text[text.index("### Containers") : text.index("### Shards")]
    for key in ALL:
        assert f"| `{key}` |" in section
