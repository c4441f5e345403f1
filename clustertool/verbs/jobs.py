"""inv jobs lists the jobs of the nodes, newest first. The other verbs select their job with this module."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TypedDict

from clustertool.errors import NotFound, PreflightError, UsageError, raise_all
from clustertool.fleet.fleet import Fleet
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.job.node_status import NodePart, read_part
from clustertool.model.job.state import decide
from clustertool.model.job.state_names import JobState
from clustertool.model.wire.agent_answers import JobsAnswer, JobSummary, StatusAnswer
from clustertool.model.wire.messages import LIST_JOBS
from clustertool.show.status_view import jobs_table, start_text
from clustertool.verbs import load_config, signals
from clustertool.verbs.verb import Call, User

_FIX = "inv jobs lists the jobs"


class ListedJob(TypedDict):
    """One job as all nodes together know it. `total`: its nodes; `seen_on`: those that have a record."""

    id: str
    state: JobState
    code: int | None
    reason: str
    created: float | None
    owner: str | None
    mode: str | None
    command: str | None
    total: int
    seen_on: list[int]
    part: NodePart


def jobs(call: Call) -> None:
    """List the jobs on the cluster."""
    cluster = load_config.cluster(call, start_local=False)
    with fleet_of(cluster) as fleet:
        found = merged(ask_jobs(fleet, call.given.job))
        if call.json:
            away = {fleet.name(node): e.what for node, e in fleet.failed.items()}
            call.answer({"jobs": [_as_json(job) for job in found], "unreachable": away})
        else:
            jobs_table([{**job, "nodes": job["total"], "exit": job["code"]} for job in found], call.terminal)
            for job in found:
                if job["state"] is JobState.UNKNOWN:
                    call.terminal.warn(f"job {job['id']}: unknown, still running? {job['reason']}")
                elif job["state"] is JobState.STARTING:
                    call.terminal.note(f"job {job['id']}: {start_text(job['part'].start)}")


def _as_json(job: ListedJob) -> dict[str, object]:
    """The documented fields. The reason of a job that is starting is made here."""
    part = job["part"]
    found = {name: value for name, value in job.items() if name != "part"}
    return {**found, "reason": part.reason or start_text(part.start)}


@contextmanager
def fleet_of(cluster: Cluster, whole: bool = True, lag: float | None = None) -> Iterator[Fleet]:
    """An open fleet. After the verb has printed its answer, failures of nodes are raised, since the answer is not complete.

    whole=False: only failures of nodes that logged in and did not answer, if the verb does not need all nodes of conf.py.
    lag: see Fleet.open.
    """
    with Fleet(cluster, signals.check, person=User()).open(lag=lag) as fleet:
        yield fleet
        raise_all(list((fleet.failed if whole else fleet.silent).values()))


def doubt(fleet: Fleet, job: str, answers: Mapping[int, StatusAnswer]) -> None:
    """A node that answered that it cannot know what became of a job has failed to answer, for the exit code."""
    for node, answer in answers.items():
        if answer.get("unknown"):
            what = f"job {job}: unknown, still running? {answer['unknown']}"
            fleet.failed[node] = PreflightError(what, "check the node that is named there", fleet.name(node))


def ask_jobs(fleet: Fleet, prefix: str, timeout: float | None = 60.0) -> dict[int, JobsAnswer]:
    """What the nodes know of the jobs whose id begins so."""
    return fleet.ask_all(LIST_JOBS({"job": prefix}), timeout)


def merged(answers: Mapping[int, JobsAnswer]) -> list[ListedJob]:
    """All nodes' summaries -> one entry a job, newest first. The worst state is the job's, a verdict beats a guess."""
    found = [_merge(job, list(parts.values())) for job, parts in listings(answers).items()]
    return sorted(found, key=lambda job: (job["created"] or 0, job["id"]), reverse=True)


def listings(answers: Mapping[int, JobsAnswer]) -> dict[str, dict[int, JobSummary]]:
    """All nodes' summaries -> {job: {agent: its summary}}. An agent lists a job once; what it adds is left out."""
    found: dict[str, dict[int, JobSummary]] = {}
    for agent, answer in answers.items():
        for summary in answer["jobs"]:
            found.setdefault(str(summary["id"]), {}).setdefault(agent, summary)
    return found


def _merge(job: str, parts: list[JobSummary]) -> ListedJob:
    """One entry of the nodes' parts of a job. A node can pretend to be that of the lead."""
    part = decide(read_part(part) for part in parts)
    return {
        "id": job,
        "state": part.state,
        "code": part.code,
        "reason": part.reason,
        "created": parts[0]["created"],
        "owner": parts[0]["owner"],
        "mode": parts[0]["mode"],
        "command": parts[0]["command"],
        "total": len(_nodes(parts)) or len(parts),
        "seen_on": sorted(int(part["node"] or 0) for part in parts),
        "part": part,
    }


def attach_to(fleet: Fleet, prefix: str) -> ListedJob:
    """The job a verb is about, as pick() does, and the fleet becomes its nodes, numbered as the job numbers them."""
    answers = ask_jobs(fleet, prefix)
    job = choose(fleet, answers, prefix)
    places, names = where(listings(answers)[job["id"]], answers, fleet.cluster.hosts)
    if names:
        fleet.take(places, names)
    return job


def require_known(job: ListedJob) -> None:
    """Raise PreflightError for a job that cannot be followed, as the nodes do not know what became of it."""
    if job["state"] is JobState.UNKNOWN:
        what = f"job {job['id']}: unknown, still running? {job['reason']}"
        raise PreflightError(what, "check the node that is named there")


def pick(fleet: Fleet, prefix: str) -> ListedJob:
    """The job named by a unique prefix, or the newest. Raises NotFound, UsageError."""
    return choose(fleet, ask_jobs(fleet, prefix), prefix)


def choose(fleet: Fleet, answers: Mapping[int, JobsAnswer], prefix: str, running: bool = False) -> ListedJob:
    """The same, or the only running one, of answers that are there. Where nodes are missing, their failures are raised
    instead of NotFound."""
    try:
        return _picked(merged(answers), prefix, running)
    except NotFound:
        raise_all(list(fleet.failed.values()))
        raise


def where(
    listed: Mapping[int, JobSummary], answers: Mapping[int, JobsAnswer], hosts: Sequence[Host]
) -> tuple[dict[int, int], list[str]]:
    """{node as a job numbers it: agent that has its record}, and the names of all its nodes: a job may have had
    a part of HOSTS only, or other HOSTS.

    `listed`: {agent: summary of the job}. `answers`: of all agents that answered. A node may claim any number. So a host that
    conf.py names as the job does has the node of that name. A claim counts only for a name that is not in conf.py,
    or whose host answered that it does not have the job.
    """
    names = _nodes(listed.values())
    ours = {host.name: host.index for host in hosts}
    places = {node: ours[name] for node, name in enumerate(names) if ours.get(name) in listed}
    taken = set(places.values())
    for agent, summary in listed.items():
        node = int(summary["node"] or 0)
        silent = node < len(names) and names[node] in ours and ours[names[node]] not in answers
        if agent not in taken and node not in places and not silent:
            places[node] = agent
    return places, names


def _nodes(parts: Iterable[JobSummary]) -> list[str]:
    """The names of a job's nodes, as most of the nodes that name them do."""
    votes = Counter(tuple(str(name) for name in part["nodes"]) for part in parts if part["nodes"])
    return list(votes.most_common(1)[0][0]) if votes else []


def _picked(found: list[ListedJob], prefix: str, running: bool) -> ListedJob:
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


def _only_running(found: list[ListedJob]) -> ListedJob:
    running = [job for job in found if job["part"].may_run and job["state"] is not JobState.UNKNOWN]
    if len(running) > 1:
        raise UsageError(f"several jobs run: {_names(running)}", "name one with --job, or end all with --all")
    unknown = [job for job in found if job["state"] is JobState.UNKNOWN]
    if unknown and not running:
        what = f"no job is known to run, and these may: {_names(unknown)}"
        raise PreflightError(what, "inv jobs shows why that is not known; inv stop --job J tries to stop one")
    if not running:
        raise NotFound("no job runs", "")
    return running[0]


def _names(found: Iterable[ListedJob]) -> str:
    return ", ".join(str(job["id"]) for job in found)
