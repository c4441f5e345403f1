"""inv logs --files and --file: whatever programs leave in log/ beside the logs of ranks (`*.INFO` of glog and the like)."""

from __future__ import annotations

from typing import Any

from clustertool.errors import NotFound, Unreachable, UsageError, raise_all
from clustertool.verbs import signals
from clustertool.verbs.verb import Call, whole


def show(call: Call) -> None:
    """List the files of all nodes, or print one."""
    from clustertool.fleet.fleet import Fleet
    from clustertool.verbs import load_config
    from clustertool.verbs.follow_session import Inbox
    from clustertool.verbs.jobs import pick

    cluster = load_config.cluster(call, start_local=False)
    inbox = Inbox()
    with Fleet(cluster, signals.check, inbox.put, signals.User()) as fleet:
        fleet.open()
        job = pick(fleet, call.given.job)["id"]
        answers = fleet.ask_all({"q": "files", "job": job})
        found = {fleet.name(node): (node, answer["files"]) for node, answer in sorted(answers.items())}
        if call.given.host:
            found = {name: value for name, value in found.items() if name == call.given.host}
        if call.given.file:
            _print(call, fleet, inbox, job, found)
            raise_all(list(fleet.silent.values()))
            return
        _list(call, found)
        raise_all(list(fleet.failed.values()))


def _list(call: Call, found: dict[str, tuple[int, dict[str, int]]]) -> None:
    if call.json:
        call.answer({"nodes": {name: files for name, (_, files) in found.items()}})
        return
    from clustertool.show.progress_bars import human_bytes
    from clustertool.show.table import table

    rows = [
        (name, file, human_bytes(size)) for name, (_, files) in found.items() for file, size in sorted(files.items())
    ]
    table("", ("node", "file", "size"), rows, terminal=call.terminal)


def _print(call: Call, fleet: Any, inbox: Any, job: str, found: dict[str, tuple[int, dict[str, int]]]) -> None:
    """One file of one node: its bytes with --raw, else its lines made harmless."""
    file = call.given.file
    having = [name for name, (_, files) in found.items() if file in files]
    if not having:
        raise_all([error for error in fleet.failed.values() if not call.given.host or error.node == call.given.host])
        where = f" on {call.given.host}" if call.given.host else ""
        raise NotFound(f"job {job} has no log/{file}{where}", "inv logs --files lists what there is")
    if len(having) > 1:
        raise UsageError(f"--file {file} is on {', '.join(having)}", "choose one with --host")
    from clustertool.watch.lines import Lines

    node, lines = found[having[0]][0], Lines()
    tail = whole(call.given.tail, "--tail")
    fleet.agents[node].ask({"q": "follow", "job": job, "file": file, "follow": call.given.follow, "tail": tail})
    while True:
        signals.check()
        frame = inbox.get(0.1)
        kind = frame[1].get("k") if frame else ""
        if kind == "log" and call.given.raw:
            call.terminal.raw(frame[2])
        elif kind == "log":
            for line in lines.feed(frame[2]):
                call.terminal.line(line)
        elif kind == "closed" and frame:
            fix = "inv logs --files lists what there is, when the node answers"
            raise Unreachable(f"log/{file} has come only in part: {frame[1]['why']}", fix, fleet.name(node))
        elif kind == "end":
            break
    for line in lines.end():
        call.terminal.line(line)
