"""The laptop's side can be imported where the system lacks what only Linux has, as on macOS."""

from __future__ import annotations

import subprocess
import sys

PROGRAM = """
import importlib, pkgutil, select, signal, socket, os, time
ONLY_LINUX = {
    signal: ["SIGRTMIN", "SIGRTMAX", "sigtimedwait"],
    os: ["listxattr", "sched_getaffinity", "posix_fadvise", "copy_file_range", "pidfd_open", "memfd_create"],
    select: ["epoll"],
    socket: ["AF_NETLINK", "SO_PEERCRED", "TCP_USER_TIMEOUT"],
    time: ["CLOCK_BOOTTIME"],
}
for module, names in ONLY_LINUX.items():
    for name in names:
        vars(module).pop(name, None)
for side in ("verbs", "actions", "engines", "fleet", "watch", "show", "api", "cli"):
    package = importlib.import_module(f"clustertool.{side}")
    for found in pkgutil.walk_packages(package.__path__, f"clustertool.{side}."):
        importlib.import_module(found.name)
"""


def test_the_modules_of_the_laptop_need_no_names_of_linux() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
