"""A join file is what one machine gets to join a job: the job, the way to its coordinator, and settings of this machine.

Each machine has one. In a bundle all machines have the same one. A command that is typed on every machine makes it there. It
contains the key of the job's certificate and the values of SECRETS, so it is never on a command line, and a file has mode 0600.

The coordinator plans with its own `identity`, `cluster`, `job`, `listing` and `passed`. The other machines need of these only
the certificate and the key. `own` counts on its machine.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Optional, Tuple

from clustertool.errors import DataError, UsageError
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job import JobSpec
from clustertool.model.facts import Identity
from clustertool.model.quantities import HIGHEST_PORT
from clustertool.model.shape import Malformed, read_own, to_plain

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec

JOIN_FORMAT = 1
JOIN_TIMEOUT = 600.0  # seconds, from the first node that has joined
MOST_MEMBERS = 100_000  # numbers of machines in an elastic job, those that have left included
# Names of files in a bundle: the join file; of the workspace the manifest and pieces; the module that reads devices, by digest.
JOIN_FILE, MANIFEST, PIECES, NVML = "join.json", "workspace/manifest", "workspace/pieces/", "nvml/"
_FIX = "write it again with the same version of clustertool"
Pairs = Tuple[Tuple[str, str], ...]


@dataclass(frozen=True)
class MeetingPoint:
    """Where the coordinator listens: a host name or an address, and a port. 0: ports that the job id determines.

    member: its number in the job.
    """

    host: str
    port: int = 0
    member: int = 0


@dataclass(frozen=True)
class OwnSettings:
    """Settings of this machine. "" and None: not given.

    root_dir: ROOT_DIR here; `~` is allowed. folder: the working directory of the ranks here, where the workspace is not sent
    (an absolute path). log_dir: where this folder shows the logs of this machine. workspace_digest: of the files in it.
    command: what was typed to run here. A warning names the machines with other files or another command than the coordinator,
    whose command runs. nproc and devices: as in HOSTS. first_path: in
    front of PATH of the ranks. env: variables of the ranks here. here: the ranks get PATH and the path of the linker from the
    environment of the joining process, as on a machine alone. secrets: names of SECRETS whose values are here; only an
    offer has them. name: of this machine, as its engine knows it; "" for the host name. base: the parent of the job's
    directory, where the starter knows it; a machine of an elastic job that has one makes its record before the first plan.
    address: for training, "" for the one on the way to the coordinator.
    entry and twin: how conf.py names it (Host), "" and 0 where no laptop started it. roles, prelude and interface: as in
    HOSTS. resume: the ended job whose output is copied here when the job is placed.
    """

    root_dir: str = ""
    folder: str = ""
    log_dir: str = ""
    workspace_digest: str = ""
    command: str = ""
    nproc: Optional[int] = None
    devices: Optional[Tuple[int, ...]] = None
    env: Pairs = ()
    first_path: str = ""
    here: bool = False
    secrets: Tuple[str, ...] = ()
    name: str = ""
    address: str = ""
    base: str = ""
    entry: str = ""
    twin: int = 0
    prelude: Optional[str] = None
    interface: str = ""
    roles: Optional[Tuple[Tuple[str, Optional[int]], ...]] = None
    resume: str = ""


@dataclass(frozen=True)
class EngineSettings:
    """What only a job has whose machines an engine starts.

    keep_bundle: they may be started again with their bundle. Otherwise the coordinator removes it once all have joined.
    requeue_on: after which ends of the job the engine is asked to start it again. roles: the one role that each node plays, by
    its number; () where all play all. uploaded: the laptop sends the workspace to node 0, which waits for it. keep: seconds
    that node 0 waits after the end for a fetch of its output. output: a folder of a volume, where JOB<id> becomes the folder of
    the output; "": the output is in the job's directory."""

    keep_bundle: bool = False
    roles: Tuple[str, ...] = ()
    uploaded: bool = False
    keep: float = 0.0
    output: str = ""
    requeue_on: Tuple[str, ...] = ()


@dataclass(frozen=True)
class JoinFile:
    """What one machine gets to join a job. `version`: of clustertool. `code`: the digest of the code, the same on all machines.

    cluster: without hosts. nnodes: how many machines the job has; of an elastic one, how many are started at first. index: of
    this machine, 0 is the coordinator; None: the machine that owns the coordinator's address is it, and the others are numbered
    by their addresses.
    engine: what starts the machines, "" for a user. Its variables state the index and the coordinator's host (engine_place.py).
    of_engine: more about that.
    names: of all machines, as the engine knows them; it starts them together. Its variables state them as well.
    join_timeout: seconds. listing: the files of the workspace, relative, as the plan needs them. release: the name of the
    workspace as it is sent, "" where it lies on the nodes. passed: values of PASS_ENV. secrets: values of SECRETS.
    """

    version: str
    code: str
    identity: Identity
    cluster: Cluster
    job: JobSpec
    nnodes: int
    coordinator: MeetingPoint
    index: Optional[int] = None
    join_timeout: float = JOIN_TIMEOUT
    names: Tuple[str, ...] = ()
    listing: Tuple[str, ...] = ()
    release: str = ""
    passed: Pairs = ()
    secrets: Pairs = field(default=(), repr=False)
    own: OwnSettings = OwnSettings()
    engine: str = ""
    of_engine: EngineSettings = EngineSettings()
    format: int = JOIN_FORMAT

    @property
    def offered(self) -> OwnSettings:
        """The settings of this machine as the coordinator gets them."""
        return replace(self.own, secrets=tuple(name for name, _ in self.secrets))

    @property
    def typed(self) -> bool:
        """Whether a user has started the joining on each machine: the job is then known by the identity of the coordinator."""
        return not self.engine and not self.own.base

    def of_job(self, spec: Spec) -> JoinFile:
        """Return the join file with the identity of the job that was placed here (`spec`)."""
        header = spec["header"]
        identity = replace(
            self.identity,
            job_id=spec["job"],
            token=spec["token"],
            created=header["created"],
            owner=header["owner"],
            asked=header["asked"],
            name=header["job_name"],
            workspace=header["workspace"],
        )
        return replace(self, identity=identity)

    @property
    def for_others(self) -> bytes:
        """The join file for another machine, as JSON: without an index, and without settings of this machine.

        It has the key.
        """
        return to_json(replace(self, index=None, own=OwnSettings())).encode()


def to_json(join: JoinFile) -> str:
    """Write a join file as from_json() reads it."""
    return json.dumps(to_plain(join))


def from_json(text: str) -> JoinFile:
    """Parse a join file.

    Raises DataError for what is no JSON, another format, and a wrong field, which it names; UsageError as check().
    """
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        raise DataError("the join file is no JSON", _FIX) from None
    if isinstance(value, dict) and value.get("format") != JOIN_FORMAT:
        raise DataError(f"the join file has format {value.get('format')!r}, not {JOIN_FORMAT}", _FIX)
    try:
        join = read_own(JoinFile, value)
    except Malformed as error:
        raise DataError(f"the join file is not valid: {error}", _FIX) from None
    return check(join)


def check(join: JoinFile) -> JoinFile:
    """Check the numbers of a join file, its roles and the coordinator's host, and return it.

    Raises UsageError for a number out of range, other roles than one for each node or none, and no host without an engine.
    """
    if join.nnodes < 1:
        raise UsageError(f"a job of {join.nnodes} nodes", "--nnodes is 1 or more")
    if join.index is not None and not 0 <= join.index < (join.nnodes if not join.job.elastic.present else MOST_MEMBERS):
        fix = f"the machines of a job of {join.nnodes} nodes have the indices 0 to {join.nnodes - 1}"
        raise UsageError(f"index {join.index} is out of range", fix)
    roles = join.of_engine.roles
    if roles and len(roles) != join.nnodes:
        raise UsageError(f"{len(roles)} roles for {join.nnodes} nodes", "one role for each node, or none at all")
    if not join.coordinator.host and not join.engine:
        raise UsageError("the coordinator's host is missing", "name the host of index 0")
    if not 0 <= join.coordinator.port <= HIGHEST_PORT:
        fix = f"a port from 1 to {HIGHEST_PORT}"
        raise UsageError(f"the coordinator's port {join.coordinator.port} is out of range", fix)
    if not join.join_timeout > 0:
        raise UsageError(f"JOIN_TIMEOUT is {join.join_timeout:g} seconds", "a duration above 0")
    return join
