"""Standby offers are the connections of machines that offer to join an elastic job while an epoch runs."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Callable, Dict, List, Optional, Set, Tuple

from clustertool.model.job.outcome import Outcome
from clustertool.model.wire.coordinator_messages import Incarnation, OverMessage, read_incarnation
from clustertool.model.wire.frames import Header
from clustertool.node.system.tls_link import TlsLink, heartbeat_interval

if TYPE_CHECKING:
    from clustertool.model.wire.join_messages import WaitMessage

_MOST = 256  # machines on standby; more are closed, and offer themselves again
_LONGEST_NAME = 255
_LAST_MESSAGE = 1.0  # seconds
_CONNECTION = 2.0  # seconds: a machine tries again each half second
_MAX_BACKLOG = 1 << 16


class StandbyOffer:
    """The offer of a machine to join the next epoch.

    sender: the process. name: of its machine. epoch: the highest attempt that the process has been in and has ended, -1 if
    none. An offer that was sent before may come late, and proves nothing about a later epoch.
    """

    def __init__(self, hello: Header) -> None:
        """Read the fields of an offer's message; names are cut at 255 characters.

        Raises ValueError for a wrong sender or epoch.
        """
        self.sender: Incarnation = read_incarnation(hello.get("sender"))
        epoch = hello.get("epoch", -1)
        if type(epoch) is not int:
            raise ValueError("an epoch that is no number")
        self.epoch = epoch
        self.name, self.address = (str(hello.get(field, ""))[:_LONGEST_NAME] for field in ("hostname", "address"))


class StandbyOffers:
    """The connections of machines that wait for the next epoch. Call turn() each loop, and close() or end() once.

    loss_timeout: a machine that is silent for so long is closed. present, nodes: how many nodes take part, and at most could.
    expected: how many machines wait for the next epoch from the start of this one. They connect soon.
    """

    def __init__(self, loss_timeout: float, present: int, nodes: int, expected: int) -> None:
        self._timeout, self._expected = loss_timeout, expected
        self._senders: Set[Incarnation] = set()
        self._wait: WaitMessage = {"type": "wait", "present": present, "nnodes": nodes, "missing": []}
        self._links: Dict[TlsLink, Tuple[StandbyOffer, float]] = {}  # and when the newest message came
        self._beat_at = 0.0

    @property
    def count(self) -> int:
        """The number of machines that wait."""
        return len(self._links)

    def wires(self) -> List[TlsLink]:
        """Return the connections of the machines that wait."""
        return list(self._links)

    def add(self, wire: TlsLink, offer: StandbyOffer, now: float) -> bool:
        """Keep the connection of an offer instead of an older one of the same process, and send the machine that it must wait.

        Returns whether the machine is a new one. With 256 machines, the connection is closed, and False is returned. now: of
        the caller's clock.
        """
        again = [link for link, (other, _) in self._links.items() if other.sender == offer.sender]
        for link in again:
            self._remove(link)
        if len(self._links) >= _MOST:
            wire.close()
            return False
        self._links[wire] = (offer, now)
        self._senders.add(offer.sender)
        wire.send({**self._wait})
        wire.flush()
        return not again

    def turn(self, now: float, ready: Optional[Set[int]]) -> List[StandbyOffer]:
        """Read the connections, send a heartbeat if one is due, and return the offers of machines whose connection was removed.

        A machine is removed if it leaves, is silent for the loss timeout, or does not read. ready: descriptors that can be read
        or written, None if that is not known.
        """
        gone = []
        for wire, (offer, at) in list(self._links.items()):
            try:
                if ready is None or wire.fileno() in ready:
                    messages = wire.turn()
                    at = now if messages else at
                    self._links[wire] = (offer, at)
                    if any(message.get("type") == "leaving" for message in messages):
                        raise ConnectionError("it leaves")
                if now - at > self._timeout or wire.backlog > _MAX_BACKLOG:
                    raise ConnectionError("it is silent, or does not read")
            except ConnectionError:
                gone.append(offer)
                self._remove(wire)
        if now >= self._beat_at:
            self._beat_at = now + heartbeat_interval(self._timeout)
            for wire in self._links:
                wire.send({"type": "beat"})
        return gone

    def _remove(self, wire: TlsLink) -> None:
        """Close a connection, and forget it and its offer."""
        self._links.pop(wire)
        wire.close()

    def end(self, outcome: Outcome, admit: Callable[[StandbyOffers], None]) -> None:
        """Send the outcome of the job to all machines on standby, and close the connections.

        Waits up to 1 s until they have closed them, or up to 2 s until the expected machines have connected: an epoch may be
        shorter than that takes. admit: adds new offers.
        """
        fields = outcome.as_record()
        over: OverMessage = {"type": "over", "outcome": fields}
        informed: Set[TlsLink] = set()
        began = time.monotonic()
        while self._links or len(self._senders) < self._expected:
            passed = time.monotonic() - began
            if passed > (_CONNECTION if len(self._senders) < self._expected else _LAST_MESSAGE):
                break
            admit(self)
            for wire in list(self._links):
                if wire not in informed:
                    informed.add(wire)
                    wire.send({**over})
                try:
                    wire.turn()  # until the other side closes it
                except ConnectionError:
                    self._remove(wire)
            time.sleep(0.002)
        self.close()

    def close(self) -> None:
        """Close the connections. The machines offer themselves again when the next epoch gathers its nodes."""
        for wire in list(self._links):
            self._remove(wire)
