"""mpirun starts the ranks of a node. This module knows which ones the plan puts here, and whether mpirun has ended them."""

from __future__ import annotations

import os
import shlex
import signal
from typing import TYPE_CHECKING, Dict, FrozenSet, List, Optional, Set

from clustertool.errors import NotFound, PreflightError, UsageError
from clustertool.model.job.outcome import Key, exit_code
from clustertool.model.mpi import daemon_launch
from clustertool.model.roles import LAUNCHERS, MPI_DAEMON, MPIRUN
from clustertool.node.mpi import launcher_scripts
from clustertool.node.storage import session_folder
from clustertool.node.system import processes

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import Spec, SpecProcess

NOTICE = 0.3  # seconds between the end of a rank by mpirun, and the moment at which this is known from its wrapper
_ROLE = "trainer"
_BY_SIGNAL = tuple(exit_code(0, number) for number in (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGTERM))
_FIX = "remove the options of [mpi] that place ranks (--map-by, --rankfile, --host): clustertool places them"
_OF_SHELL = set(";&|()<>`$\n")


class LaunchedRanks:
    """`present`: whether mpirun starts the trainers of this job. Otherwise nothing else here is used."""

    def __init__(self, spec: Spec) -> None:
        self.present = spec.get("launcher", "") == MPIRUN
        self._spec = spec
        self._expected: Set[Key] = set()  # trainers that have not been started yet
        self._signalled: Set[Key] = set()
        self._registered: Set[Key] = set()  # ranks for whose end their wrappers wait, or have waited
        self._late: List[Key] = []  # the newest of them
        self._folders: Dict[str, str] = {}
        # By the names in mpirun's hostfile, which are those of positions in the plan: as the ranks of daemons. Only the
        # coordinator's node knows all of them.
        places = spec["shape"]["place"] if "shape" in spec else []
        self._daemons: Dict[str, Key] = {
            daemon_launch.host_name(rank): (role, rank) for role, rank, _ in places if role == MPI_DAEMON
        }

    def prepare(self, job: int, bundle: bytes) -> None:
        """Make the job's private folders, and write what mpirun calls. bundle: see launcher_scripts. Raises PreflightError."""
        if not self.present:
            return
        self._folders = session_folder.make(self._spec["mark"])
        try:
            launcher_scripts.write(self._spec, job, self._folders["sockets"], bundle)
        except OSError as error:
            what = f"cannot write to {self._spec['job_dir']} or {self._folders['sockets']}: {error.strerror}"
            raise PreflightError(what, "make room on the disk of ROOT_DIR") from None

    def remove(self) -> None:
        if self._folders:
            session_folder.remove(self._spec["mark"])

    # -- what is started here --

    def starts(self, role: str) -> bool:
        """Check whether mpirun starts the ranks of this role."""
        return self.present and role == _ROLE

    def expect(self, keys: List[Key]) -> None:
        """Expect these trainers, since the order to start them has come: from now on mpirun may start them."""
        self._expected, self._signalled, self._registered = set(keys), set(), set()

    def require(self, role: str, number: int, found: Optional[object]) -> None:
        """Raise NotFound if mpirun starts no such rank on this node. found: what the node has of this name."""
        if found is None or not self.starts(role):
            what = f"mpirun has started {role} {number} on {self._spec['name']}, where the plan has no such rank"
            raise NotFound(what, _FIX)

    def admit(self, key: Key, pid: int) -> None:
        """Register a rank that mpirun has started. Raises UsageError, NotFound."""
        name = self._spec["name"]
        if key not in self._expected:
            what = f"mpirun has started {key[0]} {key[1]} on {name}, where the plan has no such rank that waits for its start"
            raise UsageError(what, _FIX)
        found = processes.stat(pid)
        if found is None or found.parent != os.getpid():
            what = f"pid {pid} is no child of the supervisor on {name}"
            raise NotFound(what, "only the rank wrapper registers ranks")
        self._expected.discard(key)

    def of_launcher(self, process: SpecProcess) -> SpecProcess:
        """Complete a process of the plan by what is known only on its node, if it is mpirun or one of its daemons."""
        if process["role"] not in LAUNCHERS or not self._folders:
            return process
        env = {**process["env"], **launcher_scripts.variables(self._spec, self._folders["sockets"])}
        return {**process, "env": env}

    def daemon(self, process: SpecProcess, command: str) -> SpecProcess:
        """Describe the daemon of this node as mpirun wants it to be started."""
        command = daemon_launch.for_daemon(command, self._spec["lead"]["host"])
        simple = not _OF_SHELL & set("".join(_bare(command))) and "=" not in command.split(" ", 1)[0]
        text = f"exec {command.strip()}" if simple else command  # a shell between would end before the daemon
        return {**process, "argv": ["/bin/sh", "-c", text]}

    def rank_variables(self, role: str) -> Dict[str, str]:
        """Compute variables of each rank on this node: its shared memory, by the names of Open MPI 4 and 5."""
        if not self.starts(role) or not self._folders:
            return {}
        names = ("OMPI_MCA_btl_vader_backing_directory", "OMPI_MCA_btl_sm_backing_directory")
        return dict.fromkeys(names, self._folders["memory"])

    def node_of(self, host: str) -> Key:
        """Find the daemon on the node that mpirun's hostfile calls `host`. Raises NotFound."""
        if host not in self._daemons:
            raise NotFound(f"mpirun wants to start a daemon on {host!r}, which is no node of this job", _FIX)
        return self._daemons[host]

    # -- how it ends --

    def signalled(self, key: Key) -> None:
        self._signalled.add(key)

    def waits_for_end(self, key: Key) -> None:
        self._registered.add(key)
        self._late.append(key)

    def take_late(self) -> List[Key]:
        """Return the ranks whose wrappers wait since the last call."""
        late, self._late = self._late, []
        return late

    def ended_by_launcher(self, key: Key, waits: bool) -> bool:
        """Check whether mpirun has ended a rank: its wrapper got the signal as well, or is gone.

        waits: the wrapper waits now.
        """
        return key in self._signalled or (key in self._registered and not waits)

    @staticmethod
    def may_be_ended(code: int, killed: int) -> bool:
        """Check whether a rank that mpirun ends may end so, before its wrapper has reported it."""
        return exit_code(code, killed) in _BY_SIGNAL

    @staticmethod
    def helpers(launchers: List[int]) -> FrozenSet[int]:
        """Find the pids of mpirun, its daemons and what they have started. launchers: the pids of those on this node.

        Ranks are not among them: the supervisor is their parent.
        """
        below = {process.pid for pid in launchers for process in processes.descendants(pid)}
        return frozenset([*launchers, *below])


def _bare(command: str) -> List[str]:
    """Return the parts of a command that are not quoted."""
    lexer = shlex.shlex(command, posix=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return [part for part in lexer if part[0] not in "\"'"]
    except ValueError:
        return [";"]
