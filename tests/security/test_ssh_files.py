"""An ssh configuration that another user can have written is refused by the rule of ssh itself."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertool.errors import ConfigError
from clustertool.model.config.cluster import read_cluster
from clustertool.ssh import settings as sshconfig
from clustertool.ssh.settings import SshSettings, settings
from tests.cli import REPO, LoopSite

STRANGER = 4002
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of another user")


@pytest.fixture
def files(laptop: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """The user's configuration, a file that it includes, and the system's configuration."""
    user, included, system = laptop / ".ssh/config", laptop / ".ssh/more/a.conf", laptop / "ssh_config"
    included.parent.mkdir()
    user.write_text(f"Include {included.parent}/*.conf\nHost gpu1\n  Port 7\n")
    included.write_text("Host gpu1\n  User somebody\n")
    system.write_text("Host *\n  ServerAliveInterval 5\n")
    monkeypatch.setattr(sshconfig, "SYSTEM_CONFIG", str(system))
    return user, included, system


def _get() -> SshSettings:
    cluster = read_cluster({"HOSTS": ["gpu1"]})
    return settings(cluster.hosts[0], cluster)


def _refused(path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        _get()
    assert caught.value.what == f"ssh does not accept its configuration: Bad owner or permissions on {path}"
    assert "chmod 600" in caught.value.fix


def test_a_mode_that_lets_others_write(files: tuple[Path, Path, Path]) -> None:
    user, included, _ = files
    assert (_get().user, _get().port) == ("somebody", 7)
    for path in (user, included):
        path.chmod(0o646)
        _refused(path)
        path.chmod(0o644)
    assert _get().port == 7


@ROOT
def test_a_file_of_another_user_and_of_a_group(files: tuple[Path, Path, Path]) -> None:
    user, included, system = files
    for path in (user, included):
        os.chown(path, STRANGER, 0)
        _refused(path)
        os.chown(path, 0, STRANGER)
        path.chmod(0o660)
        _refused(path)
        os.chown(path, 0, 0)
        path.chmod(0o600)
    system.write_text(f"Include {included}\n")
    user.write_text("")
    os.chown(included, STRANGER, 0)
    _refused(included)


@ROOT
def test_the_same_rule_without_an_ssh_client(files: tuple[Path, Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    user = files[0]
    user.write_text("Host gpu1\n  Port 7\n")
    monkeypatch.setenv("PATH", "/nonexistent")
    assert _get().port == 7
    for mode, uid, gid, text in (
        (0o646, 0, 0, "can be changed by every user (mode 0646)"),
        (0o660, 0, STRANGER, f"can be changed by the group {STRANGER}"),
        (0o600, STRANGER, 0, f"belongs to uid {STRANGER}"),
    ):
        os.chown(user, uid, gid)
        user.chmod(mode)
        with pytest.raises(ConfigError) as caught:
            _get()
        assert caught.value.what.startswith(f"{user} {text}")
        assert f"chmod 600 {user}" in caught.value.fix


AT_HOME = """
import ctypes, os, pwd, subprocess, sys
from clustertool.errors import ConfigError
from clustertool.model.config.cluster import read_cluster
from clustertool.ssh.settings import settings
account, laptop = pwd.getpwuid(os.getuid()).pw_dir, os.environ["HOME"]
if ctypes.CDLL(None).unshare(0x20000):  # CLONE_NEWNS
    sys.exit(9)
system = "/etc/ssh/ssh_config"
for arguments in (["--make-rprivate", "/"], ["--bind", laptop, account], ["--bind", f"{laptop}/ssh_config", system]):
    if subprocess.run(["mount", *arguments], stderr=subprocess.DEVNULL).returncode:
        sys.exit(9)
os.environ["HOME"] = account
cluster = read_cluster({"HOSTS": ["gpu1"]})
try:
    print(settings(cluster.hosts[0], cluster).port)
except ConfigError as error:
    print(error.what)
print(subprocess.run(["ssh", "-G", "gpu1"], capture_output=True, text=True).stderr)
"""


@ROOT
@pytest.mark.parametrize("which", ["user", "included", "system"])
@pytest.mark.parametrize("change", ["chmod 666", "chmod 664", f"chown {STRANGER}", f"chgrp {STRANGER}"])
def test_ssh_has_the_same_rule(files: tuple[Path, Path, Path], laptop: Path, which: str, change: str) -> None:
    """In the home of the password file, which is the laptop's in a mount namespace."""
    user, included, system = files
    user.write_text("Include more/*.conf\nHost gpu1\n  Port 7\n")  # relative to ~/.ssh
    path = {"user": user, "included": included, "system": system}[which]
    if change.startswith("chgrp"):
        path.chmod(0o664)
    subprocess.run(f"{change} {path}", shell=True, check=True)
    done = subprocess.run([sys.executable, "-c", AT_HOME], capture_output=True, text=True, cwd=REPO)
    if done.returncode == 9:
        pytest.skip("needs mount namespaces")
    ours, _, its = done.stdout.partition("\n")
    assert ("Bad owner or permissions" in its) == ("Bad owner or permissions" in ours) == (ours != "7"), done


def test_all_nodes_give_one_answer(site: Callable[..., LoopSite]) -> None:
    """No ProxyCommand of such a file runs, and the error is not repeated for each node."""
    three = site(3)
    config = three.laptop / ".ssh/config"
    config.write_text(f"Host *\n  ProxyCommand touch {three.laptop}/it-ran\n")
    config.chmod(0o666)
    for verb in ("jobs", "check"):
        done = three.inv(verb).ends(78)
        assert done.err.count("Bad owner or permissions") == 2, done.err  # the second time in the last line
        assert "Traceback" not in done.err
    assert not (three.laptop / "it-ran").exists()
