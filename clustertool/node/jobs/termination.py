"""This module ends the processes of a job: TERM now, KILL after the grace until none lives. It names those that stay alive.

The main process of a rank gets TERM first: it may save with the help of its children. What is below it gets TERM when it has
ended, or after half of the grace; what is below none of them when all have ended.
"""

from __future__ import annotations

import math
import os
import signal
import time
from typing import TYPE_CHECKING, Callable, Collection, Iterable, List, Mapping, Optional, Set

from clustertool.node.container import container_removal
from clustertool.node.container.rank_containers import LINGER, helpers
from clustertool.node.jobs.descendants import Descendants, JobSearch
from clustertool.node.storage import session_folder
from clustertool.node.system import processes
from clustertool.node.system.processes import Process

if TYPE_CHECKING:
    from clustertool.model.wire.spec_types import RuntimeSpec

_POLL = 0.02
_HOPELESS = 8.0  # seconds of KILL after which a supervisor reports a survivor
_ROUNDS = 20  # of KILL in one turn, against a program that forks as fast as it is killed
_UNSEEN = "processes that start others faster than they are found"
_OF_SIGNALS = (128 + signal.SIGTERM, 128 + signal.SIGKILL)  # exit codes of a shell whose program got a signal


class Termination:
    """The end of processes by TERM and KILL. Call turn() until it returns the survivors.

    living: finds the processes. mark: the job's marker. Without a `grace` there is only KILL. term_after: seconds until TERM; a
    sender that signals all processes has sent it, or will before that. patience: seconds of KILL after which what still lives
    is a survivor. helpers: the pids of processes that get no TERM. When no other one lives, `quiet` is set; they are killed
    after release(), or the grace and `linger` more seconds. mains: the pids of the main processes of ranks.
    """

    def __init__(
        self,
        living: Callable[[], List[Process]],
        mark: str,
        grace: float,
        patience: float,
        helpers: Callable[[], Collection[int]] = tuple,
        linger: float = 0.0,
        term_after: float = 0.0,
        mains: Iterable[int] = (),
    ) -> None:
        """Find the living processes, and send TERM to those that are due now."""
        self._living = living
        self._linger = linger
        self._mark = mark
        self._patience = patience
        self._helpers = helpers
        self._released = False
        self.quiet = False
        now = time.monotonic()
        self._kill_at = now + grace
        self._give_up_at = 0.0
        self._term_at = now + term_after if grace > 0 else math.inf
        self._rest_at = now + (term_after + grace) / 2
        self._mains = set(mains)
        self._above = {main: main for main in self._mains}  # the main process above a process, 0 for none
        self._sent: Set[int] = set()  # pids of processes that have got TERM, or get none
        self._late = False  # half of the grace is over
        found = living()
        self.signalled = {process.pid for process in found}
        self._send_term(found, now)

    def _send_term(self, found: List[Process], now: float) -> None:
        """Send TERM, once, to the processes of `found` that are due now and no helpers; nothing before or after its time."""
        if not self._term_at <= now < self._kill_at:
            return
        living = {process.pid for process in found}
        for pid in living:  # before the first one ends, and its children lose it
            self._find_main(pid, living)
        self._late = now >= self._rest_at
        unsent = [process for process in found if process.pid not in self._sent]
        due = [process for process in unsent if self._late or self._is_due(process.pid, living)]
        spared = set(self._helpers()) if due else ()
        for process in [process for process in due if process.pid not in spared]:
            self._sent.add(process.pid)
            processes.signal_one(process, signal.SIGTERM)
            processes.signal_one(process, signal.SIGCONT)  # a stopped process handles TERM only when it continues

    def _is_due(self, pid: int, living: Set[int]) -> bool:
        """Check whether a process gets TERM now: it is the main process of a rank, or none that is above it lives.

        A process below no main process waits for all of them.
        """
        main = self._above[pid]
        return pid in self._mains or not (main in living if main else self._mains & living)

    def _find_main(self, pid: int, living: Set[int]) -> None:
        """Record for a new process, and new ones above it, which main process of a rank is above them, 0 for none.

        They get no TERM if a process above them has got it that is no main process, or if half of the grace is over.
        """
        below: List[int] = []
        while pid in living and pid not in self._above:
            below.append(pid)
            found = processes.stat(pid)
            pid = found.parent if found else 0
        self._above.update(dict.fromkeys(below, self._above.get(pid, 0)))
        if self._late or pid in self._sent - self._mains:
            self._sent.update(below)

    def enter(self, main: Process) -> None:
        """Add a main process of a rank, which gets TERM at the next turn."""
        self._mains.add(main.pid)
        self._above[main.pid] = main.pid

    def without_term(self) -> None:
        """Send no TERM from now on: the sender of a signal has sent it to all processes."""
        self._term_at = math.inf

    def release(self) -> None:
        """Allow to kill the helpers as soon as no other process lives."""
        self._released = True

    def hurry(self, grace: float) -> None:
        """Shorten the grace to `grace` seconds from now, if that is earlier."""
        now = time.monotonic()
        self._kill_at, self._rest_at = min(self._kill_at, now + grace), min(self._rest_at, now + grace / 2)

    def turn(self, unreaped: bool = False) -> Optional[List[str]]:
        """Send TERM or KILL to what is due. Return descriptions of the survivors ([]: none) once the end is over, else None.

        Sets `quiet` when only helpers live. unreaped: the supervisor has children, dead or missed by the search. The end waits
        until they are reaped.
        """
        now = time.monotonic()
        left = self._living()
        self._send_term(left, now)
        if left and now < self._kill_at and {process.pid for process in left} <= set(self._helpers()):
            self.quiet = True
            self._kill_at = now if self._released else self._kill_at
        if (left or unreaped) and now < self._kill_at:
            return None
        if (left or unreaped) and now < self._kill_at + self._linger:
            self._kill(left, self._helpers)
            return None
        left = self._kill(left) or self._kill_strays()
        if left or unreaped:
            self._give_up_at = self._give_up_at or now + self._patience
            if now < self._give_up_at:
                return None
        return [processes.describe(process) for process in left] or ([_UNSEEN] if unreaped else [])

    def _kill(self, left: List[Process], spared: Callable[[], Collection[int]] = tuple) -> List[Process]:
        """Kill the processes but those spared, and those that are found meanwhile, in up to 20 rounds; return what is left."""
        killed: List[Process] = []
        for _ in range(_ROUNDS):
            without = set(spared())
            fresh = [process for process in left if process not in killed and process.pid not in without]
            if not fresh:
                break
            for process in fresh:
                processes.signal_one(process, signal.SIGKILL)
            killed += fresh
            left = self._living()
        return left

    def _kill_strays(self) -> List[Process]:
        """Kill marked processes that `living` does not find, and return them."""
        strays = [process for process in processes.find_marked(self._mark) if process.pid != os.getpid()]
        for process in strays:
            processes.signal_one(process, signal.SIGKILL)
        return strays


class Shutdown(Termination):
    """The end of an attempt, by its supervisor. `over_at`: when it was over, 0.0 before; `survivors`: what lives then.

    `ranks`: the pids of running ranks, each with that of its program, which is another one in a container. However they end
    from here on, they were stopped. `helpers`, `linger`, `term_after`: see Termination. `remove`: removes the containers when
    no process lives; returns None while it works, then what is left."""

    def __init__(
        self,
        family: Descendants,
        mark: str,
        grace: float,
        ranks: Optional[Mapping[int, int]] = None,
        helpers: Callable[[], Collection[int]] = tuple,
        linger: float = 0.0,
        remove: Callable[[], Optional[List[str]]] = list,
        term_after: float = 0.0,
    ) -> None:
        """Find how the ranks' programs handle TERM and which have ended before, and send TERM to the processes that are due."""
        # Ranks that end by SIGTERM itself, and not with an exit code.
        programs, spared = ranks or {}, set(helpers())
        apart = {pid for pid, main in programs.items() if main == pid} & spared
        self._end_by_signal = {pid for pid in programs if processes.dies_of(programs[pid], signal.SIGTERM)} - apart
        mains = set(programs.values()) - spared
        super().__init__(family.living, mark, grace, _HOPELESS, helpers, linger, term_after, mains)
        self._family = family
        self._ended_before = {pid for pid, main in programs.items() if main not in self.signalled}
        self._remove = remove
        self._none_lives = False
        self.survivors: List[str] = []
        self.over_at = 0.0

    def stopped(self, pid: int, code: int, killed: int) -> bool:
        """Check whether a rank that has exited now was stopped, and did not end by itself. killed: its signal, or 0.

        It was not if its program had ended before; it was if a signal has killed it, its exit code is that of a shell whose
        program got TERM or KILL, or TERM alone did not end it.
        """
        if pid in self._ended_before:
            return False
        return killed > 0 or pid not in self._end_by_signal or code in _OF_SIGNALS

    def turn(self, unreaped: bool = False) -> Optional[List[str]]:
        """End first processes, then containers, then what these have started. Return the survivors at the end, else None.

        At the end it sets over_at and survivors.
        """
        if not self._none_lives:
            if super().turn(unreaped or self._family.has_children()) is None:
                return None
            self._none_lives = True
        containers = self._remove()
        if containers is None:
            return None
        # The end of a container may have started processes, and ended survivors.
        survivors = super().turn(unreaped or self._family.has_children())
        if survivors is None:
            return None
        self.over_at = time.monotonic()
        self.survivors = survivors + containers
        return self.survivors


class Sweep(JobSearch):
    """The end of a job whose supervisor cannot end it.

    `container`: the runtime of its containers, if its ranks ran in some. `mains`: the main processes of its ranks, alive or
    not.
    """

    def __init__(
        self,
        known: Iterable[Process],
        mark: str,
        container: Optional[RuntimeSpec] = None,
        mains: Iterable[Process] = (),
    ) -> None:
        super().__init__(known, mark)
        self._container = container
        self._mains = mains

    def _helpers(self) -> Collection[int]:
        """Return the pids of known processes that belong to a container runtime."""
        return helpers(self.known)

    def end(self, grace: float, patience: float = 5.0) -> List[str]:
        """End the processes, then the containers and what these have started. Return descriptions of what is left."""
        left = self._end_processes(grace, patience)
        if self._container is None:
            return left
        containers = self.remove_containers()
        return self._end_processes(0.0, patience) + containers

    def remove_containers(self) -> List[str]:
        """Remove the job's containers, and return descriptions of those that are left. No process of theirs may live."""
        return [] if self._container is None else container_removal.remove(self._container, self.mark)

    def remove_session(self) -> None:
        """Remove the files that mpirun has left. No process of the job may live any more."""
        session_folder.remove(self.mark)

    def _end_processes(self, grace: float, patience: float) -> List[str]:
        """End all processes of the job by TERM, and after the grace by KILL, and wait for that.

        Return descriptions of survivors.
        """
        spared, linger = (self._helpers, LINGER) if self._container else (tuple, 0.0)
        mains = [main.pid for main in self._mains if processes.alive(main)]
        termination = Termination(self.living, self.mark, grace, patience, spared, linger, mains=mains)
        while True:
            survivors = termination.turn()
            if survivors is not None:
                return survivors
            time.sleep(_POLL)
