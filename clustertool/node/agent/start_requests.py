"""These requests start a job: place its files, start its supervisor, or take the files back."""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
from typing import TYPE_CHECKING

from clustertool.errors import NotFound
from clustertool.model.paths import OURS
from clustertool.model.wire.messages import PLACE
from clustertool.node.agent import launch
from clustertool.node.agent import place as placing
from clustertool.node.jobs import clean

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Answer
    from clustertool.model.wire.agent_requests import LaunchRequest, PlaceRequest, UnplaceRequest
    from clustertool.node.agent.loop import Agent


def place(agent: Agent, request: PlaceRequest) -> Answer:
    placing.place(request["spec"], request["release"])
    agent.placed = os.path.join(request["spec"]["job_dir"], OURS)
    return {}


def unplace(agent: Agent, request: UnplaceRequest) -> Answer:
    """Take back the directory of a job that never started; an older job of the same name stays untouched."""
    this = threading.current_thread()
    for work in itertools.takewhile(lambda work: work is not this, agent.threads):
        if work.kind is PLACE:  # a placing that was interrupted is over before it is taken back
            work.abandon()
        work.join()
    with contextlib.suppress(NotFound):
        if placing.belongs(request["job_dir"], request["token"]):
            clean.remove(request["job_dir"])
    return {}


def start(agent: Agent, request: LaunchRequest) -> Answer:
    launch.launch(request, agent.umask)
    agent.placed = ""
    return {}
