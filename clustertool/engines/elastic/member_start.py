"""The start of an elastic job: each node gets its join file, and this machine waits until the first epoch has begun."""

from __future__ import annotations

import contextlib
import queue
from collections.abc import Mapping
from dataclasses import dataclass

from clustertool.engines.caller import Caller, nothing_left
from clustertool.engines.elastic.member_join import ANSWER, CODE, NEEDS_CODE, STARTED, code_request, join_request
from clustertool.errors import ClustertoolError, PreflightError, Unreachable, raise_all
from clustertool.fleet.fleet import Fleet
from clustertool.model.job.stop_result import read_undo
from clustertool.model.joining.join_errors import read_error
from clustertool.model.joining.join_file import JoinFile
from clustertool.model.wire.agent_answers import JoinAnswer, JoinReportLine
from clustertool.model.wire.messages import END_JOIN, JOIN_REPORTS
from clustertool.show.job_text import show_results
from clustertool.ssh.parallel import Gathered, in_background

_WAIT = 2.0  # seconds that a node waits for a report
_TURN = 0.05
_END = 45.0  # seconds for a node to take back what it has begun


@dataclass(frozen=True)
class _Arrived:
    """What a node has reported, or why no more comes."""

    node: int
    report: JoinReportLine | ClustertoolError


class MemberStart:
    """run() starts the nodes of `files`, and returns when the first epoch has begun. files: by node; node 0 coordinates.

    least: how many nodes the job needs. Other nodes that fail are left out with a warning. Raises what is wrong, after all
    nodes have taken back what they have begun.
    """

    def __init__(self, caller: Caller, fleet: Fleet, files: Mapping[int, JoinFile], least: int) -> None:
        self._caller, self._fleet, self._files, self._least = caller, fleet, files, least
        self._job = next(iter(files.values())).identity.job_id
        self._left = set(files)  # nodes that take part, or may
        self._arrived: queue.Queue[_Arrived] = queue.Queue()
        self._closed = False
        self._shown = ""

    def run(self) -> None:
        self._caller.starting(self._job)
        try:
            gathered = self._ask()
            for node, error in gathered.failed.items():
                self._leave_out(node, error)
            for node, answer in gathered.ok.items():
                if answer["state"] != STARTED:
                    what = f"a process of job {self._job} runs there already"
                    self._leave_out(node, PreflightError(what, "take another --job-id", self._fleet.name(node)))
            for node in self._left:
                self._read_from(node)
            self._follow()
        except BaseException as error:
            self._closed = True
            if self._undo() and isinstance(error, ClustertoolError):
                nothing_left(self._caller, error)
            raise
        self._closed = True

    def _ask(self) -> Gathered[JoinAnswer]:
        """Send the join files, and the code where it is missing."""
        wanted = {node: join_request(file) for node, file in self._files.items()}
        gathered = self._fleet.ask(wanted, ANSWER)
        needy = [node for node, answer in gathered.ok.items() if answer["state"] == NEEDS_CODE]
        if not needy:
            return gathered
        sent = self._fleet.ask(dict.fromkeys(needy, code_request()), CODE)
        again = self._fleet.ask({node: wanted[node] for node in sent.ok}, ANSWER)
        ok = {node: answer for node, answer in gathered.ok.items() if node not in needy}
        return Gathered({**ok, **again.ok}, {**gathered.failed, **sent.failed, **again.failed})

    def _leave_out(self, node: int, error: ClustertoolError) -> None:
        """Go on without a node. Raises its error where the job cannot."""
        self._left.discard(node)
        if node == 0 or len(self._left) < self._least:
            raise error
        self._caller.warn(
            f"{self._fleet.name(node)} does not take part: {error.what}" + f" ({error.fix})" * bool(error.fix)
        )

    # -- reports --

    def _read_from(self, node: int) -> None:
        """Pass on what a node reports, in a thread of its own."""

        def read() -> None:
            try:
                while not self._closed:
                    request = JOIN_REPORTS({"job": self._job, "seconds": _WAIT})
                    for report in self._fleet.ask_one(node, request, ANSWER)["reports"]:
                        self._arrived.put(_Arrived(node, report))
            except ClustertoolError as error:
                self._arrived.put(_Arrived(node, error))

        in_background(read)

    def _follow(self) -> None:
        """Follow the reports until the coordinator's node has begun the first epoch. Raises why it does not."""
        errors: dict[int, list[ClustertoolError]] = {}
        while True:
            self._caller.check()
            try:
                node, report = self._next()
            except queue.Empty:
                continue
            if isinstance(report, ClustertoolError):  # the process has ended, or its node cannot be reached
                if node in self._left:
                    self._failed(node, errors.get(node) or [report])
            elif report["type"] == "error":
                errors.setdefault(node, []).append(self._error(node, report))
            elif report["type"] == "started" and node == 0:
                return
            else:
                self._show(node, report)

    def _next(self) -> tuple[int, JoinReportLine | ClustertoolError]:
        """Return the next report and its node. Raises queue.Empty."""
        arrived = self._arrived.get(timeout=_TURN)
        return arrived.node, arrived.report

    def _failed(self, node: int, errors: list[ClustertoolError]) -> None:
        """Leave a node out that has failed, or raise its errors where the job does not start without it."""
        if node == 0:
            raise_all(errors)
        self._leave_out(node, errors[0])

    def _error(self, node: int, report: JoinReportLine) -> ClustertoolError:
        fields = {name: report.get(name, "") for name in ("kind", "what", "fix", "node")}
        return read_error({**fields, "node": fields["node"] or self._fleet.name(node), "code": report.get("code")})

    def _show(self, node: int, report: JoinReportLine) -> None:
        """Print what the coordinator waits for, and warnings of each node."""
        if report["type"] == "warning":
            self._caller.warn(report.get("what", ""))
        elif report["type"] == "waiting" and node == 0:
            text = f"waiting for nodes: {report.get('present', 0)} of {report.get('nnodes', 0)}"
            if report.get("present") != report.get("nnodes") and text != self._shown:
                self._shown = text
                self._caller.note(text)

    # -- the end of a start that has failed --

    def _undo(self) -> bool:
        """End what was begun. Return whether all nodes have done so."""
        ends = dict.fromkeys(self._files, END_JOIN({"job": self._job, "seconds": 0.0}))
        gathered = self._fleet.ask(ends, _END, patient=True)
        bad = {
            node: error for node, error in gathered.failed.items() if isinstance(error, (Unreachable, PreflightError))
        }
        if bad:
            results = {self._fleet.name(node): read_undo(error) for node, error in bad.items()}
            with contextlib.suppress(ClustertoolError):
                show_results(results, self._caller.note)
        return not bad
