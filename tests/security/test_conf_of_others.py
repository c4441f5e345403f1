"""Files of other local users on the laptop: a conf.py that the search finds, Invoke's files, records, links."""

from __future__ import annotations

import grp
import os
import pwd
import struct
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile

import pytest

from clustertool.errors import UsageError
from clustertool.fleet.this_machine import folder_of_jobs
from clustertool.model.paths import OURS
from clustertool.verbs import fetch
from tests import forked
from tests.cli import CLUSTERRUN, CLUSTERTOOL, REPO, TIMEOUT, Done

STRANGER = 4002  # no user of this machine
ROOT = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to make files of another user")
FIX = "--conf "
# With all of these `run --dry` opens no connection.
KEYS = "HOSTS = ['127.0.0.1']\nROOT_DIR = '/srv/x'\nDEVICE_KIND = 'cpu'\nSTART_PORT = 6170\nLEAD_PORT = 6160\n"


class Place:
    """A tree of folders with a conf.py that leaves a mark if it runs; `top` is as open as /tmp."""

    def __init__(self, base: Path) -> None:
        self.top, self.home = base / "top", base / "home"
        self.home.mkdir()
        self.top.mkdir()
        self.mark = base / "it-ran"
        self.below = self.top / "project" / "deep"
        self.below.mkdir(parents=True)

    def program(self, path: Path) -> Path:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"open({str(self.mark)!r}, 'w').close()\n{KEYS}")
        return path

    def _environ(self, home: Path | None) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("XDG_", "SSH_", "INVOKE_"))}
        return {**kept, "HOME": str(home or self.home), "PYTHONPATH": str(REPO)}

    def run(self, *argv: str, cwd: Path | None = None, home: Path | None = None) -> Done:
        """Run a command in a new process."""
        done = subprocess.run(
            argv,
            cwd=cwd or self.below,
            env=self._environ(home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
        )
        return Done(done.returncode, done.stdout, done.stderr, 0.0)

    def _fork(self, argv: list[str], cwd: Path | None, home: Path | None) -> Done:
        """Run a command of the tool in a fork of a process that has imported the package."""
        with open(os.devnull, "rb") as nothing, TemporaryFile("w+") as out, TemporaryFile("w+") as err:
            streams = (nothing.fileno(), out.fileno(), err.fileno())
            code = forked.start(argv, cwd or self.below, self._environ(home), streams).wait(TIMEOUT)
            out.seek(0)
            err.seek(0)
            return Done(code, out.read(), err.read(), 0.0)

    def dry(self, *options: str, cwd: Path | None = None, home: Path | None = None, fresh: bool = False) -> Done:
        """Run a verb that reads conf.py and opens no connection. fresh: in a new process."""
        workspace = self.top.parent / "job"
        workspace.mkdir(exist_ok=True)
        (workspace / "train.py").write_text("")
        tokens = ("run", "--dry", "-w", str(workspace), "--nproc-per-node", "1", *options)
        if fresh:
            return self.run(*CLUSTERTOOL, *tokens, cwd=cwd, home=home)
        return self._fork([*CLUSTERTOOL, *tokens], cwd, home)

    def refused(self, *texts: str, cwd: Path | None = None) -> Done:
        done = self.dry(cwd=cwd).ends(78)
        for text in (FIX, *texts):
            assert text in done.err
        assert not self.mark.exists()
        return done

    def accepted(self, cwd: Path | None = None) -> None:
        self.dry(cwd=cwd).ends(0)
        self.mark.unlink()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


@ROOT
def test_a_file_of_another_user_in_a_folder_as_open_as_tmp(place: Place) -> None:
    conf = place.program(place.top / "conf.py")
    place.top.chmod(0o1777)
    os.chown(conf, STRANGER, STRANGER)
    place.refused(str(conf), f"uid {STRANGER}")
    place.refused(str(conf), f"uid {STRANGER}", cwd=place.top)
    (place.below / "train.py").write_text("")
    done = place.run(*CLUSTERRUN, "train.py").ends(78)
    assert f"belongs to uid {STRANGER}" in done.err
    assert not place.mark.exists()


@ROOT
def test_the_file_that_the_user_names_is_run(place: Place) -> None:
    conf = place.program(place.top / "conf.py")
    os.chown(conf, STRANGER, STRANGER)
    place.dry("--conf", str(conf)).ends(0)
    assert place.mark.exists()


@ROOT
def test_a_folder_of_another_user_on_the_way(place: Place) -> None:
    conf = place.program(place.top / "conf.py")
    os.chown(place.below.parent, STRANGER, STRANGER)
    place.refused(str(conf), str(place.below.parent), f"uid {STRANGER}")
    place.below.parent.chmod(0o1777)  # the owner of a sticky folder can replace what lies there
    place.refused(str(place.below.parent), f"uid {STRANGER}")


@pytest.mark.parametrize("mode", [0o666, 0o646])
def test_a_file_that_every_user_can_change(place: Place, mode: int) -> None:
    conf = place.program(place.top / "conf.py")
    conf.chmod(mode)
    place.refused(f"{conf} is not run: it can be changed by every user (mode {mode:04o})")


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_a_folder_that_every_user_can_change(place: Place, depth: int) -> None:
    place.program(place.top / "conf.py")
    folder = [place.below, place.below.parent, place.top][depth]
    folder.chmod(0o777)
    place.refused(f"{folder} can be changed by every user (mode 0777)")
    folder.chmod(0o1777)
    place.accepted()


@ROOT
def test_a_group_that_is_not_private(place: Place) -> None:
    conf = place.program(place.top / "conf.py")
    os.chown(conf, 0, STRANGER)
    conf.chmod(0o664)
    place.refused(f"the group {STRANGER}", "mode 0664")
    conf.chmod(0o644)
    os.chown(place.top, 0, STRANGER)
    place.top.chmod(0o2775)
    place.refused(str(place.top), f"the group {STRANGER}", "mode 2775")


def test_the_private_group_may_write(place: Place) -> None:
    """Its name is the user's and it has no other member, as Debian makes one for each user."""
    gid = os.getegid()
    user, group = pwd.getpwuid(os.geteuid()).pw_name, grp.getgrgid(gid)
    if group.gr_name != user or set(group.gr_mem) - {user}:
        pytest.skip("this user has no private group")
    conf = place.program(place.top / "conf.py")
    for path, mode in ((conf, 0o664), (place.top, 0o775)):
        os.chown(path, -1, gid)
        path.chmod(mode)
    place.accepted()


def test_an_access_list(place: Place) -> None:
    """With one, the group's bits of the mode are the most that any user in the list has."""
    conf = place.program(place.top / "conf.py")
    conf.chmod(0o664)
    entries = [(0x01, 6, -1), (0x02, 6, STRANGER), (0x04, 4, -1), (0x10, 6, -1), (0x20, 4, -1)]
    packed = struct.pack("<I", 2) + b"".join(
        struct.pack("<HHI", tag, bits, owner & 0xFFFFFFFF) for tag, bits, owner in entries
    )
    try:
        os.setxattr(conf, "system.posix_acl_access", packed)
    except OSError:
        pytest.skip("no access lists on this file system")
    place.refused(str(conf), "can be changed by the group")


@ROOT
def test_links(place: Place) -> None:
    """A link of another user leads nowhere; one of our own leads to a file and folder that are checked too."""
    ours = place.program(place.top.parent / "shared" / "cluster.py")
    link = place.top / "conf.py"
    link.symlink_to(ours)
    place.accepted()
    os.lchown(link, STRANGER, STRANGER)
    place.refused(str(link), f"uid {STRANGER}")
    os.lchown(link, 0, 0)
    ours.parent.chmod(0o777)
    place.refused(str(ours.parent), "every user")
    ours.parent.chmod(0o755)
    os.chown(ours, STRANGER, STRANGER)
    place.refused(str(ours), f"uid {STRANGER}")


def test_the_search_ends_at_the_home_folder(place: Place) -> None:
    place.program(place.top / "conf.py")
    assert "no conf.py" in place.run(*CLUSTERTOOL, "jobs", home=place.below.parent).ends(78).err
    assert not place.mark.exists()
    logical = place.top.parent / "home-by-link"
    logical.symlink_to(place.below.parent)
    assert "no conf.py" in place.run(*CLUSTERTOOL, "jobs", home=logical).ends(78).err
    place.program(place.below.parent / "conf.py")
    place.dry(home=place.below.parent).ends(0)
    assert place.mark.exists()


@ROOT
def test_the_search_ends_at_a_mount_point(place: Place) -> None:
    place.program(place.top / "conf.py")
    tokens = " ".join(CLUSTERTOOL)
    script = f'mount -t tmpfs none "$1" && cd "$1" && mkdir sub && cd sub && exec {tokens} jobs'
    done = place.run("unshare", "-m", "sh", "-c", script, "sh", str(place.below))
    if "unshare" in done.err:
        pytest.skip("needs mount namespaces")
    assert "no conf.py" in done.ends(78).err
    assert not place.mark.exists()


def test_nothing_but_conf_py_is_run(place: Place) -> None:
    """Invoke would load tasks.py from here or above, and configuration files that can be programs."""
    (place.below / "conf.py").write_text(KEYS)
    for folder, name in (
        (place.below, "tasks.py"),
        (place.below, "invoke.py"),
        (place.below, "sitecustomize.py"),
        (place.below, "yaml.py"),
        (place.top, "tasks.py"),
        (place.below, "tasks/__init__.py"),
        (place.home, ".invoke.py"),
        (place.home, "invoke.py"),
        (place.below, "paramiko.py"),
        (place.below, "fabric.py"),
        (place.below, "fabric.json"),
    ):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"raise SystemExit(open({str(place.mark)!r}, 'w').write('{name}'))")
    for verb in (["--list"], ["--help", "run"]):
        place.run(*CLUSTERTOOL, *verb).ends(0)
    place.dry(fresh=True).ends(0)
    place.run(*CLUSTERRUN, "--help").ends(0)
    assert not place.mark.exists(), place.mark.read_text()


def test_a_conf_of_dataclasses_and_a_coding_line(place: Place) -> None:
    """It is run from the bytes that were checked, and is still a module as any other."""
    (place.below / "conf.py").write_bytes(
        b"# -*- coding: latin-1 -*-\nfrom __future__ import annotations\nfrom dataclasses import dataclass\n"
        b"@dataclass\nclass Node:\n    name: str = '\xe9'\n"
        b"assert Node().name == '\\xe9' and __name__ == 'conf' and __file__.endswith('/conf.py')\n" + KEYS.encode()
    )
    place.dry().ends(0)


@ROOT
def test_jobs_of_another_user_on_this_machine_are_not_found(place: Place) -> None:
    """A `.clustertool` of another user in a folder above hides none of ours."""
    for folder in (place.top, place.top.parent):
        (folder / OURS / OURS).mkdir(parents=True)
        (folder / OURS / OURS / "marker").touch()
    os.chown(place.top / OURS, STRANGER, STRANGER)
    assert folder_of_jobs(place.below) == place.top.parent
    (place.below / OURS).symlink_to(place.top.parent / OURS)
    assert folder_of_jobs(place.below) == place.top.parent


def test_a_report_is_written_through_no_link(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The temporary name was the file's and the process's: another user could put a link there, in a folder as /tmp."""
    precious = place.home / "precious"
    precious.write_text("mine")
    for name in (f".job.html.{os.getpid()}", ".job.html.known", "job.html"):
        (place.top / name).symlink_to(precious)
    monkeypatch.setattr(fetch.secrets, "token_hex", lambda size: "known")
    with pytest.raises(UsageError, match="cannot be written"):
        fetch.write_page(place.top / "job.html", "page")
    monkeypatch.undo()
    fetch.write_page(place.top / "job.html", "page")
    assert (place.top / "job.html").read_text() == "page"
    assert precious.read_text() == "mine"


@ROOT
def test_a_user_without_a_home_folder(place: Place) -> None:
    """A uid without a name and without $HOME, and a $HOME that the user cannot reach, are no bugs."""
    program = f"import sys, os; sys.path.insert(0, {str(REPO)!r})\nfrom clustertool.actions import conf_file as conf\n"
    closed = place.top.parent / "closed"
    (closed / "home").mkdir(parents=True)
    closed.chmod(0o700)
    become = f"os.chdir('/usr/bin'); os.setgid({STRANGER}); os.setuid({STRANGER})\nprint(list(conf._folders())[0])"
    for home in ("os.environ.pop('HOME', None)", f"os.environ['HOME'] = {str(closed / 'home')!r}"):
        done = subprocess.run([sys.executable, "-c", f"{program}{home}\n{become}"], capture_output=True, text=True)
        assert done.stdout == "/usr/bin\n", done.stderr


def test_the_current_folder_was_removed(place: Place) -> None:
    gone = place.top / "gone"
    gone.mkdir()
    tokens = ["sh", "-c", 'rmdir "$PWD" && exec "$@"', "sh", *CLUSTERTOOL, "jobs"]
    done = place.run(*tokens, cwd=gone).ends(78)
    assert "the current folder cannot be used" in done.err
    assert "bug" not in done.err
