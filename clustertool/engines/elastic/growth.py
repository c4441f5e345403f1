"""Growth of an elastic job that runs: hosts of conf.py or new ones join it, or join it again."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from clustertool.engines import preflight
from clustertool.engines.caller import Caller
from clustertool.engines.elastic.member_join import ANSWER, STARTED, common_file, join_node
from clustertool.errors import ClustertoolError, NotFound, raise_all
from clustertool.fleet import job_places
from clustertool.fleet.fleet import Fleet, module_request
from clustertool.model.config.hosts import Host
from clustertool.model.hints import PROGRAM
from clustertool.model.joining.join_errors import read_error
from clustertool.model.joining.join_file import JoinFile
from clustertool.model.wire.messages import JOIN_REPORTS, LIST_JOBS
from clustertool.ssh.parallel import each

_PATIENCE = 60.0  # seconds for a node to reach the coordinator
_WAIT = 2.0  # seconds that a node waits for a report
_JOINED = {
    "waiting": "has joined, and waits for the next epoch",
    "standby": "has joined, and is on standby",
    "planned": "takes part",
    "started": "takes part",
}
_NOT_STARTED = {"runs already": "takes part already"}


class Growth:
    """run() adds hosts to the job whose nodes `fleet` has, numbered as the job numbers them; again() starts one of these."""

    def __init__(self, caller: Caller, fleet: Fleet, job: str) -> None:
        self._caller, self._fleet, self._job = caller, fleet, job

    def run(self, hosts: Sequence[Host]) -> Mapping[str, str]:
        """Have hosts join the job: {name of each host: what has become of it}. Raises the errors of all hosts.

        A host that the job has as a node joins again under its number.
        """
        common = common_file(self._fleet, self._job)
        first = self._free_number()
        named = [self._known(host) or host for host in hosts]
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

    def again(self, node: int) -> bool:
        """Start a node that does not take part, and whose agent is open. Returns whether it was started.

        Not started is the one that has coordinated a job without a store, with which the job ends. Raises ClustertoolError.
        """
        common = common_file(self._fleet, self._job)
        if node == common.coordinator.member and not common.job.elastic.server.present:
            return False
        return join_node(self._fleet, node, common, node) == STARTED

    def _known(self, host: Host) -> Host | None:
        """Find the node of the job that this host is."""
        return next((known for known in self._fleet.cluster.hosts if known.entry == host.entry), None)

    def _free_number(self) -> int:
        """Find the lowest number above those of all nodes that the job has had, as the records of its nodes have it."""
        request = LIST_JOBS({"job": self._job, "exact": True})
        answers = self._fleet.ask(dict.fromkeys(self._fleet.agents, request), ANSWER).ok.values()
        listed = [one for answer in answers for one in answer["jobs"]]
        return max(len(self._fleet.cluster.hosts), *(len(one["nodes"] or ()) for one in listed), 0)

    def _join(self, fleet: Fleet, host: Host, common: JoinFile, first: int) -> str:
        """first: the number of the first new host."""
        known = self._known(host)
        number = known.index if known is not None else first + host.index
        state = join_node(fleet, host.index, common, number, again=True, new=known is None)
        if state != STARTED:
            return _NOT_STARTED.get(state, state)
        until = time.monotonic() + _PATIENCE
        errors: list[ClustertoolError] = []
        while time.monotonic() < until:
            for report in fleet.ask_one(host.index, JOIN_REPORTS({"job": self._job, "seconds": _WAIT}), ANSWER)[
                "reports"
            ]:
                if report["type"] == "error":
                    fields = {name: report.get(name, "") for name in ("kind", "what", "fix")}
                    errors.append(read_error({**fields, "node": host.name, "code": report.get("code")}))
                elif report["type"] == "ended":
                    what = f"job {self._job} has ended before this node has joined it"
                    raise NotFound(what, f"{PROGRAM} status --job {self._job} shows how", host.name)
                elif report["type"] in _JOINED:
                    return _JOINED[report["type"]]
            raise_all(errors)
        return "was started, and has not reached the coordinator so far"

    def _remember(self, common: JoinFile, hosts: Sequence[Host]) -> None:
        """Later commands on this machine find the new nodes, too."""
        known = self._fleet.cluster.hosts
        new = [host for host in hosts if self._known(host) is None]
        if new:
            listed = tuple(replace(host, index=number) for number, host in enumerate((*known, *new)))
            problem = job_places.remember(common.identity, replace(self._fleet.cluster, hosts=listed))
            if problem:
                self._caller.warn(problem)
