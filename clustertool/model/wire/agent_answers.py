"""An agent answers each request (messages.py) by one of these types. answers.py checks each answer by these types.

A tuple here is a list in JSON. Times are seconds since the epoch by the node's clock, sizes are bytes. Nodes import this module
for type checking only.
"""

from __future__ import annotations

from typing import Annotated, Any, Dict, List, Optional, Tuple, TypedDict

from clustertool.model import field_types as fields
from clustertool.model.facts import ContainerFacts, Facts
from clustertool.model.job.progress import Metrics
from clustertool.model.job.stacks import ProcessSample
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
    """The fields of a job's summary that may be missing."""

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
    """What LIST_JOBS finds besides the jobs of this ROOT_DIR."""

    # below another ROOT_DIR: the directory of the job, and how many processes
    orphans: fields.Few[Tuple[fields.Label, int]]


class JobsAnswer(_Orphans):
    """The jobs that a node knows."""

    jobs: fields.PerJob[JobSummary]


class SameCommandAnswer(Answer):
    """Whether another machine of the list has started the same command."""

    starter: fields.Label  # the other machine that has started the same command, "" if none has
    job: fields.Label  # its job, "" while it has none


class BasesAnswer(Answer):
    """The folders of nodes in a shared ROOT_DIR; see node/jobs/records.py."""

    bases: fields.PerNode[fields.BaseName]


# The numbers that a rank had printed in an attempt by a time.
RankMetrics = Tuple[fields.Role, fields.Rank, fields.AttemptNumber, fields.Time, Metrics]


class StatusAnswer(Answer):
    """What a node knows of one job: its events, and its processes as they are now."""

    node: fields.NodeIndex
    dir: str
    heartbeat: Optional[float]  # seconds since the last one
    events: Events
    supervised: bool
    usage: Annotated[Dict[fields.Label, Tuple[float, int]], 100_000]  # by pid, CPU seconds and resident bytes
    unknown: str  # why the state is
    output: fields.PerRank[fields.RankOutput]
    metrics: Annotated[List[RankMetrics], 250_000]  # the newest ones of each rank, of a report their curves


class MachineCurve(TypedDict):
    """The load of a node while the job ran."""

    cores: int
    total: int
    rows: fields.Curve  # time, busy CPU seconds, bytes used


class CardCurve(TypedDict):
    """The load of one device while the job ran."""

    index: int
    total: int
    rows: fields.Curve  # time, utilisation in percent, bytes used


class LogCurve(TypedDict):
    """The size of a rank's log, and the progress that it shows."""

    log_size: int
    progress: fields.Some[Tuple[fields.Time, Optional[float], Optional[float]]]  # time, epoch, step


class RankCurve(RankName, LogCurve):
    """What one rank has used, and its log."""

    rows: fields.Curve  # time, CPU seconds, resident bytes, processes


class RankPlan(RankName):
    """What the plan has of one rank."""

    devices: fields.PerCard[int]
    shards: int
    command: str


class JobPlan(TypedDict, total=False):
    """What the plan has of a job on one node; missing parts are not known."""

    policy: Annotated[Dict[fields.Label, object], 100]
    work_dir: str
    processes: fields.PerRank[RankPlan]


RecordedStacks = Tuple[fields.Time, fields.Some[ProcessSample]]  # (when they were taken, the samples)


class JobUsage(TypedDict):
    """What the node's records have about a job besides its events."""

    machine: MachineCurve
    cards: fields.PerCard[CardCurve]
    ranks: fields.PerRank[RankCurve]
    tails: fields.PerRank[Tuple[fields.Role, fields.Rank, fields.LogText]]  # the last lines
    plan: JobPlan
    stacks: RecordedStacks  # the newest ones since no rank made progress


class ReportAnswer(StatusAnswer, JobUsage):
    """The status of a job, and its curves."""

    now: fields.Time


class TailAnswer(Answer):
    """The last lines of a log."""

    text: fields.LogText


class FilesAnswer(Answer):
    """Names relative to log/, with sizes."""

    files: Annotated[Dict[str, int], fields.MOST_FILES]


class _StopDetails(TypedDict, total=False):
    """The fields of JobStop that may be missing."""

    waits: bool  # only a coordinator lives that waits for another node
    why: str


class JobStop(_StopDetails):
    """What became of one job on one node."""

    state: StopStateName
    survivors: fields.PerRank[fields.Label]


class StopAnswer(Answer):
    """What became of the jobs that were to be stopped."""

    jobs: fields.ByJob[JobStop]


class CleanAnswer(Answer):
    """The jobs that were removed, and those that could not be."""

    removed: fields.PerJob[fields.JobId]
    running: fields.PerJob[fields.JobId]
    freed: int  # bytes
    kept: fields.ByJob[Tuple[str, str]]  # of each job that cannot be removed, what and fix


class JoinAnswer(Answer):
    """What became of the request to join a job."""

    state: fields.JoinStart


class LeaveAnswer(Answer):
    """Whether the node has left an elastic job."""

    left: bool  # False: the node has accepted the request, and takes part still


class _JoinReportFields(TypedDict, total=False):
    """The fields of a report about joining; each type has some of them."""

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
    """The new reports of a process that joins a job."""

    reports: fields.Few[JoinReportLine]


# -- devices


class _Process(TypedDict):
    """The field that each process on a device has."""

    pid: fields.Pid


class CardProcess(_Process, total=False):
    """A process on a device; missing fields are not known."""

    user: fields.Label
    name: fields.Label
    job: fields.Label
    role: fields.Label
    rank: fields.Label
    memory: Optional[fields.Size]
    graphics: bool


class CardLock(TypedDict):
    """The job that has locked a device."""

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
    """One device of a node."""

    index: fields.CardIndex


class NeedsModule(Answer):
    """In place of a DevicesAnswer or GlanceAnswer: the node lacks the NVML module."""

    need: fields.Label  # its digest


class _Used(TypedDict, total=False):
    """What is asked only for --devices auto."""

    used: fields.PerCard[Tuple[int, fields.Label]]  # device, and what uses it without a lock


class DevicesAnswer(Answer, _Used):
    """The devices of a node."""

    kind: fields.Label
    ids: fields.PerCard[int]
    devices: fields.PerCard[Card]
    driver: fields.Label
    cuda: fields.Label
    problem: str


class _SampleDetails(TypedDict, total=False):
    """The fields of a rank's sample that may be missing."""

    pid: Optional[fields.Pid]
    log: Optional[str]
    seconds: float  # of CPU time
    memory: int  # resident bytes
    quiet: float  # seconds since it printed
    metrics: Metrics


class RankSample(RankName, _SampleDetails):
    """One rank as it is now, for `top`."""

    state: RankStateName
    line: fields.Label  # the last one of its log


class _JobSampleDetails(TypedDict, total=False):
    """The fields of a job's sample that may be missing."""

    node: fields.NodeIndex
    command: Optional[str]
    lost: fields.PerNode[fields.NodeIndex]
    plan: SamplePlan
    membership: MembershipSample


class JobSample(_JobSampleDetails):
    """One job on one node as it is now, for `top`."""

    job: fields.JobId
    heartbeat: Optional[float]
    ranks: fields.PerRank[RankSample]


class GlanceAnswer(Answer):
    """A node, its devices and its jobs as they are now, for `top`."""

    t: fields.Time
    cpu: Tuple[int, int]  # busy and all ticks since the boot
    cpus: int
    memory: Tuple[int, int]  # used and all
    kind: fields.Label
    devices: fields.PerCard[Card]
    problem: str
    jobs: fields.PerJob[JobSample]


class StackToolAnswer(Answer):
    """Which py-spy a node needs, and the digests of those that it has."""

    machine: fields.Label
    kept: fields.Few[fields.Label]


class StacksAnswer(Answer):
    """The stacks of a job's processes on a node."""

    samples: fields.Some[ProcessSample]
    fault: fields.Label  # why there are none, or some have only what /proc has; or ""


# -- checks before a job


# A node builds the fields of these records, as far as it knows them; an answer is no record, since the module of records
# (dataclasses) costs a node more time than its probe.
ProbeAnswer = Annotated[Dict[str, Any], Facts]
ContainerAnswer = Annotated[Dict[str, Any], ContainerFacts]


class OpenedAnswer(Answer):
    """The ports at which the node listens for the check of links."""

    ports: fields.PerPort[fields.Port]


class TriesAnswer(Answer):
    """The results of a node's attempts to connect to others."""

    # Node, port, result, seconds of a round trip.
    tries: fields.PerRank[Tuple[fields.NodeIndex, fields.Port, fields.Label, float]]


class SpeedAnswer(Answer, total=False):
    """The bandwidth of one link."""

    speed: float  # bytes a second that arrived; no key if the connection broke


class SeenAnswer(Answer, total=False):
    """The nodes whose marks are in this ROOT_DIR."""

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
    """The jobs that were given to a scheduler."""

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
    """Whether the release could be made of an earlier one."""

    have: bool  # False: the node lacks the base, so the release is sent in pieces


class StagedAnswer(Answer):
    """The folder of a release."""

    dir: str


class ImageAnswer(Answer):
    """model.container.container_runtimes.Image: image_id is "" where the node does not have it."""

    image_id: fields.Label
    digest: fields.Label
    size: fields.Signed


class SavedImageAnswer(Answer):
    """A release with the files of an image."""

    release: fields.ReleaseName
    packed: fields.PackedManifest  # in base64
    bytes: fields.Size  # of the manifest
    image_id: fields.Label  # that the image has once it was loaded; "" for a .sif file


class TreeAnswer(Answer):
    """The content of a folder."""

    # path, kind, executable, mtime, size, link's target, ctime
    entries: fields.PerFile[Tuple[str, fields.EntryKind, bool, fields.Mtime, int, str, fields.Mtime]]


class FileAnswer(Answer):
    """One file of a folder."""

    path: fields.Label  # in the folder, without links
    executable: bool
    modified: fields.Mtime
    size: int
    changed: fields.Mtime  # ctime


class SpansAnswer(Answer):
    """The times in which jobs could write to a folder."""

    # model/job/file_origin.WriteSpan; none: the folder is of one job
    spans: fields.PerJob[Tuple[fields.JobId, fields.Mtime, Optional[fields.Mtime]]]


class RankSessionAnswer(Answer):
    """The command that starts a program inside a rank."""

    argv: fields.Few[fields.Label]  # of the node's own Python, for a shell of the node


class ContentAnswer(Answer):
    """A part of a file."""

    data: fields.LogText  # in base64
    last: bool  # no bytes follow


class VerifyAnswer(Answer):
    """Counts, and names of releases that are damaged or lack a piece."""

    releases: int
    pieces: int
    bytes: int
    damaged: int
    lost: fields.PerJob[fields.ReleaseName]
