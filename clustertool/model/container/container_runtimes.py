"""This module names container runtimes, reads what they print about themselves and images, and has their commands for images.

It is apart from the settings: a node imports no dataclass for a name. Pure: text in, values and command lines out. An image
travels as a folder of files: COPY_DIR has the manifest, the configuration and the layers as podman's transport `dir:` writes
them, compressed; COPY_ARCHIVE has the files of a tar archive as `docker save` writes it; COPY_FILE has one .sif file.
"""

import json
import re
from typing import Dict, List, Mapping, NamedTuple, Sequence, Tuple

AUTO = "auto"
DOCKER, PODMAN, APPTAINER = "docker", "podman", "apptainer"
RUNTIMES = (AUTO, DOCKER, PODMAN, APPTAINER)
MISSING, ALWAYS, NEVER = "missing", "always", "never"
PULLS = (MISSING, ALWAYS, NEVER)
LAPTOP, FIRST, REGISTRY = "laptop", "first", "registry"
IMAGE_SOURCES = (LAPTOP, FIRST, REGISTRY)  # IMAGE_FROM
_OF_APPTAINER = ("/", "docker://", "docker-archive://", "library://", "oras://", "shub://", "oci://", "oci-archive://")


def only_for_apptainer(image: str) -> bool:
    """Check whether an image is named by the path of a .sif file, or an address as only apptainer has it."""
    return image.startswith(_OF_APPTAINER)


# How NVIDIA's GPUs get into a container: a specification of CDI, or the hook of NVIDIA's runtime.
CDI, HOOK = "cdi", "hook"
_SIF_MAGIC = b"SIF_MAGIC\0"
_SIF_LAUNCH, _SIF_ID = 32, slice(48, 64)  # bytes of a .sif file: the length of the first field, and the place of its id
SIF_HEADER = 128


class Runtime(NamedTuple):
    """What a container runtime states about itself. cgroup: "v1" or "v2".

    version: "" if it cannot be used; then `problem` and `fix` state why.
    """

    version: str
    rootless: bool = False
    cgroup: str = ""
    store: str = ""
    nvidia: bool = False  # docker knows NVIDIA's runtime
    process_limit: bool = False  # it limits the processes of a container by default
    problem: str = ""
    fix: str = ""


class Image(NamedTuple):
    """An image in a store. image_id: without the name of its hash, "" for no image.

    digest: of the registry's manifest, else of the image.
    """

    image_id: str
    digest: str
    size: int  # bytes


def candidates(runtime: str, image: str, options: bool) -> Tuple[str, ...]:
    """List the runtimes to try, in order: the named one; for AUTO apptainer, if only it knows images of this form, else all.

    options: the user has set options, which are those of docker and podman: AUTO then leaves apptainer out for other images.
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
    """Parse a runtime's answer to info_arguments(). One that cannot be used has no version, but a problem and a fix.

    code: its exit code, -1: not in time. user: for the fix.
    """
    if code == -1:
        return Runtime("", problem=f"{runtime} does not answer", fix=f"try there by hand: {runtime} info")
    found = _object(out)
    if runtime == APPTAINER:
        version = re.search(r"[0-9]+\.[0-9][\w.+-]*", out)
        return Runtime(version[0]) if code == 0 and version else _unusable(runtime, err, user)
    if runtime == PODMAN:
        return _read_podman(found, user) if code == 0 and found else _unusable(runtime, err, user)
    if "host" in found:
        return Runtime("", problem="docker is podman here", fix='runtime = "podman"')
    if not found.get("ServerVersion"):
        return _unusable(runtime, err or " ".join(map(str, _list(found.get("ServerErrors")))), user)
    options = [str(option) for option in _list(found.get("SecurityOptions"))]
    return Runtime(
        str(found["ServerVersion"]),
        any("rootless" in option for option in options),
        f"v{found.get('CgroupVersion') or '1'}",
        str(found.get("DockerRootDir", "")),
        "nvidia" in _dict(found.get("Runtimes")),
    )


def _read_podman(found: Mapping[str, object], user: str) -> Runtime:
    """Read podman's answer; a problem if this user has no range of uids."""
    host, store, version = (_dict(found.get(name)) for name in ("host", "store", "version"))
    rootless = _dict(host.get("security")).get("rootless") is True
    ranges = _list(_dict(host.get("idMappings")).get("uidmap"))
    if rootless and len(ranges) < 2:
        fix = f"as root: usermod --add-subuids 100000-165535 --add-subgids 100000-165535 {user}; then podman system migrate"
        return Runtime("", problem=f"{user} has no range of uids in /etc/subuid, which podman needs", fix=fix)
    named, cgroup = version.get("Version") or "?", str(host.get("cgroupVersion", ""))
    # Without root it can set limits only where systemd delegates them.
    controllers = _list(host.get("cgroupControllers"))
    delegated = cgroup == "v2" and host.get("cgroupManager") == "systemd" and "pids" in controllers
    limit = not rootless or delegated
    return Runtime(str(named), rootless, cgroup, str(store.get("graphRoot", "")), process_limit=limit)


def _unusable(runtime: str, err: str, user: str) -> Runtime:
    """Describe a runtime that cannot be used, by the last line of its error, with a fix."""
    last = (err.strip().splitlines() or ["it gave no version"])[-1][-300:]
    fix = f"try there by hand: {runtime} {'version' if runtime == APPTAINER else 'info'}"
    if "permission denied" in last.lower() and runtime == DOCKER:
        fix = f"as root: usermod -aG docker {user}, then log in again; or use podman, which needs no group"
    elif "connect to the docker daemon" in last.lower():
        fix = "as root: systemctl start docker"
    return Runtime("", problem=f"{runtime} cannot be used: {last}", fix=fix)


def read_image(out: str, reference: str) -> Image:
    """Parse what `image inspect` has printed about the image `reference`; the id is "" and the size -1 if it is not JSON.

    The digest is that in `reference` if the image has it; else its own one, the first one of a registry, or its id.
    """
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
    """Parse a JSON object; {} for any other text."""
    try:
        return _dict(json.loads(text))
    except (ValueError, RecursionError):
        return {}


def _dict(value: object) -> Dict[str, object]:
    """Return the value if it is a dict, else {}."""
    return value if isinstance(value, dict) else {}


def _list(value: object) -> List[object]:
    """Return the value if it is a list, else []."""
    return value if isinstance(value, list) else []


COPY_DIR, COPY_ARCHIVE, COPY_FILE = "dir", "archive", "file"
SIF = "image.sif"  # the only file of a COPY_FILE
# Nodes that pull an image at a time, with IMAGE_FROM = "registry": registries limit clients of one address.
PULLS_AT_ONCE = 8


def kind_of_copy(runtimes: Sequence[str]) -> str:
    """Choose the form in which all of these runtimes can load an image: for apptainer a file, else for docker an archive.

    For podman alone it is a folder.
    """
    if APPTAINER in runtimes:
        return COPY_FILE
    return COPY_ARCHIVE if DOCKER in runtimes else COPY_DIR


def is_file(image: str) -> bool:
    """Check whether an image is named by the path of a .sif file."""
    return image.startswith("/")


def pull(program: str, image: str) -> List[str]:
    """Build the command that pulls an image into the store of docker or podman."""
    return [program, "pull", "--quiet", image]


def pull_file(program: str, image: str, file: str) -> List[str]:
    """Build the command of apptainer that pulls an image into a file."""
    return [program, "pull", "--force", file, image]


def save(program: str, kind: str, runtime: str, image: str, folder: str) -> List[str]:
    """Build the command that saves an image: a COPY_DIR to the folder, the archive of a COPY_ARCHIVE to stdout.

    `dir:` keeps the form of the manifest, and so the id. Two copies of an image are the same bytes, so pieces of them are too.
    """
    if kind == COPY_DIR:
        return [program, "push", "--quiet", "--compress", image, f"dir:{folder}"]
    return [program, "save", *(("--format", "docker-archive") if runtime == PODMAN else ()), image]


def load(program: str, kind: str, folder: str) -> List[str]:
    """Build the command that loads an image. A COPY_ARCHIVE is read from stdin."""
    return [program, "pull", "--quiet", f"dir:{folder}"] if kind == COPY_DIR else [program, "load", "--quiet"]


def tag(program: str, id: str, image: str) -> List[str]:
    """Build the command that gives the image with this id a name."""
    return [program, "tag", id, image]


def storage(program: str, runtime: str) -> List[str]:
    """Build the command that prints the folder in which the runtime keeps images."""
    key = "{{.Store.GraphRoot}}" if runtime == PODMAN else "{{.DockerRootDir}}"
    return [program, "info", "--format", key]


def plain_id(text: str) -> str:
    """Remove the name of the hash (sha256:) from an id."""
    return text.strip().rpartition(":")[2]
