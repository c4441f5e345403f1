"""inv logs prints the log of any rank, during the job and after it, exactly or as readable lines."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from typing import Literal

from clustertool.errors import BadAnswer, ClustertoolError, NotFound, Unreachable, UsageError, raise_all
from clustertool.fleet.fleet import Fleet
from clustertool.model.job.outcome import some
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import RankState
from clustertool.model.paths import JobPaths
from clustertool.model.quantities import human_bytes, human_seconds
from clustertool.model.roles import role_name
from clustertool.model.wire.agent_requests import FollowRequest
from clustertool.model.wire.messages import FOLLOW, LIST_FILES
from clustertool.show.prefix import RankLines, widest
from clustertool.show.table import table
from clustertool.verbs import load_config, signals
from clustertool.verbs.follow_session import FollowSession, Inbox, NodeQueues
from clustertool.verbs.jobs import attach_to, pick, require_known
from clustertool.verbs.run_request import wanted
from clustertool.verbs.status import ask_status, read
from clustertool.verbs.verb import Call, User, role_of, whole
from clustertool.watch.job_view import JobView, LogLines
from clustertool.watch.lines import Lines
from clustertool.watch.merge import in_order
from clustertool.watch.sanitize import mask

_PATIENCE = 30.0  # seconds to get back to a node
Ranks = Literal["all"] | list[tuple[str, int]]


def logs(call: Call) -> None:
    """Print the log of any rank."""
    if call.given.files or call.given.file:
        _show_files(call)
        return
    asked = _asked(call)
    cluster = load_config.cluster(call, start_local=False)
    several = not call.given.raw and not call.given.follow
    lanes, inbox = NodeQueues(), Inbox()
    with Fleet(cluster, signals.check, lanes.put if several else inbox.put, User()) as fleet:
        fleet.open()
        found = attach_to(fleet, call.given.job)
        if call.given.follow:
            require_known(found)
        job = found["id"]
        status = read(ask_status(fleet, job))
        places, missing = _places(call, fleet, status, asked)
        request: FollowRequest = {
            "job": job,
            "logs": list(places),
            "follow": call.given.follow,
            "tail": whole(call.given.tail, "--tail"),
            "attempt": whole(call.given.attempt, "--attempt"),
        }
        if call.given.raw:
            if request["attempt"] is None:  # one log, not all attempts' one after the other
                request["attempt"] = next(status.processes[key].attempt for key in places)
            _raw(call, fleet, inbox, request, next(iter(places.values())))
        else:
            printer = _printer(call, fleet, places, status)
            if call.given.follow:
                _growing(call, fleet, inbox, request, printer)
            else:
                _there(fleet, lanes, request, sorted(set(places.values())), printer)
        named = {error.node for error in missing}
        raise_all([*missing, *(error for error in fleet.silent.values() if error.node not in named)])


def _asked(call: Call) -> Ranks:
    given = call.given
    given.role = role_of(given.role)
    if given.grep:
        try:
            re.compile(given.grep)
        except re.error as error:
            raise UsageError(f"--grep {given.grep!r}: {error}", "a Python regular expression") from None
    whole(given.tail, "--tail")
    whole(given.attempt, "--attempt")
    found = wanted(call)
    if found == "all" or (given.host and not given.rank):
        if given.raw:
            raise UsageError("--raw is for one rank", "name it with --rank")
        return "all"
    keys = [(given.role, rank) for _, rank in found]
    if given.raw and len(keys) != 1:
        raise UsageError("--raw is for one rank", "name it with --rank 3")
    return keys


def _places(
    call: Call, fleet: Fleet, status: JobStatus, asked: Ranks
) -> tuple[dict[tuple[str, int], int], list[ClustertoolError]]:
    """(role, rank) -> the agent that has its log, and an error for each node that does not answer.

    Raises NotFound for a rank or host that the job does not have, and these errors if there is no log to show.
    """
    known = {key: process.node for key, process in status.processes.items()}
    if asked == "all":
        found = (
            dict(known)
            if call.given.all_ranks
            else {key: node for key, node in known.items() if key[0] == call.given.role}
        )
    else:
        found = {key: known[key] for key in asked if key in known}
        strange = [key for key in asked if key not in known]
        if strange:
            role, rank = strange[0]
            ranks, name = sorted(other for name, other in known if name == role), role_name(role)
            have = f"it has {name}s {ranks[0]} to {ranks[-1]}" if ranks else f"it has no {name}s"
            raise NotFound(f"job {status.job} has no {name} {rank}", have)
    if call.given.host:
        names = {node.index for node in status.nodes.values() if node.name == call.given.host}
        found = {key: node for key, node in found.items() if node in names}
        if not found:
            fix = f"hosts: {', '.join(node.name for node in status.nodes.values())}"
            raise NotFound(f"no such rank on host {call.given.host!r}", fix)
    away: dict[int, list[tuple[str, int]]] = {}
    for key, node in found.items():
        if node in fleet.failed:
            away.setdefault(node, []).append(key)
    missing = [_unreachable(fleet, status, node, keys) for node, keys in away.items()]
    found = {key: node for key, node in found.items() if node not in fleet.failed}
    if not found:
        raise_all(missing)
    return found, missing


def _unreachable(fleet: Fleet, status: JobStatus, node: int, keys: Sequence[tuple[str, int]]) -> ClustertoolError:
    """Why the logs of the ranks of a node cannot be read now, where they are, and what is known of these ranks."""
    why: ClustertoolError = fleet.failed[node]
    host, known = fleet.cluster.hosts[node], []
    for process in (status.processes[key] for key in sorted(keys)):
        about = [process.state.value] if process.state is RankState.LOST else []
        about += [f"last step {process.step:.0f}"] if process.step is not None else []
        about += [f"last output {human_seconds(time.time() - process.output)} ago"] if process.output else []
        known.append(f"{role_name(process.role)} {process.rank}" + (f" ({', '.join(about)})" if about else ""))
    first = status.processes[min(keys)]
    log = first.log or JobPaths.log(first.role, first.rank, first.attempt)
    path = JobPaths(host.root_dir or fleet.cluster.root_dir, status.job).of(log)
    what = f"no log of {some(known)}: {why.what}"
    return type(why)(what, f"when {host.name} answers again: {path} on {host.name}", host.name)


def _raw(call: Call, fleet: Fleet, inbox: Inbox, request: FollowRequest, node: int) -> None:
    """Bytes as they are, straight from the channel to stdout, whatever the amount. A broken connection is resumed."""
    offsets: dict[str, int] = {}
    fleet.agents[node].ask(FOLLOW(request))
    while True:
        frame = inbox.get(0.1)
        signals.check()
        if frame is None:
            continue
        _, header, payload = frame
        if header["type"] == "log":
            call.terminal.raw(payload)
            offsets[header["log"]] = header["off"] + len(payload)
        elif header["type"] == "end":
            return
        elif header["type"] == "closed":
            if header.get("refused"):
                raise BadAnswer(header["why"], "check the job's records on that node", fleet.name(node))
            _resume(fleet, node, {**request, "offsets": offsets})


def _resume(fleet: Fleet, node: int, request: FollowRequest) -> None:
    """Ask again over a new connection. Raises Unreachable after `_PATIENCE` seconds without one."""
    end = time.monotonic() + _PATIENCE
    while True:
        try:
            fleet.reopen(node).ask(FOLLOW(request))
            return
        except Unreachable:
            if time.monotonic() > end:
                raise
        again = time.monotonic() + 1.0
        while time.monotonic() < again:
            signals.check()
            time.sleep(0.05)


def _printer(call: Call, fleet: Fleet, places: Mapping[tuple[str, int], int], status: JobStatus) -> RankLines:
    """Readable lines with their prefix, secrets of this laptop masked, those that --grep does not match left out."""
    pattern = re.compile(call.given.grep)

    class Matching(RankLines):
        def show(self, role: str, rank: int, node: str, lines: Sequence[str]) -> None:
            super().show(
                role, rank, node, [line for line in lines if pattern.search(line)] if pattern.pattern else lines
            )

    width = widest([(*key, status.nodes[node].name) for key, node in places.items()])
    return Matching(call.terminal, hide=mask(load_config.known_secrets(fleet.cluster).values()), width=width)


def _there(fleet: Fleet, lanes: NodeQueues, request: FollowRequest, nodes: Sequence[int], printer: RankLines) -> None:
    """What is there now, the lines of several ranks in the order of their time."""
    watch = JobView(frozenset(nodes))
    asked = fleet.ask({node: FOLLOW({**request, "by_time": True}) for node in nodes})
    for node, header, payload in in_order(sorted(asked.ok), lanes.next):
        for item in watch.take(node, header, payload, time.monotonic()):
            if isinstance(item, LogLines):
                printer.show(item.role, item.rank, watch.name(item.node), item.lines)
    raise_all([_why_closed(fleet, watch, node) for node in sorted(watch.closed)] + list(asked.failed.values()))


def _why_closed(fleet: Fleet, watch: JobView, node: int) -> ClustertoolError:
    if node in watch.refused:
        return BadAnswer(watch.refused[node], "check the job's records on that node", fleet.name(node))
    return fleet.agents[node].dead or Unreachable(watch.closed[node], node=fleet.name(node))


def _growing(call: Call, fleet: Fleet, inbox: Inbox, request: FollowRequest, printer: RankLines) -> None:
    """The same while the job runs, to its end."""
    follow = FollowSession(call, fleet, inbox, request["job"], printer, stops=False)
    follow.start(request)
    follow.run()


def _show_files(call: Call) -> None:
    """List the files of all nodes, or print one."""
    cluster = load_config.cluster(call, start_local=False)
    inbox = Inbox()
    with Fleet(cluster, signals.check, inbox.put, User()) as fleet:
        fleet.open()
        job = pick(fleet, call.given.job)["id"]
        answers = fleet.ask_all(LIST_FILES({"job": job}))
        found = {fleet.name(node): (node, answer["files"]) for node, answer in sorted(answers.items())}
        if call.given.host:
            found = {name: value for name, value in found.items() if name == call.given.host}
        if call.given.file:
            _print_file(call, fleet, inbox, job, found)
            raise_all(list(fleet.silent.values()))
            return
        _list_files(call, found)
        raise_all(list(fleet.failed.values()))


def _list_files(call: Call, found: dict[str, tuple[int, dict[str, int]]]) -> None:
    if call.json:
        call.answer({"nodes": {name: files for name, (_, files) in found.items()}})
        return
    rows = [
        (name, file, human_bytes(size)) for name, (_, files) in found.items() for file, size in sorted(files.items())
    ]
    table("", ("node", "file", "size"), rows, terminal=call.terminal)


def _print_file(call: Call, fleet: Fleet, inbox: Inbox, job: str, found: dict[str, tuple[int, dict[str, int]]]) -> None:
    """One file of one node: its bytes with --raw, else its lines made harmless."""
    file = call.given.file
    having = [name for name, (_, files) in found.items() if file in files]
    if not having:
        raise_all([error for error in fleet.failed.values() if not call.given.host or error.node == call.given.host])
        where = f" on {call.given.host}" if call.given.host else ""
        raise NotFound(f"job {job} has no log/{file}{where}", "inv logs --files lists what there is")
    if len(having) > 1:
        raise UsageError(f"--file {file} is on {', '.join(having)}", "choose one with --host")
    node, lines = found[having[0]][0], Lines()
    tail = whole(call.given.tail, "--tail")
    wanted_file: FollowRequest = {"job": job, "file": file, "follow": call.given.follow, "tail": tail}
    fleet.agents[node].ask(FOLLOW(wanted_file))
    while True:
        signals.check()
        frame = inbox.get(0.1)
        if frame is None:
            continue
        _, header, payload = frame
        if header["type"] == "log" and call.given.raw:
            call.terminal.raw(payload)
        elif header["type"] == "log":
            for line in lines.feed(payload):
                call.terminal.line(line)
        elif header["type"] == "closed":
            fix = "inv logs --files lists what there is, when the node answers"
            raise Unreachable(f"log/{file} has come only in part: {header['why']}", fix, fleet.name(node))
        elif header["type"] == "end":
            break
    for line in lines.end():
        call.terminal.line(line)
