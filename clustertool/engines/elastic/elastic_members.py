"""Members are the nodes of an elastic job over ssh: those with which it starts, and those that join it while it runs.

Each node gets a join file: the same job for all, and the settings of its host. At the start this machine waits until the first
epoch has begun.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import posixpath
import queue
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from clustertool.engines import preflight
from clustertool.engines.caller import Caller, report_nothing_left
from clustertool.engines.common_join_file import common_join_file
from clustertool.engines.job_request import RunRequest
from clustertool.errors import ClustertoolError, NotFound, PreflightError, Unreachable, UsageError, raise_all
from clustertool.fleet import job_places
from clustertool.fleet.fleet import Fleet, module_request
from clustertool.fleet.joining import join_process
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.hosts import Host
from clustertool.model.facts import ByNode, Facts, nodes_sharing_root, read_facts
from clustertool.model.hints import PROGRAM
from clustertool.model.job.stop_result import read_undo
from clustertool.model.joining.join_errors import read_error
from clustertool.model.joining.join_file import JoinFile, MeetingPoint, OwnSettings, from_json, to_json
from clustertool.model.paths import base
from clustertool.model.planning.plan import Plan, below_home
from clustertool.model.planning.requests import probe_request
from clustertool.model.wire.agent_answers import Answer, JoinAnswer, JoinReportLine
from clustertool.model.wire.messages import BUNDLE, END_JOIN, JOIN, JOIN_CODE, JOIN_REPORTS, LIST_JOBS, PROBE, Request
from clustertool.show.job_text import show_results
from clustertool.ssh.parallel import Gathered, each, in_background

_WAIT = 2.0  # seconds that a node waits for a report
_TURN = 0.05
_END = 45.0  # seconds for a node to take back what it has begun
_ANSWER = 30.0  # seconds for the answer to a request
_CODE = 120.0  # and to receive the code and compile it
_STARTED, _NEEDS_CODE = "started", "needs code"  # answers to a request to join


# -- what a node gets --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class HostMember:
    """A host that may take part in an elastic job.

    base: the parent of its directories of jobs. resumes: the ended job whose output it copies, "" if none.
    """

    host: Host
    facts: Facts
    base: str
    resumes: str = ""


def build_members(cluster: Cluster, facts: ByNode, request: RunRequest) -> tuple[HostMember, ...]:
    """Build a member of each host: its facts, the directory for its jobs, and the job whose output it copies.

    This is request.resumed on the nodes with a part of its output, "" on others.
    """
    shared, resumed = nodes_sharing_root(facts), request.resumed
    found = []
    for host in cluster.hosts:
        fact = facts[host.index]
        resumes = resumed.id if resumed is not None and host.index in resumed.with_output else ""
        found.append(HostMember(host, fact, base(fact.root, host.index, host.index in shared), resumes))
    return tuple(found)


def join_file(request: RunRequest, made: Plan, release: str, count: int) -> JoinFile:
    """Build the join file that all nodes have in common, without the settings of a host (join_file_of_member adds those).

    made: the first plan, whose first node is the coordinator. release: the name of the workspace as the nodes have it. count:
    the number of nodes that are started now.
    """
    common = common_join_file(request, made.identity, count, MeetingPoint(*made.coordinator))
    listing = request.workspace.files if request.workspace is not None else made.nodes[0].facts.listing
    return replace(
        common,
        cluster=replace(common.cluster, first_path=""),
        job=replace(common.job, container=made.job.container),
        join_timeout=common.job.elastic.timeout,
        listing=tuple(listing),
        release=release,
    )


def join_file_of_member(common: JoinFile, cluster: Cluster, member: HostMember, index: int) -> JoinFile:
    """Build the join file of one node, with the settings of its host as conf.py has it. index: its number in the job."""
    host, workspace = member.host, common.job.job_workspace
    slots = host.on_slots(member.facts.devices) if host.slots is not None and host.devices is None else None
    own = OwnSettings(
        root_dir=host.root_dir or cluster.root_dir,
        folder=posixpath.normpath(below_home(workspace, member.facts.home)) if workspace else "",
        nproc=host.nproc,
        devices=slots or host.devices,
        env=host.env,
        first_path=cluster.first_path,
        here=host.here,
        name=host.name,
        address=member.facts.address,
        base=member.base,
        entry=host.entry,
        twin=host.twin,
        prelude=host.prelude,
        interface=host.interface,
        roles=host.roles,
        resume=member.resumes,
    )
    return replace(common, index=index, own=own)


def join_request(file: JoinFile, again: bool = False) -> Request[JoinAnswer]:
    """Build the request that starts a process on a node, which joins the job.

    again: also on a node that was released by `shrink`.
    """
    return JOIN({"job": file.identity.job_id, "join": to_json(file), "code": file.code, "again": again})


def code_request() -> Request[Answer]:
    """Build the request that sends a node the code of the process that joins."""
    data = base64.b64encode(join_process.additional()).decode()
    return JOIN_CODE({"digest": join_process.digest(), "data": data})


def reported_error(report: JoinReportLine, node: str) -> ClustertoolError:
    """Build the error that a node that joins has reported, of the same kind and code. node: the name in the error."""
    fields = {name: report.get(name, "") for name in ("kind", "what", "fix")}
    return read_error({**fields, "node": node, "code": report.get("code")})


# -- the start of a job ------------------------------------------------------------------------------------------------


class MemberStart:
    """The start of an elastic job on its first nodes, by run(). files: the join file of each node; node 0 coordinates.

    least: how many nodes the job needs. Other nodes that fail are left out with a warning.
    """

    def __init__(self, caller: Caller, fleet: Fleet, files: Mapping[int, JoinFile], least: int) -> None:
        self._caller, self._fleet, self._files, self._least = caller, fleet, files, least
        self._job = next(iter(files.values())).identity.job_id
        self._left = set(files)  # nodes that take part, or may
        self._arrived: queue.Queue[tuple[int, JoinReportLine | ClustertoolError]] = queue.Queue()  # by node
        self._closed = False
        self._shown = ""

    def run(self) -> None:
        """Start the nodes, and wait until the coordinator has begun the first epoch.

        A node that fails, or on which a process of the job runs already, is left out (_leave_out). After an error, end what was
        begun on all nodes, print where that failed, else report to the caller that nothing is left, and raise the error.
        """
        self._caller.starting(self._job)
        try:
            gathered = self._send_join_files()
            for node, error in gathered.failed.items():
                self._leave_out(node, error)
            for node, answer in gathered.ok.items():
                if answer["state"] != _STARTED:
                    what = f"a process of job {self._job} runs there already"
                    self._leave_out(node, PreflightError(what, "take another --job-id", self._fleet.name(node)))
            for node in self._left:
                self._start_reading(node)
            self._wait_for_first_epoch()
        except BaseException as error:
            self._closed = True
            if self._undo() and isinstance(error, ClustertoolError):
                report_nothing_left(self._caller, error)
            raise
        self._closed = True

    def _send_join_files(self) -> Gathered[JoinAnswer]:
        """Send each node its join file; send the code of the process, and the file again, to the nodes that ask for it.

        Returns {node: the last answer} and {node: error}.
        """
        wanted = {node: join_request(file) for node, file in self._files.items()}
        gathered = self._fleet.ask(wanted, _ANSWER)
        needy = [node for node, answer in gathered.ok.items() if answer["state"] == _NEEDS_CODE]
        if not needy:
            return gathered
        sent = self._fleet.ask(dict.fromkeys(needy, code_request()), _CODE)
        again = self._fleet.ask({node: wanted[node] for node in sent.ok}, _ANSWER)
        ok = {node: answer for node, answer in gathered.ok.items() if node not in needy}
        return Gathered({**ok, **again.ok}, {**gathered.failed, **sent.failed, **again.failed})

    def _leave_out(self, node: int, error: ClustertoolError) -> None:
        """Go on without a node, with a warning.

        Raises its error if it is the coordinator's, or if fewer than `least` nodes are left.
        """
        self._left.discard(node)
        if node == 0 or len(self._left) < self._least:
            raise error
        why = f"{error.what} ({error.fix})" if error.fix else error.what
        self._caller.warn(f"{self._fleet.name(node)} does not take part: {why}")

    # -- reports --

    def _start_reading(self, node: int) -> None:
        """Start a thread that puts the reports of a node into the queue, until the start is over or a request fails.

        The error of the failed request is put into the queue, too.
        """

        def read() -> None:
            try:
                while not self._closed:
                    request = JOIN_REPORTS({"job": self._job, "seconds": _WAIT})
                    for report in self._fleet.ask_one(node, request, _ANSWER)["reports"]:
                        self._arrived.put((node, report))
            except ClustertoolError as error:
                self._arrived.put((node, error))

        in_background(read)

    def _wait_for_first_epoch(self) -> None:
        """Handle the reports of nodes until node 0, the coordinator's, has begun the first epoch. There is no time limit.

        A node that fails is left out (_handle_failure). Raises its errors if node 0 fails or too few nodes are left, and what
        the caller's check raises.
        """
        errors: dict[int, list[ClustertoolError]] = {}
        while True:
            self._caller.check()
            try:
                node, report = self._arrived.get(timeout=_TURN)
            except queue.Empty:
                continue
            if isinstance(report, ClustertoolError):  # the process has ended, or its node cannot be reached
                if node in self._left:
                    self._handle_failure(node, errors.get(node) or [report])
            elif report["type"] == "error":
                errors.setdefault(node, []).append(reported_error(report, report.get("node") or self._fleet.name(node)))
            elif report["type"] == "started" and node == 0:
                return
            else:
                self._show_report(node, report)

    def _handle_failure(self, node: int, errors: list[ClustertoolError]) -> None:
        """Go on without a node, with its first error as a warning.

        Raises all its errors together if it is the coordinator's node, and the first one if too few nodes are left.
        """
        if node == 0:
            raise_all(errors)
        self._leave_out(node, errors[0])

    def _show_report(self, node: int, report: JoinReportLine) -> None:
        """Print the warning in a node's report; of the coordinator's report also how many nodes are present, of how many.

        The number is printed only if nodes are missing, and it has changed. Other reports are ignored.
        """
        if report["type"] == "warning":
            self._caller.warn(report.get("what", ""))
        elif report["type"] == "waiting" and node == 0:
            text = f"waiting for nodes: {report.get('present', 0)} of {report.get('nnodes', 0)}"
            if report.get("present") != report.get("nnodes") and text != self._shown:
                self._shown = text
                self._caller.note(text)

    # -- the end of a start that has failed --

    def _undo(self) -> bool:
        """End the processes that join on all nodes, and print where that failed; return whether it failed on none.

        Only Unreachable and PreflightError count as failures. No interrupt ends it.
        """
        ends = dict.fromkeys(self._files, END_JOIN({"job": self._job, "seconds": 0.0}))
        gathered = self._fleet.ask(ends, _END, patient=True)
        kinds = (Unreachable, PreflightError)
        bad = {node: error for node, error in gathered.failed.items() if isinstance(error, kinds)}
        if bad:
            results = {self._fleet.name(node): read_undo(error) for node, error in bad.items()}
            with contextlib.suppress(ClustertoolError):
                show_results(results, self._caller.note)
        return not bad


# -- further nodes of a job that runs ----------------------------------------------------------------------------------


_PATIENCE = 60.0  # seconds for a node to reach the coordinator
_LARGEST = 64 << 20  # bytes of a join file
_JOINED = {
    "waiting": "has joined, and waits for the next epoch",
    "planned": "takes part",
    "started": "takes part",
}
_NOT_STARTED = {"runs already": "takes part already"}


class Growth:
    """The growth of a running elastic job: run() adds hosts, start_again() starts a node of it. fleet: the job's nodes."""

    def __init__(self, caller: Caller, fleet: Fleet, job: str) -> None:
        self._caller, self._fleet, self._job = caller, fleet, job

    def run(self, hosts: Sequence[Host]) -> Mapping[str, str]:
        """Have hosts join the job, wait up to 60 s for each to reach the coordinator, and return {its name: what it does now}.

        Checks the hosts before, and prints warnings. A host that is a node of the job joins under its number; others get new
        numbers, and are recorded on this machine for later commands. Raises the errors of all hosts together.
        """
        common = common_file(self._fleet, self._job)
        first = self._free_number()
        named = [self._find_node(host) or host for host in hosts]
        numbered = tuple(replace(host, index=number) for number, host in enumerate(named))
        cluster = replace(self._fleet.cluster, hosts=numbered)
        with Fleet(cluster, self._caller.check, None, self._caller.person()) as fleet:
            examined = preflight.examine(fleet, {}, ports=False, container=common.job.container)
            examined.require()
            examined.warn(self._caller)
            cards = [node for node, fact in examined.facts.items() if fact.devices and fact.device_kind == "gpu"]
            fleet.ask(dict.fromkeys(cards, module_request()))
            numbers = {host.index: host for host in numbered}
            done = each(numbers, lambda host: self._join(fleet, host, common, first), check=self._caller.check)
            self._remember(common, numbered)
            raise_all(list(done.failed.values()))
        return {numbers[node].name: text for node, text in done.ok.items()}

    def start_again(self, node: int) -> bool:
        """Start the process of a node again that does not take part in the job, and return whether it was started.

        Its agent must be open. False if its process runs already, it was released by `shrink`, or it has coordinated a job
        without a store, which ends with it. Raises the errors of common_file() and join_node().
        """
        common = common_file(self._fleet, self._job)
        if node == common.coordinator.member and not common.job.elastic.server.present:
            return False
        return join_node(self._fleet, node, common, node) == _STARTED

    def _find_node(self, host: Host) -> Host | None:
        """Return the job's node whose entry in HOSTS is that of `host`; None if there is none."""
        return next((known for known in self._fleet.cluster.hosts if known.entry == host.entry), None)

    def _free_number(self) -> int:
        """Return the number for the next new node: the highest count of nodes in the fleet and in the job's records.

        The records are those of the nodes that answer; with errors of other nodes it goes on.
        """
        request = LIST_JOBS({"job": self._job, "exact": True})
        answers = self._fleet.ask(dict.fromkeys(self._fleet.agents, request), _ANSWER).ok.values()
        listed = [one for answer in answers for one in answer["jobs"]]
        return max(len(self._fleet.cluster.hosts), *(len(one["nodes"] or ()) for one in listed), 0)

    def _join(self, fleet: Fleet, host: Host, common: JoinFile, first: int) -> str:
        """Start a process on a host, and wait up to 60 s until it has joined; return what the host does now, as a text.

        first: the number of the first new host. A host on which the process runs already is not started. After 60 s the text is
        that it has not reached the coordinator so far. Raises the errors that it reports, and NotFound if the job has ended.
        """
        known = self._find_node(host)
        number = known.index if known is not None else first + host.index
        state = join_node(fleet, host.index, common, number, again=True, new=known is None)
        if state != _STARTED:
            return _NOT_STARTED.get(state, state)
        until = time.monotonic() + _PATIENCE
        errors: list[ClustertoolError] = []
        while time.monotonic() < until:
            wanted = JOIN_REPORTS({"job": self._job, "seconds": _WAIT})
            for report in fleet.ask_one(host.index, wanted, _ANSWER)["reports"]:
                if report["type"] == "error":
                    errors.append(reported_error(report, host.name))
                elif report["type"] == "ended":
                    what = f"job {self._job} has ended before this node has joined it"
                    raise NotFound(what, f"{PROGRAM} status --job {self._job} shows how", host.name)
                elif report["type"] in _JOINED:
                    return _JOINED[report["type"]]
            raise_all(errors)
        return "was started, and has not reached the coordinator so far"

    def _remember(self, common: JoinFile, hosts: Sequence[Host]) -> None:
        """Record the new nodes on this machine, so that later commands find them. Print a warning if that fails."""
        known = self._fleet.cluster.hosts
        new = [host for host in hosts if self._find_node(host) is None]
        if new:
            listed = tuple(replace(host, index=number) for number, host in enumerate((*known, *new)))
            job_places.remember(common.identity, replace(self._fleet.cluster, hosts=listed), self._caller.warn)


def common_file(fleet: Fleet, job: str) -> JoinFile:
    """Read the join file of an elastic job, which has the job's key, from the first node that gives it.

    Nodes are asked in the order of their numbers. Raises UsageError if another version of the tool has started the job,
    NotFound, with the last node's error, if no node gives it.
    """
    why = ""
    for node in sorted(fleet.agents):
        try:
            file = from_json(_request_join_file(fleet, node, job).decode("utf-8", "replace"))
        except ClustertoolError as error:
            why = f": {fleet.name(node)}: {error.what}"
            continue
        if file.code != join_process.digest():
            what = f"job {job} was started by another clustertool ({file.version}) than the one that runs here"
            raise UsageError(what, "use the version that has started it, as on the machine where it was started")
        return file
    raise NotFound(f"no node on which job {job} lives gives its join file{why}", "try again; status shows the nodes")


def _request_join_file(fleet: Fleet, node: int, job: str) -> bytes:
    """Request the join file of a job from one of its nodes, part by part, and return its content.

    Raises NotFound if the node does not have it, Unreachable, and PreflightError for a file that is damaged or has more than 64
    MiB.
    """
    data = b""
    while len(data) <= _LARGEST:
        part = fleet.ask_one(node, BUNDLE({"job": job, "at": len(data)}), _ANSWER)
        try:
            data += base64.b64decode(part["data"], validate=True)
        except binascii.Error:
            break
        if part["last"]:
            return data
    raise PreflightError("the join file of the job is damaged", "ask another node", fleet.name(node))


def join_node(fleet: Fleet, node: int, common: JoinFile, index: int, again: bool = False, new: bool = False) -> str:
    """Probe a node, and start a process there that joins the running job; send its code first if the node needs it.

    node: its number in the fleet. index: its number in the job. new: it has never been a node of the job. again: also if it was
    released by `shrink`. Returns "started", "runs already", or "left" if it was released or the job has ended there. Raises the
    node's error, or Unreachable.
    """
    host, job = fleet.cluster.hosts[node], common.identity.job_id
    facts = read_facts(node, fleet.ask_one(node, PROBE(probe_request(fleet.cluster, host)), _ANSWER))
    listed = fleet.ask_one(node, LIST_JOBS({"job": job, "exact": True}), _ANSWER)["jobs"]
    known = [posixpath.dirname(one["dir"]) for one in listed if one.get("dir")]
    # Records of other nodes lie there where ROOT_DIR is shared with them.
    place = base(facts.root, index, bool(known)) if new or not known else known[0]
    file = join_file_of_member(common, fleet.cluster, HostMember(host, facts, place), index)
    answer = fleet.ask_one(node, join_request(file, again), _ANSWER)
    if answer["state"] == _NEEDS_CODE:
        fleet.ask_one(node, code_request(), _CODE)
        answer = fleet.ask_one(node, join_request(file, again), _ANSWER)
    return str(answer["state"])
