"""P-f as data grows: everything from ingest to report, and the same once more when nothing is new."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Final

from benchmarks.measure import elapsed_s, paired_ratios
from benchmarks.pipeline.logs import Filling, Folders, conditions
from benchmarks.result import Goal, Row
from benchmarks.suite import Bench

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

NOTE: Final = "a row of each in an outbox, each pulled and acked by a group"
#: Log and outbox of it, for what is measured with them between two sizes.
LOG: Final = "grown"


class Growth:
    """One log, with its outbox, that grows; and what the whole pipeline took for each of its sizes."""

    def __init__(self, bench: Bench, spark: SparkSession) -> None:
        self._bench = bench
        self._spark = spark
        self._filling = Filling(bench.directory / LOG, outbox=bench.directory / f"{LOG}.db")
        #: Messages → seconds of each round, and of the repetition right behind it.
        self._taken: dict[int, tuple[list[float], list[float]]] = {}

    def to(self, messages: int, rounds: int) -> None:
        """Let it grow to so many and run everything; nothing when it has them already."""
        from qmq_pipeline.jobs.run import run

        if messages == self._filling.messages:
            return
        self._filling.add(messages - self._filling.messages)
        folders = Folders(self._bench.directory / f"{LOG}-tables")
        taken_s, repeated_s = self._taken[messages] = ([], [])
        for _ in range(rounds):
            config = config_of(self._bench.directory, folders.fresh())
            taken_s.append(elapsed_s(partial(run, self._spark, config)))
            repeated_s.append(elapsed_s(partial(run, self._spark, config)))
            folders.remove()

    def rows(self) -> list[Row]:
        """How much more one message of many costs than one of few, and what a run costs when nothing is new."""
        least, most = min(self._taken), max(self._taken)
        least_s = median(self._taken[least][0]) / least
        rows = [
            _row(
                f"P-f: one message of {messages:,} / one of {least:,}",
                "ratio",
                [one / messages / least_s for one in taken],
                messages,
                Goal(bound=1.1, is_floor=False),
            )
            for messages, (taken, _) in self._taken.items()
            if messages > least or least == most
        ]
        rows.append(
            _row(
                f"P-f: {most:,} messages / once more when nothing is new",
                "ratio",
                paired_ratios(*self._taken[most]),
                most,
                Goal(bound=3.5, is_floor=True),
            )
        )
        rows += [
            _row(
                f"P-f: ingest to report, {messages:,} messages",
                "s per million",
                [one * 1e6 / messages for one in taken],
                messages,
            )
            for messages, (taken, _) in self._taken.items()
        ]
        return rows


def _row(
    figure: str, unit: str, samples: Sequence[float], messages: int, goal: Goal | None = None
) -> Row:
    return Row(
        figure=figure,
        unit=unit,
        samples=tuple(samples),
        conditions=conditions(messages, NOTE),
        goal=goal,
    )


def config_of(directory: Path, tables: str) -> Any:
    """Log, outbox and tables, as the jobs want them."""
    from qmq_client.settings.config import DatabaseSection
    from qmq_pipeline.places.config import AuditOptions, PipelineConfig
    from qmq_pipeline.places.options import Place

    url = f"sqlite:///{directory / LOG}.db"
    section = DatabaseSection(name="orders", url=url, keep_sent_s=86_400.0)
    place = Place(path=str(directory / LOG))
    # No grace: what was filled a moment ago is judged, too.
    audit = AuditOptions(grace_s=0.0)
    return PipelineConfig(tables=tables, place=place, databases=(section,), audit=audit)
