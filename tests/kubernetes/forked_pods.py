"""First processes of pods that start as forks of a process that has imported the code of the bundle (see tests/forked.py).

A Python that starts with a bundle takes 0.25 s of CPU, of which the imports are the largest part. The forked process is in the
namespaces, the root folder and the user of its pod, and runs the `__main__` of its bundle; /proc shows its environment and
command line as for a new process, and modules that are not imported yet come from the bundle.
"""

from __future__ import annotations

import ctypes
import importlib
import os
import pkgutil
import runpy
import signal
import socket
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from tests import forked

BUNDLE = "/etc/clustertool/bundle.pyz"
CLONE_NEWUTS, CLONE_NEWPID = 0x04000000, 0x20000000
MS_BIND, MS_REC, MS_PRIVATE = 0x1000, 0x4000, 0x40000
PR_SET_DUMPABLE = 4
PR_SET_NAME = 15
_LIBC = ctypes.CDLL(None, use_errno=True)
_starter: list[forked.Starter] = []


def can_fork(env: Mapping[str, str]) -> bool:
    """Return whether the first process of a pod with these variables is the same as a fork: Python starts by some of them."""
    return forked.can_join() and not any(name.startswith(("LANG", "LC_", "LD_", "PYTHON")) for name in env)


def start(request: Mapping[str, Any], streams: Sequence[int]) -> forked.Forked:
    """Start the first process of a pod, as its parent outside sees it: a process that ends as this one ends.

    request: `machine`, a process whose networks and IPC it shares; `hostname`; `root`; `binds`, pairs of a path and its place;
    `proc`; `uid`; `env`.
    """
    if not _starter:
        python = f"{sys.base_prefix}/bin/python3"
        _starter.append(forked.Starter(program=__file__, python=python, env={"PATH": os.environ["PATH"]}))
    return _starter[0].send(request, streams)


# -- the server


def main() -> NoReturn:
    connection = socket.socket(fileno=int(sys.argv[1]))
    forked.restore_signals()
    for package in ("clustertool.node", "clustertool.model"):
        for module in pkgutil.walk_packages(importlib.import_module(package).__path__, f"{package}."):
            if not module.name.startswith("clustertool.node.probe."):  # some are programs
                importlib.import_module(module.name)
    request, descriptors = forked.serve(connection)
    _LIBC.prctl(forked.PR_SET_PDEATHSIG, signal.SIGKILL)
    os.setsid()
    for number, descriptor in enumerate(descriptors):
        os.dup2(descriptor, number)
    for kind in ("ipc", "net"):
        with open(f"/proc/{request['machine']}/ns/{kind}") as namespace:
            _check(_LIBC.setns(namespace.fileno(), 0))
    _check(_LIBC.unshare(forked.CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWPID))
    os.closerange(3, 1 << 10)
    pid = os.fork()
    if pid:
        forked.end_as(pid)
    _LIBC.prctl(PR_SET_NAME, b"sh")  # it is no container's process yet
    _enter(request)
    _become(request)
    forked.run_to_end(lambda: runpy.run_path(BUNDLE, run_name="__main__"))


def _enter(request: Mapping[str, Any]) -> None:
    """Mount what the container has, and enter its root folder as its user."""
    root = request["root"]
    _mount("none", "/", MS_REC | MS_PRIVATE)
    socket.sethostname(request["hostname"])
    for source, place in ((root, root), *request["binds"]):
        _mount(source, place, MS_BIND)
    _mount("proc", f"{root}/proc", 0, b"proc")
    os.chroot(root)
    os.chdir("/")
    forked.show(_LIBC, ["python3", BUNDLE, "join"], request["env"])
    os.setgroups([])
    os.setgid(request["uid"])
    os.setuid(request["uid"])
    _LIBC.prctl(PR_SET_DUMPABLE, 1)  # a change of the user ends it; a new program has it
    _LIBC.prctl(forked.PR_SET_PDEATHSIG, signal.SIGKILL)


def _become(request: Mapping[str, Any]) -> None:
    """Give this process the state of a Python that has started with the bundle."""
    os.environ.clear()
    os.environ.update({**request["env"], "LC_CTYPE": "C.UTF-8"})  # Python adds this where no variable names a locale
    sys.argv[:] = [BUNDLE, "join"]
    sys.path[:] = [path for path in sys.path if Path(path) not in (forked.REPO, Path(__file__).parent)]
    here = str(forked.REPO)
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == "clustertool":
            module.__file__ = str(module.__file__).replace(here, BUNDLE, 1)
            if hasattr(module, "__path__"):
                module.__path__ = [path.replace(here, BUNDLE, 1) for path in module.__path__]
    forked.open_streams()
    _LIBC.prctl(PR_SET_NAME, b"python3")


def _mount(source: str, place: str, flags: int, kind: bytes | None = None) -> None:
    _check(_LIBC.mount(source.encode(), place.encode(), kind, ctypes.c_ulong(flags), None), place)


def _check(code: int, place: str = "") -> None:
    if code:
        raise OSError(ctypes.get_errno(), "the namespaces of a pod", place)


if __name__ == "__main__":
    main()
