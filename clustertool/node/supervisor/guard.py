"""The guard runs in its own session. If the supervisor dies or stops its heartbeat, the guard ends the job on this node.

It reports to the lead first, in the supervisor's place, so that the others need not wait for the loss timeout.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
from typing import TYPE_CHECKING, List

from clustertool.model.wire.lead_messages import Incarnation
from clustertool.node.jobs import descendants, records
from clustertool.node.jobs.termination import Sweep
from clustertool.node.supervisor.coordinator import lead_client
from clustertool.node.system import processes
from clustertool.node.system.process_clock import ProcessClock
from clustertool.node.system.processes import Process

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec

BEAT = 0.5
QUIT = b"Q"
_START = 30.0  # seconds that a supervisor may take to its first beat: a loaded machine starts many at once
_BUSY = 60.0  # the same for one that is ready to run and gets no processor
_REPORT_TIME = 0.5  # seconds that the lead may take to receive the end of a supervisor


def patience(spec: Spec) -> float:
    """Seconds of silence after which supervisor and guard call each other frozen, by the clock of the one that waits."""
    return max(2.0, float(spec["policy"]["loss_timeout"]))


def run(sock: socket.socket, supervisor: Process, spec: Spec, job: int) -> None:
    """Loop until the supervisor sends QUIT or ends. `job` is the job directory's descriptor."""
    processes.set_name("ct-guard")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    clock, received, limit = ProcessClock(), 0.0, max(_START, patience(spec))
    why = ""
    while not why:
        ready, _, _ = select.select([sock], [], [], BEAT)
        now = clock.turn()
        if ready:
            data = _receive(sock)
            if QUIT in data:
                return
            received, limit = now, patience(spec)
            why = "" if data else "died"
        elif now - received > limit and not (now - received < _BUSY and _wants_to_run(supervisor)):
            why = f"did not move for {patience(spec):g} s"
        with contextlib.suppress(OSError):
            sock.send(b"g", socket.MSG_DONTWAIT)
    _take_over(f"the supervisor {why}", supervisor, spec, job)


def _wants_to_run(supervisor: Process) -> bool:
    """It is neither stopped nor asleep: the machine is loaded, or it has much to do."""
    found = processes.stat(supervisor.pid)
    return found is not None and found.start == supervisor.start and found.state == "R"


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(4096)
    except ConnectionError:
        return b""


def _take_over(why: str, supervisor: Process, spec: Spec, job: int) -> None:
    """What a frozen or dying supervisor owns is found below it; what a dead one owned, in its book and by the marker."""
    records.record_loss(job, why)
    _tell_lead(why, supervisor, spec)
    below: List[Process] = processes.descendants(supervisor.pid) if processes.alive(supervisor) else []
    processes.signal_one(supervisor, signal.SIGKILL)
    left = Sweep([*descendants.recorded(job), *below], str(spec["mark"])).end(grace=0.0, force_for=10.0)
    records.record_clean(job, left)


def _tell_lead(why: str, supervisor: Process, spec: Spec) -> None:
    """Before anything is killed: ranks of other nodes that fail because these ranks are missing must not count as culprits."""
    if int(spec["node"]) != int(spec["lead"]["node"]):
        with contextlib.suppress(OSError, ValueError, MemoryError):
            boot, me = processes.boot_id(), processes.identify(os.getpid()) or Process(os.getpid(), 0)
            lead_client.say_gone(spec, Incarnation(boot, *me), Incarnation(boot, *supervisor), why, _REPORT_TIME)
