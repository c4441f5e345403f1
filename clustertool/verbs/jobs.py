"""inv jobs: the jobs that the nodes know, newest first; and how every other verb picks the job it is about."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from clustertool.errors import NotFound, UsageError, raise_all
from clustertool.verbs import interrupts
from clustertool.verbs.call import JOB, JSON, PLACES, Call, verb

_FIX = "inv jobs lists the jobs"


@verb(JOB, PLACES, JSON)
def jobs(call: Call) -> None:
    """List the jobs on the cluster."""
    from clustertool.verbs import load

    cluster = load.cluster(call, start_local=False)
    with fleet_of(cluster) as fleet:
        found = merged(fleet.ask_all({"q": "jobs", "job": call.given.job}).ok)
        if call.json:
            call.answer({"jobs": found, "unreachable": {fleet.name(node): e.what for node, e in fleet.failed.items()}})
        else:
            from clustertool.show.status import jobs_table

            jobs_table([{**job, "nodes": job["total"], "exit": job["code"]} for job in found], call.terminal)
        failed(fleet)


def fleet_of(cluster: Any) -> Any:
    """An open fleet, closed by `with`."""
    from clustertool.reach.fleet import Fleet

    return Fleet(cluster, interrupts.check, person=interrupts.User()).open()


def failed(fleet: Any) -> None:
    """Nodes that did not answer: the answer stands, the exit code says that it is not whole."""
    raise_all(list(fleet.failed.values()))


def merged(answers: Mapping[int, Mapping[str, Any]]) -> list[dict[str, Any]]:
    """All nodes' summaries -> one entry a job, newest first. The worst state is the job's, a verdict beats a guess."""
    by_job: dict[str, list[Mapping[str, Any]]] = {}
    for answer in answers.values():
        for summary in answer["jobs"]:
            by_job.setdefault(str(summary["id"]), []).append(summary)
    found = [_merge(job, parts) for job, parts in by_job.items()]
    return sorted(found, key=lambda job: (job["created"] or 0, job["id"]), reverse=True)


def _merge(job: str, parts: list[Mapping[str, Any]]) -> dict[str, Any]:
    states = [str(part["state"]) for part in parts]
    ended = [part for part in parts if part["code"] is not None]
    state = "running" if "running" in states else str(ended[0]["state"]) if ended else "lost"
    first = ended[0] if ended and state != "running" else parts[0]
    return {
        "id": job,
        "state": state,
        "code": first["code"] if state != "running" else None,
        "reason": first["reason"],
        "created": parts[0]["created"],
        "owner": parts[0]["owner"],
        "mode": parts[0]["mode"],
        "command": parts[0]["command"],
        "total": len(parts[0]["nodes"] or ()) or len(parts),
        "seen_on": sorted(int(part["node"] or 0) for part in parts),
    }


def attach_to(fleet: Any, prefix: str) -> dict[str, Any]:
    """The job a verb is about, as pick() does, and the fleet becomes its nodes, numbered as the job numbers them."""
    answers = _answers(fleet, prefix)
    job = _picked(merged(answers), prefix, running=False)
    places, names = where(job["id"], answers)
    if names:
        fleet.take(places, names)
    return job


def pick(fleet: Any, prefix: str, running: bool = False) -> dict[str, Any]:
    """The job named by a unique prefix, the newest, or the only running one. Raises NotFound, UsageError."""
    return _picked(merged(_answers(fleet, prefix)), prefix, running)


def where(job: str, answers: Mapping[int, Mapping[str, Any]]) -> tuple[dict[int, int], list[str]]:
    """{node as the job numbers it: agent that has its record}, and the names of all its nodes: a job may have had
    a part of HOSTS only, or other HOSTS."""
    places: dict[int, int] = {}
    names: list[str] = []
    for agent, answer in answers.items():
        for summary in answer["jobs"]:
            if summary["id"] == job:
                places.setdefault(int(summary["node"] or 0), agent)
                names = names or [str(name) for name in summary["nodes"] or ()]
    return places, names


def _answers(fleet: Any, prefix: str) -> dict[int, Any]:
    answers: dict[int, Any] = fleet.ask_all({"q": "jobs", "job": prefix}).ok
    if not answers:
        raise_all(list(fleet.failed.values()))
    return answers


def _picked(found: list[dict[str, Any]], prefix: str, running: bool) -> dict[str, Any]:
    exact = [job for job in found if job["id"] == prefix]
    if exact:
        return exact[0]
    if prefix:
        if not found:
            raise NotFound(f"no job {prefix!r} on this cluster", _FIX)
        if len(found) > 1:
            raise UsageError(f"--job {prefix!r} is not unique: {_names(found)}", "write more of it")
        return found[0]
    if running:
        return _only_running(found)
    if not found:
        raise NotFound("no job on this cluster", "inv run --workspace ./job starts one")
    return found[0]


def _only_running(found: list[dict[str, Any]]) -> dict[str, Any]:
    running = [job for job in found if job["state"] == "running"]
    if len(running) > 1:
        raise UsageError(f"several jobs run: {_names(running)}", "name one with --job, or end all with --all")
    if not running:
        raise NotFound("no job runs", "")
    return running[0]


def _names(found: Iterable[Mapping[str, Any]]) -> str:
    return ", ".join(str(job["id"]) for job in found)
