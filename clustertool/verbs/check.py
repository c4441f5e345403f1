"""inv check does the preflight and prints one matrix of nodes and findings.

A link check lets every node connect to every other one, at ports such as a job's. The laptop only coordinates it.
--framework runs a small job on all nodes, planned and started like any other, and removes it.
"""

from __future__ import annotations

import contextlib
import secrets
import shlex
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from clustertool.actions import load_config, load_workspace
from clustertool.actions.follow_job import BEAT, send_attached
from clustertool.engines import base, known_engines, preflight
from clustertool.engines.job_request import start_with_retries
from clustertool.engines.preflight import Examined, name_folder, short_error
from clustertool.engines.send_workspace import disk_needs
from clustertool.errors import (
    ClustertoolError,
    DeviceInUse,
    InternalError,
    PortInUse,
    PreflightError,
    UsageError,
    singles,
)
from clustertool.fleet import shared_roots, stack_tools
from clustertool.fleet.dispatch.workspace import Workspace
from clustertool.fleet.fleet import Fleet, carry_out
from clustertool.fleet.identity import identity, job_id
from clustertool.fleet.node_bundle import program
from clustertool.model.checks import framework_findings as trial_plan
from clustertool.model.checks import link_findings as link_plan
from clustertool.model.checks.each_node import errors
from clustertool.model.checks.link_findings import ports_to_try
from clustertool.model.config.cluster import Cluster
from clustertool.model.config.folded_names import fold
from clustertool.model.config.hosts import Host
from clustertool.model.config.job import JobSpec, Options, read_job
from clustertool.model.config.job_tables import Toml
from clustertool.model.facts import ByNode, Identity, read_facts
from clustertool.model.finding import Finding
from clustertool.model.hints import PROGRAM
from clustertool.model.job.outcome import describe_exit
from clustertool.model.job.stop_result import read_result
from clustertool.model.link_answer import LinkAnswer
from clustertool.model.planning import requests
from clustertool.model.planning.plan import Plan, plan
from clustertool.model.quantities import count
from clustertool.model.wire import messages
from clustertool.model.wire.agent_answers import StopAnswer
from clustertool.model.wire.agent_requests import ProbeWanted, StopHow
from clustertool.model.wire.stream_messages import StreamFrame
from clustertool.show.job_text import stop_text
from clustertool.show.program_name import commanded
from clustertool.show.status_view import check_matrix
from clustertool.verbs import signals
from clustertool.verbs.verb import Call, User, read_seconds
from clustertool.watch.job_view import JobView, LogLines

_LINK_TRY_SECONDS = 1.15  # seconds for one connection: a lost first packet is sent again after one
_LINK_SEND_SECONDS = 0.4  # seconds for which one link is filled
_ALL_SENDS_SECONDS = 30.0  # seconds for all rounds of it
_LINK_PATIENCE = 30.0
_TRIAL_SECONDS = 60.0  # without news of any rank, unless --timeout has another value
_TRIAL_STEPS = 10  # times as long a trial lives, and a framework waits for others: to be late is not to be broken
_TRIAL_LEASE = "15"  # seconds for which it lives without us
_TRIAL_ENDING = 20.0  # seconds for a node to end it
_TRIAL_LEAVING = 5.0  # where it has ended by itself: a node was lost
_TRIAL_TELL = 2.0  # seconds of waiting after which it is reported
_TRIAL_COLUMN = "framework"
_TRIAL_CODE = "CLUSTERTOOL_CHECK"  # the program travels in this variable: ps and inv jobs show a line that can be read
_TRIAL_COMMAND = ("python3", "-u", "-c", f"import os; exec(os.environ.pop({_TRIAL_CODE!r}))")


def check(call: Call) -> None:
    """Check the nodes and the links between them, and by options a workspace and a framework; print the findings.

    Raises PreflightError if one is an error. With an engine that chooses the nodes, only that engine's own checks are made.
    """
    folder = Path(call.given.workspace) if call.given.workspace else None
    toml = load_workspace.workspace_toml(folder) if folder else {}
    cluster = load_config.cluster(call, call.selection, start_local=True)
    typed = known_engines.typed_settings(vars(call.given))
    container = load_workspace.container(cluster, toml, call.given.image)
    known_engines.refuse_settings(cluster.engine, typed)
    if not load_config.needs_hosts(cluster):
        _check_engine(call, cluster, typed)
        return
    spec, passed = load_workspace.read_scattered_job(cluster, toml), dict(load_config.passed_variables(cluster))
    order, ear = _read_trial(call, cluster, toml, tuple(passed.items())), TrialFollower(len(cluster.hosts))
    more: dict[str, object] = {}
    workspace = load_workspace.workspace(call, folder, cluster.ignore_from) if folder else None
    with Fleet(cluster, signals.check, ear.put, User()) as fleet:
        examined = preflight.examine(
            fleet, lambda host: _probe_wanted(cluster, host, toml, passed), container=container
        )
        if workspace:
            examined = examined.check_disk(disk_needs(workspace, cluster, examined.facts, spec))
        made = _plan_of_workspace(call, cluster, examined, toml, workspace)
        examined = examined.check_devices(fleet, made)
        meshed = _try_links(call, fleet, examined, made)
        examined = examined.add_findings(meshed.findings if meshed else ())
        if "stacks" not in cluster.checks_off:
            means = stack_tools.source()
            examined = examined.add_findings(Finding(node, "stacks", "ok", means) for node in examined.facts)
        if order:
            examined, ranks = _run_trial(call, fleet, examined, order, ear)
            more = {"framework": {"name": order.name, "ranks": ranks}}
    _show_findings(call, examined, meshed, more)


def _probe_wanted(cluster: Cluster, host: Host, toml: Toml, passed: Mapping[str, str]) -> ProbeWanted:
    """Build what `check` asks a node to examine; if job.toml has mode = "mpi", also its MPI."""
    wanted = preflight.for_check(cluster, host, passed)
    if toml.get("mode") != "mpi":
        return wanted
    variables = {**passed, **{name: str(value) for name, value in dict(toml.get("env", {})).items()}}
    return {**wanted, **preflight.for_mpi(cluster, host, variables)}


def _check_engine(call: Call, cluster: Cluster, typed: Mapping[str, object]) -> None:
    """Run the checks of an engine that chooses the nodes, and show their findings.

    Raises UsageError for options that need HOSTS, PreflightError if a finding is an error.
    """
    for option in ("framework", "bandwidth"):
        if getattr(call.given, option):
            what = f"--{option} works on HOSTS, and the engine {cluster.engine} chooses the nodes itself"
            raise UsageError(what, "leave it out")
    with base.engine_of(cluster)(cluster, call) as engine:
        _show_findings(call, engine.check(typed, call.given.deep), None, {})


def _plan_of_workspace(
    call: Call, cluster: Cluster, examined: Examined, toml: Toml, workspace: Workspace | None
) -> Plan | None:
    """Plan the job of the workspace, for its ports. None without a workspace, if a node has not answered, or if that fails.

    It fails, for example, if the job needs options of `run`.
    """
    if workspace is None or len(examined.facts) < len(cluster.hosts):
        return None
    with contextlib.suppress(ClustertoolError):
        job = read_job(cluster, toml, Options(image=call.given.image))
        return plan(cluster, job, examined.facts, Identity(job_id()), workspace.files)
    return None


def _try_links(call: Call, fleet: Fleet, examined: Examined, made: Plan | None) -> Meshed | None:
    """Test the links between the nodes that answered, at the ports of the plan `made` or, without one, at others.

    Returns None if fewer than two have answered, or the check "mesh" is off.
    """
    if "mesh" in fleet.cluster.checks_off or len(examined.facts) < 2:
        return None
    ports = ports_to_try(fleet.cluster, examined.facts, made, secrets.token_hex(8))
    return _test_links(fleet, examined.facts, ports, bool(call.given.bandwidth))


def _show_findings(call: Call, examined: Examined, meshed: Meshed | None, more: Mapping[str, object]) -> None:
    """Print the matrix of findings, or answer with JSON, and raise a PreflightError if one of them is an error.

    meshed: the result of the links, which is described in notes. more: further fields of the JSON answer.
    """
    cluster, rows, bad = examined.cluster, examined.rows(), errors(examined.findings)
    if call.json:
        done = {"code": examined.exit_code() if bad else 0, "source": "tool", "reason": bad[0].text if bad else ""}
        links = {"mesh": _links_as_json(meshed, cluster)} if meshed else {}
        call.answer({"nodes": rows, **links, **more, "exit": done})
    else:
        check_matrix(rows, call.terminal)
    for line in _describe_links(meshed, cluster) if meshed else ():
        call.terminal.note(line)
    for node, failure in examined.failed.items():
        if isinstance(failure, InternalError):
            call.terminal.note(f"{cluster.hosts[node].name}: {failure.what}")
    if bad:
        nodes = {finding.node for finding in bad}
        verb, skip = "is" if len(nodes) == 1 else "are", fold(cluster.hosts[node].name for node in sorted(nodes))
        ready = f"{len(nodes)} of {count(len(cluster.hosts), 'node')} {verb} not ready"
        some = len(nodes) < len(cluster.hosts) and load_config.needs_hosts(cluster)
        leave = f", or leave out with --skip {shlex.quote(skip)}" if some else ""
        error = PreflightError(f"check failed: {ready} ({count(len(bad), 'problem')})", f"as listed above{leave}")
        error.code = examined.exit_code()
        raise error
    call.terminal.note("the node is ready" if len(cluster.hosts) == 1 else f"all {len(cluster.hosts)} nodes are ready")


# -- the links ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Meshed:
    """The result of a link check: findings, all tries, and bytes a second of each direction that was measured."""

    findings: tuple[Finding, ...]
    tries: tuple[link_plan.Try, ...]
    speeds: Mapping[link_plan.Pair, float]
    coverage: str  # a description of the pairs that were tested
    left: int  # pairs whose bandwidth was not measured for lack of time


def _test_links(fleet: Fleet, facts: ByNode, ports: Mapping[int, Sequence[int]], bandwidth: bool = False) -> Meshed:
    """Test the links between the nodes that answered, at some ports of each, and with `bandwidth` their speed.

    It opens the ports first, and closes them again in any case. A node that does not answer a request becomes an error in the
    findings, which also name broken and slow links. ports: of each node.
    """
    found = link_plan.choose_pairs(sorted(facts))
    links = _Links(fleet, {node: fact.address for node, fact in facts.items()})
    try:
        tries = links.connect(link_plan.targets(found, links.open(ports)))
        working = {(one.source, one.target): one.port for one in tries if one.answer is LinkAnswer.OK}
        speeds, left = links.measure_speeds(found.pairs, working) if bandwidth else ({}, 0)
    finally:
        for agent in fleet.agents.values():
            agent.send(messages.LINK_CLOSE({}))  # no caller waits for that
    folded = name_folder(fleet.cluster)
    findings = link_plan.judge(tries, sorted(facts), folded) + link_plan.slow_links(speeds, folded)
    for node, error in links.failed.items():
        findings.append(Finding(node, "mesh", "error", f"not tried: {short_error(error)}", error.fix))
    return Meshed(tuple(findings), tuple(tries), speeds, found.coverage, left)


class _Links:
    """The requests of one link check. `failed` has the nodes that did not answer one of them."""

    def __init__(self, fleet: Fleet, addresses: Mapping[int, str]) -> None:
        self.failed: dict[int, ClustertoolError] = {}
        self._fleet, self._addresses, self._token = fleet, addresses, secrets.token_hex(16)

    def _ask(self, asked: Mapping[int, messages.Request[messages.Answered]]) -> dict[int, messages.Answered]:
        """Send requests to nodes, and return the answers by node. Errors are stored in `failed`."""
        gathered = self._fleet.ask(asked, _LINK_PATIENCE)
        self.failed.update(gathered.failed)
        return gathered.ok

    def open(self, ports: Mapping[int, Sequence[int]]) -> dict[int, tuple[int, ...]]:
        """Open ports on nodes, and return those that listen now, by node."""
        asked = {
            node: messages.LINK_OPEN(
                {"node": node, "address": self._addresses[node], "ports": list(some), "token": self._token}
            )
            for node, some in ports.items()
        }
        return {node: tuple(answer["ports"]) for node, answer in self._ask(asked).items()}

    def connect(self, targets: Mapping[int, Sequence[link_plan.Pair]]) -> list[link_plan.Try]:
        """Let each node connect to its targets, and return the results of the nodes that answer.

        targets: {node: (other node, port) of each connection}, 1.15 s for each.
        """
        asked = {}
        for node, some in targets.items():
            if some:
                wanted = [(peer, self._addresses[peer], port) for peer, port in some]
                asked[node] = messages.LINK_TRY({"token": self._token, "seconds": _LINK_TRY_SECONDS, "targets": wanted})
        return [link_plan.Try(node, *row) for node, answer in self._ask(asked).items() for row in answer["tries"]]

    def measure_speeds(
        self, pairs: Sequence[link_plan.Pair], working: Mapping[link_plan.Pair, int]
    ) -> tuple[dict[link_plan.Pair, float], int]:
        """Measure the speed of working links, each pair in both directions: ({link: bytes a second}, number of pairs left out).

        In a round every node is in one pair at most. Pairs are left out after as many rounds as the time allows. working:
        {link: a port that answers}.
        """
        speeds: dict[link_plan.Pair, float] = {}
        rounds = link_plan.rounds(pairs)
        allowed = max(1, int(_ALL_SENDS_SECONDS / (2 * _LINK_SEND_SECONDS)))
        for now in rounds[:allowed]:
            for links in (dict(now), {b: a for a, b in now}):
                asked = {}
                for a, b in links.items():
                    if (a, b) in working:
                        target = (b, self._addresses[b], working[a, b])
                        asked[a] = messages.LINK_SEND(
                            {"token": self._token, "seconds": _LINK_SEND_SECONDS, "target": target}
                        )
                for a, answer in self._ask(asked).items():
                    if "speed" in answer:
                        speeds[a, links[a]] = float(answer["speed"])
        return speeds, sum(len(now) for now in rounds[allowed:])


def _links_as_json(meshed: Meshed, cluster: Cluster) -> dict[str, object]:
    """Build the field "mesh" of the JSON answer: which pairs were tested, and the result and speed of each try."""
    return {
        "told": meshed.coverage,
        "links": [
            {
                "from": cluster.hosts[one.source].name,
                "to": cluster.hosts[one.target].name,
                "port": one.port,
                "answer": one.result,
                "seconds": round(one.seconds, 6) if one.answer is LinkAnswer.OK else None,
                "bytes_per_second": round(meshed.speeds.get((one.source, one.target), 0.0)) or None,
            }
            for one in sorted(meshed.tries, key=lambda one: (one.source, one.target, one.port))
        ],
    }


def _describe_links(meshed: Meshed, cluster: Cluster) -> list[str]:
    """Describe the links in a few lines: how many answer, the slowest one, which were tested, their bandwidth."""

    def arrow(source: int, target: int) -> str:
        return f"{cluster.hosts[source].name} -> {cluster.hosts[target].name}"

    working = [one for one in meshed.tries if one.answer is LinkAnswer.OK]
    lines = []
    if working:
        slow = max(working, key=lambda one: one.seconds)
        middle = sorted(one.seconds for one in working)[len(working) // 2]
        tried, answered = (len({(one.source, one.target) for one in tries}) for tries in (meshed.tries, working))
        most = f"at most {_milliseconds(slow.seconds)} ({arrow(slow.source, slow.target)})"
        lines.append(f"links: {answered} of {tried} answer, {_milliseconds(middle)} there and back, {most}")
    if meshed.coverage:
        lines.append(f"links tried: {meshed.coverage}")
    if meshed.speeds:
        pair, least = min(meshed.speeds.items(), key=lambda item: item[1])
        usual = sorted(meshed.speeds.values())[len(meshed.speeds) // 2]
        lines.append(f"bandwidth: {link_plan.rate(usual)}, at least {link_plan.rate(least)} ({arrow(*pair)})")
    if meshed.left:
        lines.append(f"bandwidth: for {meshed.left} pairs there was no time")
    return lines


def _milliseconds(seconds: float) -> str:
    """Format seconds as a text in milliseconds: "1.25 ms"."""
    return f"{1000 * seconds:.2f} ms"


# -- --framework -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrialRequest:
    """A trial of a framework: its name, the timeout in seconds, the job to start, variables, and what its lines begin with."""

    name: str
    seconds: float
    spec: JobSpec
    passed: tuple[tuple[str, str], ...]
    mark: str


class TrialFollower:
    """The progress of each rank of a trial, by frames of all nodes. The agents' reader threads feed it, the verb reads it."""

    def __init__(self, nodes: int) -> None:
        self.watch = JobView(frozenset(range(nodes)))
        self.mark = ""
        self._ranks: dict[int, trial_plan.TrialRank] = {}
        self._changed = threading.Condition()
        self._news_at = 0.0

    def begin(self, made: Plan, mark: str) -> None:
        """Begin to follow the ranks of this plan, whose lines begin with `mark`."""
        with self._changed:
            self.mark, self._news_at = mark, time.monotonic()
            self._ranks = {process.rank: trial_plan.TrialRank(process.rank, process.node) for process in made.processes}
            self.watch.status.plan = made.ranks

    def put(self, node: int, header: StreamFrame, payload: bytes) -> None:
        """Update the ranks by a frame of a node: by lines that they have printed, and by their end. Wake wait_for_frame()."""
        with self._changed:
            for item in self.watch.take(node, header, payload, time.monotonic()):
                if isinstance(item, LogLines) and item.rank in self._ranks:
                    for line in item.lines:
                        self._replace_rank(trial_plan.advance(self._ranks[item.rank], line, self.mark))
            if header["type"] in ("events", "closed"):
                for rank in list(self._ranks.values()):
                    if not rank.ended and (rank.node == node or self.watch.status.outcome):
                        self._replace_rank(replace(rank, ended=self._end_of(rank)))
            self._changed.notify_all()

    def _replace_rank(self, rank: trial_plan.TrialRank) -> None:
        """Replace the record of a rank, and note the time unless only its last line differs: it may print lines for ever."""
        if replace(rank, last_line="") != replace(self._ranks[rank.rank], last_line=""):
            self._news_at = time.monotonic()
        self._ranks[rank.rank] = rank

    def _end_of(self, rank: trial_plan.TrialRank) -> str:
        """Describe how a rank has ended: the connection was lost, its exit code, or the job's outcome; "" if it has not."""
        status = self.watch.status
        process, outcome = status.processes.get(("trainer", rank.rank)), status.outcome
        if rank.node in self.watch.closed:
            return f"the connection was lost ({self.watch.closed[rank.node]})"
        if process is not None and process.code is not None and not process.stopped:
            return f"ended with {describe_exit(process.code, process.signal, process.note)}"
        return outcome.reason if outcome is not None and outcome.node in (-1, rank.node) else ""

    def wait_for_frame(self, wait: float) -> tuple[list[trial_plan.TrialRank], float]:
        """Wait up to `wait` seconds for a frame, and return (ranks, seconds since one has changed; inf: the job is over)."""
        with self._changed:
            self._changed.wait(wait)
            quiet = float("inf") if self.watch.status.outcome else time.monotonic() - self._news_at
            return list(self._ranks.values()), quiet


def _read_trial(call: Call, cluster: Cluster, toml: Toml, passed: tuple[tuple[str, str], ...]) -> TrialRequest | None:
    """Check the options of a trial and build its request, None without --framework. Raises UsageError before any connection."""
    name, text = call.given.framework, call.given.timeout
    if text and not name:
        raise UsageError("--timeout has no effect without --framework", "the other checks have deadlines of their own")
    if not name:
        return None
    if name not in trial_plan.FRAMEWORKS:
        raise UsageError(f"--framework {name!r} is not known", f"one of {', '.join(trial_plan.FRAMEWORKS)}")
    if _TRIAL_COLUMN in cluster.checks_off:
        fix = "take it out: it is only tried when --framework asks for it"
        raise UsageError("CHECKS_OFF in conf.py names framework", fix)
    limit = read_seconds(text, "--timeout", _TRIAL_SECONDS, 1.0, 1e6)
    mark = f"clustertool-{secrets.token_hex(4)}:"
    most = f"{limit * _TRIAL_STEPS:.0f}"
    options = Options(
        mode="collective",
        command=(*_TRIAL_COMMAND, name, mark, most),
        timeout=most,
        lease=_TRIAL_LEASE,
        on_failure="continue",
        image=call.given.image,
    )
    tables = {key: toml[key] for key in ("env", "trainer", "container") if key in toml}
    return TrialRequest(name, limit, read_job(replace(cluster, secrets=()), tables, options), passed, mark)


def _run_trial(
    call: Call, fleet: Fleet, examined: Examined, order: TrialRequest, ear: TrialFollower
) -> tuple[Examined, list[Any]]:
    """Try the framework on all nodes, and return the examination with its findings, and its ranks for the JSON answer.

    It is not tried if a node has an error before. If the ranks could not meet, the links are tested again. Errors of its start
    are findings. Raises Interrupted or Terminated after a signal, with all processes ended.
    """
    cluster = fleet.cluster
    folded, numbers = name_folder(cluster), {host.name: host.index for host in cluster.hosts}
    bad = sorted({finding.node for finding in errors(examined.findings)})
    if bad:
        found = [Finding(node, _TRIAL_COLUMN, "skip", "not tried") for node in sorted(examined.facts)]
        call.terminal.note(f"{order.name} is not tried: {folded(bad)} must have no error, or be left out with --skip")
        return examined.add_findings(found), []
    try:
        facts, ranks = _try_framework(call, fleet, examined.facts, order, ear)
    except signals.STOPS:
        raise
    except ClustertoolError as error:
        bugs = {numbers[e.node]: e for e in singles(error) if isinstance(e, InternalError) and e.node in numbers}
        return replace(examined.add_findings(_not_started(error, numbers)), failed={**examined.failed, **bugs}), []
    found = trial_plan.judge(order.name, ranks, facts, order.seconds, folded, cluster.first_path)
    if trial_plan.meeting_broke(ranks) and len(facts) > 1 and "mesh" not in cluster.checks_off:
        found += _try_links_again(fleet, facts)
    rows = [{**vars(rank), "node": fleet.name(rank.node)} for rank in ranks]
    return examined.add_findings(found), rows


def _not_started(error: ClustertoolError, numbers: Mapping[str, int]) -> list[Finding]:
    """Convert the errors of a trial that could not be started to findings: errors, and warnings for devices in use.

    numbers: {name: node}. An error of no known node counts for all. A node without an error gets the level "skip".
    """
    found = []
    for one in singles(error):
        level = "warn" if isinstance(one, DeviceInUse) else "error"
        nodes = [numbers[one.node]] if one.node in numbers else list(numbers.values())
        found += [Finding(node, _TRIAL_COLUMN, level, f"not tried: {short_error(one)}", one.fix) for node in nodes]
    named = {finding.node for finding in found}
    return found + [Finding(node, _TRIAL_COLUMN, "skip", "not tried") for node in numbers.values() if node not in named]


def _try_framework(
    call: Call, fleet: Fleet, facts: ByNode, order: TrialRequest, ear: TrialFollower
) -> tuple[ByNode, list[trial_plan.TrialRank]]:
    """Start the trial, follow it until it is over or stuck, stop and remove it in any case, and return (facts, ranks).

    facts: with the ROOT_DIRs that nodes share. A note reports the start.
    """
    mine = identity(f"check-{job_id()}")
    fleet.ask(dict.fromkeys(fleet.agents, messages.LINK_CLOSE({})))  # its ports may be wanted now
    try:
        facts = shared_roots.confirm_root_ids(fleet, facts)
        made = _start_trial(call, fleet, facts, order, mine)
        ear.begin(made, order.mark)
        where = f"{count(len(made.nodes), 'node')} ({count(len(made.processes), 'rank')})"
        limit = f"gives up after {order.seconds:g} s without progress (--timeout)"
        call.terminal.note(f"testing {order.name} on {where}; {limit}")
        fleet.ask(dict.fromkeys(fleet.agents, messages.FOLLOW({"job": made.job_id, "logs": "all"}))).all()
        return facts, _follow_trial(call, fleet, made.job_id, order, ear)
    finally:
        _end_trial(call, fleet, mine.job_id, _TRIAL_LEAVING if ear.watch.status.outcome else _TRIAL_ENDING)


def _start_trial(call: Call, fleet: Fleet, facts: ByNode, order: TrialRequest, mine: Identity) -> Plan:
    """Start the trial without SECRETS, with the probe's code, and return its plan when all supervisors have been launched.

    If a port is in use, the nodes are examined again and the trial is planned again.
    """
    cluster = replace(fleet.cluster, secrets=(), notify=())
    spec = replace(order.spec, env=(*order.spec.env, (_TRIAL_CODE, program("node/probe/framework_probe.py"))))

    def make(facts: ByNode) -> Plan:
        return plan(cluster, spec, facts, mine, (), order.passed)

    def start(made: Plan) -> None:
        carry_out(requests.start(made, {}, {}), fleet, lambda phase, answers: None)

    def plan_again(error: ClustertoolError) -> Plan:
        answers = preflight.probe(fleet, {}, order.spec.container).all()
        return make({node: replace(read_facts(node, a), root_id=facts[node].root_id) for node, a in answers.items()})

    return start_with_retries(call, make(facts), start, plan_again, (PortInUse,))


def _follow_trial(
    call: Call, fleet: Fleet, job: str, order: TrialRequest, ear: TrialFollower
) -> list[trial_plan.TrialRank]:
    """Follow the ranks until the job is over or no rank has changed for trial_plan.patience(), and return them.

    Raises Interrupted or Terminated after a signal. Reports to the nodes that the job is followed, since its lease would end
    it, and in notes what it waits for.
    """
    reported, since, beat_at = "", time.monotonic(), 0.0
    while True:
        signals.check()
        if time.monotonic() > beat_at:
            beat_at = time.monotonic() + BEAT
            send_attached(fleet, job)
        ranks, quiet = ear.wait_for_frame(0.1)
        if quiet >= trial_plan.patience(ranks, order.seconds):
            return ranks
        what = trial_plan.describe_waiting(order.name, ranks, name_folder(fleet.cluster))
        if what != reported and time.monotonic() - since > _TRIAL_TELL:
            reported, since = what, time.monotonic()
            call.terminal.note(f"{order.name}: waiting for {what}, up to {max(0.0, order.seconds - quiet):.0f} s more")


def _end_trial(call: Call, fleet: Fleet, job: str, seconds: float) -> None:
    """Kill the trial's processes and remove its directory on all nodes, and warn of what is left.

    seconds: the timeout of each.
    """
    how: StopHow = {"by": f"{commanded()} check", "code": 143, "grace": 0.0, "force": True}
    stopped = fleet.ask(dict.fromkeys(fleet.agents, messages.stop_request(job, how)), timeout=seconds, patient=True)
    clean = dict.fromkeys(stopped.ok, messages.CLEAN({"job": job, "exact": True}))
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


def _try_links_again(fleet: Fleet, facts: ByNode) -> list[Finding]:
    """Test the links again, at ports such as the framework takes, and return the errors.

    A firewall may allow only the ports of jobs.
    """
    meshed = _test_links(fleet, facts, trial_plan.own_ports(facts, secrets.token_hex(8)))
    bad = errors(meshed.findings)
    return [replace(one, text=f"{one.text} (ports {facts[one.node].ephemeral[0]} and up)") for one in bad]
