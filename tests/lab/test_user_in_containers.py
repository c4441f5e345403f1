"""A rank in a container has the same user, HOME, variables, entrypoint, privileges and limits with each runtime."""

from __future__ import annotations

import io
import json
import shutil
import sys
import tarfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests import containers, docker_daemon
from tests.cli import LabSite
from tests.lab.lab import FIRST_UID, HOME, USERS

# An image with a user of its own, with a HOME that no user can write, a proxy, and an entrypoint that ends at once.
IMAGE = [
    "USER 4242:4343",
    "ENV HOME=/usr",
    "ENV PATH=/usr/bin:/bin",
    "ENV HTTP_PROXY=http://image",
    'ENTRYPOINT ["/bin/false"]',
]
PASSWD = "root:x:0:0:root:/root:/bin/sh\nother:x:4242:4343::/:/bin/sh\n"
PROXIES = {"proxies": {"default": {"httpProxy": "http://docker", "httpsProxy": "http://docker", "noProxy": "docker"}}}
PROBE = """
import getpass, json, os, pathlib, pwd, resource
CGROUP = ["/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"]
for name in ("USER", "LOGNAME"):
    os.environ.pop(name, None)
home = pathlib.Path.home()
kept = (home / "kept").exists()
(home / "kept").touch()
status = pathlib.Path("/proc/self/status").read_text().split("\\n")
print(json.dumps({
    "ids": [os.getuid(), os.geteuid(), os.getgid()],
    "groups": sorted({os.getgid(), *os.getgroups()}),
    "user": getpass.getuser(),
    "other": pwd.getpwuid(0).pw_name,
    "home": str(home),
    "kept": kept,
    "proxies": sorted(name for name in os.environ if name.lower().endswith("_proxy")),
    "privileges": next(line.split()[1] for line in status if line.startswith("NoNewPrivs")),
    "memory": next((path.read_text().strip() for path in map(pathlib.Path, CGROUP) if path.exists()), ""),
    "limits": {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
}))
"""
LIMITS = ("RLIMIT_AS", "RLIMIT_CORE", "RLIMIT_DATA", "RLIMIT_FSIZE", "RLIMIT_MEMLOCK", "RLIMIT_NOFILE", "RLIMIT_STACK")
CHAOS = pytest.mark.chaos
MEMORY = 64_000_000  # KiB of addresses: a runtime of Go reserves some hundred MB


def image(folder: Path, tar: Path) -> Path:
    """The image of the tests, with an /etc/passwd."""
    made = folder / "image.tar"
    shutil.copy(tar, made)
    with tarfile.open(made, "a") as file:
        entry = tarfile.TarInfo("./etc/passwd")
        entry.size, entry.mode = len(PASSWD), 0o644
        file.addfile(entry, io.BytesIO(PASSWD.encode()))
    return made


@pytest.fixture(params=["docker", pytest.param("podman", marks=CHAOS), pytest.param("podman root", marks=CHAOS)])
def one(
    request: pytest.FixtureRequest, site: Callable[..., LabSite], tmp_path: Path, container_image: Path
) -> Iterator[LabSite]:
    """A node whose user has the image, with a soft limit of addresses."""
    runtime, _, user = request.param.partition(" ")
    limit = f"ulimit -S -v {MEMORY}"
    changes = [token for change in IMAGE for token in ("--change", change)]
    tar = image(tmp_path, container_image)
    if runtime == "docker":
        node = docker_daemon.docker_node([f"chmod 711 {HOME}"], users=("ann",))
        plain = site(1, nodes={0: replace(node, commands=(*node.commands, limit))})
        docker_daemon.wait_for(plain)
        plain.lab.exec(0, ["chmod", "666", "/var/run/docker.sock"])
        with tar.open("rb") as file:
            docker_daemon.docker(plain, 0, "import", *changes, "-", containers.IMAGE, stdin=file)
    else:
        node = containers.container_node(tmp_path / "etc", users=("ann",))
        plain = site(1, nodes={0: replace(node, commands=(*node.commands, limit))})
        containers.podman(plain, 0, "import", "--quiet", *changes, "-", containers.IMAGE, user=user or "ann", stdin=tar)
    made = containers.UserSite.of(plain, user or "ann")
    made.runtime = runtime  # type: ignore[attr-defined]
    yield made


def test_what_a_rank_has_of_its_user(one: LabSite) -> None:
    root = getattr(one, "user", "root") == "root"
    home = Path("/root" if root else USERS / "ann")
    folder = one.workspace(probe_py=PROBE.replace("LIMITS", repr(LIMITS)))
    path = f"export PATH={Path(sys.executable).parent}:$PATH"
    settings = containers.settings(runtime=one.runtime)  # type: ignore[attr-defined]
    docker = (one.lab.home(0) if root else one.home(0)) / ".docker"
    docker.mkdir(exist_ok=True)
    (docker / "config.json").write_text(json.dumps(PROXIES))

    def run(**container: object) -> dict[str, object]:
        one.conf(PRELUDE=path, **({"CONTAINER": {**settings, **container}} if container else {}))
        done = one.inv("run", "-w", folder, "--script", "python3 probe.py", "--grace", 5).ends(0)
        return json.loads(done.out[done.out.index("{") :])  # type: ignore[no-any-return]

    without = run()
    # Without root podman sets limits of cgroups only where systemd delegates them.
    limit = [] if one.runtime == "podman" and not root else ["--memory=256m"]  # type: ignore[attr-defined]
    found = run(options=limit)
    assert found["memory"] == str(256 << 20) or not limit
    assert found["ids"] == without["ids"] == ([0, 0, 0] if root else [FIRST_UID] * 3)
    assert found["groups"] == without["groups"]
    assert (found["user"], found["other"]) == ("root" if root else "ann", "root")
    assert (found["proxies"], found["privileges"]) == ([], "1")
    assert found["limits"] == without["limits"] and found["limits"]["RLIMIT_AS"][0] == MEMORY << 10  # type: ignore[index]
    if not root:  # to root /usr is a folder like others
        assert (found["home"], found["kept"]) == (f"{home}/clustertool/.clustertool/home", False)
        assert run(options=[])["kept"], "HOME stays between jobs"
    one.conf(CONTAINER={**settings, "volumes": [*settings["volumes"], "/no/such:/data", "named:/x"]})  # type: ignore[misc]
    finding = "there is no /no/such, the source of a volume"
    assert finding in one.inv("check").ends(69).out
    assert finding in one.inv("run", "-w", folder, "--script", "python3 probe.py").ends(69).err
