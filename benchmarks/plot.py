"""Plots as SVG, written by hand: one for each unit of a benchmark, legible on light and dark pages.

Each row is a line from the least to the greatest round with a dot for every round, a bar at the
median and, where there is a goal, a dashed bar at its bound.
"""

from __future__ import annotations

import math
from typing import Final
from xml.sax.saxutils import escape

from benchmarks.result import Result, Row, number

WIDTH: Final = 820
ROW_HEIGHT: Final = 30
LEFT: Final = 330
RIGHT: Final = 90
TOP: Final = 34
BOTTOM: Final = 30
TICKS: Final = 5
#: Beyond this span between least and greatest a linear axis shows only the greatest.
LINEAR_SPAN_MAX: Final = 30

_STYLE: Final = """\
text { font: 12px system-ui, sans-serif; fill: #24292f }
.note { fill: #57606a } .axis { stroke: #d0d7de } .span { stroke: #6e9fd4; stroke-width: 2 }
.round { fill: #2f6db3; fill-opacity: .55 } .median { stroke: #0b3d75; stroke-width: 3 }
.goal { stroke: #b35900; stroke-width: 2; stroke-dasharray: 4 3 }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .note { fill: #9198a1 } .axis { stroke: #3d444d }
.median { stroke: #a5d0ff } .round { fill: #6cb0f5 } .goal { stroke: #f0883e } }"""


class Axis:
    """Places values between `LEFT` and the right margin; logarithmic when they lie far apart."""

    def __init__(self, values: list[float]) -> None:
        least, greatest = min(values), max(values)
        self.is_logarithmic = least > 0 and greatest / least > LINEAR_SPAN_MAX
        if self.is_logarithmic:
            self.first = 10 ** math.floor(math.log10(least))
            self.last = 10 ** math.ceil(math.log10(greatest))
        else:
            self.first = min(0.0, least)
            self.last = max(greatest, 0.0) * 1.05 or 1.0

    def x(self, value: float) -> float:
        """Where a value stands, in pixels."""
        if self.is_logarithmic:
            share = math.log(value / self.first) / math.log(self.last / self.first)
        else:
            share = (value - self.first) / (self.last - self.first)
        return round(LEFT + share * (WIDTH - LEFT - RIGHT), 1)

    def ticks(self) -> list[float]:
        """Values to write under the axis."""
        if self.is_logarithmic:
            decades = round(math.log10(self.last / self.first))
            return [self.first * 10**i for i in range(decades + 1)]
        step = nice_step((self.last - self.first) / TICKS)
        first = math.ceil(self.first / step)
        return [i * step for i in range(first, math.floor(self.last / step) + 1)]


def draw(result: Result) -> dict[str, str]:
    """File name → SVG, one for each unit of the rows that stand in no other table; none without rows."""
    drawn = [row for row in result.rows if not row.cells]
    units = list(dict.fromkeys(row.unit for row in drawn))
    names = [f"{result.name}{f'-{i + 1}' if i else ''}.svg" for i in range(len(units))]
    return {
        name: plot(result, unit, [row for row in drawn if row.unit == unit])
        for name, unit in zip(names, units, strict=True)
    }


def plot(result: Result, unit: str, rows: list[Row]) -> str:
    """One plot of rows that share their unit."""
    goals = [row.goal.bound for row in rows if row.goal is not None]
    axis = Axis([sample for row in rows for sample in row.samples] + goals)
    height = TOP + ROW_HEIGHT * len(rows) + BOTTOM
    scale = ", logarithmic" if axis.is_logarithmic else ""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'width="{WIDTH}" height="{height}" role="img">',
        f"<title>{escape(f'{result.number} {result.summary}, {unit}')}</title>",
        f"<style>{_STYLE}</style>",
        text(8, 18, f"{result.number}, {unit}{scale}: rounds, median and goal", "note"),
        *axis_lines(axis, height),
    ]
    for i, row in enumerate(rows):
        parts += row_marks(axis, row, TOP + ROW_HEIGHT * i + ROW_HEIGHT / 2)
    return "\n".join([*parts, "</svg>", ""])


def axis_lines(axis: Axis, height: int) -> list[str]:
    """Grid and labels."""
    parts = []
    for tick in axis.ticks():
        x = axis.x(tick)
        parts.append(line(x, TOP, x, height - BOTTOM, "axis"))
        parts.append(text(x, height - BOTTOM + 16, number(tick), "note", anchor="middle"))
    return parts


def row_marks(axis: Axis, row: Row, y: float) -> list[str]:
    """Name, span, rounds, median and goal of one row."""
    spread = row.spread
    median_x = axis.x(spread.median)
    parts = [
        text(LEFT - 10, y + 4, row.figure, anchor="end"),
        line(axis.x(spread.min), y, axis.x(spread.max), y, "span"),
    ]
    parts += [
        f'<circle cx="{axis.x(sample)}" cy="{y}" r="3.5" class="round"/>' for sample in row.samples
    ]
    parts.append(line(median_x, y - 8, median_x, y + 8, "median"))
    if row.goal is not None:
        goal_x = axis.x(row.goal.bound)
        parts.append(line(goal_x, y - 12, goal_x, y + 12, "goal"))
    parts.append(text(axis.x(axis.last) + 8, y + 4, number(spread.median)))
    return parts


def nice_step(step: float) -> float:
    """The next of 1, 2, 5 × 10ⁿ."""
    power: float = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * 0.999)


def line(x1: float, y1: float, x2: float, y2: float, kind: str) -> str:
    """A straight line."""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" class="{kind}"/>'


def text(x: float, y: float, words: str, kind: str = "", *, anchor: str = "start") -> str:
    """Words at a place."""
    return f'<text x="{x}" y="{y}" text-anchor="{anchor}" class="{kind}">{escape(words)}</text>'
