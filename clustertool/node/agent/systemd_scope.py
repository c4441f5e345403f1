"""Where logind would end the supervisor with the session, it is started in a scope of the user's own manager.

systemd-run becomes the program that it starts, so this is a new Python. It gets the directory of the node's code, the
spec and the secrets from a file in memory.
"""

from __future__ import annotations

import marshal
import os
import select
import sys
from typing import TYPE_CHECKING, Any, NoReturn, Optional, cast

import clustertool
from clustertool.node.storage import files
from clustertool.node.system import logind, processes

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec

BEGAN = b"!"  # the new Python's first byte: systemd-run has done its part
_PATIENCE = 5.0  # seconds for it
_CODE = """\
import marshal, sys
sys.path[:] = [entry for entry in sys.path if entry]
with open(0, "rb", closefd=False) as file:
    place, arguments = marshal.load(file)
sys.path.insert(0, place)
from clustertool.node.agent import launch
launch.resume(*arguments)
"""


def start(spec: Spec, job: int, umask: int, errors: str) -> Optional[int]:
    """Returns the descriptor from which the supervisor's report is read, after BEGAN. None: it is started as usual.

    `errors`: the file of the job for the stderr of systemd-run.
    """
    state, tool = logind.logout(), logind.program("systemd-run")
    if not (state.kills and state.lingers and tool and sys.executable and hasattr(os, "memfd_create")):
        return None
    ours, theirs = os.pipe()
    sent = os.memfd_create("clustertool")
    place = os.path.dirname(os.path.dirname(os.path.abspath(clustertool.__file__)))
    with open(sent, "wb", closefd=False) as file:
        marshal.dump((place, (cast(Any, spec), job, theirs, umask, dict(os.environ))), file)
    os.lseek(sent, 0, os.SEEK_SET)
    pid = os.fork()
    if pid == 0:
        _become(tool, sent, errors, job, theirs)
    os.close(theirs)
    os.close(sent)
    if select.select([ours], [], [], _PATIENCE)[0] and os.read(ours, 1) == BEGAN:
        return ours
    processes.reap(pid, 0.0)
    os.close(ours)
    return None


def _become(tool: str, sent: int, errors: str, job: int, ready: int) -> NoReturn:
    """In the child. XDG_RUNTIME_DIR is where the user's manager is reached; not every kind of session has it."""
    try:
        null, log = os.open(os.devnull, os.O_WRONLY), files.open_append(job, errors)
        processes.detach(job, ready, stdio=(sent, null, log))
        os.set_inheritable(job, True)
        os.set_inheritable(ready, True)
        environ = {"XDG_RUNTIME_DIR": f"/run/user/{os.getuid()}", **os.environ}
        os.execve(
            tool, [tool, "--user", "--scope", sys.executable, "-ESs", "-c", _CODE, "clustertool-supervisor"], environ
        )
    finally:
        processes.leave(127)
