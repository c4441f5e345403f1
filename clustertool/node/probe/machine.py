"""This module collects facts of a machine that a plan does not need: space, limits, name, load. It reads a few small files."""

from __future__ import annotations

import contextlib
import os
import resource
import socket
from threading import Thread
from typing import TYPE_CHECKING, List, Optional

from clustertool.node.system import machine_load

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import ProbeAnswer

_LIMITS = {"nofile": resource.RLIMIT_NOFILE, "nproc": resource.RLIMIT_NPROC, "memlock": resource.RLIMIT_MEMLOCK}
_PROXIES = ("http_proxy", "https_proxy", "all_proxy")


def condition(existing: str, nic: str) -> ProbeAnswer:
    """`existing`: the deepest directory of ROOT_DIR that is there. -> fields of plan.facts.Facts."""
    space = os.statvfs(existing)
    return {
        "memory": machine_load.memory(),
        "load": os.getloadavg()[0],
        "disk_free": space.f_bavail * space.f_frsize,
        "inodes": space.f_favail if space.f_files else -1,  # btrfs and the like have no number of them
        "shm": _shm(),
        "limits": [(name, *resource.getrlimit(number)) for name, number in _LIMITS.items()],
        "proxies": proxies(),
        "mtu": _mtu(nic),
        "rdma": os.path.isdir("/sys/class/infiniband") and bool(os.listdir("/sys/class/infiniband")),
        "own": own_name(socket.gethostname()),
    }


def proxies() -> List[str]:
    """Names of the proxies that are set in this environment; never their values, which may contain passwords."""
    return sorted(name for name in os.environ if name.lower() in _PROXIES)


def own_name(name: str, hosts: str = "/etc/hosts") -> str:
    """The IPv4 address that /etc/hosts gives a machine's own name, "" if none: no name server is asked."""
    with contextlib.suppress(OSError):
        with open(hosts, encoding="utf-8", errors="replace") as file:
            for line in file:
                fields = line.partition("#")[0].split()
                if name in fields[1:] and ":" not in fields[0]:
                    return fields[0]
    return ""


def _shm() -> int:
    """Bytes free in /dev/shm, -1 if there is none."""
    with contextlib.suppress(OSError):
        space = os.statvfs("/dev/shm")
        return int(space.f_bavail * space.f_frsize)
    return -1


def _mtu(nic: str) -> int:
    with contextlib.suppress(OSError, ValueError):
        with open(f"/sys/class/net/{os.path.basename(nic)}/mtu", encoding="utf-8") as file:
            return int(file.read())
    return 0


def resolved(name: str, seconds: float = 1.0) -> Optional[str]:
    """The name service's answer for a name: "" if the name does not exist, None if it does not answer in time."""
    found: List[str] = []

    def ask() -> None:
        try:
            found.append(str(socket.getaddrinfo(name, None, socket.AF_UNSPEC, socket.SOCK_STREAM)[0][4][0]))
        except (OSError, UnicodeError):
            found.append("")

    thread = Thread(target=ask, daemon=True)
    thread.start()
    thread.join(seconds)
    return found[0] if found else None
