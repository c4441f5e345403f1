"""inv shrink releases nodes of an elastic job that runs: the next epoch begins without them."""

from __future__ import annotations

from clustertool.actions.find_jobs import attach_to
from clustertool.errors import PreflightError, UsageError
from clustertool.fleet.fleet import Fleet
from clustertool.model.config.folded_names import fold
from clustertool.model.config.hostfile import hosts_of, means
from clustertool.model.config.hosts import Host
from clustertool.model.hints import PROGRAM
from clustertool.model.wire.messages import LEAVE
from clustertool.show.program_name import commanded
from clustertool.verbs.elastic.grow import named
from clustertool.verbs.jobs import opened
from clustertool.verbs.verb import Call

_WAIT = 90.0  # seconds for the end of the epoch, and for the node to leave


def shrink(call: Call) -> None:
    asked = hosts_of(named(call), "--host")
    with opened(call, newest=True) as engine:
        fleet = engine.fleet
        job = attach_to(engine, call.given.job, running=True)["id"]
        nodes = [_node(fleet, job, host) for host in asked]
        request = LEAVE({"job": job, "by": f"{commanded()} shrink", "seconds": _WAIT})
        answers = fleet.ask(dict.fromkeys(nodes, request), _WAIT + fleet.cluster.grace + 10.0).all()
        left = {fleet.name(node): answer["left"] for node, answer in answers.items()}
    for name, gone in left.items():
        call.terminal.line(f"job {job}: {name} {'has left' if gone else 'takes part still'}")
    if call.json:
        call.answer({"job": job, "hosts": {name: "has left" if gone else "takes part" for name, gone in left.items()}})
    waiting = [name for name, gone in left.items() if not gone]
    if waiting:
        what = f"{fold(waiting)}: released, and the epoch has not ended within {_WAIT:g} s"
        raise PreflightError(what, f"{PROGRAM} status --job {job} shows what it waits for")


def _node(fleet: Fleet, job: str, host: Host) -> int:
    """Find the node of the job that the host is. Raises UsageError for none, and why it cannot be reached."""
    found = next((known for known in fleet.cluster.hosts if means(host, known)), None)
    if found is None:
        fix = f"one of {', '.join(known.name for known in fleet.cluster.hosts[:8])}"
        raise UsageError(f"{host.host} is no node of job {job}", fix)
    if found.index not in fleet.agents:
        raise fleet.failed[found.index]
    return found.index
