"""`qmq pipeline lifecycle`: bronze into one row for each message and group, from commit to outcome.

First workers fold the action log into what became of each message at each group; then three joins: the
messages with the groups of their subject, with their deliveries, and with their outbox rows. Messages
that were committed and are not stored, or wait for their due time, are rows too.

The table is made anew as a whole when anything came in, and is left alone when nothing did.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.config import PipelineConfig
from qmq_pipeline.jobs.ingest_outbox import outbox_now
from qmq_pipeline.jobs.progress import OnProgress, Progress, nobody
from qmq_pipeline.lake import Lake, range_facts
from qmq_pipeline.schemas import ACTIONS, DELIVERIES, LIFECYCLE, MESSAGES, OUTBOX, SCHEDULED
from qmq_pipeline.sources.task_source import run_tasks

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_WORK: Final = "qmq_pipeline.fold_work.fold_piece"
_BRONZE: Final = (MESSAGES, SCHEDULED, ACTIONS, OUTBOX)
_STEPS: Final = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Lived:
    """What one run made."""

    deliveries: int
    lifecycle: int
    #: Settlements of messages that were handed out before the table of actions begins.
    unmatched: int
    #: Nothing had come in since the last run, so nothing was made.
    is_unchanged: bool


def lifecycle(
    spark: SparkSession, config: PipelineConfig, *, on_progress: OnProgress = nobody
) -> Lived:
    """Bring `deliveries` and `lifecycle` up to what is in bronze."""
    lake = Lake(config.tables)
    lake.prepare()
    seen = bronze_marks(lake)
    state = lake.read_state(LIFECYCLE)
    if state.get("seen") == seen:
        return Lived(
            deliveries=state["deliveries"],
            lifecycle=state["lifecycle"],
            unmatched=state["unmatched"],
            is_unchanged=True,
        )
    run = f"{SYSTEM_CLOCK.now_ms():020d}"
    with lake.writing():
        deliveries, unmatched = _fold(spark, config, lake, run)
        on_progress(Progress(stage="deliveries", done=1, total=_STEPS, rows=deliveries))
        rows = lake.write_frame(lifecycle_frame(spark, lake), LIFECYCLE, run)
        on_progress(Progress(stage="lifecycle", done=2, total=_STEPS, rows=rows))
        made = {"deliveries": deliveries, "lifecycle": rows, "unmatched": unmatched}
        lake.write_state(LIFECYCLE, {"seen": seen, **made})
    return Lived(deliveries=deliveries, lifecycle=rows, unmatched=unmatched, is_unchanged=False)


def bronze_marks(lake: Lake) -> dict[str, str]:
    """The name of the newest commit of each bronze table: another one, and something came in."""
    marks = {}
    for table in _BRONZE:
        commits = lake.commits(table)
        marks[table.name] = commits[-1].name if commits else ""
    return marks


def _fold(spark: SparkSession, config: PipelineConfig, lake: Lake, run: str) -> tuple[int, int]:
    before = [one.name for one in lake.commits(DELIVERIES)]
    lake.sweep(DELIVERIES)
    buckets = config.fold_buckets
    pieces = [
        {"tables": config.tables, "bucket": bucket, "buckets": buckets, "run": run}
        for bucket in range(buckets)
    ]
    facts = [range_facts(one) for one in run_tasks(spark, _WORK, pieces)]
    lake.commit(DELIVERIES, facts, replaces=before, name=run)
    return sum(one.rows for one in facts), sum(int(one.notes["unmatched"]) for one in facts)


def groups(spark: SparkSession, lake: Lake) -> DataFrame:
    """Subject, group, first sequence that is for it, and whether it has ended."""
    actions = lake.read(spark, ACTIONS).where("consumer_group IS NOT NULL")
    actions.createOrReplaceTempView("qmq_actions")
    return spark.sql(
        """
        SELECT subject, consumer_group,
               COALESCE(MIN(first_sequence) FILTER (WHERE action = 'groupdefined'),
                        MIN(first_sequence) FILTER (WHERE action = 'pulled'), 0) AS group_first,
               MAX_BY(action, action_offset) FILTER (WHERE action IN ('ended', 'groupdefined'))
                 <=> 'ended' AS has_ended
        FROM qmq_actions GROUP BY subject, consumer_group
        """
    )


def lifecycle_frame(spark: SparkSession, lake: Lake) -> DataFrame:
    """The rows of `lifecycle`, from what is committed now."""
    without_body = [name for name in MESSAGES.names if name not in ("body", "headers", "tags")]
    _view(lake.read(spark, MESSAGES).select(*without_body), "qmq_messages")
    _view(lake.read(spark, SCHEDULED).select(*without_body), "qmq_scheduled")
    _view(lake.read(spark, DELIVERIES), "qmq_deliveries")
    _view(groups(spark, lake).where("NOT has_ended"), "qmq_groups")
    _view(outbox_now(spark, lake), "qmq_outbox")
    return spark.sql(_LIFECYCLE_SQL).select(*LIFECYCLE.names)


def _view(frame: DataFrame, name: str) -> None:
    frame.createOrReplaceTempView(name)


def _ms(late: str, early: str) -> str:
    return f"(unix_micros({late}) - unix_micros({early})) / 1e3D"


_LIFECYCLE_SQL: Final = f"""
WITH at_groups AS (
  SELECT m.*, g.consumer_group, d.first_delivered_at, d.last_delivered_at,
         COALESCE(d.attempts, 0) AS attempts, d.settled_at, d.reason, d.error,
         CASE WHEN g.consumer_group IS NULL THEN NULL ELSE COALESCE(d.outcome, 'waiting') END
           AS outcome
  FROM qmq_messages m
  LEFT JOIN qmq_groups g ON g.subject = m.subject AND m.sequence >= g.group_first
  LEFT JOIN qmq_deliveries d
    ON d.subject = m.subject AND d.sequence = m.sequence AND d.consumer_group = g.consumer_group
), scheduled AS (
  SELECT s.* FROM qmq_scheduled s LEFT ANTI JOIN qmq_messages m ON m.message_id = s.message_id
), stored AS (
  SELECT message_id, subject, sequence, consumer_group, producer, counter, key, born_at, stored_at,
         due_at, first_delivered_at, last_delivered_at, attempts, settled_at, outcome, reason,
         error, body_bytes
  FROM at_groups
  UNION ALL
  SELECT message_id, subject, NULL, NULL, producer, counter, key, born_at, stored_at, due_at,
         NULL, NULL, 0, NULL, 'waiting', 'not due', NULL, body_bytes
  FROM scheduled
), alive AS (
  SELECT COALESCE(s.message_id, o.message_id) AS message_id,
         COALESCE(s.subject, o.subject) AS subject, s.sequence, s.consumer_group, o.database,
         COALESCE(s.producer, o.producer) AS producer, COALESCE(s.counter, o.counter) AS counter,
         s.key, o.created_at AS committed_at, s.born_at, s.stored_at,
         COALESCE(s.due_at, o.deliver_at) AS due_at,
         s.first_delivered_at, s.last_delivered_at, COALESCE(s.attempts, 0) AS attempts,
         s.settled_at, s.outcome, s.reason, s.error, s.body_bytes
  FROM stored s FULL OUTER JOIN qmq_outbox o ON o.message_id = s.message_id
)
SELECT *,
       {_ms("stored_at", "COALESCE(committed_at, born_at)")} AS store_ms,
       {_ms("first_delivered_at", "GREATEST(stored_at, due_at)")} AS wait_ms,
       {_ms("settled_at", "first_delivered_at")} AS work_ms,
       {_ms("settled_at", "GREATEST(COALESCE(committed_at, born_at), due_at)")} AS total_ms
FROM alive
"""
