"""Facts are the frozen answers of the nodes' probes. The identity of a job is created once on the laptop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Dict, FrozenSet, Mapping, Optional, Tuple

from clustertool.model import field_types as fields
from clustertool.model.job.node_status import EarlierRow
from clustertool.model.job.outcome import some
from clustertool.model.shape import Annotated, read

_FEW, _SOME = 100, 10_000
_CARDS, _PORTS, _JOBS = 1024, 1 << 17, 20_000
Problem = Tuple[fields.Label, fields.Label, str, str]  # column of the check, level, what, fix


@dataclass(frozen=True)
class ContainerFacts:
    """What a node reports of its container runtime, which it has chosen, and of a job's image there. "" and -1: not known.

    runtime: "" where none can be used; then `problem` and `fix` state why. program: its absolute path. cgroup: "v1" or "v2".
    image_id: "" where the image is not there. digest: that of the registry's manifest, else the id with its hash. size:
    bytes of the image in the store. store_free: bytes free where images are kept. gpu: CDI or HOOK of container_runtimes.py, ""
    for neither.
    process_limit: it limits the processes and threads of a container by default (podman: 2048), and can allow more.
    uid, groups: of the user; the primary group is the first one. missing: sources of volumes that are not there.
    """

    runtime: fields.Runtime = ""
    program: fields.Label = ""
    version: fields.Label = ""
    rootless: bool = False
    cgroup: fields.Label = ""
    problem: fields.Label = ""
    fix: fields.Label = ""
    image_id: fields.Label = ""
    digest: fields.Label = ""
    size: fields.Signed = -1
    store: fields.Label = ""
    store_free: fields.Signed = -1
    gpu: fields.Label = ""
    process_limit: bool = False
    uid: int = 0
    groups: Annotated[Tuple[int, ...], _SOME] = ()
    missing: Annotated[Tuple[fields.Label, ...], _SOME] = ()

    @property
    def missing_source(self) -> Tuple[str, str]:
        """The error text about the sources of volumes that are missing, and the fix."""
        what = f"there is no {some(self.missing)}, the source of a volume"
        return what, "make it there, or take it out of `volumes` of CONTAINER"


@dataclass(frozen=True)
class Facts:
    """One node's answer to a probe; the node does not know its index.

    Ports are TCP ports; sizes are bytes; time is seconds since the epoch.
    """

    node: int = 0
    hostname: fields.Label = ""
    address: fields.Label = ""
    nic: fields.Label = ""
    boot_id: fields.Label = ""
    netns: fields.Label = ""
    root: fields.Label = ""
    root_id: fields.Label = ""
    root_hint: fields.Label = ""
    home: fields.Label = ""
    user: fields.Label = ""
    python: fields.Label = ""
    rsync: bool = True
    rsync_error: fields.Label = ""  # why it does not run
    disk_free: fields.Signed = 0
    cpus: fields.Signed = 1
    devices: Annotated[Tuple[int, ...], _CARDS] = ()
    device_kind: fields.Label = "cpu"
    # Names of `devices` for all nodes of this machine; (): not known.
    device_keys: Annotated[Tuple[fields.Label, ...], _CARDS] = ()
    # Where a driver names them without a call; (): not known.
    device_models: Annotated[Tuple[fields.Label, ...], _CARDS] = ()
    devices_seen: bool = False  # the probe has read the devices: an id that is not in `devices` does not exist
    # By an engine: names, of which `devices` are the positions. None: no engine.
    allocated: Optional[Annotated[Tuple[fields.Label, ...], _CARDS]] = None
    # (device, job, user): locked by a job
    locked: Annotated[Tuple[Tuple[int, fields.Label, fields.Label], ...], _CARDS] = ()
    # (device, process): without a lock; for --devices auto.
    used: Annotated[Tuple[Tuple[int, fields.Label], ...], _CARDS] = ()
    ills: Annotated[Tuple[Tuple[int, str, str], ...], _CARDS] = ()  # (device, fault, the fix); known for --devices auto
    modules: Annotated[Tuple[fields.Label, ...], _SOME] = ()  # digests of the NVML modules that are kept there
    ephemeral: Tuple[fields.Port, fields.Port] = (32768, 60999)
    busy: Annotated[FrozenSet[fields.Port], _PORTS] = frozenset()
    listeners: Annotated[Tuple[Tuple[fields.Port, fields.Label], ...], _PORTS] = ()
    time: fields.Time = 0.0
    listing: Annotated[Tuple[fields.Label, ...], fields.MOST_FILES] = ()
    job_toml: fields.TomlText = ""
    releases: Annotated[Tuple[fields.Label, ...], _SOME] = ()
    took: float = 0.0  # seconds between the node's reading of the request and its answer
    memory: Tuple[int, int] = (0, 0)  # all, available
    load: float = 0.0
    inodes: fields.Signed = -1  # -1: the file system has no number of them
    shm: fields.Signed = -1  # free in /dev/shm; -1: there is none
    # name, soft, hard; -1: none
    limits: Annotated[Tuple[Tuple[fields.Label, fields.Signed, fields.Signed], ...], _FEW] = ()
    mtu: fields.Signed = 0  # of the interface; 0: unknown
    rdma: bool = False
    own: Optional[fields.Label] = ""  # address of the node's own host name; None: no name server answers
    # job, processes: supervisor and guard have ended
    leftovers: Annotated[Tuple[Tuple[fields.Label, int], ...], _JOBS] = ()
    examined: bool = False  # what only `inv check` asks was asked: all that follows
    # path and version of python3 on the job's PATH; "": not known
    job_python: Tuple[fields.Label, fields.Label] = ("", "")
    # Name, version ("": not there), of the job's python.
    packages: Annotated[Tuple[Tuple[fields.Label, fields.Label], ...], _SOME] = ()
    job_proxies: Annotated[Tuple[fields.Label, ...], _SOME] = ()  # names, in a rank's environment
    no_proxy: fields.Label = ""
    # Of mode mpi: what mpirun --version printed ("": there is none; None: not asked), and the daemons that are there.
    mpirun: Optional[fields.Label] = None
    mpi_daemons: Annotated[Tuple[fields.Label, ...], _FEW] = ()
    container: Optional[ContainerFacts] = None  # None: not asked
    ptrace_scope: fields.Signed = 0  # of yama, for this user: 2 and more keep `stacks` from reading programs
    problems: Annotated[Tuple[Problem, ...], _SOME] = ()
    earlier: Annotated[Tuple[EarlierRow, ...], _SOME] = ()  # jobs that a new one may continue: model/job/earlier_jobs

    @property
    def machine(self) -> str:
        """Boot id and network namespace: nodes with the same share a machine and its ports. "node<id>" without a boot id."""
        return f"{self.boot_id}/{self.netns}" if self.boot_id else f"node{self.node}"

    def holder(self, port: int) -> str:
        """Name the process or job that listens on a port; "another process" if it is not known."""
        return dict(self.listeners).get(port, "another process")


def read_facts(node: int, answer: object) -> Facts:
    """Read the probe's answer of a node. Raises Malformed. Unknown keys are ignored, so that nodes may know more than we do."""
    return replace(read(Facts, answer), node=node)


def nodes_that_may_share_root(facts: ByNode) -> FrozenSet[int]:
    """Return the nodes that may share ROOT_DIR: those with the same root_hint, if they are on more than one machine.

    Of nodes of one machine nodes_sharing_root() knows it.
    """
    by_hint: Dict[str, list[int]] = {}
    for node, fact in facts.items():
        by_hint.setdefault(fact.root_hint or f"node{node}", []).append(node)
    groups = (nodes for nodes in by_hint.values() if len({facts[node].boot_id for node in nodes}) > 1)
    return frozenset(node for nodes in groups for node in nodes)


def nodes_sharing_root(facts: ByNode) -> FrozenSet[int]:
    """Return the nodes whose ROOT_DIR has the root_id of another node's (a home on NFS, or two entries for one machine)."""
    by_root: Dict[str, list[int]] = {}
    for node, fact in facts.items():
        by_root.setdefault(fact.root_id or f"node{node}", []).append(node)
    return frozenset(node for nodes in by_root.values() if len(nodes) > 1 for node in nodes)


ByNode = Mapping[int, Facts]


@dataclass(frozen=True)
class Identity:
    """What the laptop creates once for a job: its id, time, owner, and the temporary secrets of its nodes.

    asked: the id of --job-id; job_id has a number after it where a job with this id had ended. name: of --name, else `asked`.
    workspace: where the job's files come from, so that later jobs of it are known. starter: the machine of the node on which
    the command was typed, with a digest of the command (same_command); "" for a laptop.
    """

    job_id: str
    created: float = 0.0
    owner: str = ""
    token: str = field(default="", repr=False)
    certificate: str = field(default="", repr=False)
    key: str = field(default="", repr=False)
    asked: str = ""
    name: str = ""
    workspace: str = ""
    starter: str = ""
    same_command: str = ""

    @property
    def run_id(self) -> str:
        """The id that frameworks get: the same each time that --job-id asks for it."""
        return self.asked or self.job_id
