"""This module decides whether the attempts of a job make progress, by the steps that its ranks have printed.

attempt of the job                                                  restarts in a row without a later step
it has a later step than all attempts before it, or is the first    0
it has failed without one                                           one more
it has ended because nodes have changed, or ranks ask for it        the same
no step was read in an attempt before it                            0
a rank has gone back to an earlier step within an attempt           0: such steps (a bar for each epoch) show nothing
"""

from __future__ import annotations

from typing import Iterable, NamedTuple, Optional, Tuple

from clustertool.model.quantities import count

Step = Tuple[Optional[float], Optional[float]]  # epoch, step in the job or in the epoch; None: not printed


class JobSteps(NamedTuple):
    """The steps of a job.

    highest: the latest one of all attempts, None before the first. before: that of all attempts before this one. idle: how many
    attempts before this one have failed in a row without a later step than before. steady: no rank has gone back.
    """

    highest: Optional[Step] = None
    before: Optional[Step] = None
    idle: int = 0
    steady: bool = True

    def add(self, found: Iterable[Optional[Step]], steady: bool = True) -> JobSteps:
        """Add what one rank has printed in this attempt, in its order; leave out what has no step. steady: see above."""
        steps = [one for one in found if one is not None and one[1] is not None]
        highest = self.highest
        for one in steps:
            highest = one if highest is None or _is_later(one, highest) else highest
        return self._replace(
            highest=highest, steady=self.steady and steady and not any(map(_is_later, steps, steps[1:]))
        )

    @property
    def failures(self) -> int:
        """The value of `idle` after a failure of this attempt."""
        return self.idle + 1 if self.steady and self.before is not None and self.highest == self.before else 0

    def next_attempt(self, failed: bool) -> JobSteps:
        """Begin another attempt. failed: ranks have failed in this one; else it has ended for another reason."""
        return self._replace(before=self.highest, idle=self.failures if failed else min(self.idle, self.failures))

    def describe(self) -> str:
        """Describe how many restarts in a row have not passed which step, if this attempt fails, too."""
        epoch, step = self.highest or (None, None)
        at = f"step {step or 0:.0f}" + ("" if epoch is None else f" of epoch {epoch:g}")
        return f"{count(self.failures, 'restart')} in a row without a later step than {at}"


def _is_later(one: Step, other: Step) -> bool:
    """Check whether a step is later than another; their epochs count only if both have one."""
    epochs = (0.0, 0.0) if one[0] is None or other[0] is None else (one[0], other[0])
    return (epochs[0], one[1] or 0.0) > (epochs[1], other[1] or 0.0)
