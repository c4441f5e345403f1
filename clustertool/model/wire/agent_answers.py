"""An agent answers each request (messages.py) by one of these types. answers.py checks each answer by these types.

A tuple here is a list in JSON. Times are seconds since the epoch by the node's clock, sizes are bytes. Nodes import this module
for type checking only.
"""

from __future__ import annotations

from typing import Annotated, Any, Dict, Optional, Tuple, TypedDict

from clustertool.model import field_types as fields
from clustertool.model.facts import ContainerFacts, Facts
from clustertool.model.job.state_names import NODE_ANSWERS, JobState, RankState, StartReason
from clustertool.model.shape import one_of
from clustertool.model.wire.event_types import Events, MembershipSample, RankName, SamplePlan

JobStateName = Annotated[str, one_of(JobState)]
StartReasonName = Annotated[str, one_of(StartReason)]
RankStateName = Annotated[str, one_of(RankState)]
StopStateName = Annotated[str, one_of(NODE_ANSWERS)]


class Answer(TypedDict, total=False):
    """`asked`: the laptop's clock before the request and after the answer; the fleet adds it. An empty answer means done."""

    asked: Tuple[float, float]


class ErrorFields(TypedDict):
    """What comes in place of an answer. kind: a class of errors.py."""

    kind: fields.ShortText
    what: fields.ErrorText
    fix: str


# -- jobs


class _SummaryDetails(TypedDict, total=False):
    dir: str
    start: StartReasonName
    final: bool
    started: Optional[fields.Time]  # by the laptop's clock, like ended
    ended: Optional[fields.Time]
    asked: fields.Label  # the id of --job-id
    name: fields.Label  # of the job
    elastic: bool
    left: fields.PerRank[fields.RankKey]  # of which processes live after supervisor and guard have ended


class JobSummary(_SummaryDetails):
    """One job as one node knows it."""

    id: fields.JobId
    state: JobStateName
    node: Optional[fields.NodeIndex]
    owner: Optional[fields.Label]
    created: Optional[fields.Time]
    mode: Optional[fields.Label]
    command: Optional[str]
    nodes: Optional[fields.PerNode[fields.Label]]
    code: Optional[fields.ExitCode]
    reason: Optional[str]


class _Orphans(Answer, total=False):
    orphans: fields.Few[
        Tuple[fields.Label, int]
    ]  # below another ROOT_DIR: the directory of the job, and how many processes


class JobsAnswer(_Orphans):
    jobs: fields.PerJob[JobSummary]


class SameCommandAnswer(Answer):
    starter: fields.Label  # the other machine that has started the same command, "" if none has
    job: fields.Label  # its job, "" while it has none


class BasesAnswer(Answer):
    bases: fields.PerNode[fields.BaseName]


class StatusAnswer(Answer):
    node: fields.NodeIndex
    dir: str
    heartbeat: Optional[float]  # seconds since the last one
    events: Events
    supervised: bool
    usage: Annotated[Dict[fields.Label, Tuple[float, int]], 100_000]  # by pid, CPU seconds and resident bytes
    unknown: str  # why the state is
    output: fields.PerRank[fields.RankOutput]


class MachineCurve(TypedDict):
    cores: int
    total: int
    rows: fields.Curve  # time, busy CPU seconds, bytes used


class CardCurve(TypedDict):
    index: int
    total: int
    rows: fields.Curve  # time, utilisation in percent, bytes used


class LogCurve(TypedDict):
    log_size: int
    progress: fields.Some[Tuple[fields.Time, Optional[float], Optional[float]]]  # time, epoch, step


class RankCurve(RankName, LogCurve):
    rows: fields.Curve  # time, CPU seconds, resident bytes, processes


class RankPlan(RankName):
    devices: fields.PerCard[int]
    shards: int
    command: str


class JobPlan(TypedDict, total=False):
    policy: Annotated[Dict[fields.Label, object], 100]
    work_dir: str
    processes: fields.PerRank[RankPlan]


class JobUsage(TypedDict):
    """What the node's records have about a job besides its events."""

    machine: MachineCurve
    cards: fields.PerCard[CardCurve]
    ranks: fields.PerRank[RankCurve]
    tails: fields.PerRank[Tuple[fields.Role, fields.Rank, fields.LogText]]  # the last lines
    plan: JobPlan


class ReportAnswer(StatusAnswer, JobUsage):
    now: fields.Time


class TailAnswer(Answer):
    text: fields.LogText


class FilesAnswer(Answer):
    """Names relative to log/, with sizes."""

    files: Annotated[Dict[str, int], fields.MOST_FILES]


class _StopDetails(TypedDict, total=False):
    waits: bool  # only a coordinator lives that waits for another node
    why: str


class JobStop(_StopDetails):
    """What became of one job on one node."""

    state: StopStateName
    survivors: fields.PerRank[fields.Label]


class StopAnswer(Answer):
    jobs: fields.ByJob[JobStop]


class CleanAnswer(Answer):
    removed: fields.PerJob[fields.JobId]
    running: fields.PerJob[fields.JobId]
    freed: int  # bytes
    kept: fields.ByJob[Tuple[str, str]]  # of each job that cannot be removed, what and fix


class JoinAnswer(Answer):
    state: fields.JoinStart


class LeaveAnswer(Answer):
    left: bool  # False: the node has accepted the request, and takes part still


class _JoinReportFields(TypedDict, total=False):
    what: fields.ErrorText
    fix: str
    kind: fields.ShortText
    why: fields.ErrorText
    node: fields.Label  # the name of the node that an error is about
    job_dir: fields.Label
    code: fields.ExitCode
    present: int
    nnodes: int


class JoinReportLine(_JoinReportFields):
    """A report of a process that joins a job; node/join/join_report.py has their types."""

    type: fields.ShortText


class JoinReportsAnswer(Answer):
    reports: fields.Few[JoinReportLine]


# -- devices


class _Process(TypedDict):
    pid: fields.Pid


class CardProcess(_Process, total=False):
    user: fields.Label
    name: fields.Label
    job: fields.Label
    role: fields.Label
    rank: fields.Label
    memory: Optional[fields.Size]
    graphics: bool


class CardLock(TypedDict):
    job: fields.Label
    user: fields.Label


class CardValues(TypedDict, total=False):
    """Of one device. Keys that the driver or the tool does not know are missing or null."""

    model: Optional[fields.Label]
    uuid: Optional[fields.Label]
    utilisation: Optional[fields.Gauge]
    memory_used: Optional[fields.Amount]
    memory_total: Optional[fields.Amount]
    memory_free: Optional[fields.Amount]
    temperature: Optional[fields.Amount]
    slowdown: Optional[fields.Amount]
    power: Optional[fields.Gauge]
    power_limit: Optional[fields.Gauge]
    persistence: Optional[bool]
    ecc_corrected: Optional[fields.Amount]
    ecc_uncorrected: Optional[fields.Amount]
    compute_mode: Optional[fields.Label]
    repair: Optional[fields.Label]
    problem: Optional[fields.Label]
    throttle: fields.Few[fields.Label]
    held: Optional[CardLock]
    users: fields.Some[fields.Label]
    processes: fields.Some[CardProcess]


class Card(CardValues):
    index: fields.CardIndex


class NeedsModule(Answer):
    """In place of a DevicesAnswer or GlanceAnswer: the node lacks the NVML module."""

    need: fields.Label  # its digest


class _Used(TypedDict, total=False):
    used: fields.PerCard[Tuple[int, fields.Label]]  # device, and what uses it without a lock


class DevicesAnswer(Answer, _Used):
    kind: fields.Label
    ids: fields.PerCard[int]
    devices: fields.PerCard[Card]
    driver: fields.Label
    cuda: fields.Label
    problem: str


class _SampleDetails(TypedDict, total=False):
    pid: Optional[fields.Pid]
    log: Optional[str]
    seconds: float  # of CPU time
    memory: int  # resident bytes
    quiet: float  # seconds since it printed


class RankSample(RankName, _SampleDetails):
    state: RankStateName
    line: fields.Label  # the last one of its log


class _JobSampleDetails(TypedDict, total=False):
    node: fields.NodeIndex
    command: Optional[str]
    lost: fields.PerNode[fields.NodeIndex]
    plan: SamplePlan
    membership: MembershipSample


class JobSample(_JobSampleDetails):
    job: fields.JobId
    heartbeat: Optional[float]
    ranks: fields.PerRank[RankSample]


class GlanceAnswer(Answer):
    t: fields.Time
    cpu: Tuple[int, int]  # busy and all ticks since the boot
    cpus: int
    memory: Tuple[int, int]  # used and all
    kind: fields.Label
    devices: fields.PerCard[Card]
    problem: str
    jobs: fields.PerJob[JobSample]


# -- checks before a job


# A node builds the fields of these records, as far as it knows them; an answer is no record, since the module of records
# (dataclasses) costs a node more time than its probe.
ProbeAnswer = Annotated[Dict[str, Any], Facts]
ContainerAnswer = Annotated[Dict[str, Any], ContainerFacts]


class OpenedAnswer(Answer):
    ports: fields.PerPort[fields.Port]


class TriesAnswer(Answer):
    # Node, port, result, seconds of a round trip.
    tries: fields.PerRank[Tuple[fields.NodeIndex, fields.Port, fields.Label, float]]


class SpeedAnswer(Answer, total=False):
    speed: float  # bytes a second that arrived; no key if the connection broke


class SeenAnswer(Answer, total=False):
    seen: fields.PerNode[fields.NodeIndex]


# -- jobs in the queue of a scheduler


class SubmittedJob(TypedDict):
    """A job that was given to a scheduler.

    release: the workspace in the store, "" where none was sent. created: by the clock of the machine that has submitted it.
    slurm_id: the job's id there, "" until it is known.
    """

    job: fields.JobId
    name: fields.Label
    asked: fields.Label
    command: str
    mode: fields.Label
    nodes: fields.NodeIndex
    owner: fields.Label
    created: fields.Time
    release: fields.Label
    slurm_id: fields.Label


class SubmissionsAnswer(Answer):
    submissions: fields.PerJob[SubmittedJob]


class SubmissionOutputAnswer(Answer):
    """The end of what the start of a submitted job has printed. path: of the file."""

    path: fields.Label
    text: fields.ErrorText


class ProgramAnswer(Answer):
    """code, stdout, stderr: see node/system/programs.py. path: of the program, "" if there is none."""

    path: fields.Label
    code: fields.ExitCode
    stdout: fields.LogText
    stderr: fields.LogText


# -- dispatch


class PatchAnswer(Answer):
    have: bool  # False: the node lacks the base, so the release is sent in pieces


class StagedAnswer(Answer):
    dir: str


class ImageAnswer(Answer):
    """model.container.container_runtimes.Image: image_id is "" where the node does not have it."""

    image_id: fields.Label
    digest: fields.Label
    size: fields.Signed


class SavedImageAnswer(Answer):
    release: fields.ReleaseName
    packed: fields.PackedManifest  # in base64
    bytes: fields.Size  # of the manifest
    image_id: fields.Label  # that the image has once it was loaded; "" for a .sif file


class TreeAnswer(Answer):
    # path, kind, executable, mtime, size, link's target, ctime
    entries: fields.PerFile[Tuple[str, fields.EntryKind, bool, fields.Mtime, int, str, fields.Mtime]]


class FileAnswer(Answer):
    path: fields.Label  # in the folder, without links
    executable: bool
    modified: fields.Mtime
    size: int
    changed: fields.Mtime  # ctime


class SpansAnswer(Answer):
    # model/job/file_origin.WriteSpan; none: the folder is of one job
    spans: fields.PerJob[Tuple[fields.JobId, fields.Mtime, Optional[fields.Mtime]]]


class RankSessionAnswer(Answer):
    argv: fields.Few[fields.Label]  # of the node's own Python, for a shell of the node


class ContentAnswer(Answer):
    data: fields.LogText  # in base64
    last: bool  # no bytes follow


class VerifyAnswer(Answer):
    """Counts, and names of releases that are damaged or lack a piece."""

    releases: int
    pieces: int
    bytes: int
    damaged: int
    lost: fields.PerJob[fields.ReleaseName]
