"""These handlers answer requests to a job that runs here: to follow it, for its bundle, and to let its pod end.

The agent's loop sends what a follower reads.
"""

from __future__ import annotations

import binascii
from typing import TYPE_CHECKING, Dict, Union

from clustertool.errors import NotFound
from clustertool.model.paths import OURS, RELEASED
from clustertool.node.jobs import supervisor_client
from clustertool.node.jobs.follow import Follower
from clustertool.node.jobs.queries import record_of
from clustertool.node.storage import files

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import Answer, ContentAnswer
    from clustertool.model.wire.agent_requests import BundleRequest, FollowRequest, JobRequest
    from clustertool.node.agent.loop import Agent, BaseContext
    from clustertool.node.system.node_context import NodeContext

_PATIENCE = 20.0  # seconds for a supervisor to send a bundle, which may have a workspace of 64 MiB
_PART = 512 << 10
_bundles: Dict[str, bytes] = {}  # of jobs: the answer has room for a part. They are on no disk of the node


def follow(context: Union[Agent, BaseContext], request: FollowRequest) -> Answer:
    """Let the agent send what the request selects of a job's record, with `follow` until the job ends.

    Raises NotFound, and with `follow` PreflightError if it cannot be known whether the job runs.
    """
    record = record_of(context, request["job"])
    if request.get("follow", True):
        record.require_followed()
    context.follow(Follower(record, request))
    return {}


def release(context: NodeContext, request: JobRequest) -> Answer:
    """Create the file that releases a job after the fetch of its output: its pod need not wait any more.

    Raises NotFound if there is no such job, or no directory of it.
    """
    with files.closing(files.open_job_dir(record_of(context, request["job"]).paths.dir)) as job:
        files.create(job, f"{OURS}/{RELEASED}", exclusive=False)
    return {}


def read_bundle(context: NodeContext, request: BundleRequest) -> ContentAnswer:
    """Answer a part of the bundle with which another machine joins a job, from its supervisor's memory.

    {data: up to 512 KiB from offset `at` on, in base64, last: whether nothing follows}. It has the job's key. Raises NotFound
    where no supervisor of the job answers, or its machines cannot join.
    """
    job, at = request["job"], request["at"]
    bundle = _bundles.get(job) or _ask_for_bundle(context, job)
    data = bundle[at : at + _PART]
    last = at + len(data) >= len(bundle)
    if last:
        _bundles.pop(job, None)
    else:
        _bundles[job] = bundle
    return {"data": binascii.b2a_base64(data, newline=False).decode(), "last": last}


def _ask_for_bundle(context: NodeContext, job: str) -> bytes:
    """Request the bundle of a job from its supervisor, and return it. Raises NotFound if none answers within 20 s."""
    answer = supervisor_client.ask(record_of(context, job).paths, {"type": "bundle"}, _PATIENCE)
    if answer is None:
        raise NotFound(f"no supervisor of job {job} answers here", "ask a node on which the job runs")
    return answer[1]
