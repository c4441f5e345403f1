"""Types of what an agent answers to each request. Checks of the same fields: answers.py.

A tuple here is a list in JSON. Times are seconds since the epoch by the node's clock, sizes are bytes. Modules import these
types for type checking only.
"""

from __future__ import annotations

from typing import Dict, List, Optional, Tuple, TypedDict

from clustertool.model.wire.event_types import Event, RankOutput, RankPlaces


class Answer(TypedDict, total=False):
    """`asked`: the laptop's clock before the request and after the answer; the fleet adds it. An empty answer means done."""

    asked: Tuple[float, float]


# -- jobs


class JobSummary(TypedDict):
    """One job as one node knows it."""

    id: str
    state: str
    node: Optional[int]
    owner: Optional[str]
    created: Optional[float]
    mode: Optional[str]
    command: Optional[str]
    nodes: Optional[List[str]]
    code: Optional[int]
    reason: Optional[str]
    dir: str
    start: str
    final: bool


class JobsAnswer(Answer):
    jobs: List[JobSummary]


class StatusAnswer(Answer):
    """`usage`: by pid, CPU seconds and resident bytes. `heartbeat`: seconds since the last one. `unknown`: why the state is."""

    node: int
    dir: str
    heartbeat: Optional[float]
    events: List[Event]
    supervised: bool
    usage: Dict[str, Tuple[float, int]]
    unknown: str
    output: List[RankOutput]


class MachineCurve(TypedDict):
    """rows: time, busy CPU seconds, bytes used."""

    cores: int
    total: int
    rows: List[Tuple[float, ...]]


class CardCurve(TypedDict):
    """rows: time, utilisation in percent, bytes used."""

    index: int
    total: int
    rows: List[Tuple[float, ...]]


class LogCurve(TypedDict):
    """progress: time, epoch, step."""

    log_size: int
    progress: List[Tuple[float, Optional[float], Optional[float]]]


class RankCurve(LogCurve):
    """rows: time, CPU seconds, resident bytes, processes."""

    role: str
    rank: int
    rows: List[Tuple[float, ...]]


class RankPlan(TypedDict):
    role: str
    rank: int
    devices: List[int]
    shards: int
    command: str


class JobPlan(TypedDict, total=False):
    policy: Dict[str, object]
    work_dir: str
    processes: List[RankPlan]


class JobUsage(TypedDict):
    """What the node's records tell about a job besides its events. tails: role, rank, the last lines."""

    machine: MachineCurve
    cards: List[CardCurve]
    ranks: List[RankCurve]
    tails: List[Tuple[str, int, str]]
    plan: JobPlan


class ReportAnswer(StatusAnswer, JobUsage):
    now: float


class TailAnswer(Answer):
    text: str


class FilesAnswer(Answer):
    """Names relative to log/, with sizes."""

    files: Dict[str, int]


class _StopDetails(TypedDict, total=False):
    waits: bool
    why: str


class JobStop(_StopDetails):
    """What became of one job on one node. `waits`: only a coordinator lives that waits for another node."""

    state: str
    survivors: List[str]


class StopAnswer(Answer):
    jobs: Dict[str, JobStop]


class CleanAnswer(Answer):
    """`freed` bytes; `kept`: of each job that cannot be removed what and fix."""

    removed: List[str]
    running: List[str]
    freed: int
    kept: Dict[str, Tuple[str, str]]


# -- devices


class CardProcess(TypedDict, total=False):
    pid: int
    user: str
    name: str
    job: str
    role: str
    rank: str
    memory: Optional[int]
    graphics: bool


class CardLock(TypedDict):
    job: str
    user: str


class Card(TypedDict, total=False):
    """One device. Keys that the driver or the tool does not know are missing or null."""

    index: int
    model: Optional[str]
    uuid: Optional[str]
    utilisation: Optional[float]
    memory_used: Optional[int]
    memory_total: Optional[int]
    memory_free: Optional[int]
    temperature: Optional[int]
    slowdown: Optional[int]
    power: Optional[float]
    power_limit: Optional[float]
    persistence: Optional[bool]
    ecc_corrected: Optional[int]
    ecc_uncorrected: Optional[int]
    compute_mode: Optional[str]
    repair: Optional[str]
    problem: Optional[str]
    throttle: List[str]
    held: Optional[CardLock]
    users: List[str]
    processes: List[CardProcess]


class NeedsModule(Answer, total=False):
    """`need`: the digest of the NVML module that the node lacks. The answer has no other key then."""

    need: str


class DevicesAnswer(NeedsModule):
    """`used`: device, and what uses it without a lock."""

    kind: str
    ids: List[int]
    devices: List[Card]
    driver: str
    cuda: str
    problem: str
    used: List[Tuple[int, str]]


class _SampleDetails(TypedDict, total=False):
    seconds: float
    memory: int
    quiet: float


class RankSample(_SampleDetails):
    """A rank now: CPU seconds, resident bytes, the last line of its log, seconds since it printed."""

    role: str
    rank: int
    state: str
    pid: Optional[int]
    log: Optional[str]
    line: str


class SamplePlan(TypedDict):
    nodes: List[str]
    places: List[RankPlaces]


class _JobSampleDetails(TypedDict, total=False):
    plan: SamplePlan


class JobSample(_JobSampleDetails):
    job: str
    node: int
    heartbeat: Optional[float]
    ranks: List[RankSample]
    lost: List[int]
    command: Optional[str]


class GlanceAnswer(NeedsModule):
    """cpu: busy and all ticks since the boot; memory: used and all bytes."""

    t: float
    cpu: Tuple[int, int]
    cpus: int
    memory: Tuple[int, int]
    kind: str
    devices: List[Card]
    problem: str
    jobs: List[JobSample]


# -- checks before a job


Problem = Tuple[str, str, str, str]  # column of the check, level, what, fix


class ProbeAnswer(Answer, total=False):
    """model.facts.Facts describes the fields."""

    hostname: str
    address: str
    nic: str
    boot_id: str
    netns: str
    root: str
    root_id: str
    root_hint: str
    home: str
    user: str
    python: str
    rsync: bool
    cpus: int
    devices: List[int]
    device_kind: str
    devices_seen: bool
    modules: List[str]
    locked: List[Tuple[int, str, str]]
    used: List[Tuple[int, str]]
    ephemeral: Tuple[int, int]
    busy: List[int]
    listeners: List[Tuple[int, str]]
    problems: List[Problem]
    releases: List[str]
    memory: Tuple[int, int]
    load: float
    disk_free: int
    inodes: int
    shm: int
    limits: List[Tuple[str, int, int]]
    proxies: List[str]
    mtu: int
    rdma: bool
    own: Optional[str]
    listing: List[str]
    job_toml: str
    packages: List[Tuple[str, str]]
    job_proxies: List[str]
    no_proxy: str
    leftovers: List[Tuple[str, int]]
    examined: bool
    time: float
    took: float


class OpenedAnswer(Answer):
    ports: List[int]


class TriesAnswer(Answer):
    """node, port, result, seconds of a round trip."""

    tries: List[Tuple[int, int, str, float]]


class SpeedAnswer(Answer, total=False):
    """bytes a second that arrived; no key if the connection broke."""

    speed: float


class SeenAnswer(Answer, total=False):
    seen: List[int]


# -- dispatch


class PatchAnswer(Answer):
    """False: the node lacks the base, so the release is sent in pieces."""

    have: bool


class StagedAnswer(Answer):
    dir: str


class TreeAnswer(Answer):
    """path, kind, executable, mtime in ns, size, target of a link."""

    entries: List[Tuple[str, str, bool, int, int, str]]


class ContentAnswer(Answer):
    """data: in base64; last: no bytes follow."""

    data: str
    last: bool


class VerifyAnswer(Answer):
    """Counts, and names of releases that are damaged or lack a piece."""

    releases: int
    pieces: int
    bytes: int
    damaged: int
    lost: List[str]
