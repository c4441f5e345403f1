"""The screen of `inv top` has lines that fit any size of the window. Text of a node never controls the terminal."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite

from rich.text import Text

from clustertool.model.config.folded_names import fold, grouped
from clustertool.model.masking import Hide
from clustertool.model.quantities import count, human_bytes, human_seconds
from clustertool.model.shape import to_plain
from clustertool.show.device_table import memory
from clustertool.show.job_text import membership_text
from clustertool.show.status_view import STYLES
from clustertool.show.table import table
from clustertool.show.terminal import Terminal
from clustertool.watch.top_model import Row, TopModel, TopRank

Part = tuple[str, str]  # text, style
Line = list[Part]
_BLOCKS = " ▁▂▃▄▅▆▇█"
_PLAIN_BLOCKS = " .:-=+*#@"
_STATES = {**STYLES, "done": "dim", "unknown": "yellow"}
_BAR, _EACH = 12, 16
_SILENT = 4.0  # seconds after which a node is called silent
_LATE = 5.0  # seconds of a heartbeat
_QUIET = 10.0  # seconds without output
_DEVICES = ("nodes", "device", "util", "memory", "temp", "used by", "trouble")
_RANKS = ("job", "rank", "node", "state", "cpu", "memory", "steps/s", "loss", "no output", "heartbeat", "last line")
# The columns of a rank behind its name and node. On a narrow terminal those of _SPARE are left out, the first one first.
_CELLS = {
    "STATE": 9,
    "CPU": 8,
    "MEMORY": 9,
    "STEPS/S": 9,
    "SPEED": 9,
    "LOSS": 9,
    "TREND": 9,
    "NO OUTPUT": 11,
    "BEAT": 7,
}
_SPARE = ("SPEED", "TREND", "LOSS", "BEAT", "MEMORY", "CPU", "NO OUTPUT")
_LAST_LINE = 30  # columns that the last line has then
KEYS = "q quit  s sort  / filter  up/down choose  enter log  t stacks  x stop"


@dataclass
class View:
    """The state of the view: selection, sorting, filter."""

    sort: str = "rank"
    text: str = ""
    typing: bool = False
    at: int = 0  # the chosen rank's row
    chosen: tuple[str, str, int] | None = None  # the chosen rank: job, role, rank; in whatever row it is
    log: TopRank | None = None  # the rank of which the log is shown, or the stacks
    stacks: bool = False
    message: str = ""


@dataclass
class Page:
    """What is drawn: the lines, and the ranks that can be chosen."""

    lines: list[Line]
    ranks: list[TopRank]


def choose(view: View, ranks: Sequence[TopRank], rows: int = 0) -> None:
    """Select the rank `rows` below the selected one, wherever that is now; if it is gone, below the row where it was.

    Stores it in the view: at most the first or the last rank, None without ranks.
    """
    keys = [(rank.job, rank.role, rank.rank) for rank in ranks]
    at = keys.index(view.chosen) if view.chosen in keys else view.at
    view.at = max(0, min(at + rows, len(keys) - 1))
    view.chosen = keys[view.at] if keys else None


class Screen:
    """The layout of pages, JSON and plain text of `inv top` for one terminal."""

    def __init__(self, terminal: Terminal, hide: Hide) -> None:
        self._terminal, self._hide = terminal, hide
        fine = terminal.printable("█▁") == "█▁"
        self._blocks = _BLOCKS if fine else _PLAIN_BLOCKS

    def page(self, model: TopModel, view: View, width: int, height: int, failed: Mapping[str, str], now: float) -> Page:
        """Lay out the screen in `height` lines: title, messages, devices, ranks, keys.

        failed: {name of a node: why it does not answer}. now: time.monotonic().
        """
        ranks = model.processes(view.sort, view.text, self._away(model, failed, now))
        problems = [*self._messages(failed, "red"), *self._messages(model.problems, "yellow")]
        messages = [*self._memberships(model, failed, now), *problems]
        head = [self._title(model, view, failed, now), *messages[: max(0, height - 6)]]
        room = max(2, height - len(head) - 5)
        most = max(room - len(ranks), room // 2, 1)
        rows = model.rows(most, view.sort, view.text)
        lines = [*head, *self._device_lines(rows, most, width), []]
        left = max(0, height - len(lines) - 2)
        choose(view, ranks)
        lines += self._rank_lines(ranks, view.at, left, width)
        lines = lines[: height - 1]
        foot = [] if height < 2 else [self._foot(view)]
        return Page([*lines, *([[]] * (height - 1 - len(lines))), *foot], ranks)

    def log_page(self, view: View, text: str, height: int) -> Page:
        """Lay out the end of the text of the view's log, or the begin of that about stacks, in `height` lines."""
        assert view.log is not None
        about = f"{view.log.name} on {view.log.node}, job {view.log.job}: {'stacks' if view.stacks else view.log.log}"
        room = max(1, height - 2)
        shown = text.split("\n")[:room] if view.stacks else text.split("\n")[-room - 1 :]
        lines = [[(self._safe(line), "")] for line in shown]
        while lines and not lines[-1][0][0]:
            lines.pop()
        lines = lines[-room:]
        return Page([[(self._safe(about), "bold")], *lines, *([[]] * (room - len(lines))), [("q back", "dim")]], [])

    def _title(self, model: TopModel, view: View, failed: Mapping[str, str], now: float) -> Line:
        """Build the title: numbers of nodes, devices and jobs, sorting, time, filter, silent nodes."""
        silent = [name for name in self._away(model, {}, now) if name not in failed]
        jobs = len({rank.job for rank in model.ranks.values()})
        cards = [device for found in model.devices.values() for device in found if device.label]
        loads = [device.load for device in cards if device.load is not None]
        parts = [count(len(model.sampled), "node")]
        if cards:
            busy = f" {sum(loads) / len(loads):.0f} % busy" if loads else ""
            parts.append(count(len(cards), "device") + busy)
        parts += [count(jobs, "job"), f"by {view.sort}"]
        title: Line = [(", ".join(parts), "bold"), (time.strftime("  %H:%M:%S"), "dim")]
        if view.text or view.typing:
            title.append((f"  /{view.text}{'_' if view.typing else ''}", "cyan"))
        return title + ([(f"  silent: {fold(silent)}", "yellow")] if silent else [])

    def _memberships(self, model: TopModel, failed: Mapping[str, str], now: float) -> Iterator[Line]:
        """Yield a line about the nodes of each elastic job."""
        for job, membership in model.memberships(self._away(model, failed, now)).items():
            yield [(self._safe(f"job {job}: {membership_text(membership)}"), "cyan")]

    def _away(self, model: TopModel, failed: Mapping[str, str], now: float) -> list[str]:
        """List the names of nodes that have failed or sent no sample for four seconds."""
        return [*failed, *(name for name, sampled in model.sampled.items() if now - sampled > _SILENT)]

    def _messages(self, by_name: Mapping[str, str], style: str) -> list[Line]:
        """Build a line for each different text, with the folded names of its nodes. by_name: {name: text}."""
        alike = grouped((what, name) for name, what in by_name.items() if what)
        return [[(f"{fold(names)}: {self._safe(what)}", style)] for what, names in alike.items()]

    def _device_lines(self, rows: Sequence[Row], most: int, width: int) -> Iterator[Line]:
        """Yield the table of devices with at most `most` rows, and how many more there are."""
        shown = rows[:most] if len(rows) <= most else rows[: most - 1]
        names = [fold(row.nodes) for row in shown]
        first = min(max(map(len, names), default=5) + 1, max(8, width // 5))
        second = min(max((len(row.what) for row in shown), default=6) + 1, max(8, width // 4))
        heads = (("NODES", first), ("DEVICE", second), ("UTIL", _BAR + 7 + _EACH), ("MEMORY", _BAR + 15), ("TEMP", 6))
        yield [("".join(text.ljust(wide) for text, wide in heads) + "USED BY", "dim")]
        for name, row in zip(names, shown):
            yield self._device_line(name, row, first, second)
        if len(rows) > len(shown):
            yield [(f"... and {len(rows) - len(shown)} more", "dim")]

    def _device_line(self, name: str, row: Row, first: int, second: int) -> Line:
        """Build the row of a device or of several. first, second: the widths of its first two columns."""
        load, size, temperature = _device_cells(row)
        return [
            (_fit(name, first), ""),
            (_fit(self._safe(row.what), second), "dim"),
            (self._bar((row.load or 0) / 100), "green"),
            (load.rjust(6).ljust(7), ""),
            (self._spark(row).ljust(_EACH), "cyan"),
            (self._bar(row.filled), "yellow" if row.filled > 0.95 else "blue"),
            (f" {size}".ljust(15), ""),
            (temperature.ljust(6), "red" if row.wrong else ""),
            (self._safe(", ".join(row.wrong)) + "  " * bool(row.wrong), "red"),
            (self._safe(row.user), ""),
        ]

    def _bar(self, part: float) -> str:
        """Draw a bar of 12 columns that is filled to a part from 0 to 1."""
        steps = len(self._blocks) - 1
        full = round(max(0.0, min(1.0, part)) * _BAR * steps) / steps
        if self._blocks is _PLAIN_BLOCKS:
            return ("#" * round(full)).ljust(_BAR, ".")
        return ("█" * int(full) + (" ▏▎▍▌▋▊▉"[int(full * 8) % 8].strip())).ljust(_BAR, "·")

    def _spark(self, row: Row) -> str:
        """Draw blocks: of one device its loads in the last seconds, of 2 to 15 devices one each, of more their mean loads."""
        values = row.loads if 1 < len(row.loads) < _EACH else row.history[-(_EACH - 1) :]
        top = len(self._blocks) - 1
        return "".join(self._blocks[max(0, min(top, round(value / 100 * top)))] for value in values)

    def _trend(self, values: Sequence[float | None], low: float = inf) -> str:
        """Draw a block for each value between the lowest, or `low` if that is lower, and the highest; "" without values."""
        known = [value for value in values if value is not None and isfinite(value)]
        low, top = min([low, *known]), len(self._blocks) - 2
        size = max([*known, low]) - low or 1.0
        return "".join(self._blocks[1 + round((value - low) / size * top)] for value in known)

    def _rank_lines(self, ranks: Sequence[TopRank], at: int, room: int, width: int) -> Iterator[Line]:
        """Yield the table of ranks around the selected one (`at`) in at most `room` lines, with the columns that fit."""
        if not ranks or room < 2:
            return
        several = len({rank.job for rank in ranks}) > 1
        names = {id(rank): (f"{rank.job[-9:]} " if several else "") + rank.name for rank in ranks}
        first, second = _width(names.values(), 6), _width((rank.node for rank in ranks), 5)
        columns = [("RANK", first), ("NODE", second), *_CELLS.items()]
        for name in _SPARE:  # what a program printed needs room
            if sum(wide for _, wide in columns) + _LAST_LINE <= width:
                break
            columns = [column for column in columns if column[0] != name]
        yield [("  " + "".join(name.ljust(wide) for name, wide in columns) + "LAST LINE", "dim")]
        room -= 1
        start = max(0, min(at - room // 2, len(ranks) - room))
        for number, rank in enumerate(ranks[start : start + room], start):
            cpu, size, steps, loss, quiet, beat = _rank_cells(rank)
            late = rank.heartbeat is None or rank.heartbeat > _LATE
            cells = {
                "RANK": (self._safe(names[id(rank)]), ""),
                "NODE": (self._safe(rank.node), ""),
                "STATE": (self._safe(rank.state), _STATES.get(rank.state, "")),
                "CPU": (cpu, ""),
                "MEMORY": (size, ""),
                "STEPS/S": (steps, "cyan"),
                "SPEED": (self._trend(rank.trends[0], 0.0), "cyan"),
                "LOSS": (loss, "" if rank.loss is None or isfinite(rank.loss) else "red"),
                "TREND": (self._trend(rank.trends[1]), "cyan"),
                "NO OUTPUT": (quiet, "yellow" if (rank.quiet or 0) > _QUIET else "dim"),
                "BEAT": (beat, "red" if late else "dim"),
            }
            shown = [(_fit(cells[name][0], wide), cells[name][1]) for name, wide in columns]
            yield [("> " if number == at else "  ", "cyan"), *shown, (self._safe(rank.line), "")]

    def _foot(self, view: View) -> Line:
        """Build the last line: the view's message, or the keys."""
        if view.message:
            return [(self._safe(view.message), "bold")]
        return [("type to filter, enter keeps it, esc clears it" if view.typing else KEYS, "dim")]

    def _safe(self, text: str) -> str:
        """Mask secrets in a text, and make it printable."""
        return self._terminal.printable(self._hide(text))

    def as_dict(self, model: TopModel, failed: Mapping[str, str], now: float) -> dict[str, object]:
        """Build the documented JSON of `inv top --json`."""
        ranks = model.processes("rank", "", self._away(model, failed, now))
        names = ("job", "role", "rank", "node", "state", "pid", "cpu", "memory", "heartbeat")
        return {
            "nodes": {name: list(map(_device_dict, rows)) for name, rows in model.devices.items()},
            "ranks": [
                {
                    **{name: getattr(rank, name) for name in names},
                    "steps_per_second": rank.speed,
                    "loss": to_plain(rank.loss),
                    "no_output": rank.quiet,
                    "last_line": self._hide(rank.line),
                }
                for rank in ranks
            ],
            "memberships": [
                {"job": job, **membership, "left": [list(one) for one in membership["left"]]}
                for job, membership in model.memberships(self._away(model, failed, now)).items()
            ],
            "unreachable": dict(failed),
        }

    def plain(self, model: TopModel, view: View, failed: Mapping[str, str], now: float) -> None:
        """Print the screen as plain text: title, messages, a table of devices and one of ranks, an empty line."""
        self._terminal.line("".join(text for text, _ in self._title(model, view, failed, now)))
        messages = [*self._messages(failed, ""), *self._messages(model.problems, "")]
        for line in [*self._memberships(model, failed, now), *messages]:
            self._terminal.line("".join(text for text, _ in line))
        devices = model.rows(1 << 30, view.sort, view.text)
        rows = [(fold(row.nodes), row.what, *_device_cells(row), row.user, ", ".join(row.wrong)) for row in devices]
        table("", _DEVICES, rows, terminal=self._terminal)
        ranks = [
            (rank.job, rank.name, rank.node, rank.state, *_rank_cells(rank), self._hide(rank.line))
            for rank in model.processes(view.sort, view.text, self._away(model, failed, now))
        ]
        if ranks:
            table("", _RANKS, ranks, terminal=self._terminal)
        self._terminal.line()


def speed(value: float) -> str:
    """Format steps a second with two or three digits."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def _device_dict(row: Row) -> dict[str, object]:
    """Build the JSON fields of one card, or of the processors of a node without cards."""
    return {
        "device": row.label or row.what,
        "model": row.model,
        "load": row.load,
        "memory_used": row.used,
        "memory_total": row.total,
        "temperature": row.temperature,
        "used_by": row.user,
        "trouble": list(row.wrong),
    }


def _device_cells(row: Row) -> tuple[str, str, str]:
    """Format load, memory and temperature of devices; "" for what is not known."""
    load = "" if row.load is None else f"{row.load:.0f} %"
    return load, memory(row.used, row.total or None), "" if row.temperature is None else f"{row.temperature} C"


def _rank_cells(rank: TopRank) -> tuple[str, str, str, str, str, str]:
    """Format CPU, memory, steps a second, loss, time without output, and age of the heartbeat; "" for what is not known."""
    cpu = "" if rank.cpu is None else f"{rank.cpu:.0f} %"
    size = "" if rank.memory is None else human_bytes(rank.memory)
    steps = "" if rank.speed is None else speed(rank.speed)
    quiet, beat = ("" if age is None else human_seconds(age) for age in (rank.quiet, rank.heartbeat))
    return cpu, size, steps, "" if rank.loss is None else f"{rank.loss:.4g}", quiet, beat


def _width(texts: Iterable[str], least: int) -> int:
    """Return the width of a column: the longest text, at least `least`, and a blank."""
    return max([least, *(len(text) for text in texts)]) + 1


def _fit(text: str, width: int) -> str:
    """Pad or cut a text to a width."""
    return text.ljust(width) if len(text) < width else text[: width - 2] + "~ "


def draw(page: Page, width: int) -> Text:
    """Convert a page to one text of rich, with one line for each of its lines, cut to `width`."""
    whole = Text(no_wrap=True, overflow="crop")
    for number, line in enumerate(page.lines):
        one = Text(no_wrap=True, overflow="crop")
        for text, style in line:
            one.append(text, style)
        one.truncate(width, overflow="crop")
        whole.append("\n" * bool(number)).append_text(one)
    return whole
