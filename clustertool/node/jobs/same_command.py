"""This module admits one of several equal commands that are typed on the nodes of a job: each of them would start a whole job.

fleetrun's command line with --ips is typed on every node. Here it starts all nodes, so the second one must not start. Each
command asks the first node twice: when it knows the nodes, and right before it starts. Entries are on node-local storage, like
claims of ports. An entry lasts as long as the agent of its command; then the records show the job.

| the other command | this one, at first | this one, before its start |
| --- | --- | --- |
| its job runs | refused | refused |
| it has asked for its start | refused | refused |
| it has asked once, and is earlier in the list of nodes | waits for its turn | refused |
| it has asked once, and is later in the list | waits for its turn | starts |
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, List, Tuple

from clustertool.node.jobs.records import find
from clustertool.node.system import private_directory, processes
from clustertool.node.system.node_context import NodeContext

if TYPE_CHECKING:
    from clustertool.model.wire.agent_answers import SameCommandAnswer
    from clustertool.model.wire.agent_requests import SameCommandRequest

_FILE = "commands.json"
_Entry = Tuple[str, str, int, bool, int, int]  # command, starter, at, start, pid and start time of the agent


def enter(node: NodeContext, request: SameCommandRequest) -> SameCommandAnswer:
    """Enter a command on this node, unless an equal one that was typed on another machine goes before it.

    That is a command whose job runs, that has asked for its start, or that is earlier in the list of nodes when this one asks
    for its start. Answers its starter, and the job if that runs; both are "" if this command was entered. Entries whose agent
    has ended are removed. Raises PreflightError if the file of commands cannot be used.
    """
    command, starter = request["command"], request["starter"]
    own = processes.this_process()
    with private_directory.locked(_FILE) as fd:
        known = [entry for entry in _read_entries(fd) if entry[4:] != tuple(own)]
        entries = [entry for entry in known if processes.alive(processes.Process(*entry[4:]))]
        others = [entry for entry in entries if entry[0] == command and entry[1] != starter]
        for record in find(node.root, node.entry, os.uname().nodename):
            header = record.header
            typed_there = header.get("same_command") == command and header.get("starter") not in (None, "", starter)
            if typed_there and record.part().may_run:
                return {"starter": str(header["starter"]), "job": record.job}
        for _, other, at, starts, _, _ in others:
            if starts or (request["start"] and at < request["at"]):
                return {"starter": other, "job": ""}
        entries.append((command, starter, request["at"], request["start"], *own))
        private_directory.rewrite(fd, json.dumps(entries).encode())
    return {"starter": "", "job": ""}


def _read_entries(fd: int) -> List[_Entry]:
    """Read the entries of the file of commands; [] if it is damaged."""
    try:
        rows = json.loads(private_directory.content(fd) or b"[]")
        return [(str(row[0]), str(row[1]), int(row[2]), bool(row[3]), int(row[4]), int(row[5])) for row in rows]
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError):
        return []
