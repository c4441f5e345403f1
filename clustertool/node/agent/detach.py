"""Detaching a process from ssh: a fork, or a scope of the user's own manager where logind would end it with the session."""

from __future__ import annotations

import contextlib
import importlib
import marshal
import os
import select
import sys
import time
from typing import Any, Dict, NamedTuple, NoReturn, Optional, Sequence, Tuple, cast

import clustertool
from clustertool.errors import ClustertoolError, InternalError, NodeLost
from clustertool.model.job.outcome import describe_exit
from clustertool.node.system import logind, processes, programs

_BEGAN = b"!"  # the first byte of the Python in a scope: systemd-run has done its part
_SCOPE_PATIENCE = 5.0  # seconds for it
_DEATH, _POLL = 2.0, 0.01  # seconds until a process that has closed its report is dead
_CODE = """\
import marshal, sys
sys.path[:] = [entry for entry in sys.path if entry]
with open(0, "rb", closefd=False) as file:
    place, arguments = marshal.load(file)
sys.path.insert(0, place)
from clustertool.node.agent import detach
detach.resume(*arguments)
"""


class Detached(NamedTuple):
    """A process that was started. report: the descriptor from which its report is read."""

    pid: int
    report: int


def begin(target: str, arguments: Tuple[object, ...], log: int, kept: Sequence[int] = ()) -> Detached:
    """Start a detached process: in a scope of the user's manager where logind ends the session's processes, else by a fork.

    It may outlive this process, or be its zombie for a while. target: `module:function` below clustertool.node. It is called
    with the descriptor of its report and the arguments, which marshal can write. log: becomes its stderr. kept: other
    descriptors that it has. It has no other one of the agent: ssh would wait for it.
    """
    started = _begin_in_scope(target, arguments, log, kept)
    if started is not None:
        return started
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        _become(target, arguments, log, kept, theirs)
    os.close(theirs)
    return Detached(pid, ours)


def death(pid: int, what: str, output: str) -> ClustertoolError:
    """Create the error of a process of begin() that has ended without a report: NodeLost after a signal, else InternalError.

    Waits up to 2 s for its exit status. what: names the process; output: what it has written to stderr.
    """
    with contextlib.suppress(ChildProcessError):
        end = time.monotonic() + _DEATH
        while time.monotonic() < end:
            found, status = os.waitpid(pid, os.WNOHANG)
            if found and os.WIFSIGNALED(status):
                signalled = describe_exit(0, os.WTERMSIG(status))
                return NodeLost(f"{what} was ended by {signalled}", "find what has killed it there, and start again")
            if found:
                break
            time.sleep(_POLL)
    return InternalError(": ".join(filter(None, [f"{what} has died", output])))


def _become(target: str, arguments: Tuple[object, ...], log: int, kept: Sequence[int], report: int) -> NoReturn:
    """Detach this child, call the target in it, and exit when that returns."""
    try:
        null = os.open(os.devnull, os.O_RDWR)
        processes.detach(*kept, report, stdio=(null, null, log))
        _call(target, report, arguments)
    finally:
        processes.leave(0)


def _call(target: str, report: int, arguments: Tuple[object, ...]) -> None:
    """Import the target, and call it with the descriptor of its report and the arguments."""
    module, _, name = target.partition(":")
    getattr(importlib.import_module(f"clustertool.node.{module}"), name)(report, *arguments)


def _begin_in_scope(target: str, arguments: Tuple[object, ...], log: int, kept: Sequence[int]) -> Optional[Detached]:
    """Start the program in a scope of systemd; None if logind ends no processes of the session, or that fails.

    systemd-run becomes the program that it starts, so this is a new Python. It gets the directory of the node's code and the
    arguments, which may have secrets, from a file in memory, and sends _BEGAN before the report, within 5 s.
    """
    state, tool = logind.predict_logout(), programs.find("systemd-run")
    if not (state.kills and state.lingers and tool and sys.executable and hasattr(os, "memfd_create")):
        return None
    ours, theirs = os.pipe()
    sent = os.memfd_create("clustertool")
    place = os.path.dirname(os.path.dirname(os.path.abspath(clustertool.__file__)))
    with open(sent, "wb", closefd=False) as file:
        marshal.dump((place, (target, cast(Any, arguments), log, list(kept), theirs, dict(os.environ))), file)
    os.lseek(sent, 0, os.SEEK_SET)
    pid = os.fork()
    if pid == 0:
        _become_scope(tool, sent, log, (*kept, theirs))
    os.close(theirs)
    os.close(sent)
    if select.select([ours], [], [], _SCOPE_PATIENCE)[0] and os.read(ours, 1) == _BEGAN:
        return Detached(pid, ours)
    processes.reap(pid, 0.0)
    os.close(ours)
    return None


def _become_scope(tool: str, sent: int, log: int, kept: Sequence[int]) -> NoReturn:
    """Detach this child, and replace it by systemd-run, which becomes a new Python in a scope.

    XDG_RUNTIME_DIR is where the user's manager is reached; not every kind of session has it.
    """
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        processes.detach(*kept, stdio=(sent, null, log))
        for descriptor in kept:
            os.set_inheritable(descriptor, True)
        environ = {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}", **os.environ}
        argv = [tool, "--user", "--scope", sys.executable, "-ESs", "-c", _CODE, "clustertool-supervisor"]
        os.execve(tool, argv, environ)
    finally:
        processes.leave(127)


def resume(
    target: str, arguments: Sequence[object], log: int, kept: Sequence[int], report: int, environ: Dict[str, str]
) -> NoReturn:
    """Send _BEGAN to the agent, restore the environment, and call the target, in the new Python of a scope; then exit.

    log: the number of the descriptor before, now 2.
    """
    os.write(report, _BEGAN)
    for descriptor in (*kept, report):
        os.set_inheritable(descriptor, False)
    os.environ.clear()  # systemd-run adds to it
    os.environ.update(environ)
    _become(target, tuple(arguments), 2, kept, report)
