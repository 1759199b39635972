"""P-f as data grows: all jobs, the same once more when nothing is new, and those two that meet every message of the past.

`ingest` writes all there is, `audit` joins all of it in each run. So these two are measured at every size;
the others, which make anew only what something came in for, up to the middle one unless there is time for more.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks.measure import elapsed_s, paired_ratios
from benchmarks.pipeline.logs import Filling, Folders, conditions
from benchmarks.result import Goal, Row
from benchmarks.suite import Bench

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


_BLOCK_BYTES: Final = 1024 * 1024
NOTE: Final = "a row of each in an outbox, each pulled and acked by a group"
#: Log and outbox of it, for what is measured with them between two sizes.
LOG: Final = "grown"
_ALL: Final = "ingest to report"
_TWO: Final = "ingest and audit"


class Growth:
    """One log, with its outbox, that grows; and what the pipeline took for each of its sizes."""

    def __init__(self, bench: Bench, spark: SparkSession) -> None:
        self._bench = bench
        self._spark = spark
        self._filling = Filling(bench.directory / LOG, outbox=bench.directory / f"{LOG}.db")
        self._folders = Folders(bench.directory / f"{LOG}-tables")
        #: Work → messages → seconds of each round.
        self._taken_s: dict[str, dict[int, list[float]]] = {_TWO: {}, _ALL: {}}
        #: Messages → seconds of all jobs right behind a run of them.
        self._repeated_s: dict[int, list[float]] = {}

    def to(self, messages: int) -> None:
        """Let it grow to so many; nothing when it has them already."""
        self._filling.add(messages - self._filling.messages)

    def run_all(self, rounds: int) -> None:
        """All jobs on what there is, and once more."""
        from qmq_pipeline.jobs.run import run

        page = str(self._bench.directory / "report.html")
        taken_s = self._taken_s[_ALL][self._filling.messages] = []
        repeated_s = self._repeated_s[self._filling.messages] = []
        for _ in range(rounds):
            self._read_through()
            config = config_of(self._bench.directory, self._folders.fresh())
            work = partial(run, self._spark, config, report_path=page)
            taken_s.append(elapsed_s(work))
            repeated_s.append(elapsed_s(work))
            self._folders.remove()

    def run_two(self, rounds: int) -> None:
        """The jobs whose work is for all there is, whatever is new."""
        taken_s = self._taken_s[_TWO][self._filling.messages] = []
        for _ in range(rounds):
            self._read_through()
            config = config_of(self._bench.directory, self._folders.fresh())
            taken_s.append(elapsed_s(partial(ingest_and_audit, self._spark, config)))
            self._folders.remove()

    def _read_through(self) -> None:
        """Read all files once: a system may have put away what was written minutes ago, and then the disk
        would be measured where there is much.
        """
        directory = self._bench.directory
        for path in (directory / f"{LOG}.db", *(directory / LOG).rglob("*")):
            if path.is_file():
                with path.open("rb", buffering=0) as file:
                    while file.read(_BLOCK_BYTES):
                        pass

    def rows(self) -> list[Row]:
        """How much more one message of many costs than one of few, and what a run costs when nothing is new."""
        measured = {name: taken_s for name, taken_s in self._taken_s.items() if taken_s}
        rows = [row for name, taken_s in measured.items() for row in _growth(name, taken_s)]
        most = max(self._repeated_s)
        goal = None
        ratios = paired_ratios(self._taken_s[_ALL][most], self._repeated_s[most])
        figure = f"P-f: {most:,} messages / once more when nothing is new"
        return [*rows, _row(figure, "ratio", ratios, most, goal)]


def _growth(name: str, taken_s: dict[int, list[float]]) -> list[Row]:
    """What one message costs at each size, and beside that at the least one."""
    least, most = min(taken_s), max(taken_s)
    # The better round: the first one finds a JVM that has not compiled these jobs yet.
    least_s = min(taken_s[least]) / least
    ratios = [
        _row(
            f"P-f: {name}, one message of {messages:,} / one of {least:,}",
            "ratio",
            [one / messages / least_s for one in taken],
            messages,
            Goal(bound=1.2, is_floor=False),
        )
        for messages, taken in taken_s.items()
        if messages > least or least == most
    ]
    return ratios + [
        _row(
            f"P-f: {name}, {messages:,} messages",
            "s per million",
            [one * 1e6 / messages for one in taken],
            messages,
        )
        for messages, taken in taken_s.items()
    ]


def ingest_and_audit(spark: SparkSession, config: Any) -> Any:
    """Both sides into tables, and one against the other; what was found."""
    from qmq_pipeline.jobs.audit import audit
    from qmq_pipeline.jobs.ingest import ingest

    ingest(spark, config)
    return audit(spark, config)


def _row(
    figure: str, unit: str, samples: Sequence[float], messages: int, goal: Goal | None = None
) -> Row:
    return Row(
        figure=figure,
        unit=unit,
        samples=tuple(samples),
        conditions=conditions(messages, f"{NOTE}; files in the page cache"),
        goal=goal,
    )


def config_of(directory: Path, tables: str) -> Any:
    """Log, outbox and tables, as the jobs want them."""
    from qmq_client.settings.sections import DatabaseSection
    from qmq_pipeline.places.config import AuditOptions, PipelineConfig
    from qmq_pipeline.places.options import Place

    url = f"sqlite:///{directory / LOG}.db"
    section = DatabaseSection(name="orders", url=url, keep_sent_s=86_400.0)
    place = Place(path=str(directory / LOG))
    # No grace: what was filled a moment ago is judged, too.
    audit = AuditOptions(grace_s=0.0)
    return PipelineConfig(tables=tables, place=place, databases=(section,), audit=audit)
