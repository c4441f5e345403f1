"""Types of the requests to an agent, without `type`, `id` and `now`, which the agent client adds (messages.py).

A tuple here is a list in JSON. `job` is an id, or the beginning of one unless `exact`. Modules import these types for type
checking only.
"""

from __future__ import annotations

from typing import Dict, List, Literal, Optional, Sequence, Tuple, TypedDict, Union

from clustertool.model.wire.spec_types import Spec

Target = Tuple[int, str, int]  # node, address, port
Step = Literal["leave", "look", "forget"]


class NoFields(TypedDict):
    pass


# -- jobs


class _Exact(TypedDict, total=False):
    exact: bool


class JobRequest(_Exact):
    """About one job; job "" is all."""

    job: str


class ReportRequest(JobRequest):
    """points: how many values a curve may have."""

    points: int


class TailRequest(JobRequest):
    log: str
    lines: int


class StopHow(TypedDict):
    """by: what asked for it, in words; code: exit code of the job; grace: seconds between TERM and KILL."""

    by: str
    code: int
    grace: float
    force: bool


class StopRequest(JobRequest, StopHow):
    pass


class CleanRequest(JobRequest, total=False):
    """Jobs older than `older_than` seconds by the laptop's clock `now`, which the agent client adds."""

    older_than: float
    dry: bool
    now: float


class FollowWanted(TypedDict, total=False):
    """What to read. See node/jobs/follow.py."""

    logs: Union[Literal["all"], Sequence[Tuple[str, int]]]
    file: str
    follow: bool
    tail: Optional[int]
    attempt: Optional[int]
    offsets: Dict[str, int]
    events_at: int
    by_time: bool


class FollowRequest(FollowWanted):
    job: str


class PlaceRequest(TypedDict):
    """release: a name, "" where the workspace lies on the node already."""

    spec: Spec
    release: str


class UnplaceRequest(TypedDict):
    job_dir: str
    token: str


class _Now(TypedDict, total=False):
    now: float


class LaunchRequest(_Now):
    """What never lies on a disk: secrets, and the job's certificate and key. `now`: the laptop's clock, added on sending."""

    job_dir: str
    secrets: Dict[str, str]
    certificate: str
    key: str


# -- devices


class DevicesRequest(TypedDict):
    """nvml: digest of the laptop's NVML module."""

    nvml: str


class GlanceRequest(DevicesRequest):
    job: str


class ModuleRequest(TypedDict):
    """data: the NVML module, compressed with zlib, in base64."""

    nvml: str
    data: str


# -- checks before a job


class JobEnvironment(TypedDict, total=False):
    """How the environment of a rank is made, and which packages to search for in it. Empty: do not try."""

    prelude: str
    first_path: str
    ld_library_path: str
    here: bool
    env: Dict[str, str]
    packages: List[str]


class ProbeWanted(TypedDict, total=False):
    """What a command wants to know besides. long, job: only `check` asks for what takes longer."""

    job_workspace: str
    listing: bool
    patterns: List[str]
    release: str
    long: bool
    job: JobEnvironment


class ProbeRequest(ProbeWanted):
    root_dir: str
    nic: str
    address: str
    explicit_address: str
    ports: List[int]


class MeetRequest(TypedDict):
    step: Step
    token: str
    node: int


class OpenRequest(TypedDict):
    """Listen at these ports until the check ends."""

    node: int
    address: str
    ports: List[int]
    token: str


class TryRequest(TypedDict):
    """Connect to each target within so many seconds."""

    token: str
    seconds: float
    targets: List[Target]


class SendRequest(TypedDict):
    """Fill the connection to a target for so many seconds."""

    token: str
    seconds: float
    target: Target


# -- dispatch


class PatchSteps(TypedDict):
    """How a release is made of `base`; steps: model.dispatch.manifest.delta; pieces: base64 by name."""

    base: str
    steps: Sequence[Union[str, List[int]]]
    manifest: str
    pieces: Dict[str, str]


class PatchRequest(PatchSteps):
    release: str
    groups: Optional[Sequence[str]]


class StageRequest(TypedDict):
    release: str


class BuildRequest(StageRequest):
    """manifest: its name; packed: the manifest as it travels, in base64; size: of its text."""

    manifest: str
    packed: str
    size: int
    groups: Optional[Sequence[str]]


class FolderRequest(TypedDict):
    dir: str


class ContentRequest(FolderRequest):
    """Some bytes of the file `path` in the folder, from offset `at`."""

    path: str
    at: int


class VerifyRequest(TypedDict):
    remove: bool


class RelaySecret(TypedDict, total=False):
    certificate: str
    key: str


class RelayRequest(RelaySecret):
    """Start a relay. Without certificate and key the laptop sends everything. report: seconds between two reports."""

    release: str
    manifest: str
    size: int
    count: int
    groups: Optional[Sequence[str]]
    helper: bool
    report: float
    address: str
