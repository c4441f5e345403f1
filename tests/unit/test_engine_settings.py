"""Settings of an engine: on the command line before job.toml before conf.py, and an error where another engine is used."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import pytest

from clustertool.actions import load_config, load_workspace
from clustertool.actions.conf_file import Selection
from clustertool.actions.read_request import read_request
from clustertool.engines import known_engines
from clustertool.engines.job_request import RunRequest, RunWish, engine_table, job_toml
from clustertool.engines.known_engines import SLURM_OPTIONS, Capabilities, EngineEntry, EngineOption
from clustertool.engines.ssh.ssh_engine import SshEngine
from clustertool.errors import DataError, UsageError
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job import Options
from clustertool.model.slurm.slurm_settings import SlurmSettings, read_settings
from tests.unit.cases import cluster_of

TOML = (
    'mode = "collective"\n[trainer]\ncommand = ["python3", "t.py"]\n[slurm]\npartition = "b"\nnodes = 2\n[q]\nx = 1\n'
)


class Queue(SshEngine):
    """Chooses its nodes."""


QUEUES = Capabilities(needs_hosts=False, queues=True, sends_workspace=False, live_channels=False)


@pytest.fixture(autouse=True)
def engines(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Two engines with settings, for the time of a test."""
    monkeypatch.setattr(known_engines, "_ENTRIES", dict(known_engines._ENTRIES))
    known_engines.register(
        EngineEntry("slurm", f"{__name__}:Queue", "", QUEUES, SLURM_OPTIONS, of_workspace=("partition", "nodes"))
    )
    known_engines.register(
        EngineEntry("q", f"{__name__}:Queue", "", QUEUES, (EngineOption("x", "a number", "N"),), of_workspace=("x",))
    )
    monkeypatch.setitem(sys.modules, __name__, sys.modules[Queue.__module__])
    yield


class Caller:
    def note(self, text: str) -> None:
        """Nothing reads it."""

    warn = remark = note


def request(folder: Path, cluster: Cluster, settings: dict[str, object], toml: str = TOML) -> RunRequest:
    (folder / "t.py").touch()
    (folder / "job.toml").write_text(toml)
    wish = RunWish(str(folder), settings=settings)
    return read_request(Caller(), Options(), wish, lambda: cluster)  # type: ignore[arg-type]


def test_the_three_sources_come_together(tmp_path: Path) -> None:
    cluster = Cluster((), engine="slurm", settings={"partition": "a", "qos": "q", "login": "l"})
    made = request(tmp_path, cluster, {"time": "30", "exclusive": True})
    assert made.table == {"partition": "b", "nodes": 2}
    settings = read_settings(made.cluster.settings, made.table, made.wish.settings)
    assert (settings.partition, settings.qos, settings.nodes, settings.time, settings.exclusive) == (
        "b",
        "q",
        2,
        "30",
        True,
    )


def test_tables_of_other_engines_have_no_effect(tmp_path: Path) -> None:
    made = request(tmp_path, cluster_of(["10.0.0.1"]), {})
    assert made.table == {} and made.spec is not None and made.spec.trainer.command == ("python3", "t.py")
    assert "slurm" not in load_workspace.workspace_toml(tmp_path)
    assert load_workspace.workspace_settings(tmp_path, Cluster((), engine="q")) == {"x": 1}


def test_a_table_that_is_none_is_an_error_of_job_toml(tmp_path: Path) -> None:
    with pytest.raises(DataError) as caught:
        engine_table("slurm = 3", Cluster((), engine="slurm"))
    assert (caught.value.what, caught.value.fix) == (
        "job.toml: slurm = 3 is no table",
        "write [slurm] and its keys below it",
    )
    assert job_toml("slurm = 3") == {} and engine_table("", Cluster(())) == {}
    with pytest.raises(DataError, match="unknown key 'slrum'"):
        request(tmp_path, cluster_of(["10.0.0.1"]), {}, "[slrum]\n")


@pytest.mark.parametrize(
    ("engine", "settings", "message"),
    [
        (
            "",
            {"partition": "a"},
            "--partition is an option of the engine slurm, and this job uses the engine ssh: add --engine slurm, or leave "
            "--partition out",
        ),
        (
            "q",
            {"options": ("--hold",)},
            "--sbatch-option is an option of the engine slurm, and this job uses the engine q: add --engine slurm, or leave "
            "--sbatch-option out",
        ),
        ("q", {"y": 1}, "the engine q has no setting 'y': known: x"),
        ("", {"y": 1}, "the engine ssh has no setting 'y': leave it out"),
    ],
)
def test_settings_of_another_engine_are_refused(
    tmp_path: Path, engine: str, settings: dict[str, object], message: str
) -> None:
    cluster = Cluster((), engine=engine) if engine else cluster_of(["10.0.0.1"])
    with pytest.raises(UsageError) as caught:
        request(tmp_path, cluster, settings)
    assert f"{caught.value.what}: {caught.value.fix}" == message


def test_an_option_sets_the_setting_of_its_name() -> None:
    given = {"cpus_per_node": "8", "exclusive": False, "sbatch_option": ("--hold",), "qos": "", "script": "t.py"}
    assert known_engines.typed_settings(given) == {"cpus_per_node": "8", "options": ("--hold",)}
    assert {option.sets for option in SLURM_OPTIONS} == {each.name for each in fields(SlurmSettings)} - {
        "login",
        "nodes",
        "requeue_on",
    }


def test_errors_name_the_option() -> None:
    for typed, option in (
        ({"cpus_per_node": "x"}, "--cpus-per-node"),
        ({"options": ("-H",)}, "--sbatch-option"),
        ({"nodes": "x"}, "--nnodes"),
    ):
        with pytest.raises(UsageError) as caught:
            read_settings({}, {}, typed)
        assert caught.value.what.startswith(option + " ")


def test_the_command_line_has_the_options_of_engines() -> None:
    """In a process of its own: the table of verbs is made once."""
    code = """if True:
        from clustertool.engines.known_engines import SLURM_OPTIONS, Capabilities, EngineEntry, EngineOption, register
        queues = Capabilities(False, queues=True, sends_workspace=False, live_channels=False)
        register(EngineEntry("slurm", "", "", queues, SLURM_OPTIONS))
        register(EngineEntry("q", "", "", queues, (EngineOption("mem", "memory", "SIZE"), EngineOption("x", "a number", "N"))))
        from clustertool.cli.parser import read
        from clustertool.cli.shared_options import RUN
        from clustertool.cli.verb_table import COMMON, HELP, VERBS
        argv = ["run", "--partition=a", "--exclusive", "--sbatch-option=--hold", "--sbatch-option=--nice"]
        line = read(argv, VERBS, COMMON, HELP)
        print(*(line.given[name] for name in ("partition", "exclusive", "sbatch_option", "requeue", "mem", "x")), sep="|")
        print(*(option.group for option in RUN if option.name in ("partition", "mem", "x")), sep="|")
    """
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    assert done.stdout.splitlines() == [
        "a|True|('--hold', '--nice')|False||",
        "Nodes of the engine slurm|Nodes of the engine q|Nodes of the engine q",
    ]


@pytest.mark.parametrize(
    ("text", "start", "noted"),
    [
        ('HOSTS = ["10.0.0.1"]\n', True, True),
        ('HOSTS = ["10.0.0.1"]\n', False, False),  # status, logs: about jobs that exist
        ('ENGINE = "slurm"\n', True, False),
        ('ENGINE = "q"\n', True, True),
    ],
)
def test_an_allocation_of_the_shell_that_is_ignored_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, start: bool, noted: bool
) -> None:
    known_engines.register(EngineEntry("slurm", f"{__name__}:Queue", "", QUEUES, allocation="SLURM_JOB_ID"))
    monkeypatch.setenv("SLURM_JOB_ID", "812")
    notes: list[str] = []
    caller = Caller()
    monkeypatch.setattr(caller, "remark", notes.append, raising=False)
    conf = tmp_path / "conf.py"
    conf.write_text(text)
    found = load_config.cluster(caller, Selection(conf=str(conf)), start_local=start)  # type: ignore[arg-type]
    engine = found.engine or "ssh"
    line = f"the allocation of this shell (SLURM_JOB_ID=812) is ignored: the engine {engine} does not use it"
    assert [note for note in notes if "allocation of" in note] == [line] * noted
    monkeypatch.delenv("SLURM_JOB_ID")
    notes.clear()
    load_config.cluster(caller, Selection(conf=str(conf)), start_local=start)  # type: ignore[arg-type]
    assert not any("allocation of" in note for note in notes)
