"""The nodes of an elastic job over time, as its records have them: who coordinates, and how the membership has changed."""

from __future__ import annotations

from collections import Counter
from typing import Any, Dict, Mapping, NamedTuple, Tuple


class EpochChange(NamedTuple):
    """An epoch as its coordinator has recorded it. attempt: its first one. t: when it began, by the clock of the coordinator.

    left: members of the epoch before that do not take part, and why. cause: of the end of that epoch. seconds: from the last
    useful work of its ranks until this epoch began.
    """

    attempt: int
    t: float
    nodes: Tuple[int, ...]
    left: Tuple[Tuple[int, str], ...] = ()
    joined: Tuple[int, ...] = ()
    cause: str = ""
    seconds: float = 0.0

    def as_dict(self) -> Dict[str, Any]:
        """An entry of "epochs" of JSON answers."""
        return {
            **self._asdict(),
            "left": [list(one) for one in self.left],
            "nodes": list(self.nodes),
            "joined": list(self.joined),
        }


def read_change(event: Mapping[str, Any]) -> EpochChange:
    """Of the event `epoch`, whose shape was checked."""
    return EpochChange(
        int(event["attempt"]),
        float(event.get("t", 0)),
        tuple(int(node) for node in event["nodes"]),
        tuple((int(node), str(why)) for node, why in event["left"]),
        tuple(int(node) for node in event["joined"]),
        str(event["cause"]),
        float(event["seconds"]),
    )


class EpochHeaders:
    """The node that coordinates each epoch of a job, as the headers of its nodes name it.

    Most nodes decide, so a node cannot name itself where there are others. usual: where no node names one. placed: the newest
    epoch of which the places of its ranks are known. elastic: a header names the coordinator, as only those of elastic jobs do.
    """

    def __init__(self, usual: int) -> None:
        self._usual = usual
        self.placed = 0
        self.elastic = False
        self._epochs: "Dict[int, Counter[int]]" = {}

    def add(self, epoch: int, lead: int) -> None:
        self._epochs.setdefault(epoch, Counter())[lead] += 1

    def of(self, epoch: int) -> int:
        """Of equal votes the lower number counts."""
        votes = self._epochs.get(epoch)
        return max(votes, key=lambda lead: (votes[lead], -lead)) if votes else self._usual

    @property
    def newest(self) -> int:
        """The coordinator of the newest epoch that most nodes of any epoch, or at least two, have entered."""
        known = sorted(self._epochs, key=lambda epoch: (sum(self._epochs[epoch].values()) > 1, epoch))
        return self.of(known[-1]) if known else self._usual
