"""The join file: its JSON form is exact in both directions, and each error names the field. It runs under Python 3.8."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from clustertool.errors import DataError, UsageError
from clustertool.model.config.cluster import Cluster, read_cluster
from clustertool.model.config.job import Options, read_job
from clustertool.model.facts import Identity
from clustertool.model.joining.engine_place import join_timeout_of
from clustertool.model.joining.join_file import JoinFile, MeetingPoint, OwnSettings, from_json, to_json
from clustertool.model.shape import read_own, to_plain
from tests.node.harness import pythons

TOP = Path(__file__).parents[2]


def made(**fields: Any) -> JoinFile:
    read = read_cluster({"HOSTS": ["10.0.0.1"], "ENV": {"A": "1"}, "PADDLE_USE_GPU": "True", "LOSS_TIMEOUT": 7})
    cluster = replace(read, hosts=())
    toml = {"trainer": {"command": ["python3", "train.py"]}, "pserver": {"ready": "started"}, "policy": {"timeout": 9}}
    job = read_job(cluster, toml, Options(mode="ps-heter", heter_devices="gpu;cpu", devices="0,1", http_port="8000"))
    whole = JoinFile(
        version="1.2",
        code="0" * 32,
        identity=Identity("J1", 12.5, "ada", "t" * 32, "CERTIFICATE", "KEY", name="n"),
        cluster=cluster,
        job=job,
        nnodes=3,
        coordinator=MeetingPoint("10.0.0.1", 29500),
        index=2,
        listing=("train.py", "data/a-0"),
        passed=(("B", "2"),),
        secrets=(("S", "hidden"),),
        own=OwnSettings(root_dir="~/x", nproc=2, devices=(1, 0), env=(("C", "é"),), here=True),
    )
    return replace(whole, **fields)


def test_json_form_keeps_all() -> None:
    join = made()
    assert from_json(to_json(join)) == join
    plain = made(index=None, own=OwnSettings())
    assert from_json(to_json(plain)) == plain


def test_how_long_machines_wait_for_each_other() -> None:
    """A user starts them one after another, and an engine all together. JOIN_TIMEOUT of conf.py counts for both."""
    assert (join_timeout_of(None), join_timeout_of(None, "slurm")) == (600.0, 120.0)
    assert (join_timeout_of(30.0), join_timeout_of(900.0, "slurm")) == (30.0, 900.0)
    assert read_cluster({"HOSTS": ["a"]}).join_timeout is None


def test_a_field_with_a_default_may_be_left_out() -> None:
    value = json.loads(to_json(made()))
    for name in ("index", "join_timeout", "listing", "release", "passed", "secrets", "own"):
        del value[name]
    join = from_json(json.dumps(value))
    assert (join.index, join.join_timeout, join.own) == (None, 600.0, OwnSettings())


def set_at(value: Any, path: list[Any], new: object) -> None:
    for name in path[:-1]:
        value = value[name]
    value[path[-1]] = new


@pytest.mark.parametrize(
    "path, new, named",
    [
        (["nnodes"], "3", "nnodes is '3', not a whole number"),
        (["nnodes"], True, "nnodes is True, not a whole number"),
        (["index"], 1.0, "index is 1.0, not a whole number"),
        (["cluster", "loss_timeout"], "x", "cluster.loss_timeout is 'x', not a number"),
        (["cluster", "use_gpu"], 1, "cluster.use_gpu is 1, not true or false"),
        (["job", "heter"], {}, "job.heter is a dict, not a list"),
        (["job", "heter", 0, "device"], None, "job.heter[0].device is None, not a string"),
        (["own", "env", 0], ["C"], "own.env[0] has 1 values, not 2"),
        (["identity", "more"], 1, "identity has the unknown field 'more'"),
        (["listing", 1], 5, "listing[1] is 5, not a string"),
        (["coordinator"], [], "coordinator is a list, not an object"),
    ],
)
def test_a_wrong_type_names_the_field(path: list[Any], new: object, named: str) -> None:
    value = json.loads(to_json(made()))
    set_at(value, path, new)
    with pytest.raises(DataError) as caught:
        from_json(json.dumps(value))
    assert named in caught.value.what


def test_a_missing_field_is_named() -> None:
    value = json.loads(to_json(made()))
    del value["identity"]["job_id"]
    with pytest.raises(DataError, match="identity has no 'job_id'"):
        from_json(json.dumps(value))


@pytest.mark.parametrize("text", ["", "[]", "{", '"x"', "[" * 5000, '{"format": 2}', "null"])
def test_what_is_no_join_file(text: str) -> None:
    with pytest.raises(DataError):
        from_json(text)


@pytest.mark.parametrize(
    "fields, named",
    [
        ({"nnodes": 0, "index": None}, "a job of 0 nodes"),
        ({"index": 3}, "index 3 is out of range"),
        ({"index": -1}, "index -1 is out of range"),
        ({"coordinator": MeetingPoint("", 1)}, "host is missing"),
        ({"coordinator": MeetingPoint("h", 70000)}, "port 70000 is out of range"),
        ({"join_timeout": 0.0}, "JOIN_TIMEOUT"),
    ],
)
def test_numbers_out_of_range(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        from_json(to_json(made(**fields)))


def test_secrets_are_not_in_the_repr() -> None:
    assert "hidden" not in repr(made()) and "KEY" not in repr(made())


def test_every_field_of_the_parts_has_a_plain_form() -> None:
    """A new field of a type that shape.py does not know fails here."""
    for part in (Cluster(()), OwnSettings(), Identity("J")):
        assert read_own(type(part), json.loads(json.dumps(to_plain(part)))) == part


PLAN = """
import sys
sys.path.insert(0, sys.argv[1])
import importlib, pkgutil
import clustertool.model
for package in pkgutil.walk_packages(clustertool.model.__path__, "clustertool.model."):
    if ".wire." not in package.name:
        importlib.import_module(package.name)
from dataclasses import replace
from clustertool.model.config.hosts import numbered, Host
from clustertool.model.facts import Facts
from clustertool.model.joining.join_file import from_json, to_json
from clustertool.model.planning import requests
from clustertool.model.planning.plan import plan
join = from_json(sys.stdin.read())
assert from_json(to_json(join)) == join
hosts = numbered([Host(0, f"10.0.0.{n}", address=f"10.0.0.{n}") for n in (1, 2)])
cluster = replace(join.cluster, hosts=hosts)
facts = {n: Facts(n, address=hosts[n].address, root="/r", devices=(0, 1), device_kind="gpu") for n in (0, 1)}
made = plan(cluster, join.job, facts, join.identity, join.listing, join.passed)
steps = requests.start(made, {}, {})
print([(p.role, p.rank, p.node) for p in made.processes], len(steps.phases[0].requests))
"""


@pytest.mark.parametrize("python", [pythons()[0], sys.executable])
def test_the_oldest_python_plans_a_job(python: str) -> None:
    """The coordinator plans on its node: the whole model runs there, except the checks of messages (model/wire)."""
    done = subprocess.run(
        [python, "-ESs", "-c", PLAN, str(TOP)], input=to_json(made()), stdout=subprocess.PIPE, text=True, check=True
    )
    assert "('trainer', 1, 1)" in done.stdout and done.stdout.endswith(" 2\n")
