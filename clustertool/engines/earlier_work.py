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
from clustertool.model.wire.agent_requests import EarlierWanted

_SHOWN = 3  # files in a hint
_OUTPUT = "programs write it into output/ of their working directory, or into $CLUSTERTOOL_OUTPUT"


def earlier_wanted(request: RunRequest) -> EarlierWanted:
    """Build what the probe asks each node for about earlier jobs."""
    kin = _kin(request)
    return {
        "asked": request.wish.job_id,
        "name": kin.name,
        "resume": _named(request),
        "owner": kin.owner,
        "workspace": kin.workspace,
        "keep": request.wish.keep,
    }


def settle(caller: Caller, request: RunRequest, facts: ByNode) -> None:
    """Give the request its job id, and the job that it resumes. Reports what differs from what was asked for.

    Raises UsageError, NotFound.
    """
    earlier = earlier_jobs.read_earlier({node: fact.earlier for node, fact in facts.items()})
    take_id(caller, request, earlier)
    request.resumed = _chosen(caller, request, earlier)
    if request.resumed is None:
        kin = _kin(request)
        request.left = tuple(job for job in earlier if job.ended and (job.with_output or job.files) and kin.has(job))
        return
    have = set(request.resumed.with_output)
    lacking = [host.index for host in request.cluster.hosts if host.index not in have]
    copied = [(path, nodes) for path, nodes in (("its output", tuple(sorted(have))), *request.resumed.kept) if nodes]
    text = ", ".join(f"{what} is copied on {_folded_names(request, nodes)}" for what, nodes in copied)
    none = f"; {_folded_names(request, lacking)} has none of it" if have and lacking else ""
    caller.remark(f"resuming job {request.resumed.id}: {text}{none}")


def take_id(caller: Caller, request: RunRequest, earlier: tuple[EarlierJob, ...]) -> None:
    """Give the request the id of --job-id, or the next one after it. Raises UsageError while a job with it has not ended."""
    asked = request.wish.job_id
    if asked:
        request.job_id = earlier_jobs.free_id(asked, earlier)
        if request.job_id != asked:
            caller.remark(f"job {asked} has ended before: the id of this one is {request.job_id}")


def known_by(earlier: Iterable[EarlierJob], known: Mapping[str, Description]) -> tuple[EarlierJob, ...]:
    """Earlier jobs by their records and by what their engine knows of them, the newest first.

    earlier: those with records. The state is that of `jobs`: a proved end in the records stands unless the job is queued again.
    """
    recorded = {job.id: job for job in earlier}
    found = [replace(job, state=_state(job.state, known.get(job.id))) for job in recorded.values()]
    for job, about in known.items():
        if job not in recorded:
            state = UNRECORDED[about.state]
            texts = (about.asked, about.job_name, this_user.name(), "", about.command)
            found.append(EarlierJob(job, *texts, about.since, state, ()))
    return tuple(sorted(found, key=lambda one: (one.created, one.id), reverse=True))


def _state(recorded: JobState, known: Description | None) -> JobState:
    """Determine the state of a job with records. It may be queued again."""
    state = correct_state(recorded, known)
    queued = known is not None and known.state is EngineState.QUEUED
    return JobState.QUEUED if queued and state in OUTCOMES else state


def hint(caller: Caller, request: RunRequest, made: Plan) -> None:
    """Print one line where a job of the same script has left an output, and --resume was not given."""
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


def _chosen(caller: Caller, request: RunRequest, earlier: tuple[EarlierJob, ...]) -> EarlierJob | None:
    """Choose the job to resume; None if none is, or if job.toml asks for it and there is none."""
    text, typed, kin = _named(request), request.wish.resume, _kin(request)
    if text:
        found: EarlierJob | None = earlier_jobs.named_job(earlier, text)
    elif typed == FRESH or not (typed or request.resumes):
        return None
    else:
        found = earlier_jobs.same_work(earlier, kin)
    lost = [path for path in request.wish.keep if found is not None and path not in dict(found.kept)]
    if found is not None and lost:
        raise NotFound(
            f"job {found.id} has left no {lost[0]} on these nodes", "leave that --keep out, or name another job"
        )
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


def _named(request: RunRequest) -> str:
    """Return the job that --resume names, "" if it names none."""
    return "" if request.wish.resume in (NEWEST, FRESH) else request.wish.resume


def _kin(request: RunRequest) -> Kinship:
    return Kinship(request.wish.name or request.wish.job_id, this_user.name(), request.origin)


def _folded_names(request: RunRequest, nodes: Iterable[int]) -> str:
    return fold(request.cluster.hosts[node].name for node in nodes)
