"""Results for the terminal and for programs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import count, product
from string import ascii_lowercase
from typing import Final

import msgspec
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from benchmarks.result import Conditions, Report, Result, Row, Verdict, number
from benchmarks.suite import Benchmark

_COLOURS: Final[dict[Verdict, str]] = {
    "met": "green",
    "met, not in every round": "yellow",
    "not met": "red",
    "no goal": "dim",
}

BUSY: Final = (
    "The machine was busy with other work: the figures say more about that than about the code."
)


def show_list(console: Console, benchmarks: Iterable[Benchmark]) -> None:
    """What can be run."""
    table = Table(box=None)
    for heading in ("No.", "Name", "What", "Goal"):
        table.add_column(heading)
    for entry in benchmarks:
        table.add_row(entry.number, entry.name, entry.summary, entry.goal)
    console.print(table)


def show_result(console: Console, result: Result) -> None:
    """One benchmark's figures with everything needed to read them."""
    console.print(f"\n[bold]{result.number} {result.name}[/]: {result.summary}", highlight=False)
    console.print(f"[dim]{escape(circumstances(result))}[/]", highlight=False)
    if result.is_busy:
        console.print(f"[yellow]{BUSY}[/]")
    if result.failure:
        console.print(f"[red]failed:[/] {escape(result.failure)}", highlight=False)
    for note in result.notes:
        console.print(f"[yellow]{escape(note)}[/]", highlight=False)
    for heading, lines in tables_of(result).items():
        show_comparison(console, heading, lines)
    if rows := [row for row in result.rows if not row.cells or row.goal]:
        show_rows(console, rows)


def show_comparison(console: Console, heading: str, lines: Mapping[str, Mapping[str, Row]]) -> None:
    """The medians of one table."""
    columns = list(dict.fromkeys(column for line in lines.values() for column in line))
    table = Table(box=None, pad_edge=False)
    table.add_column(heading)
    for column in columns:
        table.add_column(column, justify="right")
    for name, line in lines.items():
        medians = [number(line[each].spread.median) if each in line else "" for each in columns]
        table.add_row(name, *medians)
    console.print(table)


def show_rows(console: Console, rows: Sequence[Row]) -> None:
    """A line for each figure."""
    table = Table(box=None, pad_edge=False)
    table.add_column("figure")
    for heading in ("min", "median", "max"):
        table.add_column(heading, justify="right", style="bold" if heading == "median" else None)
    for heading in ("unit", "goal", "", ""):
        table.add_column(heading)
    letters = letter_conditions(rows)
    for row in rows:
        spread = row.spread
        table.add_row(
            row.figure,
            *(number(value) for value in (spread.min, spread.median, spread.max)),
            row.unit,
            str(row.goal or ""),
            f"[{_COLOURS[row.verdict]}]{'' if row.goal is None else row.verdict}[/]",
            letters[row.conditions],
        )
    console.print(table)
    for conditions, letter in letters.items():
        console.print(f"[dim]{letter}: {escape(in_words(conditions))}[/]", highlight=False)


def letter_conditions(rows: Iterable[Row]) -> dict[Conditions, str]:
    """A letter, or several, for each of the conditions that the rows were measured with."""
    different = dict.fromkeys(row.conditions for row in rows)
    letters = (
        "".join(word) for length in count(1) for word in product(ascii_lowercase, repeat=length)
    )
    return dict(zip(different, letters, strict=False))


def tables_of(result: Result) -> dict[str, dict[str, dict[str, Row]]]:
    """By heading, line and column: the figures that are shown in tables."""
    tables: dict[str, dict[str, dict[str, Row]]] = {}
    for row in result.rows:
        for cell in row.cells:
            tables.setdefault(cell.table, {}).setdefault(cell.line, {})[cell.column] = row
    return tables


def circumstances(result: Result) -> str:
    """Version, machine, load and effort in one line."""
    machine = result.machine
    return (
        f"{result.version}; {machine.python}; {machine.kernel}; {machine.processor_count} × "
        f"{machine.processor}, {machine.memory_bytes / 1024**3:.0f} GiB; {machine.disk}, "
        f"flush of 4 KiB {machine.flush_ms} ms; load {result.load_before} before, "
        f"{result.load_after} after, others took {100 * result.others_share:.0f} % of the "
        f"processors; {rounds(result)}; {result.duration_s:.0f} s; "
        f"{result.started_at}"
    )


def rounds(result: Result) -> str:
    """How much was run."""
    most = max((len(row.samples) for row in result.rows), default=0)
    return f"{most} round{'' if most == 1 else 's'} ({result.effort})"


def in_words(conditions: Conditions) -> str:
    """A row's conditions in one line."""
    parts = [conditions.durability, conditions.client]
    if conditions.batch_messages is not None:
        parts.append(f"batch {conditions.batch_messages}")
    if conditions.message_bytes is not None:
        parts.append(f"{conditions.message_bytes} B")
    if conditions.written_bytes is not None:
        parts.append(f"{size(conditions.written_bytes)} written per round")
    if conditions.is_burst:
        parts.append("burst")
    if conditions.note:
        parts.append(conditions.note)
    return "; ".join(parts)


def size(count_bytes: int) -> str:
    """Bytes for people."""
    if count_bytes >= 1024**3:
        return f"{count_bytes / 1024**3:.1f} GiB"
    if count_bytes >= 1024**2:
        return f"{count_bytes / 1024**2:.0f} MiB"
    return f"{count_bytes / 1024:.0f} KiB"


def encode_report(report: Report) -> bytes:
    """The results as JSON for programs, with what is derived from the samples."""
    results = []
    for result in report.results:
        fields = msgspec.to_builtins(result)
        fields["rows"] = [fields_of(row) for row in result.rows]
        results.append(fields)
    return msgspec.json.format(msgspec.json.encode({"results": results}), indent=2) + b"\n"


def fields_of(row: Row) -> dict[str, object]:
    """A row with its spread, verdict and burst mark written out."""
    fields: dict[str, object] = msgspec.to_builtins(row)
    spread = row.spread
    fields.update(min=spread.min, median=spread.median, max=spread.max)
    fields.update(verdict=row.verdict, is_burst=row.conditions.is_burst)
    return fields


def decode_report(data: bytes) -> Report:
    """The results of an earlier run; what was derived is derived anew."""
    return msgspec.json.decode(data, type=Report)
