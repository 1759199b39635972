"""The SQL queries that fill the gold tables.

Most read the needed parts of `lifecycle`, which has a row for each message and group; queries that
count each message once use `SELECT DISTINCT`. The queries in `SUMMED` read the smaller tables
`group_spans` and `producer_parts` instead.
"""

from __future__ import annotations

from typing import Final

from qmq_pipeline.tables.schemas import (
    DEAD_LETTERS,
    DELAY_LATENESS,
    FLOW_MINUTE,
    GROUP_LAG,
    GROUP_SPANS,
    LATENCY_MINUTE,
    PRODUCER_PARTS,
    PRODUCERS,
)


def _minute(column: str) -> str:
    return f"date_trunc('MINUTE', {column})"


def _quantiles(sketch: str) -> str:
    """SQL for the quantiles of a sketch: the columns `p50_ms`, `p95_ms` and `p99_ms`."""
    shares = {"p50_ms": 0.5, "p95_ms": 0.95, "p99_ms": 0.99}
    return ", ".join(
        f"kll_sketch_get_quantile_double({sketch}, {share}D) AS {name}"
        for name, share in shares.items()
    )


#: Columns of `lifecycle` whose times a table counts by the minute.
DAYS: Final = ("committed_at", "stored_at", "due_at", "first_delivered_at", "settled_at")

_LATENCY: Final = f"""
WITH stages AS (
  SELECT DISTINCT subject, CAST(NULL AS STRING) AS consumer_group, 'store' AS stage,
         {_minute("stored_at")} AS minute, sequence, store_ms AS ms
  FROM {{lifecycle}}
  WHERE sequence IS NOT NULL AND store_ms IS NOT NULL AND due_at IS NULL
  UNION ALL
  SELECT subject, consumer_group, 'wait', {_minute("first_delivered_at")}, sequence, wait_ms
  FROM {{lifecycle}} WHERE wait_ms IS NOT NULL
  UNION ALL
  SELECT subject, consumer_group, 'work', {_minute("settled_at")}, sequence, work_ms
  FROM {{lifecycle}} WHERE work_ms IS NOT NULL
  UNION ALL
  SELECT subject, consumer_group, 'total', {_minute("settled_at")}, sequence, total_ms
  FROM {{lifecycle}} WHERE total_ms IS NOT NULL
), sketched AS (
  SELECT subject, consumer_group, stage, minute, COUNT(*) AS count, MAX(ms) AS max_ms,
         kll_sketch_agg_double(ms) AS sketch
  FROM stages GROUP BY subject, consumer_group, stage, minute
)
SELECT *, {_quantiles("sketch")} FROM sketched
"""

_FLOW: Final = f"""
WITH events AS (
  SELECT subject, {_minute("committed_at")} AS minute, 1 AS committed, 0 AS stored, 0 AS delivered,
         0 AS settled, 0 AS bytes, 0 AS copies
  FROM (SELECT DISTINCT subject, message_id, committed_at FROM {{lifecycle}}
        WHERE committed_at IS NOT NULL AND COALESCE(copy, 0) = 0)
  UNION ALL
  SELECT subject, {_minute("stored_at")}, 0, 1, 0, 0, body_bytes, IF(copy > 0, 1, 0)
  FROM (SELECT DISTINCT subject, sequence, stored_at, body_bytes, copy FROM {{lifecycle}}
        WHERE sequence IS NOT NULL)
  UNION ALL
  SELECT subject, {_minute("first_delivered_at")}, 0, 0, attempts, 0, 0, 0
  FROM {{lifecycle}} WHERE first_delivered_at IS NOT NULL
  UNION ALL
  SELECT subject, {_minute("settled_at")}, 0, 0, 0, 1, 0, 0
  FROM {{lifecycle}} WHERE outcome = 'acked'
)
SELECT subject, minute, SUM(committed) AS committed, SUM(stored) AS stored,
       SUM(delivered) AS delivered, SUM(settled) AS settled, SUM(bytes) AS bytes,
       SUM(copies) AS copies
FROM events GROUP BY subject, minute
"""

#: How late delayed messages entered the queues of their subjects, by the broker's clock.
_LATENESS: Final = f"""
WITH released AS (
  SELECT DISTINCT subject, sequence, {_minute("due_at")} AS minute,
         (unix_micros(stored_at) - unix_micros(due_at)) / 1e3D AS ms
  FROM {{lifecycle}} WHERE due_at IS NOT NULL AND sequence IS NOT NULL AND copy = 0
), sketched AS (
  SELECT subject, minute, COUNT(*) AS count, COUNT(*) FILTER (WHERE ms < 0) AS early,
         MAX(ms) AS max_ms, kll_sketch_agg_double(ms) AS sketch
  FROM released GROUP BY subject, minute
)
SELECT *, {_quantiles("sketch")} FROM sketched
"""

_DEAD: Final = """
SELECT part, subject, consumer_group, sequence, message_id, key, stored_at, settled_at AS dead_at,
       attempts, reason, error
FROM {lifecycle} WHERE outcome = 'dead'
"""

_SPANS: Final = f"""
SELECT part, subject, consumer_group, {_minute("stored_at")} AS stored_minute,
       {_minute("settled_at")} AS settled_minute,
       IF(attempts > 1, {_minute("first_delivered_at")}, NULL) AS delivered_minute,
       COUNT(*) AS pairs, SUM(GREATEST(attempts - 1, 0)) AS redeliveries,
       MIN(GREATEST(stored_at, due_at)) AS oldest_at
FROM {{lifecycle}} WHERE consumer_group IS NOT NULL
GROUP BY 1, 2, 3, 4, 5, 6
"""

_PRODUCER_PARTS: Final = """
SELECT part, producer, subject, MIN(stored_at) AS first_at, MAX(stored_at) AS last_at,
       COUNT(*) AS messages, SUM(body_bytes) AS bytes, COUNT(*) FILTER (WHERE copy > 0) AS copies
FROM (SELECT DISTINCT part, producer, subject, sequence, stored_at, body_bytes, copy
      FROM {lifecycle} WHERE sequence IS NOT NULL)
GROUP BY part, producer, subject
"""

#: A pair of message and group is open from the minute in which it was stored until, exclusively, the
#: minute in which it was settled. Most pairs are settled in the minute in which they were stored and
#: never count as open. The others are joined to the minutes as spans, many pairs to one span.
_LAG: Final = """
WITH moves AS (
  SELECT subject, consumer_group, stored_minute AS minute, pairs AS stored, 0 AS settled, 0 AS again
  FROM {group_spans}
  UNION ALL
  SELECT subject, consumer_group, settled_minute, 0, pairs, 0 FROM {group_spans}
  WHERE settled_minute IS NOT NULL
  UNION ALL
  SELECT subject, consumer_group, delivered_minute, 0, 0, redeliveries FROM {group_spans}
  WHERE redeliveries > 0 AND delivered_minute IS NOT NULL
), minutes AS (
  SELECT subject, consumer_group, minute, SUM(stored) AS stored, SUM(settled) AS settled,
         SUM(again) AS redeliveries
  FROM moves GROUP BY subject, consumer_group, minute
), spans AS (
  SELECT subject, consumer_group, stored_minute, settled_minute, MIN(oldest_at) AS oldest_at
  FROM {group_spans} WHERE settled_minute IS NULL OR settled_minute > stored_minute
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

_PRODUCERS: Final = """
SELECT producer, subject, MIN(first_at) AS first_at, MAX(last_at) AS last_at,
       SUM(messages) AS messages, SUM(bytes) AS bytes, SUM(copies) AS copies
FROM {producer_parts} GROUP BY producer, subject
"""

#: Tables with one part for each part of `lifecycle`.
BY_PART: Final = {
    DEAD_LETTERS: _DEAD,
    GROUP_SPANS: _SPANS,
    PRODUCER_PARTS: _PRODUCER_PARTS,
}
#: Tables that are aggregated from those in `BY_PART`.
SUMMED: Final = {GROUP_LAG: _LAG, PRODUCERS: _PRODUCERS}
#: Tables with one part for each day.
BY_DAY: Final = {LATENCY_MINUTE: _LATENCY, DELAY_LATENESS: _LATENESS, FLOW_MINUTE: _FLOW}


def by_second(query: str) -> str:
    """The same query, grouped by seconds instead of minutes."""
    seconds = query.replace("'MINUTE'", "'SECOND'")
    return seconds.replace("unix_seconds(m.minute) + 60", "unix_seconds(m.minute) + 1")


def of_days(query: str, days: list[str] | None) -> str:
    """The query with a column `day`, limited to these days; None for all."""
    wanted = ", ".join(f"'{one}'" for one in days or ())
    condition = "TRUE" if days is None else f"day IN ({wanted or 'NULL'})"
    return f"SELECT * FROM (SELECT *, CAST(CAST(minute AS DATE) AS STRING) AS day FROM ({query})) WHERE {condition}"
