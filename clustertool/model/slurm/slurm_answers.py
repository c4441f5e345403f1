"""This module reads what the programs of Slurm print about jobs, steps and nodes: scontrol, squeue, sinfo and srun.

`scontrol -o show job` has one line for each job, with the fields in Slurm's order, for some minutes after its end, too. The
name and the comment of a job are its owner's text, without quotes, and can have the form of fields. So the fields before the
state are read as one sequence, and of a field that comes twice the first one counts.

squeue and sinfo answer in formats of ours: one line for each job or step, one for each node and partition. squeue answers for
all jobs of a user at once, but forgets a job soon after its end. Run all of them with TIME_FORMAT.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Dict, List, Mapping, NamedTuple, Optional, Tuple

from clustertool.errors import DataError
from clustertool.model.config.hosts import expand
from clustertool.model.engine_views import EngineNode
from clustertool.model.paths import is_job_id

SHOW_JOB = ("scontrol", "--oneliner", "show", "job")  # and its number; with TIME_FORMAT in the environment
# For the environment of scontrol and squeue: times as seconds since the epoch, in place of local times without a zone.
TIME_FORMAT = {"SLURM_TIME_FORMAT": "%s"}

PENDING, RUNNING, COMPLETING = "PENDING", "RUNNING", "COMPLETING"
# The states of jobs of which no process runs any more.
ENDED = "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()
_EMPTY = ("(null)", "None", "N/A", "Unknown")


# -- the comment of a Slurm job, or the name of a step: which job of the tool it runs ----------------------------------


_MARK = "clustertool "  # before the job id


def comment(job_id: str, root_dir: str = "") -> str:
    """Write the comment that marks the Slurm job of our job. root_dir: for a job that is submitted by hand, else ""."""
    return _MARK + job_id + f" {root_dir}" * bool(root_dir)


def _split_comment(text: str) -> Tuple[str, str]:
    """Split a comment into our job id and ROOT_DIR, which may be ""; both are "" for a comment of others."""
    job, _, root_dir = text[len(_MARK) :].partition(" ") if text.startswith(_MARK) else ("", "", "")
    return (job, root_dir) if is_job_id(job) else ("", "")


# Reasons of pending jobs that do not go away by waiting: squeue(1), JOB REASON CODES.
_PENDING_MEANINGS = {
    "AccountNotAllowed": "its account may not use the partition",
    "BadConstraints": "no nodes have what it asks for",
    "DependencyNeverSatisfied": "a job that it depends on has not ended as it must",
    "InvalidAccount": "its account is not valid",
    "InvalidQOS": "its qos is not valid",
    "JobHeldAdmin": "an administrator holds it",
    "JobHeldUser": "it is held; scontrol release NUMBER releases it",
    "JobLaunchFailure": "a node could not start it: its folder may not be there",
    "PartitionConfig": "its partition does not allow what it asks for",
    "PartitionDown": "its partition is down",
    "PartitionInactive": "its partition is inactive",
    "PartitionNodeLimit": "it asks for more nodes than its partition has or allows",
    "PartitionTimeLimit": "its time is above the limit of its partition",
    "QOSNotAllowed": "its qos may not use the partition",
    "ReqNodeNotAvail": "a node of nodelist is down, reserved or in use",
}
_PER_JOB = ("PerJob", "PerJobLimit")  # QOSMaxCpuPerJobLimit and others: one job asks for too much


@dataclass(frozen=True)
class SlurmJob:
    """One job as Slurm knows it, or one step of a job. Times are seconds since the epoch; None: there is none yet.

    state: COMPLETING, too, while processes of an ended job are left. reason: why it is pending, or why it ended; "" for none.
    expected: when a pending job may start. preempted: when Slurm has asked a running job to make room. nodelist: "h[1-3]".
    restarts: how often it was requeued. requeue: whether it may be. nodes, name: by squeue alone.
    step: its number if it is a step, which has its name as the comment. output: the path of what it prints, by scontrol alone.
    """

    id: int
    state: str
    reason: str = ""
    submitted: Optional[float] = None
    started: Optional[float] = None
    ended: Optional[float] = None
    expected: Optional[float] = None
    preempted: Optional[float] = None
    nodelist: str = ""
    comment: str = ""
    restarts: int = 0
    requeue: bool = False
    nodes: int = 0
    name: str = ""
    step: str = ""
    output: str = ""

    @property
    def number(self) -> str:
        """How programs of Slurm name it: "812", or "812.3" for a step."""
        return f"{self.id}.{self.step}" if self.step else str(self.id)

    @property
    def clustertool_job(self) -> str:
        """The id of our job that the Slurm job runs; "" if it runs none."""
        return _split_comment(self.comment)[0]

    @property
    def explained_reason(self) -> str:
        """The reason, with an explanation if it does not go away by waiting."""
        name = self.reason.split(",")[0]  # "ReqNodeNotAvail, UnavailableNodes:node1"
        meaning = _PENDING_MEANINGS.get(name, "it asks for more than a job may have" if name.endswith(_PER_JOB) else "")
        return f"{self.reason}: {meaning}, so it does not start" if meaning else self.reason

    def is_by_hand(self, root_dir: str) -> bool:
        """Return whether the job was submitted by hand, with its records below root_dir."""
        return _split_comment(self.comment)[1] == root_dir

    @property
    def node_names(self) -> List[str]:
        """The names of its nodes. Raises DataError or ConfigError if Slurm's text is no list of nodes."""
        return read_node_list(self.nodelist)


def job_of(fields: Mapping[str, str]) -> SlurmJob:
    """Build a SlurmJob from the texts of its fields, of a job or a step.

    The names are those of scontrol, and in small letters those of SlurmJob: `id` (a number), `state`, `reason`, `comment`,
    `nodes` and `name`. Others may be missing. StartTime is `expected` of a pending job, else `started`; EndTime counts only of
    one that has ended.
    """
    state = fields["state"]
    started, ended = _seconds(fields, "StartTime"), _seconds(fields, "EndTime")
    over, pending = state in ENDED or state == COMPLETING, state == PENDING
    return SlurmJob(
        id=int(fields["id"]),
        state=state,
        reason=_or_empty(fields["reason"]),
        submitted=_seconds(fields, "SubmitTime"),
        started=None if pending else started,
        ended=ended if over else None,
        expected=started if pending else None,
        preempted=_seconds(fields, "PreemptTime"),
        nodelist=_or_empty(fields.get("NodeList", "")),
        comment=_or_empty(fields["comment"]),
        restarts=_number_or_zero(fields.get("Restarts", "")),
        requeue=fields.get("Requeue") == "1",
        nodes=_number_or_zero(fields.get("nodes", "").partition("-")[0]),  # "2-4": at least 2
        name=fields.get("name", ""),
        step=fields.get("step", ""),
        output=fields.get("output", ""),
    )


def _or_empty(value: str) -> str:
    """Return the text; "" for a text by which Slurm states that there is none."""
    return "" if value in _EMPTY else value


def _seconds(fields: Mapping[str, str], name: str) -> Optional[float]:
    """Return the time in a field as seconds since the epoch; None if the field is missing or no number."""
    value = fields.get(name, "")
    return float(value) if re.fullmatch("[0-9]{1,12}", value) else None


def _number_or_zero(value: str) -> int:
    """Return the number in a text; 0 if it is no number."""
    return int(value) if re.fullmatch("[0-9]{1,9}", value) else 0


_NAME = r"(?:[^\s,\[\]]|\[[0-9,-]+\])+"  # with its ranges: a comma in brackets does not end it


def read_node_list(text: str) -> List[str]:
    """Expand "gpu[01-02,7],login" to gpu01 gpu02 gpu7 login; "" to none.

    Raises DataError for a text of another form, ConfigError for a wrong range in brackets, or too many names.
    """
    if text and not re.fullmatch(f"{_NAME}(?:,{_NAME})*", text):
        raise DataError(f"{text[:80]!r} is no list of nodes", "scontrol show hostnames expands a list of Slurm")
    return [name for part in re.findall(_NAME, text) for name in expand(part)]


# -- scontrol ----------------------------------------------------------------------------------------------------------


_HEAD = re.compile(
    r"JobId=(?P<id>[0-9]+)(?: \w+=\S+)*? JobName=.*?(?: HetJobIdSet=\S+)?"
    r" UserId=[^=]*\([0-9]+\) GroupId=[^=]* MCS_label=[^=]* Priority=\S* Nice=\S* Account=[^=]* QOS=[^=]*"
    r"(?: WCKey=[^=]*)? JobState=(?P<state>[A-Z_]+)\S* Reason=(?P<reason>\S*)"
)
_FIELD = re.compile(r" (?P<name>[A-Z]\w*)=(?P<value>\S*)")
_COMMENT = re.compile(r" WorkDir=.*? Comment=(?P<comment>.*?) *(?: StdErr=\S* StdIn=| Power=\S* *$|$)")
_OUTPUT = re.compile(r".* StdOut=(?P<output>/.*?)(?: [A-Z]\w*=\S*)* *$")


def read_jobs(text: str) -> List[SlurmJob]:
    """Parse the jobs of an answer of `scontrol -o show job`, run with TIME_FORMAT. Lines that are not a job are left out."""
    found = (_job_of_line(line) for line in text.splitlines())
    return [job for job in found if job is not None]


def _job_of_line(line: str) -> Optional[SlurmJob]:
    """Parse one line of `scontrol -o show job`; None if it is no job."""
    head = _HEAD.match(line)
    if head is None:
        return None
    fields: Dict[str, str] = {}
    for match in _FIELD.finditer(line, head.end()):
        fields.setdefault(match["name"], match["value"])
    comment = _COMMENT.search(line, head.end())
    output = _OUTPUT.match(line, head.end())
    more = {"comment": comment["comment"] if comment else "", "output": output["output"] if output else ""}
    return job_of({**fields, **head.groupdict(), **more})


# -- squeue ------------------------------------------------------------------------------------------------------------


_SEPARATOR = "\x1f"  # between fields: a job's comment and name can have all signs that a user types
# squeue(1), --format: the names of job_of().
_JOB = {
    "id": "%A",
    "state": "%T",
    "reason": "%r",
    "SubmitTime": "%V",
    "StartTime": "%S",
    "EndTime": "%e",
    "NodeList": "%N",
    "comment": "%k",
    "nodes": "%D",
    "name": "%j",
    "shown": "%i",  # 20_1 of an array, 30+1 of a heterogeneous job; else the id
}
_STEP = {"shown": "%i", "StartTime": "%S", "NodeList": "%N", "comment": "%j"}  # those that run
_RUNS = {"state": RUNNING, "reason": ""}  # Slurm lists no other steps
QUEUE = ("squeue", "--me", "--noheader", f"--format={_SEPARATOR.join(_JOB.values())}")
STEPS = ("squeue", "--me", "--steps", "--noheader", f"--format={_SEPARATOR.join(_STEP.values())}")


def read_queue(text: str) -> List[SlurmJob]:
    """Parse the user's jobs in the answer of QUEUE. Lines that are not a job are left out."""
    return [job_of(fields) for fields in _queue_fields(text)]


def _queue_fields(text: str) -> List[Dict[str, str]]:
    """Split the lines of the answer of QUEUE into fields."""
    lines = (line.split(_SEPARATOR) for line in text.splitlines())
    found = (dict(zip(_JOB, line)) for line in lines if len(line) == len(_JOB))
    return [fields for fields in found if _is_number(fields["id"])]


def read_steps(queue: str, steps: str) -> List[SlurmJob]:
    """Parse the steps of the user's jobs in the answers of QUEUE and STEPS.

    Left out are steps without a number, and those of jobs that QUEUE does not have. STEPS names the job of a step in an array,
    or of a heterogeneous job, in another form than SLURM_JOB_ID; QUEUE has both forms.
    """
    ids = {name: job["id"] for job in _queue_fields(queue) for name in (job["id"], job["shown"])}
    found = []
    for line in steps.splitlines():
        values = dict(zip(_STEP, line.split(_SEPARATOR)))
        job, _, step = values["shown"].partition(".")
        if len(values) == len(_STEP) and job in ids and _is_number(step):
            found.append(job_of({**values, "id": ids[job], "step": step, "name": values["comment"], **_RUNS}))
    return found


def _is_number(text: str) -> bool:
    """Return whether a text has 1 to 10 digits, and nothing else."""
    return bool(re.fullmatch("[0-9]{1,10}", text))


# -- sinfo -------------------------------------------------------------------------------------------------------------


# sinfo(1), --Format. A field with a text behind it has no fixed width.
_NODE = ("NodeList", "StateLong", "CPUsState", "Memory", "Gres", "GresUsed", "PartitionName", "Reason")
_FLAGS = "*~#!%$@^-"  # behind a state; * is a node that does not respond
NODES = ("sinfo", "--Node", "--noheader", f"--Format={','.join(f'{name}:{_SEPARATOR}' for name in _NODE)}")


def read_nodes(text: str) -> List[EngineNode]:
    """Parse the nodes in the answer of NODES, each with all of its partitions. Other lines are left out.

    sinfo names the partitions of each node in an order of its own, so they are sorted: equal nodes are equal.
    """
    found: Dict[str, EngineNode] = {}
    for line in text.splitlines():
        node = _node_of_fields(line.split(_SEPARATOR)[:-1])
        if node is not None:
            first = found.setdefault(node.name, node)
            partitions = tuple(sorted({*first.partitions, *node.partitions}))
            found[node.name] = replace(first, partitions=partitions)
    return list(found.values())


def gpus_of(gres: str) -> Tuple[Tuple[str, int], ...]:
    """Parse the GPUs in a list of resources: "gpu:a100:2(S:0-1),gpu:1,craynetwork:4" to (("a100", 2), ("", 1))."""
    outside = re.sub(r"\([^)]*\)", "", gres)
    found = re.findall(r"(?:^|,)gpu(?::([^:,]+))?:([0-9]{1,6})(?=,|$)", outside)
    return tuple((kind, int(number)) for kind, number in found)


def _node_of_fields(values: List[str]) -> Optional[EngineNode]:
    """Build a node from the fields of a line of sinfo, with one partition; None if they are no node."""
    if len(values) != len(_NODE):
        return None
    name, state, cpus, memory, gres, used, partition, reason = map(str.strip, values)
    counts = re.fullmatch(r"([0-9]{1,9})/[0-9]+/[0-9]+/([0-9]{1,9})", cpus)  # allocated/idle/other/total
    if counts is None or not name:
        return None
    used_gpus = dict(gpus_of(used))
    return EngineNode(
        name=name,
        state=state.rstrip(_FLAGS) + ", no answer" * ("*" in state),
        cpus=int(counts[2]),
        used_cpus=int(counts[1]),
        memory=int(memory) if _is_number(memory) else 0,
        gpus=tuple((kind, number, used_gpus.get(kind, 0)) for kind, number in gpus_of(gres)),
        partitions=(partition,),
        reason="" if reason == "none" else reason,
    )


# -- srun and its tasks, which join the job: slurm.out of a submission -------------------------------------------------


_MOST_LINES = 10
_LONGEST_LINE = 300  # characters of a line
_TASK_END = re.compile(r"srun: error: \S+ tasks? \S+: Exited with exit code ([0-9]{1,3})")


class StepOutput(NamedTuple):
    """What srun and its tasks have printed. lines: the last different ones. code: the highest exit code of a task, else 0."""

    lines: Tuple[str, ...]
    code: int

    @property
    def reason(self) -> str:
        """The last line that does not begin with a space, and so continues no other line."""
        return next((line for line in reversed(self.lines) if not line.startswith(" ")), "")


def read_output(text: str) -> StepOutput:
    """Parse an output of srun: the highest exit code in its lines about ended tasks, and the last 10 different other lines.

    Lines are cut at 300 characters.
    """
    lines = [line.rstrip()[:_LONGEST_LINE] for line in text.splitlines() if line.strip()]
    codes = [int(found[1]) for found in map(_TASK_END.match, lines) if found]
    shown = [line for line in lines if not _TASK_END.match(line)]
    last_of_each = dict.fromkeys(reversed(shown))  # each node writes the same error
    return StepOutput(tuple(reversed([*last_of_each][:_MOST_LINES])), max(codes, default=0))
