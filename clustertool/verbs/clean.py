"""inv clean removes the directories of finished jobs, and never those of a running job."""

from __future__ import annotations

import re

from clustertool.errors import PreflightError, UsageError, raise_all
from clustertool.model.quantities import human_bytes
from clustertool.model.wire.messages import CLEAN
from clustertool.show.table import count
from clustertool.verbs import load_config
from clustertool.verbs.jobs import fleet_of, pick
from clustertool.verbs.verb import Call

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def clean(call: Call) -> None:
    """Remove finished jobs' directories from all nodes."""
    age = _age(call.given.older_than)
    if not call.given.job and not call.given.older_than:
        raise UsageError("clean needs to know what to remove", "give --job J, or --older-than 7d")
    cluster = load_config.cluster(call, start_local=False)
    with fleet_of(cluster) as fleet:
        job = pick(fleet, call.given.job)["id"] if call.given.job else ""
        request = CLEAN({"job": job, "exact": bool(job), "older_than": age, "dry": call.given.dry})
        answers = fleet.ask_all(request, timeout=600)
        removed = sorted({name for answer in answers.values() for name in answer["removed"]})
        running = sorted({name for answer in answers.values() for name in answer["running"]})
        freed = sum(answer["freed"] for answer in answers.values())
        kept = {fleet.name(node): answer["kept"] for node, answer in answers.items() if answer["kept"]}
        if job and running:
            raise UsageError(f"job {job} runs", f"inv stop --job {job} first")
        verb_ = "would remove" if call.given.dry else "removed"
        call.terminal.line(f"{verb_} {count(len(removed), 'job')}{'' if call.given.dry else ', ' + human_bytes(freed)}")
        for name in removed:
            call.terminal.line(f"  {name}")
        if call.json:
            call.answer({"removed": removed, "running": running, "freed": freed, "kept": kept})
        refused = [
            PreflightError(f"job {name}: {why[0]}", why[1], node) for node in kept for name, why in kept[node].items()
        ]
        raise_all([*refused, *fleet.failed.values()])


def _age(text: str) -> float:
    """ "7d" -> seconds."""
    if not text:
        return 0.0
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", text)
    if not match:
        raise UsageError(f"--older-than {text!r}", "a number and s, m, h, d or w: 7d")
    return float(match.group(1)) * _UNITS[match.group(2)]
