"""A fleet is the open agents of one command, one per node. It sends a request to all of them and gathers the responses.

carry_out() executes steps phase by phase. devices_of() reads the devices of nodes.
"""

from __future__ import annotations

import base64
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from clustertool.errors import REPORT, ClustertoolError, InternalError, NotFound, Unreachable
from clustertool.fleet import node_bundle
from clustertool.fleet.agent_client import AgentClient, Sink
from clustertool.fleet.node_links import NodeLinks
from clustertool.fleet.records_client import Needed, RecordsClient, SharedDirectory
from clustertool.fleet.this_machine import Link
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.wire.agent_answers import Answer, DevicesAnswer, StopAnswer
from clustertool.model.wire.agent_requests import StopHow
from clustertool.model.wire.messages import DEVICES, SEND_FILE, Answered, Request, stop_request
from clustertool.ssh.channel import seconds_for
from clustertool.ssh.parallel import Gathered, ParallelWork, each
from clustertool.ssh.prompter import Person, Prompter

if TYPE_CHECKING:  # of all commands only `run` plans
    from clustertool.model.planning.requests import Steps

Check = Callable[[], None]

MOMENT = 3.0  # seconds in which a node may end whose connection was lost, and its engine may know that
LAG = 2.0  # seconds without a new node after which a command uses the nodes that are there, and the others are late
_OVERDUE = 5.0  # seconds that the start of an agent may take beyond its deadline, before its connection is closed

STOPPING = 30.0  # seconds that a stop may take beyond the grace
_PATIENCE = 25.0  # seconds for a node to take back what was begun: more than a stop without grace takes


class Fleet:
    """The connections to the nodes of a cluster and their agents.

    failed: the nodes without an answer, with the reason: those that could not be reached, and those that logged in and did not
    answer a request. Use as a context manager: it closes everything.
    """

    def __init__(
        self,
        cluster: Cluster,
        check: Check | None = None,
        sink: Sink | None = None,
        person: Person | None = None,
        reach: Callable[[Host], Link | None] = lambda host: None,
        prompter: Prompter | None = None,
    ) -> None:
        """Prepare a fleet; open() connects. reach: see NodeLinks. prompter: that of another fleet, else it asks `person`.

        Attributes to set: engine_end(job) asks the engine why a job has ended, None if it has not, or that is not known; it is
        None itself where agents know this, and do not only read records. records_of(host, patience) is called before a lost
        agent is opened again: the base of its records on the shared directory if its node has ended, or ends in `patience`
        seconds; None if it runs. needed: see SharedDirectory. no_records(name) builds the error of a node of which the shared
        directory has nothing.
        """
        self.cluster = cluster
        self.check = check
        self.agents: dict[int, AgentClient] = {}
        self.failed: dict[int, ClustertoolError] = {}
        self.phases: dict[int, dict[str, float]] = {}  # seconds of connect, login, agent
        self._sink = sink
        self._links = NodeLinks(cluster, prompter or Prompter(person), reach)
        self._work: ParallelWork[Host, AgentClient] | None = None  # of open()
        self._late: dict[int, int] = {}  # of its items that are neither in `agents` nor in `failed`: the nodes' numbers
        self._starting: dict[int, tuple[float, Link]] = {}  # nodes whose agents start: deadline and connection
        self.engine_end: Callable[[str], str | None] | None = None
        self.records_of: Callable[[Host, float], str | None] = lambda host, patience: None
        self.needed: Needed = lambda base, kind, fields: None
        self.no_records: Callable[[str], NotFound] = no_records
        self.shared: Fleet | None = None  # of open_shared(): the one host, for requests about it
        self._directory: SharedDirectory | None = None

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def open(self, lag: float | None = None) -> Fleet:
        """Connect to every host and start its agent, in parallel. Nodes that fail are in `failed`.

        lag: seconds without a new node after which this returns, if some nodes are there. The others are `late`:
        wait_for_late() waits for them.
        """
        self._connect_all(self.cluster.hosts, lag)
        return self

    def _connect_all(self, hosts: Sequence[Host], lag: float | None) -> None:
        """Connect to hosts and start their agents, in threads, and wait for them as wait_for_late() does."""

        def connect(host: Host) -> AgentClient:
            link = self.connect(host)
            between = time.monotonic()
            self._starting[host.index] = between + seconds_for(self.cluster.connect_timeout) + _OVERDUE, link
            try:
                agent = AgentClient.open(link, host, self.cluster, self._sink)
            finally:
                del self._starting[host.index]
            self.phases[host.index] = {**link.times, "agent": time.monotonic() - between}
            return agent

        self._late = {host.index: host.index for host in hosts}
        self._work = ParallelWork({host.index: host for host in hosts}, connect)
        self.wait_for_late(lag)

    def open_more(self, hosts: Iterable[Host], leave: Callable[[Host], bool], lag: float | None = None) -> Fleet:
        """Close and remove the hosts for which leave() is true, and connect to further hosts, numbered behind the others.

        It waits for them as open() does.
        """
        kept = [host for host in self.cluster.hosts if not leave(host)]
        old = {node: host.index for node, host in enumerate(kept)}
        numbered = tuple(replace(host, index=node) for node, host in enumerate((*kept, *hosts)))
        self._renumber(replace(self.cluster, hosts=numbered), old)
        self._connect_all(numbered[len(kept) :], lag)
        return self

    def open_shared(self, host: Host) -> Fleet:
        """Read records through one agent, on a host that shares ROOT_DIR with the nodes of jobs.

        Each base there is a node of this fleet (see records_client.py), and `shared` is the fleet of the host itself. Called
        again it adds the bases that are new. If the host cannot be reached, `failed` has the reason. Raises Unreachable if
        the connection broke since the first call.
        """
        if self._directory is None:
            one = replace(self.cluster, hosts=(replace(host, index=0),))
            shared = Fleet(one, self.check, None, None, self._links.reach, self.prompter)
            self._directory = SharedDirectory(lambda: shared.reopen(0), self._sink, self.needed)
            shared._sink = self._directory.route
            self.shared = shared
        assert self.shared is not None
        if not self.shared.agents:
            self.shared.open()
            self.cluster, self.failed = self.shared.cluster, dict(self.shared.failed)
            if self.failed:
                return self
            self._directory.agent = self.shared.agents[0]
            self.cluster = replace(self.cluster, hosts=())
        hosts = self.cluster.hosts
        new = self._directory.add(host, host.root_dir or self.cluster.root_dir, len(hosts))
        self.cluster = replace(self.cluster, hosts=(*hosts, *(client.host for client in new)))
        self.agents.update({client.host.index: client for client in new})
        return self

    @property
    def late(self) -> list[int]:
        """The nodes that open() did not wait for, and that have neither an agent nor an error so far."""
        return list(self._late.values())

    def wait_for_late(self, lag: float | None = None) -> None:
        """Wait for the late nodes, each of which has a deadline, and sort them into `agents` and `failed`.

        Questions of logins are put meanwhile, and new host keys are shown at the end. lag: as for open(). Nodes that are late
        then stay `late`.
        """
        if self._work is None:  # of open_shared(): no other node is there
            return
        try:
            self._work.wait(None, self._check, lag)
        except BaseException:
            self._work.abandon()
            raise
        finally:
            self.prompter.announce()
        pending, gathered = self._work.pending(), self._work.gathered()
        for item in self._late.keys() - set(pending):
            node = self._late.pop(item)
            if item in gathered.ok:
                self.agents[node] = gathered.ok[item]
                self.agents[node].host = self.cluster.hosts[node]
            else:
                self.failed[node] = gathered.failed[item]

    def sort_arrived(self) -> list[int]:
        """Sort the late nodes that are there now into `agents` and `failed`, without a wait.

        Return those that are still late.
        """
        self.wait_for_late(0.0)
        return self.late

    def give_up(self) -> None:
        """Sort the late nodes into `failed`, as Unreachable."""
        fix = "type the command again when the node answers"
        self.failed.update((node, Unreachable("still logging in", fix, self.name(node))) for node in self.late)
        self._late.clear()

    def _check(self) -> None:
        """Serve the prompter, close connections on which an agent does not start in time, and call `check`."""
        self.prompter.serve()
        for end, link in list(self._starting.values()):
            if time.monotonic() > end:  # the node reads too slowly: a send has no deadline as a whole
                link.close()
        if self.check:
            self.check()

    def reopen(self, node: int) -> AgentClient:
        """Connect to a node again and return its new agent, after its connection was lost. The old agent reports nothing more.

        On a shared directory, a new client of the node's base. Raises why there is no connection.
        """
        host, agent = self.cluster.hosts[node], self.agents.get(node)
        base = self.records_of(host, 0.0)
        if self._directory is not None and isinstance(agent, RecordsClient):
            self.agents[node] = self._directory.reopen(agent)
        else:
            if agent is not None:
                agent.close()
                agent.link.close()
            if base is not None and self._directory is not None:
                self.agents[node] = self._directory.client(base, host)
            else:
                self.agents[node] = AgentClient.open(self.connect(host), host, self.cluster, self._sink)
        self.failed.pop(node, None)
        return self.agents[node]

    def link(self, node: int) -> Link:
        """Return the connection of a node's agent, or a new one where it has none; it ends with this fleet.

        Raises the node's error in `failed`, or why there is no connection. Called in a thread: see Prompter.serve().
        """
        if node in self.failed:
            raise self.failed[node]
        agent = self.agents.get(node)
        return agent.link if agent is not None else self.connect(self.cluster.hosts[node])

    def connect(self, host: Host) -> Link:
        """Open a new connection to a host, without an agent; it ends with this fleet. Raises why there is none.

        Called in a thread: see Prompter.serve().
        """
        return self._links.connect(host)

    @property
    def prompter(self) -> Prompter:
        return self._links.prompter

    def keep_hosts(self, cluster: Cluster) -> None:
        """Replace the cluster by this one, which has some of its hosts: renumber the nodes, and close the agents of all others.

        The hosts are found by their names.
        """
        known = {host.name: host.index for host in self.cluster.hosts}
        self._renumber(cluster, {host.index: known[host.name] for host in cluster.hosts})

    def reduce_to_job(self, places: Mapping[int, int], names: Sequence[str]) -> None:
        """Renumber the nodes as in a job, and close the agents of all others.

        places: {node of the job: node here}; names: of the job's nodes, in order. A node that is not in `places` is found by
        its name. One that is not in conf.py any more, or is another machine of a job that was typed on each of them, is in
        `failed`. So is one without records on a shared directory. The nodes there get the names that they have in the job.
        """
        taken, hosts = set(places.values()), []
        known = {host.name: host.index for host in self.own_names() if host.index not in taken}
        old = {node: places.get(node, known.get(name, -1)) for node, name in enumerate(names)}
        for node, name in enumerate(names):
            base = self.cluster.hosts[old[node]] if old[node] >= 0 else replace(self.cluster.hosts[0], name=name)
            hosts.append(replace(base, index=node, name=base.name if self._directory is None else name))
        self._renumber(replace(self.cluster, hosts=tuple(hosts)), old)
        known_hosts = [hosts[node] for node in places]
        for node in [node for node in old if old[node] < 0]:
            name = names[node]
            self.failed[node] = not_listed(known_hosts, name) if self._directory is None else self.no_records(name)

    def own_names(self) -> Sequence[Host]:
        """Return the hosts whose names identify them: those of conf.py, and none on a shared directory, where numbers do."""
        return self.cluster.hosts if self._directory is None else ()

    def _renumber(self, cluster: Cluster, old: Mapping[int, int]) -> None:
        """Replace the cluster, give agents and errors of nodes their new numbers, and close the agents of all other nodes.

        old: {new number of a node: its number so far}.
        """
        agents, failed, numbers = self.agents, self.failed, {before: new for new, before in old.items()}
        self.cluster = cluster
        self._late = {item: numbers[node] for item, node in self._late.items() if node in numbers}
        self.agents = {new: agents[before] for new, before in old.items() if before in agents}
        self.failed = {new: failed[before] for new, before in old.items() if before in failed}
        for new, agent in self.agents.items():
            agent.host = cluster.hosts[new]
        for before in agents.keys() - set(old.values()):
            agents[before].close()

    def ask(
        self, requests: Mapping[int, Request[Answered]], timeout: float = 60.0, *, patient: bool = False
    ) -> Gathered[Answered]:
        """Send requests, {node: request}, to agents at once; gather answers and errors. Nodes without an agent are left out.

        patient: no Ctrl+C ends it.
        """
        wanted = {node: request for node, request in requests.items() if node in self.agents}
        check = None if patient else self.check
        nodes = {node: node for node in wanted}
        width = max(1, len(wanted))
        return each(nodes, lambda node: self.ask_one(node, wanted[node], timeout), width=width, check=check)

    def ask_one(self, node: int, request: Request[Answered], timeout: float = 60.0) -> Answered:
        """Send a request to one node, in the caller's thread, and return its answer. Raises the node's error, or Unreachable.

        An unexpected error in its answer is InternalError, of this node: the answers of other nodes are used.
        """
        try:
            return self.agents[node].ask(request, timeout)
        except ClustertoolError:
            raise
        except Exception as error:
            text = "".join(traceback.format_exception(error))
            raise InternalError(f"a bug of clustertool: {error!r}\n{text}", REPORT, self.name(node)) from error

    def ask_all(self, request: Request[Answered], timeout: float = 60.0) -> dict[int, Answered]:
        """Send a request to all nodes that have not failed, and return {node: answer}.

        A node that gives no answer, or an error, is in `failed` from then on and is not asked again. NotFound does not count:
        the node has nothing of what was asked. The records of a node that has just ended answer for it.
        """
        first = self.ask({node: request for node in self.agents if node not in self.failed}, timeout)
        self._note_failures(first)
        ended = self._open_records(node for node in first.failed if self.agents[node].dead is not None)
        second = self.ask(dict.fromkeys(ended, request), timeout)
        self._note_failures(second)
        return {**first.ok, **second.ok}

    def _note_failures(self, gathered: Gathered[Answered]) -> None:
        """Put the errors of nodes, except NotFound, into `failed`."""
        self.failed.update({node: error for node, error in gathered.failed.items() if not isinstance(error, NotFound)})

    def _open_records(self, lost: Iterable[int]) -> list[int]:
        """Open the records of those lost nodes that have ended, or end in 3 s, and return these nodes.

        A node whose records cannot be opened gets the reason in `failed`.
        """

        def open_ended(node: int) -> bool:
            ended = self.records_of(self.cluster.hosts[node], MOMENT) is not None
            if ended:
                self.reopen(node)
            return ended

        opened = each({node: node for node in lost}, open_ended, check=self.check)
        self.failed.update(opened.failed)
        return [node for node, ended in opened.ok.items() if ended]

    @property
    def silent(self) -> dict[int, ClustertoolError]:
        """The errors of nodes that logged in, {node: error}: those of `failed` with an agent."""
        return {node: error for node, error in self.failed.items() if node in self.agents}

    def name(self, node: int) -> str:
        return self.cluster.hosts[node].name

    def close(self) -> None:
        """Close all connections, also of `shared`, and wait until they are closed; what runs there ends with them."""
        for agent in self.agents.values():
            agent.mute()
        if self.shared is not None:
            self.shared.close()
        self._links.close()


def not_listed(known: Sequence[Host], name: str = "") -> Unreachable:
    """Build the error of a job's node that is no host of this command. known: the hosts that are nodes of the job.

    A job of several nodes on this machine was typed on the others, too, and no connection leads there.
    """
    if known and all(host.here for host in known):
        return Unreachable("is another machine, on which the job was typed, too", "type this command there", name)
    fix = "name it in HOSTS again, or leave out --only and --skip"
    return Unreachable("is not among the hosts of this command", fix, name)


def no_records(name: str) -> NotFound:
    """Build the error of a job's node that has no records on the directory which is shared with others of its nodes."""
    return NotFound("has no records of this job on the shared directory", "does it share ROOT_DIR?", name)


def stop_everywhere(fleet: Fleet, job: str, how: StopHow) -> dict[str, StopAnswer | ClustertoolError]:
    """Ask all agents to end a job, and return {name of each node: its answer or error}. No Ctrl+C ends the wait."""
    wanted = dict.fromkeys(fleet.agents, stop_request(job, how))
    gathered = fleet.ask(wanted, timeout=how["grace"] + STOPPING, patient=True)
    answers: dict[int, StopAnswer | ClustertoolError] = {**gathered.ok, **gathered.failed}
    return {fleet.name(node): answer for node, answer in answers.items()}


Answers = Mapping[int, "Mapping[str, object] | ClustertoolError"]


def carry_out(steps: Steps, fleet: Fleet, undone: Callable[[str, Answers], None]) -> None:
    """Execute steps phase by phase: a phase is a barrier. If one fails, it and those before are undone, the last one first.

    Raises all nodes' failures at once, or the exception that ends the program or the call (an interrupt, SystemExit, that of a
    handler of SIGALRM), after everything that was started is undone. `undone` is called for each phase that is undone: its
    name, and the answer of every node.
    """
    for number, phase in enumerate(steps.phases):
        try:
            fleet.ask(phase.requests).all()
        except BaseException:
            for back in reversed(steps.undo[: number + 1]):
                gathered = fleet.ask(back.requests, timeout=_PATIENCE, patient=True)
                undone(back.name, {**gathered.ok, **gathered.failed})
            raise


def devices_of(fleet: Fleet, nodes: Iterable[int] | None = None) -> Gathered[DevicesAnswer]:
    """Ask every node, or `nodes`, for its devices; gather answers and errors.

    A node that needs the NVML module receives it, and is asked again.
    """
    request = DEVICES({"nvml": node_bundle.nvml()[0]})
    gathered = fleet.ask(dict.fromkeys(fleet.agents if nodes is None else nodes, request))
    needy = [node for node, answer in gathered.ok.items() if "need" in answer]
    if not needy:
        return gathered
    sent = fleet.ask(dict.fromkeys(needy, module_request()))
    again = fleet.ask(dict.fromkeys(sent.ok, request))
    ok = {node: answer for node, answer in gathered.ok.items() if node not in needy}
    return Gathered({**ok, **again.ok}, {**gathered.failed, **sent.failed, **again.failed})


def module_request() -> Request[Answer]:
    """Build the request that brings the NVML module to a node which needs it."""
    return file_request("nvml", *node_bundle.nvml())


def file_request(kind: str, digest: str, packed: bytes) -> Request[Answer]:
    """Build the request that brings a file to a node, which keeps it by its digest. packed: zlib."""
    return SEND_FILE({"kind": kind, "digest": digest, "data": base64.b64encode(packed).decode()})
