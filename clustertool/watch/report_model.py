"""The report model combines all nodes' records of one job: when ranks ran, what they used, which ones failed first.

It is pure: answers of the nodes in, frozen values out. Texts of programs are masked and sanitized here. Times are seconds since
the job began, by each node's own clock.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from clustertool.model.config.folded_names import grouped
from clustertool.model.container.job_container import JobContainer, container_of
from clustertool.model.elastic.membership import EpochChange
from clustertool.model.job.attempts import ProcessStatus
from clustertool.model.job.node_status import NodeTrouble
from clustertool.model.job.outcome import Key, Outcome, describe_exit
from clustertool.model.job.progress import Metrics
from clustertool.model.job.stacks import ProcessSample, StackGroup, gather
from clustertool.model.job.state import JobStatus
from clustertool.model.job.state_names import JobState, NodeState, RankState
from clustertool.model.job.usage import rates
from clustertool.model.masking import Hide
from clustertool.model.shape import read
from clustertool.model.wire.agent_answers import MachineCurve, RankCurve, RankPlan, ReportAnswer
from clustertool.model.wire.stream_messages import EventsFrame
from clustertool.watch import news
from clustertool.watch.job_view import JobView
from clustertool.watch.lines import excerpt
from clustertool.watch.news import News
from clustertool.watch.rank_metrics import MetricsRow
from clustertool.watch.sanitize import harmless
from clustertool.watch.straggler import Curve, RankPace, find_stragglers

Answers = Mapping[int, ReportAnswer]
_TAIL = 20  # lines of a culprit
_SKEW = 2.0  # seconds between two clocks that are reported


@dataclass(frozen=True)
class Span:
    """A rank from `start` to `end` in one state: running, frozen; or, of the last span of an attempt, how that ended."""

    start: float
    end: float
    state: RankState
    attempt: int


@dataclass(frozen=True)
class UsageCurves:
    """The CPU time and memory of a rank: in all, and as curves of cores and bytes."""

    cpu: float  # seconds
    memory: float  # bytes at most
    cores: Curve
    resident: Curve


@dataclass(frozen=True)
class RankReport:
    """What the report shows of a rank: its spans, its end, what it used, its progress and its last line."""

    role: str
    rank: int
    node: int
    spans: Sequence[Span]
    how: str  # a description of its end, "" while it runs
    state: RankState
    log: str
    command: str
    devices: Sequence[int]
    usage: UsageCurves
    progress: Curve
    unit: str
    behind: str = ""  # why it is a straggler
    recorded: bool = True  # False: its node did not answer, and there is only what other nodes know of it
    output: float | None = None  # when it printed last; None if that is not known
    last: Sequence[str] = ()
    numbers: Sequence[tuple[float, Metrics]] = ()  # that it had printed by a time, in all attempts

    @property
    def key(self) -> Key:
        return self.role, self.rank

    @property
    def start(self) -> float:
        return self.spans[0].start if self.spans else 0.0

    @property
    def end(self) -> float:
        return self.spans[-1].end if self.spans else 0.0


@dataclass(frozen=True)
class ReportCard:
    """What the report shows of a device of a node: curves of its load and memory."""

    index: int
    busy: Curve  # part of 1
    used: Curve  # bytes
    total: float


@dataclass(frozen=True)
class ReportNode:
    """What the report shows of a node: its state, curves of its processors and memory, and its devices."""

    index: int
    name: str
    state: NodeState
    trouble: NodeTrouble  # see ReportModel.clean
    cores: int
    total: float
    busy: Curve  # parts of 1
    used: Curve
    cards: Sequence[ReportCard]


@dataclass(frozen=True)
class ReportModel:
    """All that the report shows of a job, masked and sanitized except for `news` and the troubles of `nodes`: see `clean`."""

    job: str
    state: JobState
    mode: str
    owner: str
    created: float
    began: float  # seconds since the epoch
    length: float
    attempts: int
    policy: Mapping[str, Any]
    outcome: Outcome | None
    culprit: Key | None
    headline: Sequence[Key]  # the culprit and those with the same error, or the ranks of a lost node
    victims: Sequence[Key]
    last_lines: Sequence[str]  # the culprit's last lines
    nodes: Sequence[ReportNode]
    ranks: Sequence[RankReport]
    news: Sequence[tuple[float, News]]
    notes: Sequence[str] = ()
    container: JobContainer | None = None
    epochs: Sequence[EpochChange] = ()  # of an elastic job
    stacks: Sequence[StackGroup] = ()  # the newest ones that were taken since no rank made progress
    clean: Hide = harmless  # masks and sanitizes the sentences about `news` and the troubles of `nodes`

    def rank(self, key: Key) -> RankReport | None:
        return next((rank for rank in self.ranks if rank.key == key), None)

    @property
    def restarts(self) -> Sequence[float]:
        """When each attempt but the first began, by the first start of a rank in it."""
        starts = sorted(((span.attempt, span.start) for rank in self.ranks for span in rank.spans), reverse=True)
        return list({attempt: start for attempt, start in starts if attempt}.values())

    def name(self, node: int) -> str:
        return next((one.name for one in self.nodes if one.index == node), f"node {node}")


def _shown_epoch(epoch: EpochChange, clean: Hide) -> EpochChange:
    """Return an epoch whose texts of nodes and programs have no secrets and control characters."""
    return epoch._replace(cause=clean(epoch.cause), left=tuple((node, clean(why)) for node, why in epoch.left))


def build_report_model(
    status: JobStatus, answers: Answers, hide: Hide, notes: Sequence[str] = (), rows: Sequence[MetricsRow] = ()
) -> ReportModel:
    """Build the model of the report from the status and the nodes' answers.

    Its times begin with the first event of any node, and end with the last one, or, while the job runs, with the answers.
    hide: replaces secrets in a text. notes: further notes for the page, such as nodes that did not answer. rows: the numbers
    that ranks have printed.
    """

    def clean(text: str) -> str:
        return harmless(hide(text))

    times = [float(event["t"]) for answer in answers.values() for event in answer["events"]]
    began = min(times, default=status.created)
    over = status.outcome is not None or status.state is JobState.LOST
    last = max(times, default=began) if over else max(float(answer["now"]) for answer in answers.values())
    tails = {(str(role), int(rank)): str(text) for a in answers.values() for role, rank, text in a["tails"]}
    known = {(str(r["role"]), int(r["rank"])): r for answer in answers.values() for r in answer["ranks"]}
    plans = {(str(p["role"]), int(p["rank"])): p for a in answers.values() for p in a["plan"].get("processes", ())}
    lives = _spans_of_ranks(status, answers, began, last)
    printed = grouped((row.key, (row.t - began, row.numbers)) for row in sorted(rows, key=lambda row: row.t))
    ranks = [
        replace(
            _rank_report(status, process, known.get(key), plans.get(key), began, clean),
            spans=lives.get(key, ()),
            numbers=printed.get(key, ()),
            recorded=process.node in answers,
            last=[clean(line) for line in tails[key].removesuffix("\n").split("\n")[-1:]] if tails.get(key) else (),
        )
        for key, process in sorted(status.processes.items(), key=lambda item: (item[0][0] != "trainer", item[0]))
    ]
    there = [rank for rank in ranks if rank.spans and rank.state is not RankState.LOST]
    behind = find_stragglers([_build_pace(rank, known.get(rank.key)) for rank in there])
    samples = (read(ProcessSample, one) for answer in answers.values() for one in answer["stacks"][1])
    outcome, container = status.outcome, container_of(event for a in answers.values() for event in a["events"])
    guilty = news.first_culprit(status, outcome) if outcome else None
    return ReportModel(
        job=status.job,
        state=status.state,
        mode=status.mode,
        owner=clean(status.owner),
        created=status.created,
        began=began,
        length=max(last - began, 1.0),
        attempts=status.attempt + 1,
        policy=next((a["plan"]["policy"] for a in answers.values() if a["plan"]), {}),
        outcome=outcome._replace(reason=clean(outcome.reason)) if outcome else None,
        culprit=(guilty.role, guilty.rank) if guilty else None,
        headline=_headline(status),
        victims=outcome.victims if outcome and outcome.state in (JobState.FAILED, JobState.LOST) else (),
        last_lines=_excerpt_lines(tails.get((guilty.role, guilty.rank), ""), clean) if guilty else (),
        nodes=[_node_report(status, index, answers.get(index), began, clean) for index in sorted(status.nodes)],
        ranks=[replace(rank, behind=behind.get(rank.key, "")) for rank in ranks],
        news=[(news.t - began, news) for news in _replay_news(answers)],
        epochs=[_shown_epoch(epoch, clean) for epoch in status.epochs],
        notes=[clean(note) for note in (*notes, *_clock_notes(status, answers))],
        stacks=gather(samples),
        container=container and JobContainer(*map(clean, container)),
        clean=clean,
    )


def _headline(status: JobStatus) -> Sequence[Key]:
    """Return the processes with the error of the first failure, else the culprits of the outcome; () without an outcome."""
    outcome = status.outcome
    groups = news.failed_by_themselves(status, outcome) if outcome else []
    return [process.key for process in groups[0]] if groups else outcome.culprits if outcome else ()


def _excerpt_lines(text: str, clean: Hide) -> list[str]:
    """Return the last traceback or the last lines of a log, without secrets and control characters."""
    return [clean(line) for line in excerpt(text.removesuffix("\n").split("\n"), _TAIL)] if text else []


# -- lives --


def _job_start(status: JobStatus, process: ProcessStatus, began: float) -> float:
    """Return when the job began by the clock of a process's node: `began` less the skew of that clock."""
    return began - status.nodes[process.node].skew


def _spans_of_ranks(status: JobStatus, answers: Answers, began: float, last: float) -> dict[Key, list[Span]]:
    """Map each rank to its spans, in seconds since `began`: by the records of its node, if that has answered.

    Else a lost rank has one span, from its last output to its loss, by the records of other nodes; another rank is left out.
    last: the end of the report.
    """
    found: dict[Key, list[Span]] = {}
    for number in sorted(status.attempts):
        for key, process in status.attempts[number].ranks.items():
            if process.node in answers:
                newest = status.processes.get(key) is process
                spans = _spans_of_attempt(status, process, answers, began, last if newest else None)
                found.setdefault(key, []).extend(spans)
    for key, process in status.processes.items():
        if process.state is RankState.LOST and key not in found:  # from its last output until it was given up
            start = _job_start(status, process, began)
            end = max(process.since - start, 0.0)
            output = process.output - start if process.output else end
            found[key] = [Span(min(max(output, 0.0), end), end, RankState.LOST, process.attempt)]
    return found


def _spans_of_attempt(
    status: JobStatus, process: ProcessStatus, answers: Answers, began: float, last: float | None
) -> list[Span]:
    """Convert the states of one attempt of a rank to spans, in seconds since the job began.

    The last span of a rank that has not ended goes to the end of the report, and is LOST if its node has no supervisor. last:
    that end; None for an attempt after which the rank has started again.
    """
    start = _job_start(status, process, began)
    states = [(t - start, state) for t, state in process.states]
    if states[-1][1].alive:
        supervised = answers[process.node]["supervised"]
        if process.state is RankState.LOST:
            states.append((process.since - start, RankState.LOST))
        elif last is not None:
            states.append((last - began, RankState.RUNNING if supervised else RankState.LOST))
    pairs = zip(states, states[1:])
    return [Span(t, max(end, t), state if then.alive else then, process.attempt) for (t, state), (end, then) in pairs]


# -- ranks and nodes --


def _rank_report(
    status: JobStatus, process: ProcessStatus, known: RankCurve | None, plan: RankPlan | None, began: float, clean: Hide
) -> RankReport:
    """Build the report of a rank, without the spans, the last line and what build_report_model() adds besides."""
    rows = [(row[0] - began, *row[1:]) for row in known["rows"]] if known else []
    progress, unit = progress_curve([(t - began, epoch, step) for t, epoch, step in known["progress"]] if known else [])
    # The kernel's counters at the ends of a rank are exact, also if it lived for less than one sample.
    attempts = [attempt.ranks[process.key] for attempt in status.attempts.values() if process.key in attempt.ranks]
    output = process.output - _job_start(status, process, began) if process.output else None
    how = "" if process.code is None else clean(describe_exit(process.code, process.signal, process.note))
    if process.state in (RankState.LOST, RankState.UNKNOWN):
        step = f"{process.step:,.0f}" if process.step is not None else "unknown"
        how = f"last step {step}, last output {'unknown' if output is None else f'+{output:.2f} s'}"
    return RankReport(
        role=process.role,
        rank=process.rank,
        node=process.node,
        spans=(),
        how=how,
        state=process.state,
        log=process.log,
        command=clean(plan["command"] if plan else ""),
        devices=plan["devices"] if plan else (),
        usage=UsageCurves(
            cpu=max(rows[-1][1] if rows else 0.0, sum(one.cpu for one in attempts)),
            memory=max([0.0, *(row[2] for row in rows), *(one.memory for one in attempts)]),
            cores=rates(rows),
            resident=[(row[0], row[2]) for row in rows],
        ),
        progress=progress,
        unit=unit,
        output=output,
    )


def progress_curve(rows: Sequence[tuple[float, float | None, float | None]]) -> tuple[Curve, str]:
    """Convert (time, epoch, step) to a curve and its unit: "step", or "epoch" if there are no steps or they begin anew.

    An epoch has its steps as a fraction. ((), "") if there are no epochs either, or they fall.
    """
    steps = [(t, step) for t, _, step in rows if step is not None]
    if steps and _never_falls(steps):
        return steps, "step"
    most = max((step for _, step in steps), default=0.0)
    epochs = [(t, epoch + (step or 0.0) / (most + 1)) for t, epoch, step in rows if epoch is not None]
    return (epochs, "epoch") if epochs and _never_falls(epochs) else ((), "")


def _never_falls(curve: Curve) -> bool:
    """Check that the values of a curve never fall."""
    return all(a[1] <= b[1] for a, b in zip(curve, curve[1:]))


def _build_pace(rank: RankReport, known: RankCurve | None) -> RankPace:
    """Build the record by which find_stragglers() compares a rank: times, progress, mean load and size of log.

    The times and the load are those of its last attempt.
    """
    attempt = rank.spans[-1].attempt
    start = min(span.start for span in rank.spans if span.attempt == attempt)
    cores = [value for t, value in rank.usage.cores if t >= start]
    mean = sum(cores) / len(cores) if len(cores) > 1 else None
    size = known["log_size"] if known else 0
    return RankPace(rank.role, rank.rank, start, rank.end, rank.progress, rank.unit, mean, size)


def _node_report(status: JobStatus, index: int, answer: ReportAnswer | None, began: float, clean: Hide) -> ReportNode:
    """Build the report of a node: state, and curves of its processors, memory and devices, empty if it did not answer."""
    known = status.nodes[index]
    machine: MachineCurve = answer["machine"] if answer else {"cores": 0, "total": 0, "rows": []}
    rows = [(row[0] - began, *row[1:]) for row in machine["rows"]]
    cores, total = max(machine["cores"], 1), max(machine["total"], 1)
    cards = []
    for card in answer["cards"] if answer else ():
        loads = [(t - began, load / 100) for t, load, _ in card["rows"]]
        sizes = [(t - began, size) for t, _, size in card["rows"]]
        cards.append(ReportCard(int(card["index"]), loads, sizes, float(card["total"])))
    busy = [(t, rate / cores) for t, rate in rates(rows)]
    used = [(row[0], row[2] / total) for row in rows]
    name = clean(status.name(index))
    return ReportNode(index, name, known.state, known.trouble, machine["cores"], machine["total"], busy, used, cards)


def _clock_notes(status: JobStatus, answers: Answers) -> list[str]:
    """Return a sentence for each node whose clock differs from the median by more than _SKEW seconds.

    All nodes were asked at the same moment, so the times of their answers show the difference.
    """
    clocks = sorted(float(answer["now"]) for answer in answers.values())
    middle = clocks[len(clocks) // 2] if clocks else 0.0
    return [
        f"the clock of {status.nodes[index].name} differs by {float(answer['now']) - middle:+.0f} s now: its times here may too"
        for index, answer in answers.items()
        if abs(float(answer["now"]) - middle) > _SKEW
    ]


def _replay_news(answers: Answers) -> list[News]:
    """Return the news that a follower would have got: the events of all nodes are replayed in the order of their times."""
    watch, events, items = JobView(frozenset(answers)), [], []
    for node in sorted(answers):
        # A clock may be set back.
        times = itertools.accumulate((float(event["t"]) for event in answers[node]["events"]), max)
        events += [(t, node, number) for number, t in enumerate(times)]
    for t, node, number in sorted(events):
        event = answers[node]["events"][number]
        frame: EventsFrame = {"type": "events", "node": node, "at": number, "events": [event]}
        items += watch.take(node, frame, b"", t)
    return [item for item in [*items, *watch.take_rest()] if isinstance(item, News)]
