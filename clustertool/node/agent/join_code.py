"""The code of a process that joins a job: that of an agent, and the modules that make plans, which other nodes do not need.

The laptop sends these modules to a node that does not have them. They lie with a copy of the agent's own code in a directory of
~/.cache/clustertool, as the agent's code does, and the process is a new Python that imports from there.
"""

from __future__ import annotations

import base64
import contextlib
import os
import sys
import zlib
from typing import TYPE_CHECKING, Dict, NoReturn, Sequence

import clustertool
from clustertool.errors import PreflightError
from clustertool.node.agent.install import install
from clustertool.node.system import users

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Answer
    from clustertool.model.wire.agent_requests import JoinCodeRequest
    from clustertool.node.agent.loop import Agent

_CODE = """\
import sys
sys.path[:] = [entry for entry in sys.path if entry]
sys.path.append(sys.argv[1])
from clustertool.node.join.main import start_detached
start_detached(*map(int, sys.argv[2:]))"""
_FIX = "run it again"


def place_of(agent: Agent, digest: str) -> str:
    """Find the directory of the code with this digest, "" if it is not there."""
    place = _place(digest)
    if not agent.start.complete(place):
        return ""
    with contextlib.suppress(OSError):
        os.utime(place)  # it is in use
    return place


def receive(agent: Agent, request: JoinCodeRequest) -> Answer:
    """Keep the code of a process that joins. Raises PreflightError."""
    try:
        parts = zlib.decompress(base64.b64decode(request["data"])).decode().split("\0")
    except (ValueError, zlib.error):
        raise PreflightError("the code of an elastic job arrived damaged", _FIX) from None
    files = {**_own(), **dict(zip(parts[::2], parts[1::2]))}
    data = "\0".join(text for name in sorted(files) for text in (name, files[name])).encode()
    wanted = _place(request["digest"])
    try:
        place, end = install(data, request["digest"], wanted, agent.start.safe, agent.start.complete)
    except (OSError, ValueError) as error:
        raise PreflightError(f"the code of an elastic job cannot be installed: {error}", _FIX) from None
    if place != wanted:
        end()
        what = f"{os.path.dirname(wanted)} cannot be written, and the code of an elastic job is kept there"
        raise PreflightError(what, "let this user write to ~/.cache, and no other one")
    return {}


def become(report: int, place: str, join: int, umask: int, kept: Sequence[int]) -> NoReturn:
    """Become a new Python that joins a job, in a detached process.

    join: a descriptor of the join file. kept: others that it has.
    """
    for descriptor in (report, join, *kept):
        os.set_inheritable(descriptor, True)
    numbers = map(str, (report, join, umask, *kept))
    os.execv(sys.executable, [sys.executable, "-ESs", "-c", _CODE, place, *numbers])


def _place(digest: str) -> str:
    tag = f"{sys.implementation.cache_tag}-{sys.hexversion:x}"
    return os.path.join(users.home() or "/", ".cache", "clustertool", f"{digest}.{tag}")


def _own() -> Dict[str, str]:
    """Name and text of each module of the agent's own code."""
    top = os.path.dirname(os.path.abspath(clustertool.__file__))
    found: Dict[str, str] = {}
    for folder, _, names in os.walk(top):
        for name in names:
            if name.endswith(".py"):
                path = os.path.join(folder, name)
                with open(path, encoding="utf-8") as file:
                    found[os.path.relpath(path, os.path.dirname(top))] = file.read()
    return found
