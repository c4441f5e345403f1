"""inv logs prints the log of any rank, during the job and after it, exactly or as readable lines."""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Mapping
from datetime import datetime
from typing import Literal

from clustertool.actions import find_jobs, load_config
from clustertool.actions.follow_job import Inbox, NodeQueues
from clustertool.actions.read_logs import locate_logs, read_existing_lines, require_attempt
from clustertool.actions.read_status import read
from clustertool.errors import BadAnswer, ClustertoolError, NotFound, Unreachable, UsageError, raise_all
from clustertool.fleet.fleet import LAG, Fleet
from clustertool.model.config.folded_names import fold
from clustertool.model.hints import PROGRAM
from clustertool.model.job.outcome import Key
from clustertool.model.job.state import JobStatus
from clustertool.model.quantities import human_bytes
from clustertool.model.wire.agent_requests import FollowRequest
from clustertool.model.wire.messages import FOLLOW, LIST_FILES, STATUS
from clustertool.show.table import table
from clustertool.show.terminal import RankLines, Terminal, widest_prefix
from clustertool.ssh.parallel import each
from clustertool.verbs import signals
from clustertool.verbs.follow_session import FollowSession, logs_to_show
from clustertool.verbs.jobs import open_engine, read_join_log, show_join_log
from clustertool.verbs.verb import Call, read_whole_number, role_of, seconds_with_unit
from clustertool.watch.lines import Lines

_PATIENCE = 30.0  # seconds to get back to a node
_OF_RANKS = ("grep", "rank", "all-ranks", "attempt")  # options that files do not have
Ranks = Literal["all"] | list[Key]


def logs(call: Call) -> None:
    """Print the logs of ranks of a job, or with --files and --file list or print the files in log/.

    With --raw it prints the bytes of one log, with -f it follows the job to its end. Without these, the logs on nodes that
    still log in are printed last. Raises UsageError for options that do not fit, NotFound for ranks that are not there, an
    error for a job without a record after printing the log of its start, and the errors of nodes at the end.
    """
    given = call.given
    if given.files or given.file:
        if given.since or given.timestamps:
            fix = "leave --since and --timestamps out"
            raise UsageError("only the logs of ranks have times: it is not recorded when other files grew", fix)
        unused = [name for name in _OF_RANKS if getattr(given, name.replace("-", "_"))]
        if unused:
            names, option = ", ".join(f"--{name}" for name in unused), "--file" if given.file else "--files"
            what = f"{names} cannot be given with {option}: it selects from the logs of ranks"
            raise UsageError(what, f"leave {names} out")
        _show_files(call)
        return
    call.lines = call.json
    if call.json and given.raw:
        raise UsageError("--raw prints bytes, and --json objects", "give one of them")
    asked = _ranks_to_show(call)
    tail = read_whole_number(given.tail, "--tail")
    attempt = read_whole_number(given.attempt, "--attempt")
    request: FollowRequest = {"job": "", "follow": call.given.follow, "tail": tail, "attempt": attempt}
    if given.since:
        request["since"] = _since_when(given.since)
    if given.timestamps or call.json:
        request["by_time"] = True
    several = not call.given.raw and not call.given.follow
    lanes, inbox = NodeQueues(signals.check), Inbox()
    with open_engine(call, lanes.put if several else inbox.put, None if call.given.raw else LAG, newest=True) as engine:
        fleet = engine.fleet
        found = find_jobs.attach_to(engine, call.given.job, queued=True)
        if not find_jobs.has_records(found):
            show_join_log(call, read_join_log(engine, found["id"]))
            raise find_jobs.no_record_error(found)
        if call.given.follow:
            find_jobs.require_known(found)
        job = found["id"]

        def known() -> tuple[JobStatus, dict[Key, int], list[ClustertoolError]]:
            status = read(fleet.ask_all(STATUS({"job": job})))
            require_attempt(status, attempt)
            role = "" if given.all_ranks else given.role
            try:
                return status, *locate_logs(fleet, status, asked, role, given.host, attempt)
            except NotFound as error:
                raise find_jobs.add_engine_reason(found, error) from None

        status, places, missing = known()
        request.update({"job": job, "logs": list(places)})
        if call.given.raw:
            if request["attempt"] is None:  # one log, not all attempts' one after the other
                request["attempt"] = next(status.processes[key].attempt for key in places)
            _copy_raw(call, fleet, inbox, request, next(iter(places.values())))
        else:
            printer = _create_printer(call, fleet, places, status)
            if call.given.follow:
                session = FollowSession(call, fleet, inbox, job, printer, None)
                late = set(fleet.late)
                session.start(request)
                if late:
                    call.terminal.note(f"{fold(map(fleet.name, sorted(late)))}: still logging in")
                session.run()
                missing = known()[2] if late else missing
            else:

                def show(nodes: set[int]) -> None:
                    for name, item in read_existing_lines(fleet, lanes, request, sorted(nodes)):
                        printer.show(item.role, item.rank, name, item.lines, item.t)

                late = set(places.values()) & set(fleet.late)
                show(set(places.values()) - late)
                if late:
                    call.terminal.note(f"{fold(map(fleet.name, sorted(late)))}: still logging in")
                    fleet.wait_for_late()
                    status, places, missing = known()
                    show(set(places.values()) & late)
        named = {error.node for error in missing}
        raise_all([*missing, *(error for error in fleet.silent.values() if error.node not in named)])


def _ranks_to_show(call: Call) -> Ranks:
    """Check the options that select ranks, and return a list of (role, rank), by default rank 0, or "all".

    "all" is for --rank all, --all-ranks, and --host without --rank. Replaces call.given.role by the name of the role. Raises
    UsageError for a value that is not valid, and for --raw with several ranks or --timestamps.
    """
    given = call.given
    given.role = role_of(given.role)
    if given.grep:
        try:
            re.compile(given.grep)
        except re.error as error:
            raise UsageError(f"--grep {given.grep!r}: {error}", "a Python regular expression") from None
    found = logs_to_show(call)
    keys: Ranks = "all"
    if not isinstance(found, str) and (given.rank or not given.host):
        keys = [(given.role, rank) for _, rank in found]
    if given.raw and (keys == "all" or len(keys) != 1):
        raise UsageError("--raw is for one rank", "name it with --rank 3")
    if given.raw and given.timestamps:
        raise UsageError("--raw shows the bytes of the log alone", "leave out --raw or --timestamps")
    return keys


def _since_when(text: str) -> float:
    """Convert --since, a duration before now (10m) or a time in ISO 8601 (local without a zone), to seconds since the epoch.

    Raises UsageError for another text.
    """
    with contextlib.suppress(ValueError, OverflowError):
        return datetime.fromisoformat(text.replace("Z", "+00:00")).timestamp()
    return time.time() - seconds_with_unit(text, "--since")


def _copy_raw(call: Call, fleet: Fleet, inbox: Inbox, request: FollowRequest, node: int) -> None:
    """Request one log and write its bytes to stdout, until its end. A broken connection is opened again, for up to 30 s.

    Raises Unreachable if that fails, BadAnswer if the node's frames are not valid.
    """
    offsets: dict[str, int] = {}
    fleet.agents[node].ask(FOLLOW(request))
    for _, header, payload in inbox.frames(signals.check):
        if header["type"] == "log":
            call.terminal.raw(payload)
            offsets[header["log"]] = header["off"] + len(payload)
        elif header["type"] == "end":
            return
        elif header["type"] == "closed":
            if header.get("refused"):
                raise BadAnswer(header["why"], "check the job's records on that node", fleet.name(node))
            _reconnect(fleet, node, {**request, "offsets": offsets})


def _reconnect(fleet: Fleet, node: int, request: FollowRequest) -> None:
    """Connect to a node again and send it the request; try again each second. Raises Unreachable after `_PATIENCE` seconds."""

    def check() -> None:
        fleet.prompter.serve()
        signals.check()

    end = time.monotonic() + _PATIENCE
    while True:
        try:
            each([node], fleet.reopen, check=check).all()[0].ask(FOLLOW(request))
            return
        except Unreachable:
            if time.monotonic() > end:
                raise
        signals.pause(1.0)


def _create_printer(call: Call, fleet: Fleet, places: Mapping[Key, int], status: JobStatus) -> RankLines:
    """Create the printer of log lines: with prefixes or as JSON, SECRETS masked, without those that --grep does not match."""
    width = widest_prefix([(*key, status.nodes[node].name) for key, node in places.items()])
    hide = load_config.mask_known_secrets(fleet.cluster)
    times, terminal = call.given.timestamps, Terminal() if call.json else call.terminal
    return RankLines(terminal, hide=hide, width=width, grep=call.given.grep, times=times, objects=call.json)


def _show_files(call: Call) -> None:
    """List the files in log/ on all nodes, or with --host on one, or print the one of --file.

    Raises the errors of nodes after that; with --file only those of nodes that have logged in and did not answer.
    """
    inbox = Inbox()
    with open_engine(call, inbox.put, newest=True) as engine:
        fleet = engine.fleet
        job = find_jobs.ask_and_choose(engine, call.given.job)["id"]
        answers = fleet.ask_all(LIST_FILES({"job": job}))
        found = {fleet.name(node): (node, answer["files"]) for node, answer in sorted(answers.items())}
        if call.given.host:
            found = {name: value for name, value in found.items() if name == call.given.host}
        if call.given.file:
            _print_file(call, fleet, inbox, job, found)
        else:
            _list_files(call, found)
        raise_all(list((fleet.silent if call.given.file else fleet.failed).values()))


def _list_files(call: Call, found: dict[str, tuple[int, dict[str, int]]]) -> None:
    """Print a table of the files and their sizes by node, or answer with JSON."""
    if call.json:
        call.answer({"nodes": {name: files for name, (_, files) in found.items()}})
        return
    every = ((name, *file) for name, (_, files) in found.items() for file in sorted(files.items()))
    rows = [(name, file, human_bytes(size)) for name, file, size in every]
    table("", ("node", "file", "size"), rows, terminal=call.terminal)


def _print_file(call: Call, fleet: Fleet, inbox: Inbox, job: str, found: dict[str, tuple[int, dict[str, int]]]) -> None:
    """Print one file of one node: its bytes with --raw, else its lines made harmless. With -f it follows the file.

    Raises NotFound if no node has the file, UsageError if several have it, and Unreachable if it came only in part.
    """
    file = call.given.file
    having = [name for name, (_, files) in found.items() if file in files]
    if not having:
        raise_all([error for error in fleet.failed.values() if not call.given.host or error.node == call.given.host])
        where = f" on {call.given.host}" if call.given.host else ""
        raise NotFound(f"job {job} has no log/{file}{where}", f"{PROGRAM} logs --job {job} --files lists what there is")
    if len(having) > 1:
        raise UsageError(f"--file {file} is on {', '.join(having)}", "choose one with --host")
    node, lines = found[having[0]][0], Lines()
    tail = read_whole_number(call.given.tail, "--tail")
    wanted_file: FollowRequest = {"job": job, "file": file, "follow": call.given.follow, "tail": tail}
    fleet.agents[node].ask(FOLLOW(wanted_file))
    for _, header, payload in inbox.frames(signals.check):
        if header["type"] == "log" and call.given.raw:
            call.terminal.raw(payload)
        elif header["type"] == "log":
            for line in lines.feed(payload):
                call.terminal.line(line)
        elif header["type"] == "closed":
            fix = f"{PROGRAM} logs --job {job} --files lists what there is, when the node answers"
            raise Unreachable(f"log/{file} has come only in part: {header['why']}", fix, fleet.name(node))
        elif header["type"] == "end":
            break
    for line in lines.end():
        call.terminal.line(line)
