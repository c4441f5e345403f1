"""This module makes sentences about a job: what happened, what it waits for, how it ended, and what a stop did on each node."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from clustertool.model.config.folded_names import fold, gather, grouped, ranges
from clustertool.model.hints import PROGRAM
from clustertool.model.job.file_origin import SharedFile
from clustertool.model.job.node_status import NodeTrouble
from clustertool.model.job.outcome import Key, Outcome, describe_coordinator, failed, followers, short_exit, some
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import JobState, NodeCause, StopState
from clustertool.model.job.stop_result import StopResult
from clustertool.model.quantities import count, human_bytes
from clustertool.model.roles import LAUNCHERS, MPIRUN, ROLES, role_name
from clustertool.model.wire.event_types import Event, MembershipSample
from clustertool.watch.news import (
    DisconnectNews,
    FailureNews,
    News,
    PhaseNews,
    RefusedNews,
    RevivedNews,
    failed_by_themselves,
    first_culprit,
)
from clustertool.watch.rank_metrics import LossWarning
from clustertool.watch.waits import ConnectWait, Firewall, ListenWait, Wait, away_coordinator

_TEXTS = {
    StopState.CLEAN: "clean",
    StopState.ENDED_ALREADY: "ended already",
    StopState.NEVER_STARTED: "clean (never started here)",
    StopState.UNDONE: "clean, nothing was started",
}
_TROUBLES = {
    NodeCause.NONE: "",
    NodeCause.UNKNOWN: "{detail}",
    NodeCause.DISK_FULL: "the disk of {detail} is full",
    NodeCause.GIVEN_UP: "{detail}",
    NodeCause.NEVER_CONNECTED: "no connection to the coordinator within {seconds:g} s",
    NodeCause.SUPERVISOR_LOST: "supervisor lost: {detail}",
    NodeCause.SUPERVISOR_GONE: "its supervisor is gone",
    NodeCause.ENGINE: "its processes have ended: {detail}",
}
_LISTEN_FIX = 'a pserver that opens no port needs [pserver] ready = "started" in job.toml'


def trouble_text(trouble: NodeTrouble) -> str:
    """Describe what is wrong with a node, "" if nothing is."""
    return _TROUBLES[trouble.cause].format(detail=trouble.detail, seconds=trouble.seconds)


def blocked_text(wait: ConnectWait) -> str:
    """Describe which nodes cannot connect to the coordinator, and why."""
    what = "cannot connect again" if wait.again else "cannot connect"
    errno = f" ({wait.errno})" if wait.errno else ""
    return f"{some(wait.nodes)} {what} to {describe_coordinator(wait.coordinator, wait.endpoint)}: {wait.why}{errno}"


def wait_text(wait: Wait) -> str:
    """Describe what a job waits for, and for how long it has done so."""
    if isinstance(wait, ConnectWait):
        return f"{blocked_text(wait)}; tried for {wait.seconds:.0f} s"
    what = some([f"pserver {rank} on {node} at {endpoint}" for rank, node, endpoint in wait.pservers])
    return f"the trainers wait until a port is open: {what}; {wait.seconds:.0f} s so far ({_LISTEN_FIX})"


def firewall_text(firewall: Firewall | None) -> str:
    """Describe which nodes may have a firewall that blocks connections and how to check it; "" for None."""
    if firewall is None:
        return ""
    what = "incoming connections" if firewall.incoming else "the connections between them"
    nat = f", or {firewall.address} is not its address (any more), or one of NAT" if firewall.incoming else ""
    check = f"run `{PROGRAM} check`, which names addresses and interfaces"
    return f"a firewall on {some(firewall.nodes, 'or')} may block {what}{nat}; {check}"


def resume_text(status: JobStatus) -> str:
    """Describe how to continue an elastic job that ended because its coordinator was lost; "" for any other end."""
    coordinator = away_coordinator(status)
    if coordinator is None:
        return ""
    again = f"--resume {status.job} --skip {status.name(coordinator.index)}"
    return f"start it again on the other nodes, from its output: {PROGRAM} run {again}, with the options of its start"


def news_text(news: News | Wait) -> str:
    """Convert news of a job, or what it waits for, to a sentence."""
    if isinstance(news, (ConnectWait, ListenWait)):
        return wait_text(news)
    if isinstance(news, FailureNews):
        return _failure_text(news)
    if isinstance(news, PhaseNews):
        return _phase_text(news)
    if isinstance(news, RefusedNews):
        return f"{news.node}: {news.why}; it is not followed any more"
    if isinstance(news, DisconnectNews):
        return f"{news.node}: connection lost ({news.why}), trying again"
    if isinstance(news, RevivedNews):
        return f"{news.node}: it answers again, and joins the job"
    return _event_text(news.node, news.event)


def _failure_text(news: FailureNews) -> str:
    """Describe processes that failed: by themselves, with the error of one reported before, or after another one."""
    if news.followed:
        return followers(news.failures)
    if news.like is None:
        return failed(news.failures)
    role = role_name(news.like.role)
    names = f"{len(news.failures)} more {role}{'s' * (len(news.failures) > 1)}"
    return f"{names} failed with the same error as {role} {news.like.rank}"


def _phase_text(news: PhaseNews) -> str:
    """Describe the phase that begins, and the attempt if it is not the first."""
    if news.phase == "ending" and news.end is None:
        return f"ending attempt {news.attempt} on all nodes"
    done = news.end is JobState.SUCCEEDED
    texts = {
        "pserver": "all nodes are ready, starting the pservers",
        "trainer": "starting the trainers" + _others_that_start(news.roles),
        "ending": "all trainers are done, ending the pservers" if done else "ending the job on all nodes",
    }
    return texts[news.phase] + (f" (attempt {news.attempt})" if news.attempt else "")


def _others_that_start(roles: Collection[str]) -> str:
    """Return which processes start with the trainers: " and heter trainers", " with mpirun", ""."""
    return " and heter trainers" if "heter" in roles else " with mpirun" if MPIRUN in roles else ""


def _event_text(node: str, event: Event) -> str:
    """Convert an event to a sentence, "" for an event without one. node: the name of the node that the event is about."""
    if event["type"] == "phase":
        return str(event.get("why", ""))
    if event["type"] == "disk":
        became = "is full: what is printed now is lost" if event["full"] else "has room again"
        return f"{node}: the disk of {event['root']} {became}"
    if event["type"] == "epoch":
        return _epoch_text(event)
    if event["type"] == "standby":
        return f"{event['name']} is on standby: it takes part when the job needs it"
    if event["type"] == "left-out":
        return f"{event['name']} does not take part in the next epoch: {event['why']}"
    if event["type"] == "below-minimum":
        waits = f"the job waits for nodes: {event['present']} of at least {event['minimum']} are there"
        return f"{waits}; it ends after {event['seconds']:g} s"
    if event["type"] == "lease-lost":
        silent = f"the coordinator has not acknowledged a heartbeat for {event['seconds']:g} s"
        return f"{node}: {silent}, so its ranks were ended"
    if event["type"] == "memory-in-use":
        used = f"{node}: ended processes still use {human_bytes(event['used'])} of its devices"
        return f"{used}: the next ones start when they are free, after {event['seconds']:g} s at the latest"
    if event["type"] == "hang":
        return hang_text(event["text"])
    if event["type"] == "restart":
        return f"attempt {event['attempt']} begins in {event['pause']:g} s"
    if event["type"] == "frozen":
        return f"{role_name(event['role'])} {event['rank']} on {node} was stopped by a signal (SIGSTOP)"
    if event["type"] == "notification":
        return f"a notification ({event['event']}) was not sent: {event['failed']}"
    if event["type"] == "elsewhere":
        listens = f"{role_name(event['role'])} {event['rank']} on {node} listens on {event['listens']}"
        return f"{listens}, the others expect it on {event['endpoint']}"
    if event["type"] == "lost":
        return f"node {node} is lost: {event.get('why')}"
    if event["type"] == "supervisor-lost":
        return f"{node}: {event.get('why')}; its processes were ended"
    return f"{node}: still alive: {', '.join(event['survivors'])}" if event["type"] == "clean" else ""


def _epoch_text(event: Mapping[str, Any]) -> str:
    """Describe an epoch that begins: how many nodes, how many left and joined, what the change has cost."""
    changes = [f"{count(len(event[change]), 'node')} {change}" for change in ("left", "joined") if event[change]]
    changed = f" ({', '.join(changes)})" if changes else ""
    cost = f", {event['seconds']:g} s after the last useful work" if event["seconds"] else ""
    return f"epoch {event['attempt']} begins with {count(len(event['nodes']), 'node')}{changed}{cost}"


def membership_text(membership: MembershipSample) -> str:
    """Describe the epoch of an elastic job: its number of nodes and the limits of that, who is on standby, and since when.

    Then come the nodes that left, and why, those that joined, and the cause of the epoch.
    """
    nodes, standby = membership["nodes"], membership["standby"]
    text = f"epoch {membership['epoch']}, {len(nodes)} of {membership['minimum']}:{membership['maximum']} nodes"
    text += f", on standby: {fold(standby)}" * bool(standby)
    left = [f"{name} left ({why})" for name, why in membership["left"]]
    changes = [*left, *(f"{name} joined" for name in membership["joined"])]
    if membership["began"] and membership["epoch"]:
        text += f", since {time.strftime('%H:%M:%S', time.localtime(membership['began']))}"
    reasons = [", ".join(changes), membership["cause"]]
    return ": ".join([text, *filter(None, reasons)])


def stop_text(result: StopResult) -> str:
    """Describe the result of a stop on one node."""
    if result.state is StopState.SURVIVORS:
        return "survivors: " + ", ".join(result.survivors)
    if result.state is StopState.UNKNOWN:
        return f"unknown, still running? {result.why}"
    if result.state is StopState.NO_ANSWER:
        return f"did not answer: {result.why}" if result.why else "did not answer"
    waits = ", but its supervisor waits for another node" if result.waits else ""
    return f"{_TEXTS[result.state]}{waits}"


def show_results(results: Mapping[str, StopResult], note: Callable[[str], None]) -> None:
    """Print the result of a stop on each node by `note`, equal ones under folded names."""
    for names, text in gather({name: stop_text(result) for name, result in results.items()}):
        note(f"{names}: {text}")


def abort_line(status: JobStatus, outcome: Outcome) -> str:
    """Format the line "ABORT!!! ..." that fleetrun users grep for, with the failed ranks of the first one's role.

    "" if none failed, or the first one is a launcher such as mpirun.
    """
    role = outcome.culprits[0][0] if outcome.culprits else ""
    if not role or role in LAUNCHERS:
        return ""
    ranks = ",".join(map(str, sorted(rank for name, rank in outcome.culprits if name == role)))
    total, name = len(status.of(role)), role_name(role)
    process = f"the {name} process with rank=[{ranks}]"
    return f"ABORT!!! Out of all {total} {name}s, {process} was aborted. Please check its log."


def victims_line(outcome: Outcome) -> str:
    """Format the line with the victims by role and rank; "" without any, or unless the job has failed or was lost."""
    if not outcome.victims or outcome.state not in (JobState.FAILED, JobState.LOST):
        return ""
    victims = [key for role in ROLES for key in outcome.victims if key[0] == role]
    return f"stopped by clustertool because of it (victims): {ranks_text(victims, '; ')}"


def ranks_text(keys: Iterable[Key], between: str = ", ") -> str:
    """Format ranks by role: `trainer 0-3, pserver 1`."""
    return between.join(f"{role_name(role)} {ranges(ranks)}" for role, ranks in grouped(keys).items())


def hang_text(verdict: str) -> str:
    """Describe a job that hangs."""
    return f"no progress: {verdict} ({PROGRAM} stacks shows where all are)"


def loss_text(warning: LossWarning) -> str:
    """Describe whose loss is wrong."""
    what = f"the loss of {ranks_text(warning.ranks)} is {warning.loss:.4g}"
    return what if warning.median is None else f"{what}, where the median of the trainers is {warning.median:.4g}"


def remains_text(job: str, left: Mapping[str, Iterable[Key]]) -> str:
    """Describe which processes of a job may still run, with the command that stops them.

    left: their ranks, as far as known, by the name of the node.
    """
    places = [f"{ranks_text(sorted(keys)) or 'processes'} on {name}" for name, keys in left.items()]
    return f"{some(places)} may still run: {PROGRAM} stop --job {job}"


def role_counts(roles: Sequence[str]) -> str:
    """Count the processes by role: `4 trainers, 1 pserver`."""
    return ", ".join(count(roles.count(role), role_name(role)) for role in dict.fromkeys(roles))


def brief(status: JobStatus, outcome: Outcome) -> str:
    """Describe the process that failed first, its error, and how many failed, as a short text.

    For a lost job: the outcome's own short text. "" if there is neither.
    """
    if outcome.state is JobState.LOST:
        return outcome.brief
    guilty = first_culprit(status, outcome)
    if guilty is None:
        return ""
    node = status.nodes[guilty.node].name or f"node {guilty.node}"
    number = "" if guilty.role == MPIRUN else f" {guilty.rank}"
    name = f"{role_name(guilty.role)}{number} on {node}"
    first = f"{name}: {short_exit(outcome.code if guilty.code is None else guilty.code, guilty.signal, guilty.note)}"
    groups = failed_by_themselves(status, outcome)
    causes = [process.role for group in groups for process in group]
    if len(causes) == 1:
        return first
    same = " with the same error" if len(groups) == 1 else ""
    return f"{role_counts(causes)} failed{same}, first {first}"


def shared_files(files: Iterable[SharedFile]) -> list[str]:
    """Describe files of a folder in which several jobs have run, taken or left out: one sentence for each reason."""
    texts = []
    for (origin, taken), paths in grouped(((file.origin, file.taken), file.path) for file in files).items():
        if origin.own:
            why = f"job {origin.job} ran in the same folder at the time of the last change"
        elif origin.job:
            why = f"job {origin.job}, which began later in the same folder, has changed {'it' if len(paths) == 1 else 'them'}"
        else:
            why = "older than this job"
        texts.append(f"{some(paths)}: {why}" if taken else f"left out: {some(paths)}: {why}; --path FILE copies one")
    return texts
