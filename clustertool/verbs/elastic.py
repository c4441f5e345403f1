"""inv grow adds hosts to an elastic job that runs, or starts its lost nodes again. inv shrink releases nodes of it.

The next epoch begins with the hosts that were added, and without those that were released.
"""

from __future__ import annotations

from clustertool.actions.find_jobs import attach_to
from clustertool.engines import base
from clustertool.errors import PreflightError, UsageError
from clustertool.fleet.fleet import Fleet
from clustertool.model.config.folded_names import fold
from clustertool.model.config.hostfile import hosts_of, matches_entry
from clustertool.model.config.hosts import Host
from clustertool.model.hints import PROGRAM
from clustertool.model.wire.messages import LEAVE
from clustertool.show.program_name import commanded
from clustertool.verbs.jobs import open_engine
from clustertool.verbs.verb import Call

_RELEASE_SECONDS = 90.0  # seconds for the end of the epoch, and for the node to leave


def grow(call: Call) -> None:
    """Add the hosts of --host to a running elastic job, or start its lost nodes again, and print the result of each.

    A host that matches one of HOSTS has the settings of that. Raises UsageError without a host, and the errors of base.grow().
    """
    asked = hosts_of(_named_hosts(call), "--host")
    with open_engine(call, newest=True) as engine:
        conf = engine.fleet.cluster.hosts
        hosts = [next((known for known in conf if matches_entry(one, known)), one) for one in asked]
        job = attach_to(engine, call.given.job, running=True)["id"]
        found = base.grow(engine, job, hosts)
    for name, text in found.items():
        call.terminal.line(f"job {job}: {name} {text}")
    call.answer({"job": job, "hosts": dict(found)})


def _named_hosts(call: Call) -> tuple[str, ...]:
    """List the hosts of --host, each once; a value may have several with commas. Raises UsageError if there are none."""
    hosts = tuple(dict.fromkeys(part.strip() for text in call.given.host for part in text.split(",") if part.strip()))
    if not hosts:
        raise UsageError("no host is named", "name it: --host [user@]host[:port]")
    return hosts


# -- shrink ------------------------------------------------------------------------------------------------------------


def shrink(call: Call) -> None:
    """Release the hosts of --host from a running elastic job, wait up to 90 s, and print the result of each.

    Raises UsageError for a host that is no node of the job, the errors of nodes that do not answer, and PreflightError, after
    the results, if some still take part.
    """
    asked = hosts_of(_named_hosts(call), "--host")
    with open_engine(call, newest=True) as engine:
        fleet = engine.fleet
        job = attach_to(engine, call.given.job, running=True)["id"]
        nodes = [_node_of_host(fleet, job, host) for host in asked]
        request = LEAVE({"job": job, "by": f"{commanded()} shrink", "seconds": _RELEASE_SECONDS})
        answers = fleet.ask(dict.fromkeys(nodes, request), _RELEASE_SECONDS + fleet.cluster.grace + 10.0).all()
        left = {fleet.name(node): answer["left"] for node, answer in answers.items()}
    for name, gone in left.items():
        call.terminal.line(f"job {job}: {name} {'has left' if gone else 'takes part still'}")
    call.answer({"job": job, "hosts": {name: "has left" if gone else "takes part" for name, gone in left.items()}})
    waiting = [name for name, gone in left.items() if not gone]
    if waiting:
        what = f"{fold(waiting)}: released, and the epoch has not ended within {_RELEASE_SECONDS:g} s"
        raise PreflightError(what, f"{PROGRAM} status --job {job} shows what it waits for")


def _node_of_host(fleet: Fleet, job: str, host: Host) -> int:
    """Return the number of a host's node in the job, to which there is a connection.

    Raises UsageError if it is not one of the job's nodes, or the error of its connection.
    """
    found = next((known for known in fleet.cluster.hosts if matches_entry(host, known)), None)
    if found is None:
        fix = f"one of {', '.join(known.name for known in fleet.cluster.hosts[:8])}"
        raise UsageError(f"{host.host} is no node of job {job}", fix)
    if found.index not in fleet.agents:
        raise fleet.failed[found.index]
    return found.index
