"""Charts as SVG inside the page: lines over time, and bars.

Colours are classes of the page's style, so a chart follows the page from light to dark; lines also
differ by dashes. Every bucket has a title, which browsers show under the mouse and screen readers
read out.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime
from html import escape
from typing import Final

from qmq_pipeline.report.facts import Bar, TimeChart, known
from qmq_pipeline.report.words import number, time_label

WIDTH: Final = 960
HEIGHT: Final = 240
_LEFT: Final = 64
_RIGHT: Final = 12
_TOP: Final = 10
_BOTTOM: Final = 26
_X_LABELS: Final = 7
_MINUTE_S: Final = 60
_HOUR_S: Final = 3_600
_DAY_S: Final = 86_400
#: Distances between times under a chart: full hours, days and weeks, where people expect them.
_X_STEPS_S: Final = (
    *(1, 2, 5, 10, 15, 30),
    *(minutes * _MINUTE_S for minutes in (1, 2, 5, 10, 15, 30)),
    *(hours * _HOUR_S for hours in (1, 2, 4, 6, 12)),
    *(days * _DAY_S for days in (1, 2, 7, 14, 28, 91, 182, 364)),
)
#: A label closer to an end than this share of the chart would be cut off.
_X_EDGE: Final = 0.04
_Y_TICKS: Final = 4
_ENDS: Final = (1, 1.2, 1.6, 2, 2.4, 4, 6, 8, 10)
_BAR_HEIGHT: Final = 26
_BAR_LEFT: Final = 190
#: Line styles; see `page.py`.
STYLES: Final = 8


class _Axis:
    """Maps values to heights."""

    def __init__(self, values: Sequence[float], *, is_logarithmic: bool) -> None:
        positive = [value for value in values if value > 0]
        self.is_logarithmic = is_logarithmic and bool(positive)
        if self.is_logarithmic:
            self._first = 10.0 ** math.floor(math.log10(min(positive)))
            self._last = 10.0 ** math.ceil(math.log10(max(positive)))
            if self._first == self._last:
                self._last *= 10
        else:
            self._first = min([0.0, *values])
            self._last = nice_end(max([0.0, *values]) or 1.0)

    def y(self, value: float) -> float:
        """Pixels from the top."""
        if self.is_logarithmic:
            value = max(value, self._first)
            share = math.log(value / self._first) / math.log(self._last / self._first)
        else:
            share = (value - self._first) / (self._last - self._first)
        return round(HEIGHT - _BOTTOM - share * (HEIGHT - _TOP - _BOTTOM), 1)

    def ticks(self) -> list[float]:
        """Values that get a line of their own."""
        if self.is_logarithmic:
            decades = round(math.log10(self._last / self._first))
            step = max(1, math.ceil(decades / _Y_TICKS))
            return [self._first * 10.0**i for i in range(0, decades + 1, step)]
        step_value = (self._last - self._first) / _Y_TICKS
        return [self._first + step_value * i for i in range(_Y_TICKS + 1)]


def nice_end(value: float) -> float:
    """The next end of an axis whose quarters are round numbers."""
    power: float = 10.0 ** math.floor(math.log10(value))
    return next(step * power for step in _ENDS if step * power >= value * 0.999)


def time_chart(chart: TimeChart, *, bucket_s: int) -> str:
    """Lines over time; bars if there is a single bucket, because one point is no line."""
    if len(chart.times) != 1 or not any(series.values[0] for series in chart.series):
        return line_chart(chart, bucket_s=bucket_s)
    bars = [Bar(name=one.name, value=one.values[0] or 0.0) for one in chart.series]
    return f"{_heading(chart)}{bar_chart(chart.title, bars, is_ordered=False)}"


def line_chart(chart: TimeChart, *, bucket_s: int) -> str:
    """The chart with its legend; a sentence where there is nothing to draw."""
    values = [value for series in chart.series for value in known(series.values)]
    if not values:
        return f'<p class="none">Nothing to show for «{escape(chart.title)}» in this time.</p>'
    axis = _Axis(values, is_logarithmic=chart.is_logarithmic)
    parts = [
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(chart.title)}">',
        *_y_axis(axis),
        *_x_axis(chart.times, bucket_s),
    ]
    parts += _outages(chart)
    for index, series in enumerate(chart.series):
        parts.append(_line(chart, series.values, axis, index))
    parts += [*_titles(chart, bucket_s), "</svg>"]
    return _legend(chart) + _wide("".join(parts))


def bar_chart(title: str, bars: Sequence[Bar], *, is_ordered: bool = True) -> str:
    """Bars from the left, the longest first or in the order given."""
    if not bars:
        return ""
    most = max(bar.value for bar in bars) or 1
    height = len(bars) * _BAR_HEIGHT + 6
    parts = [f'<svg viewBox="0 0 {WIDTH} {height}" role="img" aria-label="{escape(title)}">']
    for index, bar in enumerate(sorted(bars, key=lambda one: -one.value) if is_ordered else bars):
        y = index * _BAR_HEIGHT + 4
        width = round((WIDTH - _BAR_LEFT - 90) * bar.value / most, 1)
        parts.append(
            f'<text x="{_BAR_LEFT - 8}" y="{y + 14}" text-anchor="end">{escape(bar.name)}</text>'
            f'<rect class="bar" x="{_BAR_LEFT}" y="{y}" width="{max(width, 2)}" height="18" rx="3"/>'
            f'<text x="{_BAR_LEFT + width + 8}" y="{y + 14}">{number(bar.value)}</text>'
        )
    return _wide("".join([*parts, "</svg>"]))


def _wide(drawing: str) -> str:
    """On a narrow page the drawing stays readable and scrolls sideways."""
    return f'<div class="wide" tabindex="0">{drawing}</div>'


def _line(chart: TimeChart, values: Sequence[float | None], axis: _Axis, index: int) -> str:
    style = f"s{index % STYLES + 1}"
    drawn: list[str] = []
    run: list[str] = []
    for place, value in enumerate([*values, None]):
        if value is not None:
            run.append(f"{_x(place, len(chart.times))},{axis.y(value)}")
            continue
        if len(run) == 1:
            x, _, y = run[0].partition(",")
            drawn.append(f'<circle class="dot {style}" cx="{x}" cy="{y}" r="2.5"/>')
        elif run:
            drawn.append(f'<polyline class="line {style}" points="{" ".join(run)}"/>')
        run = []
    return "".join(drawn)


def _outages(chart: TimeChart) -> list[str]:
    count = len(chart.times)
    width = round((WIDTH - _LEFT - _RIGHT) / max(count - 1, 1), 2)
    return [
        f'<rect class="outage" x="{_x(place, count) - width / 2:.1f}" y="{_TOP}" width="{width}" '
        f'height="{HEIGHT - _TOP - _BOTTOM}"/>'
        for place, is_out in enumerate(chart.outages)
        if is_out
    ]


def _y_axis(axis: _Axis) -> list[str]:
    return [
        f'<line class="grid" x1="{_LEFT}" x2="{WIDTH - _RIGHT}" y1="{axis.y(tick)}" y2="{axis.y(tick)}"/>'
        f'<text class="note" x="{_LEFT - 6}" y="{axis.y(tick) + 4}" text-anchor="end">{number(tick)}</text>'
        for tick in axis.ticks()
    ]


def _x_axis(times: Sequence[datetime], bucket_s: int) -> list[str]:
    count = len(times)
    labels = []
    for place in round_places(times):
        share = place / max(count - 1, 1)
        anchor = "start" if share < _X_EDGE else "end" if share > 1 - _X_EDGE else "middle"
        labels.append(
            f'<text class="note" x="{_x(place, count)}" y="{HEIGHT - 8}" '
            f'text-anchor="{anchor}">{time_label(times[place], bucket_s)}</text>'
        )
    return labels


def round_places(times: Sequence[datetime]) -> list[int]:
    """The buckets with their time written below: those where an hour, a day or the like begins."""
    stamps = [int(at.timestamp()) for at in times]
    found: list[int] = []
    for step_s in _X_STEPS_S:
        begun = [one // step_s for one in stamps]
        found = [
            i
            for i, one in enumerate(stamps)
            if (i and begun[i] != begun[i - 1]) or not one % step_s
        ]
        if len(found) <= _X_LABELS:
            break
    if 1 < len(found) <= _X_LABELS:
        return found
    last = len(times) - 1
    return sorted({round(i * last / (_X_LABELS - 1)) for i in range(_X_LABELS)})


def _titles(chart: TimeChart, bucket_s: int) -> list[str]:
    count = len(chart.times)
    width = round((WIDTH - _LEFT - _RIGHT) / max(count - 1, 1), 2)
    parts = []
    for place, at in enumerate(chart.times):
        lines = [time_label(at, bucket_s, is_whole=True)]
        lines += [
            f"{series.name}: {number(value)} {chart.unit}"
            for series in chart.series
            if (value := series.values[place]) is not None
        ]
        parts.append(
            f'<rect class="hit" x="{_x(place, count) - width / 2:.1f}" y="{_TOP}" width="{width}" '
            f'height="{HEIGHT - _TOP - _BOTTOM}"><title>{escape(chr(10).join(lines))}</title></rect>'
        )
    return parts


def _heading(chart: TimeChart) -> str:
    return f"<h3>{escape(chart.title)} <small>{escape(chart.unit)}</small></h3>"


def _legend(chart: TimeChart) -> str:
    entries = "".join(
        f'<li><svg viewBox="0 0 26 8" aria-hidden="true"><line class="line s{index % STYLES + 1}" '
        f'x1="0" x2="26" y1="4" y2="4"/></svg>{escape(series.name)}</li>'
        for index, series in enumerate(chart.series)
    )
    if any(chart.outages):
        entries += (
            '<li><svg viewBox="0 0 26 8" aria-hidden="true"><rect class="outage" width="26" height="8"/>'
            "</svg>committed, and nothing stored</li>"
        )
    return f'{_heading(chart)}<ul class="legend">{entries}</ul>'


def _x(place: int, count: int) -> float:
    if count == 1:
        return round((_LEFT + WIDTH - _RIGHT) / 2, 1)
    return round(_LEFT + place * (WIDTH - _LEFT - _RIGHT) / (count - 1), 1)
