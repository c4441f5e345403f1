"""One node of an elastic job that runs: it joins with the join file that a living supervisor of the job has in its memory."""

from __future__ import annotations

import base64
import binascii
import posixpath

from clustertool.engines.elastic.member_files import HostMember, of_member
from clustertool.errors import ClustertoolError, NotFound, PreflightError, UsageError
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.joining import join_process
from clustertool.model.facts import read_facts
from clustertool.model.joining.join_file import JoinFile, from_json, to_json
from clustertool.model.paths import base
from clustertool.model.planning.probe_request import probe_request
from clustertool.model.wire.agent_answers import Answer, JoinAnswer
from clustertool.model.wire.messages import BUNDLE, JOIN, JOIN_CODE, LIST_JOBS, PROBE, Request

ANSWER = 30.0  # seconds for the answer to a request
CODE = 120.0  # and to receive the code and compile it
STARTED, NEEDS_CODE = "started", "needs code"  # answers to a request to join
_LARGEST = 64 << 20  # bytes of a join file


def join_request(file: JoinFile, again: bool = False) -> Request[JoinAnswer]:
    """Build the request to start a process that joins. again: also on a node that was released by `shrink`."""
    return JOIN({"job": file.identity.job_id, "join": to_json(file), "code": file.code, "again": again})


def code_request() -> Request[Answer]:
    """Build the request that brings the code of such a process to a node which needs it."""
    data = base64.b64encode(join_process.additional()).decode()
    return JOIN_CODE({"digest": join_process.digest(), "data": data})


def common_file(fleet: Fleet, job: str) -> JoinFile:
    """Read what all nodes of an elastic job have in common, from a node on which it lives. It has the job's key.

    Raises UsageError where another version of the tool has started the job, NotFound where no node answers.
    """
    why = ""
    for node in sorted(fleet.agents):
        try:
            file = from_json(_bundle(fleet, node, job).decode("utf-8", "replace"))
        except ClustertoolError as error:
            why = f": {fleet.name(node)}: {error.what}"
            continue
        if file.code != join_process.digest():
            what = f"job {job} was started by another clustertool ({file.version}) than the one that runs here"
            raise UsageError(what, "use the version that has started it, as on the machine where it was started")
        return file
    raise NotFound(f"no node on which job {job} lives gives its join file{why}", "try again; status shows the nodes")


def _bundle(fleet: Fleet, node: int, job: str) -> bytes:
    """Read the join file from a node, part by part. Raises NotFound, Unreachable, PreflightError for a damaged one."""
    data = b""
    while len(data) <= _LARGEST:
        part = fleet.ask_one(node, BUNDLE({"job": job, "at": len(data)}), ANSWER)
        try:
            data += base64.b64decode(part["data"], validate=True)
        except binascii.Error:
            break
        if part["last"]:
            return data
    raise PreflightError("the join file of the job is damaged", "ask another node", fleet.name(node))


def join_node(fleet: Fleet, node: int, common: JoinFile, index: int, again: bool = False, new: bool = False) -> str:
    """Start a node of a job that runs. node: in the fleet. index: its number in the job. new: it has never been a node of it.

    Returns what the node has answered (agent_answers.JoinAnswer). Raises PreflightError, Unreachable.
    """
    host, job = fleet.cluster.hosts[node], common.identity.job_id
    facts = read_facts(node, fleet.ask_one(node, PROBE(probe_request(fleet.cluster, host)), ANSWER))
    listed = fleet.ask_one(node, LIST_JOBS({"job": job, "exact": True}), ANSWER)["jobs"]
    known = [posixpath.dirname(one["dir"]) for one in listed if one.get("dir")]
    # Records of other nodes lie there where ROOT_DIR is shared with them.
    place = base(facts.root, index, bool(known)) if new or not known else known[0]
    file = of_member(common, fleet.cluster, HostMember(host, facts, place), index)
    answer = fleet.ask_one(node, join_request(file, again), ANSWER)
    if answer["state"] == NEEDS_CODE:
        fleet.ask_one(node, code_request(), CODE)
        answer = fleet.ask_one(node, join_request(file, again), ANSWER)
    return str(answer["state"])
