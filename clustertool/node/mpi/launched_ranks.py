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
    """The ranks of this node that mpirun starts, the daemons of mpirun, and what is known of how the ranks end.

    present: whether mpirun starts the trainers of this job. Otherwise nothing else here is used.
    """

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
        daemons = [(role, rank) for role, rank, _ in places if role == MPI_DAEMON]
        self._daemons: Dict[str, Key] = {daemon_launch.host_name(key[1]): key for key in daemons}

    def prepare(self, job: int, bundle: bytes) -> None:
        """Make the job's private folders, and write the scripts that mpirun calls, if mpirun starts ranks.

        Raises PreflightError if they cannot be written. bundle: see launcher_scripts.
        """
        if not self.present:
            return
        self._folders = session_folder.make(self._spec["mark"])
        try:
            launcher_scripts.write(self._spec, job, self._folders["sockets"], bundle)
        except OSError as error:
            what = f"cannot write to {self._spec['job_dir']} or {self._folders['sockets']}: {error.strerror}"
            raise PreflightError(what, "make room on the disk of ROOT_DIR") from None

    def remove(self) -> None:
        """Remove the job's private folders."""
        if self._folders:
            session_folder.remove(self._spec["mark"])

    # -- what is started here --

    def starts(self, role: str) -> bool:
        """Return whether mpirun starts the ranks of this role."""
        return self.present and role == _ROLE

    def expect(self, keys: List[Key]) -> None:
        """Set the trainers that mpirun may start from now on, and forget the signals and ends of the attempt before."""
        self._expected, self._signalled, self._registered = set(keys), set(), set()

    def require(self, role: str, number: int, found: Optional[object]) -> None:
        """Raise NotFound if `found`, what the node has of this rank, is None, or mpirun does not start this role."""
        if found is None or not self.starts(role):
            what = f"mpirun has started {role} {number} on {self._spec['name']}, where the plan has no such rank"
            raise NotFound(what, _FIX)

    def admit(self, key: Key, pid: int) -> None:
        """Check that the rank is expected and `pid` is a child of this process, and expect it no more.

        Raises UsageError if the rank is not expected, and NotFound if `pid` is no child.
        """
        name = self._spec["name"]
        if key not in self._expected:
            what = f"mpirun has started {key[0]} {key[1]} on {name}, where the plan has no such rank that waits for its start"
            raise UsageError(what, _FIX)
        found = processes.stat(pid)
        if found is None or found.parent != os.getpid():
            what = f"pid {pid} is no child of the supervisor on {name}"
            raise NotFound(what, "only the rank wrapper registers ranks")
        self._expected.discard(key)

    def complete_launcher(self, process: SpecProcess) -> SpecProcess:
        """Return the process; for mpirun or a daemon with the variables that only its node knows."""
        if process["role"] not in LAUNCHERS or not self._folders:
            return process
        env = {**process["env"], **launcher_scripts.variables(self._spec, self._folders["sockets"])}
        return {**process, "env": env}

    def daemon_process(self, process: SpecProcess, command: str) -> SpecProcess:
        """Return the process of this node's daemon with mpirun's command, corrected for this node (correct_daemon_command)."""
        command = daemon_launch.correct_daemon_command(command, self._spec["lead"]["host"])
        simple = not _OF_SHELL & set("".join(_unquoted_parts(command))) and "=" not in command.split(" ", 1)[0]
        text = f"exec {command.strip()}" if simple else command  # a shell between would end before the daemon
        return {**process, "argv": ["/bin/sh", "-c", text]}

    def rank_variables(self, role: str) -> Dict[str, str]:
        """Return the variables of each rank on this node: its folder for shared memory, by the names of Open MPI 4 and 5.

        {} for another role.
        """
        if not self.starts(role) or not self._folders:
            return {}
        names = ("OMPI_MCA_btl_vader_backing_directory", "OMPI_MCA_btl_sm_backing_directory")
        return dict.fromkeys(names, self._folders["memory"])

    def daemon_of(self, host: str) -> Key:
        """Return the key of the daemon on the node that mpirun's hostfile names `host`. Raises NotFound for another name."""
        if host not in self._daemons:
            raise NotFound(f"mpirun wants to start a daemon on {host!r}, which is no node of this job", _FIX)
        return self._daemons[host]

    # -- how it ends --

    def signalled(self, key: Key) -> None:
        """Record that the wrapper of a rank has received a signal of mpirun."""
        self._signalled.add(key)

    def waits_for_end(self, key: Key) -> None:
        """Record that the wrapper of a rank waits for its end."""
        self._registered.add(key)
        self._late.append(key)

    def take_late(self) -> List[Key]:
        """Return the ranks whose wrappers have begun to wait since the last call."""
        late, self._late = self._late, []
        return late

    def ended_by_launcher(self, key: Key, waits: bool) -> bool:
        """Return whether mpirun has ended a rank: its wrapper got the signal, too, or has waited and is gone (not `waits`)."""
        return key in self._signalled or (key in self._registered and not waits)

    @staticmethod
    def may_be_ended(code: int, killed: int) -> bool:
        """Return whether an exit is by a signal with which mpirun ends ranks; its wrapper may not have reported that yet."""
        return exit_code(code, killed) in _BY_SIGNAL

    @staticmethod
    def helpers(launchers: List[int]) -> FrozenSet[int]:
        """Return the pids of mpirun, its daemons (`launchers`, those on this node) and all their descendants.

        Ranks are not among them: the supervisor is their parent.
        """
        below = {process.pid for pid in launchers for process in processes.descendants(pid)}
        return frozenset([*launchers, *below])


def _unquoted_parts(command: str) -> List[str]:
    """Return the parts of a shell command that are not quoted; [";"] if it cannot be parsed."""
    lexer = shlex.shlex(command, posix=False)
    lexer.whitespace_split, lexer.commenters = True, ""
    try:
        return [part for part in lexer if part[0] not in "\"'"]
    except ValueError:
        return [";"]
