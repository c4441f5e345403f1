"""The supervisor answers the programs that mpirun calls: the rank wrappers, and on the coordinator's node the launch agents."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Callable, FrozenSet, Tuple, Union

from clustertool.errors import NotFound, UsageError
from clustertool.node.mpi.launched_ranks import NOTICE, LaunchedRanks

if TYPE_CHECKING:
    from clustertool.model.job.outcome import Key
    from clustertool.model.wire.coordinator_messages import RankExit
    from clustertool.model.wire.supervisor_messages import Accepted, LauncherRequest, ProcessEnd, SupervisorAnswer
    from clustertool.node.supervisor.control_socket import ControlSocket, Waiting
    from clustertool.node.supervisor.coordinator.coordinator_link import CoordinatorLink
    from clustertool.node.supervisor.rank_table import LocalRank, RankEnd, RankTable

_ACCEPTED: Accepted = {"type": "accepted"}


class LauncherRequests:
    """`adopt(key, pid)` makes a process a rank of the supervisor. It raises ClustertoolError if that cannot be."""

    def __init__(self, ranks: RankTable, control: ControlSocket, adopt: Callable[[Key, int], None]) -> None:
        self._ranks = ranks
        self._control = control
        self._adopt = adopt

    def answer(
        self, request: LauncherRequest, link: CoordinatorLink, may_launch: bool
    ) -> Union[Tuple[SupervisorAnswer, bytes], Waiting]:
        """Return the answer, or what the sender waits for. Raises NotFound, UsageError, PreflightError.

        may_launch: this is the coordinator's node, and the job does not end.
        """
        if request["type"] == "launch-daemon":
            key = self._ranks.launched.node_of(request["host"])
            if not may_launch:
                raise NotFound("no MPI daemon can be started now", "start the job again")
            if self._control.waits(("launch-daemon", *key)):
                raise UsageError(f"mpirun wants a second MPI daemon on {request['host']}", "name each host once")
            link.launch(key, request["command"])
            return ("launch-daemon", *key)
        role, number = request["role"], request["rank"]
        self._ranks.launched.require(role, number, self._ranks.find((role, number)))
        if request["type"] == "rank-end":
            self._ranks.launched.waits_for_end((role, number))
            return ("rank-end", role, number)
        if request["type"] == "rank-started":
            self._adopt((role, number), request["pid"])
        else:
            self._ranks.launched.signalled((role, number))
        return _ACCEPTED, b""

    def turn(self, link: CoordinatorLink) -> None:
        """Answer those that wait for what has ended meanwhile."""
        for key in self._ranks.launched.take_late():  # a rank may end before its wrapper has sent the request
            self.answer_wrapper(key)
        for exit in link.ended_daemons():
            self._resolve("launch-daemon", exit)

    def answer_wrapper(self, key: Key) -> None:
        """Send the end of a rank to mpirun, but no failure: it would end other ranks before the coordinator does."""
        rank = self._ranks.find(key)
        if rank is not None and rank.exit is not None and not rank.exit.failed and not rank.exit.stopped:
            self._resolve("rank-end", rank.exit)

    def _resolve(self, request: str, exit: RankExit) -> None:
        answer: ProcessEnd = {"type": "process-end", "code": exit.code, "signal": exit.signal}
        self._control.resolve((request, *exit.key), answer)

    def may_have_ended(self, rank: LocalRank, ended: RankEnd) -> bool:
        """Check whether mpirun may have ended a rank, which becomes known a moment later."""
        if not self._ranks.launched.starts(rank.key[0]) or self.has_ended(rank):
            return False
        return LaunchedRanks.may_be_ended(ended.code, ended.killed) and time.monotonic() - ended.at <= NOTICE

    def has_ended(self, rank: LocalRank) -> bool:
        """Check whether mpirun has ended a rank: its wrapper got the signal as well, or is gone."""
        return self._ranks.launched.ended_by_launcher(rank.key, self._control.waits(("rank-end", *rank.key)))

    def helpers(self) -> FrozenSet[int]:
        """Return the pids of all that mpirun consists of on this node. Wrappers and agents may have lost their parents."""
        return LaunchedRanks.helpers([*self._ranks.launchers(), *self._control.waiting_pids()])
