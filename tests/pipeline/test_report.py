"""The report is one page that says what the tables say, to a person and in a real browser."""

from __future__ import annotations

import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from qmq_pipeline.errors import OptionError, TablesError
from qmq_pipeline.jobs.audit import audit
from qmq_pipeline.jobs.lifecycle import lifecycle
from qmq_pipeline.jobs.marts import marts
from qmq_pipeline.jobs.report import report
from qmq_pipeline.jobs.report_gold import largest
from qmq_pipeline.places.config import AuditOptions, PipelineConfig
from qmq_pipeline.report.buckets import buckets_of, held, length_text
from qmq_pipeline.report.facts import Bar, Grid, Series, TimeChart, Verdict
from qmq_pipeline.report.page import (
    banner,
    bar_chart,
    grid,
    line_chart,
    nice_end,
    round_places,
    time_chart,
)
from qmq_pipeline.report.words import cell, number
from qmq_pipeline.tables.store import Tables
from tests.pipeline.bronze import write_bronze
from tests.pipeline.browser import look_at
from tests.pipeline.gold import shop

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

AT = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


def test_the_report_tells_what_the_tables_hold(spark: SparkSession, tmp_path: Path) -> None:
    config = shop(tmp_path)
    page = tmp_path / "pages" / "report.html"
    write_bronze(config)
    lifecycle(spark, config)
    with pytest.raises(TablesError, match="no marts yet"):
        report(spark, config, str(page))
    marts(spark, config)
    assert report(spark, config, str(page)).findings is None
    assert "Not audited yet" in page.read_text()
    # Three were stored twice, two of which are written out; nothing is known of ten that came by another way.
    found = audit(spark, replace(config, audit=AuditOptions(findings_max=2)))
    assert (found.findings["duplicate"], found.findings["lost"]) == (3, 0)
    done = report(spark, config, str(page))
    assert done.findings == sum(found.findings.values())
    text = page.read_text()
    assert done.bytes == len(text.encode())
    assert "2 of 3 are shown" in text
    for words in ("no such customer", "rejected", ">163<", 'href="#finding-duplicate"', "billing"):
        assert words in text, words
    # Whoever opens it asks nobody for anything.
    assert not re.search(r"(src|href)=.?(https?:|//)|<script|@import|url\(", text)
    _in_a_browser(page)
    with pytest.raises(OptionError, match="--out"):
        report(spark, config, str(page / "below a file.html"))


def _in_a_browser(page: Path) -> None:
    document, console = look_at(page)
    assert console == ""
    assert document.count("<svg") >= 5
    assert 'id="finding-duplicate"' in document
    pictures = {}
    for is_dark in (False, True):
        picture = page.with_name(f"{is_dark}.png")
        look_at(page, is_dark=is_dark, picture=picture)
        pictures[is_dark] = picture.read_bytes()
    assert pictures[True] != pictures[False]


def test_a_report_of_nothing_says_so(spark: SparkSession, tmp_path: Path) -> None:
    config = PipelineConfig(tables=str(tmp_path / "tables"))
    Tables(spark, config.tables).note_progress("ingest", {})
    lifecycle(spark, config)
    marts(spark, config)
    report(spark, config, str(tmp_path / "report.html"))
    text = (tmp_path / "report.html").read_text()
    assert "No message is in the tables yet" in text
    assert text.count("Nothing to show") == 5


def test_buckets_are_few_and_of_lengths_that_people_think_in() -> None:
    assert buckets_of(None, None).count == 1
    minutes = buckets_of(AT, AT + timedelta(hours=3))
    assert (minutes.length_s, minutes.count) == (60, 181)
    year = buckets_of(AT, AT + timedelta(days=365))
    assert year.count <= 240
    assert length_text(year.length_s) == "7 days"
    assert (length_text(60), length_text(5)) == ("minute", "5 seconds")
    seconds = buckets_of(AT, AT + timedelta(minutes=9), least_s=1)
    assert (seconds.length_s, seconds.count) == (5, 109)
    assert buckets_of(AT, AT + timedelta(days=100_000)).count == 240


def test_charts_break_where_nothing_is_known_and_say_each_value() -> None:
    times = tuple(AT + timedelta(minutes=i) for i in range(5))
    times_in_seconds = tuple(AT + timedelta(seconds=i) for i in range(5))
    values = (1.0, 2.0, None, 4.0, None)
    chart = TimeChart(
        title="a < b", unit="ms", times=times, series=(Series(name="p50", values=values),)
    )
    svg = line_chart(chart, bucket_s=60)
    assert svg.count("<polyline") == 1
    assert svg.count("<circle") == 1
    assert svg.count("<title>") == 5
    assert "a &lt; b" in svg
    assert "p50: 4 ms" in svg
    for scale in (1e-3, 1e9):
        logarithmic = TimeChart(
            title="x",
            unit="ms",
            times=times,
            series=(Series(name="p99", values=(scale, 0.0, scale * 3, None, None)),),
            is_logarithmic=True,
        )
        assert "NaN" not in line_chart(logarithmic, bucket_s=60)
    assert "outage" not in svg
    marked = line_chart(replace(chart, outages=(False, True, True, False, False)), bucket_s=1)
    assert marked.count('<rect class="outage"') == 2 + 1, "two seconds, and the legend"
    assert "committed, and nothing stored" in marked
    assert "12:00:02 UTC" in line_chart(replace(chart, times=times_in_seconds), bucket_s=1)
    assert bar_chart("t", []) == ""
    assert bar_chart("t", [Bar(name="<i>", value=3)]).count("&lt;i&gt;") == 1
    assert [nice_end(value) for value in (0.3, 1.0, 7, 23, 260)] == [0.4, 1, 8, 24, 400]
    assert held((None, 1.0, None)) == (None, 1.0, 1.0)


@pytest.mark.parametrize(
    ("every", "count", "places"),
    [
        (timedelta(minutes=1), 45, [0, 10, 20, 30, 40]),
        (timedelta(minutes=10), 145, [0, 24, 48, 72, 96, 120, 144]),
        (timedelta(hours=6), 60, [6, 14, 22, 30, 38, 46, 54]),
        (timedelta(minutes=1), 1, [0]),
        (timedelta(seconds=5), 25, [0, 6, 12, 18, 24]),
    ],
    ids=["minutes", "a day", "two weeks", "one bucket", "seconds"],
)
def test_times_below_a_chart_are_full_hours_and_days(
    every: timedelta, count: int, places: list[int]
) -> None:
    assert round_places([AT + i * every for i in range(count)]) == places


def test_tables_on_the_page_are_escaped_and_bounded() -> None:
    shown = grid(Grid(title="T", columns=("a", "n"), rows=(("<b>", 1_234),), total=9))
    assert "&lt;b&gt;" in shown
    assert '<td class="n">1,234</td>' in shown
    assert "1 of 9 are shown" in shown
    ids = grid(Grid(title="", columns=("message",), rows=(("f" * 32,),)))
    assert f'<td class="id" title="{"f" * 32}">ffffff<i>{"f" * 20}</i>ffffff</td>' in ids
    units = grid(Grid(title="T", columns=("ms",), rows=((0.5,), (12_345.6,), (None,))))
    assert re.findall(r'<td class="n">(.*?)</td>', units) == ["0", "12,346", "–"]
    assert "<h3>" not in ids
    assert "No such things." in grid(Grid(title="Such things", columns=("a",), rows=()))
    texts = [cell(None), cell(True), cell(AT), cell(0.25), number(12_345), number(2_500_000)]
    assert texts == ["–", "yes", "2026-01-31 12:00:00", "0.25", "12.3 k", "2.5 M"]


def test_of_many_lines_the_largest_are_shown_and_the_others_as_one() -> None:
    lines: dict[str, tuple[float | None, ...]] = {
        f"g{number}": (float(number), None) for number in range(6)
    }
    shown = largest(lines, 3)
    assert [(one.name, one.values) for one in shown] == [
        ("g5", (5.0, None)),
        ("g4", (4.0, None)),
        ("4 others", (6.0, None)),
    ]
    assert [one.name for one in largest(lines, 6)] == ["g5", "g4", "g3", "g2", "g1", "g0"]


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (999.4, "999"),
        (999.7, "1,000"),
        (-999.7, "-1,000"),
        (9_996, "9,996"),
        (999_400, "999 k"),
        (999_700, "1 M"),
        (999_700_000, "1 G"),
    ],
)
def test_a_number_that_is_rounded_up_is_written_as_what_it_is_rounded_to(
    value: float, text: str
) -> None:
    assert number(value) == text


def test_a_single_minute_is_bars_and_not_a_lonely_dot() -> None:
    series = tuple(
        Series(name=name, values=(value,)) for name, value in (("p50", 3.0), ("p99", 90.0))
    )
    one = TimeChart(title="From commit to ack", unit="ms", times=(AT,), series=series)
    drawn = time_chart(one, bucket_s=60)
    assert drawn.count('class="bar"') == 2
    assert "<circle" not in drawn
    assert drawn.index("p50") < drawn.index("p99")
    two = TimeChart(
        title="From commit to ack",
        unit="ms",
        times=(AT, AT + timedelta(minutes=1)),
        series=(Series(name="p50", values=(3.0, 4.0)),),
    )
    assert time_chart(two, bucket_s=60) == line_chart(two, bucket_s=60)


@pytest.mark.parametrize(
    ("committed", "lost", "coverage", "said"),
    [
        (0, 0, ("no outbox was scanned",), "Nothing was judged yet."),
        (7, 0, (), "<strong>Nothing was lost.</strong>"),
        (7, 0, ("rows go",), 'lost, <a href="#audit">as far as it could be judged</a>.'),
        (7, 2, ("rows go",), '<a href="#finding-lost">2 lost</a>'),
    ],
)
def test_the_first_line_says_no_more_than_was_judged(
    committed: int, lost: int, coverage: tuple[str, ...], said: str
) -> None:
    verdict = Verdict(
        run="1",
        as_of=datetime(2026, 1, 31, tzinfo=UTC),
        counts={"lost": lost, "ghost": 0},
        judged={"committed": committed, "stored": 0},
        coverage=coverage,
    )
    assert said in banner(verdict)
