"""inv logs: the log of any rank, during the job and after it, exactly or as readable lines."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any

from clustertool.errors import NotFound, UsageError
from clustertool.verbs import interrupts
from clustertool.verbs.call import JOB, JSON, NODES, Call, Opt, verb


@verb(
    JOB, Opt("rank", "ranks within the role: 3 or 3,4 (default 0)", short="r"), Opt("role", "trainer or pserver", "trainer"),
    Opt("host", "only ranks on this host"), Opt("follow", "go on as the log grows", False, short="f"),
    Opt("tail", "only the last N lines", short="n"), Opt("grep", "only lines that match this regular expression"),
    Opt("raw", "exactly one rank's bytes, no prefix", False), Opt("attempt", "the K-th restart's log"),
    Opt("all-ranks", "all ranks of all roles", False), Opt("files", "list all files in the job's log folder", False),
    Opt("file", "print this one of them (with --host where several nodes have it)"), NODES, JSON,
)  # fmt: skip
def logs(call: Call) -> None:
    """Print the log of any rank."""
    from clustertool.reach.fleet import Fleet
    from clustertool.verbs import load
    from clustertool.verbs.follow import Inbox, Lanes
    from clustertool.verbs.jobs import attach_to

    if call.given.files or call.given.file:
        from clustertool.verbs.logfiles import show

        show(call)
        return
    asked = _asked(call)
    cluster = load.cluster(call, start_local=False)
    several = not call.given.raw and not call.given.follow
    inbox: Any = Lanes() if several else Inbox()
    with Fleet(cluster, interrupts.check, inbox.put, interrupts.asker()) as fleet:
        fleet.open()
        job = attach_to(fleet, call.given.job)["id"]
        status = _status(fleet, job)
        places = _places(call, fleet, status, asked)
        request = {
            "q": "follow", "job": job, "logs": [list(key) for key in places], "follow": call.given.follow,
            "tail": whole(call.given.tail, "--tail"), "attempt": whole(call.given.attempt, "--attempt"),
        }  # fmt: skip
        if call.given.raw:
            if request["attempt"] is None:  # one log, not all attempts' one after the other
                request["attempt"] = next(status.processes[key].attempt for key in places)
            _raw(call, fleet, inbox, request, places)
        else:
            _lines(call, fleet, inbox, request, places, status)


def _asked(call: Call) -> Any:
    from clustertool.verbs.run import wanted

    given = call.given
    if given.role not in ("trainer", "pserver", "heter"):
        raise UsageError(f"--role {given.role!r}", "trainer or pserver")
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


def whole(text: str, option: str) -> int | None:
    if text == "":
        return None
    if not text.isdecimal():
        raise UsageError(f"{option} {text!r}", "a whole number")
    return int(text)


def _status(fleet: Any, job: str) -> Any:
    from clustertool.verbs.status import read

    return read(fleet.ask_all({"q": "status", "job": job}).ok)


def _places(call: Call, fleet: Any, status: Any, asked: Any) -> dict[tuple[str, int], int]:
    """(role, rank) -> the agent that has its log. Raises NotFound for a rank or host that is not there."""
    known = {key: process.node for key, process in status.processes.items()}
    if asked == "all":
        found = dict(known) if call.given.all_ranks else {key: node for key, node in known.items() if key[0] == call.given.role}
    else:
        found = {key: known[key] for key in asked if key in known}
        missing = [key for key in asked if key not in known]
        if missing:
            role, rank = missing[0]
            ranks = sorted(other for name, other in known if name == role)
            have = f"it has {role}s {ranks[0]} to {ranks[-1]}" if ranks else f"it has no {role}s"
            raise NotFound(f"job {status.job} has no {role} {rank}", have)
    if call.given.host:
        names = {node.index for node in status.nodes.values() if node.name == call.given.host}
        found = {key: node for key, node in found.items() if node in names}
        if not found:
            fix = f"hosts: {', '.join(node.name for node in status.nodes.values())}"
            raise NotFound(f"no such rank on host {call.given.host!r}", fix)
    unreachable = [key for key, node in found.items() if node not in fleet.agents]
    if unreachable and len(found) == len(unreachable):
        raise fleet.failed[found[unreachable[0]]]
    return {key: node for key, node in found.items() if node in fleet.agents}


def _raw(call: Call, fleet: Any, inbox: Any, request: Mapping[str, Any], places: Mapping[Any, int]) -> None:
    """Bytes as they are, straight from the channel to stdout, whatever the amount."""
    node = next(iter(places.values()))
    fleet.agents[node].ask(request)
    while True:
        frame = inbox.get(0.1)
        interrupts.check()
        if frame is None:
            continue
        _, header, payload = frame
        if header.get("k") == "log":
            call.terminal.raw(payload)
        elif header.get("k") == "end":
            return
        elif header.get("k") == "closed":
            raise fleet.agents[node].dead


def _lines(call: Call, fleet: Any, inbox: Any, request: Mapping[str, Any], places: Mapping[Any, int], status: Any) -> None:
    """Readable lines with their prefix, secrets of this laptop masked."""
    import time

    from clustertool.show.prefix import RankLines, widest
    from clustertool.verbs import load
    from clustertool.verbs.follow import Lanes
    from clustertool.watch.clean import mask
    from clustertool.watch.job import LogLines, Watch
    from clustertool.watch.merge import in_order

    hide = mask(load.known_secrets(fleet.cluster).values())
    width = widest([(*key, status.nodes[node].name) for key, node in places.items()])
    printer = RankLines(call.terminal, hide=hide, width=width)
    grep = re.compile(call.given.grep) if call.given.grep else None
    nodes = sorted(set(places.values()))
    watch = Watch(frozenset(nodes))
    by_time = isinstance(inbox, Lanes)
    fleet.ask({node: {**request, "by_time": by_time} for node in nodes}).all()
    frames = in_order(nodes, inbox.next) if isinstance(inbox, Lanes) else _as_they_come(inbox, watch)
    for frame in frames:
        now = time.monotonic()
        for item in watch.take(frame[0], frame[1], frame[2], now) if frame else watch.idle(now):
            if isinstance(item, LogLines):
                lines = [line for line in item.lines if grep.search(line)] if grep else item.lines
                printer.show(item.role, item.rank, status.nodes[item.node].name, lines)
    for node, why in watch.closed.items():
        call.terminal.warn(f"{fleet.name(node)}: {why}")


def _as_they_come(inbox: Any, watch: Any) -> Iterator[Any]:
    """Frames, and None now and then, until every node is done."""
    while not watch.over:
        interrupts.check()
        yield inbox.get(0.1)
