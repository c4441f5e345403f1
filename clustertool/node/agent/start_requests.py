"""These requests start a job: place its files, start its supervisor, or take the files back."""

from __future__ import annotations

import contextlib
import os
from typing import TYPE_CHECKING, Any, Dict

from clustertool.errors import NotFound
from clustertool.model.paths import OURS
from clustertool.model.wire.frames import Header
from clustertool.node.agent import launch
from clustertool.node.agent import place as placing
from clustertool.node.jobs import clean

if TYPE_CHECKING:
    from clustertool.node.agent.loop import Agent


def place(agent: Agent, header: Header) -> Dict[str, Any]:
    done = placing.place(header["spec"], str(header["release"]))
    agent.placed = os.path.join(header["spec"]["job_dir"], OURS)
    return done


def unplace(agent: Agent, header: Header) -> Dict[str, Any]:
    """Take back the directory of a job that never started; an older job of the same name stays untouched."""
    for work in header["earlier"]:  # a placing that was interrupted is over before it is taken back
        if work.header["q"] == "place":
            work.abandon()
        work.join()
    with contextlib.suppress(NotFound):
        if placing.belongs(str(header["job_dir"]), str(header["token"])):
            clean.remove(str(header["job_dir"]))
    return {}


def start(agent: Agent, header: Header) -> Dict[str, Any]:
    done = launch.launch(header, agent.umask)
    agent.placed = ""
    return done
