"""The report page is one HTML file about one job that needs no other file, network, script or font.

The culprits and the slow ranks come first. The policy in its head forbids the browser to fetch or run anything.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from functools import partial
from importlib.resources import files

from clustertool import __version__
from clustertool.model.job.outcome import Key
from clustertool.model.job.state_names import JobState, NodeState, RankState
from clustertool.model.quantities import human_bytes, human_seconds
from clustertool.model.roles import role_name
from clustertool.show.markup import Html, tag
from clustertool.show.outcome_view import ranges
from clustertool.show.report_charts import Curve, Plot, axis, chart
from clustertool.show.table import count, fold
from clustertool.watch.report_model import RankReport, ReportModel, ReportNode, Span
from clustertool.watch.straggler import RULES

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
_ROWS = 60  # of the timeline; more are folded
_NODES = 12  # with open curves; more are folded, except those with a finding
_WORDY = 12  # percent of the timeline that a bar needs for a label
_MOST_NEWS = 40  # sentences of what happened
_QUIET = 5.0  # seconds without output that are reported
_LISTED = 6  # stragglers listed at the top, and last lines
_LEAST = 0.1  # least cores of a chart's scale: below that, clock ticks look like work
_GOING = (JobState.STARTING, JobState.RUNNING)
_TITLES = {
    "succeeded": "Succeeded",
    "failed": "Failed",
    "lost": "Lost",
    "stopped": "Stopped",
    "timeout": "Timed out",
    "running": "Running",
    "starting": "Starting",
}


def page(story: ReportModel, made: float) -> str:
    """The whole file. `made`: the moment it is made, seconds since the epoch."""
    head = tag(
        "head",
        Html('<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}"><link rel="icon" href="data:,">'),
        Html('<meta name="color-scheme" content="light dark">'),
        tag("title", f"job {story.job}: {story.state}"),
        Html(f"<style>{_style()}</style>"),
    )
    main = tag(
        "main",
        tag("div", _verdict(story), _stragglers(story), class_="top"),
        _notes(story),
        _timeline(story),
        _news(story),
        _nodes(story),
        _processes(story),
        _plan(story),
        _reading(),
    )
    footer = tag("footer", f"clustertool {__version__}, {_date(made)}")
    return f"<!doctype html>\n{tag('html', head, tag('body', _header(story), main, footer), lang='en')}\n"


def _style() -> str:
    return files("clustertool.show").joinpath("report.css").read_text(encoding="utf-8")


# -- the top --


def _header(story: ReportModel) -> Html:
    facts = [
        story.mode,
        count(len(story.nodes), "node"),
        _roles(story),
        f"owner {story.owner}",
        f"began {_date(story.began)}",
        f"{'runs for' if story.state in _GOING else 'took'} {human_seconds(story.length)}",
    ]
    if story.attempts > 1:
        facts.append(count(story.attempts, "attempt"))
    return tag("header", tag("h1", "job ", tag("code", story.job)), tag("p", " · ".join(filter(None, facts))))


def _roles(story: ReportModel) -> str:
    roles = [rank.role for rank in story.ranks]
    return ", ".join(count(roles.count(role), role_name(role)) for role in dict.fromkeys(roles))


def _verdict(story: ReportModel) -> Html:
    outcome, state = story.outcome, story.state
    parts: list[Html] = [tag("h2", tag("span", _TITLES.get(state, state), class_=f"badge {state}"), _headline(story))]
    if outcome is None:
        return tag("section", *parts, tag("p", _now(story)), _last_lines(story), class_=f"verdict {state}")
    culprit = story.rank(story.culprit) if story.culprit else None
    named = culprit is not None and len(outcome.culprits) == 1 and culprit.how in outcome.reason
    code = f"Exit code {outcome.code} ({'the job’s own' if outcome.source == 'job' else 'given by the tool'})"
    parts.append(tag("p", None if named else f"{outcome.reason}. ", f"{code} after {human_seconds(story.length)}."))
    if culprit is not None:
        parts.append(
            tag("h3", f"Last lines of {_name(culprit)} ", tag("small", f"{story.name(culprit.node)}, {culprit.log}"))
        )
        parts.append(_log(story.last_lines))
    else:
        parts.append(_last_lines(story))
    if story.victims:
        parts.append(tag("p", "Stopped because of it (victims): ", _ranks(story.victims), class_="victims"))
    return tag("section", *parts, class_=f"verdict {state}")


def _headline(story: ReportModel) -> Html:
    """The culprit by name."""
    outcome = story.outcome
    guilty = [rank for rank in map(story.rank, outcome.culprits if outcome else ()) if rank]
    if not guilty:
        return Html("")
    names = fold(story.name(node) for node in dict.fromkeys(rank.node for rank in guilty))
    first = guilty[0]
    name = _name(first) if len(guilty) == 1 else _ranks(rank.key for rank in guilty)
    return tag("span", f"{name} on {names}", tag("small", f" {first.how}"), class_="culprit")


def _now(story: ReportModel) -> str:
    states = [rank.state for rank in story.ranks]
    return (
        ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))
        + f" of {count(len(states), 'rank')}"
    )


def _log(lines: Sequence[str]) -> Html:
    """The end is what is seen first: the box scrolls from its bottom, by its style alone."""
    return tag("div", tag("pre", "\n".join(lines) if lines else "(it printed nothing)"), class_="log", tabindex=0)


def _last_lines(story: ReportModel) -> Html:
    """Without a culprit: the last lines of the first trainers."""
    trainers = [rank for rank in story.ranks if rank.role == "trainer" and rank.last][:_LISTED]
    items = [
        tag("li", tag("b", _name(rank)), f" on {story.name(rank.node)}: ", tag("code", *rank.last)) for rank in trainers
    ]
    return tag("div", tag("h3", "Last lines"), tag("ul", *items)) if items else Html("")


def _stragglers(story: ReportModel) -> Html:
    """Ranks that are behind, and the progress of all: diverging lines show a slow rank."""
    behind = [rank for rank in story.ranks if rank.behind]
    if not behind:
        none = tag("p", "No trainer is behind the others.", class_="none")
        return tag("section", tag("h2", "Stragglers"), none, _progress(story), class_="behind empty")
    items = [
        tag(
            "li",
            tag("b", _name(rank), class_="straggler"),
            f" on {story.name(rank.node)}: {rank.behind}",
            f", {_quiet(rank)}" if _quiet(rank) else None,
            [
                tag("code", line, class_="last")
                for line in rank.last
                if not rank.how or rank.state is not RankState.FAILED
            ],
        )
        for rank in behind[:_LISTED]
    ]
    more = len(behind) - _LISTED
    rest = (
        tag("p", f"and {more} more, marked below: ", _ranks(rank.key for rank in behind[_LISTED:]))
        if more > 0
        else None
    )
    return tag("section", tag("h2", "Stragglers"), tag("ul", *items), rest, _progress(story), class_="behind")


def _notes(story: ReportModel) -> Html:
    lost = [f"{node.name}: {node.why}" for node in story.nodes if node.why]
    notes = [*lost, *story.notes]
    return tag("section", tag("ul", *(tag("li", note) for note in notes)), class_="notes") if notes else Html("")


# -- the timeline --


def _timeline(story: ReportModel) -> Html:
    rows = [
        tag(
            "div",
            tag("div", *_label(story, group), class_="who"),
            _track(story, group),
            class_=_mark(story, group, "row"),
        )
        for group in folded(story.ranks, story.length, _ROWS)
    ]
    states = dict.fromkeys(span.state for rank in story.ranks for span in rank.spans)
    keys = [tag("span", name, class_=f"key {name}") for name in states]
    if any(rank.behind for rank in story.ranks):
        keys.append(tag("span", "straggler", class_="key line-straggler"))
    return tag(
        "section",
        tag("h2", "Timeline"),
        tag("p", *keys, class_="keys"),
        tag("div", *rows, tag("div", tag("div", class_="who"), axis(story.length), class_="row"), class_="timeline"),
    )


def folded(ranks: Sequence[RankReport], length: float, most: int) -> list[list[RankReport]]:
    """If there are more than `most` ranks, those with equal lives share a row: first those that differ by less than a pixel."""
    groups = [[rank] for rank in ranks]
    for parts in (400, 100, 20, 0):
        if len(groups) <= most:
            break
        alike: dict[object, list[RankReport]] = {}
        for rank in ranks:
            alike.setdefault(_appearance(rank, length, parts), []).append(rank)
        groups = list(alike.values())
    return groups


def _appearance(rank: RankReport, length: float, parts: int) -> object:
    spans = [(span.state, round(span.start * parts / length), round(span.end * parts / length)) for span in rank.spans]
    return rank.role, rank.state, bool(rank.behind), tuple(spans)


def _label(story: ReportModel, group: Sequence[RankReport]) -> list[Html]:
    nodes = [story.name(node) for node in dict.fromkeys(rank.node for rank in group)]
    role = role_name(group[0].role)
    name = f"{role} {group[0].rank}" if len(group) == 1 else f"{role}s {ranges(rank.rank for rank in group)}"
    return [tag("b", name, title=name), tag("span", fold(nodes), title=fold(nodes))]


def _track(story: ReportModel, group: Sequence[RankReport]) -> Html:
    """One rank's life, and of several alike the first one's."""
    first = group[0]
    spans = [_span(story, first, span) for span in first.spans]
    return tag("div", *spans, class_="track")


def _span(story: ReportModel, rank: RankReport, span: Span) -> Html:
    last = span is rank.spans[-1]
    note = rank.how if last and rank.how and span.state in (RankState.FAILED, RankState.STOPPED) else ""
    attempt = f", attempt {span.attempt}" if story.attempts > 1 else ""
    title = f"{_name(rank)}{attempt}: {span.state}, {_moment(span.start)} to {_moment(span.end)}"
    left, width = 100 * span.start / story.length, 100 * (span.end - span.start) / story.length
    side = "" if width > _WORDY else "after" if left + width < 100 - _WORDY else "before"
    return tag(
        "i",
        tag("em", note, class_=side or None) if note else None,
        class_=f"span {span.state}",
        title=f"{title} {note}".strip(),
        style=f"left:{left:.2f}%;width:{width:.2f}%",
    )


def _mark(story: ReportModel, group: Sequence[RankReport], name: str) -> str:
    """The mark of a row: culprits (no victims), and stragglers."""
    guilty = story.outcome.culprits if story.outcome else ()
    kind = "failed" if any(rank.key in guilty for rank in group) else "behind" if group[0].behind else ""
    return f"{name} {kind}".strip()


def _news(story: ReportModel) -> Html:
    items = [tag("li", tag("span", _moment(t), class_="when"), " ", text) for t, text in story.news[:_MOST_NEWS]]
    more = len(story.news) - _MOST_NEWS
    rest = tag("p", f"and {more} more", class_="none") if more > 0 else None
    return tag("section", tag("h2", "What happened"), tag("ul", *items, class_="news"), rest) if items else Html("")


# -- curves --


def _kind(story: ReportModel, rank: RankReport) -> str:
    """The mark of its line."""
    return "culprit" if rank.key == story.culprit else "straggler" if rank.behind else ""


def _progress(story: ReportModel) -> Html:
    """Steps over time."""
    printing = [rank for rank in story.ranks if rank.progress]
    if not printing:
        return Html("")
    units = [rank.unit for rank in printing]
    unit = max(units, key=units.count)
    lines = [Plot(rank.progress, _named(story, rank), _kind(story, rank)) for rank in printing if rank.unit == unit]
    drawn = chart(f"{unit} of each rank, from its log", lines, story.length, partial(_amount, unit))
    return Html(drawn + _legend(story))


def _legend(story: ReportModel) -> Html:
    names: list[Html] = []
    if story.culprit:
        names.append(
            tag("span", f"culprit: {role_name(story.culprit[0])} {story.culprit[1]}", class_="key line-culprit")
        )
    behind = [rank for rank in story.ranks if rank.behind]
    if behind:
        names.append(tag("span", "straggler: ", _ranks(rank.key for rank in behind), class_="key line-straggler"))
    names.append(tag("span", "others", class_="key line-others"))
    return tag("p", *names, class_="keys") if len(names) > 1 else Html("")


def _nodes(story: ReportModel) -> Html:
    found = {rank.node for rank in story.ranks if rank.behind or rank.state is RankState.FAILED}
    lost = {node.index for node in story.nodes if node.state in (NodeState.LOST, NodeState.UNKNOWN)}
    few = len(story.nodes) <= _NODES
    first = list(story.nodes) if few else [node for node in story.nodes if node.index in found | lost][:_NODES]
    open_ = {node.index for node in first}
    rest = [node for node in story.nodes if node.index not in open_]
    scale = max(_highest(rank.usage.cores for rank in story.ranks), _LEAST)
    memory = _highest(rank.usage.resident for rank in story.ranks)
    shown = [_node(story, node, scale, memory) for node in first]
    more = (
        tag(
            "details",
            tag("summary", f"{count(len(rest), 'node')} more: {fold(node.name for node in rest)}"),
            *(_node(story, node, scale, memory) for node in rest),
        )
        if rest
        else None
    )
    return tag("section", tag("h2", "Nodes"), _legend(story), _everybody(story, scale) if rest else None, *shown, more)


def _highest(curves: Iterable[Curve]) -> float:
    return max((value for curve in curves for _, value in curve), default=0.0)


def _everybody(story: ReportModel, scale: float) -> Html:
    lines = [Plot(rank.usage.cores, _named(story, rank), _kind(story, rank)) for rank in story.ranks]
    return tag("div", chart("CPU of all ranks, cores", lines, story.length, _cores, scale), class_="charts")


def _node(story: ReportModel, node: ReportNode, scale: float, memory: float) -> Html:
    ranks = [rank for rank in story.ranks if rank.node == node.index]
    cores = [Plot(rank.usage.cores, _named(story, rank), _kind(story, rank)) for rank in ranks]
    resident = [Plot(rank.usage.resident, _named(story, rank), _kind(story, rank)) for rank in ranks]
    machine = [Plot(node.busy, "CPU", "cpu"), Plot(node.used, "memory", "used")]
    charts = [
        chart("CPU of each rank, cores", cores, story.length, _cores, scale),
        chart("Memory of each rank", resident, story.length, human_bytes, memory),
        chart("Machine: CPU, memory (dashed)", machine, story.length, _percent, 1.0),
        *_cards(story, node),
    ]
    if not any(line.curve for line in (*resident, *machine)):
        charts = [tag("p", "Nothing recorded here.", class_="none")]
    size = f"{count(node.cores, 'core')}, {human_bytes(node.total)}" if node.cores else ""
    about = " · ".join(filter(None, [size, node.state, _ranks(rank.key for rank in ranks) or "no ranks"]))
    return tag("article", tag("h3", node.name, " ", tag("small", about)), tag("div", *charts, class_="charts"))


def _cards(story: ReportModel, node: ReportNode) -> list[Html]:
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


def _processes(story: ReportModel) -> Html:
    """Start times of processes, and how each of them ended."""
    columns = ("process", "node", "started", "ended", "end", "last output", "CPU", "memory", "progress", "devices")
    rows = [_process(story, rank) for rank in story.ranks]
    table = tag("table", tag("thead", tag("tr", *(tag("th", column) for column in columns))), tag("tbody", *rows))
    title = "Starts and ends"
    if len(rows) > _ROWS:
        return tag("section", tag("h2", title), tag("details", tag("summary", count(len(rows), "rank")), _wide(table)))
    return tag("section", tag("h2", title), _wide(table))


def _wide(table: Html) -> Html:
    return tag("div", table, class_="wide")


def _process(story: ReportModel, rank: RankReport) -> Html:
    ended = bool(rank.how) or not (rank.state.alive or rank.state is RankState.WAITING)
    progress = f"{rank.unit} {_amount(rank.unit, rank.progress[-1][1])}" if rank.progress else ""
    number = {"class_": "num"}
    return tag(
        "tr",
        tag("td", tag("b", _name(rank)), class_="name"),
        tag("td", story.name(rank.node), class_="name"),
        tag("td", "unknown" if not rank.recorded else _moment(rank.start) if rank.spans else "never", **number),
        tag("td", _moment(rank.end) if rank.spans and ended else "", **number),
        tag(
            "td",
            tag("span", rank.state, class_=f"key {rank.state}"),
            f" {rank.how}" if rank.state is not RankState.DONE else None,
            f" {_quiet(rank)}" if _quiet(rank) else None,
            f" behind: {rank.behind}" if rank.behind else None,
        ),
        tag("td", "" if rank.output is None else _moment(rank.output), **number),
        tag("td", human_seconds(rank.usage.cpu) if rank.recorded else "", **number),
        tag("td", human_bytes(rank.usage.memory) if rank.recorded else "", **number),
        tag("td", progress, **number),
        tag("td", ",".join(map(str, rank.devices))),
        class_=_mark(story, [rank], "") or None,
    )


def _quiet(rank: RankReport) -> str:
    """For how long a rank had printed nothing, now or when it was stopped."""
    if (
        rank.output is None
        or not (rank.state.alive or rank.state is RankState.STOPPED)
        or rank.end - rank.output < _QUIET
    ):
        return ""
    return f"no output for {human_seconds(rank.end - rank.output)}"


def _plan(story: ReportModel) -> Html:
    commands: dict[str, list[Key]] = {}
    for rank in story.ranks:
        if rank.command:
            commands.setdefault(rank.command, []).append(rank.key)
    facts = [
        ("job", story.job),
        ("mode", story.mode),
        ("owner", story.owner),
        ("created", _date(story.created)),
        ("nodes", fold(node.name for node in story.nodes)),
        ("processes", _roles(story)),
        ("policy", _policy(story)),
    ]
    rows = [*facts, *((f"command of {_ranks(keys)}", tag("code", command)) for command, keys in commands.items())]
    items = [tag("div", tag("dt", name), tag("dd", value)) for name, value in rows]
    return tag("section", tag("h2", "Plan"), tag("dl", *items))


def _policy(story: ReportModel) -> str:
    """Numbers without a zero fraction."""
    return ", ".join(
        f"{name} {f'{value:g}' if isinstance(value, float) else value}" for name, value in story.policy.items()
    )


def _reading() -> Html:
    explanations = [
        *RULES,
        "Times are seconds since the job began, by each node's own clock; bars have the colour of how they ended.",
        "CPU and memory are of a rank with all its descendants; pages that several of them share count in each.",
        "Values of the job's SECRETS are shown as *** where the machine that made this page knew them.",
    ]
    return tag(
        "section",
        tag("h2", "How to read this"),
        tag("ul", *(tag("li", text) for text in explanations)),
        class_="reading",
    )


# -- words --


def _name(rank: RankReport) -> str:
    return f"{role_name(rank.role)} {rank.rank}"


def _named(story: ReportModel, rank: RankReport) -> str:
    return f"{_name(rank)} on {story.name(rank.node)}"


def _ranks(keys: Iterable[Key]) -> str:
    """trainer 0-3, pserver 1."""
    roles: dict[str, list[int]] = {}
    for role, rank in keys:
        roles.setdefault(role, []).append(rank)
    return ", ".join(f"{role_name(role)} {ranges(numbers)}" for role, numbers in roles.items())


def _moment(t: float) -> str:
    """Since the job began, in hundredths while these distinguish two starts."""
    return f"+{t:.2f} s" if t < 100 else f"+{human_seconds(t)}"


def _amount(unit: str, value: float) -> str:
    return f"{value:,.0f}" if unit == "step" else f"{value:.2f}"


def _cores(value: float) -> str:
    return f"{value:.2g}" if value < 10 else f"{value:.0f}"


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


def _date(t: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(t))
