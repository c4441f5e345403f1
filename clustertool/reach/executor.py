"""Steps are carried out phase by phase; a phase is a barrier, and when one fails the ones before it are taken back."""

from __future__ import annotations

from clustertool.engines.base import Steps
from clustertool.errors import ClustertoolError, Interrupted, Terminated
from clustertool.reach.fleet import Fleet


def carry_out(steps: Steps, fleet: Fleet) -> None:
    """Raises all nodes' failures at once, or the interrupt, after everything that was begun is taken back."""
    for number, phase in enumerate(steps.phases):
        try:
            fleet.ask(phase.requests).all()
        except (ClustertoolError, Interrupted, Terminated):
            _take_back(steps, number, fleet)
            raise


def _take_back(steps: Steps, reached: int, fleet: Fleet) -> None:
    """Undo the phase that failed and those before it, the last one first; an undo that fails is no news."""
    check, fleet.check = fleet.check, None
    try:
        for phase in reversed(steps.undo[: reached + 1]):
            fleet.ask(phase.requests, timeout=15.0)
    finally:
        fleet.check = check
