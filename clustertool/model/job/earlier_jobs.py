"""Earlier jobs decide the id of a new job, and the output that it continues from.

Each node lists the earlier jobs that a new one may belong to (Facts.earlier). These functions fold the lists and choose.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, Iterable, List, Mapping, Optional, Sequence, Tuple

from clustertool.errors import NotFound, UsageError
from clustertool.model.hints import PROGRAM
from clustertool.model.job.job_names import find_meant
from clustertool.model.job.node_status import EarlierRow
from clustertool.model.job.state import decide
from clustertool.model.job.state_names import OUTCOMES, JobState
from clustertool.model.paths import is_job_id
from clustertool.model.shape import read

_LIST = f"{PROGRAM} jobs lists the jobs"


@dataclass(frozen=True)
class EarlierJob:
    """A job as the nodes of the new one know it. with_output: those of the nodes on which its output folder has files.

    kept: on which nodes each of the files is that --keep names. files: what it has written into its working directory.
    """

    id: str
    asked: str
    name: str
    owner: str
    workspace: str
    command: str
    created: float
    state: JobState
    with_output: Tuple[int, ...]
    kept: Tuple[Tuple[str, Tuple[int, ...]], ...] = ()
    files: Tuple[str, ...] = ()

    @property
    def nodes(self) -> Tuple[int, ...]:
        """The nodes that have an output of it, or a file of --keep, ascending."""
        return tuple(sorted({*self.with_output, *(node for _, nodes in self.kept for node in nodes)}))

    def kept_on(self, node: int) -> Tuple[str, ...]:
        """Return the files of --keep that are on a node."""
        return tuple(path for path, nodes in self.kept if node in nodes)

    @property
    def ended(self) -> bool:
        """Whether it has an outcome."""
        return self.state in OUTCOMES

    @property
    def script(self) -> str:
        """The program of its command."""
        return script_of(self.command)


@dataclass(frozen=True)
class Kinship:
    """What makes an earlier job one of the same work: its name; else, for a job without a name, its owner and workspace.

    A new job that has no name continues the newest one of its workspace, whatever its name is.
    """

    name: str
    owner: str
    workspace: str

    def has(self, job: EarlierJob) -> bool:
        """Check whether an earlier job is of the same work, by its name, or by its owner and workspace."""
        return self.has_name(job) or self.has_place(job)

    def has_name(self, job: EarlierJob) -> bool:
        """Check whether an earlier job has this name, or was started with it as its id."""
        return bool(self.name) and self.name in (job.name, job.asked)

    def has_place(self, job: EarlierJob) -> bool:
        """Check whether an earlier job has the same owner and workspace, and at least one of the two jobs has no name."""
        same = bool(self.workspace) and (job.owner, job.workspace) == (self.owner, self.workspace)
        return same and not (self.name and job.name)


def script_of(command: str) -> str:
    """Find the program of a command: the first argument that ends in .py, else the first one."""
    arguments = command.split()
    return next((argument for argument in arguments if argument.endswith(".py")), arguments[0] if arguments else "")


def rows_of(summaries: Iterable[Mapping[str, object]]) -> List[EarlierRow]:
    """Convert the nodes' answers to the request "jobs" to rows, which do not state what a job has left. Raises Malformed."""
    return [read(EarlierRow, summary) for summary in summaries]


def read_earlier(lists: Mapping[int, Sequence[EarlierRow]]) -> Tuple[EarlierJob, ...]:
    """Merge the nodes' rows ({node: its rows}) to one EarlierJob for each job, the newest first.

    Its state, outputs and files follow from all its rows, the rest from the first one.
    """
    rows: Dict[str, Dict[int, EarlierRow]] = {}
    for node, listed in lists.items():
        for row in listed:
            rows.setdefault(row.id, {})[node] = row
    found: List[EarlierJob] = []
    for job, parts in rows.items():
        first = next(iter(parts.values()))
        paths = dict.fromkeys(path for row in parts.values() for path in row.kept)
        found.append(
            EarlierJob(
                id=job,
                asked=first.asked,
                name=first.name,
                owner=first.owner or "",
                workspace=first.workspace,
                command=first.command or "",
                created=first.created or 0.0,
                state=decide(row.part for row in parts.values()).state,
                with_output=tuple(node for node, row in parts.items() if row.output),
                kept=tuple((path, tuple(node for node, row in parts.items() if path in row.kept)) for path in paths),
                files=tuple(dict.fromkeys(name for row in parts.values() for name in row.files)),
            )
        )
    return tuple(sorted(found, key=lambda one: (one.created, one.id), reverse=True))


def free_id(asked: str, earlier: Sequence[EarlierJob]) -> str:
    """Choose the id of a new job that asks for `asked`: this, or after a job with it has ended `asked`-N.

    N is one more than the highest such number, at least 2. Raises UsageError if a job with it has not ended, or may not have,
    and if the id becomes too long.
    """
    family = [job for job in earlier if asked in (job.id, job.asked)]
    for job in family:
        if not job.ended:
            state = "its state is unknown" if job.state is JobState.UNKNOWN else f"its state is {job.state}"
            fix = f"{PROGRAM} stop --job {job.id} ends it; or take another --job-id"
            raise UsageError(f"--job-id {asked}: job {job.id} has not ended, {state}", fix)
    if not family:
        return asked
    numbered = (re.fullmatch(re.escape(asked) + r"-(\d{1,9})", job.id) for job in earlier)
    found = f"{asked}-{max([1, *(int(match[1]) for match in numbered if match)]) + 1}"
    if not is_job_id(found):
        raise UsageError(f"job {asked} has ended, and {found} is too long for a job id", "take a shorter --job-id")
    return found


def same_work(earlier: Sequence[EarlierJob], kin: Kinship) -> Optional[EarlierJob]:
    """Find the newest ended job of the same work that has left an output, or a file of --keep; else the newest ended one.

    Jobs with its name count, else those of its owner and workspace. Returns None if there are neither.
    """
    ended = [job for job in earlier if job.ended and kin.has_name(job)]
    ended = ended or [job for job in earlier if job.ended and kin.has_place(job)]
    return next((job for job in ended if job.nodes), ended[0] if ended else None)


def named_job(earlier: Sequence[EarlierJob], text: str) -> EarlierJob:
    """Find the ended job that --resume names, by its id, a unique beginning of it, or its name.

    Raises NotFound if there is none, and UsageError if several ids begin so, or the job has not ended.
    """
    found = find_meant(text, earlier, lambda job: (job.id, job.asked, job.name))
    if not found:
        raise NotFound(f"--resume {text}: these nodes have no such job", _LIST)
    if len(found) > 1:
        listed = ", ".join(job.id for job in found)
        raise UsageError(f"--resume {text!r} is not unique: {listed}", "write more of it")
    if not found[0].ended:
        what = f"--resume {text}: job {found[0].id} has not ended, its state is {found[0].state}"
        raise UsageError(what, f"{PROGRAM} stop --job {found[0].id} ends it")
    return found[0]
