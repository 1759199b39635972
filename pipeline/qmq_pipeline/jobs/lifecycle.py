"""`qmq pipeline lifecycle`: from bronze, one row for each message and group, from commit to outcome.

First the action log is folded into the outcome of each message at each group (`deliveries.py`). Then messages are
joined with the groups of their subject, their deliveries, and their rows in outboxes and schedule
(`lifecycle_sql.py`). Messages that are committed but not stored, or that wait for their due time,
have rows too.

The table has a part for each part of the log, and one for messages without a place in the log. A
run rewrites only parts with news: new messages, messages with new events, and messages with a new
outbox row.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TYPE_CHECKING, Any, Final

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.jobs import lifecycle_sql
from qmq_pipeline.jobs.batches import tables_of
from qmq_pipeline.jobs.deliveries import Folded, fold_actions, group_spans, groups
from qmq_pipeline.jobs.ingest import ARCHIVE, INGEST
from qmq_pipeline.jobs.progress import OnProgress, Progress, no_progress
from qmq_pipeline.places.config import PipelineConfig
from qmq_pipeline.places.log import ACTION_LOG, COMMIT_LOG
from qmq_pipeline.tables.schemas import DELIVERIES, LIFECYCLE, LOG, MESSAGES, OUTBOX, SPANS
from qmq_pipeline.tables.store import Tables

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

JOB: Final = "lifecycle"
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
_IDS: Final = ("producer", "counter")
#: Most producers that a query names one by one; with more it reads the whole table.
_PRODUCERS_MAX: Final = 64
#: Ids made of a dedupe key begin with two fixed bytes; as signed numbers they are between these bounds.
_DEDUPE_FIRST: Final = (0xDED0 << 48) - 2**64
_DEDUPE_LAST: Final = _DEDUPE_FIRST + 2**48 - 1
_IS_DEDUPE: Final = f"producer BETWEEN {_DEDUPE_FIRST} AND {_DEDUPE_LAST}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Lived:
    """The result of one run."""

    #: Rows of the parts that were written.
    deliveries: int = 0
    lifecycle: int = 0
    #: Settlements of messages that were delivered before the table of actions begins.
    unmatched: int
    #: Parts of `lifecycle` that were written; None for all.
    parts_made: int | None
    #: Whether nothing was written because there was no new data since the last run.
    is_unchanged: bool


def lifecycle(
    spark: SparkSession,
    config: PipelineConfig,
    *,
    is_full: bool = False,
    on_progress: OnProgress = no_progress,
) -> Lived:
    """Bring `deliveries` and `lifecycle` up to date with bronze; `is_full` rebuilds both."""
    tables = tables_of(spark, config)
    tables.require()
    now = bronze_progress(tables)
    seen = {} if is_full else tables.progress(JOB)
    is_there = tables.exists(LIFECYCLE) and tables.exists(DELIVERIES)
    versions = [DELIVERIES.version, LIFECYCLE.version]
    if not is_there or seen.get("versions") != versions or seen["store_id"] != now.get("store_id"):
        seen = {}
    new = _New(tables, seen, now)
    if seen and new.is_nothing:
        unmatched = Folded(marks=seen["marks"]).unmatched
        return Lived(unmatched=unmatched, parts_made=0, is_unchanged=True)
    with tables.writing("silver"):
        folded = fold_actions(
            tables,
            seen["marks"] if seen else None,
            first=(seen.get("actions", 0), seen.get("action_part", 0)),
            after=(now.get(ACTION_LOG, 0), now.get("parts", {}).get(ACTION_LOG, 0)),
        )
        on_progress(Progress(stage="deliveries", done=1, total=_STEPS, rows=folded.rows))
        made = changed_parts(tables, new, folded) if seen else None
        rows = tables.replace(
            _frame(tables, new, folded, made),
            LIFECYCLE,
            None if made is None else {*made, lifecycle_sql.OPEN},
        )
        tables.note_progress(JOB, _notes(tables, seen, now, folded, made, versions))
    on_progress(Progress(stage="lifecycle", done=2, total=_STEPS, rows=rows))
    return Lived(
        deliveries=folded.rows,
        lifecycle=rows,
        unmatched=folded.unmatched,
        parts_made=None if made is None else len(made) + 1,
        is_unchanged=False,
    )


def bronze_progress(tables: Tables) -> dict[str, Any]:
    """The extent of the bronze tables, written by either job."""
    return tables.progress(INGEST) or tables.progress(ARCHIVE)


def _notes(
    tables: Tables,
    seen: Mapping[str, Any],
    now: Mapping[str, Any],
    folded: Folded,
    made: Collection[int] | None,
    versions: list[int],
) -> dict[str, Any]:
    parts = now.get("parts", {})
    changed = None if made is None else [*sorted(made), lifecycle_sql.OPEN]
    if changed is not None and seen and seen["run"] != tables.progress("marts").get("lifecycle"):
        # The marts lack earlier changes.
        before = seen["changed"]
        changed = None if before is None else sorted({*before, *changed})
    return {
        "run": SYSTEM_CLOCK.now_ms(),
        "versions": versions,
        "store_id": now.get("store_id"),
        "log": now.get(COMMIT_LOG, 0),
        "log_part": parts.get(COMMIT_LOG, 0),
        "actions": folded.after[0],
        "action_part": folded.after[1],
        "scans": now.get("scans", {}),
        "marks": folded.marks,
        #: Parts that were written since the last run of the marts; None for all.
        "changed": changed,
    }


class _New:
    """The rows of bronze that are not yet in `lifecycle`; `seen` is the progress recorded last time, or empty."""

    def __init__(self, tables: Tables, seen: Mapping[str, Any], now: Mapping[str, Any]) -> None:
        self._tables = tables
        self.seen = seen
        self._part = seen.get("log_part", 0)
        self._log = tables.read(LOG).where(
            f"part >= {self._part} AND physical_offset >= {seen.get('log', 0)}"
        )
        scans = seen.get("scans", {})
        outbox = tables.read(OUTBOX)
        for database, at_ms in scans.items():
            outbox = outbox.where(
                f"NOT (database = '{database}' AND unix_millis(scanned_at) <= {at_ms})"
            )
        if scans:
            day = min(scans.values()) // 86_400_000
            outbox = outbox.where(f"day >= DATE_FROM_UNIX_DATE({day})")
        self.outbox = outbox
        is_same = all(
            seen.get(name) == now.get(log, 0)
            for name, log in (("log", COMMIT_LOG), ("actions", ACTION_LOG))
        )
        self.is_nothing = is_same and not self.outbox.limit(1).collect()

    def of_kind(self, kind: str) -> DataFrame:
        """New rows of the log."""
        return self._log.where(f"kind = '{kind}'")

    def ids(self) -> DataFrame:
        """Ids of all new rows."""
        frames = [self.outbox.select(*_IDS)]
        frames += [self.of_kind(one).select(*_IDS) for one in ("message", "scheduled", "cancelled")]
        return reduce(lambda one, other: one.unionByName(other), frames)

    def parts(self) -> set[int]:
        """Parts of the log with new messages."""
        rows = self.of_kind("message").select("part").distinct().collect()
        return {int(row["part"]) for row in rows}


def changed_parts(tables: Tables, new: _New, folded: Folded) -> set[int]:
    """The parts of the log whose rows may have changed."""
    parts = new.parts() | (folded.parts or set())
    before, now = group_spans(new.seen["marks"]), group_spans(folded.marks)
    spans = tables.read(SPANS)
    for subject, first in changed_groups(before, now):
        condition = f"subject = '{subject}' AND next_sequence > {first}"
        parts |= {int(row["part"]) for row in spans.where(condition).select("part").collect()}
    return parts | _parts_with(tables, new.ids(), below=max(parts, default=ENDLESS_PART))


def _parts_with(tables: Tables, ids: DataFrame, *, below: int) -> set[int]:
    """The parts of the log that have messages with these ids, up to the part `below`.

    An id is a producer's instance and a dense counter, and Parquet keeps the least and greatest of both for each row
    group. So only row groups are read that may have the ids; for yesterday's ids these are few. Ids made of dedupe keys
    may be anywhere, so for them two columns of the whole table are read.
    """
    ids = ids.distinct().persist()
    try:
        condition = _may_be(ids)
        if condition is None:
            return set()
        log = tables.read(LOG).where(f"kind = 'message' AND part <= {below} AND ({condition})")
        found = log.join(ids, ["producer", "counter"], "left_semi").select("part").distinct()
        return {int(row["part"]) for row in found.collect()}
    finally:
        ids.unpersist()


def _may_be(ids: DataFrame) -> str | None:
    """A condition that every message with one of the ids fulfils; None if there is no id."""
    from pyspark.sql import functions as fn

    spans = (
        ids.groupBy(fn.expr(f"IF({_IS_DEDUPE}, NULL, producer)").alias("producer"))
        .agg(fn.min("counter").alias("first"), fn.max("counter").alias("last"))
        .limit(_PRODUCERS_MAX + 1)
        .collect()
    )
    if len(spans) > _PRODUCERS_MAX:
        return "TRUE"
    return (
        " OR ".join(
            f"({_IS_DEDUPE})"
            if row["producer"] is None
            else f"(producer = {row['producer']} AND counter BETWEEN {row['first']} AND {row['last']})"
            for row in spans
        )
        or None
    )


#: Larger than any part number.
ENDLESS_PART: Final = 2**62


def changed_groups(
    before: Mapping[str, tuple[int, int]], now: Mapping[str, tuple[int, int]]
) -> list[tuple[str, int]]:
    """Subject and first sequence of groups whose beginning or end has changed."""
    changed = []
    for name, (first, after) in now.items():
        known = before.get(name)
        subject = name.partition("\n")[0]
        if known is None or known[0] != first:
            changed.append((subject, first if known is None else min(first, known[0])))
        elif known[1] != after:
            changed.append((subject, min(after, known[1])))
    return changed


def _frame(tables: Tables, new: _New, folded: Folded, made: Collection[int] | None) -> DataFrame:
    """The rows of the parts `made`, or of all parts."""
    is_made, is_old = "TRUE", "FALSE"
    if made is not None:
        texts = [str(one) for one in sorted(made)]
        is_made = f"part IN ({', '.join(texts) or 'NULL'})"
        is_old = f"part IN ({', '.join([*texts, str(lifecycle_sql.OPEN)])})"
    columns = [name for name in MESSAGES.names if name not in _WITHOUT]
    messages = tables.read(LOG).where(f"kind = 'message' AND {is_made}")
    views: dict[str, Any] = {
        "messages": messages.select(*columns, "part"),
        "old": tables.read(LIFECYCLE).where(is_old),
        "deliveries": tables.read(DELIVERIES).where(is_made),
        "groups": groups(tables.spark, folded.marks),
        "outbox_new": new.outbox.select(*_OUTBOX_COLUMNS),
        "scheduled_new": new.of_kind("scheduled"),
        "cancelled_new": new.of_kind("cancelled"),
    }
    return tables.spark.sql(lifecycle_sql.LIFECYCLE, **views)
