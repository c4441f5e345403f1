"""Requests to an agent have these types, without `type`, `id` and `now`, which the agent client adds (messages.py).

A tuple here is a list in JSON. `job` is an id if `exact`, else what a user calls jobs (model/job/job_names). Modules import
these types for type checking only.
"""

from __future__ import annotations

from typing import Dict, List, Literal, Mapping, Optional, Sequence, Tuple, TypedDict, Union

from clustertool.model.wire.agent_answers import SubmittedJob
from clustertool.model.wire.spec_types import Spec
from clustertool.model.wire.supervisor_messages import LaptopNotice, StacksWanted
from clustertool.model.wire.supervisor_messages import StopHow as StopHow

Target = Tuple[int, str, int]  # node, address, port
Step = Literal["leave", "find", "forget"]


class NoFields(TypedDict):
    """A request without fields."""


# -- jobs


class _OneJob(TypedDict):
    """The id of the job that a request is about."""

    job: str


class JobRequest(_OneJob, total=False):
    """A request about one job, or all: `job` is then ""."""

    exact: bool  # `job` is an id


class AttachedRequest(JobRequest, LaptopNotice):
    """A laptop follows the job."""


class OutputRequest(JobRequest, total=False):
    """Read the output of a submission."""

    path: str  # of the output of a job that was submitted by hand; it has no folder


class SignalRequest(_OneJob):
    """A signal for the ranks of a job on one node: see model/rank_signals.py."""

    number: int


class BundleRequest(_OneJob):
    """Read a part of the bundle of a job that joins."""

    at: int  # from which some bytes are requested


class RankSessionRequest(_OneJob):
    """Find the command that starts a program inside a rank."""

    role: str
    rank: int


class SameCommandRequest(TypedDict):
    """See node/jobs/same_command.py.

    starter: the machine on which the command was typed (Facts.machine). at: its position in the list of nodes. start: the job
    is to start now.
    """

    command: str  # a digest of what starts a job
    starter: str
    at: int
    start: bool


class ReportRequest(JobRequest):
    """Read the status and the curves of a job."""

    points: int  # how many values a curve may have


class TailRequest(JobRequest):
    """Read the last lines of a log."""

    log: str
    lines: int


class StopRequest(JobRequest, StopHow):
    """End a job, or all jobs."""


class CleanRequest(JobRequest, total=False):
    """Remove ended jobs."""

    older_than: float  # seconds, by the laptop's clock `now`, which the agent client adds
    spare: Sequence[str]  # jobs that stay: their end is not proved
    ended: Sequence[str]  # jobs of which the engine has proved that they have ended
    dry: bool
    now: float


class FollowWanted(TypedDict, total=False):
    """What to read. See node/jobs/follow.py. since, now: seconds since the epoch, by the laptop's clock."""

    logs: Union[str, Sequence[Tuple[str, int]]]
    file: str
    follow: bool
    tail: Optional[int]
    attempt: Optional[int]
    offsets: Dict[str, int]
    events_at: int
    by_time: bool
    since: float
    now: float  # added by the agent client


class FollowRequest(_OneJob, FollowWanted):
    """Send logs and events of a job as they come."""


class _Resumed(TypedDict, total=False):
    """What is copied from an ended job."""

    resume: str  # the id of an ended job, whose output is copied into the new one
    keep: Sequence[str]  # other files and folders of its directory that are copied, too: those that are on the node


class PlaceRequest(_Resumed):
    """Make the directory of a job, with its workspace."""

    spec: Spec
    release: str  # its name, "" where the workspace lies on the node already


class _Again(TypedDict, total=False):
    """Whether an engine starts the job again."""

    again: bool  # the job was started before: its directory stays


class UnplaceRequest(_Again):
    """Take back what PlaceRequest has made."""

    job_dir: str
    token: str


class _Now(TypedDict, total=False):
    """The time of the request."""

    now: float


class LaunchRequest(_Now):
    """What never lies on a disk: secrets, and the job's certificate and key. `now`: the laptop's clock, added on sending.

    notify: NOTIFY, to which the coordinator sends, and which all nodes mask.
    """

    job_dir: str
    secrets: Dict[str, str]
    notify: List[str]
    certificate: str
    key: str


class JoinRequest(_OneJob):
    """join: the text of a join file (model/joining/join_file.py), which has secrets and never lies on a disk."""

    join: str
    code: str  # digest of the code that joins
    again: bool  # also where the node was released, or its part of the job has ended


class _OfMember(TypedDict, total=False):
    """The exit code of a node that leaves."""

    code: int  # by a signal for a command that was typed here: with which this node ends. The coordinator's does not leave


class LeaveRequest(_OneJob, _OfMember):
    """Release the node from an elastic job."""

    by: str
    seconds: float  # to wait until the node has left


class JoinCodeRequest(TypedDict):
    """Store the code that a machine needs to join a job."""

    digest: str
    data: str  # the modules that an agent does not have: name and text of each with NUL between them, zlib, in base64


class JoinReportsRequest(_OneJob):
    """Return the new reports of a process that joins a job."""

    seconds: float  # to wait for a report


# -- devices


class DevicesRequest(TypedDict):
    """Read the devices of a node."""

    nvml: str  # digest of the laptop's NVML module


class GlanceRequest(DevicesRequest):
    """Sample a node and its jobs, for `top`."""

    job: str


class SentFileRequest(TypedDict):
    """Store a file by its digest: the NVML module, or py-spy."""

    kind: str  # "nvml", "py-spy"
    digest: str
    data: str  # compressed with zlib, in base64


class StacksRequest(_OneJob, StacksWanted):
    """Take the stacks of a job's processes."""


# -- checks before a job


class JobEnvironment(TypedDict, total=False):
    """How the environment of a rank is made, and which packages to search for in it. Empty: do not try."""

    prelude: str
    first_path: str
    ld_library_path: str
    here: bool
    env: Dict[str, str]
    packages: List[str]
    engine: str  # as in Spec


class ContainerWanted(TypedDict):
    """The container of a job: the node chooses the runtime. model/container has the meaning of the fields."""

    image: str
    runtime: str
    options: bool  # the user has some
    volumes: List[str]  # sources that are paths
    gpu: bool  # the node has GPUs of NVIDIA


class EarlierWanted(TypedDict):
    """Which earlier jobs a new job may belong to (node/jobs/queries.py). "": none by this."""

    asked: str  # --job-id
    name: str
    resume: str  # what --resume names
    owner: str
    workspace: str
    keep: Sequence[str]  # files and folders of the job's directory: which of them are there


class ProbeWanted(TypedDict, total=False):
    """What a command wants to know besides."""

    earlier: EarlierWanted  # with the request of `run` only
    job: JobEnvironment  # with the request of `check` only
    job_workspace: str
    listing: bool
    release: str
    mpi: JobEnvironment  # of a job in mode mpi: packages are daemons of mpirun
    engine: str  # that has started the node and allocates its devices; "": none
    job_path: List[str]  # PATH of the job, "" for that of the node; where neither PRELUDE nor an image changes it


class ProbeRequest(ProbeWanted):
    """Probe the node for the plan of a job, or for a check."""

    root_dir: str
    nic: str
    address: str
    explicit_address: str
    ports: List[int]


class MeetRequest(TypedDict):
    """A step of the test whether nodes share ROOT_DIR (node/probe/shared_root.py)."""

    step: Step
    token: str
    node: int


class OpenRequest(TypedDict):
    """Listen at these ports until the check ends."""

    node: int
    address: str
    ports: List[int]
    token: str


class _TimedTest(TypedDict):
    """What tests of links have in common."""

    token: str
    seconds: float


class TryRequest(_TimedTest):
    """Connect to other nodes."""

    targets: List[Target]  # connect to each one within that time


class SendRequest(_TimedTest):
    """Measure the bandwidth to another node."""

    target: Target  # fill the connection to it for that time


# -- jobs in the queue of a scheduler


class SubmitRequest(TypedDict):
    """Store the files of a job that is given to a scheduler."""

    about: SubmittedJob
    files: Dict[str, str]  # in base64, by name


class WithdrawRequest(_OneJob, total=False):
    """Remove the files of a submission."""

    only_bundle: bool  # what else is in the folder stays: the job has records


class SubmittedRequest(_OneJob):
    """Store the id that the scheduler has given to a job."""

    slurm_id: str


class _ProgramShell(TypedDict, total=False):
    """Whether a program runs in a login shell."""

    login: bool  # run it in the environment of a login shell


class ProgramRequest(_ProgramShell):
    """Run a program, and return its output."""

    argv: Sequence[str]
    env: Mapping[str, str]  # in addition to that of the agent, or of a login shell
    seconds: float  # until it is killed


# -- dispatch


class PatchSteps(TypedDict):
    """How a release is made of `base`; steps: model.dispatch.manifest.delta; pieces: base64 by name."""

    base: str
    steps: Sequence[Union[str, List[int]]]
    manifest: str
    pieces: Dict[str, str]


class PatchRequest(PatchSteps):
    """Make a release of an earlier one."""

    release: str
    groups: Optional[Sequence[str]]


class StageRequest(TypedDict):
    """Make a folder with the files of a release."""

    release: str


class BuildRequest(StageRequest):
    """Make a release of the pieces that are there."""

    manifest: str  # its name
    packed: str  # the manifest as it travels, in base64
    size: int  # of its text
    groups: Optional[Sequence[str]]


class ImageRequest(TypedDict):
    """image: as the user names it. program: of the runtime, its absolute path."""

    runtime: str
    program: str
    image: str


class SaveImageRequest(ImageRequest):
    """Save an image of the node as a release."""

    kind: str  # of the files that are written: model/container/container_runtimes


class ImageCopy(TypedDict):
    """A release with the files of an image."""

    release: str
    kind: str  # of these files: model/container/container_runtimes
    image_id: str  # that the image has once it was loaded
    bytes: int  # in the store of the runtime


class LoadImageRequest(ImageRequest, ImageCopy):
    """The image of a copy is to be loaded."""


class FolderRequest(TypedDict):
    """A request about a folder."""

    dir: str


class SpansRequest(_OneJob, FolderRequest):
    """dir: a folder of the job. path: the same one, relative to a job's directory or its working directory."""

    path: str


class FileRequest(FolderRequest):
    """A request about a file."""

    path: str  # of a file in the folder


class ContentRequest(FileRequest):
    """Read a part of a file."""

    at: int  # from which some bytes are requested


class VerifyRequest(TypedDict):
    """Check all releases and pieces of the store, and remove damaged ones if `remove`."""

    remove: bool


class RelaySecret(TypedDict, total=False):
    """The certificate and the key of the relays of a dispatch."""

    certificate: str
    key: str


class RelayRequest(RelaySecret):
    """Start a relay. Without certificate and key the laptop sends everything."""

    release: str
    manifest: str  # its name
    size: int  # bytes of its text
    count: int  # of its pieces, itself included
    groups: Optional[Sequence[str]]  # None: all
    helper: bool  # the node has the release and only serves
    report: float  # seconds between two reports
    address: str
