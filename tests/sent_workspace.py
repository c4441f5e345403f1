"""The join file of a job whose workspace is sent, as the engines make it."""

from __future__ import annotations

from dataclasses import replace

from clustertool.fleet.dispatch.workspace import Workspace
from clustertool.model.joining.join_file import JoinFile


def with_workspace(join: JoinFile, workspace: Workspace) -> JoinFile:
    return replace(join, release=workspace.release, listing=workspace.files)
