"""The probe reads the facts of a node that a plan needs. It writes nothing and takes milliseconds."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import struct
import sys
import time
from typing import TYPE_CHECKING, Dict, List, Mapping, Sequence, Tuple

from clustertool.model import paths
from clustertool.model.dispatch import manifest
from clustertool.node.devices import detect, locks
from clustertool.node.ports import claims, listeners, reservations
from clustertool.node.probe import job_environment, leftovers, machine
from clustertool.node.storage import files
from clustertool.node.system import logind, path_trust, private_directory, processes, users
from clustertool.node.system.node_context import NodeContext
from clustertool.node.system.work_counter import step

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import ProbeAnswer
    from clustertool.model.wire.agent_requests import JobEnvironment, ProbeRequest

_SIOCGIFADDR, _SIOCGIFNETMASK = 0x8915, 0x891B
# File systems that other machines see too; there, a directory is known by server, export and inode.
_NETWORK = "nfs nfs4 cifs smb3 lustre gpfs beegfs beegfs_nodev ceph glusterfs 9p afs".split()
Problem = Tuple[str, str, str, str]  # column of the check, level, what, fix


def probe(node: NodeContext, request: ProbeRequest) -> ProbeAnswer:
    """The fields of model.facts.Facts. `long` asks also for what takes longer, with `job` for job_environment."""
    began = time.monotonic()
    problems: List[Problem] = []
    root = files.resolve(request["root_dir"])
    existing = _existing(root)
    _check_root(root, existing, problems)
    address, nic = _address(request, problems)
    low, high = listeners.ephemeral()
    busy, claimed, reserved = listeners.listening(), claims.claimed(), reservations.reserved()
    asked = set(request["ports"])
    users_of = {port: reservations.holder(port, uids) for port, uids in reserved.items() if port in asked}
    users_of.update((port, f"job {job}") for port, job in claimed.items() if port in asked)
    if asked & busy:  # finding the process costs a walk over all processes
        users_of.update(listeners.holders(asked & busy))
    tmp, fix = private_directory.trouble()
    if tmp:  # claims that have a file can still be written where /tmp is full
        problems.append(("tmp", "warn" if os.access(private_directory.find(), os.W_OK) else "error", tmp, fix))
    kind, devices = detect.found()
    mounts = _network_mounts()
    answer: ProbeAnswer = {
        "hostname": socket.gethostname(),
        "address": address,
        "nic": nic,
        "boot_id": processes.boot_id(),
        "netns": os.readlink("/proc/self/ns/net"),
        "root": root,
        "root_id": _directory_id(existing, root, mounts),
        "root_hint": _hint(existing, root),
        "home": os.path.expanduser("~"),
        "user": users.name_of(os.getuid()),
        "python": sys.version.split()[0],
        "rsync": _program("rsync"),
        "cpus": len(os.sched_getaffinity(0)),
        "devices": devices,
        "device_kind": kind,
        "devices_seen": True,
        "modules": detect.modules() if kind == "gpu" else [],
        "locked": _locked(kind, devices) if devices else [],
        "ephemeral": (low, high),
        "busy": sorted(busy | set(claimed) | set(reserved)),
        "listeners": sorted(users_of.items()),
        "problems": problems,
        "releases": _releases(root),
    }
    answer.update(machine.condition(existing, nic))
    if request.get("job_workspace"):
        answer.update(_workspace(request["job_workspace"], request.get("listing", True), problems))
    if request.get("long"):
        answer.update(_long(root, request["job"], str(answer["own"]), problems))
    answer["time"], answer["took"] = time.time(), time.monotonic() - began
    return answer


def _long(root: str, job: JobEnvironment, own: str, problems: List[Problem]) -> ProbeAnswer:
    versions: ProbeAnswer = {}
    if job:
        versions, wrong = job_environment.read_versions(job)
        problems += wrong
    ends, fix = logind.warning()
    if ends:
        problems.append(("limits", "warn", ends, fix))
    wrong_lock = locks.trouble()
    if wrong_lock:
        fix = "jobs go on without it, by their own lock files; ask that user, or root, to end it or remove the file"
        problems.append(("devices", "warn", f"the lock for taking devices: {wrong_lock}", fix))
    return {
        **versions,
        "leftovers": leftovers.leftovers(root),
        "own": own or machine.resolved(socket.gethostname()),
        "examined": True,
    }


def _existing(path: str) -> str:
    while not os.path.isdir(path) and path != "/":
        path = os.path.dirname(path)
    return path


def _check_root(root: str, existing: str, problems: List[Problem]) -> None:
    fix = "choose a ROOT_DIR in conf.py that you can write to"
    wrong = path_trust.unsafe(root)
    if wrong:
        problems.append(("root", "error", f"ROOT_DIR: {wrong.what}", wrong.fix))
    elif not os.access(existing, os.W_OK | os.X_OK) or os.statvfs(existing).f_flag & os.ST_RDONLY:
        problems.append(("root", "error", f"ROOT_DIR {root} is not writable for {users.name_of(os.getuid())}", fix))


def _program(name: str) -> bool:
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)  # os.get_exec_path() takes longer than all the rest
    return any(os.access(os.path.join(folder, name), os.X_OK) for folder in folders)


def _releases(root: str) -> List[str]:
    try:
        with os.scandir(paths.releases(root)) as entries:
            files_ = [entry for entry in entries if "." not in entry.name and entry.is_file(follow_symlinks=False)]
            return sorted(entry.name for entry in files_ if _has_end(entry.path))
    except OSError:
        return []


def _has_end(path: str) -> bool:
    """False for an empty or torn manifest, as a crash of the machine may leave it.

    fleet/agent_client.py does the same in a shell.
    """
    with open(path, "rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - len(manifest.END)))
        return file.read() == manifest.END


def _directory_id(existing: str, root: str, mounts: Mapping[str, str]) -> str:
    """Two nodes with the same id see the same directory: on one machine device and inode, on NFS server and export."""
    info = os.stat(existing)
    rest = os.path.relpath(root, existing)
    source = mounts.get(f"{os.major(info.st_dev)}:{os.minor(info.st_dev)}")
    if source:
        return f"{source}/{info.st_ino}/{rest}"
    return f"{processes.boot_id()}/{info.st_dev}/{info.st_ino}/{rest}"


def _hint(existing: str, root: str) -> str:
    """Different where the directories are; nothing is proven where it is the same."""
    return f"{os.stat(existing).st_ino}/{os.path.relpath(root, existing)}"


def _network_mounts() -> Dict[str, str]:
    """major:minor -> `fstype source` of file systems that other machines see too."""
    found: Dict[str, str] = {}
    with contextlib.suppress(OSError):
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as file:
            for line in file:
                left, _, right = line.partition(" - ")
                kind, source = right.split()[:2]
                if kind in _NETWORK or kind.startswith("fuse."):
                    found.setdefault(left.split()[2], f"{kind} {source}")
    return found


# -- address ------------------------------------------------------------------------------------------------------------


def _address(request: ProbeRequest, problems: List[Problem]) -> Tuple[str, str]:
    """The training address and its interface: HOSTS' address, PADDLE_NIC's, the host itself, where ssh came in."""
    nic, given = request["nic"], request["address"]
    names = interfaces()
    if nic and nic not in names:
        fix = f"this node has {', '.join(sorted(names))}"
        problems.append(("nic", "error", f"there is no interface {nic} (PADDLE_NIC)", fix))
    explicit = request["explicit_address"]
    if explicit:
        return explicit, nic or nic_of(explicit, names)
    if nic in names and names[nic]:
        return names[nic][0][0], nic
    if nic in names:
        what = f"the interface {nic} (PADDLE_NIC) has no IPv4 address"
        problems.append(("nic", "error", what, "give it one, or choose another"))
    if given:
        return given, nic or nic_of(given, names)
    came = os.environ.get("SSH_CONNECTION", "").split()
    address = came[2] if len(came) == 4 else "127.0.0.1"
    return address, nic or nic_of(address, names)


def interfaces() -> Dict[str, List[Tuple[str, str]]]:
    """Interface -> its (address, netmask) pairs, IPv4 first."""
    found: Dict[str, List[Tuple[str, str]]] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        for _, name in socket.if_nameindex():
            found[name] = []
            request = struct.pack("256s", name.encode()[:15])
            with contextlib.suppress(OSError):
                answers = [fcntl.ioctl(sock.fileno(), code, request) for code in (_SIOCGIFADDR, _SIOCGIFNETMASK)]
                own, mask = (socket.inet_ntoa(answer[20:24]) for answer in answers)
                found[name].append((own, mask))
    with contextlib.suppress(OSError):
        with open("/proc/net/if_inet6", encoding="utf-8") as file:
            for line in file:
                fields = line.split()
                address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(fields[0]))
                found.setdefault(fields[5], []).append((address, str(int(fields[2], 16))))
    return found


def nic_of(address: str, names: Mapping[str, List[Tuple[str, str]]]) -> str:
    """The interface that has an address, or whose network it is in (127.0.0.2 is on lo); "" if none."""
    wanted, bits = _number(address.split("%")[0])
    near = ""
    for name, pairs in names.items():
        for own, mask in pairs:
            number, width = _number(own)
            if width != bits or not bits:
                continue
            if number == wanted:
                return name
            network = (1 << width) - (1 << (width - int(mask))) if mask.isdigit() else _number(mask)[0]
            if network and wanted & network == number & network:
                near = near or name
    return near


def _number(text: str) -> Tuple[int, int]:
    """(value, bits) of an address; (0, 0) of anything else. The ipaddress module costs every node a millisecond to import."""
    for family in (socket.AF_INET, socket.AF_INET6):
        with contextlib.suppress(OSError, ValueError):
            packed = socket.inet_pton(family, text)
            return int.from_bytes(packed, "big"), 8 * len(packed)
    return 0, 0


# -- devices and a workspace that is here already ---------------------------------------------------------------------


def _locked(kind: str, ids: Sequence[int]) -> List[Tuple[int, str, str]]:
    """(id, job, user) of the cards that jobs have locked."""
    locked, keys = locks.locked(), detect.keys(kind, ids)
    return [(index, locked[key]["job"], locked[key]["user"]) for index, key in keys.items() if key in locked]


_MOST_FILES = 200_000  # model/wire/answers.py refuses 250,000 and 32 MiB
_MOST_BYTES = 24 << 20
_ESCAPED = 12  # bytes of JSON that a character needs at most


def _workspace(path: str, list_it: bool, problems: List[Problem]) -> ProbeAnswer:
    """For --job-workspace: the folder's files (relative; if nothing but job.toml could need them, only then) and job.toml."""
    top = os.path.expanduser(path)
    if not os.path.isdir(top):
        what = f"--job-workspace {path} is not there"
        problems.append(("workspace", "error", what, "copy it to every node, or use --workspace"))
        return {}
    wrong = path_trust.unsafe(os.path.abspath(top))
    if wrong:
        problems.append(("workspace", "warn", f"--job-workspace: {wrong.what}", wrong.fix))
    toml = ""
    with contextlib.suppress(OSError):
        with open(os.path.join(top, "job.toml"), encoding="utf-8", errors="replace") as file:
            toml = file.read(1 << 20)
    listing: List[str] = []
    if list_it or "shards" in toml:
        listing, whole = _listing(top, _MOST_FILES, _MOST_BYTES)
        if not whole:
            what = (
                f"--job-workspace {path} has over {_MOST_FILES} files or long names: shards among the rest are not seen"
            )
            problems.append(("workspace", "warn", what, "give each node fewer files there"))
    return {"listing": sorted(listing), "job_toml": toml}


def _listing(top: str, most: int, size: int) -> Tuple[List[str], bool]:
    """At most `most` files of a workspace, relative to `top`, in at most `size` bytes of JSON; and whether these are all."""
    found: List[str] = []
    for folder, folders, names in os.walk(top):
        folders[:] = [name for name in folders if name not in (".git", "__pycache__", "log", "output", paths.OURS)]
        for name in names:
            path = os.path.relpath(os.path.join(folder, name), top)
            size -= (1 if path.isascii() else _ESCAPED) * len(path) + 4
            if len(found) >= most or size < 0:
                return found, False
            found.append(path)
        step()
    return found, True
