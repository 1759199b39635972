"""The queries of the audit, on the views of `audit.make_views`.

Every query gives the columns of `audit_findings`, without the run. Evidence is one sentence: what was seen, with the
numbers behind it.
"""

from __future__ import annotations

from typing import Final

from qmq_pipeline.fold.steps import BY_FORCE, NEVER_GIVEN, SOUGHT

#: Each message's newest row. One that was open at an earlier scan, and was not seen by the last one, is gone.
OUTBOX_NOW: Final = """
SELECT o.*, o.state <> 'sent' AND COALESCE(unix_millis(o.scanned_at) < s.last_scan_ms, FALSE) AS is_gone
FROM (
  SELECT *, ROW_NUMBER() OVER (PARTITION BY database, message_id ORDER BY scanned_at DESC) AS place
  FROM {outbox}
) o LEFT JOIN {scans} s USING (database) WHERE place = 1
"""

#: Each delayed message once, with the last due time it was given.
SCHEDULED: Final = """
SELECT message_id, newest.* FROM (
  SELECT message_id, MAX_BY(STRUCT(producer, counter, subject, sequence, stored_at,
           COALESCE(now_due_at, due_at) AS due_at, record_crc), physical_offset) AS newest
  FROM qmq_scheduled_all GROUP BY message_id)
"""

LOST: Final = """
SELECT 'lost' AS kind, o.message_id, o.subject, CAST(NULL AS STRING) AS consumer_group, o.database,
       CAST(NULL AS BIGINT) AS sequence, o.created_at AS at,
       CONCAT('row ', o.row_id, ' of ', o.database,
         CASE WHEN o.is_gone THEN CONCAT(' was ', o.state, ' and is gone') ELSE ' is sent' END,
         ', committed ', CAST(o.created_at AS STRING), '; the log does not have it') AS evidence
FROM qmq_committed o
LEFT ANTI JOIN qmq_stored_all m ON m.message_id = o.message_id
LEFT ANTI JOIN qmq_scheduled d ON d.message_id = o.message_id
LEFT ANTI JOIN qmq_cancelled_all c ON c.message_id = o.message_id
WHERE o.state = 'sent' OR o.is_gone
"""

#: Producers whose outbox is among those that keep rows, and the time of the oldest of these rows.
KEPT: Final = """
SELECT DISTINCT producer, first_at
FROM qmq_outbox_all JOIN qmq_kept_databases USING (database)
CROSS JOIN (SELECT MIN(created_at) AS first_at FROM qmq_outbox_all JOIN qmq_kept_databases USING (database))
"""
#: Only for these producers does a missing row prove a ghost.
KEPT_PRODUCER: Final = """
  m.producer IN (SELECT producer FROM qmq_kept) AND m.stored_at >= (SELECT MIN(first_at) FROM qmq_kept)
"""
GHOST: Final = """
SELECT 'ghost' AS kind, m.message_id, m.subject, CAST(NULL AS STRING) AS consumer_group,
       CAST(NULL AS STRING) AS database, m.sequence, m.stored_at AS at,
       CONCAT('stored ', CAST(m.stored_at AS STRING), ' as sequence ', m.sequence,
         '; no outbox has or had a row of it') AS evidence
FROM (SELECT * FROM qmq_stored m WHERE {producers}) m
LEFT ANTI JOIN qmq_outbox_all o ON o.message_id = m.message_id
"""

DUPLICATE: Final = """
SELECT 'duplicate' AS kind, message_id, MIN(subject) AS subject,
       CAST(NULL AS STRING) AS consumer_group, CAST(NULL AS STRING) AS database,
       MIN(sequence) AS sequence, MIN(stored_at) AS at,
       CONCAT('stored ', COUNT(*), ' times, as sequences ',
         ARRAY_JOIN(SLICE(SORT_ARRAY(COLLECT_LIST(sequence)), 1, 20), ', ')) AS evidence
FROM qmq_stored
GROUP BY message_id HAVING COUNT(*) > 1
"""

#: The due time is the last one it was given, if it was ever put off.
LATE: Final = """
WITH first_stored AS (
  SELECT message_id, MIN(subject) AS subject, MIN(sequence) AS sequence,
         MIN(stored_at) AS stored_at, MIN(due_at) AS due_at
  FROM qmq_stored_all GROUP BY message_id
), timed AS (
  SELECT m.message_id, m.subject, o.database, m.sequence, o.created_at AS at, m.stored_at,
         GREATEST(o.created_at, COALESCE(d.due_at, m.due_at)) AS wanted_at
  FROM qmq_committed o
  JOIN first_stored m ON m.message_id = o.message_id
  LEFT JOIN qmq_scheduled d ON d.message_id = o.message_id
)
SELECT 'late' AS kind, message_id, subject, CAST(NULL AS STRING) AS consumer_group, database,
       sequence, at,
       CONCAT('stored ', CAST(stored_at AS STRING), ', ',
         ROUND((unix_micros(stored_at) - unix_micros(wanted_at)) / 1e6D, 3), ' s after ',
         CASE WHEN wanted_at > at THEN 'it was due' ELSE 'its row was inserted' END) AS evidence
FROM timed WHERE unix_micros(stored_at) - unix_micros(wanted_at) > {late_us}
"""

#: A delayed message that is long overdue and not in its subject yet.
OVERDUE: Final = """
SELECT 'late' AS kind, d.message_id, d.subject, CAST(NULL AS STRING) AS consumer_group,
       CAST(NULL AS STRING) AS database, CAST(NULL AS BIGINT) AS sequence, d.stored_at AS at,
       CONCAT('scheduled ', CAST(d.stored_at AS STRING), ', due ', CAST(d.due_at AS STRING),
         '; neither in its subject nor cancelled') AS evidence
FROM qmq_scheduled d
LEFT ANTI JOIN qmq_stored_all m ON m.message_id = d.message_id
LEFT ANTI JOIN qmq_cancelled_all c ON c.message_id = d.message_id
WHERE {next_us} - unix_micros(d.due_at) > {late_us} AND {due_is_judged}
"""

#: A delayed message that was cancelled, and is in its subject.
CANCELLED_AND_STORED: Final = """
SELECT 'ghost' AS kind, m.message_id, m.subject, CAST(NULL AS STRING) AS consumer_group,
       CAST(NULL AS STRING) AS database, m.sequence, m.stored_at AS at,
       CONCAT('stored ', CAST(m.stored_at AS STRING), ' as sequence ', m.sequence,
         '; it was cancelled ', CAST(c.stored_at AS STRING)) AS evidence
FROM qmq_stored m JOIN qmq_cancelled_all c ON c.message_id = m.message_id
"""

WAITING: Final = """
SELECT 'late' AS kind, o.message_id, o.subject, CAST(NULL AS STRING) AS consumer_group, o.database,
       CAST(NULL AS BIGINT) AS sequence, o.created_at AS at,
       CONCAT('row ', o.row_id, ' of ', o.database, ' is ', o.state, ' since ',
         CAST(o.created_at AS STRING), ', after ', o.attempts, ' attempts',
         COALESCE(CONCAT(': ', o.last_error), '')) AS evidence
FROM qmq_committed o
LEFT ANTI JOIN qmq_stored_all m ON m.message_id = o.message_id
LEFT ANTI JOIN qmq_scheduled d ON d.message_id = o.message_id
WHERE o.state <> 'sent' AND NOT o.is_gone AND {next_us} - unix_micros(o.created_at) > {late_us}
"""

_ALTERED: Final = """
SELECT 'altered' AS kind, m.message_id, m.subject, CAST(NULL AS STRING) AS consumer_group,
       o.database, m.sequence, m.stored_at AS at,
       CONCAT('its row has checksum ', LOWER(HEX(o.record_crc)), ', what is stored as sequence ',
         COALESCE(CAST(m.sequence AS STRING), 'to come'), ' has ', LOWER(HEX(m.record_crc)))
         AS evidence
FROM qmq_committed o JOIN {} m ON m.message_id = o.message_id
WHERE o.record_crc <> m.record_crc
"""
ALTERED: Final = _ALTERED.format("qmq_stored_all")
#: All scheduled messages, released or not.
ALTERED_SCHEDULED: Final = _ALTERED.format("qmq_scheduled")

#: For delayed messages, the released record is compared with the scheduled one.
ALTERED_RELEASE: Final = """
SELECT 'altered' AS kind, m.message_id, m.subject, CAST(NULL AS STRING) AS consumer_group,
       CAST(NULL AS STRING) AS database, m.sequence, m.stored_at AS at,
       CONCAT('scheduled with checksum ', LOWER(HEX(d.record_crc)), ', released as sequence ',
         m.sequence, ' with ', LOWER(HEX(m.record_crc))) AS evidence
FROM qmq_stored m JOIN qmq_scheduled d ON d.message_id = m.message_id
WHERE d.record_crc <> m.record_crc
"""

ALTERED_COPY: Final = """
SELECT 'altered' AS kind, message_id, MIN(subject) AS subject,
       CAST(NULL AS STRING) AS consumer_group, CAST(NULL AS STRING) AS database,
       MIN(sequence) AS sequence, MIN(stored_at) AS at,
       CONCAT('stored ', COUNT(*), ' times with ', COUNT(DISTINCT record_crc), ' contents')
         AS evidence
FROM qmq_stored
GROUP BY message_id HAVING COUNT(DISTINCT record_crc) > 1
"""

#: Records whose bytes, when read from the log, did not have the checksum in front of them.
ALTERED_CONTENT: Final = """
SELECT 'altered' AS kind, message_id, subject, CAST(NULL AS STRING) AS consumer_group,
       CAST(NULL AS STRING) AS database, sequence, stored_at AS at,
       CONCAT('its producer made checksum ', LOWER(HEX(record_crc)), ', what is stored as sequence ',
         COALESCE(CAST(sequence AS STRING), 'to come'), ' has ', LOWER(HEX(found_crc)))
         AS evidence
FROM (SELECT message_id, subject, sequence, stored_at, record_crc, found_crc FROM qmq_stored_all
      UNION ALL
      SELECT message_id, subject, NULL, stored_at, record_crc, found_crc FROM qmq_scheduled_all)
WHERE found_crc IS NOT NULL AND {stored_is_judged}
"""

#: Messages that a group has set aside, and their copies; the ticket of the last time names the copy.
_ASIDE: Final = """
WITH tickets AS (
  SELECT subject, consumer_group, EXPLODE(SEQUENCE(first_sequence, next_sequence - 1)) AS sequence,
         CAST(GET_JSON_OBJECT(action_json, '$[6]') AS BIGINT) AS ticket, action_offset, action_number
  FROM qmq_actions WHERE action = 'setaside' AND next_sequence > first_sequence
), last_ticket AS (
  SELECT subject, consumer_group, sequence,
         MAX_BY(ticket, STRUCT(action_offset, action_number)) AS ticket
  FROM tickets GROUP BY subject, consumer_group, sequence
), copies AS (
  SELECT ticket, subject, consumer_group, sequence, MIN(due_at) AS due_at,
         MIN(stored_at) FILTER (WHERE copy_sequence IS NOT NULL) AS back_at
  FROM qmq_copy_all GROUP BY ticket, subject, consumer_group, sequence
)
SELECT m.message_id, d.subject, d.consumer_group, d.sequence, d.set_aside_at AS at,
       c.ticket IS NOT NULL AS has_copy, c.due_at, c.back_at
FROM qmq_deliveries d
JOIN last_ticket t
  ON t.subject = d.subject AND t.consumer_group = d.consumer_group AND t.sequence = d.sequence
JOIN qmq_stored_all m ON m.subject = d.subject AND m.sequence = d.sequence
LEFT JOIN copies c ON c.subject = d.subject AND c.consumer_group = d.consumer_group
  AND c.sequence = d.sequence AND c.ticket = t.ticket
WHERE d.outcome = 'set aside' AND {aside_is_judged}
"""

#: A message that was set aside comes back only as its copy.
ASIDE_LOST: Final = f"""
SELECT 'lost' AS kind, message_id, subject, consumer_group, CAST(NULL AS STRING) AS database,
       sequence, at,
       CONCAT('the group set it aside ', CAST(at AS STRING), CASE
         WHEN has_copy THEN CONCAT('; its copy came back ', CAST(back_at AS STRING),
           ', and the group did not get it')
         ELSE '; the log does not have its copy' END) AS evidence
FROM ({_ASIDE}) WHERE NOT has_copy OR {{next_us}} > unix_micros(back_at)
"""
ASIDE_OVERDUE: Final = f"""
SELECT 'late' AS kind, message_id, subject, consumer_group, CAST(NULL AS STRING) AS database,
       sequence, at,
       CONCAT('the group set it aside ', CAST(at AS STRING), ' until ', CAST(due_at AS STRING),
         '; its copy has not come back') AS evidence
FROM ({_ASIDE})
WHERE has_copy AND back_at IS NULL AND {{next_us}} - unix_micros(due_at) > {{late_us}}
"""

#: A message that is for a group, which came past it and never got it. A group that has a filter may come past what
#: does not match it; what does is a finding.
SKIPPED: Final = f"""
SELECT 'skipped' AS kind, m.message_id, d.subject, d.consumer_group, CAST(NULL AS STRING) AS database,
       d.sequence, m.stored_at AS at,
       CONCAT('the group ', CASE
         WHEN d.outcome = 'skipped' THEN d.reason
         ELSE CONCAT('came past it although its tags match: ', ARRAY_JOIN(m.tags, ', ')) END,
         COALESCE(CONCAT(', ', CAST(d.settled_at AS STRING)), '')) AS evidence
FROM qmq_deliveries d
JOIN qmq_stored m ON m.subject = d.subject AND m.sequence = d.sequence
JOIN qmq_groups g ON g.subject = d.subject AND g.consumer_group = d.consumer_group
  AND d.sequence >= g.group_first AND d.sequence < g.group_next
WHERE (d.outcome = 'skipped' AND d.first_delivered_at IS NULL
       AND d.reason IN ('{NEVER_GIVEN}', '{BY_FORCE}', '{SOUGHT}'))
   OR (d.outcome = 'filtered' AND g.any_tags IS NOT NULL
       AND (SIZE(g.any_tags) = 0 OR ARRAYS_OVERLAP(m.tags, g.any_tags))
       AND SIZE(ARRAY_EXCEPT(g.all_tags, m.tags)) = 0)
"""

#: The queries that need log and outboxes alone, …
QUERIES: Final = (
    LOST,
    WAITING,
    ALTERED,
    ALTERED_SCHEDULED,
    LATE,
    DUPLICATE,
    ALTERED_COPY,
    ALTERED_RELEASE,
    OVERDUE,
    CANCELLED_AND_STORED,
    ALTERED_CONTENT,
)
#: … and those that need the action log to its end.
OF_GROUPS: Final = (ASIDE_LOST, ASIDE_OVERDUE, SKIPPED)

#: What was compared.
TOTALS: Final = """
SELECT SUM(committed) AS committed, SUM(stored) AS stored, SUM(foreign_messages) AS foreign_messages,
       SUM(expected) AS expected, SUM(delivered) AS delivered, SUM(settled) AS settled
FROM (
  SELECT COUNT(*) AS committed, 0 AS stored, 0 AS foreign_messages, 0 AS expected, 0 AS delivered,
         0 AS settled
  FROM qmq_committed
  UNION ALL
  SELECT 0, SUM(m.stored), SUM(m.stored) FILTER (WHERE known.producer IS NULL), 0, 0, 0
  FROM (SELECT producer, COUNT(*) AS stored FROM qmq_stored GROUP BY producer) m
  LEFT JOIN (SELECT DISTINCT producer FROM qmq_outbox_all) known ON known.producer = m.producer
  UNION ALL
  SELECT 0, 0, 0, COUNT(*), 0, 0
  FROM qmq_stored_all m JOIN qmq_groups g
    ON g.subject = m.subject AND m.sequence >= g.group_first AND m.sequence < g.group_next
  UNION ALL
  SELECT 0, 0, 0, 0, COUNT(first_delivered_at), COUNT(settled_at) FROM qmq_deliveries
)
"""
