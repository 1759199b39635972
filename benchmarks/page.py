"""The page `docs/benchmarks/README.md` with its plots and `results.json`: made here, never typed.

A benchmark that was not run this time keeps the result of its last run, with that run's machine, load
and version, so the page may hold results of several commits and says so for each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Final

from msgspec.structs import replace

from benchmarks.plot import draw
from benchmarks.report import (
    BUSY,
    circumstances,
    decode_report,
    encode_report,
    size,
    tables_of,
)
from benchmarks.result import Conditions, Report, Result, Row, number
from benchmarks.suite import BENCHMARKS

#: The benchmark that the page opens with.
_OPENING: Final = "peers"
#: Of a line of text, as on all pages.
COLUMNS_MAX: Final = 120
_INTRODUCTION: Final = """\
# Benchmarks

Made by `python3 dev.py bench`; do not edit. The same results for programs: [results.json](results.json).

- Each figure is the median of the rounds with the least and the greatest round beside it. What is compared ran in turns
  within each round, in alternating order, and ratios were made within the round.
- A goal is *met* when the median keeps it; where single rounds missed it the table says so. Goals are judged on
  whatever machine ran them.
- *Durable* means: answered after `fdatasync`. *Burst* means that a round wrote less than 8 GiB: such a rate need not
  last, because the first gigabytes of new blocks come faster than the following ones.
- Processes share the machine's processors; each section says how much of them others took meanwhile.
"""


def write_pages(report: Report, folder: Path) -> Path:
    """Write page, plots and results into the folder; returns the page's path."""
    folder.mkdir(parents=True, exist_ok=True)
    stored = folder / "results.json"
    earlier = decode_report(stored.read_bytes()) if stored.exists() else Report(results=())
    merged = merge(earlier, report)
    stored.write_bytes(encode_report(merged))
    plots = {name: svg for result in merged.results for name, svg in draw(result).items()}
    for path in folder.glob("*.svg"):
        if path.name not in plots:
            path.unlink()
    for name, svg in plots.items():
        (folder / name).write_text(svg, encoding="utf-8")
    page = folder / "README.md"
    page.write_text(render(merged), encoding="utf-8")
    return page


def merge(earlier: Report, later: Report) -> Report:
    """Each benchmark's last result, in the order of the list."""
    last = {result.name: result for result in (*earlier.results, *later.results)}
    kept = [(entry, last[entry.name]) for entry in BENCHMARKS if entry.name in last]
    return Report(
        results=tuple(
            without_verdict(result, entry.goal) if entry.is_indicator else result
            for entry, result in kept
        )
    )


def without_verdict(result: Result, goal: str) -> Result:
    """The same figures without bounds: what is an indicator today may have had some when it was run."""
    rows = tuple(replace(row, goal=None) for row in result.rows)
    return replace(result, goal=goal, rows=rows)


def render(report: Report) -> str:
    """The page as Markdown."""
    first = [result for result in report.results if result.name == _OPENING]
    parts = [_INTRODUCTION, *map(section, first), "## Goals", goals(report)]
    parts += [section(result) for result in report.results if result.name != _OPENING]
    return "\n\n".join(part.strip("\n") for part in parts) + "\n"


def goals(report: Report) -> str:
    """Every row that has a goal, in one table."""
    lines = ["| No. | Figure | Goal | Median | Verdict | |", "|---|---|---|---|---|---|"]
    for result in report.results:
        if result.failure:
            lines.append(f"| {result.number} | {result.summary} | {result.goal} | | **failed** | |")
        for row in result.rows:
            if row.goal is not None:
                median = f"{number(row.spread.median)} {row.unit}"
                verdict = f"**{row.verdict}**" if row.verdict == "not met" else row.verdict
                figure = f"{row.figure}{' (burst)' if row.conditions.is_burst else ''}"
                load = "busy machine" if result.is_busy else ""
                number_ = row.goal.number or result.number
                lines.append(cells(number_, figure, str(row.goal), median, verdict, load))
    return "\n".join(lines)


def section(result: Result) -> str:
    """One benchmark: circumstances, table, plots."""
    parts = [
        f"## {result.number}: {result.summary}",
        f"Goal: {result.goal}.",
        fill(f"{circumstances(result)}.", COLUMNS_MAX, break_on_hyphens=False),
    ]
    if result.effort != "full":
        parts.append(f"**Run with effort «{result.effort}»: a look, not a figure to rely on.**")
    if result.is_busy:
        parts.append(f"**{BUSY}**")
    if result.failure:
        first_line = result.failure.splitlines()[0]
        parts.append(f"**Failed:** `{first_line}`")
    if result.notes:
        parts.append(listed(result.notes))
    if not result.rows:
        return "\n\n".join(parts)
    parts += comparison(result)
    if others := [row for row in result.rows if not row.cells]:
        parts.append(table(others))
    parts += [f"![{result.number}: rounds and medians]({name})" for name in draw(result)]
    return "\n\n".join(parts)


def comparison(result: Result) -> list[str]:
    """The tables of what was compared, and with what it ran."""
    parts = []
    for heading, lines in tables_of(result).items():
        columns = list(dict.fromkeys(column for line in lines.values() for column in line))
        shown = [cells("", *columns), "|" + "---|" * (len(columns) + 1)]
        for name, line in lines.items():
            values = [in_cell(line[column]) if column in line else "" for column in columns]
            shown.append(cells(name, *values))
        parts += [f"### {heading}", "\n".join(shown)]
    ran: dict[str, str] = {}
    for row in result.rows:
        for cell in row.cells:
            conditions = row.conditions
            what = f"{cell.line}: {conditions.durability}; {conditions.client}"
            ran.setdefault(what, conditions.note)
    return [*parts, listed(f"{what}; {note}." for what, note in ran.items())] if parts else []


def listed(points: Iterable[str]) -> str:
    """A list in lines of the page's width."""
    return "\n".join(
        fill(
            point,
            COLUMNS_MAX,
            initial_indent="- ",
            subsequent_indent="  ",
            break_on_hyphens=False,
        )
        for point in points
    )


def in_cell(row: Row) -> str:
    """The median with the least and the greatest round."""
    spread = row.spread
    if len(row.samples) == 1:
        return number(spread.median)
    return f"**{number(spread.median)}** ({number(spread.min)}–{number(spread.max)})"


def table(rows: Sequence[Row]) -> str:
    """The rows with their conditions."""
    heading = (
        "Figure", "Min", "Median", "Max", "Unit", "Goal", "Verdict", "Durability", "Client",
        "Batch", "Message", "Written per round", "Note",
    )  # fmt: skip
    lines = [cells(*heading), "|" + "---|" * len(heading)]
    for row in rows:
        spread = row.spread
        lines.append(
            cells(
                row.figure,
                *(number(value) for value in (spread.min, spread.median, spread.max)),
                row.unit,
                "" if row.goal is None else str(row.goal),
                "" if row.goal is None else row.verdict,
                *condition_cells(row.conditions),
            )
        )
    return "\n".join(lines)


def condition_cells(conditions: Conditions) -> tuple[str, ...]:
    """What the table shows of the conditions."""
    written = ""
    if conditions.written_bytes is not None:
        written = size(conditions.written_bytes) + (" (burst)" if conditions.is_burst else "")
    return (
        conditions.durability,
        conditions.client,
        "" if conditions.batch_messages is None else str(conditions.batch_messages),
        "" if conditions.message_bytes is None else f"{conditions.message_bytes} B",
        written,
        conditions.note,
    )


def cells(*texts: str) -> str:
    """One line of a Markdown table."""
    return "| " + " | ".join(text.replace("|", "\\|") for text in texts) + " |"
