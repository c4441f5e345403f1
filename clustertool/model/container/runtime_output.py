"""This module reads what container runtimes print about themselves and about images. Pure: text in, values out."""

# Without `annotations` from __future__: with it, typing would compile each type of a NamedTuple (decision 26).

import json
import re
from typing import Dict, List, Mapping, NamedTuple, Tuple

from clustertool.model.container.container_names import APPTAINER, AUTO, DOCKER, PODMAN, only_for_apptainer

# How NVIDIA's GPUs get into a container: a specification of CDI, or the hook of NVIDIA's runtime.
CDI, HOOK = "cdi", "hook"
_SIF_MAGIC = b"SIF_MAGIC\0"
_SIF_LAUNCH, _SIF_ID = 32, slice(48, 64)  # bytes of a .sif file: the length of the first field, and the place of its id
SIF_HEADER = 128


class Runtime(NamedTuple):
    """version: "" where the runtime cannot be used, else `problem` and `fix` state why. cgroup: "v1" or "v2"."""

    version: str
    rootless: bool = False
    cgroup: str = ""
    store: str = ""
    nvidia: bool = False  # docker knows NVIDIA's runtime
    process_limit: bool = False  # it limits the processes of a container by default
    problem: str = ""
    fix: str = ""


class Image(NamedTuple):
    """id: without the name of its hash. digest: of the registry's manifest, else of the image. size: bytes."""

    id: str
    digest: str
    size: int


def candidates(runtime: str, image: str, options: bool) -> Tuple[str, ...]:
    """List the runtimes of which the first usable one runs the image.

    options: the user has some, which are those of docker and podman where no runtime is named.
    """
    if runtime != AUTO:
        return (runtime,)
    if only_for_apptainer(image):
        return (APPTAINER,)
    return (DOCKER, PODMAN) if options else (DOCKER, PODMAN, APPTAINER)


def info_arguments(runtime: str) -> List[str]:
    """Return the arguments with which a runtime describes itself."""
    return ["version"] if runtime == APPTAINER else ["info", "--format", "{{json .}}"]


def read_info(runtime: str, code: int, out: str, err: str, user: str) -> Runtime:
    """Read what a runtime has answered. code: -1: not in time. user: for the fix."""
    if code == -1:
        return Runtime("", problem=f"{runtime} does not answer", fix=f"try there by hand: {runtime} info")
    found = _object(out)
    if runtime == APPTAINER:
        version = re.search(r"[0-9]+\.[0-9][\w.+-]*", out)
        return Runtime(version[0]) if code == 0 and version else _failed(runtime, err, user)
    if runtime == PODMAN:
        return _podman(found, user) if code == 0 and found else _failed(runtime, err, user)
    if "host" in found:
        return Runtime("", problem="docker is podman here", fix='runtime = "podman"')
    if not found.get("ServerVersion"):
        return _failed(runtime, err or " ".join(map(str, _list(found.get("ServerErrors")))), user)
    options = [str(option) for option in _list(found.get("SecurityOptions"))]
    return Runtime(
        str(found["ServerVersion"]),
        any("rootless" in option for option in options),
        f"v{found.get('CgroupVersion') or '1'}",
        str(found.get("DockerRootDir", "")),
        "nvidia" in _dict(found.get("Runtimes")),
    )


def _podman(found: Mapping[str, object], user: str) -> Runtime:
    host, store, version = (_dict(found.get(name)) for name in ("host", "store", "version"))
    rootless = _dict(host.get("security")).get("rootless") is True
    ranges = _list(_dict(host.get("idMappings")).get("uidmap"))
    if rootless and len(ranges) < 2:
        fix = f"as root: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}; then podman system migrate"
        return Runtime("", problem=f"{user} has no range of uids in /etc/subuid, which podman needs", fix=fix)
    named, cgroup = version.get("Version") or "?", str(host.get("cgroupVersion", ""))
    # Without root it can set limits only where systemd delegates them.
    delegated = (
        cgroup == "v2" and host.get("cgroupManager") == "systemd" and "pids" in _list(host.get("cgroupControllers"))
    )
    limit = not rootless or delegated
    return Runtime(str(named), rootless, cgroup, str(store.get("graphRoot", "")), process_limit=limit)


def _failed(runtime: str, err: str, user: str) -> Runtime:
    last = (err.strip().splitlines() or ["it gave no version"])[-1][-300:]
    fix = f"try there by hand: {runtime} {'version' if runtime == APPTAINER else 'info'}"
    if "permission denied" in last.lower() and runtime == DOCKER:
        fix = f"as root: usermod -aG docker {user}, then log in again; or use podman, which needs no group"
    elif "connect to the docker daemon" in last.lower():
        fix = "as root: systemctl start docker"
    return Runtime("", problem=f"{runtime} cannot be used: {last}", fix=fix)


def read_image(out: str, reference: str) -> Image:
    """Read what `image inspect` has printed about the image that is named `reference`; the id is "" for no image."""
    try:
        found = _dict(_list(json.loads(out))[0])
    except (ValueError, IndexError, RecursionError):
        return Image("", "", -1)
    id, size = str(found.get("Id", "")).rpartition(":")[2], found.get("Size")
    digests = [str(each).rpartition("@")[2] for each in _list(found.get("RepoDigests"))]
    given = reference.partition("@")[2]
    own = given if given in digests else str(found.get("Digest") or "") or (digests[0] if digests else "")
    return Image(id, own or (f"sha256:{id}" if id else ""), size if isinstance(size, int) else -1)


def sif_digest(header: bytes) -> str:
    """Read the identity of a .sif file, by which copies of it are known; "" for another file."""
    if header[_SIF_LAUNCH : _SIF_LAUNCH + len(_SIF_MAGIC)] != _SIF_MAGIC or len(header) < SIF_HEADER:
        return ""
    return f"sif:{header[_SIF_ID].hex()}"


def _object(text: str) -> Dict[str, object]:
    try:
        return _dict(json.loads(text))
    except (ValueError, RecursionError):
        return {}


def _dict(value: object) -> Dict[str, object]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> List[object]:
    return value if isinstance(value, list) else []
