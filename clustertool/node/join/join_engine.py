"""An engine starts the joining processes of a job and decides some things on their machines. A user starts them without one."""

from __future__ import annotations

import os
import re
import socket
import stat
from dataclasses import replace
from typing import Callable, Dict, Optional

from clustertool.errors import NodeLost, PreflightError
from clustertool.model.job.outcome import Outcome
from clustertool.model.job.state_names import JobState
from clustertool.model.joining.join_file import JoinFile
from clustertool.model.joining.join_offers import COORDINATOR
from clustertool.model.kubernetes.pod_variables import KUBERNETES, POD_IP
from clustertool.model.paths import IN_POD
from clustertool.node.join import meeting
from clustertool.node.join.join_report import JoinReport
from clustertool.node.join.pods.pod_process import PodProcess
from clustertool.node.join.slurm_allocation import SlurmAllocation
from clustertool.node.supervisor.allocation import Allocation
from clustertool.node.system import programs, users

_PATIENCE = 10.0  # seconds for the engine's program
_ENDED = "Kubernetes has ended its pod"
_WHY = "it was deleted, evicted or preempted, its machine shuts down, or another pod of the job has failed"


class JoinEngine:
    """The starter of joining processes: a user (this class) or an engine (a subclass), and what it decides on their machines.

    removes_bundle: the coordinator removes the bundle. A Secret cannot be removed from a pod.
    """

    removes_bundle = False

    def run(self, join: JoinFile, work: Callable[[JoinReport], int], report: JoinReport) -> int:
        """Call `work`, which joins, with this report, and return its exit code. Raises what it raises."""
        return work(report)

    def require_private(self, info: os.stat_result, path: str) -> None:
        """Raise PreflightError for a bundle that is not a file of this user, or that others may read or write."""
        require_private(info, path)

    def root_group(self, join: JoinFile) -> str:
        """Return ROOT_DIR_GROUP of the cluster."""
        return join.cluster.root_dir_group

    def with_address(self, join: JoinFile) -> JoinFile:
        """Return the join file as it is. An engine replaces a coordinator's host that is not known here by its address."""
        return join

    def allocation(self, join: JoinFile) -> Allocation:
        """Return an Allocation that does nothing: no engine has started this process. An engine returns its own one."""
        return Allocation()


class _Slurm(JoinEngine):
    """Slurm as the starter of the joining processes."""

    removes_bundle = True

    def with_address(self, join: JoinFile) -> JoinFile:
        """Return the join file; if the coordinator's host is not known here, with the host's NodeAddr, which scontrol knows.

        The name of a node need not be a host name. Without an answer within 10 s the file stays as it is.
        """
        try:
            meeting.addresses(join.coordinator.host)
        except (OSError, UnicodeError):
            code, out, _ = programs.output(["scontrol", "-o", "show", "node", join.coordinator.host], _PATIENCE)
            found = re.search(r"(?:^|\s)NodeAddr=(\S+)", out)
            if code == 0 and found:
                return replace(join, coordinator=replace(join.coordinator, host=found.group(1)))
        return join

    def allocation(self, join: JoinFile) -> Allocation:
        """Create the allocation of SLURM_JOB_ID; without it, one that does nothing."""
        if os.environ.get("SLURM_JOB_ID"):
            return SlurmAllocation(join.identity.job_id, os.environ, join.of_engine.requeue_on)
        return Allocation()


class _Kubernetes(JoinEngine):
    """Kubernetes as the starter of the joining processes."""

    def run(self, join: JoinFile, work: Callable[[JoinReport], int], report: JoinReport) -> int:
        """Run the joining process as the child of the first process of a pod, with its reports to that one.

        Returns the exit code.
        """

        def body(reports: int) -> int:
            own = JoinReport(lines=False, also=reports)
            return own.guarded(lambda: work(own))

        return PodProcess(join, body).run()

    def require_private(self, info: os.stat_result, path: str) -> None:
        """Raise PreflightError unless it is a file of this user or root that others cannot write, as in a Secret."""
        if not stat.S_ISREG(info.st_mode) or info.st_uid not in {os.getuid(), *users.roots()} or info.st_mode & 0o022:
            raise PreflightError(f"{path} is a file that other users can change", "mount the Secret of the job there")

    def root_group(self, join: JoinFile) -> str:
        """Return IN_POD: in a pod, ROOT_DIR_GROUP has no meaning."""
        return IN_POD

    def with_address(self, join: JoinFile) -> JoinFile:
        """Replace the host of node 0, in its own pod, by an address of the pod, if one is known.

        The name of node 0 comes from the name server, which may not have it yet; the address of a Service is none of the pod's.
        """
        if join.index != COORDINATOR:
            return join
        known = (os.environ.get(POD_IP, ""), socket.gethostname())
        host = next(filter(None, (meeting.own_address(name) for name in known if name)), join.coordinator.host)
        return replace(join, coordinator=replace(join.coordinator, host=host))

    def allocation(self, join: JoinFile) -> Allocation:
        """Create the allocation that stands for the pod."""
        return _PodAllocation()


class _PodAllocation(Allocation):
    """A pod, whose programs cannot ask Kubernetes: it has no token of a service account. The laptop finds the exact reason.

    Kubernetes ends a pod by SIGTERM and does not start it again, so its node is lost.
    """

    present = True

    def __init__(self) -> None:
        self._by = ""

    def ask(self, by: str, code: int) -> None:
        """Note the text of the signal, for the outcome."""
        self._by = by

    def turn(self) -> Optional[Outcome]:
        """Return, once after ask(), the outcome LOST with the possible reasons; else None."""
        if not self._by:
            return None
        by, self._by = self._by, ""
        return Outcome(JobState.LOST, NodeLost.code, "tool", f"{by}: {_ENDED}: {_WHY}", brief=f"{_ENDED}: {_WHY}")


_ENGINES: Dict[str, JoinEngine] = {"": JoinEngine(), "slurm": _Slurm(), KUBERNETES: _Kubernetes()}


def engine_of(join: JoinFile) -> JoinEngine:
    """Return the engine that has started the joining processes; the one for a user if there is none, or it is not known.

    with_engine_place() refuses an engine that is not known.
    """
    return _ENGINES.get(join.engine, _ENGINES[""])


def require_private(info: os.stat_result, path: str) -> None:
    """Raise PreflightError for a file with keys that is not a file of this user, or that others may read or write."""
    if not stat.S_ISREG(info.st_mode) or info.st_uid != os.getuid():
        raise PreflightError(f"{path} is not a file of this user", "it has the job's key: make it yours alone")
    if info.st_mode & 0o077:
        what = f"{path} has the job's key, and other users may open it (mode {stat.S_IMODE(info.st_mode):04o})"
        raise PreflightError(what, f"chmod 600 {path}; if another user could read it, write a new one")
