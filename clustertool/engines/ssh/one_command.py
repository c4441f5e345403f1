"""A command that is typed on several of its nodes starts one job. The others end, and show what to type on each node instead.

A laptop is no node, and two of its commands are two jobs.
"""

from __future__ import annotations

import hashlib

from clustertool.engines.job_request import RunRequest
from clustertool.errors import UsageError
from clustertool.fleet import this_machine
from clustertool.fleet.fleet import Fleet
from clustertool.model.facts import ByNode
from clustertool.model.hints import PROGRAM
from clustertool.model.wire.agent_requests import SameCommandRequest
from clustertool.model.wire.messages import SAME_COMMAND


class OneCommand:
    """The typed command of a request, which the first node recognizes if it is typed on several nodes.

    `starter` is the id of this machine, if it is one of several nodes and announce() was called, else "".
    """

    def __init__(self, request: RunRequest) -> None:
        """Compute the digest by which the first node recognizes the command: of its options, files and hosts."""
        self._request = request
        wish = request.wish
        hosts = [(host.host, host.user, host.port) for host in request.cluster.hosts]
        text = repr((request.origin, request.options, wish.job_id, wish.name, wish.resume, hosts))
        self.digest = hashlib.sha256(text.encode()).hexdigest()[:32]
        self.starter, self._at = "", 0
        self._names: dict[str, str] = {}  # of the nodes, by their machine

    def announce(self, fleet: Fleet, facts: ByNode) -> None:
        """Announce the command to the first node, and set `starter`, if this machine is one of several nodes; else do nothing.

        Raises UsageError if the same command runs from another node.
        """
        mine = this_machine.machine()
        machines = {node: fact.machine for node, fact in sorted(facts.items())}
        self._names = {machine: fleet.name(node) for node, machine in machines.items()}
        if len(self._names) > 1 and mine in self._names:
            self.starter, self._at = mine, next(node for node, machine in machines.items() if machine == mine)
            self._ask(fleet, start=False)

    def claim_start(self, fleet: Fleet) -> None:
        """Ask the first node for the right to start the job; do nothing unless this machine is one of several nodes.

        Raises UsageError if another node has it (its job may run), or has typed the same command and comes first in the list.
        """
        if self.starter:
            self._ask(fleet, start=True)

    def _ask(self, fleet: Fleet, start: bool) -> None:
        """Send the command to the first node, and return nothing if no other node has it.

        Raises UsageError, with what to type instead, if the answer is that another node starts it or has started it. start:
        claim the right to start; else only announce the command.
        """
        request: SameCommandRequest = {"command": self.digest, "starter": self.starter, "at": self._at, "start": start}
        answer = fleet.ask_one(0, SAME_COMMAND(request))
        if answer["starter"]:
            where = self._names.get(answer["starter"], "another node")
            job = answer["job"]
            state = f"its job {job} runs" if job else "starts the job"
            what = f"the same command was typed on {where}, and {state}"
            attach = f"{PROGRAM} attach --job {job} shows it; " if job else ""
            hosts = self._request.cluster.hosts
            first = hosts[0].address or hosts[0].host
            usual = f"clusterrun --master {first}:8090 --nnodes {len(hosts)} SCRIPT, without HOSTS in conf.py"
            each = f"to start one part on each node, type on all of them: {self._request.everywhere or usual}"
            fix = f"one command starts all nodes: {attach}{each}; another --job-id or --name starts a second job"
            raise UsageError(what, fix)
