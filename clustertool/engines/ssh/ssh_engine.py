"""The ssh engine: the nodes are those of HOSTS, each with an agent behind an ssh connection, or this machine."""

from __future__ import annotations

from collections.abc import Mapping

from clustertool.engines.base import Answers, Description, Engine, EngineState, by_records
from clustertool.fleet.fleet import Fleet, stop_everywhere
from clustertool.model.job.node_status import NodePart
from clustertool.model.job.state_names import JobState
from clustertool.model.wire.agent_answers import JobsAnswer
from clustertool.model.wire.agent_requests import StopHow


class SshEngine(Engine):
    """The engine of jobs on HOSTS. Nothing waits in a queue: what there is to know of a job, its nodes' records have."""

    def open(self, lag: float | None = None, job: str = "", newest: bool = False) -> Fleet:
        """Connect to all hosts of the cluster, and return the fleet.

        lag: see Fleet.open. The other arguments have no effect.
        """
        return self.fleet.open(lag)

    def describe(self, known: Mapping[int, JobsAnswer]) -> dict[str, Description]:
        """Return {job id: description} of the jobs in `known`, by the record that decides the state of each."""
        return {job: _describe_part(part) for job, part in by_records(known).items()}

    def cancel(self, job: str, how: StopHow) -> Answers:
        """Stop a job on all nodes, over the connections that are open, and return their answers."""
        return stop_everywhere(self.fleet, job, how)


def _describe_part(part: NodePart) -> Description:
    """Describe a job by the deciding part of its records.

    Its state is RUNNING, ENDED with reason and time of the end, or UNKNOWN with a reason. A part that is only placed is
    UNKNOWN: another command may start it now.
    """
    if part.state is JobState.UNKNOWN:
        return Description(EngineState.UNKNOWN, part.reason)
    if part.may_run:
        return Description(EngineState.RUNNING)
    if part.state is JobState.STARTING:  # it is placed: another command may launch it now, or has ended before that
        return Description(EngineState.UNKNOWN, "no supervisor has started")
    return Description(EngineState.ENDED, part.reason, part.ended)
