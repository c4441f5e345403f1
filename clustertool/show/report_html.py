"""The report page is one HTML file about one job that needs no other file, network, script or font.

The culprits and the slow ranks come first. The policy in its head forbids the browser to fetch or run anything.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from html import escape
from importlib.resources import files
from math import isfinite
from operator import itemgetter
from statistics import median

from clustertool import __version__
from clustertool.model.config.folded_names import fold, grouped, ranges
from clustertool.model.hints import fill_program
from clustertool.model.job.state_names import JobState, NodeState, RankState
from clustertool.model.quantities import count, human_bytes, human_seconds
from clustertool.model.roles import role_name
from clustertool.show.job_text import news_text, ranks_text, role_counts, trouble_text
from clustertool.show.program_name import commanded
from clustertool.show.stack_view import stack_lines
from clustertool.watch.report_model import RankReport, ReportModel, ReportNode, Span
from clustertool.watch.straggler import RULES

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_ROWS = 60  # of the timeline; more are folded
_NODES = 12  # with open curves; more are folded, except those with a finding
_WORDY = 12  # percent of the timeline that a bar needs for a label
_MOST_NEWS = 40  # sentences of what happened
_QUIET = 5.0  # seconds without output that are reported
_LISTED = 6  # stragglers listed at the top, and last lines
_LEAST = 0.1  # least cores of a chart's scale: below that, single clock ticks would fill the chart
_GOING = (JobState.STARTING, JobState.RUNNING)
Child = object  # Html, text, a number, None, or a list of these
Curve = Sequence[tuple[float, float]]
_CHART_WIDTH, _CHART_HEIGHT = 1000, 100
_CHART_FULL = 95  # of the height, so that the highest value does not lie on the frame
_CROWD = 24  # lines, over which all that are not special become a band
_BAND_PLACES = 100  # of a band
_TICK_STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400)


def page(story: ReportModel, made: float) -> str:
    """Build the HTML file of a report. made: when it is made, in seconds since the epoch."""
    style = files("clustertool.show").joinpath("report.css").read_text(encoding="utf-8")
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><link rel="icon" href="data:,">'),
        Html('<meta name="color-scheme" content="light dark">'),
        tag("title", f"job {story.job}: {story.state}"),
        Html(f"<style>{style}</style>"),
    )
    top = tag("div", _verdict_section(story), _stragglers_section(story), class_="top")
    life = (_notes_section, _stacks_section, _numbers_section, _timeline_section, _events_section)
    tables = (_nodes_section, _epochs_section, _processes_section, _plan_section)
    main = tag("main", top, *(section(story) for section in (*life, *tables)), _explanations())
    footer = tag("footer", f"clustertool {__version__}, {_date(made)}")
    return f"<!doctype html>\n{tag('html', head, tag('body', _page_header(story), main, footer), lang='en')}\n"


# -- the top --


def _page_header(story: ReportModel) -> Html:
    """Build the header of the page: the job, its nodes and processes, its owner, start, duration and attempts."""
    length = f"{'runs for' if story.state in _GOING else 'took'} {human_seconds(story.length)}"
    attempts = count(story.attempts, "attempt") if story.attempts > 1 else ""
    place = [story.mode, count(len(story.nodes), "node"), _roles(story), f"owner {story.owner}"]
    facts = [*place, f"began {_date(story.began)}", length, attempts]
    return tag("header", tag("h1", "job ", tag("code", story.job)), tag("p", " · ".join(filter(None, facts))))


def _roles(story: ReportModel) -> str:
    return role_counts([rank.role for rank in story.ranks])


def _verdict_section(story: ReportModel) -> Html:
    """Build the section about the end: outcome, first failure with its last lines, victims; without an end ranks by state."""
    outcome, state = story.outcome, story.state
    title = "Timed out" if state is JobState.TIMEOUT else state.capitalize()
    parts: list[Html] = [tag("h2", tag("span", title, class_=f"badge {state}"), _headline(story))]
    if outcome is None:
        return tag("section", *parts, tag("p", _rank_states(story)), _last_lines(story), class_=f"verdict {state}")
    culprit = story.rank(story.culprit) if story.culprit else None
    # The headline has all of the reason then.
    alone = len(outcome.culprits) == 1 + len(outcome.followed) and state is JobState.FAILED
    named = alone and culprit is not None and culprit.state is RankState.FAILED
    code = f"Exit code {outcome.code} ({'the job’s own' if outcome.source == 'job' else 'given by the tool'})"
    parts.append(tag("p", None if named else f"{outcome.reason}. ", f"{code} after {human_seconds(story.length)}."))
    if culprit is not None:
        where = tag("small", f"{story.name(culprit.node)}, {culprit.log}")
        # The end is what is seen first: the box scrolls from its bottom, by its style alone.
        printed = tag("pre", "\n".join(story.last_lines) if story.last_lines else "(it printed nothing)")
        parts.append(tag("h3", f"Last lines of {_rank_name(culprit)} ", where))
        parts.append(tag("div", printed, class_="log", tabindex=0))
    else:
        parts.append(_last_lines(story))
    if outcome.followed:
        parts.append(tag("p", "Failed after it: ", ranks_text(outcome.followed), class_="victims"))
    if story.victims:
        what = "Stopped by clustertool because of it (victims): "
        parts.append(tag("p", what, ranks_text(story.victims), class_="victims"))
    return tag("section", *parts, class_=f"verdict {state}")


def _headline(story: ReportModel) -> Html:
    """Build the text with the ranks of story.headline, their nodes and how the first one ended; empty without any."""
    guilty = [rank for rank in map(story.rank, story.headline) if rank]
    if not guilty:
        return Html("")
    names = fold(story.name(node) for node in dict.fromkeys(rank.node for rank in guilty))
    first = guilty[0]
    name = _rank_name(first) if len(guilty) == 1 else ranks_text(rank.key for rank in guilty)
    return tag("span", f"{name} on {names}", tag("small", f" {first.how}"), class_="culprit")


def _rank_states(story: ReportModel) -> str:
    """Count the ranks by state: `3 running, 1 done of 4 ranks`."""
    states = [rank.state for rank in story.ranks]
    found = ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
    return f"{found} of {count(len(states), 'rank')}"


def _last_lines(story: ReportModel) -> Html:
    """Build a list of the last line of the first six trainers that have one, and how many more have; empty without any."""
    trainers = [rank for rank in story.ranks if rank.role == "trainer" and rank.last]
    items = [
        tag("li", tag("b", _rank_name(rank)), f" on {story.name(rank.node)}: ", tag("code", *rank.last))
        for rank in trainers[:_LISTED]
    ]
    if len(trainers) > _LISTED:
        items.append(tag("li", f"and {len(trainers) - _LISTED} more"))
    return tag("div", tag("h3", "Last lines"), tag("ul", *items)) if items else Html("")


def _stragglers_section(story: ReportModel) -> Html:
    """Build the section with the ranks that are behind, the chart of all progress, and of six ranks reasons and last lines.

    Without any such rank it has a sentence instead. A rank that has failed has no last lines here.
    """
    behind = [rank for rank in story.ranks if rank.behind]
    if not behind:
        none = _missing_text("No trainer is behind the others.")
        return _section("Stragglers", none, _progress_chart(story), kind="behind empty")
    items, rest = [], None
    for rank in behind[:_LISTED]:
        silent = _silence_text(rank)
        about = (f" on {story.name(rank.node)}: {rank.behind}", f", {silent}" if silent else None)
        last = [] if rank.how and rank.state is RankState.FAILED else rank.last
        lines = [tag("code", line, class_="last") for line in last]
        items.append(tag("li", tag("b", _rank_name(rank), class_="straggler"), *about, lines))
    if len(behind) > _LISTED:
        more = ranks_text(rank.key for rank in behind[_LISTED:])
        rest = tag("p", f"and {len(behind) - _LISTED} more, marked below: ", more)
    return _section("Stragglers", tag("ul", *items), rest, _progress_chart(story), kind="behind")


def _notes_section(story: ReportModel) -> Html:
    """Build a list of what is wrong with nodes, and the notes of the report; empty without any."""
    troubles = ((node.name, story.clean(trouble_text(node.trouble))) for node in story.nodes)
    notes = [*(f"{name}: {text}" for name, text in troubles if text), *story.notes]
    return tag("section", tag("ul", *(tag("li", note) for note in notes)), class_="notes") if notes else Html("")


def _stacks_section(story: ReportModel) -> Html:
    """Build the section with the stacks that were taken since no rank made progress, equal ones gathered; empty without any."""
    lines = [
        tag("strong" if style == "bold" else "span", story.clean(text), "\n")
        for text, style in stack_lines(story.stacks)
    ]
    return _section("Stacks when no rank made progress", tag("pre", *lines)) if lines else Html("")


# -- the timeline --


def _timeline_section(story: ReportModel) -> Html:
    """Build the section with a bar of states over time for each rank; equal ranks are one row if there are many."""
    rows = []
    for group in folded(story.ranks, story.length, _ROWS):
        first = group[0]  # of several that are alike, its life is drawn
        track = tag("div", *(_span_bar(story, first, span) for span in first.spans), class_="track")
        rows.append(tag("div", _row_label(story, group), track, class_=_row_classes(story, group, "row")))
    states = dict.fromkeys(span.state for rank in story.ranks for span in rank.spans)
    keys = [tag("span", name, class_=f"key {name}") for name in states]
    if any(rank.behind for rank in story.ranks):
        keys.append(tag("span", "straggler", class_="key line-straggler"))
    rows.append(tag("div", tag("div", class_="label"), axis(story.length), class_="row"))
    return _section("Timeline", tag("p", *keys, class_="keys"), tag("div", *rows, class_="timeline"))


def folded(ranks: Sequence[RankReport], length: float, most: int) -> list[list[RankReport]]:
    """Group ranks into rows: one each, or if these are more than `most`, ranks with about the same states and times.

    The times are compared more and more coarsely, at last not at all, until the rows are few enough. length: seconds of the
    job.
    """
    groups = [[rank] for rank in ranks]
    for parts in (400, 100, 20, 0):
        if len(groups) <= most:
            break
        groups = list(grouped((_appearance(rank, length, parts), rank) for rank in ranks).values())
    return groups


def _appearance(rank: RankReport, length: float, parts: int) -> tuple[object, ...]:
    """Return what equal ranks have in common: role, state, whether behind, and spans rounded to 1/`parts` of the length."""
    spans = [(span.state, round(span.start * parts / length), round(span.end * parts / length)) for span in rank.spans]
    return rank.role, rank.state, bool(rank.behind), tuple(spans)


def _row_label(story: ReportModel, group: Sequence[RankReport]) -> Html:
    """Build the label of a row of the timeline: role and ranks, and their nodes."""
    nodes = fold(story.name(rank.node) for rank in group)
    role = role_name(group[0].role)
    name = f"{role} {group[0].rank}" if len(group) == 1 else f"{role}s {ranges(rank.rank for rank in group)}"
    return tag("div", tag("b", name, title=name), tag("span", nodes, title=nodes), class_="label")


def _span_bar(story: ReportModel, rank: RankReport, span: Span) -> Html:
    """Build the bar of a span in the timeline, with its times as a tooltip.

    The last one has a label if the rank failed or was stopped.
    """
    last = span is rank.spans[-1]
    note = rank.how if last and rank.how and span.state in (RankState.FAILED, RankState.STOPPED) else ""
    attempt = f", attempt {span.attempt}" if story.attempts > 1 else ""
    title = f"{_rank_name(rank)}{attempt}: {span.state}, {_moment(span.start)} to {_moment(span.end)}"
    left, width = 100 * span.start / story.length, 100 * (span.end - span.start) / story.length
    side = "" if width > _WORDY else "after" if left + width < 100 - _WORDY else "before"
    label = tag("em", note, class_=side or None) if note else None
    place = f"left:{left:.2f}%;width:{width:.2f}%"
    return tag("i", label, class_=f"span {span.state}", title=f"{title} {note}".strip(), style=place)


def _row_classes(story: ReportModel, group: Sequence[RankReport], name: str) -> str:
    """Choose the CSS classes of a row: `name`, and `failed` if it has a culprit, or `behind` for stragglers."""
    guilty = story.outcome.culprits if story.outcome else ()
    kind = "failed" if any(rank.key in guilty for rank in group) else "behind" if group[0].behind else ""
    return f"{name} {kind}".strip()


def _events_section(story: ReportModel) -> Html:
    """Build the section with the first 40 events and, if the job has ended, its end; empty without any of them."""
    shown = [(_moment(t), story.clean(news_text(news))) for t, news in story.news[:_MOST_NEWS]]
    items = [tag("li", tag("span", moment, class_="when"), " ", text) for moment, text in shown]
    more = len(story.news) - _MOST_NEWS
    rest = _missing_text(f"and {more} more") if more > 0 else None
    if story.outcome is not None:
        end = f" the job has ended: {story.outcome.state}, exit code {story.outcome.code}"
        items.append(tag("li", tag("span", _moment(story.length), class_="when"), end))
    return _section("Events", tag("ul", *items, class_="news"), rest) if items else Html("")


# -- curves --


def _plots(story: ReportModel, ranks: Iterable[RankReport], curve: Callable[[RankReport], Curve]) -> list[Plot]:
    """Build a plot of a curve of each rank; those of the culprit and of stragglers have their own kind."""
    found = []
    for rank in ranks:
        kind = "culprit" if rank.key == story.culprit else "straggler" if rank.behind else ""
        found.append(Plot(curve(rank), f"{_rank_name(rank)} on {story.name(rank.node)}", kind))
    return found


def _progress_chart(story: ReportModel) -> Html:
    """Build the chart of the progress of the ranks with the most frequent unit, steps or epochs; empty without any progress."""
    printing = [rank for rank in story.ranks if rank.progress]
    if not printing:
        return Html("")
    units = [rank.unit for rank in printing]
    unit = max(units, key=units.count)
    lines = _plots(story, (rank for rank in printing if rank.unit == unit), lambda rank: rank.progress)
    drawn = chart(f"{unit} of each rank, from its log", lines, story.length, partial(_amount, unit))
    return Html(drawn + _legend(story))


def _numbers_section(story: ReportModel) -> Html:
    """Build the charts of the loss and the throughput of each rank, in which restarts are marked; empty without any of them.

    The throughput is that of tokens or samples where a rank has printed it, else that of steps.
    """
    drawn: list[Html] = []
    for names in (("loss",), ("tokens_per_second", "samples_per_second", "steps_per_second")):
        for name in names:
            lines = _plots(story, story.ranks, partial(_number_curve, name))
            if any(line.curve for line in lines):
                title = f"{name.replace('_per_second', '/s')} of each rank"
                drawn.append(chart(title, lines, story.length, "{:.4g}".format, 0.0, *story.restarts))
                break
    key = tag("p", tag("span", "restart", class_="key line-restart"), class_="keys") if story.restarts else None
    return _section("Loss and throughput", tag("div", drawn, class_="charts"), key) if drawn else Html("")


def _number_curve(name: str, rank: RankReport) -> Curve:
    """Build the curve of a number that a rank has printed, without values that are NaN or infinite."""
    values = ((t, getattr(numbers, name)) for t, numbers in rank.numbers)
    return [(t, value) for t, value in values if value is not None and isfinite(value)]


def _legend(story: ReportModel) -> Html:
    """Build the legend of charts with the culprit and stragglers; empty if there are none."""
    names: list[Html] = []
    if story.culprit:
        names.append(tag("span", f"first failure: {ranks_text([story.culprit])}", class_="key line-culprit"))
    behind = [rank for rank in story.ranks if rank.behind]
    if behind:
        names.append(tag("span", "straggler: ", ranks_text(rank.key for rank in behind), class_="key line-straggler"))
    names.append(tag("span", "others", class_="key line-others"))
    return tag("p", *names, class_="keys") if len(names) > 1 else Html("")


def _nodes_section(story: ReportModel) -> Html:
    """Build the section with the charts of each node.

    Of more than 12 nodes, all but the first 12 with a finding (lost, unknown, or a rank that failed or is behind) are folded,
    and one more chart has the CPU of all ranks.
    """
    found = {rank.node for rank in story.ranks if rank.behind or rank.state is RankState.FAILED}
    found |= {node.index for node in story.nodes if node.state in (NodeState.LOST, NodeState.UNKNOWN)}
    few = len(story.nodes) <= _NODES
    first = [node for node in story.nodes if few or node.index in found][:_NODES]
    rest = [node for node in story.nodes if node not in first]
    scale = max(_highest(rank.usage.cores for rank in story.ranks), _LEAST)
    memory = _highest(rank.usage.resident for rank in story.ranks)
    parts = [_legend(story), *(_node_part(story, node, scale, memory) for node in first)]
    if rest:
        cores = _plots(story, story.ranks, lambda rank: rank.usage.cores)
        every = chart("CPU of all ranks, cores", cores, story.length, _cores, scale)
        parts.insert(1, tag("div", every, class_="charts"))
        summary = tag("summary", f"{count(len(rest), 'node')} more: {fold(node.name for node in rest)}")
        parts.append(tag("details", summary, *(_node_part(story, node, scale, memory) for node in rest)))
    return _section("Nodes", *parts)


def _highest(curves: Iterable[Curve]) -> float:
    """Return the highest value of curves, 0.0 without any."""
    return max((value for curve in curves for _, value in curve), default=0.0)


def _node_part(story: ReportModel, node: ReportNode, scale: float, memory: float) -> Html:
    """Build the part about one node: its size, state and ranks, and charts of CPU, memory and devices.

    scale, memory: the top of the charts of CPU (cores) and of memory (bytes).
    """
    ranks = [rank for rank in story.ranks if rank.node == node.index]
    cores = _plots(story, ranks, lambda rank: rank.usage.cores)
    resident = _plots(story, ranks, lambda rank: rank.usage.resident)
    machine = [Plot(node.busy, "CPU", "cpu"), Plot(node.used, "memory", "used")]
    charts = [
        chart("CPU of each rank, cores", cores, story.length, _cores, scale),
        chart("Memory of each rank", resident, story.length, human_bytes, memory),
        chart("Machine: CPU, memory (dashed)", machine, story.length, _percent, 1.0),
        *_card_charts(story, node),
    ]
    if not any(line.curve for line in (*resident, *machine)):
        charts = [_missing_text("Nothing recorded here.")]
    size = f"{count(node.cores, 'core')}, {human_bytes(node.total)}" if node.cores else ""
    about = " · ".join(filter(None, [size, node.state, ranks_text(rank.key for rank in ranks) or "no ranks"]))
    return tag("article", tag("h3", node.name, " ", tag("small", about)), tag("div", *charts, class_="charts"))


def _card_charts(story: ReportModel, node: ReportNode) -> list[Html]:
    """Build the charts of a node's devices: part of the time in which they are busy, and memory; [] without any."""
    if not node.cards:
        return []
    busy = [Plot(card.busy, f"device {card.index}") for card in node.cards]
    used = [Plot(card.used, f"device {card.index}") for card in node.cards]
    total = max(card.total for card in node.cards)
    return [
        chart("Devices: busy", busy, story.length, _percent, 1.0),
        chart("Devices: memory", used, story.length, human_bytes, total),
    ]


# -- tables --


def _epochs_section(story: ReportModel) -> Html:
    """Build the table of the epochs of an elastic job, with their nodes and what each change has cost.

    Empty for less than two epochs.
    """
    if len(story.epochs) < 2:
        return Html("")
    heads = ("epoch", "began", "nodes", "left", "joined", "cost", "cause")
    rows = []
    for epoch in story.epochs:
        left = ", ".join(f"{story.name(node)} ({why})" for node, why in epoch.left)
        joined = fold(story.name(node) for node in epoch.joined) if epoch.attempt else ""
        nodes, began = fold(story.name(node) for node in epoch.nodes), _moment(max(0.0, epoch.t - story.began))
        cost = f"{epoch.seconds:.1f} s" if epoch.seconds else ""
        cells = (str(epoch.attempt), began, nodes, left, joined, cost, epoch.cause)
        rows.append(tag("tr", *(tag("td", cell or "-") for cell in cells)))
    body = tag("tbody", *rows)
    return _section("Epochs", tag("table", tag("thead", tag("tr", *(tag("th", name) for name in heads))), body))


def _processes_section(story: ReportModel) -> Html:
    """Build the table of processes: start, end and how they ended, last output, CPU, memory, progress, devices."""
    columns = ("process", "node", "started", "ended", "end", "last output", "CPU", "memory", "progress", "devices")
    rows = [_process_row(story, rank) for rank in story.ranks]
    table = tag("table", tag("thead", tag("tr", *(tag("th", column) for column in columns))), tag("tbody", *rows))
    wide = tag("div", table, class_="wide")
    if len(rows) > _ROWS:
        wide = tag("details", tag("summary", count(len(rows), "rank")), wide)
    return _section("Starts and ends", wide)


def _process_row(story: ReportModel, rank: RankReport) -> Html:
    """Build the row of a process in the table of _processes_section()."""
    ended = bool(rank.how) or not (rank.state.alive or rank.state is RankState.WAITING)
    progress = f"{rank.unit} {_amount(rank.unit, rank.progress[-1][1])}" if rank.progress else ""
    number = {"class_": "num"}
    return tag(
        "tr",
        tag("td", tag("b", _rank_name(rank)), class_="name"),
        tag("td", story.name(rank.node), class_="name"),
        tag("td", "unknown" if not rank.recorded else _moment(rank.start) if rank.spans else "never", **number),
        tag("td", _moment(rank.end) if rank.spans and ended else "", **number),
        tag(
            "td",
            tag("span", rank.state, class_=f"key {rank.state}"),
            f" {rank.how}" if rank.state is not RankState.DONE else None,
            f" {_silence_text(rank)}" if _silence_text(rank) else None,
            f" behind: {rank.behind}" if rank.behind else None,
        ),
        tag("td", "" if rank.output is None else _moment(rank.output), **number),
        tag("td", human_seconds(rank.usage.cpu) if rank.recorded else "", **number),
        tag("td", human_bytes(rank.usage.memory) if rank.recorded else "", **number),
        tag("td", progress, **number),
        tag("td", ",".join(map(str, rank.devices))),
        class_=_row_classes(story, [rank], "") or None,
    )


def _silence_text(rank: RankReport) -> str:
    """Describe for how long a rank that lives or was stopped had printed nothing at the end; "" below five seconds."""
    quiet = 0.0 if rank.output is None else rank.end - rank.output
    shown = quiet >= _QUIET and (rank.state.alive or rank.state is RankState.STOPPED)
    return f"no output for {human_seconds(quiet)}" if shown else ""


def _plan_section(story: ReportModel) -> Html:
    """Build the section about the plan: facts about the job, its policy, and the commands of ranks."""
    commands = grouped((rank.command, rank.key) for rank in story.ranks if rank.command)
    policy = ((name, f"{value:g}" if isinstance(value, float) else value) for name, value in story.policy.items())
    facts = [
        ("job", story.job),
        ("mode", story.mode),
        ("owner", story.owner),
        ("created", _date(story.created)),
        ("nodes", fold(node.name for node in story.nodes)),
        ("processes", _roles(story)),
        ("policy", ", ".join(f"{name} {value}" for name, value in policy)),
        *([("container", story.container.text)] if story.container else []),
    ]
    rows = [*facts, *((f"command of {ranks_text(keys)}", tag("code", command)) for command, keys in commands.items())]
    items = [tag("div", tag("dt", name), tag("dd", value)) for name, value in rows]
    return _section("Plan", tag("dl", *items))


def _explanations() -> Html:
    """Build the section with the rules about stragglers and the meaning of times and values."""
    explanations = [
        *RULES,
        "Times are seconds since the job began, by each node's own clock; bars have the colour of how they ended.",
        "CPU and memory are of a rank with all its descendants; pages that several of them share count in each. The memory in "
        "the table is the peak as the kernel counted it, which is more than the samples of the curves where it was short.",
        "Values of the job's SECRETS are shown as *** where the machine that made this page knew them.",
    ]
    return _section("Notes", tag("ul", *(tag("li", text) for text in explanations)), kind="reading")


# -- parts and texts --


def _section(title: str, *children: Child, kind: str | None = None) -> Html:
    return tag("section", tag("h2", title), *children, class_=kind)


def _missing_text(text: str) -> Html:
    """Build a paragraph with a text for missing values."""
    return tag("p", text, class_="none")


def _rank_name(rank: RankReport) -> str:
    """Format the role and rank of a process: `trainer 3`."""
    return f"{role_name(rank.role)} {rank.rank}"


def _moment(t: float) -> str:
    """Format seconds since the job began: `+3.25 s`, from 100 s on `+1 min 40 s`."""
    return f"+{t:.2f} s" if t < 100 else f"+{human_seconds(t)}"


def _amount(unit: str, value: float) -> str:
    """Format a step as a whole number, and a value of another unit with two decimals."""
    return f"{value:,.0f}" if unit == "step" else f"{value:.2f}"


def _cores(value: float) -> str:
    """Format a number of cores: with two digits below 10, else as a whole number."""
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _date(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(t))


# -- elements of HTML --------------------------------------------------------------------------------------------------


class Html(str):
    """Markup that was made here. A value that is not Html is text and is escaped: the output of a program is never markup."""

    __slots__ = ()


def tag(name: str, *children: Child, **attributes: object) -> Html:
    """Build an element of HTML: tag("td", 3, class_="num") is <td class="num">3</td>.

    Attributes that are None are left out, `_` in a name is written as `-`. Children that are not Html are escaped.
    """
    given = ((key.rstrip("_").replace("_", "-"), value) for key, value in attributes.items() if value is not None)
    inside = "".join(f' {key}="{escape(str(value))}"' for key, value in given)
    return Html(f"<{name}{inside}>{_escaped(children)}</{name}>")


def _escaped(children: Child) -> Html:
    """Convert children to HTML: text is escaped, lists are joined, None is empty."""
    if isinstance(children, Html):
        return children
    if children is None:
        return Html("")
    if isinstance(children, (list, tuple)):
        return Html("".join(map(_escaped, children)))
    return Html(escape(fill_program(str(children), commanded())))


# -- charts: inline SVG that scales with the page; labels are HTML, readable on a small screen too ---------------------


@dataclass(frozen=True)
class Plot:
    """A curve of a chart, with its name. `kind`: a CSS class that highlights it; "" is one of many."""

    curve: Curve
    name: str
    kind: str = ""


def chart(
    title: str, lines: Sequence[Plot], end: float, unit: Callable[[float], str], top: float = 0.0, *marks: float
) -> Html:
    """Build a chart of curves from 0 to `end` seconds and from 0 to `top`, or to their highest value if it is 0.

    More than 24 curves without a kind are drawn as a band from the lowest to the highest, with the median. Without any value
    the chart is a text. unit: formats a value. marks: times at which a line is drawn.
    """
    drawn = [line for line in lines if line.curve]
    if not drawn:
        return tag("figure", tag("figcaption", title), tag("p", "nothing recorded", class_="none"), class_="chart")
    top = top or max(value for line in drawn for _, value in line.curve) or 1.0
    plain, special = [line for line in drawn if not line.kind], [line for line in drawn if line.kind]
    shapes = _band(plain, end, top) if len(plain) > _CROWD else [_chart_line(line, end, top) for line in plain]
    shapes += [_chart_line(line, end, top) for line in special]
    shapes += [tag("path", d=f"M{_chart_point(t, 0, end, 1)}V0", class_="line restart") for t in marks]
    box = f"0 0 {_CHART_WIDTH} {_CHART_HEIGHT}"
    svg = tag("svg", *shapes, viewBox=box, preserveAspectRatio="none", role="img", aria_label=title)
    caption = tag("figcaption", title, tag("b", unit(top)))
    return tag("figure", caption, tag("div", svg, class_="plot"), axis(end), class_="chart")


def axis(end: float) -> Html:
    """Build the labels of the times below a chart."""
    marks = [tag("span", human_time(t), style=f"left:{100 * t / end:.2f}%") for t in ticks(end)]
    return tag("div", *marks, class_="axis")


def ticks(end: float, most: int = 6) -> list[float]:
    """Return round times from 0 to almost `end` seconds, at most `most`."""
    step: float = next((step for step in _TICK_STEPS if end / step <= most), 0)
    while not step or end / step > most:
        step = step * 2 if step else _TICK_STEPS[-1]
    return [n * step for n in range(int(0.96 * end / step) + 1)]


def human_time(t: float) -> str:
    """Format the time of a tick: 0, 30 s, 5 min, 2 h, 3 d."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if t >= size and t % size == 0:
            return f"{t / size:.0f} {unit}"
    return human_seconds(t) if t else "0"


def _chart_line(line: Plot, end: float, top: float) -> Html:
    """Build the path of one curve, with its name as a tooltip."""
    points = [_chart_point(t, value, end, top) for t, value in line.curve]
    path = f"M{points[0]}h1" if len(points) == 1 else f"M{points[0]}L{' '.join(points[1:])}"
    return tag("path", tag("title", line.name), d=path, class_=f"line {line.kind}".rstrip())


def _band(lines: Sequence[Plot], end: float, top: float) -> list[Html]:
    """Build the area from the lowest to the highest of many curves, and the line of their median; [] without values."""
    lowest, middle, highest = band([line.curve for line in lines], end)
    if not middle:
        return []
    around = [*highest, *reversed(lowest)]
    outline = "M" + "L".join(_chart_point(t, value, end, top) for t, value in around) + "Z"
    name = f"{len(lines)} lines: lowest to highest, and the median"
    around_all = tag("path", tag("title", name), d=outline, class_="band")
    return [around_all, _chart_line(Plot(middle, "median", "middle"), end, top)]


def band(curves: Sequence[Curve], end: float, places: int = _BAND_PLACES) -> tuple[Curve, Curve, Curve]:
    """Return the curves of the lowest, median and highest value at evenly spaced times.

    A curve counts only from its start to its end.
    """
    found: list[list[tuple[float, float]]] = [[], [], []]
    for place in range(places + 1):
        t = end * place / places
        lasting = [curve for curve in curves if curve[0][0] <= t <= curve[-1][0] + end / places]
        values = [curve[bisect_right(curve, t, key=itemgetter(0)) - 1][1] for curve in lasting]
        if values:
            for part, value in zip(found, (min(values), median(values), max(values))):
                part.append((t, value))
    return found[0], found[1], found[2]


def _chart_point(t: float, value: float, end: float, top: float) -> str:
    """Format the place of a value in the chart, as "x y"."""
    x = min(max(t / end, 0.0), 1.0) * _CHART_WIDTH
    y = _CHART_HEIGHT - min(max(value / top, 0.0), 1.0) * _CHART_FULL
    return f"{x:.0f} {y:.1f}"
