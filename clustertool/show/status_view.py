"""This module prints the state of jobs and nodes as tables."""

from __future__ import annotations

import textwrap
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clustertool.model.config.folded_names import fold, grouped
from clustertool.model.container.job_container import JobContainer
from clustertool.model.hints import PROGRAM
from clustertool.model.job.attempts import ProcessStatus
from clustertool.model.job.outcome import describe_exit
from clustertool.model.job.state_names import JobState, NodeState, StartReason
from clustertool.model.quantities import count, human_bytes, human_seconds
from clustertool.model.roles import LAUNCHERS
from clustertool.show.error_text import for_node, joined_fix
from clustertool.show.table import Cell, Narrow, table
from clustertool.show.terminal import Terminal

Shown = Mapping[str, Any]  # an object of a verb's --json

_NAMES = {
    "green": ("running", "done", "succeeded", "clean"),
    "dim": ("waiting", "starting", "queued", "unknown", "ended"),
    "yellow": ("stopped", "stopping", "frozen", "timeout"),
    "red": ("failed", "lost"),
}
STYLES = {name: style for style, names in _NAMES.items() for name in names}  # of the states of jobs, nodes and ranks
_MAY_RUN = (JobState.STARTING, JobState.RUNNING)
_STARTS = {
    StartReason.PLACED: "the job is placed on its nodes, and no supervisor has started",
    StartReason.JOINING: "the supervisors have started, and no rank has",
}
_LEVELS = {"bad": ("FAIL ", "red"), "warn": ("warn ", "yellow"), "ok": ("", ""), "skip": ("", "dim")}
_PROCESSES = ("role", "rank", "node", "pid", "state", "since", "exit", "cpu", "memory", "step", "no output")
_NODES = ("node", "state", "supervisor", "heartbeat", "note")
_EPOCHS = ("epoch", "began", "nodes", "left", "joined", "cost", "cause")
_FEW_OF_EPOCHS = Narrow(cut="cause", out=("began",))
_PODS = ("pod", "cluster node", "phase", "restarts", "reason")
_JOBS = ("state", "user", "started", "duration", "nodes", "exit", "command")
_FEW_OF_JOBS = Narrow(cut="command", out=("command", "nodes", "started"))
_FEW_OF_PROCESSES = Narrow(out=("pid", "memory", "cpu"))


def status_tables(status: Shown, terminal: Terminal, now: float) -> None:
    """Print one job, as `status --json` has it: its end or state, advice, a summary, and tables.

    The tables have its processes, its nodes, its pods and, if there are several, its epochs. now: seconds since the epoch, as
    all times.
    """
    names = {node["index"]: node["name"] or f"node {node['index']}" for node in status["nodes"]}
    state = (status["outcome"] or status)["state"]
    terminal.line(f"job {status['job']}: {_verdict(status)}", STYLES.get(state, "") or "bold")
    for text in (*status["waits"], *status.get("warnings", ())):
        terminal.line(f"  {text}", "yellow")
    if status["advice"]:
        terminal.line(f"  fix: {status['advice']}")
    if status.get("holds_output"):
        terminal.line(f"  {output_wait_text(status['job'])}", "yellow")
    reserved = reserved_text(status["job"], [pod["sidecars"] for pod in status.get("pods", ())])
    if reserved and status["outcome"]:
        terminal.line(f"  {reserved}", "yellow")
    for name, text in _summary(status, now).items():
        if text:
            terminal.line(f"{name + ':':9} {text}")
    terminal.line()
    processes = [_process_row(process, names, now) for process in status["processes"]]
    table("", _PROCESSES, processes, terminal=terminal, narrow=_FEW_OF_PROCESSES)
    terminal.line()
    table("", _NODES, [_node_row(node, names, _why_apart(node, status)) for node in status["nodes"]], terminal=terminal)
    if status.get("pods"):
        terminal.line()
        table("", _PODS, [_pod_row(pod) for pod in status["pods"]], terminal=terminal)
    if len(status.get("epochs", ())) > 1:
        terminal.line()
        epochs = [epoch_row(epoch, names) for epoch in status["epochs"]]
        table("", _EPOCHS, epochs, terminal=terminal, narrow=_FEW_OF_EPOCHS)


def epoch_row(epoch: Shown, names: Mapping[int, str]) -> list[str]:
    """Format one epoch of an elastic job as a row of the table of epochs. names: of the nodes by number."""
    left = [f"{names.get(node, f'node {node}')} ({why})" for node, why in epoch["left"]]
    joined = [names.get(node, f"node {node}") for node in epoch["joined"]] if epoch["attempt"] else []
    nodes = fold([names.get(node, f"node {node}") for node in epoch["nodes"]])
    cost = f"{epoch['seconds']:.1f} s" if epoch["seconds"] else ""
    cells = (str(epoch["attempt"]), _time_text(epoch["t"]), nodes, ", ".join(left), ", ".join(joined), cost)
    return [cell or "-" for cell in (*cells, epoch["cause"])]


def output_wait_text(job: str) -> str:
    """Describe that the first node of a job waits for a fetch of its output, with the commands that end this."""
    what = "its first node waits for a fetch of the output, and its resources, GPUs too, stay reserved"
    return f"{what}: {PROGRAM} fetch --job {job}, or give the output up: {PROGRAM} stop --job {job}"


def reserved_text(job: str, sidecars: Iterable[str]) -> str:
    """Name the containers that keep the pods of an ended job, and the command that ends them; "" without any.

    sidecars: those of each pod.
    """
    names = [one for one in sidecars if one]
    if not names:
        return ""
    what = f"{', '.join(sorted(set(names)))} still runs in {count(len(names), 'pod')}, whose resources stay reserved"
    return f"{what}: {PROGRAM} clean --job {job} removes the pods, and their logs"


def _verdict(status: Shown) -> str:
    """Describe how the job ended, or its state, with the reason; both, if it has an outcome and processes still run."""
    outcome, state = status["outcome"], str(status["state"])
    if not outcome and status["reason"]:
        return f"{state}: {status['reason']}"
    if not outcome:
        return state
    reason = f": {outcome['reason']}" if outcome["reason"] else ""
    still = "" if state == outcome["state"] else f"{state}, its outcome: "
    return f"{still}{outcome['state']} (exit {outcome['code']}, {outcome['source']}){reason}"


def _summary(status: Shown, now: float) -> dict[str, str]:
    """Build the lines of the summary of a job, by name: ranks by state, steps, times, command, ...; "" if not known."""
    states = Counter(str(process["state"]) for process in status["processes"] if process["role"] not in LAUNCHERS)
    steps = sorted(process["step"] for process in status["processes"] if process["step"] is not None)
    reached = f"step {steps[0]:.0f}" + (f" to {steps[-1]:.0f}" if steps[-1] != steps[0] else "") if steps else ""
    numbers = progress_text(status.get("progress", {}))
    began = status["started"] or status["created"]
    name = status.get("name", "")
    container = status.get("container")
    return {
        "name": name if name != status["job"] else "",
        "ranks": ", ".join(f"{number} {state}" for state, number in states.most_common()),
        "progress": ", ".join(filter(None, [reached, numbers])),
        "started": time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(began)) if began else "",
        "duration": duration(status, now),
        "user": status["owner"],
        "mode": status["mode"],
        "command": status["command"],
        "image": JobContainer(**container).text if container else "",
    }


def progress_text(progress: Shown) -> str:
    """Describe how far a job is, by `progress` of `status --json`: percentage, time left, loss; "" if nothing is known."""
    percent, eta, loss = (progress.get(name) for name in ("percent", "eta", "loss"))
    parts = [
        "" if percent is None else f"{percent:.1f} %",
        "" if eta is None else f"about {human_seconds(eta)} left",
        "" if loss is None else f"loss {float(loss):.4g}",
    ]
    return ", ".join(filter(None, parts))


def duration(job: Shown, now: float) -> str:
    """Format the time from the start of a job to its end, or to `now` if it starts or runs; "" if a time is not known."""
    if not job["started"] or not (job["ended"] or job["state"] in _MAY_RUN):
        return ""
    return human_seconds(max(0.0, (job["ended"] or now) - job["started"]))


def start_text(reason: StartReason) -> str:
    """Describe why a job is in the state STARTING, "" for no reason."""
    return _STARTS.get(reason, "")


def queue_text(reason: str, since: float, expected: float) -> str:
    """Describe that a job is queued: since when, why, and when its start is expected.

    Seconds since the epoch, 0.0 if not known.
    """
    text = f"queued since {_time_text(since)}" if since else "queued"
    text += f": {reason}" if reason else ""
    return f"{text}; the start is expected at {_time_text(expected)}" if expected else text


def _time_text(at: float) -> str:
    """Format seconds since the epoch as local date and time."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))


def rank_note(process: ProcessStatus) -> str:
    """Describe a rank's state further: by its note if it has one or has ended; else that its supervisor was lost.

    Else: that it listens, or listens at another place than its endpoint. "" without any of them.
    """
    if process.note or process.code is not None:
        return process.note
    if process.guarded:
        return "its supervisor was lost"
    if process.listening:
        return "listening"
    return f"listens on {process.listens}, not on {process.endpoint}" if process.listens else ""


def jobs_table(jobs: Sequence[Shown], terminal: Terminal, now: float) -> None:
    """Print jobs, as `jobs --json` has them, as a table, with a column of names if a name differs from its id.

    now: seconds since the epoch.
    """
    names = ("id", "name") if any(job.get("name", "") not in ("", job["id"]) for job in jobs) else ("id",)
    rows = [(*(job.get(name, "") for name in names), *_job_cells(job, now)) for job in jobs]
    table("", (*names, *_JOBS), rows, terminal=terminal, narrow=_FEW_OF_JOBS)


def check_matrix(rows: Sequence[Shown], terminal: Terminal) -> None:
    """Print the findings of nodes: nodes as rows, findings as columns, fixes below.

    A row: {"node": name, "findings": {column: {"level": "ok" | "warn" | "bad" | "skip", "text", "fix"}}}. Equal rows are one
    row under folded names; a fix is printed once for all its nodes. On a terminal, the checks with the same good result on all
    nodes are in one line below instead of columns.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row["findings"]))
    quiet = [column for column in columns if terminal.is_terminal and _is_quiet(column, rows)]
    columns = [column for column in columns if column not in quiet]
    alike = grouped(
        (tuple(_finding_cell(row["findings"].get(c, {})) for c in columns), str(row["node"])) for row in rows
    )
    fixes = grouped(
        ((column, for_node(str(finding["fix"]), str(row["node"]))), (str(row["node"]), str(finding["fix"])))
        for row in rows
        for column, finding in row["findings"].items()
        if finding.get("level") in ("bad", "warn") and finding.get("fix")
    )
    if columns or not quiet:
        table("", ("node", *columns), [(fold(nodes), *cells) for cells, nodes in alike.items()], terminal=terminal)
    if quiet:
        seen = {column: finding for row in reversed(rows) for column, finding in row["findings"].items()}
        good = ", ".join(_good_text(column, seen[column]) for column in quiet)
        text = f"{'ok' if columns else fold(str(row['node']) for row in rows) + ': ok'}: {good}"
        for line in textwrap.wrap(text, terminal.width, subsequent_indent="  ", break_on_hyphens=False):
            terminal.line(line, "dim")
    if fixes:
        terminal.line()
        for (column, _), found in fixes.items():
            by_node = dict(found)
            terminal.line(f"fix {column} on {fold(by_node)}: {joined_fix(by_node)}")


def _is_quiet(column: str, rows: Sequence[Shown]) -> bool:
    """Check whether a check is good or skipped, with the same text, on every node that has it."""
    found = [row["findings"].get(column) for row in rows]
    texts = {finding.get("text") for finding in found if finding}
    good = all(finding is None or finding.get("level") in ("ok", "skip") for finding in found)
    return good and len(texts) == 1


def _good_text(column: str, finding: Shown) -> str:
    """Format a good result: the name of the check, with its text in brackets."""
    text = str(finding.get("text") or "")
    return column if text in ("", "ok") else f"{column} ({text})"


def _process_row(process: Shown, names: Mapping[int, str], now: float) -> Sequence[object]:
    """Format a process as a row of the table of processes. names: of the nodes by number. now: seconds since the epoch."""
    since, cpu, memory = process["since"], process["cpu"], process["memory"]
    return (
        process["role"],
        process["rank"],
        names.get(process["node"], process["node"]),
        process["pid"] or "",
        _state_cell(process["state"], f" (attempt {process['attempt']})" if process["attempt"] else ""),
        human_seconds(now - since) if since else "",
        _exit_cell(process),
        "" if cpu is None else f"{cpu:.0f} %",
        "" if memory is None else human_bytes(memory),
        *_progress_cells(process, now),
    )


def _progress_cells(process: Shown, now: float) -> tuple[str, str]:
    """Format the last step of a process, and for how long it has printed nothing: (step, time).

    The time is "" if it has ended or not started, and "unknown" is put for what is not known of a lost one.
    """
    state, epoch, step, output = (process[name] for name in ("state", "epoch", "step", "output"))
    reached = f"{step:.0f}" if step is not None else f"epoch {epoch:g}" if epoch is not None else ""
    if state not in ("running", "frozen", "lost", "unknown"):
        return reached, ""
    unknown = "" if state in ("running", "frozen") else "unknown"
    return reached or unknown, human_seconds(max(0.0, now - output)) if output else unknown


def _why_apart(node: Shown, status: Shown) -> str:
    """Describe why a node takes no part in the newest epoch of an elastic job: on standby, or why it left; else "".

    "" also for a node that is lost.
    """
    epochs = status.get("epochs", ())
    if not epochs or node["index"] in epochs[-1]["nodes"] or node["state"] not in (NodeState.RUNNING, NodeState.ENDED):
        return ""
    if node["state"] == NodeState.RUNNING:
        return "on standby"
    return next((why for epoch in reversed(epochs) for left, why in epoch["left"] if left == node["index"]), "")


def _node_row(node: Shown, names: Mapping[int, str], part: str) -> Sequence[object]:
    """Format a node as a row of the table of nodes. names: by number.

    part: why it takes no part in the job, which is its note if nothing is wrong.
    """
    beat = node["heartbeat"]
    away = "no connection to the coordinator" if node["unconnected"] else ""
    clock = f"clock {node['skew']:+.0f} s" if node["skew"] else ""
    alive = f"still alive: {', '.join(node['survivors'])}" if node["survivors"] else ""
    return (
        names[node["index"]],
        _state_cell(node["state"]),
        node["supervisor"] or "",
        "" if beat is None else f"{human_seconds(beat)} ago",
        Cell("; ".join(filter(None, [node["why"] or away or part, clock, alive])), "red" if alive else ""),
    )


def _pod_row(pod: Shown) -> Sequence[object]:
    """Format a pod as a row of the table of pods."""
    return pod["pod"], pod["host"], pod["phase"], pod["restarts"], pod["reason"]


def _job_cells(job: Shown, now: float) -> Sequence[object]:
    """Format a job as the cells of the table of jobs that follow its id and name."""
    began = job["started"] or job["created"]
    started = time.strftime("%Y-%m-%d %H:%M", time.localtime(began)) if began else ""
    state, lasted = _state_cell(job["state"]), duration(job, now)
    return state, job["owner"], started, lasted, job["total"], job["code"], job["command"]


def _state_cell(state: str, more: str = "") -> Cell:
    """Format a state in its colour."""
    return Cell(f"{state}{more}", STYLES.get(state, ""))


def _exit_cell(process: Shown) -> Cell:
    """Format how a process ended, red if it failed; its note if it has no exit code."""
    code, signal, note = process["code"], process["signal"], process["note"]
    if code is None:
        return Cell(note)
    text = describe_exit(code, signal, note) if code or signal or note else "0"
    return Cell(text, "red" if process["state"] == "failed" else "")


def _finding_cell(finding: Shown) -> Cell:
    """Format a finding as a cell. finding: {} for a check that a node does not have."""
    mark, style = _LEVELS.get(str(finding.get("level", "ok")), ("", ""))
    return Cell(f"{mark}{finding.get('text', '')}".rstrip(), style)
