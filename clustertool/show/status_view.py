"""This module prints the state of jobs and nodes as tables. A missing value is an empty cell: nodes may have any version."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from clustertool.model.job.outcome import describe_exit
from clustertool.model.job.rank_status import ProcessStatus
from clustertool.model.job.state_names import StartReason
from clustertool.model.quantities import human_bytes, human_seconds
from clustertool.show.table import Cell, fold, table
from clustertool.show.terminal import Terminal

Shown = Mapping[str, Any]  # an object of a verb's --json

_STYLES = {
    "running": "green",
    "done": "green",
    "succeeded": "green",
    "clean": "green",
    "waiting": "dim",
    "not started": "dim",
    "starting": "dim",
    "queued": "dim",
    "unknown": "dim",
    "ended": "dim",
    "stopped": "yellow",
    "stopping": "yellow",
    "frozen": "yellow",
    "timeout": "yellow",
    "failed": "red",
    "lost": "red",
}
_STARTS = {
    StartReason.PLACED: "the job is placed on its nodes, and no supervisor has started",
    StartReason.JOINING: "the supervisors have started, and no rank has",
}
_LEVELS = {"bad": ("FAIL ", "red"), "warn": ("warn ", "yellow"), "ok": ("", ""), "skip": ("", "dim")}
_PROCESSES = ("role", "rank", "node", "pid", "state", "since", "exit", "cpu", "memory", "step", "no output")
_NODES = ("node", "state", "supervisor", "heartbeat", "note")
_JOBS = ("id", "state", "created", "nodes", "exit", "command")


def status_tables(status: Shown, terminal: Terminal) -> None:
    """One job: {"job", "state", "mode", "command", "now", "processes": [...], "nodes": [...], "waits", "outcome": {...}}.

    waits: sentences about what the job waits for, or waited for. advice: the fix for that.
    A process: role, rank, node (number or name), pid, state, since, code, signal, note, cpu (percent), memory (bytes), epoch
    and step (the last ones that it printed), output (when it printed last).
    A node: index, name, state, supervisor (pid), heartbeat (its age in seconds), survivors, why. Times are seconds
    since the epoch; `now` is the current time on the same clock, so that the caller can correct for the nodes' clocks.
    """
    now = float(status.get("now") or time.time())
    nodes = status.get("nodes", ())
    names = {node.get("index"): str(node.get("name") or f"node {node.get('index')}") for node in nodes}
    state = str(status.get("state", "unknown"))
    about = [f"job {status.get('job', '')}", str(status.get("mode") or ""), state, str(status.get("command") or "")]
    terminal.line(", ".join(filter(None, about)), "bold")
    terminal.line()
    table("", _PROCESSES, [_process(process, names, now) for process in status.get("processes", ())], terminal=terminal)
    terminal.line()
    table("", _NODES, [_node(node, names) for node in nodes], terminal=terminal)
    for wait in status.get("waits", ()):
        terminal.line()
        terminal.line(str(wait), "yellow")
    if status.get("advice"):
        terminal.line(f"  fix: {status['advice']}")
    outcome = status.get("outcome")
    if outcome:
        terminal.line()
        terminal.line(_outcome(outcome), _STYLES.get(str(outcome.get("state")), ""))


def start_text(reason: StartReason) -> str:
    """Why a job is starting."""
    return _STARTS.get(reason, "")


def rank_note(process: ProcessStatus) -> str:
    """Further information about a rank's state."""
    life = process.life
    if process.note or process.code is not None:
        return process.note
    if life.guarded:
        return "its supervisor was lost"
    if life.listening:
        return "listening"
    return f"listens on {life.listens}, not on {process.endpoint}" if life.listens else ""


def jobs_table(jobs: Iterable[Shown], terminal: Terminal) -> None:
    """Jobs: id, state, created (seconds since the epoch), nodes (their number or names), exit, command."""
    table("", _JOBS, [_job(job) for job in jobs], terminal=terminal)


def check_matrix(rows: Sequence[Shown], terminal: Terminal) -> None:
    """Nodes as rows, findings as columns, fixes below.

    A row: {"node": name, "findings": {column: {"level": "ok" | "warn" | "bad" | "skip", "text", "fix"}}}. Equal rows
    are one row under folded names; a fix is printed once for all its nodes. On a terminal, checks with the
    same good result on all nodes are one line instead of a column.
    """
    columns = list(dict.fromkeys(column for row in rows for column in row["findings"]))
    quiet = [column for column in columns if terminal.is_terminal and _quiet(column, rows)]
    columns = [column for column in columns if column not in quiet]
    alike: dict[tuple[Cell, ...], list[str]] = {}
    fixes: dict[tuple[str, str], list[str]] = {}
    for row in rows:
        cells = tuple(_finding(row["findings"].get(column)) for column in columns)
        alike.setdefault(cells, []).append(str(row["node"]))
        for column, finding in row["findings"].items():
            if finding.get("level") in ("bad", "warn") and finding.get("fix"):
                fixes.setdefault((column, str(finding["fix"])), []).append(str(row["node"]))
    if columns or not quiet:
        table("", ("node", *columns), [(fold(nodes), *cells) for cells, nodes in alike.items()], terminal=terminal)
    if quiet:
        found = {column: finding for row in reversed(rows) for column, finding in row["findings"].items()}
        good = ", ".join(_good(column, found[column]) for column in quiet)
        terminal.line(f"{'ok' if columns else fold(str(row['node']) for row in rows) + ': ok'}: {good}", "dim")
    if fixes:
        terminal.line()
        for (column, fix), nodes in fixes.items():
            terminal.line(f"fix {column} on {fold(nodes)}: {fix}")


def _quiet(column: str, rows: Sequence[Shown]) -> bool:
    """Whether a check has the same result on every node that answered, and no result that needs an action."""
    found = [row["findings"].get(column) for row in rows]
    texts = {finding.get("text") for finding in found if finding}
    good = all(finding is None or finding.get("level") in ("ok", "skip") for finding in found)
    return good and len(texts) == 1


def _good(column: str, finding: Shown) -> str:
    text = str(finding.get("text") or "")
    return column if text in ("", "ok") else f"{column} ({text})"


def _process(process: Shown, names: Mapping[Any, str], now: float) -> Sequence[object]:
    state = str(process.get("state", "unknown"))
    if process.get("attempt"):
        state += f" (attempt {process['attempt']})"
    node, since, cpu = process.get("node"), process.get("since"), process.get("cpu")
    return (
        process.get("role"),
        process.get("rank"),
        names.get(node, node),
        process.get("pid") or "",
        _state(state),
        human_seconds(now - float(since)) if since else "",
        _end(process),
        "" if cpu is None else f"{float(cpu):.0f} %",
        _size(process.get("memory")),
        *_progress(process, now),
    )


def _progress(process: Shown, now: float) -> tuple[str, str]:
    """The last step that a process printed, and for how long it has printed nothing: the latter as long as it has not ended."""
    state, epoch, step, output = (process.get(name) for name in ("state", "epoch", "step", "output"))
    reached = f"{step:.0f}" if step is not None else f"epoch {epoch:g}" if epoch is not None else ""
    if state not in ("running", "frozen", "lost", "unknown"):
        return reached, ""
    unknown = "" if state in ("running", "frozen") else "unknown"
    return reached or unknown, human_seconds(max(0.0, now - float(output))) if output else unknown


def _node(node: Shown, names: Mapping[Any, str]) -> Sequence[object]:
    beat, survivors = node.get("heartbeat"), node.get("survivors") or ()
    skew = float(node.get("skew") or 0)
    away = "no connection to the coordinator" if node.get("unconnected") else ""
    note = "; ".join(filter(None, [str(node.get("why") or "") or away, f"clock {skew:+.0f} s" if skew else ""]))
    if survivors:
        note = "; ".join(filter(None, [note, f"still alive: {', '.join(map(str, survivors))}"]))
    return (
        names.get(node.get("index"), ""),
        _state(str(node.get("state", "unknown"))),
        node.get("supervisor") or "",
        "" if beat is None else f"{human_seconds(float(beat))} ago",
        Cell(note, "red" if survivors else ""),
    )


def _job(job: Shown) -> Sequence[object]:
    nodes = job.get("nodes", "")
    created = job.get("created")
    return (
        job.get("id"),
        _state(str(job.get("state", "unknown"))),
        time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(float(created))) if created else "",
        nodes if isinstance(nodes, (int, str)) else fold(map(str, nodes)),
        job.get("exit"),
        job.get("command"),
    )


def _state(state: str) -> Cell:
    return Cell(state, _STYLES.get(state.partition(" ")[0], ""))


def _end(process: Shown) -> Cell:
    """Describe how a process ended; empty while it runs."""
    code, signal, note = process.get("code"), int(process.get("signal") or 0), str(process.get("note") or "")
    if code is None:
        return Cell(note)
    text = describe_exit(int(code), signal, note) if code or signal or note else "0"
    return Cell(text, "red" if process.get("state") == "failed" else "")


def _size(memory: object) -> str:
    return human_bytes(float(memory)) if isinstance(memory, (int, float)) else ""


def _outcome(outcome: Shown) -> str:
    reason = f": {outcome['reason']}" if outcome.get("reason") else ""
    return f"{outcome.get('state', 'ended')} (exit {outcome.get('code', '?')}, {outcome.get('source', 'tool')}){reason}"


def _finding(finding: Shown | None) -> Cell:
    if finding is None:
        return Cell("")
    mark, style = _LEVELS.get(str(finding.get("level", "ok")), ("", ""))
    return Cell(f"{mark}{finding.get('text', '')}".rstrip(), style)
