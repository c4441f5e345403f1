"""The probe reads the facts of a node that a plan needs. It writes nothing and takes milliseconds."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
import sys
import time
from typing import TYPE_CHECKING, List, Mapping, Sequence, Tuple

from clustertool.model import cards, paths
from clustertool.model.launcher_variables import cpus_of_task
from clustertool.node.devices import detect, locks
from clustertool.node.ports import claims, listeners, reservations
from clustertool.node.probe import job_environment
from clustertool.node.probe.network_addresses import interfaces, nic_of
from clustertool.node.storage import files
from clustertool.node.system import mounts, path_trust, pressure, private_directory, processes, programs, users
from clustertool.node.system.node_context import NodeContext, step

if TYPE_CHECKING:
    from clustertool.model.facts import Problem
    from clustertool.model.wire.agent_answers import ProbeAnswer
    from clustertool.model.wire.agent_requests import ProbeRequest


def probe(node: NodeContext, request: ProbeRequest) -> ProbeAnswer:
    """Collect the fields of model.facts.Facts that each command reads, with the problems of the node.

    By its fields, the request adds the job's Python, the folder of --job-workspace, mpirun, and what an engine allocates.
    """
    began = time.monotonic()
    problems: List[Problem] = []
    root = files.resolve(request["root_dir"])
    existing = _nearest_folder(root)
    _check_root(root, existing, problems)
    address, nic = _choose_address(request, problems)
    _find_foreign(address, problems)
    busy = {listener.port for listener in listeners.listeners()}
    claimed, reserved = claims.claimed_ports(), reservations.reserved_ports()
    asked = set(request["ports"])
    users_of = {port: reservations.holder(port, uids) for port, uids in reserved.items() if port in asked}
    users_of.update((port, f"job {job}") for port, job in claimed.items() if port in asked)
    if asked & busy:  # finding the process costs a walk over all processes
        users_of.update(listeners.holders(asked & busy))
    tmp, fix = private_directory.trouble()
    if tmp:  # claims that have a file can still be written where /tmp is full
        problems.append(("tmp", "warn" if os.access(private_directory.find(), os.W_OK) else "error", tmp, fix))
    kind, devices = detect.detect_cards()
    allocated = cards.allocated_names(kind, os.environ) if request.get("engine") else None
    if request.get("engine") == "kubernetes" and not allocated:
        allocated = None  # without the variable: a pod has the device files of its own devices only
    if allocated is not None:
        devices = list(range(len(allocated)))
    keys = detect.keys(kind, devices) if devices and allocated is None else {}
    shared = mounts.network_mounts()
    answer: ProbeAnswer = {
        "hostname": socket.gethostname(),
        "address": address,
        "nic": nic,
        "boot_id": processes.boot_id(),
        "netns": os.readlink("/proc/self/ns/net"),
        "root": root,
        "root_id": _directory_id(existing, root, shared),
        "root_hint": _hint_of(existing, root),
        "home": users.home() or "/",
        "user": users.name_of(os.getuid()),
        "python": sys.version.split()[0],
        "rsync": bool(programs.find("rsync")),
        "cpus": _cpus(request.get("engine", "")),
        "devices": devices,
        "device_kind": kind,
        "device_keys": list(keys.values()),
        "device_models": detect.models(len(devices)) if kind == "gpu" and allocated is None else [],
        "devices_seen": True,
        "modules": detect.sent("nvml") if kind == "gpu" else [],
        "locked": _list_locked(keys),
        "ephemeral": listeners.ephemeral(),
        "busy": sorted(busy | set(claimed) | set(reserved)),
        "listeners": sorted(users_of.items()),
        "problems": problems,
        "releases": _releases(root),
    }
    if "job_path" in request:
        inherited = os.environ.get("PATH", os.defpath)
        folders = ":".join(path or inherited for path in request["job_path"]).split(":")
        answer["job_python"] = programs.python3(folders)
    if allocated is not None:
        answer["allocated"] = allocated
    answer.update(_read_condition(existing, nic))
    if request.get("job_workspace"):
        answer.update(_workspace(request["job_workspace"], request.get("listing", True), problems))
    if request.get("mpi"):
        answer.update(job_environment.read_mpi(request["mpi"]))
    return timed(answer, began)


def timed(answer: ProbeAnswer, began: float) -> ProbeAnswer:
    """Set `time` to now and `took` to the seconds since `began` in an answer, and return it."""
    answer["time"], answer["took"] = time.time(), time.monotonic() - began
    return answer


def _cpus(engine: str) -> int:
    """Count the CPUs that this process may use; under an engine at most those of its task, which the engine may not enforce."""
    usable = len(os.sched_getaffinity(0))
    return min(usable, cpus_of_task(os.environ) or usable) if engine else usable


def _nearest_folder(path: str) -> str:
    """Return the path, or the nearest folder above it that exists; "" for a relative path without one."""
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return path


def _check_root(root: str, existing: str, problems: List[Problem]) -> None:
    """Add a problem if ROOT_DIR is unsafe, or cannot be written, and a warning if no program there can be executed.

    existing: the deepest directory of it that is there.
    """
    fix = "choose a ROOT_DIR in conf.py that you can write to"
    wrong = path_trust.unsafe(root)
    if wrong:
        problems.append(("root", "error", f"ROOT_DIR: {wrong.what}", wrong.fix))
    elif not os.access(existing, os.W_OK | os.X_OK) or os.statvfs(existing).f_flag & os.ST_RDONLY:
        problems.append(("root", "error", f"ROOT_DIR {root} is not writable for {users.name_of(os.getuid())}", fix))
    elif os.statvfs(existing).f_flag & os.ST_NOEXEC:
        what = f"ROOT_DIR {root} is on a file system that is mounted noexec: no program of a workspace can be started itself"
        problems.append(("root", "warn", what, "start it by its interpreter (bash x.sh), or mount it without noexec"))


def _releases(root: str) -> List[str]:
    """List the releases in ROOT_DIR whose manifests are complete, sorted; [] if they cannot be read."""
    try:
        with os.scandir(paths.releases(root)) as entries:
            files_ = [entry for entry in entries if "." not in entry.name and entry.is_file(follow_symlinks=False)]
            return sorted(entry.name for entry in files_ if _has_end(entry.path))
    except OSError:
        return []


def _has_end(path: str) -> bool:
    """Check that a manifest is neither empty nor torn, as a crash of the machine may leave it.

    fleet/agent_client.py does the same in a shell.
    """
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(paths.MANIFEST_END)))
        return file.read() == paths.MANIFEST_END


def _directory_id(existing: str, root: str, shared: Mapping[str, str]) -> str:
    """Identify a directory, which need not exist: nodes that see the same one have the same id.

    On one machine it is device and inode, on NFS server and export. existing: see _check_root(). shared: {device: NFS source}.
    """
    info = os.stat(existing)
    rest = os.path.relpath(root, existing)
    source = shared.get(mounts.device_name(info.st_dev))
    if source:
        return f"{source}/{info.st_ino}/{rest}"
    return f"{processes.boot_id()}/{info.st_dev}/{info.st_ino}/{rest}"


def _hint_of(existing: str, root: str) -> str:
    """Build a text that differs where the directories differ; where it is the same, nothing is proven. See _directory_id()."""
    return f"{os.stat(existing).st_ino}/{os.path.relpath(root, existing)}"


# -- space, limits, name, load ---------------------------------------------------------------------------------------

_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}


def _read_condition(existing: str, nic: str) -> ProbeAnswer:
    """Read memory, load, disk, limits, MTU and other facts that a plan does not need.

    existing: the deepest directory of ROOT_DIR that is there.
    """
    space = os.statvfs(existing)
    return {
        "memory": pressure.memory(),
        "load": os.getloadavg()[0],
        "disk_free": space.f_bavail * space.f_frsize,
        "inodes": space.f_favail if space.f_files else -1,  # btrfs and the like have no number of them
        "shm": pressure.free_bytes("/dev/shm"),
        "limits": [(name, *resource.getrlimit(number)) for name, number in _LIMITS.items()],
        "mtu": _mtu(nic),
        "rdma": os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband")),
        "own": own_name(socket.gethostname()),
    }


def own_name(name: str, hosts: str = "/etc/hosts") -> str:
    """Read the IPv4 address that /etc/hosts gives a machine's own name, "" if none: no name server is asked."""
    with contextlib.suppress(OSError), open(hosts, encoding="utf-8", errors="replace") as file:
        for line in file:
            fields = line.partition("#")[0].split()
            if name in fields[1:] and ":" not in fields[0]:
                return fields[0]
    return ""


def _mtu(nic: str) -> int:
    """Read the MTU of an interface, 0 if it is not known."""
    text = processes.try_read(f"/sys/class/net/{os.path.basename(nic)}/mtu").strip()
    return int(text) if text.isdigit() else 0


# -- address ------------------------------------------------------------------------------------------------------------


def _choose_address(request: ProbeRequest, problems: List[Problem]) -> Tuple[str, str]:
    """Choose the training address and its interface: HOSTS' address, PADDLE_NIC's, the host itself, else where ssh came in.

    The last resort is 127.0.0.1. Of PADDLE_NIC's addresses that of the host counts, else that of ssh, else the first. A problem
    is added for an interface that is not there, or has no address.
    """
    nic, given = request["nic"], request["address"]
    names = interfaces()
    if nic and nic not in names:
        fix = f"this node has {', '.join(sorted(names))}"
        problems.append(("nic", "error", f"there is no interface {nic} (PADDLE_NIC, or `interface` in HOSTS)", fix))
    explicit = request["explicit_address"]
    if explicit:
        return explicit, nic or nic_of(explicit, names)
    if nic in names and names[nic]:
        pairs = names[nic]
        return next((address for address in (given, _address_of_ssh()) if _is_own(address, pairs)), pairs[0][0]), nic
    if nic in names:
        what = f"the interface {nic} (PADDLE_NIC, or `interface` in HOSTS) has no IPv4 address"
        problems.append(("nic", "error", what, "give it one, or choose another"))
    if given:
        return given, nic or nic_of(given, names)
    address = _address_of_ssh() or "127.0.0.1"
    return address, nic or nic_of(address, names)


def _find_foreign(address: str, problems: List[Problem]) -> None:
    """Add a problem where the training address is no name, and none of this machine's: the other nodes may not reach it."""
    literal = ":" in address or address.replace(".", "").isdigit()
    if not literal or listeners.own_address(address):
        return
    own = [f"{name} {pairs[0][0]}" for name, pairs in interfaces().items() if pairs and name != "lo"]
    what = f"{address}, its training address, is on none of its interfaces ({', '.join(own[:4]) or 'it has lo only'})"
    fix = "it is an old address, or one of NAT: set `address` in HOSTS to one of these that the other nodes reach"
    problems.append(("nic", "warn", what, fix))


def _is_own(address: str, pairs: Sequence[Tuple[str, int]]) -> bool:
    """Check whether an address is one of an interface with these addresses; of the loopback network all are.

    An IPv6 address counts only where the interface has no IPv4 address: Paddle cannot use it.
    """
    if (":" in address) != (":" in pairs[0][0]):
        return False
    loopback = address.startswith("127.")
    return any(address == own or (loopback and own.startswith("127.")) for own, _ in pairs)


def _address_of_ssh() -> str:
    """Return the address of this node to which ssh connected, "" if this process was not started over ssh."""
    came = os.environ.get("SSH_CONNECTION", "").split()
    return came[2] if len(came) == 4 else ""


# -- devices and a workspace that is here already ---------------------------------------------------------------------


def _list_locked(keys: Mapping[int, str]) -> List[Tuple[int, str, str]]:
    """List (id, job, user) of the cards that jobs have locked."""
    locked = locks.locked() if keys else {}
    return [(index, locked[key]["job"], locked[key]["user"]) for index, key in keys.items() if key in locked]


_MOST_FILES = 200_000  # model/field_types.py allows 250,000 and 32 MiB
_MOST_BYTES = 24 << 20
_ESCAPED = 12  # bytes of JSON that a character needs at most


def _workspace(path: str, list_it: bool, problems: List[Problem]) -> ProbeAnswer:
    """Read {listing: paths of files in it, sorted, job_toml: its text or ""} of --job-workspace, and add problems.

    {} without such a folder. list_it: list the files also where job.toml has no shards.
    """
    top = os.path.expanduser(path)
    if not os.path.isdir(top):
        what = f"--job-workspace {path} is not there"
        problems.append(("workspace", "error", what, "copy it to every node, or use --workspace"))
        return {}
    wrong = path_trust.unsafe(os.path.abspath(top))
    if wrong:
        problems.append(("workspace", "warn", f"--job-workspace: {wrong.what}", wrong.fix))
    toml = ""
    with contextlib.suppress(OSError), open(os.path.join(top, "job.toml"), encoding="utf-8", errors="replace") as file:
        toml = file.read(1 << 20)
    listing: List[str] = []
    if list_it or "shards" in toml:
        listing, whole = _listing(top, _MOST_FILES, _MOST_BYTES)
        if not whole:
            rest = "shards among the rest are not seen"
            what = f"--job-workspace {path} has over {_MOST_FILES} files or long names: {rest}"
            problems.append(("workspace", "warn", what, "give each node fewer files there"))
    return {"listing": sorted(listing), "job_toml": toml}


def _listing(top: str, most: int, size: int) -> Tuple[List[str], bool]:
    """List at most `most` files of a workspace, relative to `top`, in at most `size` bytes of JSON, and whether they are all.

    Folders that git, Python, the tool or an earlier job has made are left out.
    """
    found: List[str] = []
    for folder, folders, names in os.walk(top):
        skipped = {".git", "__pycache__", paths.OURS, *(("log", "output") if folder == top else ())}
        folders[:] = [name for name in folders if name not in skipped]
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), top)
            size -= (1 if path.isascii() else _ESCAPED) * len(path) + 4
            if len(found) >= most or size < 0:
                return found, False
            found.append(path)
        step()
    return found, True
