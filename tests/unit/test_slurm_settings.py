"""Settings of the engine slurm: three sources in their order. An error names the source, the value and what is right."""

from __future__ import annotations

import math
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from clustertool.engines.known_engines import SLURM_OPTIONS
from clustertool.errors import ClustertoolError, ConfigError, DataError, UsageError
from clustertool.model.slurm.slurm_settings import SlurmSettings, read_settings
from clustertool.model.slurm.slurm_times import as_limit, grace_warning, kill_wait, limit_seconds, longest_grace

PAGE = Path(__file__).parents[2] / "docs/slurm.md"
SETTINGS = tuple(each.name for each in fields(SlurmSettings))
ALL: dict[str, Any] = {
    "login": "ada@login.example.org:2222",
    "nodes": 2,
    "partition": "long,short",
    "account": "lab",
    "qos": "high",
    "time": "2h",
    "cpus_per_node": 8,
    "mem": "64G",
    "gpus_per_node": "a100:4",
    "exclusive": True,
    "constraint": "[rack1|rack2]&ib",
    "nodelist": ["n[1-2]", "n7"],
    "exclude": "n3",
    "reservation": "course",
    "requeue": True,
    "requeue_on": ["time_limit"],
    "options": ["--mail-type=END", "--mail-user=two words"],
}


def test_every_key_is_read() -> None:
    settings = read_settings(ALL)
    assert tuple(ALL) == SETTINGS
    assert settings == SlurmSettings(
        **{
            **ALL,
            "time": "0-02:00:00",
            "nodelist": "n[1-2],n7",
            "requeue_on": ("time_limit",),
            "options": ("--mail-type=END", "--mail-user=two words"),
        }
    )
    host = settings.login_host
    assert host is not None and (host.user, host.host, host.port) == ("ada", "login.example.org", 2222)


def test_nothing_is_required() -> None:
    settings = read_settings({})
    assert settings == SlurmSettings()
    assert settings.login_host is None and settings.node_count == 1
    assert read_settings({"login": None, "partition": "", "time": None}) == SlurmSettings()


def test_the_command_line_is_before_job_toml_and_that_before_conf_py() -> None:
    conf = {"partition": "a", "time": "10", "qos": "q", "exclusive": True, "options": ["--nice=1"]}
    toml = {"partition": "b", "time": 20, "exclusive": False, "options": ["--nice=2"]}
    typed = {"partition": "c", "nodes": "3", "options": ("--nice=3",)}
    settings = read_settings(conf, toml, typed)
    assert (settings.partition, settings.time, settings.qos, settings.nodes) == ("c", "20", "q", 3)
    assert settings.exclusive is False
    assert settings.options == ("--nice=1", "--nice=2", "--nice=3")  # sbatch takes the last one
    assert read_settings({"partition": "a"}, {"partition": ""}).partition == ""


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("login", "n[1-2]", "one host"),
        ("login", "-oProxyCommand=x", "one host"),
        ("login", ["h"], "a string"),
        ("nodes", 0, "a whole number from 1"),
        ("nodes", "2-4", "a whole number from 1"),
        ("cpus_per_node", True, "a whole number from 1"),
        ("partition", "a b", "without spaces"),
        ("partition", "a\n#SBATCH --wrap=x", "without spaces"),
        ("account", 7, "a string"),
        ("qos", "a\x1b[0m", "without spaces"),
        ("time", "1.5", "a time limit of sbatch"),
        ("time", "soon", "a time limit of sbatch"),
        ("time", True, "a time limit of sbatch"),
        ("mem", "64GB!", "memory per node"),
        ("gpus_per_node", "a100", "a number of GPUs"),
        ("gpus_per_node", True, "a number of GPUs"),
        ("exclusive", "yes", "True or False"),
        ("requeue", 1, "True or False"),
        ("requeue_on", "time_limit", '["time_limit"]'),
        ("requeue_on", ["preemption", {}], '["time_limit"]'),
        ("nodelist", ["n1", 2], "names of nodes"),
        ("options", "--hold", "a list of options of sbatch"),
        ("options", ["-H"], "a list of long options of sbatch"),
        ("options", ["--comment two"], "a list of long options of sbatch"),
        ("options", ["--comment=a\n#SBATCH --uid=0"], "a list of long options of sbatch"),
    ],
)
def test_a_wrong_value_is_an_error_with_what_is_right(key: str, value: object, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings({key: value}, where="/home/{ada}/conf.py")
    assert caught.value.what == f"/home/{{ada}}/conf.py: SLURM[{key!r}] = {value!r} is not right"
    assert caught.value.fix.startswith(f"{key} is ") and fix in caught.value.fix


@pytest.mark.parametrize(
    ("option", "fix"),
    [
        ("--partition=a", "set the key partition"),
        ("--gpus-per-node=2", "set the key gpus_per_node"),
        ("--exclusive", "set the key exclusive"),
        ("--array=1-3", "'--array' out: a job is submitted once"),
        ("--arr=1-3", "'--array' out: a job is submitted once"),  # sbatch takes the beginning of an option
        ("--ntasks=4", "--nproc-per-node"),
        ("--output=x", "logs"),
        ("--export=NONE", "set ENV"),
        ("--wrap=ls", "the script is that of clustertool"),
        ("--no-re", "'--no-requeue' out"),
        ("--comment=x", "it names the job"),
        ("--tasks-per-node=2", "one task per node"),
        ("--het-group=1", "one allocation"),
        ("--uid=0", "the user that submits it"),
        ("--get-user-env=5L", "PRELUDE"),
        ("--container-id=x", "PRELUDE"),
    ],
)
def test_an_option_that_a_key_or_the_tool_sets_is_refused(option: str, fix: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings({"options": ["--hold", option]})
    assert fix in caught.value.fix


def test_gpus_may_be_parts_of_one() -> None:
    values = {2: "2", "4": "4", "a100:4": "a100:4", "1g.5gb:2,a100:1": "1g.5gb:2,a100:1"}
    assert {key: read_settings({"gpus_per_node": key}).gpus_per_node for key in values} == values


def test_other_options_are_taken_as_they_are() -> None:
    options = ["--gpus=4", "--gres=gpu:2", "--exclusive=user", "--mem-per-cpu=2G", "--time-min=5", "--wait-all-nodes=1"]
    assert read_settings({"options": options}).options == tuple(options)


@pytest.mark.parametrize(
    ("sources", "kind", "what"),
    [
        (({}, {"nodes": -1}), DataError, "job.toml: [slurm] nodes = -1 is not right"),
        (({}, None, {"cpus_per_node": "x"}), UsageError, "--cpus-per-node 'x' is not right"),
    ],
)
def test_an_error_has_the_exit_code_of_its_source(sources: Any, kind: type[ClustertoolError], what: str) -> None:
    with pytest.raises(kind) as caught:
        read_settings(*sources)
    assert caught.value.what == what


def test_the_login_host_is_that_of_conf_py() -> None:
    with pytest.raises(DataError) as caught:
        read_settings({}, {"login": "other"})
    assert caught.value.what == "job.toml: [slurm] login = 'other' is not possible"


def test_the_page_has_every_key_with_its_option() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (?:`--([\w-]+)`)? ?\|", PAGE.read_text(), re.M)
    assert [key for key, _ in rows] == list(SETTINGS)
    options = {option.sets: option.name for option in SLURM_OPTIONS}
    assert dict(rows) == {**dict.fromkeys(SETTINGS, ""), **options, "nodes": "nnodes"}


def test_an_unknown_key_is_an_error_with_the_nearest_one() -> None:
    with pytest.raises(ConfigError) as caught:
        read_settings({"partitions": "a"})
    assert caught.value.what == "conf.py: SLURM['partitions'] = 'a': this key is not known"
    assert caught.value.fix == "did you mean partition?"
    with pytest.raises(DataError, match="known keys: login, nodes, partition"):
        read_settings({}, {"zzz": 1})


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30", 1800),
        ("30:15", 1815),
        ("1:00:00", 3600),
        ("2-12", 216000),
        ("2-12:30", 217800),
        ("1-00:00:01", 86401),
        ("0", 0),
        ("UNLIMITED", math.inf),
        ("infinite", math.inf),
        *((text, None) for text in ("1:2:3:4", "1-2:3:4:5", "1-", "-1", "1:", "N/A", "", "²", "9" * 30)),
    ],
)
def test_time_limits_of_slurm(text: str, seconds: float | None) -> None:
    assert limit_seconds(text) == seconds


@pytest.mark.parametrize(
    ("grace", "config", "warned"),
    [
        (10.0, "KillOnBadExit           = 0\nKillWait                = 30 sec\n", False),
        (30.0, "KillOnBadExit           = 0\nKillWait                = 30 sec\n", True),
        (600.0, "KillWait = 30 sec", True),
        (600.0, "OverTimeKillWait = 30 sec", False),
        (600.0, "", False),  # slurmctld does not answer
    ],
)
def test_a_grace_that_slurm_does_not_wait_for(grace: float, config: str, warned: bool) -> None:
    warning = grace_warning(grace, kill_wait(config))
    assert bool(warning) is warned
    if warned:
        assert f"{grace:g} s is not shorter than KillWait of this Slurm (30 s)" in warning and "--grace 25" in warning


@pytest.mark.parametrize(("limit", "grace"), [(30, 25.0), (600, 595.0), (10, 5.0), (4, 2.0), (0, 0.0)])
def test_the_grace_that_leaves_time_for_the_records(limit: int, grace: float) -> None:
    assert longest_grace(limit) == grace


def test_a_duration_with_a_unit_becomes_a_time_limit() -> None:
    limits = {"90s": "0-00:01:30", "1h30m": "0-01:30:00", "3d": "3-00:00:00", "500ms": "0-00:00:01"}
    assert {text: as_limit(text) for text in limits} == limits
    assert [as_limit(text) for text in ("30", "2-12", "infinite")] == ["30", "2-12", "infinite"]
    assert [as_limit(text) for text in ("", "1.5", "0s", "x", "-1h")] == [""] * 5
