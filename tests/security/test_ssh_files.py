"""An ssh configuration that another user can have written is refused by the rule of ssh itself."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from clustertool.errors import ConfigError
from clustertool.model.config.cluster import read_cluster
from clustertool.ssh import settings as sshconfig
from clustertool.ssh.settings import SshSettings, settings
from tests.cli import LoopSite

STRANGER = 4002
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of another user")


@pytest.fixture
def files(laptop: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path, Path]:
    """The user's configuration, a file that it includes, and the system's configuration."""
    user, included, system = laptop / ".ssh/config", laptop / ".ssh/more/a.conf", laptop / "ssh_config"
    included.parent.mkdir()
    user.write_text("Include more/*.conf\nHost gpu1\n  Port 7\n")
    included.write_text("Host gpu1\n  User somebody\n")
    system.write_text("Host *\n  ServerAliveInterval 5\n")
    monkeypatch.setattr(sshconfig, "SYSTEM_CONFIG", str(system))
    return user, included, system


def _get() -> SshSettings:
    cluster = read_cluster({"HOSTS": ["gpu1"]})
    return settings(cluster.hosts[0], cluster)


def _refused(path: Path, text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        _get()
    assert caught.value.what.startswith(f"{path} is not obeyed") and text in caught.value.what
    assert f"chmod 600 {path}" in caught.value.fix


def test_a_mode_that_lets_others_write(files: tuple[Path, Path, Path]) -> None:
    user, included, system = files
    assert (_get().user, _get().port) == ("somebody", 7)
    for path in (user, included):
        path.chmod(0o646)
        _refused(path, "every user (mode 0646)")
        path.chmod(0o644)
    system.chmod(0o666)  # ssh accepts this one
    assert _get().port == 7


@ROOT
def test_a_file_of_another_user_and_of_a_group(files: tuple[Path, Path, Path]) -> None:
    user, included, system = files
    for path in (user, included):
        os.chown(path, STRANGER, 0)
        _refused(path, f"belongs to uid {STRANGER}")
        os.chown(path, 0, STRANGER)
        path.chmod(0o660)
        _refused(path, f"the group {STRANGER}")
        os.chown(path, 0, 0)
        path.chmod(0o600)
    system.write_text(f"Include {included}\n")
    user.write_text("")
    os.chown(included, STRANGER, 0)
    _refused(included, f"belongs to uid {STRANGER}")


@ROOT
@pytest.mark.parametrize("which", ["user", "included", "system"])
@pytest.mark.parametrize("change", ["chmod 666", "chmod 664", f"chown {STRANGER}", f"chgrp {STRANGER}"])
def test_ssh_has_the_same_rule(files: tuple[Path, Path, Path], laptop: Path, which: str, change: str) -> None:
    """ssh reads the home of the password file: there, in a mount namespace, is our laptop's home."""
    path = dict(zip(("user", "included", "system"), files))[which]
    if change.startswith("chgrp"):
        path.chmod(0o664)
    subprocess.run(f"{change} {path}", shell=True, check=True)
    script = 'mount --bind "$HOME" ~root && mount --bind "$HOME/ssh_config" /etc/ssh/ssh_config && exec ssh -G gpu1'
    done = subprocess.run(["unshare", "-m", "sh", "-c", script], capture_output=True, text=True)
    if "unshare" in done.stderr or "mount" in done.stderr:
        pytest.skip("needs mount namespaces")
    refuses = "Bad owner or permissions" in done.stderr
    assert refuses or done.returncode == 0, done.stderr
    if refuses:
        _refused(path, "")
    else:
        assert _get().port == 7


def test_all_nodes_give_one_answer(site: Callable[..., LoopSite]) -> None:
    """No ProxyCommand of such a file runs, and the error is not repeated for each node."""
    three = site(3)
    config = three.laptop / ".ssh/config"
    config.write_text(f"Host *\n  ProxyCommand touch {three.laptop}/it-ran\n")
    config.chmod(0o666)
    for verb in ("jobs", "check"):
        done = three.inv(verb).ends(78)
        assert done.err.count("is not obeyed") == 2, done.err  # the second time in the last line
        assert "Traceback" not in done.err
    assert not (three.laptop / "it-ran").exists()
