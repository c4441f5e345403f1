"""This module reads the image of a job's containers and its digest from the first events of its nodes."""

from __future__ import annotations

from typing import Dict, Iterable, NamedTuple, Optional

from clustertool.model.job.caretakers import Event

_SEPARATOR = ", "  # between the values of nodes that differ


class JobContainer(NamedTuple):
    """The image and the runtime of a job's ranks; several values where nodes differ. digest: "" where it is not known."""

    image: str
    digest: str
    runtime: str

    @property
    def text(self) -> str:
        """The image, its digest if it is known, and the runtime."""
        digest = f" ({self.digest})" if self.digest else ""
        return f"{self.image}{digest}, {self.runtime}"

    def as_dict(self) -> Dict[str, str]:
        return self._asdict()


def container_of(events: Iterable[Event]) -> Optional[JobContainer]:
    """Read the container of a job from events of all nodes, or of some; different values are joined by commas.

    None for a job without containers, and for records of earlier versions.
    """
    found = [event for event in events if event.get("type") == "job" and event.get("image")]
    if not found:
        return None
    texts = ([str(event.get(name) or "") for event in found] for name in JobContainer._fields)
    return JobContainer(*(_SEPARATOR.join(filter(None, dict.fromkeys(each))) for each in texts))
