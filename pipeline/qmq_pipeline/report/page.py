"""The page: one HTML file with everything in it, without scripts and without links to other sites."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Final

from qmq_pipeline.report.charts import bar_chart, time_chart
from qmq_pipeline.report.facts import Grid, ReportFacts, Verdict, known
from qmq_pipeline.report.style import STYLE
from qmq_pipeline.report.words import cell, column_cells, stamp

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
    "lost": "Committed and sent by its row, and neither in the log nor in the schedule.",
    "ghost": "Stored, and no outbox has or had a row of it.",
    "duplicate": "Stored more than once under one id.",
    "late": "Stored or waiting long after its commit or due time.",
    "altered": "Stored with another checksum than its row has.",
    "skipped": "For a group, which came past it and never got it.",
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
    """A text; the middle of an id is not shown, and copied all the same."""
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
