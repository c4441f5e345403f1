"""The supervisor handles the containers of its ranks: how they start, which processes are in them, how they end.

The child of the supervisor is the client of the runtime (`podman run`). The rank itself is the container's first process, whose
pid the wrapper inside reports in a file.
"""

from __future__ import annotations

import contextlib
import glob
import os
import resource
import sys
from typing import TYPE_CHECKING, Dict, FrozenSet, Iterable, List, Mapping, Optional, Tuple

from clustertool.errors import PreflightError
from clustertool.model.container import container_command
from clustertool.model.container.container_command import Surroundings
from clustertool.model.container.container_runtimes import DOCKER, PODMAN
from clustertool.model.launcher_variables import of_allocation
from clustertool.model.paths import OURS, JobPaths
from clustertool.model.rank_signals import in_step
from clustertool.node.container.container_removal import Removal
from clustertool.node.container.rank_user import rank_user
from clustertool.node.storage import files
from clustertool.node.system import processes, programs
from clustertool.node.system.processes import Process

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec, SpecProcess
    from clustertool.model.wire.supervisor_messages import RankSession

_EMPTY = b"-" * 15 + b"\n"  # content of the file until the wrapper writes into it
_LIMITS = {
    "as": resource.RLIMIT_AS,
    "core": resource.RLIMIT_CORE,
    "data": resource.RLIMIT_DATA,
    "fsize": resource.RLIMIT_FSIZE,
    "memlock": resource.RLIMIT_MEMLOCK,
    "nofile": resource.RLIMIT_NOFILE,
    "nproc": resource.RLIMIT_NPROC,
    "rss": resource.RLIMIT_RSS,
    "stack": resource.RLIMIT_STACK,
}
_CONMON = "conmon"
_DEPTH = 20  # processes between a supervisor and a container's first one, at most
_FIRST = 60.0  # seconds that the first command of a runtime may take
LINGER = 5.0  # seconds that the runtime gets to remove a container whose processes were killed
# Programs of runtimes. They end by themselves after the container, and must outlive it.
_HELPERS = """apptainer catatonit conmon crun docker fuse-overlayfs fuse2fs pasta podman runc singularity slirp4netns
    squashfuse squashfuse_ll starter starter-suid""".split()


def helpers(found: Iterable[Process]) -> FrozenSet[int]:
    """Return the pids of those processes that run a program of a runtime, and not one in a container."""
    return frozenset(process.pid for process in found if _is_helper(process.pid))


def _is_helper(pid: int) -> bool:
    """Check whether a process runs a program of a runtime, by its executable, or its name if that cannot be read."""
    with contextlib.suppress(OSError):
        return os.path.basename(os.readlink(f"/proc/{pid}/exe")).partition(" ")[0] in _HELPERS
    found = processes.stat(pid)
    return found is not None and found.name.partition(":")[0] in _HELPERS


class RankContainer:
    """The container of one rank, from its start on. cpu, memory: seconds and the most bytes, as last sampled."""

    def __init__(self, job: int, process: SpecProcess, mark: str, waits: bool = False) -> None:
        """Store the rank's mark, by which its process is recognized. waits: its client passes no signal on."""
        self.main: Optional[Process] = None
        self.frozen = self.orphaned = False  # orphaned: the runtime's process that observes it has ended
        self.cpu, self.memory = 0.0, 0
        self._job, self._mark, self.waits = job, mark.encode(), waits
        self._file = JobPaths.main_file(process["role"], process["rank"])

    def prepare(self) -> None:
        """Create the file in which the wrapper in the container writes the rank's pid. Raises OSError."""
        files.create(self._job, self._file, _EMPTY, exclusive=False)

    def _read(self) -> bytes:
        """Read the file that the wrapper writes; its first content if it cannot be read."""
        with contextlib.suppress(OSError):
            return files.read(self._job, self._file)
        return _EMPTY

    @property
    def reached(self) -> bool:
        """Whether the wrapper in the container has run: what ends now was not the runtime."""
        return self.main is not None or self._read() != _EMPTY

    def find(self) -> bool:
        """Search the container's first process by the pid in the file. Returns True if it is known since this call.

        The process must have the rank's mark, or descend from this one.
        """
        if self.main is not None:
            return False
        text = self._read().split(b"\n")[0]
        pid = int(text) if text.isdigit() and len(text) < 10 else 0
        found = processes.identify(pid) if pid else None
        # The file is the program's to write: no signal goes to a process of another job.
        if found is None or not (processes.environment(pid).get(processes.MARK) == self._mark or _is_below(pid)):
            return False
        self.main = found
        return True

    def sample(self) -> bool:
        """Store CPU time and memory of its first process, and set `frozen` and `orphaned`, if that process lives.

        Returns whether it was stopped or continued since the last call.
        """
        found = processes.stat(self.main.pid) if self.main else None
        if self.main is None or found is None or found.start != self.main.start or found.state in "ZX":
            return False
        self.cpu = round(found.cpu + found.waited, 2)
        self.memory = max(self.memory, _peak_memory(self.main.pid))
        self.orphaned = found.parent == os.getpid()
        before, self.frozen = self.frozen, found.state in "Tt"
        return before != self.frozen


def _is_below(pid: int) -> bool:
    """Check whether a process descends from this one, over at most 20 generations."""
    for _ in range(_DEPTH):
        if pid == os.getpid():
            return True
        found = processes.stat(pid)
        if found is None or found.parent == 0:
            break
        pid = found.parent
    return False


def _peak_memory(pid: int) -> int:
    """Return the most bytes of memory that a process had so far, 0 if that is not known."""
    with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/status", "rb") as file:
        return next((int(line.split()[1]) << 10 for line in file if line.startswith(b"VmHWM:")), 0)
    return 0


class RankContainers:
    """The containers of the ranks of this node: what they need, how they start, and their removal.

    present: whether ranks run in containers. Otherwise there is nothing to remove, and no linger. linger: seconds for the
    runtime's own processes, after those in containers were killed.
    """

    def __init__(self, spec: Spec, job: int) -> None:
        self._spec, self._job = spec, job
        self._container = spec.get("container")
        self.present = self._container is not None
        self.linger = LINGER if self.present else 0.0
        self.runtime = self._container["runtime"] if self._container else ""
        self.removal = Removal(self._container, spec["mark"])
        self._home, self._accounts = "", ()  # type: str, Tuple[str, ...]
        self._waits = self.runtime == PODMAN and in_step(os.environ)
        self._conmon = ""

    def prepare(self) -> None:
        """Make what containers need of the user: a folder for HOME, and what their runtime needs.

        For rootless podman a process of it, for podman in a step of Slurm a conmon script, for docker accounts. It comes before
        this process is a subreaper: the first command of rootless podman leaves a process for all containers of the user, which
        must not become a child of this job. Raises PreflightError if the folder cannot be made.
        """
        if not self._container:
            return
        try:
            user = rank_user(self._spec["root"])
        except OSError as error:
            what = f"the folder for HOME of ranks cannot be made: {error.strerror}"
            raise PreflightError(what, "make room or rights in ROOT_DIR", self._spec["name"]) from None
        self._home = user.home
        if self.runtime == PODMAN and self._container["rootless"]:
            programs.output([self._container["program"], "ps", "--quiet"], _FIRST, cwd="/")
        if self._waits:
            self._conmon = self._make_conmon(self._container["program"])
        if self.runtime == DOCKER:  # the others add an entry for the user themselves
            inside = user._replace(uid=0, gid=0) if self._container["rootless"] else user
            argv = container_command.accounts_command(self._container, self._spec)
            code, out, _ = programs.output(argv, _FIRST, cwd="/")
            made = container_command.read_accounts(out, inside) if code == 0 else {}
            for name, text in made.items():
                files.create(self._job, f"{OURS}/{name}", text.encode("utf-8", "surrogateescape"), exclusive=False)
            self._accounts = tuple(made)

    def _make_conmon(self, program: str) -> str:
        """Write the script by which podman starts conmon, and return its path; "" where none can be executed."""
        code, out, _ = programs.output([program, "info", "--format={{.Host.Conmon.Path}}"], _FIRST, cwd="/")
        path = JobPaths.at(self._spec["job_dir"]).of(OURS, _CONMON)
        if code or not os.path.isabs(out.strip()):
            return ""
        text = container_command.conmon_script(out.strip(), sys.executable)
        files.create(self._job, f"{OURS}/{_CONMON}", text.encode("utf-8", "surrogateescape"), exclusive=False)
        os.chmod(path, 0o700)
        return path if os.access(path, os.X_OK) else ""

    def begin_removal(self) -> Removal:
        """Create and return a new removal of the containers of this job on this node."""
        self.removal = Removal(self._container, self._spec["mark"])
        return self.removal

    def build_start(
        self, process: SpecProcess, variables: Mapping[str, str], around: Surroundings
    ) -> Tuple[Tuple[List[str], Dict[str, str]], RankContainer]:
        """Build ((command line, environment) of the client that is to start a rank, the rank's RankContainer).

        Starts nothing, but creates the file for the rank's pid. Raises OSError if that fails.
        """
        spec, container = self._spec, self._spec["container"]
        made = RankContainer(self._job, process, spec["mark"], self._waits)
        made.prepare()
        inherited = os.environ.items() if spec.get("engine") else ()
        given = {**{name: value for name, value in inherited if of_allocation(name)}, **variables}
        around = self._with_user(around)
        passed = container_command.passed_variables(container["runtime"], spec, process, given, around)
        argv = container_command.command(container, spec, process, passed.names, around)
        return (argv, {**os.environ, **passed.env}), made

    def session(self, process: SpecProcess, variables: Mapping[str, str], around: Surroundings) -> RankSession:
        """Build the start of another program in the container of a rank: {argv, env}."""
        container = self._spec["container"]
        argv, env = container_command.session(container, self._spec, process, variables, self._with_user(around))
        return {"argv": argv, "env": env}

    def _with_user(self, around: Surroundings) -> Surroundings:
        """Add the user's HOME and accounts, and how podman starts, to the surroundings."""
        made = around._replace(home=self._home, accounts=self._accounts)
        return made._replace(in_step=self._waits, conmon=self._conmon)


def limits(file_limit: int) -> Dict[str, Tuple[int, int]]:
    """Return the soft and hard limits of this user, {"nofile": (1024, 4096), ...}; no more processes than the kernel has pids.

    file_limit: the soft one of descriptors, 0 for that of this process.
    """
    found = {name: resource.getrlimit(number) for name, number in _LIMITS.items()}
    if file_limit:
        found["nofile"] = (file_limit, found["nofile"][1])
    # podman limits itself to as many, and can allow no more without CAP_SYS_RESOURCE.
    with contextlib.suppress(OSError, ValueError):
        with open("/proc/sys/kernel/pid_max", encoding="utf-8") as file:
            most = int(file.read())
        soft, hard = (most if limit < 0 else min(limit, most) for limit in found["nproc"])
        found["nproc"] = (soft, hard)
    return found


def device_files(kind: str) -> List[str]:
    """List the files of this node that match the device patterns of this kind, for device_options()."""
    return sorted(path for pattern in container_command.device_patterns(kind) for path in glob.glob(pattern))
