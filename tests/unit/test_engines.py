"""Engines are found by name in one table, and nothing above them knows one by its name."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from clustertool.actions import load_config
from clustertool.actions.conf_file import Selection
from clustertool.actions.find_jobs import ask_engine, merge_answers
from clustertool.actions.read_request import read_request
from clustertool.engines import base, known_engines
from clustertool.engines.base import Description, EngineState, ExportWish
from clustertool.engines.job_request import RunWish
from clustertool.engines.known_engines import Capabilities, EngineEntry
from clustertool.engines.ssh.ssh_engine import SshEngine
from clustertool.engines.ssh.ssh_start import SshStart
from clustertool.errors import ConfigError, Unreachable, UsageError
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job import Options
from clustertool.model.job.state_names import JobState
from clustertool.model.wire.agent_answers import JobsAnswer
from clustertool.verbs import stop
from tests.unit.cases import cluster_of

ROOT = Path(known_engines.__file__).parents[1]
ABOVE = ("verbs", "actions", "show", "api", "cli")  # packages that know no engine
FUTURE = {"kubernetes"}  # the names of engines that are planned


class Queue(SshEngine):
    """Chooses its nodes."""


QUEUES = Capabilities(needs_hosts=False, queues=True, sends_workspace=True, live_channels=False)


class Caller:
    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)

    warn = remark = note


@pytest.fixture
def queue(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """An engine without hosts, for the time of a test."""
    monkeypatch.setattr(known_engines, "_ENTRIES", dict(known_engines._ENTRIES))
    known_engines.register(EngineEntry("my-queue", f"{__name__}:Queue", f"{__name__}:None", QUEUES))
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Queue.__module__])
    yield "my-queue"


def clusters(conf: Path, text: str, **given: str) -> tuple[Cluster, Caller]:
    conf.write_text(text)
    caller = Caller()
    selection = Selection(conf=str(conf), **given)  # type: ignore[arg-type]
    return load_config.cluster(caller, selection, start_local=False), caller  # type: ignore[arg-type]


def test_ssh_is_the_default_and_one_of_the_table() -> None:
    assert known_engines.names()[0] == known_engines.DEFAULT == "ssh"
    cluster = cluster_of(["10.0.0.1"])
    assert base.engine_of(cluster) is base.engine_of(replace(cluster, engine="ssh")) is SshEngine
    for name in known_engines.names():
        assert base.engine_of(replace(cluster, engine=name))
    assert SshStart.prepare and SshStart.submit


def test_what_is_above_the_engines_names_none() -> None:
    """No import of an engine's module, and no text that is its name: a comparison needs one."""
    places = [text for entry in known_engines.entries() for text in (entry.engine, entry.starter)]
    modules = {"clustertool.engines.slurm", *(place.partition(":")[0] for place in places)}
    names = {*known_engines.names(), *FUTURE}
    found = []
    for package in ABOVE:
        for path in sorted((ROOT / package).rglob("*.py")):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Constant) and node.value in names:
                    found.append(f"{path.name}:{node.lineno}: {node.value}")
                if isinstance(node, ast.ImportFrom) and any(f"{node.module}.".startswith(f"{one}.") for one in modules):
                    found.append(f"{path.name}:{node.lineno}: {node.module}")
                if isinstance(node, ast.ImportFrom) and node.module == "clustertool.engines":
                    places = {f"clustertool.engines.{alias.name}" for alias in node.names} & modules
                    found += [f"{path.name}:{node.lineno}: {place}" for place in places]
    assert not found


def test_the_table_is_read_without_the_modules_of_engines() -> None:
    """`clustertool --help` and `inv --list` read the names."""
    code = "import sys, clustertool.cli.verb_table; print(*(m for m in sys.modules if m.startswith('clustertool.engines')))"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.split() == ["clustertool.engines", "clustertool.engines.known_engines"]


def test_a_command_about_jobs_imports_nothing_of_a_start() -> None:
    code = "import sys, clustertool.verbs.jobs, clustertool.engines.ssh.ssh_engine; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    heavy = {f"clustertool.engines.{name}" for name in ("ssh.ssh_start", "preflight", "send_workspace", "job_request")}
    assert not heavy & set(done.stdout.split())
    assert "clustertool.engines.ssh.ssh_engine" in done.stdout.split()


def test_an_unknown_engine_is_an_error_with_the_list(tmp_path: Path, queue: str) -> None:
    conf = tmp_path / "conf.py"
    hosts = 'HOSTS = ["10.0.0.1"]\n'
    for text, given, kind in ((hosts + 'ENGINE = "slrm"\n', {}, ConfigError), (hosts, {"engine": "slrm"}, UsageError)):
        with pytest.raises(kind) as caught:
            clusters(conf, text, **given)
        assert "'slrm' is not known" in caught.value.what
        assert caught.value.fix == "one of ssh, slurm, kubernetes, my-queue"
    assert (UsageError.code, ConfigError.code) == (64, 78)
    with pytest.raises(ConfigError, match="'gone' is not known"):  # of a stored job
        load_config.needs_hosts(Cluster((), engine="gone"))


def test_hosts_are_required_where_the_engine_needs_them(tmp_path: Path, queue: str) -> None:
    conf = tmp_path / "conf.py"
    with pytest.raises(ConfigError, match="has no HOSTS"):
        clusters(conf, 'ENGINE = "ssh"\n')
    found, caller = clusters(conf, 'ENGINE = "my-queue"\nMY_QUEUE = {"partition": "gpu"}\nGRACE = 3\n')
    assert (found.hosts, found.engine, found.settings, found.grace) == ((), queue, {"partition": "gpu"}, 3.0)
    assert caller.notes == [f"conf: {conf} (engine my-queue)"]
    typed, _ = clusters(conf, 'HOSTS = ["10.0.0.1"]\nMY_QUEUE = {"partition": "gpu"}\n', engine=queue)
    assert (typed.hosts, typed.engine, typed.settings) == ((), queue, {"partition": "gpu"})
    back, caller = clusters(conf, 'HOSTS = ["10.0.0.1"]\nENGINE = "my-queue"\nMY_QUEUE = {}\n', engine="ssh")
    assert ([host.name for host in back.hosts], back.engine, dict(back.settings)) == (["10.0.0.1"], "", {})
    assert caller.notes == [f"conf: {conf} (1 node)"]
    with pytest.raises(ConfigError, match="a dict, the settings of my-queue") as caught:
        clusters(conf, 'ENGINE = "my-queue"\nMY_QUEUE = "gpu"\n')
    assert "MY_QUEUE = 'gpu'" in caught.value.what


def test_options_about_hosts_are_refused_where_the_engine_chooses(tmp_path: Path, queue: str) -> None:
    conf = tmp_path / "conf.py"
    for given in ({"only": ("a",)}, {"skip": ("a",)}, {"dispatch": "rsync"}):
        with pytest.raises(UsageError, match=f"--{next(iter(given))} has no effect with the engine my-queue"):
            clusters(conf, 'ENGINE = "my-queue"\n', **given)  # type: ignore[arg-type]
    conf.write_text('ENGINE = "my-queue"\n')
    with pytest.raises(UsageError, match="check works on HOSTS, and the engine my-queue chooses the nodes itself"):
        load_config.cluster(Caller(), Selection(conf=str(conf)), start_local=True, of_hosts="check")  # type: ignore[arg-type]


@pytest.mark.parametrize("option", ["servers", "workers", "heter_workers"])
def test_addresses_are_refused_where_the_engine_chooses(tmp_path: Path, queue: str, option: str) -> None:
    (tmp_path / "train.py").touch()
    cluster = Cluster((), engine=queue)
    options = Options(mode="ps-heter", **{option: ("10.0.0.1:7000",)})  # type: ignore[arg-type]
    with pytest.raises(UsageError) as caught:
        read_request(Caller(), options, RunWish(str(tmp_path)), lambda: cluster)  # type: ignore[arg-type]
    assert f"--{option.replace('_', '-')} names addresses" in caught.value.what
    request = read_request(Caller(), Options(nnodes="40"), RunWish(str(tmp_path)), lambda: cluster)  # type: ignore[arg-type]
    assert request.spec is not None
    assert request.spec.nnodes == 40


def summary(job: str, node: int, state: str, code: int | None = None, start: str = "") -> dict[str, object]:
    found = {"id": job, "node": node, "state": state, "code": code, "reason": "", "start": start, "final": False}
    return {**found, "nodes": ["a", "b"], "created": 1.0, "owner": "ann", "mode": "collective", "command": ""}


def test_the_ssh_engine_describes_jobs_by_the_records_of_their_nodes() -> None:
    cases = {
        "runs": (["succeeded", "running"], EngineState.RUNNING),
        "over": (["succeeded", "failed"], EngineState.ENDED),
        "lost": (["lost"], EngineState.ENDED),
        "doubt": (["failed", "unknown"], EngineState.UNKNOWN),
    }
    codes = {"succeeded": 0, "failed": 1}
    known = {
        node: {
            "jobs": [summary(job, node, s[node], codes.get(s[node])) for job, (s, _) in cases.items() if node < len(s)]
        }
        for node in (0, 1)
    }
    known[1]["jobs"] += [
        summary("placed", 1, "starting", start="placed"),
        summary("joins", 1, "starting", start="joining"),
    ]
    engine = SshEngine(cluster_of(["10.0.0.1", "10.0.0.2"]), _Absent())  # type: ignore[arg-type]
    found = engine.describe(known)  # type: ignore[arg-type]
    wanted = {job: state for job, (_, state) in cases.items()}
    assert {job: one.state for job, one in found.items()} == {
        **wanted,
        "placed": EngineState.UNKNOWN,
        "joins": EngineState.RUNNING,
    }
    assert found["placed"].reason == "no supervisor has started"


def test_a_job_is_what_its_engine_proves_where_no_agent_can() -> None:
    """Its nodes are gone; it is queued again; or only the queue has it."""
    known: dict[int, JobsAnswer] = {0: {"jobs": [summary("gone", 0, "running"), summary("again", 0, "failed", 1)]}}  # type: ignore[list-item]
    queued = Description(EngineState.QUEUED, "Resources", 5.0, nodes=3, job_name="new", command="python3 train.py")
    about = {"gone": Description(EngineState.ENDED, "NODE_FAIL"), "again": queued, "waits": queued}
    about["over"] = Description(EngineState.ENDED)
    found = {job["id"]: job for job in merge_answers(known, about)}
    assert {job: one["state"] for job, one in found.items()} == {
        "gone": JobState.LOST,
        "again": JobState.QUEUED,
        "waits": JobState.QUEUED,
    }
    assert (found["gone"]["reason"], found["waits"]["reason"]) == ("NODE_FAIL", "Resources")
    assert (found["waits"]["total"], found["waits"]["name"], found["waits"]["created"]) == (3, "new", 5.0)
    assert (found["again"]["total"], found["again"]["created"]) == (2, 1.0), "as its records have it"
    known = {0: {"jobs": [summary("again", 0, "running")]}}  # type: ignore[list-item]
    states = {job["id"]: job["state"] for job in merge_answers(known, about)}
    assert states["again"] is JobState.RUNNING, "the nodes know better that it has started"


@pytest.mark.parametrize(
    ("nodes", "known", "state", "code"),
    [
        (["failed", "unknown"], EngineState.ENDED, JobState.FAILED, 7),  # the verdict, and not how a part of it ended
        (["failed", "unknown"], EngineState.RUNNING, JobState.RUNNING, None),
        (["failed", "unknown"], EngineState.UNKNOWN, JobState.UNKNOWN, None),
        (["unknown", "unknown"], EngineState.ENDED, JobState.LOST, None),
        (["unknown", "starting"], EngineState.RUNNING, JobState.RUNNING, None),
        (["unknown", "lost"], EngineState.QUEUED, JobState.QUEUED, None),  # preempted, and it will start again
        (["starting", "starting"], EngineState.ENDED, JobState.LOST, None),  # before any supervisor
        (["succeeded", "succeeded"], EngineState.RUNNING, JobState.SUCCEEDED, 0),  # its last process is about to leave
    ],
)
def test_what_an_engine_knows_of_parts_that_no_agent_can_judge(
    nodes: list[str], known: EngineState, state: JobState, code: int | None
) -> None:
    codes = {"failed": 7, "succeeded": 0}
    answers = {
        node: {"jobs": [summary("J", node, one, codes.get(one), "placed" if one == "starting" else "")]}
        for node, one in enumerate(nodes)
    }
    found = merge_answers(answers, {"J": Description(known, "NODE_FAIL")})[0]  # type: ignore[arg-type]
    assert (found["state"], found["code"]) == (state, code)
    assert (found["reason"] == "NODE_FAIL") == (state in (JobState.LOST, JobState.QUEUED))


def test_an_engine_that_does_not_answer_is_a_warning() -> None:
    class Down(Queue):
        def describe(self, known: object) -> dict[str, Description]:
            raise Unreachable("no connection to the controller")

    caller = _Absent()
    assert ask_engine(Down(Cluster(()), caller), {}, "") == {}  # type: ignore[arg-type]
    assert caller.notes == ["the engine does not answer, queued jobs are not known: no connection to the controller"]


@pytest.mark.parametrize(
    ("engine", "state", "goes"),
    [
        *[(Queue, state, state is EngineState.ENDED) for state in EngineState],
        (Queue, None, False),
        *[(SshEngine, state, state is not EngineState.QUEUED) for state in EngineState],
    ],
)
def test_clean_removes_what_is_proved_to_have_ended(
    queue: str, engine: type[SshEngine], state: EngineState | None, goes: bool
) -> None:
    """Where agents run on the nodes, they prove the rest."""
    name = queue if engine is Queue else ""
    found = None if state is None else Description(state)
    assert stop._may_be_removed(engine(Cluster((), engine=name), _Absent()), found) is goes  # type: ignore[arg-type]


class _Absent(Caller):
    def check(self) -> None:
        """Nothing ends it."""

    def person(self) -> None:
        return None


def test_an_engine_that_starts_jobs_itself_exports_nothing(tmp_path: Path) -> None:
    wish = SimpleNamespace(job_id="", name="", resume=None)
    request: Any = SimpleNamespace(cluster=Cluster(()), wish=wish, origin="", options=None)
    with pytest.raises(UsageError, match="nothing to export"):
        SshStart(SshEngine(Cluster(()), _Absent()), request).export(tmp_path / "out", ExportWish())  # type: ignore[arg-type]
    assert not (tmp_path / "out").exists()
