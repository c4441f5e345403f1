"""This module reads logs: which node has the log of a rank, and the lines that are there."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Sequence

from clustertool.actions.follow_job import Inbox, NodeQueues
from clustertool.engines.job_request import Shown
from clustertool.errors import BadAnswer, ClustertoolError, NotFound, Unreachable, raise_all
from clustertool.fleet.fleet import Check, Fleet
from clustertool.fleet.transfer.rsync_session import STALL
from clustertool.model.config.folded_names import grouped
from clustertool.model.job.attempts import ProcessStatus
from clustertool.model.job.outcome import Key, some
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import RankState
from clustertool.model.masking import Hide
from clustertool.model.paths import JobPaths
from clustertool.model.quantities import human_seconds
from clustertool.model.roles import role_name
from clustertool.model.wire.agent_requests import FollowRequest
from clustertool.model.wire.messages import FOLLOW, TAIL
from clustertool.watch.job_view import JobView, LogLines, LogPiece
from clustertool.watch.lines import excerpt, merge_by_time
from clustertool.watch.sanitize import harmless

_TAIL = 20
_WAIT = 0.1  # seconds for the next frame
_NAP = 1.0  # a longer time without a frame is that of a process that was blocked: Ctrl+Z, a disk that does not write
_SEARCHED = 400  # lines from the end that are searched for a traceback


def locate_logs(
    fleet: Fleet, status: JobStatus, asked: Shown, role: str = "", host: str = "", attempt: int | None = None
) -> tuple[dict[Key, int], list[ClustertoolError]]:
    """Return ({(role, rank): agent with its log}, errors of the nodes that have logs of `asked` and do not answer).

    asked: a role, "all" or keys. role: with "all", only processes of it. host: only processes on the node of this name.
    attempt: None for the newest; the nodes of an elastic job change. Raises NotFound for a rank or host that the job does not
    have, and the errors of these nodes if no other node has a log.
    """
    known = status.ranks_in(attempt)
    if isinstance(asked, str):
        wanted = role if asked == "all" else asked
        found = {key: node for key, node in known.items() if wanted in ("", key[0])}
    else:
        found = {key: known[key] for key in asked if key in known}
        strange = [key for key in asked if key not in known]
        if strange:
            kind, rank = strange[0]
            ranks, name = sorted(other for name, other in known if name == kind), role_name(kind)
            have = f"it has {name}s {ranks[0]} to {ranks[-1]}" if ranks else f"it has no {name}s"
            raise NotFound(f"job {status.job} has no {name} {rank}", have)
    if host:
        names = {node.index for node in status.nodes.values() if node.name == host}
        found = {key: node for key, node in found.items() if node in names}
        if not found:
            fix = f"hosts: {', '.join(node.name for node in status.nodes.values())}"
            raise NotFound(f"no such rank on host {host!r}", fix)
    away = grouped((node, key) for key, node in found.items() if node in fleet.failed)
    missing = [_unreachable(fleet, status, node, keys, attempt) for node, keys in away.items()]
    found = {key: node for key, node in found.items() if node not in fleet.failed}
    if not found:
        raise_all(missing)
    return found, missing


def require_attempt(status: JobStatus, attempt: int | None) -> None:
    """Raise NotFound for an attempt after the last one of the job. None is the newest."""
    if attempt is not None and attempt > status.attempt:
        last = status.attempt
        have = f"it has attempts 0 to {last}" if last else "it was not restarted: leave --attempt out"
        raise NotFound(f"job {status.job} has no attempt {attempt}", have)


def _unreachable(
    fleet: Fleet, status: JobStatus, node: int, keys: Sequence[Key], attempt: int | None
) -> ClustertoolError:
    """Build the error for logs of a node that does not answer: the cause, the path of a log, and what is known of its ranks.

    It has the class of the cause.
    """
    why: ClustertoolError = fleet.failed[node]
    host, known = fleet.cluster.hosts[node], []
    for process in (status.processes[key] for key in sorted(keys) if key in status.processes):
        about = [process.state.value] if process.state is RankState.LOST else []
        about += [f"last step {process.step:.0f}"] if process.step is not None else []
        about += [f"last output {human_seconds(time.time() - process.output)} ago"] if process.output else []
        known.append(f"{role_name(process.role)} {process.rank}" + (f" ({', '.join(about)})" if about else ""))
    role, rank = min(keys)
    first = status.processes.get((role, rank))
    newest = first is not None and attempt in (None, first.attempt)
    log = (first.log if first and newest else "") or JobPaths.log(role, rank, attempt or 0)
    path = JobPaths(host.root_dir or fleet.cluster.root_dir, status.job).of(log)
    what = f"no log of {some(known)}: {why.what}"
    gone = isinstance(why, NotFound) and why.fix  # there is nothing to read later
    return type(why)(what, gone or f"when {host.name} answers again: {path} on {host.name}", host.name)


def read_existing_lines(
    fleet: Fleet, lanes: NodeQueues, request: FollowRequest, nodes: Sequence[int]
) -> Iterator[tuple[str, LogLines]]:
    """Request the existing log lines of these nodes, and yield (node's name, lines) in the order of their time.

    After that, raises the errors of nodes that did not answer or whose stream broke off.
    """
    watch = JobView(frozenset(nodes))
    asked = fleet.ask({node: FOLLOW({**request, "by_time": True}) for node in nodes})
    for node, header, payload in merge_by_time(sorted(asked.ok), lanes.next):
        for item in watch.take(node, header, payload, time.monotonic()):
            if isinstance(item, LogLines):
                yield watch.status.name(item.node), item
    raise_all([*_stream_errors(fleet, watch), *asked.failed.values()])


def read_remaining_logs(fleet: Fleet, inbox: Inbox, job: str, known: JobView, check: Check) -> Iterator[LogPiece]:
    """Request and yield the bytes of all logs of a job that has ended, from the offsets that `known` has reached.

    After that, raises the errors of nodes, also where nothing has come for 60 s. inbox: gets the frames of the fleet's
    agents. Calls `check` regularly.
    """
    watch = JobView(frozenset(fleet.agents), pieces=True)
    watch.status.plan = known.status.plan
    wanted: FollowRequest = {"job": job, "logs": "all", "follow": False}
    requests = {node: FOLLOW({**wanted, "offsets": known.offsets.get(node, {})}) for node in watch.nodes}
    asked = fleet.ask(requests, patient=True)  # `check` decides what ends this
    quiet, before = 0.0, time.monotonic()
    while left := set(asked.ok) - watch.ended - set(watch.closed):
        check()
        frame, now = inbox.get(_WAIT), time.monotonic()
        quiet, before = quiet + min(now - before, _NAP), now
        if frame is not None and frame[1]["type"] != "beat":
            quiet = 0.0
            for item in watch.take(*frame, now):
                if isinstance(item, LogPiece):
                    yield item
        elif quiet > STALL:
            watch.closed.update(dict.fromkeys(left, f"nothing moved for {STALL} s"))
    raise_all([*_stream_errors(fleet, watch), *asked.failed.values()])


def _stream_errors(fleet: Fleet, watch: JobView) -> Iterator[ClustertoolError]:
    """Yield an error for each node whose stream broke off or had invalid frames, by number.

    It is BadAnswer for invalid frames, else what has ended the connection, or Unreachable if it is open.
    """
    for node in sorted(watch.closed):
        if node in watch.refused:
            yield BadAnswer(watch.refused[node], "check the job's records on that node", fleet.name(node))
        else:
            yield fleet.agents[node].dead or Unreachable(watch.closed[node], node=fleet.name(node))


def last_lines(fleet: Fleet, job: str, process: ProcessStatus, hide: Hide) -> list[str]:
    """Read the last 20 lines of a process's log, or, if its last 400 lines have one, the last traceback and what follows it.

    They are masked by `hide`. [] if the log is empty, or its node does not answer in 5 s.
    """
    log, text = JobPaths.log(process.role, process.rank, process.attempt), ""
    with contextlib.suppress(ClustertoolError):
        if process.node in fleet.agents:
            answer = fleet.agents[process.node].ask(TAIL({"job": job, "log": log, "lines": _SEARCHED}), timeout=5.0)
            text = str(answer["text"])
    return [harmless(hide(line)) for line in excerpt(text.removesuffix("\n").split("\n"), _TAIL)] if text else []
