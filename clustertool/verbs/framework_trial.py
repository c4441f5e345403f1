"""check --framework runs a small job on all nodes, planned and started like any other, and removes it."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from clustertool.actions.follow_job import BEAT, attached
from clustertool.engines import preflight
from clustertool.engines.plan_again import start_again
from clustertool.engines.preflight import Examined, folding, short
from clustertool.errors import ClustertoolError, DeviceInUse, InternalError, PortInUse, UsageError, singles
from clustertool.fleet import shared_roots
from clustertool.fleet.fleet import Fleet, carry_out
from clustertool.fleet.identity import identity, job_id
from clustertool.fleet.node_bundle import program
from clustertool.model.checks import framework_findings as plan
from clustertool.model.checks.each_node import errors
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.job import JobSpec, Options, read_job
from clustertool.model.config.job_tables import Toml
from clustertool.model.facts import ByNode, Identity, read_facts
from clustertool.model.finding import Finding
from clustertool.model.hints import PROGRAM
from clustertool.model.job.outcome import describe_exit
from clustertool.model.job.stop_result import read_result
from clustertool.model.planning import requests
from clustertool.model.planning.plan import Plan
from clustertool.model.planning.plan import plan as plan_job
from clustertool.model.quantities import count
from clustertool.model.wire.agent_answers import StopAnswer
from clustertool.model.wire.agent_requests import StopHow
from clustertool.model.wire.messages import CLEAN, FOLLOW, LINK_CLOSE, stop_request
from clustertool.model.wire.stream_messages import StreamFrame
from clustertool.show.job_text import stop_text
from clustertool.show.program_name import commanded
from clustertool.verbs import signals
from clustertool.verbs.link_check import mesh
from clustertool.verbs.verb import Call, seconds
from clustertool.watch.job_view import JobView, LogLines

_SECONDS = 60.0  # without news of any rank, unless --timeout has another value
_STEPS = 10  # times as long a trial lives, and a framework waits for others: to be late is not to be broken
_LEASE = "15"  # seconds for which it lives without us
_ENDING = 20.0  # seconds for a node to end it
_LEAVING = 5.0  # where it has ended by itself: a node was lost
_TELL = 2.0  # seconds of waiting after which it is reported
_COLUMN = "framework"
_CODE = "CLUSTERTOOL_CHECK"  # the program travels in this variable: ps and inv jobs show a line that can be read
_COMMAND = ("python3", "-u", "-c", f"import os; exec(os.environ.pop({_CODE!r}))")


@dataclass(frozen=True)
class TrialRequest:
    """The test: the framework, the timeout in seconds, the job whose environment is used."""

    name: str
    seconds: float
    spec: JobSpec
    passed: tuple[tuple[str, str], ...]
    mark: str


class TrialFollower:
    """Computes the progress of each rank from frames of all nodes. The agents' reader threads feed it, the verb reads it."""

    def __init__(self, nodes: int) -> None:
        self.watch = JobView(frozenset(range(nodes)))
        self.mark = ""
        self._ranks: dict[int, plan.TrialRank] = {}
        self._changed = threading.Condition()
        self._news_at = 0.0

    def expect(self, made: Plan, mark: str) -> None:
        with self._changed:
            self.mark, self._news_at = mark, time.monotonic()
            self._ranks = {process.rank: plan.TrialRank(process.rank, process.node) for process in made.processes}
            self.watch.status.plan = made.ranks

    def put(self, node: int, header: StreamFrame, payload: bytes) -> None:
        with self._changed:
            for item in self.watch.take(node, header, payload, time.monotonic()):
                if isinstance(item, LogLines) and item.rank in self._ranks:
                    for line in item.lines:
                        self._becomes(plan.advance(self._ranks[item.rank], line, self.mark))
            if header["type"] in ("events", "closed"):
                for rank in list(self._ranks.values()):
                    if not rank.ended and (rank.node == node or self.watch.status.outcome):
                        self._becomes(replace(rank, ended=self._end_of(rank)))
            self._changed.notify_all()

    def _becomes(self, rank: plan.TrialRank) -> None:
        """Replace what is known of a rank. A line that it prints is no news: it may print for ever."""
        if replace(rank, last_line="") != replace(self._ranks[rank.rank], last_line=""):
            self._news_at = time.monotonic()
        self._ranks[rank.rank] = rank

    def _end_of(self, rank: plan.TrialRank) -> str:
        status = self.watch.status
        process, outcome = status.processes.get(("trainer", rank.rank)), status.outcome
        if rank.node in self.watch.closed:
            return f"the connection was lost ({self.watch.closed[rank.node]})"
        if process is not None and process.code is not None and not process.stopped:
            return f"ended with {describe_exit(process.code, process.signal, process.note)}"
        return outcome.reason if outcome is not None and outcome.node in (-1, rank.node) else ""

    def state(self, wait: float) -> tuple[list[plan.TrialRank], float]:
        """Return all ranks, and for how many seconds there has been no news; inf: the job is over."""
        with self._changed:
            self._changed.wait(wait)
            quiet = float("inf") if self.watch.status.outcome else time.monotonic() - self._news_at
            return list(self._ranks.values()), quiet


def read_order(call: Call, cluster: Cluster, toml: Toml, passed: tuple[tuple[str, str], ...]) -> TrialRequest | None:
    """Read the options of a trial, None without --framework. Raises UsageError, before any connection."""
    name, text = call.given.framework, call.given.timeout
    if text and not name:
        raise UsageError("--timeout has no effect without --framework", "the other checks have deadlines of their own")
    if not name:
        return None
    if name not in plan.FRAMEWORKS:
        raise UsageError(f"--framework {name!r} is not known", f"one of {', '.join(plan.FRAMEWORKS)}")
    if _COLUMN in cluster.checks_off:
        fix = "take it out: it is only tried when --framework asks for it"
        raise UsageError("CHECKS_OFF in conf.py names framework", fix)
    limit = seconds(text, "--timeout", _SECONDS, 1.0, 1e6)
    mark = f"clustertool-{secrets.token_hex(4)}:"
    most = f"{limit * _STEPS:.0f}"
    options = Options(
        mode="collective",
        command=(*_COMMAND, name, mark, most),
        timeout=most,
        lease=_LEASE,
        on_failure="continue",
        image=call.given.image,
    )
    tables = {key: toml[key] for key in ("env", "trainer", "container") if key in toml}
    return TrialRequest(name, limit, read_job(replace(cluster, secrets=()), tables, options), passed, mark)


def framework(
    call: Call, fleet: Fleet, examined: Examined, order: TrialRequest, ear: TrialFollower
) -> tuple[Examined, list[Any]]:
    """Try the framework on all nodes: what was seen, with its findings, and its ranks, for JSON.

    Raises Interrupted, with all processes ended.
    """
    cluster = fleet.cluster
    folded, numbers = folding(cluster), {host.name: host.index for host in cluster.hosts}
    bad = sorted({finding.node for finding in errors(examined.findings)})
    if bad:
        found = [Finding(node, _COLUMN, "skip", "not tried") for node in sorted(examined.facts)]
        call.terminal.note(f"{order.name} is not tried: {folded(bad)} must have no error, or be left out with --skip")
        return examined.found(found), []
    try:
        facts, ranks = _try(call, fleet, examined.facts, order, ear)
    except signals.STOPS:
        raise
    except ClustertoolError as error:
        bugs = {numbers[e.node]: e for e in singles(error) if isinstance(e, InternalError) and e.node in numbers}
        return replace(examined.found(_refused(error, numbers)), failed={**examined.failed, **bugs}), []
    found = plan.judge(order.name, ranks, facts, order.seconds, folded, cluster.first_path)
    if plan.meeting_broke(ranks) and len(facts) > 1 and "mesh" not in cluster.checks_off:
        found += _between(fleet, facts)
    rows = [{**vars(rank), "node": fleet.name(rank.node)} for rank in ranks]
    return examined.found(found), rows


def _refused(error: ClustertoolError, numbers: Mapping[str, int]) -> list[Finding]:
    """Convert the errors of a trial that could not be started to findings. Devices in use are not a fault.

    numbers: of nodes by name.
    """
    found = []
    for one in singles(error):
        level = "warn" if isinstance(one, DeviceInUse) else "error"
        nodes = [numbers[one.node]] if one.node in numbers else list(numbers.values())
        found += [Finding(node, _COLUMN, level, f"not tried: {short(one)}", one.fix) for node in nodes]
    named = {finding.node for finding in found}
    return found + [Finding(node, _COLUMN, "skip", "not tried") for node in numbers.values() if node not in named]


def _try(
    call: Call, fleet: Fleet, facts: ByNode, order: TrialRequest, ear: TrialFollower
) -> tuple[ByNode, list[plan.TrialRank]]:
    """Start it, see how far it comes, and end it, whatever happens."""
    mine = identity(f"check-{job_id()}")
    fleet.ask(dict.fromkeys(fleet.agents, LINK_CLOSE({})))  # its ports may be wanted now
    try:
        facts = shared_roots.confirm(fleet, facts)
        made = _start(call, fleet, facts, order, mine)
        ear.expect(made, order.mark)
        where = f"{count(len(made.nodes), 'node')} ({count(len(made.processes), 'rank')})"
        limit = f"gives up after {order.seconds:g} s without progress (--timeout)"
        call.terminal.note(f"testing {order.name} on {where}; {limit}")
        fleet.ask(dict.fromkeys(fleet.agents, FOLLOW({"job": made.job_id, "logs": "all"}))).all()
        return facts, _wait(call, fleet, made.job_id, order, ear)
    finally:
        _end(call, fleet, mine.job_id, _LEAVING if ear.watch.status.outcome else _ENDING)


def _start(call: Call, fleet: Fleet, facts: ByNode, order: TrialRequest, mine: Identity) -> Plan:
    """Start the trial and return its plan, once all its trainers may start."""
    cluster = replace(fleet.cluster, secrets=())
    spec = replace(order.spec, env=(*order.spec.env, (_CODE, program("node/probe/framework_probe.py"))))

    def make(facts: ByNode) -> Plan:
        return plan_job(cluster, spec, facts, mine, (), order.passed)

    def start(made: Plan) -> None:
        carry_out(requests.start(made, {}, {}), fleet, lambda phase, answers: None)

    def plan_again(error: ClustertoolError) -> Plan:
        answers = preflight.probe(fleet, {}, order.spec.container).all()
        return make({node: replace(read_facts(node, a), root_id=facts[node].root_id) for node, a in answers.items()})

    return start_again(call, make(facts), start, plan_again, (PortInUse,))


def _wait(call: Call, fleet: Fleet, job: str, order: TrialRequest, ear: TrialFollower) -> list[plan.TrialRank]:
    """Wait until nothing more is to be expected of the ranks, and return them. Raises Interrupted."""
    reported, since, beat_at = "", time.monotonic(), 0.0
    while True:
        signals.check()
        if time.monotonic() > beat_at:
            beat_at = time.monotonic() + BEAT
            attached(fleet, job)
        ranks, quiet = ear.state(0.1)
        if quiet >= plan.patience(ranks, order.seconds):
            return ranks
        what = plan.waiting(order.name, ranks, folding(fleet.cluster))
        if what != reported and time.monotonic() - since > _TELL:
            reported, since = what, time.monotonic()
            call.terminal.note(f"{order.name}: waiting for {what}, up to {max(0.0, order.seconds - quiet):.0f} s more")


def _end(call: Call, fleet: Fleet, job: str, seconds: float) -> None:
    """End it: no process and no directory remains on any node, or the remaining ones are reported."""
    how: StopHow = {"by": f"{commanded()} check", "code": 143, "grace": 0.0, "force": True}
    stopped = fleet.ask(dict.fromkeys(fleet.agents, stop_request(job, how)), timeout=seconds, patient=True)
    clean = dict.fromkeys(stopped.ok, CLEAN({"job": job, "exact": True}))
    cleaned = fleet.ask(clean, timeout=seconds, patient=True)
    answers: dict[int, StopAnswer | ClustertoolError] = {**stopped.ok, **stopped.failed}
    for node, answer in answers.items():
        result = read_result(answer, job)
        if not result.over:
            call.terminal.warn(f"{fleet.name(node)}: {stop_text(result)}; {PROGRAM} stop --job {job} ends it")
    for node, done in cleaned.ok.items():
        for why, _ in done["kept"].values():
            call.terminal.warn(f"{fleet.name(node)}: {why}")
    for node, error in cleaned.failed.items():
        call.terminal.warn(f"{fleet.name(node)}: {error.what}; {PROGRAM} clean --job {job} removes what is left")


def _between(fleet: Fleet, facts: ByNode) -> list[Finding]:
    """Try the links again, at ports such as the framework takes: a firewall may know the job's ports, and no other."""
    meshed = mesh(fleet, facts, plan.own_ports(facts, secrets.token_hex(8)))
    bad = errors(meshed.findings)
    return [replace(one, text=f"{one.text} (ports {facts[one.node].ephemeral[0]} and up)") for one in bad]
