"""Events are what happened on a node, one JSON object a line; state.py folds them into the state of the job.

Every event has `t` (the node's clock, seconds) and `e`, its kind:

    job          id, node, name, nodes, created, owner, mode, command, processes, skew   first line of every events file;
                 skew: seconds by which this clock was ahead of the laptop's, 0 if they were few
                 places: of the ranks of all nodes, see model/job/rank_places.py; records of older versions have none
    supervisor   pid, start, boot                  guard / gauge   pid, start
    started      role, rank, pid, start, attempt   listening  role, rank
    elsewhere    role, rank, listens, endpoint     a pserver listens where nobody looks for it
    exited       role, rank, code, signal, stopped, note, attempt   `stopped`: after the supervisor had signalled it;
                 error, consequence        of a failure: a number made of the last line of its log without its digits, and
                                           whether the line is about a lost connection
                 cpu, memory               seconds and peak bytes of it and the children it waited for
    frozen / thawed      role, rank                a rank was stopped by SIGSTOP, or goes on
    disk         full, root                        the disk of ROOT_DIR is full, or has room again
    phase        name, why, culprits, attempt      the lead: joining, pserver, trainer, ending; of an ending because of
                                                   failures, these in words and as [role, rank], the first one first
    lost         node, why, ranks                  the lead gave a node up; ranks: what it knew of them:
                                                   [role, rank, epoch, step, time of the last output], the lead's clock
    absent       nodes, endpoint, seconds          these nodes never connected to the lead
    unconnected  endpoint, errno, why, since, again   this node has no connection to the lead since then, and the newest
                                               cause; again: it had one before
    connected                                      it has one again
    restart      attempt, pause                    the lead: all starts again, after so many seconds
    stopping     why, by                           the supervisor ends its processes
    clean        survivors                         nothing of the job lives here (or these do)
    supervisor-lost      why                       guard or stop ended this node's processes
    verdict      state, code, source, reason, culprits, victims, node         the lead's; also in
    ended        the same                          every node's last word
"""

from __future__ import annotations

import json
from typing import Any, Iterable, Mapping

Event = Mapping[str, Any]


def read_events(lines: Iterable[bytes]) -> Iterable[Event]:
    """Lines of an events file; a torn last line (a full disk, a crash) is skipped."""
    for line in lines:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict):
            yield event
