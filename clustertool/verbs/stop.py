"""inv stop: end a job on every node, from any laptop, and prove that nothing of it lives."""

from __future__ import annotations

from typing import Any

from clustertool.errors import NotFound, Survivors, Unreachable, UsageError, as_one, raise_all
from clustertool.verbs.call import JOB, JSON, PLACES, Call, Opt, verb


@verb(
    JOB, Opt("all", "all running jobs of yours", False), Opt("grace", "seconds between TERM and KILL"),
    Opt("force", "KILL at once", False), Opt("dry", "only say what would be stopped", False), PLACES, JSON,
)  # fmt: skip
def stop(call: Call) -> None:
    """End a job on all nodes and prove it."""
    from clustertool.show.errors import exit_json
    from clustertool.verbs import load
    from clustertool.verbs.jobs import failed, fleet_of

    if call.given.all and call.given.job:
        raise UsageError("--all and --job together", "give one of them")
    cluster = load.cluster(call, start_local=False)
    grace = _grace(call, cluster.grace)
    with fleet_of(cluster) as fleet:
        wanted = _wanted(call, fleet)
        if call.given.dry or not wanted:
            call.terminal.line(f"would stop: {', '.join(wanted)}" if wanted else "nothing to stop")
            if call.json:
                done = exit_json(as_one(list(fleet.failed.values())), "tool")
                call.answer({"would_stop": wanted} if call.given.dry else {"jobs": {}, "exit": done})
            failed(fleet)
            return
        _tell(call, {job: stop_job(fleet, job, grace, call.given.force) for job in wanted})


def _grace(call: Call, default: float) -> float:
    text = call.given.grace
    try:
        grace = float(text) if text else default
    except ValueError:
        grace = -1.0
    if grace < 0:
        raise UsageError(f"--grace {text!r}", "a number of seconds")
    return grace


def _wanted(call: Call, fleet: Any) -> list[str]:
    from clustertool.verbs.jobs import pick

    if call.given.all:
        return unfinished(fleet)
    if call.given.job:
        return [pick(fleet, call.given.job)["id"]]
    try:
        return [pick(fleet, "", running=True)["id"]]
    except NotFound:
        return []


def unfinished(fleet: Any) -> list[str]:
    """Jobs that may have processes: the running ones, and those that some node calls lost."""
    from clustertool.verbs.jobs import merged

    return [job["id"] for job in merged(fleet.ask_all({"q": "jobs"}).ok) if job["state"] in ("running", "lost")]


def stop_job(fleet: Any, job: str, grace: float, force: bool) -> dict[str, Any]:
    """Each of the job's nodes by name -> its answer, or why there is none."""
    from clustertool.engines import ENGINES
    from clustertool.verbs.jobs import where

    how = {"by": "inv stop", "code": 143, "grace": grace, "force": force}
    phase = ENGINES["ssh"]().stop(len(fleet.cluster.hosts), job, how)
    places, names = where(job, fleet.ask_all({"q": "jobs", "job": job}).ok)
    gathered = fleet.ask(phase.requests, timeout=grace + 30)
    answers = {**gathered.ok, **gathered.failed, **fleet.failed}
    ours = {host.name: host.index for host in fleet.cluster.hosts}
    missing = Unreachable("is no host of conf.py (any more)")
    nodes = {name: places.get(node, ours.get(name, -1)) for node, name in enumerate(names)} or ours
    return {name: answers.get(agent, missing) for name, agent in nodes.items()}


def _tell(call: Call, answers: dict[str, dict[str, Any]]) -> None:
    """Per node and job what became of it; 76 for survivors, 69 for nodes that did not answer."""
    from clustertool.show.errors import exit_json
    from clustertool.show.table import gather
    from clustertool.verbs.follow import told

    table = {job: {name: told(answer, job) for name, answer in nodes.items()} for job, nodes in answers.items()}
    errors: list[Any] = []
    for job, nodes in table.items():
        for names, text in gather(nodes):
            call.terminal.line(f"job {job}: {names}: {text}")
        for name, text in nodes.items():
            if text.startswith("survivors"):
                errors.append(Survivors(f"job {job}: {text}", "inv stop --force tries again", name))
            elif text.startswith("did not answer"):
                fix = "its processes may still run there: stop again when the node is back"
                errors.append(Unreachable(f"job {job}: {text}", fix, name))
    errors = [error for error in errors if isinstance(error, Survivors)] or errors
    if call.json:
        call.answer({"jobs": table, "exit": exit_json(as_one(errors), "tool")})
    raise_all(errors)
