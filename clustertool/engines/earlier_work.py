"""Earlier jobs of the same work decide the id where one with this --job-id ended, and the output that --resume continues."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Mapping
from dataclasses import replace

from clustertool.engines.base import UNRECORDED, Description, EngineState, correct_state
from clustertool.engines.caller import Caller
from clustertool.engines.job_request import RunRequest
from clustertool.errors import NotFound
from clustertool.fleet import this_user
from clustertool.model.config.folded_names import fold
from clustertool.model.facts import ByNode
from clustertool.model.job import earlier_jobs
from clustertool.model.job.earlier_jobs import EarlierJob, Kinship
from clustertool.model.job.job_names import FRESH, NEWEST
from clustertool.model.job.outcome import some
from clustertool.model.job.state_names import OUTCOMES, JobState
from clustertool.model.planning.plan import Plan
from clustertool.model.wire.agent_answers import JobsAnswer
from clustertool.model.wire.agent_requests import EarlierWanted

_SHOWN = 3  # files in a hint
_OUTPUT = "programs write it into output/ of their working directory, or into $CLUSTERTOOL_OUTPUT"


def earlier_wanted(request: RunRequest) -> EarlierWanted:
    """Build the part of a probe request that asks a node for earlier jobs: of this --job-id, to resume, or of the same work.

    "keep" has the files of --keep, for which the node searches in the directories of these jobs.
    """
    kin = _kinship(request)
    return {
        "asked": request.wish.job_id,
        "name": kin.name,
        "resume": _named_to_resume(request),
        "owner": kin.owner,
        "workspace": kin.workspace,
        "keep": request.wish.keep,
    }


def choose_id_and_resumed(caller: Caller, request: RunRequest, facts: ByNode) -> None:
    """Set request.job_id and request.resumed by the nodes' answers, and print messages about both.

    Without a job to resume: set request.left, the ended jobs of the same work with an output or files. Raises UsageError if a
    job with this --job-id has not ended, or --resume names several jobs or a running one; NotFound as _choose_resumed().
    """
    earlier = earlier_jobs.read_earlier({node: fact.earlier for node, fact in facts.items()})
    take_id(caller, request, earlier)
    request.resumed = _choose_resumed(caller, request, earlier)
    if request.resumed is None:
        kin = _kinship(request)
        request.left = tuple(job for job in earlier if job.ended and (job.with_output or job.files) and kin.has(job))
        return
    have = set(request.resumed.with_output)
    lacking = [host.index for host in request.cluster.hosts if host.index not in have]
    copied = [(path, nodes) for path, nodes in (("its output", tuple(sorted(have))), *request.resumed.kept) if nodes]
    text = ", ".join(f"{what} is copied on {_folded_names(request, nodes)}" for what, nodes in copied)
    none = f"; {_folded_names(request, lacking)} has none of it" if have and lacking else ""
    caller.remark(f"resuming job {request.resumed.id}: {text}{none}")


def take_id(caller: Caller, request: RunRequest, earlier: tuple[EarlierJob, ...]) -> None:
    """Set request.job_id to that of --job-id, or to the next free one after it (with a message); do nothing without --job-id.

    Raises UsageError while a job with the id has not ended.
    """
    asked = request.wish.job_id
    if asked:
        request.job_id = earlier_jobs.free_id(asked, earlier)
        if request.job_id != asked:
            caller.remark(f"job {asked} has ended before: the id of this one is {request.job_id}")


def take_id_of_engine(
    request: RunRequest, caller: Caller, answers: Mapping[int, JobsAnswer], known: Mapping[str, Description]
) -> None:
    """Set the request's job id as take_id() does, by the records of nodes and by what the engine knows of earlier jobs."""
    rows = {node: earlier_jobs.rows_of(answer["jobs"]) for node, answer in answers.items()}
    recorded = earlier_jobs.read_earlier(rows)
    take_id(caller, request, merge_known(recorded, known))


def merge_known(earlier: Iterable[EarlierJob], known: Mapping[str, Description]) -> tuple[EarlierJob, ...]:
    """List the jobs of `earlier` and `known`, each once, the newest first.

    earlier: the jobs with records; their states are corrected by the engine's. known: what the engine has, by job id; a job
    that only the engine knows is added without nodes, in the state of UNRECORDED.
    """
    recorded = {job.id: job for job in earlier}
    found = [replace(job, state=_corrected_state(job.state, known.get(job.id))) for job in recorded.values()]
    for job, about in known.items():
        if job not in recorded:
            state = UNRECORDED[about.state]
            texts = (about.asked, about.job_name, this_user.name(), "", about.command)
            found.append(EarlierJob(job, *texts, about.since, state, ()))
    return tuple(sorted(found, key=lambda one: (one.created, one.id), reverse=True))


def _corrected_state(recorded: JobState, known: Description | None) -> JobState:
    """Return the recorded state of a job, corrected by the engine's. If the engine has queued an ended job again: QUEUED."""
    state = correct_state(recorded, known)
    queued = known is not None and known.state is EngineState.QUEUED
    return JobState.QUEUED if queued and state in OUTCOMES else state


def hint_at_resuming(caller: Caller, request: RunRequest, made: Plan) -> None:
    """Print how to resume the newest job in request.left that ran the same script, if there is one, and empty request.left.

    Prints nothing with --resume none. The text names its output and up to three of its files, with --keep. made: the plan of
    the new job, with its script.
    """
    argv = next((process.argv for process in made.processes if process.role == "trainer"), ())
    script = earlier_jobs.script_of(" ".join(argv))
    left = next((job for job in request.left if job.script == script), None)
    request.left = ()
    if left is None or request.wish.resume == FRESH:
        return
    found = [f"an output on {_folded_names(request, left.with_output)}"] if left.with_output else []
    found += [f"{some(left.files)} in its directory"] if left.files else []
    how = "".join(f" --keep {shlex.quote(name)}" for name in left.files[:_SHOWN])
    if left.files:  # a user of torchrun expects the program to find them
        how += " continues from them, as does a job that works in one folder of the nodes: --job-workspace DIR"
    if found:
        text = f"job {left.id} of this script has left {' and '.join(found)}, and this one begins without"
        caller.remark(f"{text}: --resume{how or ' continues from it'}")


def _choose_resumed(caller: Caller, request: RunRequest, earlier: tuple[EarlierJob, ...]) -> EarlierJob | None:
    """Choose the ended job to resume: the one that --resume names, else the newest of the same work with an output.

    None: neither --resume nor job.toml asks for one, or --resume none. Also, with a message, if there is no output, and only
    job.toml asks for it, or --resume without a job works in one folder (--job-workspace). Raises NotFound if --resume was typed
    and there is none, or for a --keep that the job does not have; UsageError for a name of several jobs or of a running one.
    """
    text, typed, kin = _named_to_resume(request), request.wish.resume, _kinship(request)
    if text:
        found: EarlierJob | None = earlier_jobs.named_job(earlier, text)
    elif typed == FRESH or not (typed or request.resumes):
        return None
    else:
        found = earlier_jobs.same_work(earlier, kin)
    lost = [path for path in request.wish.keep if found is not None and path not in dict(found.kept)]
    if found is not None and lost:
        what = f"job {found.id} has left no {lost[0]} on these nodes"
        raise NotFound(what, "leave that --keep out, or name another job")
    if found is not None and found.nodes:
        return found
    if not typed:
        caller.remark("resume = true in job.toml: there is no output of an earlier job; this one starts anew")
        return None
    if request.options.job_workspace and not text:
        caller.remark("--resume: no output to copy; the job works in the same folder as earlier ones, with their files")
        return None
    if found is not None:
        raise NotFound(f"job {found.id} has left no output on these nodes", _OUTPUT)
    what = f"with the name {kin.name}, or without a name of this workspace," if kin.name else "of this workspace"
    fix = "leave --resume out, or name the job: --resume JOB"
    raise NotFound(f"--resume: no job {what} has ended on these nodes", fix)


def _named_to_resume(request: RunRequest) -> str:
    """Return the job that --resume names; "" without --resume, and for its values NEWEST and FRESH."""
    return "" if request.wish.resume in (NEWEST, FRESH) else request.wish.resume


def _kinship(request: RunRequest) -> Kinship:
    """Build what jobs of the same work have in common with the request: name, owner and origin of the files.

    The name is that of --name, else of --job-id.
    """
    return Kinship(request.wish.name or request.wish.job_id, this_user.name(), request.origin)


def _folded_names(request: RunRequest, nodes: Iterable[int]) -> str:
    """Fold the names of nodes into a short text: node[1-3]."""
    return fold(request.cluster.hosts[node].name for node in nodes)
