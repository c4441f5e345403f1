"""The rows of Paddle's documents: the page has them, and each command line of clusterrun makes the plan that its row states."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cases import IDENTITY, facts_of

from clustertool.engines.job_request import RunRequest
from clustertool.errors import ClustertoolError
from clustertool.model.config.job import read_job
from clustertool.model.joining.typed_meeting import TypedMeeting
from clustertool.model.planning.plan import Plan, PlannedProcess, plan
from clustertool.verbs import clusterrun
from clustertool.verbs.verb import Call
from tests.cli import REPO
from tests.document_rows import DOCUMENTS, PAGE, ROWS, Row, in_page, parts

CLUSTERRUN = [row for row in ROWS if row.plans]
KINDS = {"gpu": tuple(range(8)), "xpu": (0, 1), "": ()}


def number(row: Row) -> str:
    return str(ROWS.index(row) + 1)


def test_the_page_has_these_rows() -> None:
    """`python -m tests.document_rows` writes them there."""
    assert PAGE.read_text() == in_page(PAGE.read_text())
    assert len(ROWS) == 105


@pytest.mark.parametrize("row", ROWS, ids=number)
def test_each_row_is_run_or_states_why_not(row: Row) -> None:
    assert set(row.document.split()) <= set(DOCUMENTS)
    assert re.match("works|differs: |not here: ", row.result)
    assert row.plans or row.runs or row.ran_by or row.not_run
    if row.ran_by:
        path, _, name = row.ran_by.partition("::")
        tree = ast.parse((REPO / path).read_text())
        assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, row.ran_by


class Made:
    """What clusterrun has made of a command line, up to the first connection."""

    def __init__(self, row: Row, order: RunRequest | None, meeting: TypedMeeting | None, call: Call, err: str) -> None:
        self.order, self.meeting, self.given, self.err = order, meeting, call.given, err
        self.plan = _plan(row, order) if order and not meeting else None

    def of(self, role: str) -> list[PlannedProcess]:
        assert self.plan
        return sorted((one for one in self.plan.processes if one.role == role), key=lambda one: one.rank)

    def env(self, role: str, name: str) -> list[str]:
        return [dict(process.env).get(name, "") for process in self.of(role)]


def _plan(row: Row, order: RunRequest) -> Plan:
    """Where each host is a machine of its own, except those with one name."""
    hosts = order.cluster.hosts
    machines = [next(i for i, one in enumerate(hosts) if one.host == host.host) for host in hosts]
    kind = "cpu" if order.cluster.device_kind == "cpu" or not row.has else row.has
    facts = facts_of(order.cluster, machines, device_kind=kind, devices=KINDS[row.has] if kind != "cpu" else ())
    spec = read_job(order.cluster, {}, order.options)
    return plan(order.cluster, spec, facts, IDENTITY, ("train.py", "demo.py"))


def _each(made: Made) -> tuple[int, ...]:
    assert made.plan
    nodes = [process.node for process in made.of("trainer")]
    return tuple(nodes.count(node.host.index) for node in made.plan.nodes)


def _cards(made: Made, role: str) -> str:
    return " ".join(",".join(map(str, process.devices)) or "-" for process in made.of(role))


def _elastic(made: Made) -> Any:
    assert made.plan
    return made.plan.job.elastic


# What `plans` of a row may name -> its value in what was made.
FOUND: dict[str, Callable[[Made], Any]] = {
    "trainers": lambda made: len(made.of("trainer")),
    "pservers": lambda made: len(made.of("pserver")),
    "heters": lambda made: len(made.of("heter")),
    "each": _each,
    "mode": lambda made: made.plan and made.plan.job.mode,
    "hosts": lambda made: ",".join(node.facts.address for node in made.plan.nodes) if made.plan else "",
    "cards": lambda made: " ".join(dict.fromkeys(made.env("trainer", "CUDA_VISIBLE_DEVICES"))),
    "xpus": lambda made: " ".join(dict.fromkeys(made.env("trainer", "XPU_VISIBLE_DEVICES"))),
    "server_cards": lambda made: " ".join(dict.fromkeys(made.env("pserver", "CUDA_VISIBLE_DEVICES"))),
    "selected": lambda made: " ".join(made.env("trainer", "FLAGS_selected_gpus")),
    "own": lambda made: _cards(made, "trainer"),
    "heter_own": lambda made: _cards(made, "heter"),
    "ranks": lambda made: " ".join(f"{one.node}.{one.local_rank}" for one in made.of("trainer")),
    "ports": lambda made: " ".join(one.endpoint.rpartition(":")[2] for one in made.of("trainer")),
    "different_ports": lambda made: len({one.endpoint for one in made.of("trainer")}),
    "endpoints": lambda made: " ".join(one.endpoint for one in (*made.of("pserver"), *made.of("trainer"))),
    "logs": lambda made: " ".join(f"{one.node}:{Path(one.log).name}" for one in made.of("trainer")),
    "ends": lambda made: made.of("trainer")[0].argv[-1],
    "gloo": lambda made: made.env("trainer", "PADDLE_GLOO_HTTP_ENDPOINT")[0],
    "elastic": lambda made: _elastic(made).text,
    "elastic_timeout": lambda made: _elastic(made).timeout,
    "etcd": lambda made: ",".join(_elastic(made).server.urls),
    "job_id": lambda made: made.order and made.order.wish.job_id,
    "shown": lambda made: made.order and made.order.wish.shown,
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's folder with the programs of the documents, and a shell without variables of launchers."""
    for name in ("CUDA_VISIBLE_DEVICES", "VIRTUAL_ENV", "CONDA_PREFIX", "CLUSTERTOOL_SECRET"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    top = tmp_path / "folder"
    (top / "job").mkdir(parents=True)
    for name in ("train.py", "demo.py", "start_mpi_train.sh", "job/trainer_config.py"):
        (top / name).touch()
    (top / "machines").write_text("192.168.0.1\n192.168.0.2\n192.168.0.3\n")
    monkeypatch.chdir(top)
    return top


@pytest.mark.parametrize("row", CLUSTERRUN, ids=number)
def test_the_plan_of_a_row(
    row: Row, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Everything before the first connection is real; then the plan is made with devices that are stated here."""
    shell, (program, *argv) = parts(row.now)
    assert program == "clusterrun"
    for name, value in shell.items():
        monkeypatch.setenv(name, value)
    found: list[Any] = []
    monkeypatch.setattr(clusterrun.run, "perform", lambda call, order: found.append((order, None)))
    monkeypatch.setattr(
        clusterrun.joined_run, "perform", lambda call, order, meeting, *_: found.append((order, meeting))
    )
    call = Call(SimpleNamespace(json=False))
    with contextlib.suppress(ClustertoolError):
        clusterrun.clusterrun(call, argv)
    call.show_remarks()
    err = capsys.readouterr().err
    assert found, err
    made = Made(row, *found[0], call, err)
    for name, value in row.plans.items():
        if name == "meets":
            assert made.meeting and made.meeting.nodes == value[1] and made.meeting.endpoint.startswith(value[0])
        elif name == "says":
            assert value in err
        elif name == "given":
            assert {key: getattr(made.given, key) for key in value} == value
        else:
            assert FOUND[name](made) == value, name
