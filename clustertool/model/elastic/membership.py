"""The nodes of an elastic job over time, as its records have them: its coordinators, and how the membership has changed."""

from __future__ import annotations

from collections import Counter
from typing import Any, Dict, Mapping, NamedTuple, Optional, Set, Tuple

from clustertool.model import field_types as fields
from clustertool.model.shape import Annotated, read

_MOST_NODES = 100_000


class EpochChange(NamedTuple):
    """An epoch as its coordinator has recorded it. attempt: its first one. t: when it began, by the clock of the coordinator.

    left: members of the epoch before that do not take part, and why. cause: of the end of that epoch. seconds: from the last
    useful work of its ranks until this epoch began.
    """

    attempt: fields.AttemptNumber
    t: fields.Time
    nodes: Annotated[Tuple[fields.NodeIndex, ...], _MOST_NODES]
    left: Annotated[Tuple[Tuple[fields.NodeIndex, fields.Label], ...], _MOST_NODES] = ()
    joined: Annotated[Tuple[fields.NodeIndex, ...], _MOST_NODES] = ()
    cause: str = ""
    seconds: float = 0.0


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

    def add(self, epoch: int, coordinator: int) -> None:
        """Count one more header of this epoch that names this coordinator."""
        self._epochs.setdefault(epoch, Counter())[coordinator] += 1

    def of(self, epoch: int) -> int:
        """Return the coordinator that most headers of an epoch name, of equal votes the lower one.

        The usual one without headers.
        """
        votes = self._epochs.get(epoch)
        return max(votes, key=lambda coordinator: (votes[coordinator], -coordinator)) if votes else self._usual

    @property
    def newest(self) -> int:
        """The coordinator of the newest epoch with headers of at least two nodes; without such, of the newest one.

        The usual one without headers.
        """
        known = sorted(self._epochs, key=lambda epoch: (sum(self._epochs[epoch].values()) > 1, epoch))
        return self.of(known[-1]) if known else self._usual


class Membership:
    """The membership in the newest epoch, as the records of one node have it.

    Only the coordinator's node knows the machines that wait for the next epoch, and what has changed.
    """

    def __init__(self) -> None:
        self._header: Optional[Mapping[str, Any]] = None  # of an elastic job
        self._names: Dict[int, str] = {}  # of all nodes so far: a header has those of its epoch
        self._change: Optional[EpochChange] = None
        self._standby: Dict[Tuple[str, str], None] = {}  # name and address of each machine, in their order
        self._lost: Set[int] = set()

    @property
    def elastic(self) -> bool:
        return self._header is not None

    def apply(self, event: Mapping[str, Any]) -> None:
        """Update the membership by the node's next event, whose shape was checked. Events of other kinds change nothing.

        A job header begins anew, without an epoch, lost nodes and machines on standby.
        """
        kind = event["type"]
        if kind == "job":
            self._header = event if "maximum" in event else None
            self._change, self._standby, self._lost = None, {}, set()
            self._names.update({node: name for node, name in enumerate(event.get("nodes", ())) if name})
        elif kind == "epoch":
            self._change = read(EpochChange, event)
        elif kind == "lost":
            self._lost.add(int(event["node"]))
        elif kind == "standby":
            self._standby[event["name"], event["address"]] = None
        elif kind == "standby-left":
            self._standby.pop((event["name"], event["address"]), None)

    def sample(self) -> Optional[Dict[str, object]]:
        """Build a MembershipSample; None if the job is not elastic. Lost nodes are left out."""
        header, change = self._header, self._change
        if header is None:
            return None
        members = sorted(set(change.nodes) - self._lost) if change is not None else []
        joined = change.joined if change is not None and change.attempt else ()
        return {
            "epoch": int(header.get("epoch", 0)),
            "minimum": int(header.get("minimum", 0)),
            "maximum": int(header["maximum"]),
            "coordinates": change is not None,
            "nodes": [self._name(node) for node in members],
            "standby": [name for name, _ in self._standby],
            "left": [(self._name(node), why) for node, why in (change.left if change is not None else ())],
            "joined": [self._name(node) for node in joined],
            "began": change.t if change is not None else 0.0,
            "cause": change.cause if change is not None else "",
        }

    def _name(self, node: int) -> str:
        """Return the name of a node; "node N" if no header has it."""
        return self._names.get(node, f"node {node}")
