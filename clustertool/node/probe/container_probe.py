"""The probe of a node's container runtime reads which one can be used, a job's image there, and how GPUs get in.

It runs the client of the runtime, and pulls nothing. It is a request of its own, since most jobs have no container, and its
modules take 3 % of the CPU time of a `check`.
"""

from __future__ import annotations

import contextlib
import glob
import os
from typing import TYPE_CHECKING, Dict, List, Tuple

from clustertool.model.container import container_runtimes
from clustertool.model.container.container_runtimes import APPTAINER, CDI, HOOK, PODMAN, Image, Runtime
from clustertool.node.system import processes, programs, users
from clustertool.node.system.node_context import NodeContext

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import ContainerAnswer
    from clustertool.model.wire.agent_requests import ContainerWanted

LIMIT = 20.0  # seconds: the first command of rootless podman after a boot takes some
_FOLDERS = ("/usr/local/bin", "/usr/bin", "/snap/bin")  # besides PATH
_NAMES: Dict[str, Tuple[str, ...]] = {APPTAINER: (APPTAINER, "singularity")}
_SPECIFICATIONS = ("/etc/cdi", "/var/run/cdi")
_HOOKS = ("nvidia-container-runtime-hook", "nvidia-container-toolkit")


def read_runtime(node: NodeContext, wanted: ContainerWanted) -> ContainerAnswer:
    """Describe the first runtime that can be used, with the image there, missing volumes, and how GPUs get in.

    If none can be used, `problem` and `fix` have the reasons.
    """
    names = container_runtimes.candidates(wanted["runtime"], wanted["image"], wanted["options"])
    problems: List[Tuple[str, str]] = []
    for name in names:
        program = _program(name)
        found = _runtime(name, program) if program else Runtime("")
        if found.version:
            break
        if program:
            problems.append((found.problem, found.fix))
    answer: ContainerAnswer = {
        "runtime": name if found.version else "",
        "program": program,
        "version": found.version,
        "rootless": found.rootless,
        "cgroup": found.cgroup or ("v2" if os.path.exists("/sys/fs/cgroup/cgroup.controllers") else "v1"),
        "problem": "; ".join(what for what, _ in problems) or f"no {' or '.join(names)}",
        "fix": problems[0][1] if problems else f"install {names[0]} there, or name another `runtime`",
        "image_id": "",
        "digest": "",
        "size": -1,
        "store": found.store,
        "store_free": -1,
        "gpu": _gpu_access(found) if wanted["gpu"] else "",
        "process_limit": found.process_limit,
        "uid": os.getuid(),
        "groups": list(dict.fromkeys((os.getgid(), *os.getgroups()))),
        "missing": [source for source in wanted["volumes"] if _is_missing(source)],
    }
    if found.version:
        answer["problem"] = answer["fix"] = ""
        image = _image(name, program, wanted["image"])
        answer.update(image._asdict())
        answer["store_free"] = _free_bytes(found.store or users.home() or "/")
    return answer


def _program(runtime: str) -> str:
    """Find the absolute path of a runtime's client, "" if there is none."""
    found = (programs.find(name, *_FOLDERS) for name in _NAMES.get(runtime, (runtime,)))
    path = next(filter(None, found), "")
    return os.path.abspath(path) if path else ""


def _runtime(name: str, program: str) -> Runtime:
    """Describe a runtime by its own report; without a version, but with a problem, if the node lacks what it needs."""
    user = users.name_of(os.getuid())
    code, out, err = programs.output([program, *container_runtimes.info_arguments(name)], LIMIT, cwd="/")
    found = container_runtimes.read_info(name, code, out, err, user)
    if found.version and name == PODMAN and not os.path.isdir("/dev/mqueue"):
        fix = "as root: mkdir /dev/mqueue && mount -t mqueue mqueue /dev/mqueue"
        return Runtime("", problem="there is no /dev/mqueue, which --ipc=host needs", fix=fix)
    if found.version and name == APPTAINER and not _may_start_apptainer(program):
        what = "apptainer cannot be used: user namespaces are off, and it is not installed with setuid"
        fix = "as root: sysctl user.max_user_namespaces=65536, or install apptainer-suid"
        return Runtime("", problem=what, fix=fix)
    return found


def _may_start_apptainer(program: str) -> bool:
    """Check whether apptainer can start a container: it needs root, its setuid program, or user namespaces."""
    top = os.path.dirname(os.path.dirname(os.path.realpath(program)))
    starters = glob.glob(f"{top}/libexec/*/bin/starter-suid")
    if os.getuid() == 0 or any(os.stat(path).st_mode & 0o4000 for path in starters):
        return True
    return not any(map(_is_zero, ("user/max_user_namespaces", "kernel/unprivileged_userns_clone")))


def _is_zero(setting: str) -> bool:
    """Check whether a setting of the kernel is 0. One that cannot be read is not."""
    return processes.try_read(f"/proc/sys/{setting}").strip() == b"0"


def _image(runtime: str, program: str, reference: str) -> Image:
    """Return id, digest and size of an image as the node has it; the id is "" where it has none.

    Asks `program`, the runtime's client; for Apptainer it reads the .sif file at the path `reference`, which is the id then.
    """
    if runtime != APPTAINER:
        code, out, _ = programs.output([program, "image", "inspect", reference], LIMIT, cwd="/")
        return container_runtimes.read_image(out if code == 0 else "", reference)
    with contextlib.suppress(OSError), open(reference, "rb") as file:
        digest = container_runtimes.sif_digest(file.read(container_runtimes.SIF_HEADER))
        return Image(reference, digest, os.fstat(file.fileno()).st_size)
    return Image("", "", -1)


def _is_missing(path: str) -> bool:
    """Return whether there is nothing at a path. What this user cannot reach may be there for a daemon."""
    try:
        os.stat(path)
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        pass
    return False


def _free_bytes(path: str) -> int:
    """Return the free bytes of a folder, or of the nearest one above it that this user can reach; -1 if none or / is left."""
    while path != os.path.dirname(path):
        with contextlib.suppress(OSError):
            space = os.statvfs(path)
            return int(space.f_bavail * space.f_frsize)
        path = os.path.dirname(path)
    return -1


def _gpu_access(found: Runtime) -> str:
    """Determine how NVIDIA's GPUs get into a container here: CDI, HOOK, or "" if they do not."""
    specifications = [path for folder in _SPECIFICATIONS for path in glob.glob(f"{folder}/*")]
    if any(b"nvidia.com/gpu" in processes.try_read(path, 1 << 16) for path in specifications):
        return CDI
    return HOOK if found.nvidia or any(programs.find(name, *_FOLDERS) for name in _HOOKS) else ""
