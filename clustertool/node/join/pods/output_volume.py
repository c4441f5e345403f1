"""The output of a job can be on a volume: its folder becomes a link to one of the volume."""

from __future__ import annotations

import os
import shutil
from typing import TYPE_CHECKING

from clustertool.errors import PreflightError
from clustertool.model.paths import folder_of
from clustertool.node.storage import tree_copy

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec


def link_output(spec: Spec, volume: str, umask: int) -> None:
    """Make this node's folder on the volume, and replace the output folder in the job's directory by a link to it.

    The folder is JOB<id> for node 0, and JOB<id>-node<n> for the others: each node has an output of its own. umask: of the
    ranks. What the workspace has in the output folder is copied to the volume. If it is a link, of the workspace, nothing is
    done. Raises PreflightError if the volume cannot be written.
    """
    node = spec["node"]
    target = os.path.join(volume, folder_of(spec["job"]) + (f"-node{node}" if node else ""))
    output = os.path.join(spec["job_dir"], spec["output"])
    if os.path.islink(output):
        return
    try:
        os.makedirs(target, exist_ok=True)
        os.chmod(target, 0o777 & ~umask)
        if os.listdir(output):
            tree_copy.copy_tree(output, target)
        shutil.rmtree(output)
        os.symlink(target, output)
    except OSError as error:
        what = f"the output cannot be put on the volume at {volume}: {error.strerror}"
        fix = f"make it writable for uid {os.getuid()}: fsGroup or runAsUser in pod_template"
        raise PreflightError(what, fix) from None
