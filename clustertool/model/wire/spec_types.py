"""A spec is one node's part of a job's plan, as its supervisor reads it and as spec.json keeps it.

A tuple here is a list in JSON. `format`: model/job/formats. Modules import these types for type checking only.
"""

from __future__ import annotations

from typing import Dict, List, Tuple, TypedDict

from clustertool.model.wire.event_types import JobHeader


class _OfLaunchers(TypedDict, total=False):
    """Of the roles in model.roles.LAUNCHERS: they are no ranks, and get nothing of `common`."""

    apart: bool


class ProcessCommand(_OfLaunchers):
    """What a process runs, and its own variables."""

    argv: List[str]
    env: Dict[str, str]


class SpecProcess(ProcessCommand):
    """One process of the node."""

    role: str
    rank: int
    local_rank: int
    log: str
    endpoint: str
    ports: List[int]  # the endpoint's first
    ready: List[int]  # of these, one must be open; [] if none
    devices: List[int]
    shards: List[str]


class SpecCoordinator(TypedDict):
    """The node that coordinates the job, and where it listens."""

    node: int
    name: str
    host: str
    port: int
    endpoint: str


class SpecPolicy(TypedDict):
    """model.config.job.Policy: seconds; 0: no limit."""

    timeout: float
    grace: float
    on_failure: str
    max_restarts: int
    max_restarts_without_progress: int
    lease: float
    loss_timeout: float
    hang_timeout: float
    on_hang: str


class _OfElasticShapes(TypedDict, total=False):
    """What the shape of an elastic job has besides."""

    nodes: List[int]  # of the present epoch; missing: 0, 1, ... for each of `names`


class SpecShape(_OfElasticShapes):
    """Only the coordinator's node has it."""

    names: List[str]  # of all nodes, by their ids; in an elastic job also of other epochs, "" if not known
    place: List[Tuple[str, int, int]]  # role, rank, node of all processes


class _ElasticTimes(TypedDict, total=False):
    """Seconds before the epoch, for the limits of time of the job; missing: 0."""

    age: float  # since its first epoch began
    unattended: float  # since a laptop was attached


class ElasticSpec(_ElasticTimes):
    """An epoch of an elastic job. Node ids are stable for the whole job, so those of one epoch may have gaps."""

    epoch: int  # its number, which is that of its first attempt
    lease: float  # seconds
    grow: str  # "next": a machine that offers itself waits for the next epoch; "restart": it begins one
    minimum: int  # nodes
    maximum: int
    members: int  # that have joined the job, with those on standby
    waiting: List[str]  # names of the members on standby
    absent: int  # machines that were started with the job, and had not joined by then
    restarts: int  # of --max-restarts that earlier epochs have used
    blamed: List[int]  # nodes on which attempts of earlier epochs have failed first
    steps: object  # JobSteps after the earlier epochs, or None
    store: bool  # epochs are records in a store: any node may coordinate, and each attempt is an epoch


class _OfSomeJobs(TypedDict, total=False):
    """What only some jobs have."""

    secrets: Dict[str, str]
    notify: List[str]  # NOTIFY, in memory only
    engine: str  # that has started the nodes; missing or "": none
    launcher: str  # "mpirun" where one starts the trainers, else missing: the supervisors do
    allocated: List[str]  # devices of the node by an engine: names, of which the devices of ranks are positions


class RankSurroundings(_OfSomeJobs):
    """What the environment of each rank of a node is made of."""

    prelude: str
    first_path: str
    ld_library_path: str
    here: bool
    common: Dict[str, str]


class RuntimeSpec(TypedDict):
    """A container runtime of a node."""

    runtime: str  # docker, podman or apptainer
    program: str  # the absolute path of its command on this node


class ContainerSpec(RuntimeSpec):
    """The container of each rank of one node, as the plan and the node's probe decide it."""

    rootless: bool
    image: str  # what is run: an image's id, or the path of a .sif file
    reference: str  # as the user named it
    digest: str  # by which nodes are compared and which status shows; "" if the runtime knows none
    options: List[str]
    volumes: List[str]
    process_limit: bool  # the runtime has one by default
    uid: int
    groups: List[int]  # the user's own on this node, the primary one first


class _LaunchFields(TypedDict, total=False):
    """Secrets, certificate and key are added in memory when the job starts; they are never on a disk."""

    certificate: str
    key: str
    shape: SpecShape
    attempt: int  # the first one of this start; above 0 where an engine starts the job again, and in later epochs
    elastic: ElasticSpec  # missing: the job has the same nodes for all of its life
    container: ContainerSpec  # missing: ranks run in no container
    metrics_file: str  # METRICS_FILE of conf.py, missing where it is not set
    hostfile: str  # the text of mpirun's hostfile; only the coordinator's node has it


class Spec(RankSurroundings, _LaunchFields):
    """One node's part of the plan of a job."""

    format: int
    job: str
    node: int
    name: str
    root: str
    job_dir: str
    work_dir: str
    output: str
    log_dir: str
    mark: str
    token: str
    lead: SpecCoordinator
    policy: SpecPolicy
    device_kind: str
    processes: List[SpecProcess]
    extra_ports: List[int]
    endpoints: List[str]
    header: JobHeader
