"""Containers of podman on the nodes of a lab, as root and as a user without root, and the small image that they run.

    nodes = {node: container_node(tmp_path / f"etc{node}", users=("ann",)) for node in range(3)}
    three = site(3, nodes=nodes)
    put_image(three, image)                       # image: the fixture container_image
    three.conf(CONTAINER=settings())
    three.inv("run", "-w", "job").ends(0)
    no_containers(three)

Each node has an image store of its own in its home, and the files of /etc/containers that runc and cgroupfs need: that is all
that podman needs to run in a namespace. The image has a shell and some programs; Python comes from this machine, by volumes.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli import LabSite, Process, until
from tests.lab.lab import FIRST_UID, HOME, PATH, REPO, USERS, Node

PROGRAMS = ("podman", "runc", "conmon", "newuidmap")
IMAGE = "ct-test:1"  # its full name is localhost/ct-test:1
IMAGE_ENV = {"IMAGE_WORD": "image", "PATH": "/opt/image/bin:/usr/bin:/bin", "HOME": "/opt/image/home"}
LABEL = "clustertool.job"
ETC = Path("/etc/containers")
# No events: `system reset` of podman 4 removes their folder, and panics if it writes one of an image after that.
SETTINGS = """\
[containers]
log_driver = "k8s-file"
[engine]
runtime = "runc"
cgroup_manager = "cgroupfs"
events_logger = "none"
"""
STORAGE = """\
[storage]
driver = "overlay"
graphroot = "{home}/.image-store"
runroot = "/run/image-store"
rootless_storage_path = "$HOME/.image-store"
"""
POLICY = {"default": [{"type": "insecureAcceptAnything"}]}
# In the image. Each prints or does one thing; a rank that needs more has Python, by volumes.
IN_IMAGE = (
    "dash",
    "cat",
    "sleep",
    "env",
    "id",
    "ls",
    "pwd",
    "mkdir",
    "rm",
    "kill",
    "dd",
    "head",
    "hostname",
    "stat",
    "setsid",
)
RUNTIME_PROCESSES = ("conmon", "podman", "runc", "runc:[2:INIT]")
WAIT = 60.0


def why_not() -> str:
    """Why there can be no containers here, "" if there can."""
    path = f"{os.environ.get('PATH', '')}:{PATH}"
    absent = [program for program in PROGRAMS if not shutil.which(program, path=path)]
    return f"containers need {', '.join(absent)}: scripts/engine-packages.sh installs them" if absent else ""


def demand() -> None:
    """Skip without podman; with DEMAND_ENGINES=1, fail."""
    if why := why_not():
        pytest.fail(why) if os.environ.get("DEMAND_ENGINES") == "1" else pytest.skip(why)


# -- nodes


def container_node(folder: Path, users: Sequence[str] = (), **more: object) -> Node:
    """A node that can run containers, as root and as each of `users` without root.

    folder: a new one, for the node's files of /etc/containers. more: as in Node.
    """
    etc = folder / "containers"
    (etc / "registries.conf.d").mkdir(parents=True)
    (etc / "containers.conf").write_text(SETTINGS)
    (etc / "storage.conf").write_text(STORAGE.format(home=HOME))
    (etc / "policy.json").write_text(json.dumps(POLICY))
    (etc / "registries.conf").write_text("")
    # `podman info` asks dpkg for the packages of its programs, which takes three times as long as the rest of it.
    binds = [(etc, ETC), (Path("/bin/false").resolve(), Path("/usr/bin/dpkg"))]
    # sshd without PAM makes no folder in /run/user. Other users must be able to read a Python below root's home.
    commands = ["mkdir -p /dev/mqueue", "mount -t mqueue mqueue /dev/mqueue", f"chmod 711 {HOME}"]
    sshd = []
    for number, user in enumerate(users):
        uid = FIRST_UID + number
        commands.append(f"mkdir -p /run/user && install -d -m 700 -o {uid} -g {uid} /run/user/{uid}")
        sshd += [f"Match User {user}", f"SetEnv XDG_RUNTIME_DIR=/run/user/{uid}"]
    ranges = "".join(f"{user}:{100_000 * (number + 1)}:65536\n" for number, user in enumerate(users))
    for name in ("subuid", "subgid"):
        (folder / name).write_text(ranges)
        binds.append((folder / name, Path("/etc") / name))
    return Node(
        cgroups=True, users=tuple(users), binds=tuple(binds), commands=tuple(commands), sshd=tuple(sshd), **more
    )  # type: ignore[arg-type]


class UserSite(LabSite):
    """A lab as one of its users without root has it."""

    user = "root"

    @classmethod
    def of(cls, site: LabSite, user: str) -> LabSite:
        """The folder of conf.py stays."""
        if user == "root":
            return site
        made = cls(site.folder, site.lab)
        made.user = user
        return made

    def conf_text(self, **keys: object) -> str:
        return super().conf_text(**{"USER": self.user, **keys})

    def home(self, node: int) -> Path:
        return self.lab.dir / self.name(node) / "run" / USERS.relative_to("/run") / self.user


# -- images


def make_image(folder: Path) -> Path:
    """The file system of the image as a tar file, for `podman import`: about 4 MB."""
    top, tar = folder / "image", folder / "image.tar"
    for name in ("usr/bin", "usr/lib", "usr/lib64", "opt/image/bin", "opt/image/home", "etc", "tmp", "var"):
        (top / name).mkdir(parents=True, exist_ok=True)
    (top / "tmp").chmod(0o1777)
    (top / "opt/image/home").chmod(0o777)  # of whatever user a rank has
    for name in ("bin", "lib", "lib64"):
        (top / name).symlink_to(f"usr/{name}")
    libraries: set[str] = set()
    for program in IN_IMAGE:
        path = shutil.which(program, path=PATH)
        assert path, f"no {program} here"
        shutil.copy(path, top / "usr/bin" / program)
        found = subprocess.run(["ldd", path], text=True, capture_output=True, check=True).stdout
        libraries |= set(re.findall(r"(/lib\S+) \(", found))
    (top / "usr/bin/sh").symlink_to("dash")
    for library in libraries:
        (top / library[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(library, top / library[1:])
    subprocess.run(["tar", "-C", top, "-cf", tar, "."], check=True)
    shutil.rmtree(top)
    return tar


def put_image(
    site: LabSite, tar: Path, users: Sequence[str] = ("root",), nodes: Iterable[int] | None = None, name: str = IMAGE
) -> None:
    """Import the image into the stores of users on nodes, by default on all. Its id differs from node to node."""
    changes = [token for key, value in IMAGE_ENV.items() for token in ("--change", f"ENV {key}={value}")]
    for node in range(site.count) if nodes is None else nodes:
        for user in users:
            podman(site, node, "import", "--quiet", *changes, "-", name, user=user, stdin=tar)


def copy_image(
    site: LabSite, users: Sequence[str] = ("root",), nodes: Iterable[int] | None = None, name: str = IMAGE
) -> None:
    """Copy the image of the first user on node 0 to all other stores, or those of `nodes`: id and digest stay the same."""
    tar = site.lab.dir / "saved.tar"
    with tar.open("wb") as file:
        done = _podman(site, 0, ["save", "--quiet", name], users[0], stdout=file)
    assert done.returncode == 0, done.stderr
    for node in range(site.count) if nodes is None else nodes:
        for user in users:
            if (node, user) != (0, users[0]):
                podman(site, node, "load", "--quiet", user=user, stdin=tar)
    tar.unlink()


def python_volumes(*more: Path | str) -> list[str]:
    """Volumes that give the image this Python, this project and `more` folders, all read-only."""
    base, libraries = Path(sys.base_prefix), [Path("/usr/lib"), Path("/usr/lib64")]
    wanted = [*libraries, REPO, Path(sys.prefix).resolve(), *map(Path, more)]
    wanted.append(base if base != Path("/usr") else Path(sys.executable).resolve())
    return [f"{path}:{path}:ro" for path in dict.fromkeys(wanted) if path.exists()]


def settings(**more: object) -> dict[str, object]:
    """CONTAINER of conf.py: the image of tests, with Python. Ranks find Python at sys.executable."""
    return {"image": IMAGE, "runtime": "podman", "volumes": python_volumes(), "pull": "never", **more}


# -- what is on nodes


def podman(site: LabSite, node: int, *args: str, user: str = "root", stdin: Path | None = None) -> str:
    """The output of a podman command of a user on a node. stdin: a file."""
    if stdin is None:
        done = _podman(site, node, args, user)
    else:
        with stdin.open("rb") as file:
            done = _podman(site, node, args, user, stdin=file)
    assert done.returncode == 0, f"podman {' '.join(args)} of {user} on node {node}: {done.stderr}"
    return done.stdout


def _podman(
    site: LabSite, node: int, args: Sequence[str], user: str, **options: Any
) -> subprocess.CompletedProcess[str]:
    """It runs like a command in a login session of the user."""
    if user == "root":
        login, home = [], str(HOME)
    else:
        uid = FIRST_UID + site.lab.special[node].users.index(user)
        login, home = ["setpriv", f"--reuid={uid}", f"--regid={uid}", "--init-groups"], str(USERS / user)
        login += ["env", f"XDG_RUNTIME_DIR=/run/user/{uid}"]
    enter = ["nsenter", "-t", str(site.lab.boots[node].init), "-m", "-u", "-i", "-n", "-p", *login]
    shell = ["env", f"PATH={PATH}", f"HOME={home}", f"USER={user}", "sh", "-c", 'cd && exec podman "$@"', "podman"]
    streams: dict[str, Any] = {
        "stdin": subprocess.DEVNULL,
        "stdout": subprocess.PIPE,
        "stderr": subprocess.PIPE,
        **options,
    }
    return subprocess.run([*enter, *shell, *args], text=True, timeout=WAIT, **streams)


def containers(site: LabSite, node: int, user: str = "root") -> list[str]:
    """Names of the tool's containers in a user's store on a node, running or not."""
    return podman(site, node, "ps", "--all", "--filter", f"label={LABEL}", "--format", "{{.Names}}", user=user).split()


def conmons(site: LabSite, node: int) -> list[Process]:
    """Processes of the runtime, which live as long as containers, or clean up behind them."""
    return [process for process in site.processes(node) if process.name in RUNTIME_PROCESSES]


def no_containers(
    site: LabSite, users: Sequence[str] = ("root",), nodes: Iterable[int] | None = None, seconds: float = 30.0
) -> None:
    """Wait until nodes have no container of the tool, no process of a job, and none of the runtime."""
    nodes = list(range(site.count) if nodes is None else nodes)

    def living() -> list[object]:
        return [(p.node, p.pid, p.name, p.argv[:2]) for p in site.living() if p.node in nodes]

    def names() -> list[str]:
        return [name for node in nodes for user in users for name in containers(site, node, user)]

    until(lambda: not (living() or names()), seconds, lambda: f"these to end: {[*living(), *names()]}")


@contextlib.contextmanager
def oom_kills(happen: bool) -> Iterator[None]:
    """Keep tests in which the kernel kills for memory apart from those in which it must not have: it counts them for the whole
    machine, so a rank that dies of SIGKILL meanwhile is reported as out of memory.
    """
    with open(__file__, encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX if happen else fcntl.LOCK_SH)
        yield
