"""Charts as inline SVG: lines of several series, and stacked columns. Widths are of the drawing; a page scales it."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460, 250, 54, 12, 12, 34
PALETTE = ("#4e79a7", "#f28e2b", "#59a14f", "#b07aa1", "#e15759", "#76b7b2", "#9c755f", "#bab02e")
_POINTS = 400
"""Most points that a line is drawn with; longer series are averaged down to it."""

_PLAIN = 2.0
"""Width of a line that nothing covers."""

Point = tuple[float, float]


@dataclass(frozen=True)
class Series:
    """One line: `dots` marks every point (few, such as evaluations); `faint` is drawn thin and pale."""

    name: str
    colour: str
    points: Sequence[Point]
    dots: bool = False
    faint: bool = False
    dashed: bool = False


@dataclass(frozen=True)
class Axis:
    """A linear range with round ticks."""

    low: float
    high: float
    ticks: tuple[float, ...]

    def share(self, value: float) -> float:
        """Return where a value lies, 0 at the low end and 1 at the high end."""
        return (value - self.low) / (self.high - self.low)


def colour_of(index: int) -> str:
    """Return the colour of the run or series with this index; they repeat after the palette's end."""
    return PALETTE[index % len(PALETTE)]


def axis(low: float, high: float, count: int = 5) -> Axis:
    """Return an axis around [low, high] with about `count` ticks at round numbers."""
    if not high > low:
        spread = abs(low) * 0.1 or 1.0
        low, high = low - spread / 2, high + spread / 2
    rough = (high - low) / count
    base = 10.0 ** math.floor(math.log10(rough))
    step = next(base * factor for factor in (1, 2, 2.5, 5, 10) if base * factor >= rough * 0.999)
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    ticks = tuple(round(index * step, 12) for index in range(first, last + 1))
    return Axis(ticks[0], ticks[-1], ticks)


def number(value: float, digits: int = 4) -> str:
    """Return a number, short: 0.25, 1,200, 5e-05; `digits` are the significant ones."""
    if value and abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.{max(4, digits)}g}" if abs(value) < 10000 else f"{value / 1000:,.4g} k"


def _tick(value: float, every: Axis, form: Callable[[float], str]) -> str:
    """Write a tick with digits enough to tell it from its neighbours."""
    if form is not number:
        return form(value)
    step = abs(every.ticks[1] - every.ticks[0])
    largest = max(abs(every.low), abs(every.high), step)
    return number(value, math.floor(math.log10(largest)) - math.floor(math.log10(step)) + 2)


def percent(value: float) -> str:
    """Return a share as a percentage."""
    return f"{100 * value:.3g}%"


def thinned(points: Sequence[Point], most: int = _POINTS) -> list[Point]:
    """Return at most `most` points: means of neighbours, first and last x kept near. Non-finite ones are left out."""
    finite = [point for point in points if math.isfinite(point[0]) and math.isfinite(point[1])]
    if len(finite) <= most:
        return finite
    bins = [finite[len(finite) * index // most : len(finite) * (index + 1) // most] for index in range(most)]
    return [(sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in bins]


def smoothed(points: Sequence[Point], window: int) -> list[Point]:
    """Return the running mean over `window` points around each."""
    half = window // 2
    means = []
    for index, (x, _) in enumerate(points):
        part = points[max(0, index - half) : index + half + 1]
        means.append((x, sum(y for _, y in part) / len(part)))
    return means


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    dot: str | None = None,
    x_label: str = "step",
    form: Callable[[float], str] = number,
    bounds: tuple[float, float] | None = None,
    note: str = "",
    marks: Sequence[tuple[float, str]] = (),
) -> str:
    """Return a figure of lines. Lines that coincide are drawn inside each other, the first the widest.

    Args:
        title: stands above the figure.
        dot: a colour before the title, of the run that the figure belongs to.
        series: lines; those without a finite point are left out, and a chart of none says so.
        x_label: stands below the horizontal axis.
        form: how the vertical axis's numbers are written.
        bounds: fixed range of the vertical axis instead of that of the points.
        note: stands below.
        marks: horizontal positions and their names, drawn as dashed verticals.
    """
    drawn = [(one, thinned(one.points)) for one in series]
    drawn = [(one, points) for one, points in drawn if points]
    if not drawn:
        return figure(title, '<p class="facts">nothing recorded yet</p>', note, dot)
    every = [point for _, points in drawn for point in points]
    horizontal = axis(min(x for x, _ in every), max(x for x, _ in every), 6)
    horizontal = Axis(min(x for x, _ in every), max(horizontal.low + 1e-9, max(x for x, _ in every)), horizontal.ticks)
    if not horizontal.high > horizontal.low:
        horizontal = axis(horizontal.low, horizontal.low)
    vertical = axis(*bounds) if bounds else axis(min(y for _, y in every), max(y for _, y in every))
    parts = [frame(horizontal, vertical, x_label, form)]
    for x, name in marks:
        if horizontal.low <= x <= horizontal.high:
            at = _x(horizontal, x)
            parts.append(
                f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{TOP}" y2="{HEIGHT - BOTTOM}" class="now">'
                f"<title>{escape(name)}</title></line>"
            )
    widths = _widths(drawn, vertical)
    for (one, points), width in zip(drawn, widths, strict=True):
        parts.append(_line(one, points, horizontal, vertical, width))
    if max(widths) > _PLAIN:
        note = f"{note} Lines that coincide are drawn inside each other."
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return figure(title, svg, note.strip(), dot)


def columns_chart(
    title: str,
    names: Sequence[tuple[str, str]],
    columns: Sequence[tuple[float, Sequence[float]]],
    *,
    dot: str | None = None,
    x_label: str = "step",
    form: Callable[[float], str] = number,
    note: str = "",
) -> str:
    """Return a figure of stacked columns.

    Args:
        names: name and colour of each part, from the bottom up.
        columns: x and the height of each part; neighbours are averaged where there are more than fit.
    """
    if not columns:
        return figure(title, '<p class="facts">nothing recorded yet</p>', note, dot)
    most = 100
    count = min(most, len(columns))
    bins = [columns[len(columns) * index // count : len(columns) * (index + 1) // count] for index in range(count)]
    first, last = columns[0][0] - 0.5, columns[-1][0] + 0.5
    means = [[sum(one[1][part] for one in group) / len(group) for part in range(len(names))] for group in bins]
    heights = sorted(sum(mean) for mean in means)
    # One slow step (the first, usually) must not flatten all others: the axis ends at three times the median.
    middle = heights[len(heights) // 2]
    top = min(heights[-1], 3 * middle) if middle > 0 else max(heights[-1], 1e-9)
    vertical = axis(0.0, top)
    horizontal = Axis(first, last, tuple(tick for tick in axis(first, last, 6).ticks if first <= tick <= last))
    parts = [frame(horizontal, vertical, x_label, form)]
    for group, mean in zip(bins, means, strict=True):
        left, right = _x(horizontal, group[0][0] - 0.5), _x(horizontal, group[-1][0] + 0.5)
        base = 0.0
        for (_, colour), height in zip(names, mean, strict=True):
            low, high = vertical.share(base), min(1.0, vertical.share(base + height))
            base += height
            if high <= low:
                continue
            y = TOP + (1 - high) * (HEIGHT - TOP - BOTTOM)
            parts.append(
                f'<rect x="{left:.1f}" y="{y:.1f}" width="{max(0.6, right - left - 0.5):.1f}" '
                f'height="{(high - low) * (HEIGHT - TOP - BOTTOM):.1f}" fill="{colour}"/>'
            )
    cut = sum(height > 1.03 * vertical.high for height in heights)
    if cut:
        note = f"{note} Cut off at the top: {cut}, the highest {form(heights[-1])}."
    svg = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">{"".join(parts)}</svg>'
    return figure(title, svg, note.strip(), dot)


def frame(horizontal: Axis, vertical: Axis, x_label: str, form: Callable[[float], str]) -> str:
    """Return frame, grid and numbers."""
    bottom = HEIGHT - BOTTOM
    parts = []
    for tick in vertical.ticks:
        y = TOP + (1 - vertical.share(tick)) * (bottom - TOP)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y:.1f}" y2="{y:.1f}" class="grid"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y + 5:.1f}" text-anchor="end">{_tick(tick, vertical, form)}</text>')
    label_at = WIDTH - RIGHT - 4 * len(x_label) - 26
    for tick in horizontal.ticks:
        x = _x(horizontal, tick)
        if LEFT - 1 <= x <= label_at:
            parts.append(f'<text x="{x:.1f}" y="{HEIGHT - 14}" text-anchor="middle">{number(tick)}</text>')
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}" class="grid"/>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 14}" text-anchor="end">{escape(x_label)}</text>')
    return "".join(parts)


def _widths(drawn: Sequence[tuple[Series, list[Point]]], vertical: Axis) -> list[float]:
    """Return each line's width: plain, but wider for a line that later ones of the same style cover."""
    widths = []
    for index, (one, points) in enumerate(drawn):
        alike = [other for other in drawn[index + 1 :] if (other[0].faint, other[0].dots) == (one.faint, one.dots)]
        covering = sum(_coincide(points, other, vertical) for _, other in alike)
        widths.append(_PLAIN + min(covering, 3) * 2.6)
    return widths


def _coincide(first: Sequence[Point], second: Sequence[Point], vertical: Axis) -> bool:
    near = 0.01 * (vertical.high - vertical.low)
    places = dict(first)
    common = [abs(places[x] - y) < near for x, y in second if x in places]
    return len(common) >= 2 and sum(common) > 0.5 * len(common)


def _x(horizontal: Axis, value: float) -> float:
    return LEFT + horizontal.share(value) * (WIDTH - LEFT - RIGHT)


def _line(one: Series, points: Sequence[Point], horizontal: Axis, vertical: Axis, width: float) -> str:
    height = HEIGHT - TOP - BOTTOM
    places = [(_x(horizontal, x), TOP + (1 - min(1.0, max(0.0, vertical.share(y)))) * height) for x, y in points]
    style = f'stroke="{one.colour}" stroke-width="{1 if one.faint else width:.1f}"'
    if one.faint:
        style += ' opacity="0.4"'
    if one.dashed:
        style += ' stroke-dasharray="7 4"'
    text = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
    parts = [f'<polyline points="{text}" fill="none" stroke-linejoin="round" {style}/>']
    if one.dots or len(points) == 1:
        parts += [
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{one.colour}">'
            f"<title>{escape(one.name)}: {number(value[1])} at {number(value[0])}</title></circle>"
            for (x, y), value in zip(places, points, strict=True)
        ]
    return "".join(parts)


def figure(title: str, body: str, note: str, dot: str | None = None) -> str:
    """Return a titled figure; `dot` is a colour before the title, of the run that it belongs to."""
    caption = f"<figcaption>{escape(note)}</figcaption>" if note else ""
    mark = f'<i style="background:{dot}"></i>' if dot else ""
    return f'<figure class="chart"><h3>{mark}{escape(title)}</h3>{body}{caption}</figure>'
