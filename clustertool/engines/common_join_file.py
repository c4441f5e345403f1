"""The part that the join files of a job have in common, whatever starts its processes."""

from __future__ import annotations

from dataclasses import replace

from clustertool import __version__
from clustertool.engines.job_request import RunRequest
from clustertool.fleet.joining import join_process
from clustertool.model.facts import Identity
from clustertool.model.joining.join_file import JoinFile, MeetingPoint


def common_join_file(request: RunRequest, made: Identity, nodes: int, coordinator: MeetingPoint) -> JoinFile:
    """Build a join file from a request, whose spec is known, with the values of SECRETS and PASS_ENV.

    It has no hosts, no settings of an engine, and neither listing nor release of a workspace.
    """
    assert request.spec is not None
    return JoinFile(
        version=__version__,
        code=join_process.digest(),
        identity=made,
        cluster=replace(request.cluster, hosts=(), settings={}),
        job=request.spec,
        nnodes=nodes,
        coordinator=coordinator,
        passed=request.passed,
        secrets=tuple(request.secrets.items()),
    )
