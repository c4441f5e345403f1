"""inv grow adds hosts to an elastic job that runs, or starts nodes of it again that were lost."""

from __future__ import annotations

from clustertool.actions.find_jobs import attach_to
from clustertool.engines import registry
from clustertool.errors import UsageError
from clustertool.model.config.hostfile import hosts_of, means
from clustertool.verbs.jobs import opened
from clustertool.verbs.verb import Call


def grow(call: Call) -> None:
    asked = hosts_of(named(call), "--host")
    with opened(call, newest=True) as engine:
        conf = engine.fleet.cluster.hosts
        hosts = [next((known for known in conf if means(one, known)), one) for one in asked]
        job = attach_to(engine, call.given.job, running=True)["id"]
        found = registry.grow(engine, job, hosts)
    for name, text in found.items():
        call.terminal.line(f"job {job}: {name} {text}")
    if call.json:
        call.answer({"job": job, "hosts": dict(found)})


def named(call: Call) -> tuple[str, ...]:
    """List the hosts of --host, of which one may have commas. Raises UsageError."""
    hosts = tuple(dict.fromkeys(part.strip() for text in call.given.host for part in text.split(",") if part.strip()))
    if not hosts:
        raise UsageError("no host is named", "name it: --host [user@]host[:port]")
    return hosts
