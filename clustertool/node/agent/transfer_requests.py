"""These requests are about files that another program carries: rsync to this node, or answers of the agent from it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Dict

from clustertool.model.wire.frames import Header
from clustertool.node.storage import folder_reader, staging

if TYPE_CHECKING:
    from clustertool.node.agent.loop import Agent


def stage(agent: Agent, header: Header) -> Dict[str, Any]:
    """Make the folder that rsync is to fill."""
    return staging.stage(agent.root, str(header["release"]))


def build(agent: Agent, header: Header) -> Dict[str, Any]:
    """Build a release of what rsync brought."""
    return staging.build(agent.root, header)


def tree(agent: Agent, header: Header) -> Dict[str, Any]:
    """What is in a folder that is fetched without rsync."""
    return folder_reader.tree(str(header["dir"]))


def content(agent: Agent, header: Header) -> Dict[str, Any]:
    """Some bytes of a file there."""
    return folder_reader.content(str(header["dir"]), str(header["path"]), int(header["at"]))
