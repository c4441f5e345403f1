"""Charts are inline SVG that scales with the page. Their labels are HTML next to it, readable on a small screen too."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from statistics import median

from clustertool.model.quantities import human_seconds
from clustertool.show.markup import Html, tag

Curve = Sequence[tuple[float, float]]
_WIDTH, _HEIGHT = 1000, 100
_FULL = 95  # of the height, so that the highest value does not lie on the frame
_CROWD = 24  # lines, over which all that are not special become a band
_PLACES = 100  # of a band
_STEPS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 14400, 28800, 43200, 86400)


@dataclass(frozen=True)
class Plot:
    """`kind` is a CSS class: "" is one of many, others are highlighted."""

    curve: Curve
    name: str
    kind: str = ""


def chart(title: str, lines: Sequence[Plot], end: float, unit: Callable[[float], str], top: float = 0.0) -> Html:
    """Draw curves over [0, end] seconds and [0, top or their highest].

    More than a few become a band: lowest, median, highest.
    """
    drawn = [line for line in lines if line.curve]
    if not drawn:
        return tag("figure", tag("figcaption", title), tag("p", "nothing recorded", class_="none"), class_="chart")
    top = top or max(value for line in drawn for _, value in line.curve) or 1.0
    plain, special = [line for line in drawn if not line.kind], [line for line in drawn if line.kind]
    shapes = _band(plain, end, top) if len(plain) > _CROWD else [_line(line, end, top) for line in plain]
    shapes += [_line(line, end, top) for line in special]
    box = f"0 0 {_WIDTH} {_HEIGHT}"
    svg = tag("svg", *shapes, viewBox=box, preserveAspectRatio="none", role="img", aria_label=title)
    caption = tag("figcaption", title, tag("b", unit(top)))
    return tag("figure", caption, tag("div", svg, class_="plot"), axis(end), class_="chart")


def axis(end: float) -> Html:
    """Draw the times below a chart."""
    marks = [tag("span", human_time(t), style=f"left:{100 * t / end:.2f}%") for t in ticks(end)]
    return tag("div", *marks, class_="axis")


def ticks(end: float, most: int = 6) -> list[float]:
    """Round times from 0, at most a handful, without those whose label would not fit."""
    step: float = next((step for step in _STEPS if end / step <= most), 0)
    while not step or end / step > most:
        step = step * 2 if step else _STEPS[-1]
    return [n * step for n in range(int(0.96 * end / step) + 1)]


def human_time(t: float) -> str:
    """Format the position of a tick: 0, 30 s, 5 min, 2 h, 3 d."""
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min"), (1, "s")):
        if t >= size and t % size == 0:
            return f"{t / size:.0f} {unit}"
    return human_seconds(t) if t else "0"


def _line(line: Plot, end: float, top: float) -> Html:
    points = [_point(t, value, end, top) for t, value in line.curve]
    path = f"M{points[0]}h1" if len(points) == 1 else f"M{points[0]}L{' '.join(points[1:])}"
    return tag("path", tag("title", line.name), d=path, class_=f"line {line.kind}".rstrip())


def _band(lines: Sequence[Plot], end: float, top: float) -> list[Html]:
    lowest, middle, highest = band([line.curve for line in lines], end)
    if not middle:
        return []
    around = [*highest, *reversed(lowest)]
    outline = "M" + "L".join(_point(t, value, end, top) for t, value in around) + "Z"
    name = f"{len(lines)} lines: lowest to highest, and the median"
    around_all = tag("path", tag("title", name), d=outline, class_="band")
    return [around_all, _line(Plot(middle, "median", "middle"), end, top)]


def band(curves: Sequence[Curve], end: float, places: int = _PLACES) -> tuple[Curve, Curve, Curve]:
    """Lowest, median and highest value at evenly spaced times; a curve counts only while it lasts."""
    found: list[list[tuple[float, float]]] = [[], [], []]
    for place in range(places + 1):
        t = end * place / places
        lasting = [curve for curve in curves if curve[0][0] <= t <= curve[-1][0] + end / places]
        values = [curve[bisect_right(curve, t, key=itemgetter(0)) - 1][1] for curve in lasting]
        if values:
            for part, value in zip(found, (min(values), median(values), max(values))):
                part.append((t, value))
    return found[0], found[1], found[2]


def _point(t: float, value: float, end: float, top: float) -> str:
    x = min(max(t / end, 0.0), 1.0) * _WIDTH
    y = _HEIGHT - min(max(value / top, 0.0), 1.0) * _FULL
    return f"{x:.0f} {y:.1f}"
