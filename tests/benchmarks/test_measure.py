"""The arithmetic of the benchmarks and what their pages say, without running any."""

from __future__ import annotations

import re
import sys
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from benchmarks.measure import Effort, Spread, interleave, paired_ratios, percentile
from benchmarks.page import write_pages
from benchmarks.plot import draw
from benchmarks.report import BUSY, decode_report, encode_report, letter_conditions
from benchmarks.result import (
    SUSTAINED_BYTES_MIN,
    Cell,
    Conditions,
    Goal,
    Machine,
    Report,
    Result,
    Row,
)
from benchmarks.suite import (
    BENCHMARKS,
    Bench,
    UnknownBenchmarkError,
    run_benchmark,
    select,
)

MACHINE = Machine(
    processor="P",
    processor_count=2,
    memory_bytes=2**34,
    kernel="Linux 6",
    python="CPython 3.11",
    disk="ext4 on a solid-state disk",
    flush_ms=0.1,
)


def row(*samples: float, bound: float | None = 10, written_bytes: int | None = None) -> Row:
    return Row(
        figure="messages",
        unit="ms",
        samples=samples,
        conditions=Conditions(
            durability="fdatasync | before", client="c", written_bytes=written_bytes
        ),
        goal=None if bound is None else Goal(bound=bound, is_floor=False),
    )


def result(
    name: str, *rows: Row, failure: str = "", others_share: float = 0.0, notes: tuple[str, ...] = ()
) -> Result:
    entry = next(entry for entry in BENCHMARKS if entry.name == name)
    return Result(
        number=entry.number,
        name=name,
        summary=entry.summary,
        goal=entry.goal,
        version="qmq 0 at abc",
        effort="full",
        machine=MACHINE,
        started_at="2020-01-01T00:00:00+00:00",
        duration_s=1,
        load_before=0.5,
        load_after=1.5,
        others_share=others_share,
        rows=rows,
        failure=failure,
        notes=notes,
    )


def test_variants_take_turns_and_every_other_round_runs_backwards() -> None:
    calls: list[str] = []

    def variant(name: str) -> int:
        calls.append(name)
        return len(calls)

    outcomes = interleave(
        {"a": lambda: variant("a"), "b": lambda: variant("b"), "c": lambda: variant("c")}, rounds=3
    )
    assert calls == ["a", "b", "c", "c", "b", "a", "a", "b", "c"]
    assert outcomes == {"a": [1, 6, 7], "b": [2, 5, 8], "c": [3, 4, 9]}


def test_ratios_are_made_within_a_round() -> None:
    assert paired_ratios([10, 40], [5, 10]) == [2, 4]
    with pytest.raises(ValueError, match="longer"):
        paired_ratios([1], [1, 2])


def test_a_percentile_is_a_value_that_was_measured() -> None:
    values = [float(value) for value in range(100, 0, -1)]
    assert [percentile(values, share) for share in (0.5, 0.99, 1)] == [50, 99, 100]
    assert percentile([3.0], 0.99) == 3
    assert Spread.of([3, 1, 2]) == Spread(min=1, median=2, max=3)


def test_a_full_run_has_at_least_five_rounds_and_a_quick_one_three() -> None:
    assert Effort.FULL.rounds >= 5
    assert Effort.QUICK.rounds == 3


def test_a_goal_is_judged_by_the_median_and_missed_rounds_are_reported() -> None:
    assert row(8, 9, 10).verdict == "met"
    assert row(8, 9, 11).verdict == "met, not in every round"
    assert row(8, 11, 12).verdict == "not met"
    assert row(1, bound=None).verdict == "no goal"
    floor = Goal(bound=5, is_floor=True)
    assert (floor.is_kept_by(5), floor.is_kept_by(4.9)) == (True, False)


def test_a_row_that_writes_less_than_eight_gibibytes_is_a_burst() -> None:
    assert row(1, written_bytes=SUSTAINED_BYTES_MIN - 1).conditions.is_burst
    assert not row(1, written_bytes=SUSTAINED_BYTES_MIN).conditions.is_burst
    assert not row(1).conditions.is_burst


def test_results_come_back_from_their_json() -> None:
    report = Report(results=(result("disk", row(1, 2, 3)), result("wire", failure="gone")))
    assert decode_report(encode_report(report)) == report


def test_the_page_shows_a_missed_goal_a_burst_and_a_failure(tmp_path: Path) -> None:
    missed = row(20, 21, 22, written_bytes=1024)
    report = Report(
        results=(
            result("growth", missed),
            result("long-poll", failure="ProcessError: broker ended"),
        )
    )
    text = write_pages(report, tmp_path).read_text()
    assert "| R13 | messages (burst) | ≤ 10 | 21 ms | **not met** |" in text
    assert "**Failed:** `ProcessError: broker ended`" in text
    assert "fdatasync \\| before" in text


def test_a_benchmark_that_fails_late_keeps_the_rows_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(_: Bench) -> Iterator[Row]:
        yield row(7)
        raise ValueError("no room")

    module = ModuleType("benchmarks.late")
    monkeypatch.setattr(module, "run", run, raising=False)
    monkeypatch.setitem(sys.modules, "benchmarks.late", module)
    entry = replace(BENCHMARKS[0], module="late")
    found = run_benchmark(entry, effort=Effort.TINY, directory=tmp_path)
    assert found.failure == "ValueError: no room"
    assert [one.samples for one in found.rows] == [(7,)]
    text = write_pages(Report(results=(found,)), tmp_path / "pages").read_text()
    assert "**Failed:** `ValueError: no room`" in text
    assert "| messages | 7 | 7 | 7 |" in text


def test_the_page_says_so_when_others_took_the_machine(tmp_path: Path) -> None:
    quiet, busy = result("disk", row(1)), result("wire", row(1), others_share=0.5)
    text = write_pages(Report(results=(quiet, busy)), tmp_path).read_text()
    quiet_part, _, busy_part = text.partition("## wire")
    assert "others took 0 %" in quiet_part
    assert BUSY not in quiet_part
    assert "others took 50 %" in busy_part
    assert BUSY in busy_part


def in_table(table: str, line: str, column: str, *samples: float, goal: Goal | None = None) -> Row:
    return Row(
        figure=f"{line} {column} {table}",
        unit="ms",
        samples=samples,
        conditions=Conditions(
            durability=f"{line} flushes", client=f"{line}'s client", note="a note"
        ),
        goal=goal,
        cells=(Cell(table=table, line=line, column=column),),
    )


def test_the_page_opens_with_the_tables_of_the_peers(tmp_path: Path) -> None:
    bound = Goal(bound=3, is_floor=False, number="R18")
    peers = result(
        "peers",
        in_table("Durable", "qmq", "p50 ms", 4, 2, 6, goal=bound),
        in_table("Durable", "Kafka", "p50 ms", 5),
        in_table("Durable", "Kafka", "p99 ms", 9),
        in_table("Default", "Kafka", "p50 ms", 1),
        row(7, bound=None),
        notes=("RabbitMQ was left out: no Erlang",),
    )
    text = write_pages(Report(results=(result("disk", row(1)), peers)), tmp_path).read_text()
    opening, _, rest = text.partition("## Goals")
    assert "## R4" in rest
    assert [line for line in opening.splitlines() if line.startswith("#")] == [
        "# Benchmarks",
        "## peers: the same work by Kafka, RocketMQ, Redis Streams, NATS JetStream and RabbitMQ",
        "### Durable",
        "### Default",
    ]
    assert "- RabbitMQ was left out: no Erlang" in opening
    assert (
        "|  | p50 ms | p99 ms |\n|---|---|---|\n| qmq | **4** (2–6) |  |\n| Kafka | 5 | 9 |"
    ) in opening
    assert "- Kafka: Kafka flushes; Kafka's client; a note." in opening
    assert "| messages | 7 | 7 | 7 |" in opening, "a figure without a table has its own line"
    assert "| R18 | qmq p50 ms Durable | ≤ 3 | 4 ms | **not met** |" in rest
    assert decode_report((tmp_path / "results.json").read_bytes()).results[0] == peers


def test_an_indicator_has_no_verdict_whatever_it_had_when_it_was_run(tmp_path: Path) -> None:
    text = write_pages(Report(results=(result("disk", row(20)),)), tmp_path).read_text()
    assert "not met" not in text
    assert "| messages | 20 | 20 | 20 |" in text


def test_more_conditions_than_letters_have_different_names() -> None:
    rows = [in_table("t", f"line {i}", "c", 1) for i in range(800)]
    letters = list(letter_conditions(rows).values())
    assert len(set(letters)) == 800
    assert letters[:2] + letters[25:28] + letters[-1:] == ["a", "b", "z", "aa", "ab", "adt"]


def test_a_benchmark_that_was_not_run_keeps_its_last_result(tmp_path: Path) -> None:
    write_pages(Report(results=(result("wire", row(1)), result("disk", row(2)))), tmp_path)
    write_pages(Report(results=(result("disk", row(3)),)), tmp_path)
    stored = decode_report((tmp_path / "results.json").read_bytes())
    assert [(kept.name, kept.rows[0].samples) for kept in stored.results] == [
        ("disk", (3,)),
        ("wire", (1,)),
    ]


def test_every_picture_of_the_page_is_there_and_none_is_left_over(tmp_path: Path) -> None:
    (tmp_path / "old.svg").write_text("")
    page = write_pages(Report(results=(result("disk", row(1)), result("wire", row(2)))), tmp_path)
    shown = set(re.findall(r"\]\(([^)]+\.svg)\)", page.read_text()))
    assert shown == {path.name for path in tmp_path.glob("*.svg")} == {"disk.svg", "wire.svg"}


@pytest.mark.parametrize("samples", [(1.0,), (0.0, 0.0), (0.001, 5_000_000.0), (-2.0, 3.0)])
def test_a_plot_is_well_formed_and_keeps_its_marks_inside(samples: tuple[float, ...]) -> None:
    (svg,) = draw(result("disk", row(*samples))).values()
    tree = ET.fromstring(svg)
    width = float(tree.attrib["width"])
    circles = tree.findall("{http://www.w3.org/2000/svg}circle")
    assert len(circles) == len(samples)
    assert all(0 <= float(circle.attrib["cx"]) <= width for circle in circles)


def test_benchmarks_are_found_by_number_and_by_name() -> None:
    assert [entry.name for entry in select(["r9", "disk"])] == ["disk", "commit-to-accepted"]
    assert [entry.number for entry in select(["outbox"])] == [
        "R8",
        "R9",
        "cancelled-commits",
        "R10",
        "outbox-peers",
    ]
    assert [entry.name for entry in select(["peers"])] == ["peers"]
    assert select([]) == BENCHMARKS
    with pytest.raises(UnknownBenchmarkError, match="r99"):
        select(["R99"])
