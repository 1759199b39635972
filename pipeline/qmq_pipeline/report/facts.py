"""The contents of the report, as plain values."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One line of a chart: a value for each bucket of time, or None."""

    name: str
    values: tuple[float | None, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TimeChart:
    """Lines over time."""

    title: str
    #: The unit of the vertical axis.
    unit: str
    #: The beginning of each bucket.
    times: tuple[datetime, ...]
    series: tuple[Series, ...]
    is_logarithmic: bool = False
    #: For each bucket whether messages were committed in it but none stored; empty if not shown.
    outages: tuple[bool, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar of a chart."""

    name: str
    value: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """A table: numbers to the right, texts to the left."""

    #: Its heading; empty if it continues under the one above.
    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[object, ...], ...]
    #: The number of all rows, if not all are shown.
    total: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The result of the newest audit."""

    run: str
    as_of: datetime
    counts: dict[str, int]
    judged: dict[str, int]
    coverage: tuple[str, ...]

    @property
    def findings(self) -> int:
        """The number of findings of all kinds."""
        return sum(self.counts.values())


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldFacts:
    """The facts of the page from the gold tables."""

    first_at: datetime | None
    last_at: datetime | None
    #: Length of a bucket of the charts.
    bucket_s: int
    #: Name → value, shown large at the top.
    totals: dict[str, int | str]
    flow: TimeChart
    latency: TimeChart
    lag: TimeChart
    redeliveries: TimeChart
    lateness: TimeChart
    dead_by_reason: tuple[Bar, ...] = ()
    subjects: Grid
    stages: Grid
    groups: Grid
    dead: Grid
    delays: Grid


@dataclass(frozen=True, slots=True, kw_only=True)
class ReportFacts(GoldFacts):
    """The facts of the page."""

    made_at: datetime
    #: The place of the tables.
    tables: str
    verdict: Verdict | None
    #: Kind of finding → its table, in the order of the audit.
    findings: dict[str, Grid] = field(default_factory=dict)


def known(values: Sequence[float | None]) -> list[float]:
    """The values that are not None."""
    return [value for value in values if value is not None]
