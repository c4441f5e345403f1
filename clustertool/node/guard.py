"""The guard stands beside the supervisor in its own session: when that one dies or stops beating, it ends the job here."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import time
from typing import Any, Callable, Dict, List

from clustertool.node import files, processes
from clustertool.plan.paths import OURS


def run(sock: socket.socket, supervisor: processes.Process, spec: Dict[str, Any], job: int) -> None:
    """Loop until the supervisor says quit (b"Q") or is gone. `job` is the job directory's descriptor."""
    processes.set_name("ct-guard")
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    patience = max(2.0, float(spec["policy"]["loss_timeout"]))
    heard = time.monotonic()
    while True:
        ready, _, _ = select.select([sock], [], [], 0.5)
        if ready:
            try:
                data = sock.recv(4096)
            except ConnectionError:
                data = b""
            if b"Q" in data:
                return
            if not data:
                return _take_over("the supervisor died", supervisor, spec, job)
            heard = time.monotonic()
        elif time.monotonic() - heard > patience:
            return _take_over(f"the supervisor did not move for {patience:g} s", supervisor, spec, job)
        with contextlib.suppress(OSError):
            sock.send(b"g")


def _take_over(why: str, supervisor: processes.Process, spec: Dict[str, Any], job: int) -> None:
    journal = files.Journal(files.open_append(job, f"{OURS}/events.jsonl"))
    journal.write({"t": time.time(), "e": "supervisor-lost", "why": why})
    processes.signal_one(supervisor, signal.SIGKILL)
    left = end_all(seen(job), str(spec["mark"]), {os.getpid()}, grace=0.0, force_for=10.0)
    journal.write({"t": time.time(), "e": "clean", "survivors": left})
    journal.close()


def seen(job: int) -> List[processes.Process]:
    """Every descendant the supervisor ever recorded."""
    found = []
    with contextlib.suppress(OSError):
        for line in files.read(job, f"{OURS}/seen").splitlines():
            words = line.split()
            if len(words) == 2 and all(word.isdigit() for word in words):
                found.append(processes.Process(int(words[0]), int(words[1])))
    return found


def end_all(
    known: List[processes.Process], mark: str, spare: "set[int]", grace: float, force_for: float,
    poll: "Callable[[], None]" = lambda: None,
) -> List[str]:
    """TERM, `grace` seconds, then KILL until none lives or `force_for` seconds are over. Returns the survivors in words."""
    if grace > 0:
        for process in living(known, mark, spare):
            processes.signal_one(process, signal.SIGTERM)
        end = time.monotonic() + grace
        while living(known, mark, spare) and time.monotonic() < end:
            poll()
            time.sleep(0.02)
    end = time.monotonic() + force_for
    left = processes.end_now(known, mark, spare)
    while (left or living(known, mark, spare)) and time.monotonic() < end:
        poll()
        time.sleep(0.02)
        left = processes.end_now(known, mark, spare)
    return [processes.describe(process) for process in living(known, mark, spare)]


def living(known: List[processes.Process], mark: str, spare: "set[int]") -> List[processes.Process]:
    """What lives of the recorded and the marked processes."""
    found = {process.pid: process for process in [*known, *processes.marked(mark)] if processes.alive(process)}
    return [process for pid, process in found.items() if pid not in spare]
