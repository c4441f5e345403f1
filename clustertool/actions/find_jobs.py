"""This module finds jobs: what the nodes know of jobs, which job is meant, and which node has which part of it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import zip_longest
from typing import TypedDict

from clustertool.engines.base import UNRECORDED, Description, Engine, EngineState, correct_state
from clustertool.errors import ClustertoolError, NodeLost, NotFound, PreflightError, UsageError, raise_all
from clustertool.fleet import this_user
from clustertool.fleet.fleet import Fleet
from clustertool.model.config.folded_names import fold, grouped
from clustertool.model.config.hosts import Host
from clustertool.model.hints import PROGRAM
from clustertool.model.job.job_names import can_mean, find_meant
from clustertool.model.job.node_status import NodePart, read_part
from clustertool.model.job.outcome import COORDINATOR_NODE
from clustertool.model.job.state import decide
from clustertool.model.job.state_names import OUTCOMES, JobState, StartReason
from clustertool.model.wire.agent_answers import JobsAnswer, JobSummary, StatusAnswer
from clustertool.model.wire.messages import LIST_JOBS
from clustertool.show.job_text import remains_text
from clustertool.show.status_view import queue_text

_FIX = f"{PROGRAM} jobs lists the jobs"
Described = Mapping[str, Description]  # by job
_NOTHING: Described = {}
_UNSEEN = (EngineState.QUEUED, EngineState.RUNNING)  # the states in which no node may have a record of a job


class ListedJob(TypedDict):
    """One job as all nodes together know it. `total`: how many nodes it has; `seen_on`: the numbers of those with a record.

    asked: the id of --job-id, "" where the tool made the id; name: the job's name. started: when the first supervisor started;
    ended: when the last node recorded the outcome. Both by the laptop's clock. known: what the engine knows of it; queued: the
    same if it is queued.
    """

    id: str
    asked: str
    name: str
    state: JobState
    code: int | None
    reason: str
    created: float | None
    started: float | None
    ended: float | None
    owner: str | None
    mode: str | None
    command: str | None
    total: int
    seen_on: list[int]
    part: NodePart
    known: Description | None
    queued: Description | None


def record_unknown_end(fleet: Fleet, job: ListedJob, answers: Mapping[int, StatusAnswer]) -> None:
    """Store an error in fleet.failed for each node that answered that it does not know what became of the job.

    Nothing is stored if the engine knows it: see engine_proof().
    """
    for node, answer in answers.items():
        if answer.get("unknown") and engine_proof(fleet, job) is None:
            fleet.failed[node] = unknown_end(job["id"], str(answer["unknown"]), fleet.name(node))


def engine_proof(fleet: Fleet, job: ListedJob) -> Description | None:
    """Return the engine's description of a job if it proves that the job runs or has ended; else None.

    None, too, if agents run on the nodes of the job, and so know more than the engine.
    """
    known = job["known"]
    decided = known is not None and known.state in (EngineState.RUNNING, EngineState.ENDED)
    return known if decided and fleet.engine_end is not None else None


def unknown_end(job: str, why: str, node: str = "") -> PreflightError:
    """Create the error for a job of which the nodes do not know what became of it."""
    return PreflightError(f"job {job}: unknown, still running? {why}", "check the node that is named there", node)


def ask_jobs(fleet: Fleet, prefix: str, timeout: float = 60.0) -> dict[int, JobsAnswer]:
    """Ask all nodes for their records of jobs that `prefix` can mean by id or name, "" for all jobs: {agent: answer}.

    timeout: seconds. fleet.failed gets the errors of the others.
    """
    return fleet.ask_all(LIST_JOBS({"job": prefix}), timeout)


def warn_of_remains(engine: Engine, answers: Mapping[int, JobsAnswer]) -> None:
    """Warn, for each job in the nodes' answers, of its processes that have no supervisor any more; then warn_of_orphans()."""
    for job, parts in summaries_by_job(answers).items():
        left = {engine.fleet.name(agent): part["left"] for agent, part in parts.items() if part.get("left")}
        if left:
            engine.caller.warn(remains_text(job, left))
    warn_of_orphans(engine, answers)


def warn_of_orphans(engine: Engine, answers: Mapping[int, JobsAnswer]) -> None:
    """Warn of processes of jobs that have no record, since their directory was removed or is below another ROOT_DIR.

    There is one warning for each directory and number of processes, with the names of its nodes.
    """
    ours = {job.get("dir") for answer in answers.values() for job in answer["jobs"]}
    found = [(one, engine.fleet.name(agent)) for agent, answer in answers.items() for one in answer.get("orphans", ())]
    for (folder, number), names in grouped(((str(folder), number), name) for (folder, number), name in found).items():
        if folder not in ours:
            what = f"{fold(names)}: {number} left of a job whose directory was removed: {folder}"
            engine.caller.warn(f"{what} ({PROGRAM} stop --all with a conf.py that has its ROOT_DIR ends them)")


def ask_engine(engine: Engine, answers: Mapping[int, JobsAnswer], prefix: str) -> Described:
    """Ask the engine for its descriptions of jobs: of those that the nodes' answers list, and of those that `prefix` can mean.

    If the engine cannot be asked, warn and return {}.
    """
    try:
        found = engine.describe(answers)
    except ClustertoolError as error:
        engine.caller.warn(f"the engine does not answer, queued jobs are not known: {error.what}")
        return {}
    listed = summaries_by_job(answers)
    return {job: one for job, one in found.items() if job in listed or can_mean(prefix, job, one.asked, one.job_name)}


def state_text(known: Description) -> str:
    """Describe as text the state in which an engine has a job: its place in the queue, or the state and the reason."""
    if known.state is EngineState.QUEUED:
        return queue_text(known.reason, known.since, known.expected)
    return str(known.state) + f": {known.reason}" * bool(known.reason)


def merge_answers(answers: Mapping[int, JobsAnswer], known: Described = _NOTHING) -> list[ListedJob]:
    """Merge the answers of all nodes, and what the engine knows (`known`), to one entry for each job, newest first.

    Of the nodes' states the worst one counts, and a recorded outcome before a guess. Jobs without a record are listed if the
    engine has them as queued or running, or knows why they have ended.
    """
    listed = summaries_by_job(answers)
    found = [_merge_summaries(job, list(parts.values()), known.get(job)) for job, parts in listed.items()]
    found += [_entry_without_record(job, one) for job, one in known.items() if _is_listed(one) and job not in listed]
    return sorted(found, key=lambda job: (job["created"] or 0, job["id"]), reverse=True)


def _is_listed(known: Description) -> bool:
    """Check whether a job without a record is listed: its engine has it as queued or running, or knows why it has ended."""
    return known.state in _UNSEEN or known.cause is not None


def summaries_by_job(answers: Mapping[int, JobsAnswer]) -> dict[str, dict[int, JobSummary]]:
    """Convert the nodes' answers to {job: {agent: summary}}. Of several summaries of a job by one agent the first counts."""
    found: dict[str, dict[int, JobSummary]] = {}
    for agent, answer in answers.items():
        for summary in answer["jobs"]:
            found.setdefault(str(summary["id"]), {}).setdefault(agent, summary)
    return found


def _merge_summaries(job: str, parts: list[JobSummary], known: Description | None) -> ListedJob:
    """Merge the nodes' summaries of a job, and what its engine knows, to one entry.

    The worst state, the earliest start and the latest end count; ids, name, owner, mode and command are those of the first
    summary. If the engine has it queued again and no process of it may run, the entry is that of a queued job.
    """
    recorded = [read_part(part) for part in parts]
    over = any(part.state in OUTCOMES for part in recorded)
    part = decide(_correct_part(part, known, over) for part in recorded)
    if part.state is JobState.LOST and known is not None and known.cause is not None:
        part = part._replace(reason=known.cause[0], code=known.cause[1])
    started = [float(t) for t in (one.get("started") for one in parts) if t is not None]
    ended = [float(t) for t in (one.get("ended") for one in parts) if t is not None]
    queued = known if known is not None and known.state is EngineState.QUEUED and not part.may_run else None
    if queued is not None:
        part = NodePart(COORDINATOR_NODE, JobState.QUEUED, reason=queued.reason)
    return {
        "id": job,
        "asked": parts[0].get("asked", ""),
        "name": parts[0].get("name", ""),
        "state": part.state,
        "code": part.code,
        "reason": part.reason,
        "created": parts[0]["created"],
        "started": min(started, default=None) if queued is None else None,
        "ended": max(ended, default=None) if part.state in OUTCOMES else None,
        "owner": parts[0]["owner"],
        "mode": parts[0]["mode"],
        "command": parts[0]["command"],
        "total": len(_node_names(parts)) or (known.nodes if known is not None else 0) or len(parts),
        "seen_on": sorted(int(part["node"] or 0) for part in parts),
        "part": part,
        "known": known,
        "queued": queued,
    }


def _correct_part(part: NodePart, known: Description | None, over: bool) -> NodePart:
    """Return the part of a node, with the state corrected by what the engine knows (correct_state()).

    over: a node has an outcome.
    """
    state = correct_state(part.state, known, over)
    if known is None or state is part.state:
        return part
    return NodePart(part.node, state, reason=known.reason if state is JobState.LOST else "")


def _entry_without_record(job: str, known: Description) -> ListedJob:
    """Build the entry of a job of which no node has a record from the engine's description, with this user as its owner.

    Its state is SUCCEEDED if it has ended with code 0, else what UNRECORDED has for the engine's state.
    """
    ended = known.state is EngineState.ENDED
    code = known.cause[1] if known.cause is not None and ended else None
    state = JobState.SUCCEEDED if code == 0 else UNRECORDED[known.state]
    start = StartReason.JOINING if state is JobState.STARTING else StartReason.NONE
    part = NodePart(COORDINATOR_NODE, state, code, known.reason, start)
    return {
        "id": job,
        "asked": known.asked,
        "name": known.job_name,
        "state": state,
        "code": code,
        "reason": known.reason,
        "created": known.created or known.since or None,
        "started": None,
        "ended": (known.since or None) if ended else None,
        "owner": this_user.name(),
        "mode": None,
        "command": known.command or None,
        "total": known.nodes,
        "seen_on": [],
        "part": part,
        "known": known,
        "queued": known if known.state in _UNSEEN else None,
    }


def attach_to(
    engine: Engine, prefix: str, exact: bool = False, queued: bool = False, running: bool = False
) -> ListedJob:
    """Ask the nodes and the engine for jobs, choose one by choose_job(), and reduce the fleet to the job's nodes.

    The nodes get the numbers that they have in the job. It warns of processes that are left. If no node has a record of the
    job, it raises no_record_error(), or with `queued` returns the job and leaves the fleet as it is. It waits for late nodes of
    a fleet (opened with a lag) only if they can change the choice. prefix, running, exact, and the errors: see choose_job().
    """
    fleet = engine.fleet
    answers = ask_jobs(fleet, prefix)
    if fleet.late and not _is_decided(fleet, answers, prefix):
        fleet.wait_for_late()
        answers = ask_jobs(fleet, prefix)
    warn_of_remains(engine, answers)
    job = choose_job(fleet, answers, prefix, running, exact, ask_engine(engine, answers, prefix))
    if not has_records(job):
        if not queued:
            raise no_record_error(job)
        return job
    listed = summaries_by_job(answers)[job["id"]]
    places, names = locate_nodes(listed, answers, fleet.own_names(), job["total"] if job["known"] is not None else 0)
    if names:
        fleet.reduce_to_job(places, names)
    return job


def _is_decided(fleet: Fleet, answers: Mapping[int, JobsAnswer], prefix: str) -> bool:
    """Check whether late nodes cannot change which job `prefix` means.

    They cannot if it is the complete id of the job that was found, or if all late nodes belong to this job.
    """
    found = _select_meant(merge_answers(answers), prefix)
    if not found or (prefix and len(found) > 1):
        return False
    late = {fleet.name(node) for node in fleet.late}
    return is_certain(found[0], prefix) or late <= set(_node_names(summaries_by_job(answers)[found[0]["id"]].values()))


def is_certain(job: ListedJob, typed: str) -> bool:
    """Check whether what was typed is the complete id of this job, so that no record of another node can change the choice.

    For a job with an id of --job-id only while it runs: after its end a newer job can have the id.
    """
    if not job["asked"]:
        return typed == job["id"]
    return typed in (job["id"], job["asked"]) and job["part"].may_run


def is_waiting(engine: Engine, job: ListedJob) -> bool:
    """Check whether a job is queued, or is in the state STARTING with an engine that has a queue."""
    return job["queued"] is not None or (engine.capabilities.queues and job["state"] is JobState.STARTING)


def has_records(job: ListedJob) -> bool:
    """Check whether a node has a record of the job, and the job is not queued (again)."""
    return job["queued"] is None and bool(job["seen_on"])


def require_known(job: ListedJob) -> None:
    """Raise PreflightError for a job of which the nodes do not know what became of it: it cannot be followed.

    For a job that has ended and has no records, raise NodeLost with the engine's exit code, or NotFound if it has succeeded.
    Do nothing for any other job.
    """
    if job["state"] is JobState.UNKNOWN:
        raise unknown_end(job["id"], job["reason"])
    if job["seen_on"] or job["code"] is None:
        return
    if not job["code"]:
        raise NotFound(f"job {job['id']} has succeeded, and no record of it is left: {job['reason']}", _FIX)
    raise lost_nodes_error(job["reason"], job["code"])


def no_record_error(job: ListedJob) -> NotFound:
    """Build the error for a job of which no node has a record, with its place in the queue or why it has ended, if known."""
    about, what = job["queued"], f"job {job['id']}: no node has a record of it"
    if about is not None:
        return NotFound(f"{what} ({state_text(about)})", f"{PROGRAM} attach --job {job['id']} waits for its start")
    return add_engine_reason(job, NotFound(what, _FIX))


def add_engine_reason(job: ListedJob, error: NotFound) -> NotFound:
    """Return the error; if the engine knows why it has ended the job's nodes, a NotFound with its text and this reason."""
    known = job["known"]
    if known is None or known.cause is None:
        return error
    fix = f"{PROGRAM} run --log-dir DIR keeps the logs of a job that is followed"
    return NotFound(f"{error.what}: {known.cause[0]}", fix, error.node)


def lost_nodes_error(why: str, code: int) -> NodeLost:
    """Build the NodeLost, with exit code `code`, for a job whose nodes its engine has ended."""
    error = NodeLost(why, "the job has ended on the other nodes")
    error.code = code
    return error


def ask_and_choose(engine: Engine, prefix: str) -> ListedJob:
    """Ask the nodes and the engine for jobs, warn of processes that are left, and choose a job: see choose_job()."""
    answers = ask_jobs(engine.fleet, prefix)
    warn_of_remains(engine, answers)
    return choose_job(engine.fleet, answers, prefix, known=ask_engine(engine, answers, prefix))


def choose_job(
    fleet: Fleet,
    answers: Mapping[int, JobsAnswer],
    prefix: str,
    running: bool = False,
    exact: bool = False,
    known: Described = _NOTHING,
) -> ListedJob:
    """Choose a job from the nodes' answers: by its id or name, else by a unique prefix of the id; with "" the newest.

    Of several with the same name the newest counts. running: with "" the only one that runs, instead. exact: `prefix` is a
    complete id. known: see merge_answers(). Raises UsageError if several match; for none NotFound, or the errors of nodes that
    did not answer; PreflightError if it is not known whether one runs.
    """
    try:
        found = [job for job in merge_answers(answers, known) if not exact or job["id"] == prefix]
        return _choose_by_prefix(found, prefix, running)
    except NotFound:
        raise_all(list(fleet.failed.values()))
        for job, one in known.items() if prefix else ():
            if one.state is EngineState.ENDED and prefix in (job, one.asked, one.job_name):
                raise NotFound(f"job {job} has no record on a node, and has {state_text(one)}", _FIX) from None
        raise


def locate_nodes(
    listed: Mapping[int, JobSummary], answers: Mapping[int, JobsAnswer], hosts: Sequence[Host], total: int = 0
) -> tuple[dict[int, int], list[str]]:
    """Return ({node: agent}, names): which agent has the records of which node of a job, and the names of all its nodes.

    listed: {agent: summary of the job}. answers: of all agents that answered. hosts: those of conf.py, which can differ from
    those of the job. total: the number of nodes, for a job whose nodes are not named.

    A node may claim any number. So a host that conf.py names as the job does has the node of that name. A claim counts only for
    a name that is not in conf.py, or whose host answered that it does not have the job.
    """
    names = _node_names(listed.values()) or [f"node {node}" for node in range(total)]
    ours = {host.name: host.index for host in hosts}
    places = {node: ours[name] for node, name in enumerate(names) if ours.get(name) in listed}
    taken = set(places.values())
    for agent, summary in listed.items():
        node = int(summary["node"] or 0)
        silent = node < len(names) and names[node] in ours and ours[names[node]] not in answers
        if agent not in taken and node not in places and not silent:
            places[node] = agent
    return places, names


def _node_names(parts: Iterable[JobSummary]) -> list[str]:
    """Return the names of a job's nodes: the list that most summaries have, [] if none has one.

    For elastic jobs: _names_of_epochs().
    """
    parts = list(parts)
    if any(part.get("elastic") for part in parts):
        return _names_of_epochs(part["nodes"] or [] for part in parts)
    votes = Counter(tuple(str(name) for name in part["nodes"]) for part in parts if part["nodes"])
    return list(votes.most_common(1)[0][0]) if votes else []


def _names_of_epochs(lists: Iterable[Sequence[str]]) -> list[str]:
    """Return the names of the nodes of an elastic job: for each number the name in most lists, "nodeN" if none has one.

    A node knows only the nodes that joined while it took part.
    """
    votes = [Counter(filter(None, names)) for names in zip_longest(*lists)]
    return [(found.most_common(1) or [(f"node{number}", 0)])[0][0] for number, found in enumerate(votes)]


def _select_meant(found: list[ListedJob], prefix: str) -> list[ListedJob]:
    """Select the jobs that `prefix` means by id, requested id or name; all of them for ""."""
    return find_meant(prefix, found, lambda job: (job["id"], job["asked"], job["name"])) if prefix else found


def _choose_by_prefix(found: list[ListedJob], prefix: str, running: bool) -> ListedJob:
    """Choose the job that `prefix` means; with "" the newest one (the first of `found`), or the only one that runs (`running`).

    Raises NotFound for none, UsageError for several, and PreflightError as _only_running() does.
    """
    if prefix:
        found = _select_meant(found, prefix)
        if not found:
            raise NotFound(f"no job {prefix!r} on this cluster", _FIX)
        if len(found) > 1:
            raise UsageError(f"--job {prefix!r} is not unique: {_job_ids(found)}", "write more of it")
        return found[0]
    if running:
        return _only_running(found)
    if not found:
        raise NotFound("no job on this cluster", f"{PROGRAM} run --workspace ./job starts one")
    return found[0]


def _only_running(found: list[ListedJob]) -> ListedJob:
    """Return the only job that may run or is queued.

    Raises UsageError for several; for none PreflightError, if the state of some is not known, else NotFound.
    """
    running = [job for job in found if may_start(job) and job["state"] is not JobState.UNKNOWN]
    if len(running) > 1:
        raise UsageError(f"several jobs run: {_job_ids(running)}", "name one with --job; stop --all ends all")
    unknown = [job for job in found if job["state"] is JobState.UNKNOWN]
    if unknown and not running:
        what = f"no job is known to run, and these may: {_job_ids(unknown)}"
        fix = f"{PROGRAM} jobs shows why that is not known; {PROGRAM} stop --job J tries to stop one"
        raise PreflightError(what, fix)
    if not running:
        raise NotFound("no job runs", "")
    return running[0]


def may_start(job: ListedJob) -> bool:
    """Check whether processes of a job may live, or whether it is queued, so that it starts without a further command."""
    return job["part"].may_run or job["state"] is JobState.QUEUED


def _job_ids(found: Iterable[ListedJob]) -> str:
    return ", ".join(str(job["id"]) for job in found)
