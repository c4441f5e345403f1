"""Stop proves itself: ask the supervisor, and whatever it does, end this job's processes here until none lives."""

from __future__ import annotations

import contextlib
import json
import os
import time
from typing import Any, Dict, List, Mapping

from clustertool.node import files, processes
from clustertool.node.guard import end_all, living, seen
from clustertool.node.records import Record
from clustertool.plan.paths import OURS

_SLACK = 1.0  # for a supervisor that is at work to finish its part


def stop(record: Record, by: str, code: int, grace: float, force: bool) -> Dict[str, Any]:
    """{"state": "clean" | "survivors" | "ended already", "survivors": [...], "killed": n} for this node."""
    job = files.open_job_dir(record.paths.dir)
    try:
        spec = json.loads(files.read(job, f"{OURS}/spec.json"))
    except (OSError, ValueError):
        return {"state": "clean", "survivors": []}  # placed, never started
    try:
        caretakers = [p for p in (record.process("supervisor"), record.process("guard")) if p and processes.alive(p)]
        known = _same_boot(record, seen(job))
        if not caretakers and not living(known, str(spec["mark"]), {os.getpid()}):
            return {"state": "ended already", "survivors": []}
        _ask(record, by, code, grace, force)
        return _finish(record, spec, job, caretakers, 0.0 if force else grace)
    finally:
        os.close(job)


def _same_boot(record: Record, known: List[processes.Process]) -> List[processes.Process]:
    return known if record.process("supervisor") else []


def _ask(record: Record, by: str, code: int, grace: float, force: bool) -> None:
    """Through the fifo; nobody reads it when the supervisor is gone, and then we do all of it ourselves."""
    line = json.dumps({"m": "stop", "by": by, "code": code, "grace": grace, "force": force}).encode() + b"\n"
    with contextlib.suppress(OSError):
        fd = os.open(record.paths.control, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        try:
            os.write(fd, line)
        finally:
            os.close(fd)


def _finish(
    record: Record, spec: Mapping[str, Any], job: int, caretakers: List[processes.Process], grace: float
) -> Dict[str, Any]:
    """Wait for the supervisor's own end of things, then take over."""
    mark, spare = str(spec["mark"]), {os.getpid()}
    end = time.monotonic() + grace + _SLACK
    while time.monotonic() < end:
        if _told_clean(record) and not living(seen(job), mark, spare):
            _let_go(caretakers)
            return {"state": "clean", "survivors": []}
        if not any(processes.alive(p) for p in caretakers):
            break
        time.sleep(0.02)
    if not any(processes.alive(p) for p in caretakers) and grace > 0:
        left = end_all(seen(job), mark, spare, grace=grace, force_for=5.0)
    else:  # a frozen supervisor would start nothing again; end it before what it owns
        for process in caretakers:
            processes.signal_one(process, 9)
        left = end_all([*seen(job), *caretakers], mark, spare, grace=0.0, force_for=5.0)
    return {"state": "survivors" if left else "clean", "survivors": left}


def _let_go(caretakers: List[processes.Process]) -> None:
    """Nothing of the job lives; its supervisor and guard leave once the lead has spoken, a moment later."""
    end = time.monotonic() + _SLACK
    while any(processes.alive(p) for p in caretakers) and time.monotonic() < end:
        time.sleep(0.01)


def _told_clean(record: Record) -> bool:
    """The supervisor has ended everything, said so, and started nothing since (a restart does)."""
    for event in reversed(record.events()):
        if event["e"] in ("clean", "ended"):
            return True
        if event["e"] in ("started", "supervisor"):
            return False
    return False
