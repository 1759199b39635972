"""The query of `lifecycle`. It reads only rows for the parts that are rewritten:

- `messages`: messages of these parts of the log;
- `deliveries`, `groups`: their outcomes, and the groups they are for;
- `outbox_new`, `scheduled_new`, `cancelled_new`: rows added since the table was made;
- `old`: the rows to be replaced. Their facts from outboxes and about delayed messages are kept.

To rebuild the whole table, the same query runs with all rows as new and none as old.
"""

from __future__ import annotations

from typing import Final

#: The part for messages that have no place in the log, or none yet.
OPEN: Final = -1


def _ms(late: str, early: str) -> str:
    return f"(unix_micros({late}) - unix_micros({early})) / 1e3D"


#: The facts about a message from outside the log: one row for each id.
_RETRIES_SQL: Final = """
SELECT message_id, MIN(subject) AS subject, MIN(producer) AS producer, MIN(counter) AS counter,
       MIN(STRUCT(committed_at, database, deliver_at)) FILTER (WHERE database IS NOT NULL)
         AS outbox,
       MAX(STRUCT(due_rank, due_at)) FILTER (WHERE due_rank IS NOT NULL) AS due,
       MIN(key) AS key, MIN(born_at) AS born_at, MIN(accepted_at) AS accepted_at,
       MIN(body_bytes) AS body_bytes, MIN(cancelled_at) AS cancelled_at
FROM (
  SELECT message_id, subject, producer, counter, database, created_at AS committed_at, deliver_at,
         CAST(NULL AS BIGINT) AS due_rank, CAST(NULL AS TIMESTAMP) AS due_at,
         CAST(NULL AS STRING) AS key, CAST(NULL AS TIMESTAMP) AS born_at,
         CAST(NULL AS TIMESTAMP) AS accepted_at, CAST(NULL AS INT) AS body_bytes,
         CAST(NULL AS TIMESTAMP) AS cancelled_at
  FROM {outbox_new}
  UNION ALL
  SELECT message_id, subject, producer, counter, NULL, NULL, NULL, physical_offset,
         COALESCE(now_due_at, due_at), key, born_at, stored_at, body_bytes, NULL
  FROM {scheduled_new}
  UNION ALL
  SELECT message_id, subject, producer, counter, NULL, NULL, NULL, NULL, NULL, NULL, NULL, NULL,
         NULL, stored_at
  FROM {cancelled_new}
  UNION ALL
  SELECT message_id, subject, producer, counter, database, committed_at, due_at,
         IF(stored_at IS NOT NULL AND due_at IS NOT NULL, -1, NULL), due_at,
         IF(sequence IS NULL, key, NULL), IF(sequence IS NULL, born_at, NULL),
         IF(sequence IS NULL, stored_at, NULL), IF(sequence IS NULL, body_bytes, NULL),
         IF(sequence IS NULL, settled_at, NULL)
  FROM {old} WHERE sequence IS NULL OR database IS NOT NULL OR due_at IS NOT NULL
) GROUP BY message_id
"""

#: The number of a message among those with the same id. All messages of an id with news are in the
#: rewritten parts; for other ids the old rows have it.
_COPIES_SQL: Final = """
SELECT subject, sequence, MAX(copy) AS copy FROM (
  SELECT subject, sequence, CAST(ROW_NUMBER() OVER
    (PARTITION BY producer, counter ORDER BY physical_offset, record_number) - 1 AS INT) AS copy
  FROM {messages} JOIN
    (SELECT producer, counter FROM {messages} GROUP BY producer, counter HAVING COUNT(*) > 1)
    USING (producer, counter)
  UNION ALL
  SELECT subject, sequence, copy FROM {old} WHERE copy > 0
) GROUP BY subject, sequence
"""

LIFECYCLE: Final = f"""
WITH retries AS ({_RETRIES_SQL}), copies AS ({_COPIES_SQL}), at_groups AS (
  SELECT m.*, g.consumer_group, d.first_delivered_at, d.last_delivered_at, d.attempts,
         d.settled_at, d.reason, d.error, d.long_retry_at, d.redelivered_at, COALESCE(c.copy, 0) AS copy,
         CASE WHEN g.consumer_group IS NULL THEN NULL ELSE COALESCE(d.outcome, 'waiting') END
           AS outcome
  FROM {{messages}} m
  LEFT JOIN copies c ON c.subject = m.subject AND c.sequence = m.sequence
  LEFT JOIN {{groups}} g
    ON g.subject = m.subject AND m.sequence >= g.group_first AND m.sequence < g.group_next
  LEFT JOIN {{deliveries}} d
    ON d.subject = m.subject AND d.sequence = m.sequence AND d.consumer_group = g.consumer_group
), alive AS (
  SELECT COALESCE(m.part, {OPEN}) AS part, COALESCE(m.message_id, a.message_id) AS message_id,
         COALESCE(m.subject, a.subject) AS subject, m.sequence, m.consumer_group,
         a.outbox.database AS database, COALESCE(m.producer, a.producer) AS producer,
         COALESCE(m.counter, a.counter) AS counter,
         IF(m.part IS NULL, a.key, m.key) AS key, a.outbox.committed_at AS committed_at,
         IF(m.part IS NULL, a.born_at, m.born_at) AS born_at,
         IF(m.part IS NULL, a.accepted_at, m.stored_at) AS stored_at,
         CASE WHEN m.part IS NULL THEN COALESCE(a.due.due_at, a.outbox.deliver_at)
              WHEN m.due_at IS NULL THEN NULL ELSE COALESCE(a.due.due_at, m.due_at) END AS due_at,
         m.first_delivered_at, m.last_delivered_at, COALESCE(m.attempts, 0) AS attempts,
         IF(m.part IS NULL, a.cancelled_at, m.settled_at) AS settled_at,
         CASE WHEN m.part IS NOT NULL THEN m.outcome
              WHEN a.cancelled_at IS NOT NULL THEN 'cancelled'
              WHEN a.accepted_at IS NOT NULL THEN 'waiting' END AS outcome,
         CASE WHEN m.part IS NOT NULL THEN m.reason
              WHEN a.cancelled_at IS NULL AND a.accepted_at IS NOT NULL THEN 'not due' END AS reason,
         m.error, IF(m.part IS NULL, a.body_bytes, m.body_bytes) AS body_bytes, m.copy,
         m.long_retry_at, m.redelivered_at
  FROM at_groups m FULL OUTER JOIN retries a ON a.message_id = m.message_id
)
SELECT *,
       {_ms("stored_at", "COALESCE(committed_at, born_at)")} AS store_ms,
       {_ms("first_delivered_at", "GREATEST(stored_at, due_at)")} AS wait_ms,
       {_ms("settled_at", "first_delivered_at")} AS work_ms,
       IF(sequence IS NULL, NULL,
          {_ms("settled_at", "GREATEST(COALESCE(committed_at, born_at), due_at)")}) AS total_ms
FROM alive
"""
