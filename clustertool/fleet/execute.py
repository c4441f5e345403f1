"""Steps are executed phase by phase. A phase is a barrier; if one fails, the phases before it are undone."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from clustertool.errors import ClustertoolError, Interrupted, Terminated
from clustertool.fleet.fleet import Fleet
from clustertool.model.planning.requests import Steps

Answers = Mapping[int, "Mapping[str, object] | ClustertoolError"]
_PATIENCE = 25.0  # seconds for a node to take back what was begun: more than a stop without grace takes


def carry_out(steps: Steps, fleet: Fleet, undone: Callable[[str, Answers], None]) -> None:
    """Raises all nodes' failures at once, or the interrupt, after everything that was started is undone.

    `undone` is called for each phase that is undone: its name, and the answer of every node.
    """
    for number, phase in enumerate(steps.phases):
        try:
            fleet.ask(phase.requests).all()
        except (ClustertoolError, Interrupted, Terminated):
            for back in reversed(steps.undo[: number + 1]):
                gathered = fleet.ask(back.requests, timeout=_PATIENCE, patient=True)
                undone(back.name, {**gathered.ok, **gathered.failed})
            raise
