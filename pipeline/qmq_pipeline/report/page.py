"""The report page: one self-contained HTML file, without scripts and links to other sites.

Its charts are SVG: lines over time, and bars.
Colours are classes of the page's style, so a chart follows the page from light to dark; lines also
differ by dashes. Every bucket has a title, which browsers show under the mouse and screen readers
read out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Final

from qmq_pipeline.report.facts import Bar, Grid, ReportFacts, TimeChart, Verdict, known
from qmq_pipeline.report.words import cell, column_cells, number, stamp, time_label

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
#: A label that is closer to an end than this share of the chart's width would be cut off.
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
    """Lines over time; bars if there is a single bucket, because one point makes no line."""
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


STYLE: Final = """
:root { --ink: #1c2128; --soft: #57606a; --paper: #ffffff; --card: #f6f8fa; --edge: #d0d7de;
--good: #1a7f37; --bad: #b42318; --open: #8a5a00; --link: #0a58b5;
--c1: #1f5fa8; --c2: #b35900; --c3: #1a7f37; --c4: #8250df; --c5: #b42318; --c6: #0b7285; --c7: #6b5b00;
--c8: #ad3a8a }
@media (prefers-color-scheme: dark) { :root { --ink: #e6edf3; --soft: #9ba5b0; --paper: #0d1117;
--card: #161b22; --edge: #30363d; --good: #56d364; --bad: #ff8b81; --open: #e3b341; --link: #79b8ff;
--c1: #6cb0f5; --c2: #f0a45d; --c3: #6bd285; --c4: #c3a6ff; --c5: #ff8b81; --c6: #5cc8d7; --c7: #d9c65a;
--c8: #f08fd0 } }
* { box-sizing: border-box }
html { scroll-behavior: smooth }
body { margin: 0; font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper) }
header, main, footer { max-width: 1040px; margin: 0 auto; padding: 0 20px }
header { padding-top: 28px }
h1 { font-size: 26px; margin: 0 } h2 { font-size: 20px; margin: 36px 0 8px; padding-top: 12px;
border-top: 1px solid var(--edge) } h3 { font-size: 15px; margin: 20px 0 6px }
h3 small { font-weight: 400; color: var(--soft) }
a { color: var(--link) } code { font: 13px ui-monospace, monospace }
.note, footer, .none { color: var(--soft) } .none { font-style: italic }
footer { padding-top: 24px; padding-bottom: 40px; font-size: 13px }
nav { display: flex; flex-wrap: wrap; gap: 4px 18px; margin: 18px 0 0 }
.verdict { border-left: 5px solid; padding: 10px 14px; background: var(--card); border-radius: 4px }
.good { border-color: var(--good) } .bad { border-color: var(--bad) } .open { border-color: var(--open) }
.good strong { color: var(--good) } .bad strong { color: var(--bad) } .open strong { color: var(--open) }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(140px, 1fr)); gap: 10px; margin: 0 }
.tiles div { background: var(--card); border: 1px solid var(--edge); border-radius: 6px; padding: 8px 12px }
.tiles dt { color: var(--soft); font-size: 13px } .tiles dd { margin: 0; font-size: 21px;
font-variant-numeric: tabular-nums }
.wide { overflow-x: auto } .wide:focus-visible { outline: 2px solid var(--link) }
table { border-collapse: collapse; width: 100%; font-size: 13.5px }
th, td { text-align: left; padding: 5px 10px; border-bottom: 1px solid var(--edge); white-space: nowrap;
max-width: 420px; overflow: hidden; text-overflow: ellipsis }
th { color: var(--soft); font-weight: 600 } td.id { font: 13px ui-monospace, monospace }
td.id i { font-size: 0 } td.id i::before { content: "…"; font-size: 13px } td.t { white-space: normal; min-width: 260px; overflow-wrap: anywhere }
.n { text-align: right; font-variant-numeric: tabular-nums }
svg { width: 100%; height: auto; display: block } svg text { font: 12px system-ui, sans-serif; fill: var(--ink) }
svg text.note { fill: var(--soft) } .grid { stroke: var(--edge) } .hit { fill: transparent }
.outage { fill: var(--bad); fill-opacity: .18 } .hit:hover { fill: var(--edge); fill-opacity: .45 } .bar { fill: var(--c1) }
.line { fill: none; stroke-width: 2; stroke-linejoin: round } .dot { stroke: none }
.line.s1 { stroke: var(--c1) } .line.s2 { stroke: var(--c2); stroke-dasharray: 7 3 }
.line.s3 { stroke: var(--c3); stroke-dasharray: 2 3 } .line.s4 { stroke: var(--c4); stroke-dasharray: 9 3 2 3 }
.line.s5 { stroke: var(--c5) } .line.s6 { stroke: var(--c6); stroke-dasharray: 7 3 }
.line.s7 { stroke: var(--c7); stroke-dasharray: 2 3 } .line.s8 { stroke: var(--c8); stroke-dasharray: 9 3 2 3 }
.dot.s1 { fill: var(--c1) } .dot.s2 { fill: var(--c2) } .dot.s3 { fill: var(--c3) } .dot.s4 { fill: var(--c4) }
.dot.s5 { fill: var(--c5) } .dot.s6 { fill: var(--c6) } .dot.s7 { fill: var(--c7) } .dot.s8 { fill: var(--c8) }
.legend { display: flex; flex-wrap: wrap; gap: 2px 18px; list-style: none; margin: 0 0 4px; padding: 0;
font-size: 13px } .legend svg { display: inline-block; width: 26px; height: 8px; margin-right: 6px;
vertical-align: middle }
@media (max-width: 640px) { .wide > svg { min-width: 600px } }
.verdict a { white-space: nowrap }
@media print { nav { display: none } section { break-inside: avoid } }
"""


#: Longer texts may be broken into lines.
_LONG: Final = 40
#: Ids are cut in the middle: their beginning is the producer's, and only the end differs between its messages.
ID_COLUMN: Final = "message"
_ID_ENDS: Final = 12
_STAGES: Final = (
    '<p class="note"><b>store</b>: from the commit to the log. <b>wait</b>: from there, or from its due time, to the first '
    "delivery. <b>work</b>: from there to its ack. <b>total</b>: from the commit to the ack.</p>"
)
_KIND_TEXTS: Final = {
    "lost": "Its outbox row was committed and sent, but it is neither in the log nor in the schedule.",
    "ghost": "Stored, but no outbox has or had a row of it.",
    "duplicate": "Stored more than once under one id.",
    "late": "Stored or waiting long after its commit or due time.",
    "altered": "Stored with another checksum than its row has.",
    "skipped": "Never delivered to a group whose cursor is beyond it.",
}


def render(facts: ReportFacts) -> str:
    """The whole page."""
    charts = facts.bucket_s
    sections = (
        ("flow", "Flow", time_chart(facts.flow, bucket_s=charts) + grid(facts.subjects)),
        (
            "latency",
            "Latency",
            time_chart(facts.latency, bucket_s=charts) + _STAGES + grid(facts.stages),
        ),
        ("lag", "Lag of the groups", _lag(facts) + grid(facts.groups)),
        (
            "dead",
            "Retries and dead letters",
            time_chart(facts.redeliveries, bucket_s=charts) + _reasons(facts) + grid(facts.dead),
        ),
        (
            "delay",
            "Delayed messages",
            time_chart(facts.lateness, bucket_s=charts) + grid(facts.delays),
        ),
        ("audit", "Audit", _audit(facts)),
    )
    links = "".join(f'<a href="#{name}">{title}</a>' for name, title, _ in sections)
    body = "".join(
        f'<section id="{name}"><h2>{title}</h2>{content}</section>'
        for name, title, content in sections
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta name="color-scheme" content="light dark"><title>Messages – QMQ report</title>'
        f"<style>{STYLE}</style></head><body><header><h1>The life of the messages</h1>"
        f'<p class="note">{_span(facts)}</p>{banner(facts.verdict)}'
        f"{_tiles(facts.totals)}<nav>{links}</nav></header><main>{body}</main>"
        f"<footer>Made {stamp(facts.made_at)} UTC from the tables in "
        f"<code>{escape(facts.tables)}</code>. Times are UTC. Latencies are quantiles of KLL "
        "sketches, exact to about one percent of rank.</footer></body></html>\n"
    )


def grid(shown: Grid) -> str:
    """A table, or a sentence when it has no rows."""
    if not shown.rows:
        return f'<p class="none">No {escape(shown.title.lower())}.</p>'
    numeric = [
        all(isinstance(row[place], int | float | None) for row in shown.rows)
        for place in range(len(shown.columns))
    ]
    head = "".join(
        f'<th scope="col"{_right(is_number)}>{escape(name)}</th>'
        for name, is_number in zip(shown.columns, numeric, strict=True)
    )
    texts = [column_cells(column) for column in zip(*shown.rows, strict=True)]
    rows = "".join(
        "<tr>"
        + "".join(
            f"<td{_class(name, value, is_number=is_number)}>{_shown(name, text)}</td>"
            for name, value, text, is_number in zip(shown.columns, row, line, numeric, strict=True)
        )
        + "</tr>"
        for row, line in zip(shown.rows, zip(*texts, strict=True), strict=True)
    )
    more = ""
    if shown.total is not None and shown.total > len(shown.rows):
        more = f'<p class="note">{len(shown.rows):,} of {shown.total:,} are shown.</p>'
    title = f"<h3>{escape(shown.title)}</h3>" if shown.title else ""
    return (
        f'{title}<div class="wide" tabindex="0"><table><thead><tr>{head}'
        f"</tr></thead><tbody>{rows}</tbody></table></div>{more}"
    )


def _class(column: str, value: object, *, is_number: bool) -> str:
    if is_number:
        return _right(is_number)
    if column == ID_COLUMN:
        return f' class="id" title="{escape(cell(value))}"'
    return ' class="t"' if isinstance(value, str) and len(value) > _LONG else ""


def _shown(column: str, text: str) -> str:
    """A text; the middle of an id is hidden, but copying includes it."""
    if column != ID_COLUMN or len(text) <= _ID_ENDS:
        return escape(text)
    first, last = text[: _ID_ENDS // 2], text[-_ID_ENDS // 2 :]
    return f"{escape(first)}<i>{escape(text[_ID_ENDS // 2 : -_ID_ENDS // 2])}</i>{escape(last)}"


def _right(is_number: bool) -> str:
    return ' class="n"' if is_number else ""


def _span(facts: ReportFacts) -> str:
    if facts.first_at is None or facts.last_at is None:
        return "No message is in the tables yet."
    if facts.first_at == facts.last_at:
        return f"At {stamp(facts.first_at)} UTC"
    return f"{stamp(facts.first_at)} to {stamp(facts.last_at)} UTC"


def banner(verdict: Verdict | None) -> str:
    """The verdict in one line; claims no more than the audit could judge."""
    if verdict is None:
        return (
            '<p class="verdict open"><strong>Not audited yet.</strong> '
            "Run <code>qmq pipeline audit</code>.</p>"
        )
    judged = f"{verdict.judged.get('committed', 0):,} commits and {verdict.judged.get('stored', 0):,} stored messages judged"
    if verdict.findings:
        kinds = ", ".join(
            f'<a href="#finding-{kind}">{count:,} {kind}</a>'
            for kind, count in verdict.counts.items()
            if count
        )
        return f'<p class="verdict bad"><strong>Findings:</strong> {kinds}. {judged}.</p>'
    if not any(verdict.judged.get(name) for name in ("committed", "stored")):
        return f'<p class="verdict open"><strong>Nothing was judged yet.</strong> {judged}.</p>'
    limits = ', <a href="#audit">as far as it could be judged</a>' if verdict.coverage else ""
    return f'<p class="verdict good"><strong>Nothing was lost{limits}.</strong> {judged}.</p>'


def _tiles(values: Mapping[str, int | str]) -> str:
    tiles = "".join(
        f"<div><dt>{escape(name)}</dt><dd>{escape(cell(value))}</dd></div>"
        for name, value in values.items()
    )
    return f'<dl class="tiles">{tiles}</dl>'


def _reasons(facts: ReportFacts) -> str:
    if not facts.dead_by_reason:
        return ""
    title = "Dead letters by reason"
    return f"<h3>{title}</h3>{bar_chart(title, facts.dead_by_reason)}"


def _lag(facts: ReportFacts) -> str:
    """The chart, unless all its values are zero."""
    if facts.lag.series and not any(any(known(one.values)) for one in facts.lag.series):
        return '<p class="none">No group was ever behind at the end of a step of the charts.</p>'
    return time_chart(facts.lag, bucket_s=facts.bucket_s)


def _audit(facts: ReportFacts) -> str:
    verdict = facts.verdict
    if verdict is None:
        return '<p class="none">No audit has run over these tables.</p>'
    parts = [
        f"<p>Run {escape(verdict.run)}, as of {stamp(verdict.as_of)} UTC.</p>",
        f"<h3>What was judged</h3>{_tiles(verdict.judged)}"
        '<p class="note">Expected, delivered and settled count pairs of a message and a group.</p>',
    ]
    if verdict.coverage:
        reasons = "".join(f"<li>{escape(reason)}</li>" for reason in verdict.coverage)
        parts.append(f"<h3>What could not be judged</h3><ul>{reasons}</ul>")
    for kind, count in verdict.counts.items():
        text = escape(_KIND_TEXTS.get(kind, ""))
        head = f"{kind.capitalize()}: {count:,} <small>{text}</small>"
        parts.append(f'<h3 id="finding-{kind}">{head}</h3>')
        if found := facts.findings.get(kind):
            parts.append(grid(found))
    return "".join(parts)
