"""This module starts a plan again with other ports or devices, where another job took them between probe and claim."""

from __future__ import annotations

import random
from collections.abc import Callable

from clustertool.engines.caller import Caller, pause
from clustertool.errors import ClustertoolError, only
from clustertool.model.planning.plan import Plan

Kinds = tuple[type[ClustertoolError], ...]
_AGAIN = 5  # times that a plan is made again when a port was taken meanwhile
# Seconds between two of these plans, more each time and random: two jobs that collided would collide again.
_APART = 0.2


def start_again(
    caller: Caller,
    made: Plan,
    start: Callable[[Plan], None],
    plan_again: Callable[[ClustertoolError], Plan],
    passing: Kinds,
) -> Plan:
    """Start a plan, or a later one after an error that passes: another job took a port in between.

    Returns the plan that was started.
    """
    for tried in range(_AGAIN):
        try:
            start(made)
            return made
        except ClustertoolError as error:
            if not only(error, *passing):
                raise
            failure = error
        pause(caller, random.uniform(0.0, _APART * tried))
        made = plan_again(failure)
    start(made)
    return made
