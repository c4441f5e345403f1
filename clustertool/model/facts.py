"""Facts are the frozen answers of the nodes' probes. The identity of a job is created once on the laptop."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, Dict, FrozenSet, Mapping, Optional, Tuple

from clustertool.model.container.container_facts import ContainerFacts
from clustertool.model.devices.faults import ills


@dataclass(frozen=True)
class Facts:
    """One node's answer. Ports are TCP ports; sizes are bytes; time is seconds since the epoch."""

    node: int
    hostname: str = ""
    address: str = ""
    nic: str = ""
    boot_id: str = ""
    netns: str = ""
    root: str = ""
    root_id: str = ""
    root_hint: str = ""
    home: str = ""
    user: str = ""
    python: str = ""
    rsync: bool = True
    rsync_error: str = ""  # why it does not run
    disk_free: int = 0
    cpus: int = 1
    devices: Tuple[int, ...] = ()
    device_kind: str = "cpu"
    device_keys: Tuple[str, ...] = ()  # what names each of `devices` for all nodes that are this machine; (): not known
    device_models: Tuple[str, ...] = ()  # of each of `devices`, where a driver names them without a call; (): not known
    devices_seen: bool = False  # the probe has read the devices: an id that is not in `devices` does not exist
    # By an engine: names, of which `devices` are the positions. None: no engine.
    allocated: Optional[Tuple[str, ...]] = None
    locked: Tuple[Tuple[int, str, str], ...] = ()  # (device, job, user): locked by a job
    used: Tuple[Tuple[int, str], ...] = ()  # (device, process): in use without a lock; known for --devices auto
    ills: Tuple[Tuple[int, str, str], ...] = ()  # (device, what is wrong with it, the fix); known for --devices auto
    modules: Tuple[str, ...] = ()  # digests of the NVML modules that are kept there
    ephemeral: Tuple[int, int] = (32768, 60999)
    busy: FrozenSet[int] = frozenset()
    listeners: Tuple[Tuple[int, str], ...] = ()
    time: float = 0.0
    listing: Tuple[str, ...] = ()
    job_toml: str = ""
    releases: Tuple[str, ...] = ()
    took: float = 0.0  # seconds between the node's reading of the request and its answer
    memory: Tuple[int, int] = (0, 0)  # all, available
    load: float = 0.0
    inodes: int = -1  # -1: the file system has no number of them
    shm: int = -1  # free in /dev/shm; -1: there is none
    limits: Tuple[Tuple[str, int, int], ...] = ()  # name, soft, hard; -1: none
    mtu: int = 0  # of the interface; 0: unknown
    rdma: bool = False
    own: Optional[str] = ""  # address of the node's own host name; None: no name server answers
    leftovers: Tuple[Tuple[str, int], ...] = ()  # job, processes: of jobs whose supervisor and guard have ended
    examined: bool = False  # what only `inv check` asks was asked: all that follows
    job_python: Tuple[str, str] = ("", "")  # path and version of python3 on the job's PATH; "": not known
    packages: Tuple[Tuple[str, str], ...] = ()  # name, version ("": not there), of the job's python
    job_proxies: Tuple[str, ...] = ()  # names, in a rank's environment
    no_proxy: str = ""
    # Of mode mpi: what mpirun --version printed ("": there is none; None: not asked), and the daemons that are there.
    mpirun: Optional[str] = None
    mpi_daemons: Tuple[str, ...] = ()
    container: Optional[ContainerFacts] = None  # None: not asked
    problems: Tuple[Tuple[str, str, str, str], ...] = ()
    earlier: Tuple[Mapping[str, Any], ...] = ()  # jobs that a new one may continue: model/job/earlier_jobs

    @property
    def machine(self) -> str:
        """Nodes of one machine (same boot, same network namespace) share one port space."""
        return f"{self.boot_id}/{self.netns}" if self.boot_id else f"node{self.node}"

    def holder(self, port: int) -> str:
        """Name the process or job that listens on a port."""
        return dict(self.listeners).get(port, "another process")


def read_facts(node: int, answer: Mapping[str, Any]) -> Facts:
    """Read the probe's answer. Unknown keys are ignored, so that nodes may know more than we do."""
    known = {key: _frozen(answer[key]) for key in Facts.__dataclass_fields__ if key in answer}
    if known.get("container"):
        own = known["container"]
        names = [name for name in ContainerFacts.__dataclass_fields__ if name in own]
        known["container"] = ContainerFacts(**{name: _frozen(own[name]) for name in names})
    return Facts(**{**known, "node": node, "busy": frozenset(known.get("busy", ()))})


def _frozen(value: Any) -> Any:
    """Convert lists of JSON to tuples."""
    return tuple(map(_frozen, value)) if isinstance(value, (list, tuple)) else value


def with_devices(fact: Facts, answer: Mapping[str, Any]) -> Facts:
    """Add the processes on a node's devices and their faults, from the node's answer about them."""
    sick = tuple((int(card["index"]), ill.text, ill.fix) for card in answer["devices"] for ill in ills(card))
    return replace(fact, used=_frozen(answer.get("used", ())), ills=sick)


def may_share(facts: ByNode) -> FrozenSet[int]:
    """Find nodes that may see another one's ROOT_DIR. Two of one machine are known to, or not to, by their root_id."""
    by_hint: Dict[str, list[int]] = {}
    for node, fact in facts.items():
        by_hint.setdefault(fact.root_hint or f"node{node}", []).append(node)
    groups = (nodes for nodes in by_hint.values() if len({facts[node].boot_id for node in nodes}) > 1)
    return frozenset(node for nodes in groups for node in nodes)


def sharing(facts: ByNode) -> FrozenSet[int]:
    """Find nodes whose ROOT_DIR is shared with another node (a home on NFS, or two entries for one machine)."""
    by_root: Dict[str, list[int]] = {}
    for node, fact in facts.items():
        by_root.setdefault(fact.root_id or f"node{node}", []).append(node)
    return frozenset(node for nodes in by_root.values() if len(nodes) > 1 for node in nodes)


ByNode = Mapping[int, Facts]


@dataclass(frozen=True)
class Identity:
    """Created on the laptop once per job: its id, time, owner, and the temporary secrets of its nodes.

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
