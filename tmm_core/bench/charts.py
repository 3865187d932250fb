"""Two charts as inline SVG: rows of values by class, and points on logarithmic axes.

They need no script and no other file; a point's description is its `<title>`, which a browser shows
on hover.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from html import escape

WIDTH = 920
_LEFT, _RIGHT, _ROW = 190, 30, 26


@dataclass(frozen=True, slots=True)
class Point:
    """A point of a chart. `series` is a class of the page's style sheet; only :func:`plane` uses
    `y`."""

    x: float
    title: str
    series: str = "tmm"
    y: float = 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One class: its points, and a mark at their summary."""

    label: str
    points: Sequence[Point]
    marks: Sequence[Point] = ()


@dataclass(frozen=True, slots=True)
class Line:
    """A straight line in a :func:`plane`, in data coordinates."""

    start: tuple[float, float]
    end: tuple[float, float]
    label: str


def rows(found: Sequence[Row], axis: str) -> str:
    """Every row's points along one logarithmic axis, with a line at 1."""
    values = [p.x for row in found for p in (*row.points, *row.marks)] + [1.0]
    low, high = min(values) / 1.03, max(values) * 1.03
    height = _ROW * len(found) + 46
    place = _scale(low, high, _LEFT, WIDTH - _RIGHT)
    bottom = height - 40
    parts = []
    for tick in _ticks(low, high):
        x = place(tick)
        parts.append(_line((x, 4), (x, bottom), "grid"))
        parts.append(_text(x, bottom + 16, f"{tick:g}", "middle"))
    parts.append(_line((place(1.0), 4), (place(1.0), bottom), "middle"))
    parts.append(_text((_LEFT + WIDTH - _RIGHT) / 2, height - 6, axis, "middle"))
    for number, row in enumerate(found):
        y = _ROW * number + _ROW / 2 + 4
        parts.append(_text(_LEFT - 10, y + 4, row.label, "end"))
        for point in row.points:
            parts.append(_dot(place(point.x), y, 3.5, point))
        for mark in row.marks:
            parts.append(_diamond(place(mark.x), y, mark))
    return _svg(height, parts)


def plane(points: Sequence[Point], lines: Sequence[Line], x_axis: str, y_axis: str) -> str:
    """Points on two logarithmic axes, and lines that bound them."""
    height, top, bottom = 440, 12, 396
    corners = [(p.x, p.y) for p in points] + [
        end for line in lines for end in (line.start, line.end)
    ]
    x_low, x_high = min(x for x, _ in corners) / 1.3, max(x for x, _ in corners) * 1.3
    y_low, y_high = min(y for _, y in corners) / 1.3, max(y for _, y in corners) * 1.5
    across, up = _scale(x_low, x_high, 60, WIDTH - _RIGHT), _scale(y_low, y_high, bottom, top)
    parts = []
    for tick in _ticks(x_low, x_high):
        parts.append(_line((across(tick), top), (across(tick), bottom), "grid"))
        parts.append(_text(across(tick), bottom + 16, f"{tick:g}", "middle"))
    for tick in _ticks(y_low, y_high):
        parts.append(_line((60, up(tick)), (WIDTH - _RIGHT, up(tick)), "grid"))
        parts.append(_text(54, up(tick) + 4, f"{tick:g}", "end"))
    parts.append(_text((60 + WIDTH - _RIGHT) / 2, height - 6, x_axis, "middle"))
    parts.append(
        f'<text transform="translate(14 {(top + bottom) / 2}) rotate(-90)" '
        f'text-anchor="middle">{escape(y_axis)}</text>'
    )
    for line in lines:
        start, end = ((across(x), up(y)) for x, y in (line.start, line.end))
        parts.append(_line(start, end, "middle"))
        parts.append(_text(end[0] - 6, end[1] - 6, line.label, "end"))
    parts += [_dot(across(p.x), up(p.y), 4, p) for p in points]
    return _svg(height, parts)


def _scale(low: float, high: float, start: float, end: float) -> Callable[[float], float]:
    """Where a value stands on a logarithmic axis."""
    return lambda value: start + math.log(value / low) / math.log(high / low) * (end - start)


def _ticks(low: float, high: float) -> Iterator[float]:
    """Round numbers from ``low`` to ``high``: within a factor of 8 at even steps, at most ten; else
    1, 2 and 5 of each decade, or beyond three decades the powers of ten."""
    if high / low < 8:
        decade = 10.0 ** math.floor(math.log10(high - low))
        step = next(s * decade for s in (0.1, 0.2, 0.5, 1, 2) if (high - low) / (s * decade) <= 10)
        for count in range(math.ceil(low / step), math.floor(high / step) + 1):
            yield round(count * step, 9)
        return
    steps = (1, 2, 5) if high / low < 1000 else (1,)
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        yield from (s * 10.0**power for s in steps if low <= s * 10.0**power <= high)


def _svg(height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {height:g}" width="{WIDTH}" role="img" '
        f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
    )


def _line(start: tuple[float, float], end: tuple[float, float], kind: str) -> str:
    (x1, y1), (x2, y2) = start, end
    return f'<line class="{kind}" x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}"/>'


def _text(x: float, y: float, text: str, anchor: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(text)}</text>'


def _dot(x: float, y: float, radius: float, point: Point) -> str:
    return (
        f'<circle class="{escape(point.series)}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">'
        f"<title>{escape(point.title)}</title></circle>"
    )


def _diamond(x: float, y: float, mark: Point) -> str:
    path = f"M{x - 6:.1f} {y:.1f}L{x:.1f} {y - 8:.1f}L{x + 6:.1f} {y:.1f}L{x:.1f} {y + 8:.1f}Z"
    return (
        f'<path class="mark {escape(mark.series)}" d="{path}">'
        f"<title>{escape(mark.title)}</title></path>"
    )
