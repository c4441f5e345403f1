"""A fleet is the open agents of one command, one per node. It sends a request to all of them and gathers the responses."""

from __future__ import annotations

import gc
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from clustertool.errors import REPORT, ClustertoolError, InternalError, NotFound, Unreachable
from clustertool.fleet.agent_client import AgentClient, Sink
from clustertool.fleet.this_machine import HereLink
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.wire.messages import Answered, Request
from clustertool.ssh.channel import Reachable
from clustertool.ssh.connection import SshLink
from clustertool.ssh.greeting import seconds_for
from clustertool.ssh.parallel import Gathered, ParallelWork, each
from clustertool.ssh.parallel import begin as begin_all
from clustertool.ssh.prompter import Person, Prompter

Check = Callable[[], None]

_OVERDUE = 5.0  # seconds that the start of an agent may take beyond its deadline, before its connection is closed


class Fleet:
    """`failed` has the nodes without an answer, with the reason: those that could not be reached, and those that logged in and
    did not answer a request. Use as a context manager: it closes everything."""

    def __init__(
        self, cluster: Cluster, check: Check | None = None, sink: Sink | None = None, person: Person | None = None
    ) -> None:
        self.cluster = cluster
        self.check = check
        self.agents: dict[int, AgentClient] = {}
        self.failed: dict[int, ClustertoolError] = {}
        self.phases: dict[int, dict[str, float]] = {}  # seconds of connect, login, agent
        self._sink = sink
        self.opened = False
        self._links: list[Reachable] = []
        self._prompter = Prompter(person)
        self._work: ParallelWork[Host, AgentClient] | None = None  # of open()
        self._starting: dict[int, tuple[float, Reachable]] = {}  # nodes whose agents start: deadline and connection

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, opened: Callable[[int], None] | None = None, lag: float | None = None) -> Fleet:
        """Connect to every host and start its agent, in parallel. What fails is in `failed`.

        `opened` is called for each agent, in its thread. `lag`: seconds without a new node after which this returns, if some
        nodes are there. The others are `late`: rest() waits for them.
        """
        gc.freeze()  # what was imported stays

        def connect(host: Host) -> AgentClient:
            link = self._reach(host)
            between = time.monotonic()
            self._starting[host.index] = between + seconds_for(self.cluster.connect_timeout) + _OVERDUE, link
            try:
                agent = AgentClient.open(link, host, self.cluster, self._sink)
            finally:
                del self._starting[host.index]
            self.phases[host.index] = {**getattr(link, "times", {}), "agent": time.monotonic() - between}
            if opened:
                self.agents[host.index] = agent
                opened(host.index)
            return agent

        self._work = begin_all({host.index: host for host in self.cluster.hosts}, connect)
        self._gather(lag)
        self.opened = True
        return self

    @property
    def late(self) -> list[int]:
        """Nodes that open() did not wait for."""
        return self._work.pending() if self._work else []

    def rest(self) -> None:
        """Wait for the nodes that are late; each has a deadline."""
        self._gather(None)

    def _gather(self, lag: float | None) -> None:
        """Wait for nodes and sort them into `agents` and `failed`. Those that are late are in neither."""
        assert self._work is not None
        try:
            self._work.wait(None, self._check, lag)
        except BaseException:
            self._work.abandon()
            raise
        finally:
            self._prompter.announce()
        late, gathered = set(self._work.pending()), self._work.gathered()
        self.agents.update(gathered.ok)
        self.failed.update({node: error for node, error in gathered.failed.items() if node not in late})

    def serve(self) -> None:
        """Ask the questions (passwords) of threads that connect; only the thread that made this fleet may."""
        self._prompter.serve()

    def silence(self) -> None:
        """Put no more questions: a login that needs one fails from now on."""
        self._prompter.silence()

    def _check(self) -> None:
        self.serve()
        for end, link in list(self._starting.values()):
            if time.monotonic() > end:  # the node reads too slowly: a send has no deadline as a whole
                link.close()
        if self.check:
            self.check()

    def reopen(self, node: int) -> AgentClient:
        """Open one node again after its connection was lost. The old agent reports nothing more."""
        host = self.cluster.hosts[node]
        if node in self.agents:
            self.agents[node].close()
            self.agents[node].link.close()
        self.agents[node] = AgentClient.open(self._reach(host), host, self.cluster, self._sink)
        self.failed.pop(node, None)
        return self.agents[node]

    def _reach(self, host: Host) -> Reachable:
        link: Reachable = HereLink(host) if host.here else SshLink.open(host, self.cluster, prompt=self._prompter)
        self._links.append(link)
        return link

    def keep(self, cluster: Cluster) -> None:
        """Go on with these hosts only, under their new numbers; names stay what they were."""
        by_name = {agent.host.name: agent for agent in self.agents.values()}
        kept = {host.name for host in cluster.hosts}
        for name, agent in by_name.items():
            if name not in kept:
                agent.close()
        self.cluster, self.failed, self.agents = cluster, {}, {}
        for host in cluster.hosts:
            self.agents[host.index] = by_name[host.name]
            self.agents[host.index].host = host

    def take(self, places: Mapping[int, int], names: Sequence[str]) -> None:
        """Number the nodes as a job did: `places` are {its node: node here}, `names` its nodes in order. Others are closed.

        A node that is not in conf.py any more is in `failed`.
        """
        hosts = {host.name: host.index for host in self.cluster.hosts}
        old_agents, old_failed = dict(self.agents), dict(self.failed)
        self.agents, self.failed, kept = {}, {}, []
        for node, name in enumerate(names):
            old = places.get(node, hosts.get(name, -1))
            if old < 0:
                kept.append(replace(self.cluster.hosts[0], index=node, name=name))
                self.failed[node] = Unreachable("is no host of conf.py (any more)", "name it in HOSTS again", name)
                continue
            kept.append(replace(self.cluster.hosts[old], index=node))
            if old in old_agents:
                self.agents[node] = old_agents[old]
                self.agents[node].host = kept[-1]
            if old in old_failed:
                self.failed[node] = old_failed[old]
        for agent in old_agents.values():
            if agent not in self.agents.values():
                agent.close()
        self.cluster = replace(self.cluster, hosts=tuple(kept))

    def ask(
        self, requests: Mapping[int, Request[Answered]], timeout: float | None = 60.0, *, patient: bool = False
    ) -> Gathered[Answered]:
        """{node: request} to the agents that are there; nodes without one are not asked. patient: no Ctrl+C ends it."""
        wanted = {node: request for node, request in requests.items() if node in self.agents}
        check = None if patient else self.check
        nodes = {node: node for node in wanted}
        return each(
            nodes, lambda node: self.ask_one(node, wanted[node], timeout), width=max(1, len(wanted)), check=check
        )

    def ask_one(self, node: int, request: Request[Answered], timeout: float | None = 60.0) -> Answered:
        """The same for one node, in the caller's thread. Raises the node's error, or Unreachable.

        An unexpected error in its answer is InternalError, of this node: the others' answers are used.
        """
        try:
            return self.agents[node].ask(request, timeout)
        except ClustertoolError:
            raise
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            raise InternalError(f"a bug of clustertool: {error!r}\n{text}", REPORT, self.name(node)) from error

    def ask_all(self, request: Request[Answered], timeout: float | None = 60.0) -> dict[int, Answered]:
        """What all nodes answer. A node that gives no answer, or an error, is in `failed` from then on and is not asked again.

        NotFound is an answer: that node has nothing of it.
        """
        gathered = self.ask({node: request for node in self.agents if node not in self.failed}, timeout)
        self.failed.update({node: error for node, error in gathered.failed.items() if not isinstance(error, NotFound)})
        return gathered.ok

    @property
    def silent(self) -> dict[int, ClustertoolError]:
        """Of `failed`: the nodes that logged in."""
        return {node: error for node, error in self.failed.items() if node in self.agents}

    def name(self, node: int) -> str:
        return self.cluster.hosts[node].name

    def close(self) -> None:
        """Connections end, and with them what runs there. A user waits for this after each command."""
        for agent in self.agents.values():
            agent.mute()
        for link in self._links:
            if link.quick:
                link.close()
        each(
            [link for link in self._links if not link.quick], lambda link: link.close()
        )  # each dead gateway costs a moment
