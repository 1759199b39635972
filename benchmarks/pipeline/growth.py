"""P-f as data grows: everything from ingest to report, and the same once more when nothing is new."""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from benchmarks.measure import elapsed_s, paired_ratios
from benchmarks.pipeline.logs import Folders, conditions, fill
from benchmarks.result import Goal, Row
from benchmarks.suite import Bench

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: A round takes minutes once there are millions of messages.
_ROUNDS_MAX: Final = 2
NOTE: Final = "a row of each in an outbox, each pulled and acked by a group"


def growth_rows(bench: Bench, spark: SparkSession, small: int, large: int) -> list[Row]:
    """How much more one message of many costs than one of few.

    The large log and its outbox stay, as `large` and `large.db`, for what is measured with them next.
    """
    many = _grown(bench, spark, large, "large", min(bench.rounds, _ROUNDS_MAX))
    if small == large:
        few = many
    else:
        few = _grown(bench, spark, small, "small", min(bench.rounds, _ROUNDS_MAX))
        shutil.rmtree(bench.directory / "small")
    per_message_s = median(few[0]) / small
    figures: Sequence[tuple[str, str, Sequence[float], int, Goal | None]] = (
        (
            f"P-f: one message of {large:,} / one of {small:,}",
            "ratio",
            [one / large / per_message_s for one in many[0]],
            large,
            Goal(bound=1.1, is_floor=False),
        ),
        (
            f"P-f: {large:,} messages / once more when nothing is new",
            "ratio",
            paired_ratios(*many),
            large,
            Goal(bound=3.5, is_floor=True),
        ),
        *(
            (
                f"P-f: ingest to report, {messages:,} messages",
                "s per million",
                [one * 1e6 / messages for one in taken],
                messages,
                None,
            )
            for messages, (taken, _) in ((small, few), (large, many))
        ),
    )
    return [
        Row(
            figure=figure,
            unit=unit,
            samples=tuple(samples),
            conditions=conditions(messages, NOTE),
            goal=goal,
        )
        for figure, unit, samples, messages, goal in figures
    ]


def config_of(directory: Path, name: str, tables: str) -> Any:
    """Log, outbox and tables, as the jobs want them."""
    from qmq_client.settings.config import DatabaseSection
    from qmq_pipeline.places.config import AuditOptions, PipelineConfig
    from qmq_pipeline.places.options import Place

    url = f"sqlite:///{directory / name}.db"
    section = DatabaseSection(name="orders", url=url, keep_sent_s=86_400.0)
    place = Place(path=str(directory / name))
    # No grace: what was filled a moment ago is judged, too.
    audit = AuditOptions(grace_s=0.0)
    return PipelineConfig(tables=tables, place=place, databases=(section,), audit=audit)


def _grown(
    bench: Bench, spark: SparkSession, messages: int, name: str, rounds: int
) -> tuple[list[float], list[float]]:
    """Seconds of each round, and of the repetition right behind it."""
    from qmq_pipeline.jobs.run import run

    fill(bench.directory / name, messages, outbox=bench.directory / f"{name}.db")
    folders = Folders(bench.directory / f"{name}-tables")
    taken_s: list[float] = []
    repeated_s: list[float] = []
    for _ in range(rounds):
        config = config_of(bench.directory, name, folders.fresh())
        taken_s.append(elapsed_s(partial(run, spark, config)))
        repeated_s.append(elapsed_s(partial(run, spark, config)))
    folders.remove()
    return taken_s, repeated_s
