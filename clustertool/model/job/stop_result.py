"""The laptop reads the result of a stop on one node from the node's answer, or from its last event."""

from __future__ import annotations

from typing import Any, Mapping, NamedTuple, Optional, Tuple, Union

from clustertool.errors import ClustertoolError
from clustertool.model.job.state_names import StopState


class StopResult(NamedTuple):
    """What a stop has done on one node. `why`: of UNKNOWN and NO_ANSWER.

    `waits`: nothing lives but a supervisor that waits for another node.
    """

    state: StopState
    survivors: Tuple[str, ...] = ()
    waits: bool = False
    why: str = ""

    @property
    def over(self) -> bool:
        """Whether it is sure that no process of the job lives on the node."""
        return self.state not in (StopState.SURVIVORS, StopState.UNKNOWN, StopState.NO_ANSWER)


CLEAN = StopResult(StopState.CLEAN)


def read_result(answer: Union[Mapping[str, Any], ClustertoolError, None], job: str) -> StopResult:
    """Read the result of a stop on one node from its answer: NEVER_STARTED if the answer does not have the job.

    `answer`: to the request to stop. An error in its place, or None, gives NO_ANSWER.
    """
    if answer is None or isinstance(answer, ClustertoolError):
        return StopResult(StopState.NO_ANSWER, why=answer.what if answer else "")
    found = answer["jobs"].get(job)
    if found is None:
        return StopResult(StopState.NEVER_STARTED)
    survivors = tuple(found["survivors"])
    state = StopState.SURVIVORS if survivors else StopState(found["state"])
    return StopResult(state, survivors, bool(found.get("waits")), str(found.get("why", "")))


def read_undo(answer: Union[Mapping[str, Any], ClustertoolError]) -> StopResult:
    """Return UNDONE for the answer of a node that has taken back a placing, NO_ANSWER for an error in its place."""
    if isinstance(answer, ClustertoolError):
        return StopResult(StopState.NO_ANSWER, why=answer.what)
    return StopResult(StopState.UNDONE)


def last_result(survivors: Optional[Tuple[str, ...]]) -> StopResult:
    """Return the result of a node that has recorded its end: SURVIVORS if it names some, else CLEAN."""
    return StopResult(StopState.SURVIVORS, survivors) if survivors else CLEAN
