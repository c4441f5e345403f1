"""The user of this machine without an entry in the password file, and without a home folder."""

from __future__ import annotations

import json
import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from clustertool.errors import ConfigError
from clustertool.fleet import this_user
from clustertool.fleet.dispatch.cache import WorkspaceCache
from clustertool.fleet.joining import secret
from clustertool.ssh import settings
from clustertool.verbs import program
from tests.cli import CLUSTERRUN, CLUSTERTOOL


@pytest.fixture
def stranger(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> pytest.MonkeyPatch:
    """A user without an entry in the password file and without the variables of a login."""

    def missing(uid: int) -> pwd.struct_passwd:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", missing)
    for name in ("HOME", "USER", "LOGNAME", "XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.chdir(tmp_path)
    return monkeypatch


def test_the_name_of_a_user_without_an_entry(stranger: pytest.MonkeyPatch) -> None:
    assert this_user.name() == str(os.getuid())
    stranger.setenv("USER", "ada")
    assert this_user.name() == "ada"


def test_an_entry_has_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "somebody")
    assert this_user.name() == pwd.getpwuid(os.getuid()).pw_name


@pytest.mark.parametrize("home", [None, "", "relative", "~"])
def test_without_a_home_folder_each_folder_is_an_error(stranger: pytest.MonkeyPatch, home: str | None) -> None:
    if home is not None:
        stranger.setenv("HOME", home)
    for find, variable in (
        (this_user.state, "XDG_STATE_HOME"),
        (this_user.cache, "XDG_CACHE_HOME"),
        (this_user.config, "XDG_CONFIG_HOME"),
        (lambda: this_user.expand_home("~/results"), "HOME"),
    ):
        with pytest.raises(ConfigError, match="no home folder") as caught:
            find()
        assert caught.value.code == 78 and f"{variable}=DIR" in caught.value.fix
    assert not this_user.is_home(Path("/")) and settings.home() == "/"
    assert program.job_names() == []
    assert os.listdir() == [], "nothing has made a folder with the name ~"


def test_a_variable_of_xdg_is_enough(stranger: pytest.MonkeyPatch, tmp_path: Path) -> None:
    stranger.setenv("XDG_STATE_HOME", str(tmp_path))
    assert this_user.state() == tmp_path / "clustertool"


def test_the_cache_is_left_out_without_a_home_folder(stranger: pytest.MonkeyPatch, tmp_path: Path) -> None:
    cache = WorkspaceCache(tmp_path)
    cache.keep_manifest("r", b"text")
    cache.keep_packs("r", ["a"], [])
    assert (cache.manifests(), cache.manifest("r"), cache.packs(), cache.digests()) == ([], None, ("", set(), []), {})


def test_a_home_folder_that_cannot_be_written(stranger: pytest.MonkeyPatch) -> None:
    stranger.setenv("HOME", "/proc")  # not even root makes a folder there
    with pytest.raises(ConfigError, match=r"/proc/") as caught:
        secret.of_this_machine()
    assert "export HOME=DIR" in caught.value.fix


@pytest.mark.parametrize(
    ("env", "owner", "lists"),
    [
        ({}, "9999", False),
        pytest.param({}, "9999", True, marks=pytest.mark.chaos),
        *(pytest.param({"HOME": home, "USER": "ada"}, "ada", True, marks=pytest.mark.chaos) for home in ("/proc", ".")),
    ],
    ids=["no home folder", "its jobs", "one that cannot be written", "one of its own"],
)
def test_commands_of_a_user_without_an_entry(tmp_path: Path, env: dict[str, str], owner: str, lists: bool) -> None:
    """In a user namespace this test's user has a number that no entry has."""
    become = ["unshare", "--map-user=9999", "--map-group=9999"]
    if sys.platform != "linux" or subprocess.run([*become, "true"], capture_output=True).returncode:
        pytest.skip("this machine allows no user namespaces")
    (tmp_path / "train.py").write_text("print('trained')")

    own = env.get("HOME") == "."
    env = {**env, **({"HOME": str(tmp_path)} if own else {}), "PATH": os.environ["PATH"]}

    def run(*argv: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([*become, *argv], cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)

    done = run(*CLUSTERRUN, "--standalone", "train.py")
    assert done.returncode == 0 and "trained" in done.stdout, done.stderr
    assert ("the hosts of this job are not stored" in done.stderr) is not own
    (events,) = tmp_path.glob(".clustertool/JOB*/.clustertool/events.jsonl")
    assert json.loads(events.read_text().splitlines()[0])["owner"] == owner
    if lists:  # an agent compiles its code for each command
        listed = run(*CLUSTERTOOL, "jobs")
        assert listed.stdout.splitlines()[1].split()[2] == owner, listed.stderr
    elif "HOME" not in env:
        failed = run(*CLUSTERTOOL, "fetch", "--to=~/results")
        assert failed.returncode == 78 and "fix: export HOME=DIR" in failed.stderr, failed.stderr
    assert not (tmp_path / "~").exists()
