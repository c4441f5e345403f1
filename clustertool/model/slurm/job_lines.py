"""This module reads the lines of `scontrol -o show job`: one for each job, with the fields in Slurm's order.

The name and the comment of a job are its owner's text, without quotes, and can have the form of fields. So the fields
before the state are read as one sequence, and of a field that comes twice the first one counts.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Dict, FrozenSet, List, Mapping, Optional

from clustertool.model.slurm.job_comment import job_of_comment

SHOW_JOB = ("scontrol", "--oneliner", "show", "job")  # and its number; with TIME_FORMAT in the environment
# For the environment of scontrol and squeue: times as seconds since the epoch, in place of local times without a zone.
TIME_FORMAT = {"SLURM_TIME_FORMAT": "%s"}

PENDING, RUNNING, COMPLETING = "PENDING", "RUNNING", "COMPLETING"
# The states of jobs of which no process runs any more.
ENDED: FrozenSet[str] = frozenset(
    "BOOT_FAIL CANCELLED COMPLETED DEADLINE FAILED NODE_FAIL OUT_OF_MEMORY PREEMPTED REVOKED TIMEOUT".split()
)
_HEAD = re.compile(
    r"JobId=(?P<id>[0-9]+)(?: \w+=\S+)*? JobName=.*?(?: HetJobIdSet=\S+)?"
    r" UserId=[^=]*\([0-9]+\) GroupId=[^=]* MCS_label=[^=]* Priority=\S* Nice=\S* Account=[^=]* QOS=[^=]*"
    r"(?: WCKey=[^=]*)? JobState=(?P<state>[A-Z_]+)\S* Reason=(?P<reason>\S*)"
)
_FIELD = re.compile(r" (?P<name>[A-Z]\w*)=(?P<value>\S*)")
_COMMENT = re.compile(r" WorkDir=.*? Comment=(?P<comment>.*?) *(?: StdErr=\S* StdIn=| Power=\S* *$|$)")
_OUTPUT = re.compile(r".* StdOut=(?P<output>/.*?)(?: [A-Z]\w*=\S*)* *$")
_EMPTY = ("(null)", "None", "N/A", "Unknown")


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
        """The id of our job that it runs, "" if another program or the user has submitted it."""
        return job_of_comment(self.comment)


def read_jobs(text: str) -> List[SlurmJob]:
    """Parse the jobs of an answer of `scontrol -o show job`, run with TIME_FORMAT. Lines that are not a job are left out."""
    found = (_read(line) for line in text.splitlines())
    return [job for job in found if job is not None]


def _read(line: str) -> Optional[SlurmJob]:
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


def job_of(fields: Mapping[str, str]) -> SlurmJob:
    """Build a job from the texts of its fields.

    The names are those of scontrol, and in small letters those of SlurmJob: `id` (a number), `state`, `reason`, `comment`,
    `nodes` and `name`. Others may be missing.
    """
    state = fields["state"]
    started, ended = _time(fields, "StartTime"), _time(fields, "EndTime")
    over, pending = state in ENDED or state == COMPLETING, state == PENDING
    return SlurmJob(
        id=int(fields["id"]),
        state=state,
        reason=_text(fields["reason"]),
        submitted=_time(fields, "SubmitTime"),
        started=None if pending else started,
        ended=ended if over else None,
        expected=started if pending else None,
        preempted=_time(fields, "PreemptTime"),
        nodelist=_text(fields.get("NodeList", "")),
        comment=_text(fields["comment"]),
        restarts=_number(fields.get("Restarts", "")),
        requeue=fields.get("Requeue") == "1",
        nodes=_number(fields.get("nodes", "").partition("-")[0]),  # "2-4": at least 2
        name=fields.get("name", ""),
        step=fields.get("step", ""),
        output=fields.get("output", ""),
    )


def _text(value: str) -> str:
    return "" if value in _EMPTY else value


def _time(fields: Mapping[str, str], name: str) -> Optional[float]:
    value = fields.get(name, "")
    return float(value) if re.fullmatch("[0-9]{1,12}", value) else None


def _number(value: str) -> int:
    return int(value) if re.fullmatch("[0-9]{1,9}", value) else 0
