"""inv run loads, checks, plans, dispatches, starts and follows a job to its end."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor

from clustertool.errors import ClustertoolError, DeviceInUse, PortInUse, Several, raise_all
from clustertool.fleet import device_check, node_bundle, shared_roots
from clustertool.fleet.device_check import devices_of
from clustertool.fleet.execute import Answers, carry_out
from clustertool.fleet.fleet import Fleet
from clustertool.fleet.identity import certificate
from clustertool.model.config.job import read_job
from clustertool.model.facts import Facts, read_facts, with_devices
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import RankState
from clustertool.model.job.stop_result import StopResult, read_result, read_undo
from clustertool.model.planning import requests
from clustertool.model.planning.plan import Plan, as_dict, given_facts, needs_probe
from clustertool.model.roles import role_name
from clustertool.model.wire.agent_requests import ProbeWanted
from clustertool.show.errors import exit_json
from clustertool.show.outcome_view import show_results
from clustertool.show.plan_view import plan_tables
from clustertool.show.prefix import RankLines
from clustertool.show.table import count
from clustertool.verbs import load_config, preflight, report_outcome, signals
from clustertool.verbs.dispatch import needs, portions, send
from clustertool.verbs.follow_session import FollowSession, Inbox
from clustertool.verbs.preflight import Examined
from clustertool.verbs.run_request import (
    RunRequest,
    check_ranks,
    dry_identity,
    make_plan,
    new_identity,
    read_options,
    read_order,
    wanted,
)
from clustertool.verbs.verb import Call, User
from clustertool.watch.sanitize import mask

_PAUSE = (1.0, 2.0)  # seconds between two checks of devices that others use
_AGAIN = 5  # times that a plan is made again when a port was taken meanwhile
_APART = (
    0.2  # seconds between two of these plans, more each time and random: two jobs that collided would collide again
)


def run(call: Call) -> None:
    """Check, dispatch, start and follow a job to its end; Ctrl+C stops it on all nodes."""
    perform(call, read_order(call, read_options(call), lambda: load_config.cluster(call, start_local=True)))


def perform(call: Call, order: RunRequest) -> None:
    """Carry an order out, or show its plan."""
    if order.dry and order.spec is not None and not call.given.skip_bad and not needs_probe(order.cluster, order.spec):
        show_plan(call, make_plan(order, given_facts(order.cluster), dry_identity(order)))
        return
    _with_nodes(call, order)


def _with_nodes(call: Call, order: RunRequest) -> None:
    inbox = Inbox()
    fleet = Fleet(order.cluster, signals.check, inbox.put, User())
    try:
        if not order.dry:
            order.certificate = ThreadPoolExecutor(1).submit(certificate)
        facts = _preflight(call, order, fleet)
        if order.dry:
            show_plan(call, make_plan(order, facts, dry_identity(order)))
            return
        facts = shared_roots.confirm(fleet, facts)
        made, facts = _plan_when_free(call, order, fleet, facts)
        releases = _dispatch(call, order, fleet, facts)
        _send_nvml(fleet, made, facts)
        made = _start(call, order, fleet, made, releases)
        _follow(call, order, fleet, inbox, made)
    finally:
        fleet.close()


def _preflight(call: Call, order: RunRequest, fleet: Fleet) -> Mapping[int, Facts]:
    """Facts of all nodes, or every node's errors. Completes the request when job.toml is on the nodes."""
    options = order.options
    listing = not (options.command or options.script) or bool(options.shards)  # else only job.toml could need it
    request: ProbeWanted = {"job_workspace": options.job_workspace, "listing": listing}
    examined = preflight.examine(order.cluster, fleet, request, ports=False)
    examined = _room(order, examined)
    if call.given.skip_bad:
        order.cluster, examined = preflight.good_only(examined, order.cluster, call, int(options.nnodes or 0))
        fleet.keep(order.cluster)
        examined = _room(order, examined)  # fewer trainers read more shards each
    facts = examined.facts
    preflight.require(examined, order.cluster)
    preflight.warn(examined, order.cluster, call)
    if order.spec is None:
        order.spec = read_job(order.cluster, load_config.job_toml(facts[0].job_toml), order.options)
    return _in_use(order, fleet, facts)


def _room(order: RunRequest, examined: Examined) -> Examined:
    if order.workspace is None:
        return examined
    return preflight.room(examined, order.cluster, needs(order.workspace, order.cluster, examined.facts, order.spec))


def _dispatch(call: Call, order: RunRequest, fleet: Fleet, facts: Mapping[int, Facts]) -> Mapping[int, str]:
    """Send the workspace; node -> the release it has now."""
    if order.workspace is None:
        return {}
    shares = portions(order.workspace, order.cluster, facts, order.spec)
    raise_all(list(send(call, fleet, order.workspace, shares, facts).failed.values()))
    return {node: portion.release for node, portion in shares.items()}


def _plan(call: Call, order: RunRequest, facts: Mapping[int, Facts]) -> Plan:
    made = make_plan(order, facts, new_identity(order))
    check_ranks(call, made)
    for warning in made.warnings:
        call.terminal.warn(warning)
    order.planned(made)
    return made


def _plan_when_free(
    call: Call, order: RunRequest, fleet: Fleet, facts: Mapping[int, Facts]
) -> tuple[Plan, Mapping[int, Facts]]:
    """The plan and its facts; with --wait once its devices are free (one message). Raises Interrupted."""
    waiting = False
    while True:
        try:
            return _plan(call, order, facts), facts
        except ClustertoolError as error:
            if not call.given.wait or not only(error, DeviceInUse):
                raise
            if not waiting:
                waiting = True
                call.terminal.note(f"waiting for devices: {described(error)}; Ctrl+C ends the waiting")
        _pause(random.uniform(*_PAUSE))  # so that two jobs that wait for each other's devices do not continue to do so
        facts = _examine_again(order, fleet)


def _pause(seconds: float) -> None:
    """Raises Interrupted."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        signals.check()
        time.sleep(0.02)


def _start(call: Call, order: RunRequest, fleet: Fleet, made: Plan, releases: Mapping[int, str]) -> Plan:
    """The plan that is started: this one, or a later one if another job took one of its ports between probe and claim."""
    counts = ", ".join(count(sum(p.role == role for p in made.processes), role_name(role)) for role in made.phases)
    call.terminal.note(f"job {made.job_id}: {made.mode}, {counts} on {count(len(made.nodes), 'node')}")
    undone: dict[int, StopResult] | None = None

    def start(made: Plan) -> None:
        nonlocal undone
        signals.count.job, undone = made.job_id, {}
        _carry_out(order, fleet, made, releases, undone)

    def plan_again(error: ClustertoolError) -> Plan:
        nonlocal releases, undone
        undone = None
        what = "a device" if only(error, DeviceInUse) else "a port"
        call.terminal.note(f"{what} was taken by another job a moment ago: planning again")
        order.job_id = made.job_id
        later, facts = _plan_when_free(call, order, fleet, _examine_again(order, fleet))
        if only(error, DeviceInUse):  # other devices may be other trainers, which read other shards
            releases = _dispatch(call, order, fleet, facts)
        return later

    try:
        return start_again(made, start, lambda error: may_go_again(call, order, error), plan_again)
    except ClustertoolError:
        if undone is not None:
            results = {node: undone.get(node, read_result(None, "")) for node in range(len(made.nodes))}
            show_results({fleet.name(node): result for node, result in results.items()}, call.terminal)
        raise


def start_again(
    made: Plan,
    start: Callable[[Plan], None],
    may_retry: Callable[[ClustertoolError], bool],
    plan_again: Callable[[ClustertoolError], Plan],
) -> Plan:
    """Start a plan, or a later one where another job took a port in between. Returns the plan that was started."""
    for tried in range(_AGAIN):
        try:
            start(made)
            return made
        except ClustertoolError as error:
            if not may_retry(error):
                raise
            failure = error
        _pause(random.uniform(0.0, _APART * tried))
        made = plan_again(failure)
    start(made)
    return made


def _send_nvml(fleet: Fleet, made: Plan, facts: Mapping[int, Facts]) -> None:
    """To nodes of which the job has NVIDIA's cards, and which do not have it: what the cards do is recorded with it."""
    with_cards = {process.node for process in made.processes if process.devices}
    nodes = [node for node in with_cards if facts[node].devices and made.nodes[node].device_kind == "gpu"]
    if nodes:
        lacking = [node for node in nodes if node_bundle.nvml()[0] not in facts[node].modules]
        fleet.ask(dict.fromkeys(lacking, device_check.module_request()))


def _carry_out(
    order: RunRequest, fleet: Fleet, made: Plan, releases: Mapping[int, str], undone: dict[int, StopResult]
) -> None:
    """`undone` gets, by node, what was taken back."""

    def note(phase: str, answers: Answers) -> None:
        for node, answer in answers.items():
            if phase == "stop" or node not in undone or isinstance(answer, ClustertoolError):
                undone[node] = read_result(answer, made.job_id) if phase == "stop" else read_undo(answer)

    carry_out(requests.start(made, releases, order.secrets), fleet, note)


def may_go_again(call: Call, order: RunRequest, error: ClustertoolError) -> bool:
    """Other ports can always be taken, other devices with --devices auto, and the same ones later with --wait."""
    kinds = (PortInUse, DeviceInUse) if call.given.wait or order.options.devices.strip() == "auto" else (PortInUse,)
    return only(error, *kinds)


def described(error: ClustertoolError) -> str:
    """What happened, node by node, on one line."""
    each = error.errors if isinstance(error, Several) else (error,)
    return "; ".join(f"{one.node}: {one.what}" if one.node else one.what for one in each)


def only(error: ClustertoolError, *kinds: type[ClustertoolError]) -> bool:
    return all(isinstance(one, kinds) for one in (error.errors if isinstance(error, Several) else (error,)))


def _examine_again(order: RunRequest, fleet: Fleet) -> Mapping[int, Facts]:
    gathered = preflight.probe(order.cluster, fleet, {"job_workspace": order.options.job_workspace})
    facts = shared_roots.confirm(fleet, {node: read_facts(node, answer) for node, answer in gathered.all().items()})
    return _in_use(order, fleet, facts)


def _in_use(order: RunRequest, fleet: Fleet, facts: Mapping[int, Facts]) -> Mapping[int, Facts]:
    """Facts with what computes on the devices and how they are, which only --devices auto needs to know."""
    if order.spec is None or not order.spec.auto_devices:
        return facts
    answers = devices_of(fleet).all()
    return {node: with_devices(fact, answers[node]) for node, fact in facts.items()}


def _follow(call: Call, order: RunRequest, fleet: Fleet, inbox: Inbox, made: Plan) -> None:
    hide = mask(list(order.secrets.values()))
    ranks = {(process.role, process.rank): process.node for process in made.processes}
    follow = FollowSession(call, fleet, inbox, made.job_id, RankLines(call.terminal, hide=hide), ranks=ranks)
    follow.start({"logs": wanted(call), "tail": None}, made.policy.grace, new=True)
    if call.given.detach and _detached(call, follow, made):
        order.ended(made)
        return
    follow.run()
    if follow.detached:
        call.terminal.note(f"detached; the job goes on: inv attach --job {made.job_id}")
        return
    error = report_outcome.tell(call, fleet, follow, hide)
    order.ended(made)
    finish(call, error, follow)


def _detached(call: Call, follow: FollowSession, made: Plan) -> bool:
    """Wait until every process runs, then return. False if the job has ended, or is ending: then follow it."""
    total = len(made.processes)

    def all_started(status: JobStatus) -> bool:
        return (
            status.outcome is not None
            or sum(p.state is not RankState.WAITING for p in status.processes.values()) >= total
        )

    follow.run(all_started)
    if follow.watch.status.outcome is not None or follow.stopping:
        return False
    verbs = ("inv attach --job {}", "inv logs --job {} -f", "inv stop --job {}")
    call.terminal.line(f"job {made.job_id} runs: {', '.join(verbs).format(*[made.job_id] * 3)}")
    if call.json:
        call.answer({"job": made.job_id, "exit": {"code": 0, "source": "tool", "reason": "all started"}})
    return True


def finish(call: Call, error: ClustertoolError | None, follow: FollowSession) -> None:
    """The JSON answer and the exit: raises the job's error, or reports success."""
    status = follow.watch.status
    if call.json:
        call.answer(
            {"job": status.job, "exit": exit_json(error), "outcome": status.outcome and status.outcome.as_dict()}
        )
    if error is not None:
        raise error
    reason = status.outcome.reason if status.outcome else "done"
    call.terminal.note(f"clustertool: exit 0 (job): {reason}")


def show_plan(call: Call, made: Plan) -> None:
    if call.json:
        call.answer(as_dict(made))
        return
    plan_tables(as_dict(made), call.terminal)
