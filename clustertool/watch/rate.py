"""A rate is a program's speed, computed from the steps in its log and their times. Pure."""

from __future__ import annotations

from clustertool.model.job.progress import find

_WINDOW = 30.0  # seconds
_PATIENCE = 3.0  # of its own gaps between two steps


class Rate:
    """Steps a second over the last half minute; None until a step has been seen to grow."""

    def __init__(self) -> None:
        self._seen: list[tuple[float, float]] = []

    def feed(self, line: str, now: float) -> None:
        progress = find(f"{line}\n")
        if progress is None or progress.step is None:
            return
        step = progress.step
        if self._seen and step < self._seen[-1][1]:  # another epoch, another attempt
            self._seen.clear()
        if not self._seen or step > self._seen[-1][1]:
            self._seen.append((now, step))
        while len(self._seen) > 2 and now - self._seen[1][0] > _WINDOW:
            del self._seen[0]

    @property
    def counts(self) -> bool:
        """Whether the program has printed a step."""
        return bool(self._seen)

    def now(self, now: float) -> float | None:
        """A program that has stood still for long is slower than it was, and in the end it does not move."""
        if len(self._seen) < 2:
            return None
        (first, low), (last, high) = self._seen[0], self._seen[-1]
        still, gap = now - last, (last - first) / (len(self._seen) - 1)
        if still > max(_WINDOW, _PATIENCE * gap):
            return 0.0
        return (high - low) / (max(last - first, 1e-3) + (still if still > (last - first) else 0.0))
