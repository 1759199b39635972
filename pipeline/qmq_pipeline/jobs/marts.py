"""`qmq pipeline marts`: silver into the small tables that people look at, by subject, group and minute.

Each is made anew from `lifecycle` when that changed, and replaced as a whole: a run that is killed leaves
the old one, a run that is repeated does nothing. Latencies are kept as KLL sketches, so minutes can be
rolled up to hours or days with the quantiles still right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from qmq_client.clock import SYSTEM_CLOCK
from qmq_pipeline.config import PipelineConfig
from qmq_pipeline.errors import LakeError
from qmq_pipeline.jobs.progress import OnProgress, Progress, nobody
from qmq_pipeline.lake import Lake
from qmq_pipeline.schemas import (
    DEAD_LETTERS,
    DELAY_LATENESS,
    DELIVERIES,
    FLOW_MINUTE,
    GROUP_LAG,
    LATENCY_MINUTE,
    LIFECYCLE,
    MESSAGES,
    PRODUCERS,
)

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

#: In this order; `flow_minute` goes last and says by its state that all are there.
MARTS: Final = (LATENCY_MINUTE, GROUP_LAG, DEAD_LETTERS, DELAY_LATENESS, PRODUCERS, FLOW_MINUTE)
_COLUMNS: Final = "subject, producer, message_id, stored_at, due_at, body_bytes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Marts:
    """What one run made."""

    #: Table → rows.
    rows: dict[str, int]
    #: Nothing had changed since the last run, so nothing was made.
    is_unchanged: bool


def marts(
    spark: SparkSession, config: PipelineConfig, *, on_progress: OnProgress = nobody
) -> Marts:
    """Bring the gold tables up to what is in silver. Raises `LakeError` where there is no silver."""
    lake = Lake(config.tables)
    lake.prepare()
    seen = _mark(lake)
    if not seen:
        raise LakeError(
            path=config.tables,
            reason="the table lifecycle is not there yet",
            remedy="Run `qmq pipeline lifecycle` first, or `qmq pipeline run` for all in order",
        )
    state = lake.read_state(FLOW_MINUTE)
    if state.get("seen") == seen:
        return Marts(rows=state["rows"], is_unchanged=True)
    lake.read(spark, LIFECYCLE).createOrReplaceTempView("qmq_lifecycle")
    lake.read(spark, DELIVERIES).createOrReplaceTempView("qmq_deliveries")
    lake.read(spark, MESSAGES).createOrReplaceTempView("qmq_messages")
    # A message has a row in `lifecycle` for each group; here it is wanted once.
    spark.sql(_STORED_SQL).createOrReplaceTempView("qmq_stored_once")
    run = f"{SYSTEM_CLOCK.now_ms():020d}"
    rows: dict[str, int] = {}
    for table in MARTS:
        rows[table.name] = lake.write_frame(spark.sql(_SQL[table.name]), table, run)
        done = Progress(stage=table.name, done=len(rows), total=len(MARTS), rows=sum(rows.values()))
        on_progress(done)
    lake.write_state(FLOW_MINUTE, {"seen": seen, "rows": rows})
    return Marts(rows=rows, is_unchanged=False)


def _mark(lake: Lake) -> str:
    commits = lake.commits(LIFECYCLE)
    return commits[-1].name if commits else ""


def _minute(column: str) -> str:
    return f"date_trunc('MINUTE', {column})"


def _quantiles(sketch: str) -> str:
    """The quantiles of a sketch, as the columns that every table with latencies has."""
    shares = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}
    return ", ".join(
        f"kll_sketch_get_quantile_double({sketch}, {share}D) AS {name}"
        for name, share in shares.items()
    )


#: `copy` is 0 for the first of an id, and counts those stored once more.
_STORED_SQL: Final = f"""
SELECT {_COLUMNS}, sequence,
       ROW_NUMBER() OVER (PARTITION BY message_id ORDER BY stored_at, sequence) - 1 AS copy
FROM qmq_messages
"""

_LATENCY_SQL: Final = f"""
WITH stages AS (
  SELECT DISTINCT subject, CAST(NULL AS STRING) AS consumer_group, 'store' AS stage,
         {_minute("stored_at")} AS minute, message_id, sequence, store_ms AS ms
  FROM qmq_lifecycle
  WHERE sequence IS NOT NULL AND store_ms IS NOT NULL AND due_at IS NULL
  UNION ALL
  SELECT subject, consumer_group, 'wait', {_minute("first_delivered_at")}, message_id, sequence,
         wait_ms
  FROM qmq_lifecycle WHERE wait_ms IS NOT NULL
  UNION ALL
  SELECT subject, consumer_group, 'work', {_minute("settled_at")}, message_id, sequence, work_ms
  FROM qmq_lifecycle WHERE work_ms IS NOT NULL
  UNION ALL
  SELECT subject, consumer_group, 'total', {_minute("settled_at")}, message_id, sequence, total_ms
  FROM qmq_lifecycle WHERE total_ms IS NOT NULL
), sketched AS (
  SELECT subject, consumer_group, stage, minute, COUNT(*) AS count, MAX(ms) AS max_ms,
         kll_sketch_agg_double(ms) AS sketch
  FROM stages GROUP BY subject, consumer_group, stage, minute
)
SELECT *, {_quantiles("sketch")} FROM sketched
"""

_FLOW_SQL: Final = f"""
WITH events AS (
  SELECT subject, {_minute("committed_at")} AS minute, 1 AS committed, 0 AS stored, 0 AS delivered,
         0 AS settled, 0 AS bytes, 0 AS copies
  FROM (SELECT DISTINCT subject, message_id, committed_at FROM qmq_lifecycle
        WHERE committed_at IS NOT NULL)
  UNION ALL
  SELECT subject, {_minute("stored_at")}, 0, 1, 0, 0, body_bytes, IF(copy > 0, 1, 0)
  FROM qmq_stored_once
  UNION ALL
  SELECT subject, {_minute("first_delivered_at")}, 0, 0, attempts, 0, 0, 0
  FROM qmq_deliveries WHERE first_delivered_at IS NOT NULL
  UNION ALL
  SELECT subject, {_minute("settled_at")}, 0, 0, 0, 1, 0, 0
  FROM qmq_deliveries WHERE outcome = 'acked'
)
SELECT subject, minute, SUM(committed) AS committed, SUM(stored) AS stored,
       SUM(delivered) AS delivered, SUM(settled) AS settled, SUM(bytes) AS bytes,
       SUM(copies) AS copies
FROM events GROUP BY subject, minute
"""

#: A pair of message and group is open at the end of each minute from that of its storing to the one
#: before that of its settlement. Most are settled within their minute and are not open at any end; the
#: others are joined to the minutes as spans, many pairs to one span.
_LAG_SQL: Final = f"""
WITH pairs AS (
  SELECT subject, consumer_group, {_minute("stored_at")} AS stored_minute,
         {_minute("settled_at")} AS settled_minute, GREATEST(stored_at, due_at) AS ready_at,
         {_minute("first_delivered_at")} AS delivered_minute, GREATEST(attempts - 1, 0) AS again
  FROM qmq_lifecycle WHERE consumer_group IS NOT NULL AND stored_at IS NOT NULL
), moves AS (
  SELECT subject, consumer_group, stored_minute AS minute, 1 AS stored, 0 AS settled, 0 AS again
  FROM pairs
  UNION ALL
  SELECT subject, consumer_group, settled_minute, 0, 1, 0 FROM pairs
  WHERE settled_minute IS NOT NULL
  UNION ALL
  SELECT subject, consumer_group, delivered_minute, 0, 0, again FROM pairs
  WHERE again > 0 AND delivered_minute IS NOT NULL
), minutes AS (
  SELECT subject, consumer_group, minute, SUM(stored) AS stored, SUM(settled) AS settled,
         SUM(again) AS redeliveries
  FROM moves GROUP BY subject, consumer_group, minute
), spans AS (
  SELECT subject, consumer_group, stored_minute, settled_minute, MIN(ready_at) AS oldest_at
  FROM pairs WHERE settled_minute IS NULL OR settled_minute > stored_minute
  GROUP BY subject, consumer_group, stored_minute, settled_minute
), open AS (
  SELECT m.subject, m.consumer_group, m.minute, MIN(s.oldest_at) AS oldest_at
  FROM minutes m JOIN spans s
    ON s.subject = m.subject AND s.consumer_group = m.consumer_group
   AND s.stored_minute <= m.minute
   AND (s.settled_minute IS NULL OR s.settled_minute > m.minute)
  GROUP BY m.subject, m.consumer_group, m.minute
)
SELECT m.subject, m.minute, m.consumer_group,
       SUM(m.stored) OVER running AS stored, SUM(m.settled) OVER running AS settled,
       SUM(m.stored - m.settled) OVER running AS lag,
       COALESCE(GREATEST(0D, unix_seconds(m.minute) + 60
                - unix_millis(o.oldest_at) / 1e3D), 0D) AS lag_s,
       m.redeliveries
FROM minutes m LEFT JOIN open o
  ON o.subject = m.subject AND o.consumer_group = m.consumer_group AND o.minute = m.minute
WINDOW running AS (PARTITION BY m.subject, m.consumer_group ORDER BY m.minute)
"""

_DEAD_SQL: Final = """
SELECT subject, consumer_group, sequence, message_id, key, stored_at, settled_at AS dead_at,
       attempts, reason, error
FROM qmq_lifecycle WHERE outcome = 'dead'
"""

#: How late a delayed message stood in its subject's queue, by the broker's clock.
_LATENESS_SQL: Final = f"""
WITH released AS (
  SELECT subject, {_minute("due_at")} AS minute,
         (unix_micros(stored_at) - unix_micros(due_at)) / 1e3D AS ms
  FROM qmq_stored_once WHERE due_at IS NOT NULL
), sketched AS (
  SELECT subject, minute, COUNT(*) AS count, COUNT(*) FILTER (WHERE ms < 0) AS early,
         MAX(ms) AS max_ms, kll_sketch_agg_double(ms) AS sketch
  FROM released GROUP BY subject, minute
)
SELECT *, {_quantiles("sketch")} FROM sketched
"""

_PRODUCERS_SQL: Final = """
SELECT producer, subject, MIN(stored_at) AS first_at, MAX(stored_at) AS last_at,
       COUNT(*) AS messages, SUM(body_bytes) AS bytes, COUNT(*) FILTER (WHERE copy > 0) AS copies
FROM qmq_stored_once GROUP BY producer, subject
"""

_SQL: Final[dict[str, str]] = {
    LATENCY_MINUTE.name: _LATENCY_SQL,
    GROUP_LAG.name: _LAG_SQL,
    DEAD_LETTERS.name: _DEAD_SQL,
    DELAY_LATENESS.name: _LATENESS_SQL,
    PRODUCERS.name: _PRODUCERS_SQL,
    FLOW_MINUTE.name: _FLOW_SQL,
}
