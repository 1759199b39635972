"""What a benchmark hands over: rows with samples, conditions and goals. Values only.

One row is one figure. It keeps one sample for each round and the conditions without which the figure
says nothing. A goal is judged by the median, and the row says when single rounds missed it.
"""

from __future__ import annotations

from typing import Final, Literal

import msgspec

from benchmarks.measure import Spread

#: Below this a figure shows what the machine does for a moment, not what it keeps up: new blocks
#: come several times faster for the first gigabytes (caches of the host, dirty pages).
SUSTAINED_BYTES_MIN: Final = 8 * 1024**3

#: Share of the processors that others may take during a run of which the figures are to be believed.
QUIET_SHARE_MAX: Final = 0.1

Verdict = Literal["met", "met, not in every round", "not met", "no goal"]


class Goal(msgspec.Struct, frozen=True, kw_only=True):
    """A bound that the median has to keep."""

    bound: float
    #: Whether more is better.
    is_floor: bool
    #: Of the performance goal, where it is not the benchmark's own.
    number: str = ""

    def is_kept_by(self, value: float) -> bool:
        """Whether this value is on the right side of the bound."""
        return value >= self.bound if self.is_floor else value <= self.bound

    def __str__(self) -> str:
        return f"{'≥' if self.is_floor else '≤'} {number(self.bound)}"


class Conditions(msgspec.Struct, frozen=True, kw_only=True):
    """What a figure was measured with."""

    #: When a message counts: "fdatasync before the answer", "SQLite WAL, synchronous=FULL", "none".
    durability: str
    #: What drove it: library, transport, number of connections and processes.
    client: str
    batch_messages: int | None = None
    message_bytes: int | None = None
    #: Bytes that one round handed to the disk, the median of all rounds; None where none are.
    written_bytes: int | None = None
    #: What else must be known to read the figure.
    note: str = ""

    @property
    def is_burst(self) -> bool:
        """Whether too little was written to speak of a sustained rate."""
        return self.written_bytes is not None and self.written_bytes < SUSTAINED_BYTES_MIN


class Cell(msgspec.Struct, frozen=True, kw_only=True):
    """Where a figure stands in a table of what was compared, which is shorter than a line for each."""

    #: The table's heading.
    table: str
    line: str
    column: str


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One figure."""

    figure: str
    unit: str
    #: One for each round, in their order.
    samples: tuple[float, ...]
    conditions: Conditions
    goal: Goal | None = None
    cells: tuple[Cell, ...] = ()

    @property
    def spread(self) -> Spread:
        """Least, middle and greatest sample."""
        return Spread.of(self.samples)

    @property
    def verdict(self) -> Verdict:
        """Whether the goal is met; by the median, and not silently when single rounds missed it."""
        if self.goal is None:
            return "no goal"
        if not self.goal.is_kept_by(self.spread.median):
            return "not met"
        if all(self.goal.is_kept_by(sample) for sample in self.samples):
            return "met"
        return "met, not in every round"


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where the figures were taken; it has no name on purpose."""

    processor: str
    processor_count: int
    memory_bytes: int
    kernel: str
    python: str
    #: File system and kind of device under the benchmark's directories.
    disk: str
    #: Median of some 4-KiB appends, each followed by fdatasync: what one flush costs here.
    flush_ms: float


class Result(msgspec.Struct, frozen=True, kw_only=True):
    """One benchmark's run."""

    #: "R2", or "wire" where the performance goals have no number.
    number: str
    name: str
    summary: str
    #: The goal in words.
    goal: str
    #: Version of the code, with the commit and a mark when files were changed.
    version: str
    effort: str
    machine: Machine
    started_at: str
    duration_s: float
    #: Load average of one minute.
    load_before: float
    load_after: float
    #: Share of all processors that everything else took during the run.
    others_share: float
    rows: tuple[Row, ...] = ()
    #: What else is to be said, such as who could not be measured and why.
    notes: tuple[str, ...] = ()
    #: Why there are no rows.
    failure: str = ""

    @property
    def is_busy(self) -> bool:
        """Whether others took so much of the machine that the figures are theirs."""
        return self.others_share > QUIET_SHARE_MAX


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """All results of a run, or of several runs kept on one page."""

    results: tuple[Result, ...]


def number(value: float) -> str:
    """A figure for people: three significant digits, thousands set apart."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
