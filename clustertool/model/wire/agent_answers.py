"""An agent answers each request (messages.py) by one of these types. answers.py checks each answer by these types.

A tuple here is a list in JSON. Times are seconds since the epoch by the node's clock, sizes are bytes. Nodes import this module
for type checking only.
"""

from __future__ import annotations

from typing import Annotated, Any, Dict, Optional, Tuple, TypedDict

from clustertool.model import field_types as f
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

    kind: f.ShortText
    what: f.ErrorText
    fix: str


# -- jobs


class _SummaryDetails(TypedDict, total=False):
    dir: str
    start: StartReasonName
    final: bool
    started: Optional[f.Time]  # by the laptop's clock, like ended
    ended: Optional[f.Time]
    asked: f.Label  # the id of --job-id
    name: f.Label  # of the job
    elastic: bool
    left: f.PerRank[f.RankKey]  # of which processes live after supervisor and guard have ended


class JobSummary(_SummaryDetails):
    """One job as one node knows it."""

    id: f.JobId
    state: JobStateName
    node: Optional[f.NodeIndex]
    owner: Optional[f.Label]
    created: Optional[f.Time]
    mode: Optional[f.Label]
    command: Optional[str]
    nodes: Optional[f.PerNode[f.Label]]
    code: Optional[f.ExitCode]
    reason: Optional[str]


class _Orphans(Answer, total=False):
    orphans: f.Few[Tuple[f.Label, int]]  # below another ROOT_DIR: the directory of the job, and how many processes


class JobsAnswer(_Orphans):
    jobs: f.PerJob[JobSummary]


class SameCommandAnswer(Answer):
    starter: f.Label  # the other machine that has started the same command, "" if none has
    job: f.Label  # its job, "" while it has none


class BasesAnswer(Answer):
    bases: f.PerNode[f.BaseName]


class StatusAnswer(Answer):
    node: f.NodeIndex
    dir: str
    heartbeat: Optional[float]  # seconds since the last one
    events: Events
    supervised: bool
    usage: Annotated[Dict[f.Label, Tuple[float, int]], 100_000]  # by pid, CPU seconds and resident bytes
    unknown: str  # why the state is
    output: f.PerRank[f.RankOutput]


class MachineCurve(TypedDict):
    cores: int
    total: int
    rows: f.Curve  # time, busy CPU seconds, bytes used


class CardCurve(TypedDict):
    index: int
    total: int
    rows: f.Curve  # time, utilisation in percent, bytes used


class LogCurve(TypedDict):
    log_size: int
    progress: f.Some[Tuple[f.Time, Optional[float], Optional[float]]]  # time, epoch, step


class RankCurve(RankName, LogCurve):
    rows: f.Curve  # time, CPU seconds, resident bytes, processes


class RankPlan(RankName):
    devices: f.PerCard[int]
    shards: int
    command: str


class JobPlan(TypedDict, total=False):
    policy: Annotated[Dict[f.Label, object], 100]
    work_dir: str
    processes: f.PerRank[RankPlan]


class JobUsage(TypedDict):
    """What the node's records have about a job besides its events."""

    machine: MachineCurve
    cards: f.PerCard[CardCurve]
    ranks: f.PerRank[RankCurve]
    tails: f.PerRank[Tuple[f.Role, f.Rank, f.LogText]]  # the last lines
    plan: JobPlan


class ReportAnswer(StatusAnswer, JobUsage):
    now: f.Time


class TailAnswer(Answer):
    text: f.LogText


class FilesAnswer(Answer):
    """Names relative to log/, with sizes."""

    files: Annotated[Dict[str, int], f.MOST_FILES]


class _StopDetails(TypedDict, total=False):
    waits: bool  # only a coordinator lives that waits for another node
    why: str


class JobStop(_StopDetails):
    """What became of one job on one node."""

    state: StopStateName
    survivors: f.PerRank[f.Label]


class StopAnswer(Answer):
    jobs: f.ByJob[JobStop]


class CleanAnswer(Answer):
    removed: f.PerJob[f.JobId]
    running: f.PerJob[f.JobId]
    freed: int  # bytes
    kept: f.ByJob[Tuple[str, str]]  # of each job that cannot be removed, what and fix


class JoinAnswer(Answer):
    state: f.JoinStart


class LeaveAnswer(Answer):
    left: bool  # False: the node has accepted the request, and takes part still


class _JoinReportFields(TypedDict, total=False):
    what: f.ErrorText
    fix: str
    kind: f.ShortText
    why: f.ErrorText
    node: f.Label  # the name of the node that an error is about
    job_dir: f.Label
    code: f.ExitCode
    present: int
    nnodes: int


class JoinReportLine(_JoinReportFields):
    """A report of a process that joins a job; node/join/join_report.py has their types."""

    type: f.ShortText


class JoinReportsAnswer(Answer):
    reports: f.Few[JoinReportLine]


# -- devices


class _Process(TypedDict):
    pid: f.Pid


class CardProcess(_Process, total=False):
    user: f.Label
    name: f.Label
    job: f.Label
    role: f.Label
    rank: f.Label
    memory: Optional[f.Size]
    graphics: bool


class CardLock(TypedDict):
    job: f.Label
    user: f.Label


class CardValues(TypedDict, total=False):
    """Of one device. Keys that the driver or the tool does not know are missing or null."""

    model: Optional[f.Label]
    uuid: Optional[f.Label]
    utilisation: Optional[f.Gauge]
    memory_used: Optional[f.Amount]
    memory_total: Optional[f.Amount]
    memory_free: Optional[f.Amount]
    temperature: Optional[f.Amount]
    slowdown: Optional[f.Amount]
    power: Optional[f.Gauge]
    power_limit: Optional[f.Gauge]
    persistence: Optional[bool]
    ecc_corrected: Optional[f.Amount]
    ecc_uncorrected: Optional[f.Amount]
    compute_mode: Optional[f.Label]
    repair: Optional[f.Label]
    problem: Optional[f.Label]
    throttle: f.Few[f.Label]
    held: Optional[CardLock]
    users: f.Some[f.Label]
    processes: f.Some[CardProcess]


class Card(CardValues):
    index: f.CardIndex


class NeedsModule(Answer):
    """In place of a DevicesAnswer or GlanceAnswer: the node lacks the NVML module."""

    need: f.Label  # its digest


class _Used(TypedDict, total=False):
    used: f.PerCard[Tuple[int, f.Label]]  # device, and what uses it without a lock


class DevicesAnswer(Answer, _Used):
    kind: f.Label
    ids: f.PerCard[int]
    devices: f.PerCard[Card]
    driver: f.Label
    cuda: f.Label
    problem: str


class _SampleDetails(TypedDict, total=False):
    pid: Optional[f.Pid]
    log: Optional[str]
    seconds: float  # of CPU time
    memory: int  # resident bytes
    quiet: float  # seconds since it printed


class RankSample(RankName, _SampleDetails):
    state: RankStateName
    line: f.Label  # the last one of its log


class _JobSampleDetails(TypedDict, total=False):
    node: f.NodeIndex
    command: Optional[str]
    lost: f.PerNode[f.NodeIndex]
    plan: SamplePlan
    membership: MembershipSample


class JobSample(_JobSampleDetails):
    job: f.JobId
    heartbeat: Optional[float]
    ranks: f.PerRank[RankSample]


class GlanceAnswer(Answer):
    t: f.Time
    cpu: Tuple[int, int]  # busy and all ticks since the boot
    cpus: int
    memory: Tuple[int, int]  # used and all
    kind: f.Label
    devices: f.PerCard[Card]
    problem: str
    jobs: f.PerJob[JobSample]


# -- checks before a job


# A node builds the fields of these records, as far as it knows them; an answer is no record, since the module of records
# (dataclasses) costs a node more time than its probe.
ProbeAnswer = Annotated[Dict[str, Any], Facts]
ContainerAnswer = Annotated[Dict[str, Any], ContainerFacts]


class OpenedAnswer(Answer):
    ports: f.PerPort[f.Port]


class TriesAnswer(Answer):
    tries: f.PerRank[Tuple[f.NodeIndex, f.Port, f.Label, float]]  # node, port, result, seconds of a round trip


class SpeedAnswer(Answer, total=False):
    speed: float  # bytes a second that arrived; no key if the connection broke


class SeenAnswer(Answer, total=False):
    seen: f.PerNode[f.NodeIndex]


# -- jobs in the queue of a scheduler


class SubmittedJob(TypedDict):
    """A job that was given to a scheduler.

    release: the workspace in the store, "" where none was sent. created: by the clock of the machine that has submitted it.
    slurm_id: the job's id there, "" until it is known.
    """

    job: f.JobId
    name: f.Label
    asked: f.Label
    command: str
    mode: f.Label
    nodes: f.NodeIndex
    owner: f.Label
    created: f.Time
    release: f.Label
    slurm_id: f.Label


class SubmissionsAnswer(Answer):
    submissions: f.PerJob[SubmittedJob]


class SubmissionOutputAnswer(Answer):
    """The end of what the start of a submitted job has printed. path: of the file."""

    path: f.Label
    text: f.ErrorText


class ProgramAnswer(Answer):
    """code, stdout, stderr: see node/system/programs.py. path: of the program, "" if there is none."""

    path: f.Label
    code: f.ExitCode
    stdout: f.LogText
    stderr: f.LogText


# -- dispatch


class PatchAnswer(Answer):
    have: bool  # False: the node lacks the base, so the release is sent in pieces


class StagedAnswer(Answer):
    dir: str


class ImageAnswer(Answer):
    """model.container.container_runtimes.Image: image_id is "" where the node does not have it."""

    image_id: f.Label
    digest: f.Label
    size: f.Signed


class SavedImageAnswer(Answer):
    release: f.ReleaseName
    packed: f.PackedManifest  # in base64
    bytes: f.Size  # of the manifest
    image_id: f.Label  # that the image has once it was loaded; "" for a .sif file


class TreeAnswer(Answer):
    # path, kind, executable, mtime, size, link's target, ctime
    entries: f.PerFile[Tuple[str, f.EntryKind, bool, f.Mtime, int, str, f.Mtime]]


class FileAnswer(Answer):
    path: f.Label  # in the folder, without links
    executable: bool
    modified: f.Mtime
    size: int
    changed: f.Mtime  # ctime


class SpansAnswer(Answer):
    # model/job/file_origin.WriteSpan; none: the folder is of one job
    spans: f.PerJob[Tuple[f.JobId, f.Mtime, Optional[f.Mtime]]]


class RankSessionAnswer(Answer):
    argv: f.Few[f.Label]  # of the node's own Python, for a shell of the node


class ContentAnswer(Answer):
    data: f.LogText  # in base64
    last: bool  # no bytes follow


class VerifyAnswer(Answer):
    """Counts, and names of releases that are damaged or lack a piece."""

    releases: int
    pieces: int
    bytes: int
    damaged: int
    lost: f.PerJob[f.ReleaseName]
