"""`qmq pipeline lifecycle`: from bronze, one row for each message and group, from commit to outcome.

First the action log is folded into what became of each message at each group (`deliveries.py`).
Then messages are joined with the groups of their subject, their deliveries, and what outboxes and
schedule say about them. Messages that are committed but not stored, or that wait for their due
time, have rows too.

The table is stored in parts: one for each window of the log, and one for what has no place in the
log. A run rebuilds only the parts that something came in for: new messages, messages that something
happened to, and messages with a new outbox row. `changed_parts` finds them; nothing else is read.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.fold.runs import RunList
from qmq_pipeline.jobs import lifecycle_sql
from qmq_pipeline.jobs.deliveries import (
    ENDLESS,
    Folded,
    actions_end,
    block_of,
    fold_actions,
    groups,
)
from qmq_pipeline.jobs.lookup import stored_windows
from qmq_pipeline.jobs.merge_scans import scan_of
from qmq_pipeline.jobs.progress import OnProgress, Progress, nobody
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.spark.session import session_of
from qmq_pipeline.tables.commits import RangeFacts
from qmq_pipeline.tables.lake import PART, Lake
from qmq_pipeline.tables.schemas import (
    CANCELLED,
    DELIVERIES,
    LIFECYCLE,
    MESSAGES,
    OUTBOX,
    SCHEDULED,
)
from qmq_pipeline.tables.table import Table
from qmq_pipeline.work.fold import bucket_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

    from qmq_pipeline.spark.session import Spark

_STEPS: Final = 2
_OUTBOX_COLUMNS: Final = (
    "message_id",
    "subject",
    "producer",
    "counter",
    "database",
    "created_at",
    "deliver_at",
)
_WITHOUT: Final = frozenset({"body", "headers", "tags"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Lived:
    """The result of one run."""

    deliveries: int
    lifecycle: int
    #: Settlements of messages that were handed out before the table of actions begins.
    unmatched: int
    #: Parts of `lifecycle` that were rebuilt, and the number of all parts.
    parts_made: int
    parts: int
    #: Whether nothing was made because nothing had come in since the last run.
    is_unchanged: bool


def lifecycle(
    spark: Spark,
    config: PipelineConfig,
    *,
    is_full: bool = False,
    on_progress: OnProgress = nobody,
) -> Lived:
    """Bring `deliveries` and `lifecycle` up to date with bronze; `is_full` rebuilds both.

    `spark`: a session, or a function that gives one; it is not called if nothing has come in.
    """
    lake = Lake(config.tables)
    lake.require()
    before = lake.newest(LIFECYCLE)
    seen = dict(before.notes) if before is not None and not is_full else {}
    is_alike = before is not None and before.version == LIFECYCLE.version
    is_whole = bool(lake.commit_names(DELIVERIES))  # or somebody removed it, to have it made anew
    if not (is_alike and is_whole) or seen.get("window_bytes") != config.window_bytes:
        seen = {}
    new = _New(lake, seen)
    if seen and before is not None and new.is_nothing:
        return _lived(seen, before.ranges, made=0, is_unchanged=True)
    session = session_of(spark)
    run = f"{SYSTEM_CLOCK.now_ms():020d}"
    with lake.writing():
        folded = fold_actions(session, config, lake, run, seen=seen.get("actions"))
        on_progress(Progress(stage="deliveries", done=1, total=_STEPS, rows=folded.rows))
        if seen and folded.since > seen["actions"]:  # somebody folded it anew meanwhile
            seen, new = {}, _New(lake, {})
        made = changed_parts(session, config, lake, new, folded) if seen else None
        frame = _frame(session, config, lake, new, folded, made)
        notes = {
            **new.marks,
            "actions": folded.actions,
            "groups": folded.groups,
            "window_bytes": config.window_bytes,
            "deliveries": folded.rows,
            "unmatched": folded.unmatched,
        }
        parts = None if made is None else {*map(part_name, made), lifecycle_sql.OPEN}
        done = lake.write_parts(frame, LIFECYCLE, run, made=parts, notes=notes)
    on_progress(
        Progress(stage="lifecycle", done=2, total=_STEPS, rows=sum(one.rows for one in done.ranges))
    )
    count = len(done.ranges) if parts is None else len(parts)
    return _lived(notes, done.ranges, made=count, is_unchanged=False)


def part_name(window: int) -> str:
    """The part of a window of the log."""
    return f"w{window:012d}"


class _New:
    """What is in bronze and not yet in `lifecycle`; `seen` are the notes of the last commit, or nothing."""

    def __init__(self, lake: Lake, seen: Mapping[str, Any]) -> None:
        self.seen = seen
        #: Where new data of the log begins; a merged range may begin earlier.
        self.first_offset = int(seen.get("log", 0))
        self.ranges = lake.ranges(MESSAGES)
        log_end = max((one.next for one in self.ranges), default=0)
        self.log = [one for one in self.ranges if one.next > self.first_offset]
        self._of_table = {MESSAGES.name: self.log}
        for table in (SCHEDULED, CANCELLED):
            self._of_table[table.name] = [
                one for one in lake.ranges(table) if self.first_offset < one.next <= log_end
            ]
        #: Database → time of the last scan that was seen.
        self._scans: dict[str, int] = seen.get("scans", {})
        scans = dict(self._scans)
        self.outbox: list[RangeFacts] = []
        for commit in lake.commits(OUTBOX):
            database, scanned_at_ms = scan_of(commit)
            if scanned_at_ms > self._scans.get(database, 0):
                self.outbox += commit.ranges
                scans[database] = max(scanned_at_ms, scans.get(database, 0))
        #: The notes for the commit of this run.
        self.marks = {"log": log_end, "scans": scans}
        self.is_nothing = (
            not self.log
            and not any(one.rows for one in self.outbox)  # a scan that found nothing says nothing
            and actions_end(lake) == seen.get("actions")
        )

    def rows(self, spark: SparkSession, lake: Lake, table: Table) -> DataFrame:
        """Those of one of the commit log's tables."""
        some = lake.read(spark, table, self._of_table[table.name])
        return some.where(f"physical_offset >= {self.first_offset}") if self.first_offset else some

    def outbox_rows(self, spark: SparkSession, lake: Lake) -> DataFrame:
        """Those of the outboxes."""
        from pyspark.sql import functions as fn

        rows = lake.read(spark, OUTBOX, self.outbox)
        for database, scanned_at_ms in self._scans.items():
            is_seen = fn.unix_millis("scanned_at") <= scanned_at_ms
            rows = rows.where(~((fn.col("database") == database) & is_seen))
        return rows

    def windows(self, size: int) -> set[int]:
        """Windows of the log that something came into."""
        first = self.first_offset
        return {
            window for one in self.log for window in _windows(max(one.first, first), one.next, size)
        }


def changed_parts(
    spark: SparkSession, config: PipelineConfig, lake: Lake, new: _New, folded: Folded
) -> set[int]:
    """The windows of the log whose rows may have changed."""
    touched = {subject: RunList(runs) for subject, runs in folded.touched.items()}
    for subject, first in _changed_groups(new.seen["groups"], folded.groups):
        touched.setdefault(subject, RunList()).add(first, ENDLESS)
    size = config.window_bytes
    windows = new.windows(size)
    for one in new.ranges:
        if any(
            touched[subject].overlaps(int(first), int(after))
            for subject in touched.keys() & one.sequences.keys()
            for first, after in one.sequences[subject]
        ):
            windows.update(_windows(one.first, one.next, size))
    old = [one for one in new.ranges if one.first < new.first_offset]
    return windows | stored_windows(spark, lake, old, _new_ids(spark, lake, new), size)


def _changed_groups(
    before: Mapping[str, Any], now: Mapping[str, tuple[int, int]]
) -> list[tuple[str, int]]:
    """Subject and first sequence from which a group now begins or ends elsewhere."""
    changed = []
    for name, (first, after) in now.items():
        known = before.get(name)
        subject = name.partition("\n")[0]
        if known is None or known[0] != first:
            changed.append((subject, first if known is None else min(first, known[0])))
        elif known[1] != after:
            changed.append((subject, min(after, known[1])))
    return changed


def _windows(first: int, after: int, size: int) -> range:
    return range(first // size, max(first, after - 1) // size + 1)


def _new_ids(spark: SparkSession, lake: Lake, new: _New) -> DataFrame:
    """Ids of everything that came in, as producer and counter."""
    ids = new.rows(spark, lake, MESSAGES).select("producer", "counter")
    ids = ids.unionByName(new.outbox_rows(spark, lake).select("producer", "counter"))
    for table in (SCHEDULED, CANCELLED):
        ids = ids.unionByName(new.rows(spark, lake, table).select("producer", "counter"))
    return ids


def _frame(
    spark: SparkSession,
    config: PipelineConfig,
    lake: Lake,
    new: _New,
    folded: Folded,
    made: Collection[int] | None,
) -> DataFrame:
    """The rows of the parts `made`, or of all, with their part."""
    size = config.window_bytes
    ranges = new.ranges
    if made is not None:
        ranges = [
            one
            for one in ranges
            if any(window in made for window in _windows(one.first, one.next, size))
        ]
    columns = [name for name in MESSAGES.names if name not in _WITHOUT]
    window = f"CAST(physical_offset DIV {size} AS BIGINT)"
    messages = lake.read(spark, MESSAGES, ranges).select(*columns)
    if made is not None:
        wanted = ", ".join(map(str, sorted(made))) or "-1"
        messages = messages.where(f"{window} IN ({wanted})")
    messages = messages.selectExpr("*", f"CONCAT('w', LPAD({window}, 12, '0')) AS {PART}")
    old: list[RangeFacts] = []
    if made is not None:
        names = {*map(part_name, made), lifecycle_sql.OPEN}
        old = [one for one in lake.ranges(LIFECYCLE) if one.source in names]
    views = {
        "qmq_messages": messages,
        "qmq_old": lake.read(spark, LIFECYCLE, old),
        "qmq_deliveries": lake.read(
            spark, DELIVERIES, None if made is None else _blocks(config, lake, ranges, folded)
        ),
        "qmq_groups": groups(spark, folded.groups),
        "qmq_outbox_new": new.outbox_rows(spark, lake).select(*_OUTBOX_COLUMNS),
        "qmq_scheduled_new": new.rows(spark, lake, SCHEDULED),
        "qmq_cancelled_new": new.rows(spark, lake, CANCELLED),
    }
    for name, frame in views.items():
        frame.createOrReplaceTempView(name)
    return spark.sql(lifecycle_sql.LIFECYCLE)


def _blocks(
    config: PipelineConfig, lake: Lake, ranges: Collection[RangeFacts], folded: Folded
) -> list[RangeFacts]:
    """The files of `deliveries` that may have the messages of these ranges."""
    spans: dict[str, tuple[int, int]] = {}
    for one in ranges:
        for subject, runs in one.sequences.items():
            first, after = int(runs[0][0]), int(runs[-1][1])
            known = spans.get(subject, (first, after))
            spans[subject] = (min(first, known[0]), max(after, known[1]))
    wanted: set[tuple[int, int]] = set()
    for name in folded.groups:
        bucket = bucket_of(name, config.fold_buckets)
        first, after = spans.get(name.partition("\n")[0], (0, 0))
        length = config.fold_block_sequences
        wanted.update((bucket, block) for block in range(first // length, -(-after // length)))
    return [one for one in lake.ranges(DELIVERIES) if block_of(one) in wanted]


def _lived(
    notes: Mapping[str, Any], ranges: Collection[RangeFacts], *, made: int, is_unchanged: bool
) -> Lived:
    return Lived(
        deliveries=notes["deliveries"],
        lifecycle=sum(one.rows for one in ranges),
        unmatched=notes["unmatched"],
        parts_made=made,
        parts=len(ranges),
        is_unchanged=is_unchanged,
    )
