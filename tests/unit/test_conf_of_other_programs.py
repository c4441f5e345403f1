"""conf.py of another program in the way of a command that needs none, and --no-conf."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from clustertool.actions import load_config
from clustertool.actions.conf_file import Selection
from clustertool.errors import ConfigError, UsageError

OTHERS = {
    "sphinx": 'project = "demo"\nextensions = []\n',
    "django": "DEBUG = True\nSECRET_KEY = 'x'\nPORT = 8000\n",
    "with an import that is missing": "import no_such_module\nhtml_theme = no_such_module.theme\n",
    "no python": "project: demo\n",
    "with exec": "exec('release = 1')\nraise SystemExit(3)\n",
    "empty": "",
}
OURS = {
    "one key": ("PRELUDE = 'module load cuda'", "PRELUDE"),
    "common names": ("USER = 'ann'\nPORT = 22", "PORT"),
    "in a block": ("if True:\n    HOSTS = ['10.0.0.1']", "HOSTS"),
    "import": ("from os import sep as ROOT_DIR", "ROOT_DIR"),
    "globals": ("globals()['GATEWAY'] = 'g'", "GATEWAY"),
}


@pytest.fixture
def notes() -> list[str]:
    return []


@pytest.fixture
def read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, notes: list[str]):
    """read(text, ...): read_conf() below a folder whose conf.py has this text. Its notes are in `notes`."""
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    monkeypatch.setenv("HOME", str(tmp_path))

    def found(text: str, selection: Selection | None = None, **why: bool) -> load_config.Conf:
        (tmp_path / "conf.py").write_text(text)
        caller = SimpleNamespace(note=notes.append, remark=notes.append)
        return load_config.read_conf(caller, selection or Selection(), **why)  # type: ignore[arg-type]

    return found


@pytest.mark.parametrize("text", OTHERS.values(), ids=OTHERS.keys())
def test_a_command_that_needs_no_conf_py_leaves_it_out(read, text: str, notes: list[str], tmp_path: Path) -> None:
    for why in {"named": True}, {"optional": True}:
        assert read(text, **why) == load_config.Conf()
    Path("hostfile").write_text("10.0.0.7 slots=2\n")
    assert [host.host for host in read(text, Selection(hostfile="hostfile")).values["HOSTS"]] == ["10.0.0.7"]
    assert all(f"{tmp_path}/conf.py is that of another program" in note for note in notes) and len(notes) == 3


def test_it_is_not_run(read) -> None:
    read("open('it-ran', 'w')\nproject = 'demo'", named=True)
    assert not os.path.exists("it-ran")


@pytest.mark.parametrize("text, key", OURS.values(), ids=OURS.keys())
def test_keys_of_ours_count(read, text: str, key: str, notes: list[str]) -> None:
    assert key in read(text, named=True).values and not notes


@pytest.mark.parametrize("text", ["HOSTS = [", "import no_such_module\nPRELUDE = 'x'"])
def test_an_error_in_ours_is_an_error(read, text: str) -> None:
    with pytest.raises(ConfigError, match=r"conf.py, line 1"):
        read(text, named=True)


def test_a_command_that_needs_one_names_the_option(read) -> None:
    for text in OTHERS.values():
        if "DEBUG" not in text:  # the error that names DEBUG comes later
            with pytest.raises(ConfigError) as caught:
                read(text)
            assert "--no-conf" in caught.value.fix


def test_no_conf(read, notes: list[str]) -> None:
    assert read("raise SystemExit(1)", Selection(no_conf=True)) == load_config.Conf()
    with pytest.raises(UsageError, match="--no-conf and --conf"):
        read("", Selection(conf="conf.py", no_conf=True))
    assert not notes


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make a file of another user")
def test_conf_py_of_another_user(read, tmp_path: Path, notes: list[str]) -> None:
    (tmp_path / "conf.py").touch()
    os.chown(tmp_path / "conf.py", 4002, -1)
    assert read("HOSTS = ['10.0.0.1']", named=True) == load_config.Conf()
    assert "belongs to uid 4002" in notes[0]
    with pytest.raises(ConfigError, match="belongs to uid 4002"):
        read("HOSTS = ['10.0.0.1']", optional=True)
