"""The coordinator link joins a node's supervisor to the lead, which runs in this process or on another node."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Iterator, List, Optional, Sequence, Set, cast

from clustertool.errors import PreflightError
from clustertool.model.job.outcome import Outcome, coordinator
from clustertool.model.job.state_names import JobState
from clustertool.model.wire.lead_messages import Incarnation
from clustertool.node.supervisor.coordinator.lead_client import LeadClient
from clustertool.node.supervisor.coordinator.lead_server import LeadServer
from clustertool.node.supervisor.usage_recorder import Reached

if TYPE_CHECKING:
    from clustertool.model.wire.lead_messages import MemberMessage, Order
    from clustertool.model.wire.spec_types import Spec


class CoordinatorLink:
    """Call open(), then turn() and messages() each loop, post() for each message to the lead, and close() once."""

    def __init__(self) -> None:
        self._server: Optional[LeadServer] = None
        self._client: Optional[LeadClient] = None
        self._inbox: List[Order] = []

    def open(self, spec: Spec, me: Incarnation, record: Callable[..., None]) -> None:
        """Start the lead on its own node, else begin to connect to it. `me`: this supervisor.

        Raises PreflightError if the lead's port is in use.
        """
        if int(spec["node"]) != int(spec["lead"]["node"]):
            self._client = LeadClient(spec, me, record=record)
            return
        try:
            self._server = LeadServer(spec, me, self._inbox.append, record)
        except OSError as error:
            what = f"port {spec['lead']['port']} (the lead's) cannot be used: {error.strerror}"
            raise PreflightError(what, "set LEAD_PORT") from None
        self._server.join_self()

    def readers(self) -> List[Any]:
        if self._server is not None:
            return self._server.readers()
        return [self._client.wire] if self._client is not None and self._client.wire is not None else []

    def writers(self) -> List[Any]:
        if self._server is not None:
            return self._server.writers()
        return [wire for wire in self.readers() if wire.wants_write]

    def post(self, message: MemberMessage) -> None:
        if self._server is not None:
            self._server.receive(message)
        elif self._client is not None:
            self._client.post(message)

    def turn(self, ready: Set[int]) -> None:
        """`ready`: descriptors that can be read or written."""
        if self._server is not None:
            self._server.turn(ready)
        elif self._client is not None:
            self._inbox += cast("List[Order]", self._client.turn())

    def messages(self) -> Iterator[Order]:
        """Yield the lead's messages, also those that it sends because of what the caller does meanwhile."""
        while self._inbox:
            yield self._inbox.pop(0)

    @property
    def pending(self) -> bool:
        """Whether the lead has sent messages that were not read yet."""
        return bool(self._inbox)

    @property
    def connecting(self) -> bool:
        """Whether turn() must be called to connect: a connection wakes the caller by its descriptor."""
        return self._client is not None and self._client.wire is None

    @property
    def leads(self) -> bool:
        return self._server is not None

    @property
    def done(self) -> bool:
        """Whether this node need not stay because of the other nodes: they have the verdict, or it is not the lead."""
        return self._server is None or self._server.done

    @property
    def lost(self) -> bool:
        """Whether the lead was silent for too long."""
        return self._client is not None and self._client.lost

    def loss(self, spec: Spec) -> Outcome:
        """The outcome of the job, as this node knows it, if the lead is lost."""
        assert self._client is not None
        lead, name = spec["lead"]["name"], spec["name"]
        if self._client.joined:
            timeout = spec["policy"]["loss_timeout"]
            brief = f"node {lead} is lost"
            reason = f"{brief}: it leads the job, and {name} has not heard from it for {timeout:g} s"
        else:
            brief = f"{name} cannot connect to {coordinator(lead, self._client.endpoint)}"
            reason = f"{brief}: {self._client.cause}"
        return Outcome(JobState.LOST, 75, "tool", reason, node=int(spec["lead"]["node"]), brief=brief)

    def enter(self, attempt: int) -> None:
        """Messages belong to this attempt of the job from now on."""
        if self._client is not None:
            self._client.attempt = attempt

    def report_progress(self, progress: Sequence[Reached]) -> None:
        """Send the progress of this node's ranks with the next heartbeat."""
        if self._client is not None:
            self._client.progress.newest = progress

    def close(self) -> None:
        if self._client is not None:
            self._client.leave(0.5)
        if self._server is not None:
            self._server.close()
